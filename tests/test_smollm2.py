"""The real model: SmolLM2-135M-Instruct, from the package index."""

import dataclasses
import functools
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
import toy

import jaxdec
from jaxdec.models.decoder import make_model
from jaxdec.strategies import StrategyConfig
from jaxdec.types import DrafterParams

pytestmark = pytest.mark.real
GOLDENS = json.loads(
    (pathlib.Path(__file__).parent / "goldens" / "smollm2.json").read_text()
)
CASES = {k.split("/")[1]: v for k, v in GOLDENS.items() if k.startswith("smollm2/")}
PROMPTS = ["Why is the sky blue?", "Count from one to twenty, then count again."]


@functools.cache
def load(dtype):
    return jaxdec.load("smollm2", dtype=dtype)


@pytest.fixture(params=["float32", "bfloat16"])
def lm(request):
    return load(request.param)


def test_logits_match_the_reference():
    lm = load("float32")
    model = make_model(lm.config)
    for case in CASES.values():
        ids = case["ids"]
        position = jnp.arange(len(ids), dtype=jnp.int32)[None]
        _, output = model.forward(
            lm.params,
            model.init_cache(1, 256),
            jnp.asarray([ids], jnp.int32),
            position,
            None,
        )
        logits = np.asarray(output.logits[0], np.float64)
        np.testing.assert_allclose(
            logits[-1][case["top5_ids"]], case["top5_logits"], atol=1e-3
        )
        assert np.argsort(-logits[-1])[:5].tolist() == case["top5_ids"]
        total = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1))
        own = logits[np.arange(len(ids) - 1), ids[1:]] - logits.max(-1)[:-1]
        assert -np.mean(own - total[:-1]) == pytest.approx(
            case["nll_per_token"], abs=1e-4
        )


@pytest.mark.parametrize("strategy", ["greedy", "lookup"])
def test_plain_and_drafted_greedy_say_the_reference(strategy):
    lm = load("float32")
    options = dict(strategy=strategy, max_new_tokens=32, logprobs=0)
    for case in CASES.values():
        want = case["greedy"]
        out = jaxdec.generate(lm, [case["ids"]], stop_tokens=[2], **options)
        assert list(out[0].tokens[: len(want)]) == want
    chat = jaxdec.generate(lm, "What is the capital of France?", **options)
    assert chat[0].text == "The capital of France is Paris."
    assert chat[0].finish_reason == "stop_token"


def test_chains_up_to_six_equal_plain_decoding_bit_for_bit(lm):
    options = dict(max_new_tokens=32, logprobs=0, stop_tokens=[2])
    for prompt in PROMPTS:
        plain = jaxdec.generate(lm, prompt, **options)[0]
        drafted = jaxdec.generate(lm, prompt, strategy=jaxdec.lookup(6), **options)
        assert drafted[0].tokens == plain.tokens
        # The very floats: one ulp of difference would show here.
        assert drafted[0].logprobs == plain.logprobs
        assert drafted.run.info.num_accepted.sum() > 0 or prompt == PROMPTS[0]


def test_exact_mode_covers_longer_chains():
    lm = load("bfloat16")
    options = dict(max_new_tokens=24, logprobs=0, stop_tokens=[2], exact=True)
    plain = jaxdec.generate(lm, PROMPTS[1], **options)[0]
    drafted = jaxdec.generate(lm, PROMPTS[1], strategy=jaxdec.lookup(12), **options)
    assert drafted[0].tokens == plain.tokens
    assert drafted[0].logprobs == plain.logprobs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree(StrategyConfig):
    """Drafts a known text, one token of it wrong, with a sibling beside each token."""

    text: tuple[int, ...]

    def build(self, lm, processor, min_rows):
        del processor, min_rows
        size, depth = lm.config.vocab_size, self.length // 2
        inner = toy.corrupted(toy.script(depth, size), size)
        drafts = np.full((1, 1, depth), toy.ORACLE)
        own = toy.make_script(drafts, [self.text])

        def propose(params, state, sequences):
            return inner.propose(params.own, state, sequences)

        tree = toy.tree_of(inner._replace(propose=propose), size)
        return tree, DrafterParams(own=own, shared=())


def test_exact_mode_covers_trees():
    """A node's ancestors lie among its rivals: no sum may depend on where."""
    lm = load("bfloat16")
    options = dict(max_new_tokens=32, logprobs=0, stop_tokens=[], exact=True)
    for prompt in PROMPTS:
        plain = jaxdec.generate(lm, prompt, **options)
        text = (*plain.run.call.prompts[0], *plain[0].tokens)
        tree = Tree(name="tree", length=8, text=text)
        drafted = jaxdec.generate(lm, prompt, strategy=tree, **options)
        assert len(drafted.run.info.num_emitted[0]) < 22
        assert drafted[0].tokens == plain[0].tokens
        assert drafted[0].logprobs == plain[0].logprobs


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_certificates_pass(temperature):
    certificate = jaxdec.certify(
        load("bfloat16"),
        PROMPTS,
        jaxdec.lookup(6),
        max_new_tokens=24,
        temperature=temperature,
    )
    assert certificate.passed, certificate.summary()
    assert certificate.num_positions > 24


def test_a_drafter_equal_to_the_target_is_always_right():
    lm = load("bfloat16")
    whole = jaxdec.self_draft(lm.config.num_layers, length=4)
    for options in (
        {},
        dict(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.2),
    ):
        out = jaxdec.generate(
            lm, PROMPTS[1], strategy=whole, max_new_tokens=24, stop_tokens=[], **options
        )
        info = out.run.info
        assert info.num_accepted.sum() == info.num_judged.sum() > 0
