"""The contract of architecture section 8 for EAGLE drafters, on toy.TINY."""

import functools

import eagle_toys
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxdec.drafters.eagle import recurrent_net
from jaxdec.drafters.recurrent_tree import recurrent_tree
from jaxdec.types import Commit, FinishReason

NAMES = ("eagle3_tree", "eagle3", "peagle", "oracle_tree", "corrupted")
"""The last two are oracles for MARKOV; one is made wrong at a slot that moves."""
each = pytest.mark.parametrize("name", NAMES)


@functools.cache
def method(name) -> toy.Method:
    if name in ("oracle_tree", "corrupted"):
        taps, build, _ = eagle_toys.methods()["eagle1"]
        params, target = eagle_toys.oracle_params(), eagle_toys.markov_params()
        if name == "corrupted":
            drafter = toy.corrupted(build())
        else:
            net = recurrent_net(eagle_toys.EAGLE_1)
            drafter = recurrent_tree(net, **eagle_toys.TREE)
    else:
        taps, build, params = eagle_toys.methods()[name]
        # Trees that do not know the noise are as lossless as those that do.
        options = {"noise": False} if name == "eagle3_tree" else {}
        drafter, target = build(**options), toy.tiny_params()
    return toy.compiled(toy.tiny(taps=taps), drafter, target=target, own=params)


def hot(**kwargs):
    """Rows of different temperatures, filters and limits."""
    kwargs = {"temperature": toy.TEMPERATURES, "top_p": [1, 1, 0.9, 1]} | kwargs
    return toy.ragged(**{"max_draft": eagle_toys.TREE["nodes"]} | kwargs)


def cold(**kwargs):
    return hot(temperature=0.0, top_p=1.0, **kwargs)


def plain(name, request):
    """What plain decoding says with the same target; one program for all targets."""
    built = toy.method("plain")
    params = built.params.replace(target=method(name).params.target)
    return toy.tokens_of(toy.run(built, request, params=params)[0])


@functools.cache
def finished(name, is_hot):
    return toy.run(method(name), hot() if is_hot else cold())


@each
@pytest.mark.parametrize("is_hot", [False, True])
def test_parity(name, is_hot):
    """Whatever is drafted, the output is the target's own."""
    state, info, _ = finished(name, is_hot)
    assert toy.tokens_of(state) == plain(name, hot() if is_hot else cold())
    drafted, live = np.asarray(info.num_drafted), np.asarray(info.is_live)
    # A prompt of one token has no feature to draft from; a limit leaves no room.
    assert np.all(drafted[0, 0] == 0)
    assert np.all(drafted[1:][live[1:]][:3] > 0)


@each
def test_penalties_and_bans_parity(name):
    """B43: what asks for the tokens before a node sees that node's own path."""
    request = hot(
        repetition_penalty=[1.5, 1.0, 2.0, 1.0],
        frequency_penalty=[0.0, 0.8, 0.0, 0.5],
        no_repeat_ngram=[0, 2, 0, 3],
        temperature=[0.0, 0.0, 0.9, 0.7],
    )
    state, info, _ = toy.run(method(name), request)
    assert toy.tokens_of(state) == plain(name, request)
    if name == "oracle_tree":
        assert_fully_accepted(info)


def assert_fully_accepted(info):
    accepted, judged = np.asarray(info.num_accepted), np.asarray(info.num_judged)
    np.testing.assert_array_equal(accepted, judged)
    assert np.all(np.max(accepted, axis=1) == eagle_toys.LENGTH)


@pytest.mark.parametrize("is_hot", [False, True])
def test_an_oracle_tree_is_accepted_to_its_full_depth(is_hot):
    """At any temperature: the noise that the target will add is added in growth."""
    assert_fully_accepted(finished("oracle_tree", is_hot)[1])


def test_corrupted_drafts_are_cut_where_they_are_wrong():
    """Rejections at every slot, and the rows before them kept."""
    _, info, _ = finished("corrupted", True)
    accepted = np.asarray(info.num_accepted)[np.asarray(info.is_live)]
    assert set(range(eagle_toys.LENGTH + 1)) == set(accepted.tolist())


