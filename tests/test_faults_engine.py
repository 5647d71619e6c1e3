"""Faults that other libraries had: verification, stopping, budgets (B01 to B21)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxdec.drafters.lookup import lookup
from jaxdec.types import FinishReason

STOP, LENGTH = FinishReason.STOP_TOKEN, FinishReason.LENGTH


@functools.cache
def chain_script(vocab_size: int = 32):
    """TABLE whose first choice after t is t + 1, under SCRIPT with K = 4."""
    table = np.full((vocab_size, vocab_size), -1.0, np.float32)
    after = np.arange(vocab_size)
    table[after, (after + 1) % vocab_size] = 1.0
    return toy.compiled(
        toy.table_model(vocab_size),
        toy.script(4, vocab_size),
        target=jnp.asarray(table),
        own=toy.make_script(np.zeros((1, 8, 4)), np.zeros((1, 1))),
        capacity=64,
        prefill_chunk=4,
    )


def say(drafts, prompt, lengths=None, rows=None, **kwargs):
    """Runs the chain under scripted drafts (padded to 8 steps), at B = 2."""
    drafts = np.asarray(drafts)
    if drafts.ndim == 2:
        drafts = np.stack([drafts, drafts])
    steps = drafts.shape[1]
    drafts = np.pad(drafts, ((0, 0), (0, 8 - steps), (0, 0)))
    if lengths is None:
        lengths = np.full((2, steps), 4)
    lengths = np.pad(np.broadcast_to(lengths, (2, steps)), ((0, 0), (0, 8 - steps)))
    built = chain_script()
    params = built.params.replace(
        drafter=toy.make_script(drafts, np.zeros((2, 1)), lengths)
    )
    request = toy.make_request([prompt] * 2 if rows is None else rows, **kwargs)
    state, info, steps = toy.run(built, request, params=params)
    return toy.tokens_of(state), info, state


@pytest.mark.parametrize(
    ("draft", "length", "accepted", "emitted"),
    [
        ([7, 0, 0, 0], 1, 0, [2]),
        ([7, 3, 4, 0], 3, 0, [2]),
        ([2, 7, 4, 0], 3, 1, [2, 3]),
        ([2, 3, 7, 5], 4, 2, [2, 3, 4]),
        ([2, 3, 4, 5], 4, 4, [2, 3, 4, 5, 6]),
        ([2, 3, 4, 5], 2, 2, [2, 3, 4]),
    ],
)
def test_b01_every_draft_token_is_verified(draft, length, accepted, emitted):
    tokens, info, _ = say([draft], [0, 1], lengths=[length], max_new=6)
    assert info.num_accepted[:, 0].tolist() == [accepted] * 2
    assert info.num_emitted[:, 0].tolist() == [len(emitted)] * 2
    assert tokens[0][: len(emitted)] == emitted
    assert tokens[0] == [2, 3, 4, 5, 6, 7]


def test_b01_lookup_on_a_repeating_prompt():
    table = jnp.asarray(np.roll(np.eye(8, dtype=np.float32), 1, axis=1))
    built = toy.compiled(
        toy.table_model(8),
        lookup(3),
        target=table,
        capacity=64,
        prefill_chunk=4,
    )
    state, info, _ = toy.run(built, toy.make_request([[1, 1, 1]], max_new=9))
    assert toy.tokens_of(state) == [[2, 3, 4, 5, 6, 7, 0, 1, 2]]
    assert info.num_accepted[0, 0] == 0


@pytest.mark.parametrize("name", toy.METHODS)
def test_b02_equals_plain_for_64_places(name):
    """d = 64: bit-equal programs or not, the tokens are equal."""
    request = toy.ragged(max_new=44)
    generated = toy.output(name, request)
    assert generated == toy.plain(request)
    for prompt, tokens in zip(toy.PROMPTS, generated, strict=True):
        assert toy.is_greedy(prompt, tokens)


def test_b04_greedy_and_seeded_rows_beside_each_other():
    """Each row equals its own run among greedy neighbours."""
    mixed = toy.ragged(temperature=[0.0, 1.0, 1.0, 0.8], seeds=[0, 1, 2, 2], max_new=14)
    expected = toy.plain(mixed)
    for name in ("draft", "self", "tree"):
        assert toy.output(name, mixed) == expected
    greedy = toy.ragged(max_new=14)
    assert toy.plain(greedy)[0] == expected[0]
    for row in range(1, 4):
        keep = np.arange(4) == row
        alone = jax.tree.map(
            lambda x, y, keep=keep: jnp.where(
                keep.reshape((4,) + (1,) * (x.ndim - 1)), x, y
            ),
            mixed,
            greedy,
        )
        assert toy.output("corrupted", alone)[row] == expected[row]


# ---- Stopping ------------------------------------------------------------------------


@functools.cache
def long_greedy():
    return toy.plain(toy.ragged(max_new=24))


@pytest.mark.parametrize("name", ["plain", "self", "corrupted", "tree", "lookup"])
@pytest.mark.parametrize("max_draft", [1, 3, 4, 8])
def test_b15_stop_at_every_place_of_a_step(name, max_draft):
    """The EOS trick: a token that greedy really emits is declared to be the stop."""
    free = long_greedy()
    for place in range(12):
        stop = [[row[place]] for row in free]
        request = toy.ragged(max_new=24, stop=stop, max_draft=max_draft)
        state, _, _ = toy.run(toy.method(name), request)
        ends = [row.index(row[place]) for row in free]
        assert toy.tokens_of(state) == [
            row[: end + 1] for row, end in zip(free, ends, strict=True)
        ]
        assert toy.reasons(state) == [STOP] * 4
        length = np.asarray(state.sequences.length)
        np.testing.assert_array_equal(state.cache.length, length - 1)
        if name == "self":
            draft = state.drafter
            np.testing.assert_array_equal(
                draft.cache.length + draft.num_unread, length - 1
            )


def test_b15_sampled_stop():
    free = toy.plain(toy.ragged(max_new=24, temperature=0.9))
    stop = [[row[5]] for row in free]
    request = toy.ragged(max_new=24, temperature=0.9, stop=stop)
    expected = [row[: row.index(row[5]) + 1] for row in free]
    for name in ("plain", "self", "tree"):
        assert toy.output(name, request) == expected


@pytest.mark.parametrize("draft", [[2, 7, 4, 5], [7, 3, 4, 5], [2, 3, 7, 7]])
def test_b16_a_rejected_stop_token_does_not_stop(draft):
    tokens, _, state = say([draft] * 3, [1], stop=[7], max_new=5)
    assert tokens == [[2, 3, 4, 5, 6]] * 2
    assert toy.reasons(state) == [LENGTH] * 2


def test_b17_no_stop_several_stops_and_a_stop_in_the_prompt():
    free = long_greedy()
    assert [len(row) for row in free] == [24] * 4
    first, second = free[0][2], free[0][6]
    assert first not in free[0][:2] and second not in free[0][:3]
    end = free[0][: free[0].index(first) + 1]
    for stop in ([first, second], [second, first], [second, first, 96]):
        request = toy.ragged(max_new=24, stop=[stop, [], [], []])
        for name in ("plain", "self"):
            state, _, _ = toy.run(toy.method(name), request)
            assert toy.tokens_of(state) == [end, *free[1:]]
            assert toy.reasons(state) == [STOP, LENGTH, LENGTH, LENGTH]
    # Only generated tokens count, and unused entries of the list do not.
    request = toy.ragged(max_new=24, stop=[[], [5, 17], [], [7, 29]])
    expected = toy.plain(request)
    assert [len(row) for row in expected][0] == 24
    assert toy.output("self", request) == expected
    for row, stops in ((1, (5, 17)), (3, (7, 29))):
        hits = [free[row].index(t) for t in stops if t in free[row]]
        assert expected[row] == free[row][: min(hits, default=23) + 1]


BUDGETS = (0, 1, 2, 3, 7, 8, 9, 17, 30)


@pytest.mark.parametrize("name", toy.METHODS)
def test_b21_every_budget_is_met_exactly(name):
    """All-accept, all-reject and mixed drafters; four budgets at a time."""
    full = toy.plain(toy.ragged(max_new=30))
    for start in range(0, len(BUDGETS), 4):
        budgets = [BUDGETS[(start + i) % len(BUDGETS)] for i in range(4)]
        state, info, _ = toy.run(toy.method(name), toy.ragged(max_new=budgets))
        assert toy.tokens_of(state) == [
            row[:n] for row, n in zip(full, budgets, strict=True)
        ]
        assert np.asarray(info.num_emitted).sum(axis=1).tolist() == budgets
        assert toy.reasons(state) == [LENGTH] * 4


def test_b21_no_budget_no_step_and_one_token_left_no_draft():
    request = toy.ragged(max_new=[0, 0, 0, 0])
    _, info, steps = toy.run(toy.method("self"), request)
    assert int(steps) == 0 and not np.any(info.is_live)
    _, info, steps = toy.run(toy.method("self"), toy.ragged(max_new=1))
    assert int(steps) == 1 and not np.any(np.asarray(info.num_drafted))


def test_no_room_ends_a_row_instead_of_clamping():
    """A budget beyond the buffers ends with LENGTH; nothing is written over."""
    built = toy.method("self")
    room = toy.CAPACITY - built.strategy.headroom
    state = built.prefill(built.params, toy.ragged(max_new=[10_000, 2**31 - 1, 9, 220]))
    for _ in range(2):
        state, _, _ = built.generate(built.params, state, jnp.int32(toy.SLOTS))
    assert toy.reasons(state) == [LENGTH] * 4
    assert state.sequences.length.tolist() == [room, room, 14, room]
    for row, prompt in enumerate(toy.PROMPTS):
        head = np.asarray(state.sequences.tokens)[row, : len(prompt)]
        assert head.tolist() == list(prompt)


def test_b57_no_sequence_outgrows_the_model():
    """Positions that the target cannot read are never asked of it."""
    built = toy.compiled(
        toy.table_model(32, max_positions=6),
        toy.script(4, 32),
        target=chain_script().params.target,
        own=toy.make_script(np.zeros((2, 1, 4)), np.zeros((2, 1))),
        capacity=64,
        prefill_chunk=4,
    )
    request = toy.make_request([[1, 2, 3], [1, 2, 3, 4, 5, 6, 7]], max_new=20)
    state, _, _ = toy.run(built, request)
    assert toy.tokens_of(state) == [[4, 5, 6], []]
    assert toy.reasons(state) == [LENGTH] * 2


def test_draft_length_beyond_the_draft_is_truncated():
    """B23: a drafter that claims more tokens than it holds is not believed."""
    tokens, info, _ = say([[2, 3, 4, 5]], [1], lengths=[9], max_new=7)
    assert tokens[0] == [2, 3, 4, 5, 6, 7, 8]
    assert info.num_drafted[0, 0] == 4 and info.num_judged[0, 0] == 4


def test_out_of_range_drafts_are_rejected():
    for draft in ([99, 3, 4, 5], [-1, 3, 4, 5], [2, 2**31 - 1, 4, 5]):
        tokens, _, _ = say([draft], [1], max_new=5)
        assert tokens == [[2, 3, 4, 5, 6]] * 2


# ---- Counting ------------------------------------------------------------------------


def test_b46_counts_of_the_engine():
    """Accepts 0, 4, 2, then 4 with a stop at index 1; and 1 in a second request."""
    drafts = [
        [[7, 7, 7, 7], [2, 3, 4, 5], [7, 8, 0, 0], [10, 11, 12, 13]],
        [[21, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
    ]
    tokens, info, state = say(
        drafts, None, rows=[[0], [20]], max_new=40, stop=[[11], [23]]
    )
    assert tokens == [list(range(1, 12)), [21, 22, 23]]
    assert toy.reasons(state) == [STOP, STOP]

    def first(name, num, row):
        return np.asarray(getattr(info, name))[row, :num].tolist()

    assert first("num_accepted", 5, 0) == [0, 4, 2, 2, 0]
    assert first("num_emitted", 5, 0) == [1, 5, 3, 2, 0]
    assert first("num_drafted", 5, 0) == [4, 4, 4, 4, 0]
    assert first("num_judged", 5, 0) == [4, 4, 4, 2, 0]
    assert first("is_live", 5, 0) == [True] * 4 + [False]
    assert first("num_accepted", 3, 1) == [1, 0, 0]
    assert first("num_emitted", 3, 1) == [2, 1, 0]
    # A stop of the target's own, where the draft was rejected: that draft was judged.
    assert first("num_judged", 3, 1) == [4, 1, 0]


def test_b46_budget_clips_what_counts_as_drafted():
    tokens, info, _ = say([[2, 3, 4, 5], [6, 7, 8, 9]], [1], max_new=7)
    assert tokens[0] == [2, 3, 4, 5, 6, 7, 8]
    assert np.asarray(info.num_drafted)[0, :3].tolist() == [4, 1, 0]
    assert np.asarray(info.num_accepted)[0, :3].tolist() == [4, 0, 0]


def test_b46_finished_rows_count_nothing():
    _, info, steps = toy.run(toy.method("self"), toy.ragged(max_new=[1, 30, 30, 30]))
    assert int(steps) > 2
    for leaf in (info.num_drafted, info.num_judged, info.num_accepted):
        assert not np.any(np.asarray(leaf)[0])
    assert not np.any(np.asarray(info.is_live)[0, 1:])
