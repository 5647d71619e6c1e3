"""The command: what it prints, where, and with which exit status."""

import importlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
from helpers_tiny import CONFIG, write_model
from safetensors.numpy import save_file

import jaxdec
from jaxdec import console
from jaxdec.certificate import certify as conclude
from jaxdec.cli import app
from jaxdec.io import hub
from jaxdec.report import plots

CASES = pathlib.Path(__file__).parent / "golden" / "cases"
compare_module = importlib.import_module("jaxdec.compare")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs a command line in this process: exit status, stdout, stderr."""
    monkeypatch.setattr(console, "prepare_jax", lambda: None)
    monkeypatch.setattr(console, "QUIET_S", 1e9)
    monkeypatch.setenv("JAXDEC_CACHE", str(tmp_path / "cache"))

    def call(*arguments):
        status = console.run(app, arguments)
        out, err = capsys.readouterr()
        return status, out, err

    return call


def command(*arguments, **options):
    """Runs a command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "jaxdec", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        **options,
    )


def test_help_teaches(run):
    for arguments in ([], ["--help"], ["-h"]):
        status, out, err = run(*arguments)
        assert status == 0 and err == ""
        for word in (
            "generate",
            "show",
            "compare",
            "plan",
            "inspect",
            "models",
            "A worked",
        ):
            assert word in out
    for name in ("generate", "compare", "plan", "inspect", "models"):
        status, out, _ = run(name, "--help")
        assert status == 0 and "--json" in out
    assert run("--version")[:2] == (0, f"jaxdec {jaxdec.__version__}\n")


def test_compare_takes_all_that_a_model_has(run, model, monkeypatch, tmp_path):
    """Without names: those that need nothing, and what comes with the model."""
    found = {}

    def stop(lm, prompts, names, **options):
        found.update(options, names=names)
        raise ValueError("enough")

    def add(lm):
        lm.strategies["eagle3"] = jaxdec.lookup()

    monkeypatch.setattr(compare_module, "compare", stop)
    monkeypatch.setattr("jaxdec.lm.add_shipped", add)
    words = ["compare", "--model", model, "--out", str(tmp_path / "out")]
    assert run(*words)[2] == "jaxdec: enough\n"
    three = ["greedy", "sample", "lookup"]
    assert found["names"] == [*three, "eagle3"]
    run(*words, "--draft-model", model)
    assert found["names"] == [*three, "draft_model", "eagle3"]
    monkeypatch.setattr("jaxdec.lm.add_shipped", lambda lm: None)
    run(*words)
    assert found["names"] == [*three, "self_draft"]
    run(*words, "--strategies", "greedy,eagle3")
    assert found["names"] == ["greedy", "eagle3"]
    assert found["certify"] is True
    run(*words, "--no-certify")
    assert found["certify"] is False


def test_a_smaller_model_drafts(run, model):
    words = ["generate", "abcabc", "--model", model, "--dtype", "float32", "--json"]
    words += ["--max-new-tokens", "8"]
    _, plain, _ = run(*words)
    more = ["--strategy", "draft_model", "--draft-model", model]
    status, out, _ = run(*words, *more)
    assert status == 0
    found = json.loads(out)
    assert found["outputs"] == json.loads(plain)["outputs"]
    # It is the target itself, so it is always right.
    evidence = found["evidence"]
    assert evidence["acceptance_rate"] == 1.0 and evidence["drafter_param_bytes"] > 0


