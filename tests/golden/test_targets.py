"""Target models against the published implementations: every option of every family."""

import json

import pytest
from cases import KINDS, discover
from reading import continue_greedily, load, prompts_of, read_prompts

import jaxdec
from jaxdec.io.cache import open_checkpoint
from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.hf_families import REFUSED


def test_every_case_is_of_a_kind_that_some_test_runs(pytestconfig):
    found = discover(pytestconfig.getoption("--golden").resolve())
    assert {case.kind for case in found} <= set(KINDS)


def check(case, lm, expected):
    """Every expected tensor of a target, of prompts and of what follows them."""
    prompts = prompts_of(expected)
    reads, cache = read_prompts(lm, prompts)
    for i, read in enumerate(reads):
        for name, ours, tolerance in (
            (f"logits_{i}", read.logits, "logits"),
            (f"taps_{i}", read.taps, "hidden"),
            (f"final_hidden_{i}", read.normed_hidden, "hidden"),
        ):
            if name in expected:
                case.close(name, ours, expected[name], tolerance)
    said = [name for name in expected if name.startswith(("greedy_", "cached_"))]
    num = max((len(expected[name]) for name in said), default=1)
    tokens, logits = continue_greedily(lm, reads, cache, num)
    for name in said:
        row, length = int(name.split("_")[-1]), len(expected[name])
        if "_tokens_" in name:
            case.equal(name, tokens[row, :length], expected[name])
        else:
            case.close(name, logits[row, :length], expected[name])


@pytest.mark.golden("target")
def test_numbers(case):
    """Logits, taps, hidden states and choices."""
    check(case, load(case.folder), case.expected())


@pytest.mark.golden("mtp")
def test_trunk(case):
    """A target that has its multi-token-prediction modules in the same file."""
    expected = case.expected()
    if "logits_0" not in expected:
        pytest.skip("the module belongs to another target, or comes without one")
    if json.loads((case.folder / "config.json").read_text())["model_type"] in REFUSED:
        with pytest.raises(CheckpointError, match="is not supported: its attention"):
            load(case.folder)
        return
    lm = load(case.folder)
    assert open_checkpoint(case.folder).extra, "its modules are gone"
    check(case, lm, expected)


@pytest.mark.golden("target")
def test_engine(case):
    """What `generate` says, where nothing but the goldens decodes with such a model."""
    lm, expected = load(case.folder), case.expected()
    if not lm.config.learned_positions:
        pytest.skip("rotary positions, which other tests decode with")
    prompts = [prompt.tolist() for prompt in prompts_of(expected)]
    num = len(expected["greedy_tokens_0"])
    outputs = jaxdec.generate(lm, prompts, max_new_tokens=num, stop_tokens=[])
    for i, output in enumerate(outputs):
        case.equal(f"tokens_{i}", output.tokens, expected[f"cached_tokens_{i}"])
