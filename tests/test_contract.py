"""The contract of architecture section 8: every strategy, every invariant."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxdec import acceptance, decoding
from jaxdec.drafters.draft_model import draft_model
from jaxdec.types import FinishReason

each = pytest.mark.parametrize("name", toy.METHODS)
ORACLES = ("self", "self_rejection")
SINGLES = ("plain", "lookup", "self", "tree")


def hot(**kwargs):
    """Rows of different temperatures, filters and limits."""
    kwargs = {"temperature": toy.TEMPERATURES, "top_p": [1, 1, 0.9, 1]} | kwargs
    return toy.ragged(**kwargs, top_k=[0, 20, 0, 0])


@functools.cache
def finished(name: str, is_hot: bool):
    """The run that most invariants are read from."""
    return toy.run(toy.method(name), hot() if is_hot else toy.ragged())


def test_plain_greedy_is_the_full_forwards_choice():
    """Oracle O1: without it, parity with plain decoding would prove nothing."""
    generated = toy.tokens_of(finished("plain", False)[0])
    for prompt, tokens in zip(toy.PROMPTS, generated, strict=True):
        assert toy.is_greedy(prompt, tokens)
        assert len(set(tokens)) > 3


@each
def test_greedy_parity(name):
    state, _, _ = finished(name, False)
    assert toy.tokens_of(state) == toy.tokens_of(finished("plain", False)[0])


@pytest.mark.parametrize("name", toy.MATCH_METHODS)
def test_sample_parity(name):
    """`match` emits the target's own sample, whatever is drafted."""
    tokens = toy.tokens_of(finished(name, True)[0])
    assert tokens == toy.tokens_of(finished("plain", True)[0])


def test_sampling_depends_on_the_key_of_the_row():
    same = toy.make_request(
        [[5, 17, 40]] * 4, max_new=[17, 22, 9, 20], seeds=[1, 1, 2, 3], temperature=1.0
    )
    first, second, third, fourth = toy.plain(same)
    assert first == second[:17]
    assert first[:9] != third and first[:9] != fourth[:9]


@each
def test_one_behind(name):
    """I1: after n steps both caches equal a fresh prefill of tokens[:length - 1]."""
    built = toy.method(name)
    state = built.prefill(built.params, hot())
    toy.assert_one_behind(built, state)
    for steps in (1, 1, 3):
        state, _, _ = built.generate(built.params, state, jnp.int32(steps))
        toy.assert_one_behind(built, state)


@each
@pytest.mark.parametrize("value", [np.nan, 1e4])
def test_poison(name, value):
    """I2: nothing at or past a length is ever read."""
    built = toy.method(name)
    state = toy.poison(built.prefill(built.params, hot()), value)
    for _ in range(3):
        state, _, _ = built.generate(built.params, state, jnp.int32(2))
        state = toy.poison(state, value)
    state, _, _ = built.generate(built.params, state, jnp.int32(toy.SLOTS))
    clean, _, _ = finished(name, True)
    assert toy.tokens_of(state) == toy.tokens_of(clean)
    assert toy.reasons(state) == toy.reasons(clean)


@each
def test_strangers_of_other_slots_and_neighbours(name):
    """I4: a row's tokens do not depend on its batch mates or its slot."""
    built = toy.method(name)
    request = hot()
    expected = toy.tokens_of(finished(name, True)[0])
    order = [2, 0, 3, 1]
    state, _, _ = toy.run(built, toy.pick(request, order))
    assert toy.tokens_of(state) == [expected[i] for i in order]
    other = toy.make_request(
        [[9], [4, 4, 4, 4], [1, 2], [50, 60]],
        max_new=5,
        temperature=0.9,
        seeds=range(4),
    )
    mixed = jax.tree.map(
        lambda x, y: jnp.stack([y[0], x[1], y[2], x[3]]), request, other
    )
    tokens = toy.tokens_of(toy.run(built, mixed)[0])
    assert tokens[1] == expected[1] and tokens[3] == expected[3]


@pytest.mark.parametrize("name", SINGLES)
def test_strangers_alone(name):
    """I4 again, with no batch mates at all: another program, the same tokens."""
    request = hot()
    expected = toy.tokens_of(finished(name, True)[0])
    for row in range(4):
        state, _, _ = toy.run(toy.method(name), toy.pick(request, [row]))
        assert toy.tokens_of(state) == [expected[row]]