@pytest.mark.parametrize("name", ["eagle3", "eagle3_tree", "peagle"])
def test_one_behind(name):
    """I1: both caches equal a fresh reading of the committed tokens but the last."""
    built = method(name)
    taps, build, params = eagle_toys.methods()[name]
    drafter = build()

    @functools.partial(jax.jit, compiler_options=toy.FAST)
    def fresh(features, tokens, length):
        state = drafter.init(tokens.shape[0], toy.FULL)
        commit = Commit(tokens=tokens, features=features, length=length)
        return drafter.extend(params, state, commit)

    state = built.prefill(built.params, hot())
    for steps in (0, 1, 3):
        state, _, _ = built.generate(built.params, state, jnp.int32(steps))
        length = np.asarray(state.sequences.length) - 1
        np.testing.assert_array_equal(state.cache.length, length)
        np.testing.assert_array_equal(state.drafter.cache.length, length)
        tokens = np.asarray(state.sequences.tokens)[:, : toy.FULL + 1]
        _, output = toy.full_forward(tokens, toy.tiny(taps=taps))
        reference = fresh(output.features, jnp.asarray(tokens), jnp.asarray(length))
        toy.assert_live_equal(state.drafter.cache, reference.cache, length)
        np.testing.assert_allclose(
            np.asarray(state.drafter.hidden)[length > 0],
            np.asarray(reference.hidden)[length > 0],
            rtol=0,
            atol=2e-5,
        )


@each
@pytest.mark.parametrize("value", [np.nan, 1e4])
def test_poison(name, value):
    """I2, B25: nothing at or past a length is ever read."""
    built = method(name)
    state = toy.poison(built.prefill(built.params, hot()), value)
    for _ in range(2):
        state, _, _ = built.generate(built.params, state, jnp.int32(2))
        state = toy.poison(state, value)
    state, _, _ = built.generate(built.params, state, jnp.int32(toy.SLOTS))
    clean, _, _ = finished(name, True)
    assert toy.tokens_of(state) == toy.tokens_of(clean)
    assert toy.reasons(state) == [FinishReason.LENGTH] * 4


@each
def test_strangers(name):
    """I4: neither slot nor neighbours show, in tokens or in what was drafted."""
    built = method(name)
    expected, info, _ = finished(name, True)
    order = [2, 0, 3, 1]
    state, moved, _ = toy.run(built, toy.pick(hot(), order))
    tokens = toy.tokens_of(expected)
    assert toy.tokens_of(state) == [tokens[i] for i in order]
    for field in ("draft_tokens", "draft_parents", "num_accepted"):
        ours, theirs = (np.asarray(getattr(x, field)) for x in (moved, info))
        live = np.asarray(moved.is_live)
        np.testing.assert_array_equal(ours[live], theirs[order][live])


@each
def test_one_trace_and_nothing_spent(name):
    """I5 and I6: other values compile nothing; the state before a step stays valid."""
    built = method(name)
    state = built.prefill(built.params, hot())
    state, _, _ = built.generate(built.params, state, jnp.int32(2))
    before = [np.array(x) for x in jax.tree.leaves(state.drafter)]
    traced = len(built.traces)
    first, second = (
        built.generate(built.params, state, jnp.int32(3))[0] for _ in range(2)
    )
    for old, x in zip(before, jax.tree.leaves(state.drafter), strict=True):
        np.testing.assert_array_equal(old, x)
    assert toy.tokens_of(first) == toy.tokens_of(second)
    after, _ = jax.eval_shape(built.strategy.step, built.params, state)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
    toy.run(built, cold(max_draft=[0, 1, 2, 3], stop=[5, 6]), steps=2)
    assert len(built.traces) == traced


def test_out_of_positions():
    """B27: a drafter whose positions end falls silent; its neighbours do not notice."""
    _, info, _ = finished("eagle3", False)
    start = np.asarray([len(p) for p in toy.PROMPTS])
    emitted, drafted = np.asarray(info.num_emitted), np.asarray(info.num_drafted)
    length = start[:, None] + np.cumsum(emitted, axis=1) - emitted
    fits = length + eagle_toys.LENGTH <= eagle_toys.MAX_POSITIONS
    live = np.asarray(info.is_live)
    assert np.any(live[3] & ~fits[3]) and np.all(fits[:3][live[:3]])
    assert np.all(drafted[live & ~fits] == 0)
    # A row with r tokens left takes r - 1 drafts at most.
    left = start[:, None] + np.asarray([[17], [22], [9], [20]]) - length
    expected = np.minimum(eagle_toys.LENGTH, left - 1)
    is_fed = live & fits & (length > 1)
    np.testing.assert_array_equal(drafted[is_fed], expected[is_fed])
