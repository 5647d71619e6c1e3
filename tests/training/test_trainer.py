"""Every kind of drafter learns; and a run is a function of its recipe and its data.

All runs are on the tiny target of `tiny.py`. What is compiled for a kind is shared.
"""

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxdec
from jaxdec.io.checkpoint import CheckpointError
from jaxdec.loaded_drafter import save_drafter
from jaxdec.training import kinds
from jaxdec.training.features import keep_features
from jaxdec.training.session import as_drafter
from jaxdec.training.trainer import KEPT, Run, make_programs

HERE = Path(__file__).parent


@functools.cache
def store():
    return tiny.write_answers(tempfile.mkdtemp(), 320)


@functools.cache
def made(kind):
    """The objective of a kind, and its compiled programs."""
    recipe = tiny.RECIPES[kind]
    objective = kinds.make_objective(recipe, tiny.target(), store())
    if kind == "draft":
        # The tiny target's own layers are good from the start: spoil them.
        good = objective.init

        def spoilt(key):
            own = good(key)
            noise = jax.random.normal(key, own["norm"]["scale"].shape)
            return own | {"norm": {"scale": noise}}

        objective = objective._replace(init=spoilt)
    return objective, make_programs(objective, recipe, "float32")


def begin(kind, folder, **changes):
    recipe = tiny.RECIPES[kind]
    objective, programs = made(kind)
    if changes.pop("fresh", False):
        programs = None
    return Run(
        objective,
        dataclasses.replace(recipe, **changes),
        store(),
        folder,
        dtype="float32",
        target="tiny",
        programs=programs,
    )


def losses(run):
    return [line["loss"] for line in run.log if "loss" in line]


def test_a_recipe_may_learn_from_prompts_too(tmp_path):
    for asked in (False, True):
        run = begin("dspark", tmp_path / str(asked), with_prompts=asked)
        first = run.host_batch(next(run.order.from_step(0)))
        assert (np.asarray(first.prompt_length) < tiny.PROMPT).all() == asked
        kept = run.host_batch(run.checked.once()[0])
        assert (np.asarray(kept.prompt_length) == tiny.PROMPT).all()


@pytest.mark.parametrize("kind", tiny.RECIPES)
def test_a_drafter_learns_and_then_drafts(kind, tmp_path):
    found = begin(kind, tmp_path).train()
    before, *_, after = [x["validation"] for x in found.log if "validation" in x]
    assert before["acceptance"] <= 0.1
    assert after["acceptance"] >= 0.5
    lm, objective = tiny.target(), made(kind)[0]
    drafter = as_drafter(objective, found.own, lm)
    save_drafter(tmp_path / "drafter", drafter, lm, card={"steps": found.step})
    loaded = jaxdec.load_drafter(tmp_path / "drafter", lm)
    assert loaded.kind == {"draft": "draft_model"}.get(kind, kind)
    assert loaded.card["steps"] == found.step
    jax.tree.map(np.testing.assert_array_equal, loaded.own, drafter.own)
    if kind != "eagle3":
        return
    # Decoding takes as many steps as validation says, and the target's tokens stay.
    answers = store()
    kept = np.flatnonzero(answers.is_validation)[:8]
    prompts = [answers.tokens(i)[: tiny.PROMPT].tolist() for i in kept]
    lengths = (answers.length - answers.prompt_length)[kept].tolist()
    outputs = jaxdec.generate(
        lm,
        prompts,
        strategy=jaxdec.trained(loaded, length=objective.draft_length),
        max_new_tokens=lengths,
    )
    for output, i in zip(outputs, kept, strict=True):
        answer = answers.tokens(i)[answers.prompt_length[i] :]
        assert list(output.tokens) == answer.tolist()
    few = begin(kind, tmp_path)
    few.checked = dataclasses.replace(few.checked, records=kept)
    expected = few.validate()["validation"]["tokens_per_step"]
    info = outputs.run.info
    steps = int(np.sum(info.is_live))
    assert sum(lengths) / steps == pytest.approx(expected, abs=1e-3)


