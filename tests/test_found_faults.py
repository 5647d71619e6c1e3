"""Faults that were found by trying to break the library, each with the right value."""

import dataclasses
import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import test_trained
from test_trained import OPTIONS, PROMPTS, loaded

import jaxdec
from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.drafters.read import open_drafter, read_drafter


def test_nothing_compiles_outside_the_two_programs():
    """B48: another number of steps is a value: not even a slice compiles for it."""
    lm, _, _ = loaded("eagle3")
    jaxdec.generate(lm, PROMPTS, max_new_tokens=20, stop_tokens=[])
    seconds = []

    def listen(name, value, **_):
        if name == "/jax/core/compile/backend_compile_duration":
            seconds.append(value)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jaxdec.generate(lm, PROMPTS, max_new_tokens=21, stop_tokens=[])
        jaxdec.generate(lm, PROMPTS, max_new_tokens=5, stop_tokens=[])
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not seconds


def test_a_limited_mixture_takes_another_draft_length():
    """The widths of its forwards are those of the new length."""
    lm, spark, _ = loaded("dspark")
    mixed = jaxdec.first_of(
        jaxdec.lookup(6, min_ngram=3), jaxdec.dspark(spark, threshold=0.3)
    )
    assert mixed.with_length(3).widths[-1] == 3
    out = jaxdec.generate(lm, PROMPTS, strategy=mixed, draft_length=3, **OPTIONS)
    assert [o.tokens for o in out] == test_trained.plain("dspark", 0.0)


@pytest.mark.parametrize("rates", [[-1.0] * 30, [float("nan")] * 30])
def test_rates_that_are_none_are_refused(rates):
    _, spark, _ = loaded("dspark")
    with pytest.raises(ValueError):
        jaxdec.dspark(spark, steps_per_second=rates)


def test_a_draft_length_of_another_type_is_one_clear_error():
    _, spark, _ = loaded("dspark")
    limited = jaxdec.dspark(spark, threshold=0.3)
    for config in (limited, jaxdec.first_of(jaxdec.lookup(), limited)):
        with pytest.raises(ValueError, match="draft length must be a whole number"):
            config.with_length("3")


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_weights_of_whole_numbers_are_refused(kind):
    """Read as floats they would be noise."""
    lm, _, _ = loaded(kind)
    stored = open_drafter(test_trained.CASES / test_trained.DRAFTERS[kind])
    tensors = {name: np.asarray(stored.tensors[name]) for name in stored.tensors}
    name = next(n for n, x in tensors.items() if x.dtype == np.float32 and x.ndim == 2)
    tensors[name] = tensors[name].view(np.int32)
    damaged = dataclasses.replace(stored, tensors=tensors)
    with pytest.raises(CheckpointError, match=name.split(".")[-2]):
        read_drafter(damaged, lm.config)


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("targets/qwen3", "architectures", 3.7),
        ("targets/qwen3", "model_type", []),
        ("targets/qwen3", "eos_token_id", "x"),
        ("targets/qwen3", "hidden_act", {}),
        ("targets/qwen3", "rms_norm_eps", -1),
        ("targets/qwen3", "rope_theta", 0),
        ("drafters/eagle3", "architectures", 3.7),
        ("drafters/eagle3", "rope_theta", -1),
        ("drafters/deepspec_dspark_vanilla", "markov_rank", "x"),
        ("drafters/deepspec_dspark_vanilla", "architectures", -1),
        ("drafters/spec_dspark_anchor", "speculators_config", 7),
        ("drafters/spec_dspark_anchor", "transformer_layer_config", []),
    ],
)
def test_a_value_of_the_wrong_type_is_an_error_of_the_checkpoint(
    tmp_path, case, key, value
):
    folder = tmp_path / "damaged"
    shutil.copytree(test_trained.CASES / case, folder)
    settings = json.loads((folder / "config.json").read_text())
    settings[key] = value
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError):
        if case.startswith("targets"):
            jaxdec.load(folder, dtype="float32")
        else:
            read_drafter(open_drafter(folder), None)


def test_modules_that_make_no_sense_leave_the_target_usable(tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(test_trained.CASES / "mtp" / "mimo", folder)
    settings = json.loads((folder / "config.json").read_text())
    settings["num_nextn_predict_layers"] = "x"
    (folder / "config.json").write_text(json.dumps(settings))
    lm = jaxdec.load(folder, dtype="float32")
    assert "mtp" not in lm.strategies and "makes no sense" in lm.notes["mtp"]


def test_a_topology_of_no_chips_is_refused():
    """libtpu divides by it: SIGFPE ends the process. In a process of its own."""
    program = (
        "from jaxdec.planning.chips import find_topology; find_topology('v5e:0x0')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert done.returncode == 1 and b"ValueError" in done.stderr


def test_a_saved_model_that_is_not_finite_is_refused(tmp_path):
    """As `load` promises; it asks `check_finite` of all files but those of orbax."""
    lm, _, _ = loaded("eagle3")
    params = jax.tree.map(lambda x: x, lm.params)
    params["embedding"] = params["embedding"].at[3].set(float("nan"))
    jaxdec.LM(config=lm.config, params=params).save(tmp_path / "model")
    with pytest.raises(CheckpointError, match="NaN"):
        jaxdec.load(tmp_path / "model", dtype="float32")
