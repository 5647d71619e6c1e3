"""A certificate must pass what is lossless and refuse what is not."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import toy
from helpers_tiny import write_model

import jaxdec
from jaxdec import acceptance, call, sampling, text
from jaxdec.models.decoder import init_params
from jaxdec.types import Acceptance, AcceptFn

PROMPTS = ["abcabcabcabc", "the cat and the cat and", "x"]
FILTERS = dict(top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.2)


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return jaxdec.load(write_model(tmp_path_factory.mktemp("tiny")), dtype="float32")


def batch_outputs(lm, strategy, *, accept=None, num=1, **options):
    """Answers to many copies of the prompts, each with a seed of its own."""
    prompts = PROMPTS * num
    options = {"max_new_tokens": 40, "stop_tokens": [], **options}
    checked = call.check(
        lm,
        prompts,
        strategy=strategy,
        seed=list(range(len(prompts))),
        accept=accept,
        **options,
    )
    return prompts, text.execute(checked)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("greedy", {}),
        (jaxdec.lookup(4), {}),
        (jaxdec.lookup(4), {"temperature": 0.9, **FILTERS}),
        (jaxdec.self_draft(1, length=3), {"temperature": 1.1}),
    ],
    ids=["greedy", "lookup", "lookup-filters", "self_draft"],
)
def test_lossless_strategies_pass(lm, strategy, options, exact):
    prompts, outputs = batch_outputs(lm, strategy, exact=exact, **options)
    certificate = jaxdec.certify(lm, prompts, strategy, outputs=outputs, exact=exact)
    assert certificate.passed, certificate.summary()
    assert certificate.num_positions == sum(len(item.tokens) for item in outputs)
    assert (certificate.ks is not None) == ("temperature" in options)
    assert certificate.tolerance == (0.0 if exact else 1e-3)
    assert not certificate.divergences


def test_it_generates_by_itself(lm):
    certificate = jaxdec.certify(lm, PROMPTS[:2], jaxdec.lookup(4), max_new_tokens=12)
    assert certificate.passed and certificate.mode == "greedy"
    assert 0 < certificate.num_positions <= 24


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_one_wrong_token_is_named(lm, temperature):
    prompts, outputs = batch_outputs(lm, jaxdec.lookup(4), temperature=temperature)
    victim = outputs.items[1]
    right = victim.tokens[7]
    wrong = (right + 1) % lm.config.vocab_size
    changed = dataclasses.replace(
        victim, tokens=(*victim.tokens[:7], wrong, *victim.tokens[8:])
    )
    items = (outputs.items[0], changed, *outputs.items[2:])
    outputs = dataclasses.replace(outputs, items=items)
    certificate = jaxdec.certify(lm, prompts, jaxdec.lookup(4), outputs=outputs)
    assert not certificate.passed
    first = min(certificate.divergences, key=lambda m: (m.request, m.position))
    assert (first.request, first.position) == (1, 7)
    assert (first.plain_token, first.emitted_token) == (right, wrong)
    assert str(wrong) in certificate.summary()


def _accept_all(sequences, draft, judgement):
    """Believes the drafter: what a verifier that verifies nothing does."""
    del sequences
    num = draft.tokens.shape[0]
    return Acceptance(
        path=jnp.arange(num + 1, dtype=jnp.int32),
        num_accepted=draft.length,
        next_token=judgement.tokens[draft.length],
    )


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_unverified_drafts_are_refused(lm, temperature):
    rule = AcceptFn(name="all", needs_log_probs=False, accept=_accept_all)
    prompts, outputs = batch_outputs(
        lm, jaxdec.lookup(4), accept=rule, temperature=temperature
    )
    certificate = jaxdec.certify(lm, prompts, jaxdec.lookup(4), outputs=outputs)
    assert not certificate.passed


REJECTION = jaxdec.self_draft(1, length=3, rule="rejection")


def _rejection_with(recover):
    """The rejection rule with another distribution after a rejection."""

    def accept(sequences, draft, judgement):
        right = acceptance.rejection.accept(sequences, draft, judgement)
        node = right.num_accepted
        law = recover(judgement.log_probs[node], draft, node)
        noise = sampling.gumbel(
            sequences.key[None],
            (sequences.length + node)[None, None],
            law.shape[0],
            sampling.RESIDUAL,
        )[0, 0]
        drawn, _ = sampling.first_max(law + noise)
        is_rejected = node < draft.length
        return right.replace(next_token=jnp.where(is_rejected, drawn, right.next_token))

    return AcceptFn(name="wrong", needs_log_probs=True, accept=accept)


def _equality_then_residual(sequences, draft, judgement):
    """Accepts equal samples, but then draws from the residual: [.64, .24, .12]."""
    right = acceptance.match.accept(sequences, draft, judgement)
    node = right.num_accepted
    place = jnp.minimum(node, draft.tokens.shape[0] - 1)
    law = acceptance.residual(
        jnp.exp(judgement.log_probs[node]), jnp.exp(draft.log_probs[place])
    )
    noise = sampling.gumbel(
        sequences.key[None],
        (sequences.length + node)[None, None],
        law.shape[0],
        sampling.RESIDUAL,
    )[0, 0]
    drawn, _ = sampling.first_max(jnp.log(law) + noise)
    is_rejected = node < draft.length
    return right.replace(next_token=jnp.where(is_rejected, drawn, right.next_token))


WRONG = {
    "no residual": _rejection_with(lambda target, draft, node: target),
    "draft again": _rejection_with(
        lambda target, draft, node: draft.log_probs[
            jnp.minimum(node, draft.tokens.shape[0] - 1)
        ]
    ),
    "equality, then residual": AcceptFn(
        name="wrong", needs_log_probs=True, accept=_equality_then_residual
    ),
}


def law_of(lm, accept):
    prompts, outputs = batch_outputs(
        lm,
        REJECTION,
        accept=accept,
        num=16,
        temperature=1.0,
        max_new_tokens=160,
        top_k=8,
    )
    return jaxdec.certify(lm, prompts, REJECTION, outputs=outputs)


def test_rejection_keeps_the_law(lm):
    """False-alarm rate 1e-4, fixed seeds."""
    certificate = law_of(lm, None)
    assert certificate.mode == "law"
    assert certificate.passed, certificate.summary()


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_break_the_law(lm, name):
    certificate = law_of(lm, WRONG[name])
    assert not certificate.passed, certificate.summary()


def test_processors_are_part_of_the_plain_step(lm):
    def no_e(tokens, length, logits):
        del tokens, length
        index = jnp.arange(logits.shape[0], dtype=jnp.int32)
        return jnp.where(index == ord("e") - 33, -jnp.inf, logits)

    options = dict(processor=no_e, temperature=0.8)
    prompts, outputs = batch_outputs(lm, jaxdec.lookup(3), **options)
    assert jaxdec.certify(lm, prompts, jaxdec.lookup(3), outputs=outputs).passed
    assert jax.tree.leaves(outputs.run.info.num_emitted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_mode_adds_up_alike(dtype, monkeypatch):
    """Log-probabilities and top-p are sums over the vocabulary: of as many rows."""
    monkeypatch.setattr("jaxdec.program.COMPILER_OPTIONS", toy.OPTIMISED)
    # Not a multiple of any vector's width, so that sums end in a remainder.
    config = dataclasses.replace(toy.TINY_CONFIG, vocab_size=997, num_layers=2)
    params = init_params(config, jax.random.key(0), dtype)
    lm = jaxdec.LM(config=config, params=params, dtype=dtype)
    repeated = [5, 6, 7, 8] * 3
    options = dict(max_new_tokens=16, stop_tokens=[], logprobs=2, exact=True)
    options |= dict(temperature=0.6, top_p=0.9)
    prompts = [repeated, repeated[:9], repeated[:4]]
    plain = jaxdec.generate(lm, prompts, strategy="sample", **options)
    draft = jaxdec.self_draft(1, length=4)
    drafted = jaxdec.generate(lm, prompts, strategy=draft, **options)
    alone = [jaxdec.generate(lm, p, strategy="sample", **options)[0] for p in prompts]
    for a, b, c in zip(plain, drafted, alone, strict=True):
        assert a.tokens == b.tokens == c.tokens
        assert a.logprobs == b.logprobs == c.logprobs
        assert a.top_logprobs == b.top_logprobs == c.top_logprobs