def is_one_line(err):
    return err.startswith("jaxdec: ") and err.count("\n") == 1 and err.endswith("\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", ""], "prompt is empty"),
        (["generate", " \n"], "prompt is empty"),
        (["generate", "x", "--strategy", "magic"], "unknown strategy 'magic'"),
        (["generate", "x", "--strategy", "magic"], "with --drafter PATH, mtp, eagle"),
        (["generate", "x", "--drafter", "nowhere"], "no drafter 'nowhere'"),
        (["generate", "x", "--draft-model", "m"], "and greedy was asked for"),
        (["generate", "x", "--temperature", "-1"], "temperature"),
        (["generate", "x", "--temperature", "nan"], "temperature"),
        (["generate", "x", "--top-p", "2"], "top_p"),
        (["generate", "x", "--draft-length", "3"], "drafts nothing"),
        (["generate", "x", "--strategy", "lookup", "--draft-length", "0"], "length"),
        (["generate", "x", "--dtype", "float16"], "float16"),
        (["generate", "x", "--model", "missing.gguf"], "missing.gguf"),
        (["compare", "--strategies", "greedy,magic"], "unknown strategy 'magic'"),
        (["compare", "--temperature", "nan"], "temperature"),
        (["compare", "--strategies", ""], "--strategies has an empty name, got ''"),
        (["compare", "--strategies", ","], "--strategies has an empty name"),
        (["compare", "--strategies", "greedy,,lookup"], "has an empty name"),
        (["compare", "--prompts", "missing.txt"], "'missing.txt' cannot be read: no"),
        (["compare", "--prompts", "."], "'.' cannot be read: is a directory"),
        (["compare", "--out", "/dev/null/x"], "nothing can be written to the folder"),
        (["inspect", "missing"], "no model or drafter 'missing'"),
        (["inspect", ""], "the name of the model or drafter is empty"),
    ],
)
def test_errors_are_one_line(run, arguments, words):
    status, out, err = run(*arguments)
    assert status == 1 and out == ""
    assert is_one_line(err) and words in err, err


def test_a_draft_model_must_come_from_somewhere(run, monkeypatch, tmp_path):
    model = str(write_model(tmp_path / "model"))
    asked = ["generate", "x", "--model", model, "--strategy", "draft_model"]
    status, out, err = run(*asked)  # One that is shipped is for another model.
    assert status == 1 and out == "" and is_one_line(err)
    assert "its name gives none; pass" in err and "--draft-model MODEL" in err
    monkeypatch.setattr("jaxdec.shipped.checkpoints", lambda: tmp_path / "nowhere")
    status, out, err = run(*asked)
    assert status == 1 and out == "" and is_one_line(err)
    assert "needs a model: add --draft-" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate"],
        ["nonsense"],
        ["generate", "x", "--seed", "y"],
        ["compare", "--no"],
        ["compare", "--limit", "-1"],
    ],
)
def test_usage_errors(run, arguments):
    status, out, err = run(*arguments)
    assert status == 2 and out == "" and is_one_line(err)


def test_damaged_checkpoints(run, tmp_path, monkeypatch):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(range(200)))
    for arguments in (
        ["inspect", str(damaged)],
        ["generate", "x", "--model", str(damaged)],
    ):
        status, out, err = run(*arguments)
        assert status == 1 and out == ""
        assert "damaged.gguf" in err and "Traceback" not in err
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    for name in (str(empty), "."):
        status, _, err = run("inspect", name)
        assert status == 1 and f"the folder {empty} has no config.json" in err


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "config.json").write_text("{"), "is not valid JSON"),
        (lambda f: (f / "model.safetensors").unlink(), "holds neither"),
        (lambda f: os.truncate(f / "model.safetensors", 3000), "cannot be read"),
        (lambda f: os.truncate(f / "model.safetensors", 0), "cannot be read"),
    ],
)
@pytest.mark.parametrize("case", ["drafters/eagle3", "drafters/zlab_dflash", "model"])
def test_damage_is_told_once(run, model, tmp_path, case, damage, words):
    """Not as a model's and as a drafter's: the folder is one of them."""
    folder = tmp_path / "copy"
    # What a golden case expects lies beside its weights, as tensors too.
    ignored = shutil.ignore_patterns("expected*")
    shutil.copytree(model if case == "model" else CASES / case, folder, ignore=ignored)
    damage(folder)
    status, out, err = run("inspect", str(folder))
    assert status == 1 and out == "" and is_one_line(err) and words in err, err


