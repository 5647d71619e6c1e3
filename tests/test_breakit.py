"""Faults found by attack; each test states the right value and fails on main."""

import dataclasses
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
    """B48: another number of steps is a value; today 8 eager slices compile for it."""
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
    """`FirstOfConfig.with_length` leaves the widths of the old length."""
    lm, spark, _ = loaded("dspark")
    mixed = jaxdec.first_of(
        jaxdec.lookup(6, min_ngram=3), jaxdec.dspark(spark, threshold=0.3)
    )
    assert mixed.with_length(3).widths[-1] == 3
    out = jaxdec.generate(lm, PROMPTS, strategy=mixed, draft_length=3, **OPTIONS)
    assert [o.tokens for o in out] == test_trained.plain("dspark", 0.0)


@pytest.mark.parametrize("rates", [[-1.0] * 30, [float("nan")] * 30, "abc"])
def test_rates_that_are_none_are_refused(rates):
    _, spark, _ = loaded("dspark")
    with pytest.raises(ValueError):
        jaxdec.dspark(spark, steps_per_second=rates)


def test_a_draft_length_of_another_type_is_one_clear_error():
    lm, spark, _ = loaded("dspark")
    with pytest.raises(ValueError, match="draft length must be a whole number"):
        jaxdec.generate(
            lm,
            PROMPTS,
            strategy=jaxdec.dspark(spark, threshold=0.3),
            draft_length="3",
            **OPTIONS,
        )


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_weights_of_whole_numbers_are_refused(kind):
    """EAGLE's reader refuses them by name; that of blocks takes them as they are."""
    lm, _, _ = loaded(kind)
    stored = open_drafter(test_trained.CASES / test_trained.DRAFTERS[kind])
    tensors = {name: np.asarray(stored.tensors[name]) for name in stored.tensors}
    name = next(n for n, x in tensors.items() if x.dtype == np.float32 and x.ndim == 2)
    tensors[name] = tensors[name].view(np.int32)
    damaged = dataclasses.replace(stored, tensors=tensors)
    with pytest.raises(CheckpointError, match=name.split(".")[-2]):
        read_drafter(damaged, lm.config)


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