def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path):
    whole = begin("dspark", tmp_path / "whole", steps=9, save_every=2)
    expected = whole.train()
    killed = begin("dspark", tmp_path / "killed", steps=9, save_every=2)
    killed.train(until=5)  # The last checkpoint is of step 4.
    with open(tmp_path / "killed" / "log.jsonl", "a") as file:
        file.write('{"step": 5, "loss": 1.')
    again = begin("dspark", tmp_path / "killed", steps=9, save_every=2)
    assert again.step == 4
    found = again.train()
    assert losses(found) == losses(expected) and len(losses(found)) == 9
    jax.tree.map(np.testing.assert_array_equal, found.own, expected.own)
    lines = (tmp_path / "killed" / "log.jsonl").read_text().splitlines()
    assert [json.loads(x).get("loss") for x in lines if "loss" in x] == losses(found)
    assert len(list((tmp_path / "killed" / "checkpoints").iterdir())) == KEPT


def test_two_runs_with_one_seed_agree_and_another_seed_does_not(tmp_path):
    runs = [
        losses(begin("dspark", tmp_path / str(i), seed=seed).train(until=3))
        for i, seed in enumerate((0, 0, 1))
    ]
    assert runs[0] == runs[1] != runs[2]


def test_a_run_does_not_go_on_with_another_recipe(tmp_path):
    begin("draft", tmp_path, save_every=1).train(until=1)
    with pytest.raises(CheckpointError, match="another recipe"):
        begin("draft", tmp_path, save_every=1, learning_rate=1e-3)


def test_a_checkpoint_that_was_not_finished_is_not_one(tmp_path):
    run = begin("draft", tmp_path, save_every=1)
    run.train(until=2)
    unfinished = tmp_path / "checkpoints" / "00000009.orbax-checkpoint-tmp-1"
    shutil.copytree(tmp_path / "checkpoints" / "00000002", unfinished)
    assert begin("draft", tmp_path, save_every=1).step == 2


def test_kept_features_train_like_computed_ones(tmp_path):
    lm, (objective, programs) = tiny.target(), made("eagle3")
    taps = objective.features.kept
    kept = keep_features(tmp_path / "features", lm, store(), taps, batch_size=8)
    again = keep_features(tmp_path / "features", lm, store(), taps)  # Reads the file.
    np.testing.assert_array_equal(kept(5), again(5))
    assert kept(5).shape == (store().length[5], len(taps), 64)
    fewer = keep_features(tmp_path / "features", lm, store(), (taps[1],))
    np.testing.assert_array_equal(fewer(5), kept(5)[:, [1, len(taps) - 1]])
    keep_features(tmp_path / "few", lm, store(), (taps[1],))
    with pytest.raises(CheckpointError, match="other kept"):
        keep_features(tmp_path / "few", lm, store(), taps)
    runs = []
    for name, features in (("on", kept), ("off", None)):
        run = begin("eagle3", tmp_path / name)
        run.features = features
        runs.append(losses(run.train(until=2)))
    np.testing.assert_allclose(*runs, rtol=1e-2)  # Kept in bfloat16.
    assert runs[0] != runs[1]
    del programs


def test_one_and_four_devices_agree():
    """In a process of its own, which has four devices."""
    done = subprocess.run(
        [sys.executable, str(HERE / "mesh_training.py")],
        env={
            **os.environ,
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4 "
            "--xla_backend_optimization_level=0",
            "PYTHONPATH": f"{HERE.parent.parent}:{HERE.parent}",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for kind, (one, four) in found.items():
        np.testing.assert_allclose(four, one, rtol=2e-5, err_msg=kind)
        assert len(set(one)) == len(one) == 3
    assert jnp.isfinite(jnp.asarray(list(found.values()))).all()
