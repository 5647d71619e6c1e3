"""From prompts to an exported drafter, by the command."""

import json

import helpers_tiny
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdec
from jaxdec.cli import main


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main([str(x) for x in arguments])
    captured = capsys.readouterr()
    return end.value.code, captured.out, captured.err


def test_from_prompts_to_an_exported_drafter(tmp_path, capsys):
    model = helpers_tiny.write_model(tmp_path / "model")
    target = ("--model", model, "--dtype", "float32", "--json")
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"id": f"p{i}", "prompt": f"say {i}"} for i in range(6)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    store, trained = tmp_path / "answers", tmp_path / "run"
    options = ("--batch-size", 3, "--max-new-tokens", 8, "--validation", 2)
    code, out, err = run(
        capsys, "regenerate", prompts, "--out", store, *options, *target
    )
    assert code == 0, err
    facts = json.loads(out)
    assert facts["records"] == 6 and facts["validation"] == 2
    (tmp_path / "recipe.json").write_text(json.dumps({"steps": 3, "batch_size": 2}))
    train = ("train", "draft", "--data", store, "--out", trained, *target)
    train += ("--recipe", tmp_path / "recipe.json", "--set", "from_layers=[1]")
    code, out, err = run(capsys, *train, "--speed")
    assert code == 0, err
    facts = json.loads(out)
    assert facts["steps"] == 3 and facts["validation"]["tokens_per_step"] >= 1
    assert 0 < facts["speed"]["part_of_plain"] and facts["speed"]["gflops"] > 0
    lm = jaxdec.load(model, dtype="float32")
    drafter = jaxdec.load_drafter(facts["drafter"], lm)
    assert drafter.card["recipe"]["from_layers"] == [1]
    again = ("train", "draft", "--data", store, "--out", tmp_path / "again", *target)
    again += ("--set", "steps=9", "--set", "batch_size=2", "--set", "from_layers=[1]")
    again += ("--start", facts["drafter"], "--until", 1)
    code, out, err = run(capsys, *again)
    assert code == 0, err
    card = jaxdec.load_drafter(json.loads(out)["drafter"], lm).card
    assert card["steps"] == 1 and card["recipe"]["steps"] == 9
    (earlier,) = card["earlier"]
    assert earlier["steps"] == 3 and earlier["recipe"] == drafter.card["recipe"]
    before = json.loads((trained / "log.jsonl").read_text().splitlines()[-1])
    after = json.loads((tmp_path / "again" / "log.jsonl").read_text().splitlines()[0])
    assert after["validation"] == before["validation"]
    # A drafter may go on with more of the target's tokens.
    kind, numbers = "mtp", ("--set", "steps=1", "--set", "batch_size=2")
    start: tuple = ()
    for size in (20, 30):
        folder = tmp_path / f"mtp{size}"
        few = ("train", kind, "--data", store, "--out", folder, *target, *numbers)
        code, out, err = run(capsys, *few, "--set", f"vocabulary={size}", *start)
        assert code == 0, err
        small = jaxdec.load_drafter(json.loads(out)["drafter"], lm)
        assert len(small.own["vocabulary"]["target_ids"]) == size
        assert small.own["head"].shape[0] == size
        start = ("--start", folder / "drafter")
    assert small.card["earlier"][0]["recipe"]["vocabulary"] == 20
    # So may blocks, whose Markov head has a column for each, and with longer ones; a
    # DFlash may begin with the layers of a DSpark.
    start, blocks = (), {}
    for name, size, length in (
        ("dspark", 20, 2),
        ("dspark", 30, 3),
        ("dflash", 999, 4),
        ("dspark", 40, 2),
    ):
        folder = tmp_path / f"{name}{size}"
        few = ("train", name, "--data", store, "--out", folder, *target, *numbers)
        few += ("--set", "learning_rate=0", "--set", "num_anchors=2")
        few += ("--set", f"vocabulary={size}", "--set", f"block_size={length}")
        code, out, err = run(capsys, *few, *start)
        assert code == 0, err
        blocks[size] = jaxdec.load_drafter(json.loads(out)["drafter"], lm)
        layers = blocks[size].config.layers
        assert layers.num_kv_heads == layers.num_heads > lm.config.num_kv_heads
        start = ("--start", folder / "drafter")
        if size == 20:
            # It says nothing at first.
            quiet = blocks[size]
            markov = quiet.own["markov"]
            loud = np.random.default_rng(0).normal(size=markov["out"]["weight"].shape)
            loud = {"weight": jnp.asarray(loud, jnp.float32)}
            quiet.own["markov"] = markov | {"out": loud}
            jaxdec.save_drafter(folder / "drafter", quiet, lm, overwrite=True)
    ids = [blocks[s].own["vocabulary"]["target_ids"].tolist() for s in (20, 30)]
    old, new = (np.asarray(blocks[s].own["markov"]["out"]["weight"]) for s in (20, 30))
    assert set(ids[0]) < set(ids[1])
    for column, token in enumerate(ids[1]):
        found = old[:, ids[0].index(token)] if token in ids[0] else 0 * old[:, 0]
        np.testing.assert_array_equal(new[:, column], found)
    assert "markov" not in blocks[999].own and "vocabulary" not in blocks[999].own
    assert not np.any(blocks[40].own["markov"]["out"]["weight"])  # A new one.
    for size in (999, 40):
        own = [blocks[s].own["layers"] for s in (30, size)]
        jax.tree.map(np.testing.assert_array_equal, *own)
    # But not with a head that is none of the target's: it would not be kept.
    small.own["head"] = small.own["head"] + 1
    jaxdec.save_drafter(tmp_path / "loud", small, lm)
    few = ("train", kind, "--data", store, "--out", tmp_path / "other", *target)
    code, out, err = run(capsys, *few, *numbers, "--start", tmp_path / "loud")
    assert code == 1 and "output head of its own" in err, err
    code, out, err = run(capsys, "inspect", facts["drafter"], "--json")
    assert code == 0 and json.loads(out)["card"]["steps"] == 3, err
    exported = tmp_path / "exported"
    code, out, err = run(capsys, "export", facts["drafter"], "--out", exported, *target)
    assert code == 0 and json.loads(out)["format"] == "model", err
    small = jaxdec.load(exported, dtype="float32")
    assert small.config.num_layers == 1
    np.testing.assert_array_equal(
        small.params["norm"]["scale"], drafter.own["norm"]["scale"]
    )
    # What cannot be done is said in one line.
    for arguments, message in (
        (("train", "mtp", *train[2:]), "no from_layers"),
        ((*train, "--set", "steps"), "--set takes name=value"),
        ((*train, "--set", "kind=mtp"), "use jaxdec train mtp"),
        ((*train, "--devices", 9), "there are 1"),
        (("calibrate", facts["drafter"], "--out", exported, *target), "no confidence"),
        (("export", facts["drafter"], "--out", exported, *target), "exists"),
    ):
        code, out, err = run(capsys, *arguments)
        assert code == 1 and message in err and "Traceback" not in err, err
