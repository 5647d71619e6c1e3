"""GGUF files: dequantised weights, row order, and the logits they give."""

import pytest
from reading import continue_greedily, load, prompts_of, read_prompts

from jaxdec.io.cache import open_checkpoint

STORED = {
    "blk0_attn_q_hf_rows": ("model.layers.0.self_attn.q_proj.weight",),
    "token_embd": ("model.embed_tokens.weight", "wte.weight"),
}
"""What the expected tensors are called in a checkpoint."""


@pytest.mark.golden("target-gguf")
def test_weights(case):
    """Query rows are in the order of Hugging Face, in every number format."""
    for file, expected_file in case.facts["files"].items():
        tensors = open_checkpoint(case.folder / file).tensors
        expected = case.expected(expected_file)
        for theirs, ours in STORED.items():
            name = next((name for name in ours if name in tensors), None)
            if theirs in expected and name is not None:
                case.equal(f"{file}: {name}", tensors[name], expected[theirs])


@pytest.mark.golden("target-gguf")
def test_numbers(case):
    for file, expected_file in case.facts["files"].items():
        lm, expected = load(case.folder / file), case.expected(expected_file)
        prompts = prompts_of(expected)
        reads, cache = read_prompts(lm, prompts)
        answers = [expected[f"greedy_tokens_{i}"] for i in range(len(prompts))]
        for i, read in enumerate(reads):
            name = f"logits_{i}"
            case.close(f"{file}: {name}", read.logits, expected[name])
        # Answers are cut where the reference's choice was too close to call.
        tokens, _ = continue_greedily(lm, reads, cache, max(map(len, answers)))
        for i, answer in enumerate(answers):
            case.equal(f"{file}: tokens {i}", tokens[i, : len(answer)], answer)
