"""Target models against the published implementations: every option of every family."""

import pytest
from reading import continue_greedily, load, prompts_of, read_prompts

import jaxdec


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


@pytest.mark.golden("target")
def test_engine(case):
    """What `generate` says; only where plain Llama layers do not say it all."""
    lm, expected = load(case.folder), case.expected()
    config = lm.config
    if not (config.layer_windows or config.learned_positions or config.moe):
        pytest.skip("a plain Llama block, which other tests decode with")
    prompts = [prompt.tolist() for prompt in prompts_of(expected)]
    num = len(expected["greedy_tokens_0"])
    outputs = jaxdec.generate(lm, prompts, max_new_tokens=num, stop_tokens=[])
    for i, output in enumerate(outputs):
        case.equal(f"tokens_{i}", output.tokens, expected[f"cached_tokens_{i}"])