def test_a_drafter_of_no_known_format_is_told_as_a_drafter(run, tmp_path):
    config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"x": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    status, _, err = run("inspect", str(tmp_path))
    assert status == 1 and is_one_line(err) and "is no drafter of a known format" in err


def test_bad_values_after_loading(run, model):
    tiny = ["--model", model, "--dtype", "float32"]
    for more, words in (
        (["--max-new-tokens", "-1"], "max_new_tokens"),
        (["--max-new-tokens", "5000"], "positions"),
        (["--seed", "-1"], "seed"),
        (["--chat"], "chat"),
        (["--stop", ""], "stop strings"),
    ):
        status, out, err = run("generate", "x", *tiny, *more)
        assert status == 1 and out == "" and words in err, err


def test_interrupt_is_quiet(run, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(console, "prepare_jax", interrupt)
    assert run("generate", "x") == (130, "", "")


def test_generate_json(run, model):
    status, out, err = run(
        *("generate", "abab", "--model", model, "--dtype", "float32", "--json"),
        *("--max-new-tokens", "12", "--strategy", "lookup", "--draft-length", "2"),
    )
    assert status == 0 and err == ""
    record = json.loads(out)
    assert set(record) == {"outputs", "evidence"}
    (item,) = record["outputs"]
    assert set(item) == {"text", "tokens", "finish_reason"}
    lm = jaxdec.load(model, dtype="float32")
    plain = jaxdec.generate(lm, "abab", max_new_tokens=12)
    assert item["tokens"] == list(plain[0].tokens) and item["text"] == plain[0].text
    assert record["evidence"]["num_emitted"] == 12
    assert record["evidence"]["sampling"]["draft_length"] == 2


def test_nothing_to_generate(run, model):
    tiny = ["--model", model, "--dtype", "float32", "--max-new-tokens", "0"]
    status, out, _ = run("generate", "x", *tiny, "--json")
    assert status == 0 and json.loads(out)["evidence"] == {}
    assert run("generate", "x", *tiny)[:2] == (0, "\n")


def test_generate_streams(run, model, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("abab"))
    tiny = ["--model", model, "--dtype", "float32", "--max-new-tokens", "8"]
    status, out, err = run("generate", "-", *tiny)
    lm = jaxdec.load(model, dtype="float32")
    assert status == 0
    assert out == jaxdec.generate(lm, "abab", max_new_tokens=8)[0].text + "\n"
    assert err.startswith("[greedy] 8 tokens in 8 steps") and err.count("\n") == 1


def test_compare(run, model, monkeypatch, tmp_path):
    def passes(lm, prompts, strategy, **options):
        return conclude(
            strategy=strategy.name,
            mode="greedy",
            dtype=lm.dtype,
            row_class="any",
            tolerance=0.0,
            num_positions=8,
        )

    monkeypatch.setattr(compare_module, "certify", passes)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("ab ab ab\nsecond\n")
    options = [
        *("--model", model, "--dtype", "float32", "--max-new-tokens", "8"),
        *("--strategies", "lookup", "--prompts", str(prompts), "--limit", "1"),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(plots, "can_draw", lambda: False)
        status, out, err = run("compare", *options, "--out", str(tmp_path / "a"))
    assert status == 0
    assert "no PNG files: matplotlib is not installed" in err
    assert f"open {tmp_path / 'a' / 'report.html'} in a browser" in err
    assert "<!doctype html>" in (tmp_path / "a" / "report.html").read_text()
    assert not list((tmp_path / "a").glob("*.png"))
    assert "lookup" in out and "lossless" in out and "TPOT" in out
    assert "greedy" in out and "- Use " in out
    assert str(tmp_path / "a" / "report.json") in err
    saved = json.loads((tmp_path / "a" / "report.json").read_text())
    assert set(saved) >= {"model", "settings", "strategies", "certificates"}
    assert (tmp_path / "a" / "report.md").exists()
    status, out, err = run("compare", *options, "--out", str(tmp_path / "b"), "--json")
    assert status == 0 and err == ""
    assert json.loads(out) == json.loads((tmp_path / "b/report.json").read_text())
    assert len(list((tmp_path / "b").glob("*.png"))) == 5
    (tmp_path / "file").write_text("")
    status, out, err = run("compare", *options, "--out", str(tmp_path / "file"))
    assert status == 1 and out == "" and is_one_line(err)


def test_inspect(run, model):
    status, out, _ = run("inspect", model, "--json")
    facts = json.loads(out)
    assert status == 0
    assert facts["format"] == "safetensors" and facts["family"] == "llama"
    assert facts["layers"] == 2 and facts["vocabulary"] == CONFIG["vocab_size"]
    assert facts["tied embeddings"] is True and facts["chat template"] is False
    assert facts["stop tokens"] == ["256 <|end|>"]
    lm = jaxdec.load(model, dtype="float32")
    assert facts["parameters"] == lm.num_params and facts["hash"] == lm.content_hash
    status, out, _ = run("inspect", model)
    assert status == 0 and f"{lm.num_params:,}" in out
    assert "rotary, theta 10,000" in out and "all earlier tokens" in out
    assert "MTP" not in out and "None" not in out
    # Without a tokenizer there is no text; that it lacks is told.
    bare = str(CASES / "targets" / "gpt2")
    status, out, _ = run("inspect", bare)
    assert status == 0
    words = [line.split() for line in out.splitlines()]
    assert ["positions", "learned"] in words and ["tokenizer", "none"] in words


def test_inspect_of_a_drafter_with_its_target(run):
    folder, target = CASES / "drafters" / "eagle3", CASES / "targets" / "llama_gqa"
    status, out, _ = run("inspect", str(folder), "--target", str(target))
    assert status == 0 and out.rstrip().endswith(f"\nfits {target}")
    assert "eagle3, eagle3_tree, first_of, first_of_tree" in out
    status, out, _ = run("inspect", str(folder))
    assert status == 0 and "fits" not in out
    assert "layers 2, N // 2 and N - 3 of a target of N layers" in out
    wrong = CASES / "targets" / "qwen2"
    status, out, err = run("inspect", str(folder), "--target", str(wrong))
    assert status == 1 and out == "" and "target" in err


def test_the_built_in_model_goes_by_its_better_known_name(run, tmp_path):
    stored = "Smollm2 135M 8k Lc100K Mix1 Ep2"
    folder = tmp_path / "cache" / "converted" / "x-bfloat16"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"")
    record = {"metadata": {"general.name": stored}, "config": {"family": "llama"}}
    record["content_hash"] = hub._SHA256
    (folder / "checkpoint.json").write_text(json.dumps(record))
    status, out, _ = run("models")
    assert status == 0 and "SmolLM2-135M-Instruct" in out
    assert f"(file: {stored})" in out


def test_models(run, tmp_path):
    status, out, _ = run("models", "--json")
    assert status == 0
    assert json.loads(out) == {
        "cache": str(tmp_path / "cache"),
        "built_in": [{"name": "smollm2", "is_fetched": False}],
        "converted": [],
    }
    status, out, _ = run("models")
    assert status == 0 and "smollm2" in out and "fetched when used" in out


def test_process_is_quiet(model, tmp_path):
    """A real start: no noise of an absent accelerator, compilations kept."""
    ours = ("JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR")
    env = {k: v for k, v in os.environ.items() if k not in ours}
    env["JAXDEC_CACHE"] = str(tmp_path)
    tiny = ["--model", model, "--dtype", "float32", "--max-new-tokens", "2"]
    done = command("generate", "abab", *tiny, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("[greedy]")
    assert (tmp_path / "compiled").is_dir()


@pytest.mark.real
def test_capital_of_france():
    question = "What is the capital of France?"
    options = ["--strategy", "greedy", "--dtype", "float32", "--json"]
    done = command("generate", question, *options)
    assert done.returncode == 0, done.stderr
    (item,) = json.loads(done.stdout)["outputs"]
    assert item["tokens"] == [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert item["text"] == "The capital of France is Paris."
    assert item["finish_reason"] == "stop_token"
