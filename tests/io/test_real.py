"""The real SmolLM2: fetched once, complete, and with the reference token ids."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxdec.io.cache import load_checkpoint
from jaxdec.io.checkpoint import check_finite, expected_tensors, shapes_of

GOLDENS = Path(__file__).parent.parent / "goldens" / "smollm2.json"

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def smollm2():
    return load_checkpoint("smollm2", "float32")


@pytest.fixture(scope="module")
def goldens():
    return json.loads(GOLDENS.read_text(encoding="utf-8"))


def test_complete(smollm2):
    config = smollm2.config
    assert shapes_of(smollm2.tensors) == expected_tensors(config)
    assert sum(np.prod(s) for s in expected_tensors(config).values()) == 134_515_008
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert config.tie_embeddings and config.ropes[0].theta == 1e5
    assert config.norm_eps == 1e-5 and config.max_positions == 8192
    check_finite(smollm2.tensors)
    assert {tensor.dtype.name for tensor in smollm2.tensors.values()} == {"float32"}
    assert smollm2.stop_tokens == (2, 0)


def test_reference_ids(smollm2, goldens):
    tokenizer = smollm2.tokenizer
    for case in goldens.values():
        ids = tokenizer.encode(case["prompt"], add_special_tokens=False)
        assert ids == tokenizer.encode(case["prompt"]) == case["ids"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == case["prompt"]
        text = tokenizer.decode(case["greedy"], skip_special_tokens=False)
        assert text == case["text"]
        assert b"".join(map(tokenizer.token_bytes, case["greedy"])) == text.encode()


def test_chat(smollm2, goldens):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    expected = goldens["smollm2/chat_france"]["prompt"]
    assert smollm2.tokenizer.apply_chat(messages) == expected


def test_characters_that_span_tokens(smollm2):
    text = "naïve 🙂 日本語 12  345\n\n\tx"
    tokenizer = smollm2.tokenizer
    pieces = [tokenizer.token_bytes(i) for i in tokenizer.encode(text)]
    assert b"".join(pieces) == text.encode()
    assert any(not piece.decode(errors="ignore") for piece in pieces)
    assert tokenizer.encode("  12") == [256, 33, 34]
