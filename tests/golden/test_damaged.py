"""Damaged drafters: every tensor of every format, removed, renamed, broken.

Nothing loads partly: an error names the tensor as the file does. What a format may
leave out (the target's own tables, one of two maps of the same vocabulary) is known.
"""

import dataclasses
import functools

import numpy as np
import pytest

from jaxdec.io.cache import open_checkpoint
from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.drafters.look import look
from jaxdec.io.drafters.read import open_drafter, read_drafter
from jaxdec.report.inspection import inspect, rows

MAY_LACK = ("d2t", "t2d", "embed_tokens.weight", "lm_head.weight")
"""Of which any may be absent where the target, or another of them, says the same."""
TOGETHER = {"d2t": "t2d", "t2d": "d2t"}


@functools.cache
def stored(case):
    found = open_drafter(case.folder)
    tensors = {name: np.asarray(found.tensors[name]) for name in found.tensors}
    return dataclasses.replace(found, tensors=tensors)


@functools.cache
def target(case):
    return open_checkpoint(case.target).config


def read(case, tensors):
    return read_drafter(
        dataclasses.replace(stored(case), tensors=tensors), target(case)
    )


@pytest.mark.golden("drafter", "drafter-end-to-end")
def test_a_missing_or_renamed_tensor_is_named(case):
    tensors = stored(case).tensors
    for name in tensors:
        rest = {k: x for k, x in tensors.items() if k != name}
        with pytest.raises(CheckpointError) as caught:
            read(case, rest | {f"{name}_": tensors[name]})
        assert f"{name}_" in str(caught.value)
        try:
            found = read(case, rest)
        except CheckpointError as error:
            assert name in str(error)
            continue
        assert name in MAY_LACK, f"{name} is missing, and nobody says so"
        whole = read(case, tensors)
        if name in TOGETHER:
            assert TOGETHER[name] in rest
            assert found.config == whole.config
            for key, x in whole.tensors.items():
                np.testing.assert_array_equal(found.tensors[key], x)
        else:
            field = "own_embedding" if "embed" in name else "own_head"
            assert getattr(whole.config, field) and not getattr(found.config, field)
            assert found.facts != whole.facts


@pytest.mark.golden("drafter", "drafter-end-to-end")
def test_a_broken_tensor_is_named(case):
    tensors = stored(case).tensors
    for name, tensor in tensors.items():
        with pytest.raises(CheckpointError) as caught:
            read(case, tensors | {name: np.concatenate([tensor, tensor[:1]])})
        assert name in str(caught.value)
        if tensor.dtype.kind == "f":
            broken = tensor.copy()
            broken.flat[-1] = np.nan
            with pytest.raises(CheckpointError) as caught:
                read(case, tensors | {name: broken})
            assert name in str(caught.value) and "NaN" in str(caught.value)


@pytest.mark.golden("drafter", "drafter-end-to-end")
def test_inspect_explains(case):
    """Without a target: format, layout, taps, vocabulary, heads."""
    facts = inspect(str(case.folder))
    assert facts["format"] == stored(case).format
    assert {"layout", "taps", "vocabulary", "embedding", "head"} <= set(facts)
    known = inspect(str(case.folder), str(case.target))
    assert known.pop("fits") == str(case.target) and set(known) == set(facts)
    assert isinstance(facts["vocabulary"], int) and facts["strategies"]
    for name, text in rows(facts) + rows(known):
        assert text and "None" not in text and "_" not in name
        assert not {"True", "False"} & set(text.split())
    whole = look(stored(case), target(case))
    assert known["taps"] == whole.facts["taps"]
    if isinstance(facts["taps"], list):
        assert facts["taps"] == known["taps"]
    assert known["parameters"] == sum(x.size for x in whole.tensors.values())
