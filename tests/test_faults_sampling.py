"""Faults of other libraries: logit processing, non-finite logits (B14, B43, B44)."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxdec.drafters.draft_model import draft_model
from jaxdec.drafters.none import none
from jaxdec.types import FinishReason

SPECULATIVE = ("draft", "self", "corrupted", "tree", "lookup")

PENALTIES = {
    "repetition_penalty": [1.3, 1.0, 1.0, 1.2],
    "frequency_penalty": [0.0, 0.7, 0.0, 0.3],
    "presence_penalty": [0.0, 0.0, 0.7, 0.4],
}


def penalised(**kwargs):
    kwargs = {"max_new": [30, 40, 26, 40]} | PENALTIES | kwargs
    return toy.ragged(**kwargs)


@functools.cache
def plain_penalised(temperature: float):
    return toy.plain(penalised(temperature=temperature))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", SPECULATIVE)
@pytest.mark.parametrize("max_draft", [2, 8])
def test_b43_penalties_count_committed_tokens_only(name, temperature, max_draft):
    request = penalised(temperature=temperature, max_draft=max_draft)
    assert toy.output(name, request) == plain_penalised(temperature)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("max_draft", range(1, 7))
@pytest.mark.parametrize("name", ["self", "self_rejection"])
def test_b43_penalised_oracle_is_fully_accepted(name, max_draft, temperature):
    """The drafter applies to its drafts exactly what the target applies to them."""
    request = penalised(
        temperature=temperature,
        max_draft=max_draft,
        no_repeat_ngram=[0, 3, 0, 2],
        logit_bias={3: 1.5, 21: -2.0},
        min_new_tokens=[0, 9, 0, 30],
        stop=[16, 21, 6],
    )
    state, info, _ = toy.run(toy.method(name), request)
    np.testing.assert_array_equal(info.num_accepted, info.num_judged)
    if name == "self":
        assert toy.tokens_of(state) == toy.plain(request)


def test_b43_penalties_against_a_recount():
    """Plain greedy with penalties, against counts in NumPy and one full forward."""
    generated = plain_penalised(0.0)
    for row, prompt in enumerate(toy.PROMPTS):
        tokens = [*prompt, *generated[row]]
        logits = toy.full_logits(tokens)
        repetition, frequency, presence = (
            PENALTIES[f"{kind}_penalty"][row]
            for kind in ("repetition", "frequency", "presence")
        )
        for place in range(len(prompt), len(tokens)):
            x = logits[place - 1].copy()
            seen = sorted(set(tokens[:place]))
            said = np.bincount(tokens[len(prompt) : place], minlength=toy.VOCAB)
            x[seen] = np.where(x[seen] > 0, x[seen] / repetition, x[seen] * repetition)
            x = x - frequency * said - presence * (said > 0)
            assert int(np.argmax(x)) == tokens[place]
    free = toy.plain(toy.ragged(max_new=[30, 40, 26, 40]))
    assert all(a != b for a, b in zip(free, generated, strict=True))


@pytest.mark.parametrize("name", ["plain", *SPECULATIVE])
def test_b43_ngrams_do_not_repeat(name):
    request = toy.ragged(max_new=40, no_repeat_ngram=[3, 2, 1, 3])
    generated = toy.output(name, request)
    assert generated == toy.plain(request)
    for prompt, tokens, size in zip(toy.PROMPTS, generated, (3, 2, 1, 3), strict=True):
        full = [*prompt, *tokens]
        grams = [tuple(full[i : i + size]) for i in range(len(full) - size + 1)]
        # The prompt may repeat itself; what is generated must be new.
        for index in range(len(prompt) - size + 1, len(grams)):
            assert grams[index] not in grams[:index]


@pytest.mark.parametrize("name", ["plain", *SPECULATIVE])
@pytest.mark.parametrize("max_draft", [2, 8])
def test_b43_min_new_tokens_counts_tokens_not_steps(name, max_draft):
    free = toy.plain(toy.ragged(max_new=30))
    stops = [[row[3]] for row in free]
    request = toy.ragged(max_new=30, stop=stops, min_new_tokens=7, max_draft=max_draft)
    generated = toy.output(name, request)
    assert generated == toy.plain(request)
    for tokens, (stop,) in zip(generated, stops, strict=True):
        assert stop not in tokens[:7] and len(tokens) >= 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_b44_a_ban_holds_at_every_place(temperature):
    """Ban what greedy says most: it never appears, from drafts, samples or bonuses."""
    free = toy.plain(toy.ragged(max_new=44))
    banned = [sorted(set(row[1:9])) for row in free]
    banned[2] = []
    request = toy.ragged(max_new=44, banned_tokens=banned, temperature=temperature)
    expected = toy.plain(request)
    for name in (*SPECULATIVE, "draft_rejection", "self_rejection"):
        generated = toy.output(name, request)
        for tokens, ids in zip(generated, banned, strict=True):
            assert not set(tokens) & set(ids)
        if toy.method(name).is_match:
            assert generated == expected
    if temperature == 0:
        assert expected[2] == free[2]


@pytest.mark.parametrize("name", ["plain", *SPECULATIVE, "draft_rejection"])
def test_b44_a_bias_holds_at_every_place(name):
    free = toy.plain(toy.ragged(max_new=20))
    request = toy.ragged(
        max_new=20,
        temperature=[0, 1, 0, 0.5],
        logit_bias=[{3: 100.0}, {3: 100.0}, {}, {}],
    )
    generated = toy.output(name, request)
    assert generated[0] == generated[1] == [3] * 20
    assert generated[2] == free[2]


@pytest.mark.parametrize("name", ["self", "draft", "tree", "lookup"])
def test_filters_under_speculation(name):
    request = toy.ragged(
        max_new=30,
        temperature=[0.9, 1.2, 1.0, 1.5],
        top_k=[5, 0, 0, 3],
        top_p=[1.0, 0.7, 1.0, 0.9],
        min_p=[0.0, 0.0, 0.3, 0.0],
    )
    assert toy.output(name, request) == toy.plain(request)


# ---- Logits that cannot be sampled from ----------------------------------------------

MARKS = {60: np.nan, 61: np.inf, 62: -np.inf}
"""First tokens of rows whose logits are spoilt, and with what."""
MARK, BAD_LENGTH = 60, 10
NONFINITE, LENGTH = FinishReason.NONFINITE, FinishReason.LENGTH


@functools.cache
def broken(is_speculative: bool):
    """A processor that spoils one logit (or, with -inf, all) from a length on."""

    def processor(tokens, length, logits):
        for mark, value in MARKS.items():
            is_bad = (tokens[0] == mark) & (length >= BAD_LENGTH)
            spoilt = logits.at[5].set(value)
            spoilt = jnp.full_like(logits, value) if value == -np.inf else spoilt
            logits = jnp.where(is_bad, spoilt, logits)
        return logits

    target = toy.tiny_params()
    drafter = none()
    if is_speculative:
        drafter = toy.corrupted(draft_model(toy.tiny(), toy.K))
    return toy.compiled(
        toy.tiny(), drafter, target=target, shared=target, processor=processor
    )


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_b14_one_row_stops_and_the_others_go_on(mark, temperature):
    prompts = [[mark, 3], [5, 17, 40], [mark, 8, 9, 4], [11, 12, 11]]
    request = toy.make_request(prompts, max_new=20, temperature=temperature)
    healthy = toy.plain(request)
    expected = [healthy[0][:8], healthy[1], healthy[2][:6], healthy[3]]
    for is_speculative in (False, True):
        state, info, _ = toy.run(broken(is_speculative), request)
        assert toy.tokens_of(state) == expected
        assert toy.reasons(state) == [NONFINITE, LENGTH, NONFINITE, LENGTH]
        emitted = np.asarray(info.num_emitted).sum(axis=1)
        assert emitted.tolist() == [len(row) for row in expected]


@pytest.mark.parametrize("name", toy.METHODS)
def test_b14_a_poisoned_live_entry_stops_its_row_only(name):
    built = toy.method(name)
    request = toy.ragged(max_new=20)
    state = built.prefill(built.params, request)
    cache = state.cache
    keys = tuple(k.at[3, :, 2].set(jnp.nan) for k in cache.keys)
    state = state.replace(cache=cache.replace(keys=keys))
    state, _, _ = built.generate(built.params, state, jnp.int32(toy.SLOTS))
    expected = toy.plain(request)
    assert toy.tokens_of(state) == [*expected[:3], []]
    assert toy.reasons(state) == [LENGTH, LENGTH, LENGTH, NONFINITE]


def test_b14_everything_banned():
    """A row whose every token is banned ends; its neighbour does not notice."""
    built = toy.compiled(
        toy.table_model(6), none(), target=jnp.eye(6), capacity=32, prefill_chunk=4
    )
    request = toy.make_request(
        [[1], [2]], max_new=4, banned_tokens=[list(range(6)), [2]]
    )
    state, _, _ = toy.run(built, request)
    assert toy.tokens_of(state) == [[], [0, 0, 0, 0]]
    assert toy.reasons(state) == [NONFINITE, LENGTH]


def test_b14_a_stop_before_the_spoilt_place_wins():
    built = broken(True)
    request = toy.make_request([[MARK, 3]] * 4, max_new=20)
    free = toy.plain(request)[0]
    request = toy.make_request([[MARK, 3]] * 4, max_new=20, stop=[free[7]])
    state, _, _ = toy.run(built, request)
    end = free.index(free[7]) + 1
    assert toy.tokens_of(state) == [free[:end]] * 4
    assert toy.reasons(state) == [FinishReason.STOP_TOKEN] * 4
    limit = toy.make_request([[MARK, 3]] * 4, max_new=8)
    assert toy.reasons(toy.run(built, limit)[0]) == [LENGTH] * 4


def test_draft_of_a_nan_embedding_does_not_touch_the_row():
    """I3 where a token's own weights are broken: to draft it is not to say it."""
    params = dict(toy.tiny_params())
    params["embedding"] = params["embedding"].at[60].set(jnp.nan)
    built = toy.compiled(toy.tiny(), toy.stubborn(60), target=params)
    request = toy.ragged(max_new=12)
    expected = toy.plain(request)
    assert not any(60 in row for row in expected)
    state, _, _ = toy.run(built, request)
    assert toy.tokens_of(state) == expected