@each
def test_late_arrival(name):
    """A slot is a row: inserting a request mid-run is one tree map."""
    built = toy.method(name)
    request = hot()
    expected = toy.tokens_of(finished(name, True)[0])
    late = built.prefill(built.params, request)
    state = built.prefill(built.params, toy.pick(request, [1, 1, 3, 3]))
    for slot, row in ((2, 0), (1, 2)):
        state, _, _ = built.generate(built.params, state, jnp.int32(1))
        state = jax.tree.map(
            lambda x, y, slot=slot, row=row: x.at[slot].set(y[row]), state, late
        )
    state, _, _ = built.generate(built.params, state, jnp.int32(toy.SLOTS))
    assert toy.tokens_of(state) == [expected[i] for i in (1, 2, 0, 3)]


@each
def test_nothing_spent(name):
    """I5: the state before a step is still a valid state, and unchanged."""
    built = toy.method(name)
    state = built.prefill(built.params, hot())
    state, _, _ = built.generate(built.params, state, jnp.int32(1))
    before = [np.array(x) for x in jax.tree.leaves(_raw(state))]
    first = built.generate(built.params, state, jnp.int32(2))
    second = built.generate(built.params, state, jnp.int32(2))
    for old, x in zip(before, jax.tree.leaves(_raw(state)), strict=True):
        np.testing.assert_array_equal(old, x)
    jax.tree.map(np.testing.assert_array_equal, _raw(first), _raw(second))


