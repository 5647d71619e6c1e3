"""Target models against the published implementations: every option of every family."""

import json

import pytest
from reading import continue_greedily, load, prompts_of, read_prompts

import jaxdec
from jaxdec.io.cache import open_checkpoint
from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.hf_families import REFUSED


@pytest.mark.golden("target")
def test_numbers(case):
    """Every logit, tap, hidden state and choice, of prompts and of what follows."""
    lm, expected = load(case.folder), case.expected()
    prompts = prompts_of(expected)
    reads, cache = read_prompts(lm, prompts)
    for i, read in enumerate(reads):
        case.close(f"logits_{i}", read.logits, expected[f"logits_{i}"])
        case.close(f"taps_{i}", read.taps, expected[f"taps_{i}"], "hidden")
        name = f"final_hidden_{i}"
        case.close(name, read.normed_hidden, expected[name], "hidden")
    num = len(expected["greedy_tokens_0"])
    tokens, logits = continue_greedily(lm, reads, cache, num)
    for i in range(len(prompts)):
        for way in ("greedy", "cached"):
            case.equal(f"{way}_tokens_{i}", tokens[i], expected[f"{way}_tokens_{i}"])
            case.close(f"{way}_logits_{i}", logits[i], expected[f"{way}_logits_{i}"])


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
    assert open_checkpoint(case.folder).extra
    reads, cache = read_prompts(lm, prompts_of(expected))
    case.close("logits_0", reads[0].logits, expected["logits_0"])
    case.close("taps_0", reads[0].taps, expected["taps_0"], "hidden")
    name = "final_hidden_0"
    case.close(name, reads[0].normed_hidden, expected[name], "hidden")
    answer = expected["greedy_tokens_0"]
    tokens, _ = continue_greedily(lm, reads, cache, len(answer))
    case.equal("greedy_tokens_0", tokens[0], answer)


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
