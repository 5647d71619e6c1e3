"""Faults that other libraries had: caches and rollback (B23 to B27)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxdec.drafters.draft_model import draft_model
from jaxdec.models.decoder import make_model
from jaxdec.types import Commit, DrafterParams, Sequences


@functools.cache
def rejecting():
    """The oracle, made wrong in the slot that its plan names for the step."""
    target = toy.tiny_params()
    built = toy.compiled(
        toy.tiny(),
        toy.scripted(draft_model(toy.tiny(), toy.K)),
        target=target,
        own=(jnp.zeros((4, 1), jnp.int32), DrafterParams(own=None, shared=target)),
    )
    return built._replace(draft_forward=(toy.tiny(), target))


def with_plan(plan):
    params = rejecting().params
    plan = jnp.asarray(plan, jnp.int32)
    return params.replace(drafter=(plan, params.drafter[1]))


def test_b23_both_caches_after_every_step():
    """Reject at j for every j, in another order in every row, twelve steps."""
    built = rejecting()
    turns = np.arange(12)
    params = with_plan(
        [(turns * s + i) % (toy.K + 1) for i, s in enumerate((1, 2, 4, 5))]
    )
    request = toy.ragged(max_new=40, temperature=[0.0, 0.0, 0.7, 1.0])
    expected = toy.plain(request)
    state = built.prefill(params, request)
    for step in range(9):
        state, info, _ = built.generate(params, state, jnp.int32(1))
        toy.assert_one_behind(built, state)
        wanted = np.minimum(
            params.drafter[0][:, step], np.asarray(info.num_judged)[:, 0]
        )
        np.testing.assert_array_equal(info.num_accepted[:, 0], wanted)
    state, _, _ = built.generate(params, state, jnp.int32(toy.SLOTS))
    assert toy.tokens_of(state) == expected


@pytest.mark.parametrize("slot", range(toy.K + 1))
def test_b23_reject_at_one_slot_every_step(slot):
    built = rejecting()
    params = with_plan(np.full((4, 1), slot))
    request = toy.ragged(max_new=40)
    state, info, _ = toy.run(built, request, params=params)
    assert toy.tokens_of(state) == toy.plain(request)
    wanted = np.minimum(np.asarray(info.num_judged), slot)
    np.testing.assert_array_equal(info.num_accepted, wanted)
    toy.assert_one_behind(built, state)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_b23_acceptance_does_not_decay(temperature):
    """200 tokens of the oracle, at several draft lengths: every draft is kept."""
    request = toy.ragged(max_new=200, temperature=temperature, max_draft=[8, 5, 7, 6])
    state, info, _ = toy.run(toy.method("self"), request)
    assert [len(row) for row in toy.tokens_of(state)] == [200] * 4
    np.testing.assert_array_equal(info.num_accepted, info.num_judged)
    assert toy.tokens_of(state)[1][:20] == toy.plain(request)[1][:20]


def test_b24_an_abandoned_step_leaves_the_state_as_it_was():
    """Stop after each of the first steps, throw the step away, go on: same tokens."""
    built = rejecting()
    params = with_plan([[8, 0, 3, 1, 5], [0, 8, 2, 4, 7], [1, 2, 3, 4, 5], [8] * 5])
    request = toy.ragged(max_new=30)
    expected = toy.plain(request)
    state = built.prefill(params, request)
    for _ in range(6):
        built.generate(params, state, jnp.int32(1))  # Proposed, judged, abandoned.
        kept, _, _ = built.generate(params, state, jnp.int32(toy.SLOTS))
        assert toy.tokens_of(kept) == expected
        state, _, _ = built.generate(params, state, jnp.int32(1))
        toy.assert_one_behind(built, state)


@pytest.mark.parametrize("value", [None, 1e4, np.nan])
def test_b25_ragged_acceptance(value):
    """One row accepts all and one nothing, each step; rejected slots are poisoned."""
    built = rejecting()
    params = with_plan([[8] * 4, [0] * 4, [8, 0, 8, 0], [0, 8, 0, 8]])
    request = toy.ragged(max_new=30)
    state = built.prefill(params, request)
    for _ in range(8):
        state, _, _ = built.generate(params, state, jnp.int32(1))
        if value is not None:
            step, draft = state.drafter
            spoilt = toy.poison(state.replace(drafter=draft), value)
            state = spoilt.replace(drafter=(step, spoilt.drafter))
    state, _, _ = built.generate(params, state, jnp.int32(toy.SLOTS))
    assert toy.tokens_of(state) == toy.plain(request)


@functools.cache
def short_sighted(max_positions: int):
    target = toy.tiny_params()
    config = dataclasses.replace(toy.TINY_CONFIG, max_positions=max_positions)
    drafter = draft_model(make_model(config), toy.K)
    return toy.compiled(toy.tiny(), drafter, target=target, shared=target)


def test_b27_a_draft_model_that_runs_out_of_positions():
    """Beyond its context a row decodes plainly; its neighbours keep their drafts."""
    built = short_sighted(40)
    request = toy.ragged(max_new=[20, 20, 20, 40])
    state, info, _ = toy.run(built, request)
    assert toy.tokens_of(state) == toy.plain(request)
    accepted, drafted = np.asarray(info.num_accepted), np.asarray(info.num_drafted)
    judged = np.asarray(info.num_judged)
    np.testing.assert_array_equal(accepted, judged)
    # Row 3 starts at 20 tokens; K = 8 drafts fit up to length 32.
    assert drafted[3].tolist()[:3] == [8, 8, 0] and not np.any(drafted[3, 2:])
    assert int(np.sum(np.asarray(info.num_emitted)[3])) == 40
    for row in range(3):
        assert np.sum(accepted[row]) == 20 - np.sum(np.asarray(info.is_live)[row])
        assert np.sum(np.asarray(info.is_live)[row]) == 3


# ---- The draft model's own bookkeeping -----------------------------------------------


@functools.cache
def _draft_calls(length: int, max_unread: int):
    drafter = draft_model(toy.tiny(), length, max_unread=max_unread)
    params = DrafterParams(own=toy.tiny_params(), shared=None)
    fast = {"compiler_options": toy.FAST}
    extend, propose = (jax.jit(f, **fast) for f in (drafter.extend, drafter.propose))
    return drafter, params, extend, propose


def _extend(extend, params, state, tokens, start, num, width):
    row = np.zeros((1, width + 1), np.int32)
    row[0, : num + 1] = tokens[start : start + num + 1]
    commit = Commit(
        tokens=jnp.asarray(row),
        features=jnp.zeros((1, width, 0), jnp.float32),
        length=jnp.asarray([num], jnp.int32),
    )
    return extend(params, state, commit)


@pytest.mark.parametrize(
    ("length", "max_unread", "pieces"),
    [
        (4, 1, [(16, 16), (4, 5), (1, 5), (5, 5), (3, 5)]),
        (4, 1, [(2, 3), (3, 3), (3, 3), (1, 3), (2, 3)]),
        (4, 3, [(16, 16), (3, 5), (2, 5), (4, 5)]),
        (2, 1, [(2, 3), (1, 3), (8, 9), (3, 3)]),
        (2, 1, [(2, 3), (0, 9), (7, 9), (0, 3), (1, 9), (2, 3)]),
    ],
)
@pytest.mark.parametrize("is_proposing", [False, True])
def test_extend_takes_any_number_of_tokens(length, max_unread, pieces, is_proposing):
    """However the committed tokens arrive, what is drafted from them is the same.

    Pieces are (live tokens, width): a prefill chunk, a step, a longer step of another
    drafter, an empty row; with and without a proposal (whose tail may or may not
    agree with what follows) before each.
    """
    drafter, params, extend, propose = _draft_calls(length, max_unread)
    model = toy.tiny()
    tokens = [int(t) for t in np.random.default_rng(3).integers(0, 97, 64)]
    state = drafter.init(1, 64)
    read = 0
    for index, (num, width) in enumerate(pieces):
        if is_proposing and index:
            sequences = _sequences(tokens[: read + 1])
            state, draft = propose(params, state, sequences)
            # What follows agrees with the draft for some tokens, then departs.
            agreed = index % (length + 1)
            said = np.asarray(draft.tokens)[0, :agreed].tolist()
            tokens[read + 1 : read + 1 + agreed] = said
        state = _extend(extend, params, state, tokens, read, num, width)
        read += num
        live = int(state.cache.length[0])
        assert live + int(state.num_unread[0]) == read
        fresh, _ = toy.full_forward(
            np.asarray([tokens + [0] * (toy.FULL - len(tokens))], np.int32), model
        )
        toy.assert_live_equal(state.cache, fresh, [live])
        _, draft = propose(params, state, _sequences(tokens[: read + 1]))
        said = np.asarray(draft.tokens)[0].tolist()
        assert toy.is_greedy(tokens[: read + 1], said)


def _sequences(tokens):
    """What a drafter sees of one row that has said `tokens`."""
    request = toy.make_request([tokens], buffer=64)
    return Sequences(
        tokens=request.prompt,
        length=request.prompt_length,
        prompt_length=request.prompt_length,
        limit=request.prompt_length + 30,
        finish=jnp.zeros((1,), jnp.int32),
        max_draft_length=request.max_draft_length,
        stop_tokens=request.stop_tokens,
        num_stop_tokens=request.num_stop_tokens,
        key=request.key,
        sampling=request.sampling,
    )


def test_small_prefill_chunks():
    """Chunks narrower than a step take the same way into the draft cache."""
    target = toy.tiny_params()
    built = toy.compiled(
        toy.tiny(),
        draft_model(toy.tiny(), toy.K),
        target=target,
        shared=target,
        prefill_chunk=3,
    )
    built = built._replace(draft_forward=(toy.tiny(), target))
    request = toy.ragged(max_new=20)
    state = built.prefill(built.params, request)
    toy.assert_one_behind(built, state)
    state, info, _ = built.generate(built.params, state, jnp.int32(toy.SLOTS))
    assert toy.tokens_of(state) == toy.plain(request)
    np.testing.assert_array_equal(info.num_accepted, info.num_judged)