def _raw(tree):
    """Keys as numbers, so that NumPy can compare them."""

    def data(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if is_key else x

    return jax.tree.map(data, tree)


@each
def test_one_shape_one_trace(name):
    """I6: a step returns what it was given; other values compile nothing."""
    built = toy.method(name)
    state = jax.eval_shape(built.strategy.prefill, built.params, hot())
    after, _ = jax.eval_shape(built.strategy.step, built.params, state)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        assert (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, y.weak_type)
    toy.run(built, hot())
    traced = len(built.traces)
    state, _, _ = toy.run(built, hot(max_draft=[0, 1, 2, 3], stop=[5, 6]), steps=3)
    toy.run(built, toy.ragged(max_new=3, repetition_penalty=1.2, min_new_tokens=2))
    built.generate(built.params, state, jnp.int32(4))
    assert len(built.traces) == traced


@each
@pytest.mark.parametrize("is_hot", [False, True])
def test_progress(name, is_hot):
    """Every unfinished row emits at least one and at most K + 1 tokens a step."""
    state, info, steps = finished(name, is_hot)
    most = toy.method(name).strategy.max_length + 1
    live = np.asarray(info.is_live)
    emitted = np.asarray(info.num_emitted)
    assert np.all(emitted[live] >= 1) and np.all(emitted[live] <= most)
    assert np.all(emitted[~live] == 0)
    assert np.all(live[:, 0]) and not np.any(live[:, int(steps) :])
    assert emitted.sum(axis=1).tolist() == [17, 22, 9, 20]
    accepted, judged = np.asarray(info.num_accepted), np.asarray(info.num_judged)
    assert np.all(accepted <= judged) and np.all(judged <= info.num_drafted)
    assert np.all(emitted - accepted <= 1) and np.all(accepted <= emitted)
    assert toy.reasons(state) == [FinishReason.LENGTH] * 4


@each
def test_finish(name):
    """A stop in an accepted run, a stop right after the anchor, a limit, no budget."""
    free = toy.tokens_of(finished("plain", False)[0])
    inside = _first_seen(free[0], 3)
    request = toy.ragged(
        max_new=[17, 22, 9, 0], stop=[[90, free[0][inside]], [free[1][0]], [], []]
    )
    state, info, _ = toy.run(toy.method(name), request)
    assert toy.tokens_of(state) == [free[0][: inside + 1], free[1][:1], free[2], []]
    assert toy.reasons(state) == [
        FinishReason.STOP_TOKEN,
        FinishReason.STOP_TOKEN,
        FinishReason.LENGTH,
        FinishReason.LENGTH,
    ]
    length = np.asarray(state.sequences.length)
    np.testing.assert_array_equal(state.cache.length, length - 1)
    assert not np.any(np.asarray(info.is_live)[3])
    toy.assert_one_behind(toy.method(name), state)


def _first_seen(tokens, least: int) -> int:
    """An index from `least` up whose token did not occur before it."""
    for index in range(least, len(tokens)):
        if tokens[index] not in tokens[:index]:
            return index
    raise AssertionError("the toy model repeats itself; choose another prompt")


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_oracle_is_fully_accepted(name, temperature):
    request = toy.ragged(max_new=37, temperature=temperature)
    _, info, steps = toy.run(toy.method(name), request)
    np.testing.assert_array_equal(info.num_accepted, info.num_judged)
    assert int(steps) == -(-37 // (toy.K + 1))


def test_a_tree_keeps_what_its_chain_keeps():
    """Elder siblings, some with the very token of the chain, take nothing from it."""
    request = toy.ragged(max_new=40)
    chain, tree = (
        np.asarray(toy.run(toy.method(name), request)[1].num_accepted)
        for name in ("corrupted", "tree")
    )
    # Near the limit a tree is cut by nodes, two per depth, and a chain by tokens.
    far = (np.cumsum(chain + 1, axis=1) < 40 - 2 * toy.K) & (np.arange(toy.SLOTS) < 20)
    assert np.sum(far) > 8 and np.sum(chain[far] > 2) > 4
    np.testing.assert_array_equal(tree[far], chain[far])


@pytest.mark.parametrize("name", ["junk", "draft"])
def test_junk_costs_speed_only(name):
    state, info, steps = finished(name, False)
    accepted, judged = np.asarray(info.num_accepted), np.asarray(info.num_judged)
    assert accepted.sum() <= 0.1 * judged.sum()
    assert int(steps) >= 18
    assert toy.tokens_of(state) == toy.tokens_of(finished("plain", False)[0])


# ---- Law: TABLE, where every distribution is known exactly ---------------------------

TARGET = np.array([[0.0, 1.0, 0.3], [0.5, -1.0, 0.2], [2.0, 0.1, -0.4]], np.float32)
DRAFT = np.array([[1.2, 0.0, -0.5], [0.1, 0.3, 0.2], [-1.0, 0.5, 1.5]], np.float32)
NUM_KEYS = 12_000


@functools.cache
def _table_program(rule: str):
    """Continuations of one request for many keys, and how many drafts they kept."""
    model = toy.table_model(3)
    coupled = rule == "match"
    built = toy.compiled(
        model,
        draft_model(model, 2, coupled=coupled),
        acceptance.match if coupled else acceptance.rejection,
        target=jnp.asarray(TARGET),
        own=jnp.asarray(DRAFT),
        capacity=32,
        prefill_chunk=4,
    )

    def one(key, request):
        request = request.replace(key=key[None])
        state = built.strategy.prefill(built.params, request)
        state, info, _ = decoding.generate(
            built.strategy, built.params, state, jnp.int32(4), num_slots=4
        )
        return state.sequences.tokens[0, 1:5], jnp.sum(info.num_accepted)

    return jax.jit(jax.vmap(one, in_axes=(0, None)), compiler_options=toy.FAST)


@pytest.mark.parametrize("rule", ["rejection", "match"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_law(rule, temperature):
    """The joint law of the first four tokens is the target's.

    Four tokens at K = 2 cover an accepted run, a rejection at each slot, a bonus and
    the start of a second step. Each of 81 cells must lie within 5 standard errors:
    with the fixed keys this passes or fails for good; over keys the false-alarm rate
    is below 81 * 6e-7 = 5e-5.
    """
    request = toy.make_request([[0]], max_new=4, temperature=temperature, buffer=4)
    keys = jax.random.split(jax.random.key(2024), NUM_KEYS)
    tokens, accepted = map(np.asarray, _table_program(rule)(keys, request))
    counts = np.bincount(tokens @ np.array([27, 9, 3, 1]), minlength=81)
    law = np.exp(TARGET.astype(np.float64) / temperature)
    law = law / law.sum(axis=1, keepdims=True)
    expected = np.zeros(81)
    for index in range(81):
        path = [0, *(index // 3**power % 3 for power in (3, 2, 1, 0))]
        expected[index] = np.prod([law[a, b] for a, b in itertools.pairwise(path)])
    error = np.sqrt(expected * (1 - expected) / NUM_KEYS)
    assert np.all(np.abs(counts / NUM_KEYS - expected) < 5 * error)
    assert 0.4 < accepted.mean() < 2.4
