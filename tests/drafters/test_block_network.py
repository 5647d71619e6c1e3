"""The network of block drafters: context, positions, windows, gradients, lengths."""

import dataclasses
import functools

import block_toys
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from block_toys import CONFIGS, LAYERS, block_config
from helpers_sampling import make_sequences

from jaxdec.drafters.dflash import BlockState, can_draft, dflash
from jaxdec.drafters.dspark import block_drafter, dspark, markov_start
from jaxdec.models.block import make_block_net
from jaxdec.models.block_weights import (
    block_params_from_tensors,
    expected_block_tensors,
)
from jaxdec.types import Commit, DrafterParams

MIXED = CONFIGS["dspark_rnn"]
"""Has sliding layers and full ones, and every head."""


def params_of(config) -> DrafterParams:
    own = block_toys.weights(config)
    return DrafterParams(own=own, shared=toy.tiny_params())


def fast(function):
    return jax.jit(function, compiler_options=toy.FAST)


def features_of(batch: int, num: int):
    return jax.random.normal(jax.random.key(5), (batch, num, 2 * LAYERS.hidden_size))


@functools.cache
def context_of(config, batch: int, num: int):
    """The context of features, made all at once."""
    net = make_block_net(config)

    def context(params, features):
        cache = net.init_cache(batch, num)
        cache = net.write(params, cache, net.fuse(params, features))
        return cache.commit(None, jnp.full((batch,), num, jnp.int32))

    return fast(context)(params_of(config), features_of(batch, num))


def test_context_in_pieces():
    """B23: after any commits, long, short or empty, the context is a fresh reading."""
    net = make_block_net(MIXED)
    params, drafter = params_of(MIXED), block_drafter(net)
    features = np.asarray(features_of(3, 40))
    whole = context_of(MIXED, 3, 40)
    extend = fast(drafter.extend)
    state = drafter.init(3, 64)
    rng = np.random.default_rng(0)
    done = np.zeros(3, int)
    while done.min() < 30:
        num = np.minimum(rng.integers(0, 6, 3), 40 - done)
        # What lies past the live rows is broken, and must not matter.
        rows = np.full((3, 5, features.shape[2]), np.nan, np.float32)
        for row in range(3):
            rows[row, : num[row]] = features[row, done[row] : done[row] + num[row]]
        commit = Commit(
            tokens=jnp.zeros((3, 6), jnp.int32),
            features=jnp.asarray(rows),
            length=jnp.asarray(num, jnp.int32),
        )
        state = extend(params, state, commit)
        done += num
        np.testing.assert_array_equal(state.cache.length, done)
    toy.assert_live_equal(state.cache, whole, done)


@pytest.mark.parametrize("window_from", ["anchor", "row"])
def test_a_block_stands_at_its_anchor(window_from):
    """B34: behind 3, 50 and 500 tokens a block says what the whole sequence gives it.

    The cache counts positions; `read_all`, which training uses, is told them.
    """
    config = block_config(
        windows=(6, None), causal=(True, False), window_from=window_from
    )
    net, params = make_block_net(config), params_of(config)
    lengths = jnp.asarray([3, 50, 500], jnp.int32)
    cache = context_of(config, 1, 512)
    spoil = jnp.arange(512)[None, None, :, None] >= lengths[:, None, None, None]

    def rows(x):
        return jnp.where(spoil, jnp.nan, jnp.broadcast_to(x, (3, *x.shape[1:])))

    cache = cache.replace(
        keys=tuple(map(rows, cache.keys)),
        values=tuple(map(rows, cache.values)),
        length=lengths,
    )
    anchor = jnp.asarray([7, 8, 9], jnp.int32)
    got = fast(net.read)(params, cache, anchor)
    read_all = fast(net.read_all)
    features = features_of(1, 512)
    want = read_all(params, features, lengths[None], anchor[None])[0]
    np.testing.assert_allclose(got, want, atol=2e-5)
    early = read_all(params, features, lengths[None] - 1, anchor[None])[0]
    assert np.all(np.abs(np.asarray(early - want)).max(axis=(1, 2)) > 0.01)


@pytest.mark.parametrize("window_from", ["anchor", "row"])
def test_windows(window_from):
    """Which features each row of a sliding layer feels, found by changing them.

    W = 6, the anchor at 20: from the anchor, rows see 14 to 19; from row k, 15 + k up.
    Causal rows do not feel later ones; a full layer would feel everything.
    """
    layers = dataclasses.replace(LAYERS, num_layers=1)
    config = block_config(
        layers,
        windows=(6,),
        causal=(True,),
        window_from=window_from,
        own_embedding=True,
    )
    net, params = make_block_net(config), params_of(config)

    def rows(features):
        position = jnp.asarray([[20]], jnp.int32)
        hidden = net.read_all(params, features, position, position)
        return jnp.sum(hidden[0, 0], axis=-1)

    slope = fast(jax.jacobian(rows))(features_of(1, 24))[:, 0]
    felt = np.abs(np.asarray(slope)).max(axis=2) > 0
    for k in range(config.block_size):
        first = 14 if window_from == "anchor" else 15 + k
        assert np.flatnonzero(felt[k]).tolist() == list(range(first, 20))


def test_gradients_reach_every_weight():
    """Training: the whole of a drafter is differentiable, over many anchors at once."""
    net, params = make_block_net(MIXED), params_of(MIXED)
    own = dict(params.own)
    ids = own.pop("vocabulary")
    features = features_of(2, 24)
    position = jnp.asarray([[3, 9, 17], [1, 2, 20]], jnp.int32)
    weigh = jax.random.normal(jax.random.key(1), (MIXED.draft_vocab_size,))

    def loss(own):
        every = DrafterParams(own=own | {"vocabulary": ids}, shared=params.shared)
        hidden = net.read_all(every, features, position, position)
        hidden = hidden.reshape(6, MIXED.block_size, -1)
        previous = jnp.tile(jnp.arange(MIXED.block_size, dtype=jnp.int32), (6, 1))
        head = net.markov(every)
        logits = net.logits(every, hidden)
        logits = logits + head.unrolled(head.start(6), previous, hidden)
        confidence = net.confidence(every, hidden, previous)
        return jnp.sum(jax.nn.log_softmax(logits) @ weigh) + jnp.sum(confidence)

    slopes = fast(jax.grad(loss))(own)
    for path, slope in jax.tree_util.tree_leaves_with_path(slopes):
        name = jax.tree_util.keystr(path)
        assert np.all(np.isfinite(slope)) and np.any(slope != 0), name


@pytest.mark.parametrize("length", [0, 5, -1])
def test_a_draft_is_no_longer_than_the_block(length):
    """B42: more than the block was trained for is an error, not a longer block."""
    with pytest.raises(ValueError, match="drafts 1 to 4 tokens"):
        block_drafter(make_block_net(CONFIGS["dspark"]), length)


def test_heads_are_not_left_out():
    """B40: a DSpark is not run as a DFlash, nor the other way round."""
    with pytest.raises(ValueError, match="use dspark"):
        dflash(make_block_net(CONFIGS["dspark"]))
    with pytest.raises(ValueError, match="use dflash"):
        dspark(make_block_net(CONFIGS["dflash"]))


def test_nothing_to_draft_from():
    """B27, B57: without a context, or without positions for a block, no draft."""
    net = make_block_net(CONFIGS["dspark"])
    cache = net.init_cache(4, 8)
    state = BlockState(cache=cache.replace(length=jnp.asarray([0, 1, 1020, 1021])))
    rows = make_sequences([[1], [1, 2], [1], [1]], 1)
    rows = rows.replace(length=state.cache.length + 1)
    assert can_draft(net, state, rows).tolist() == [False, True, True, False]


def test_a_recurrent_head_has_seen_the_anchor():
    """7.2.2 by hand: in the 1 + N layout the anchor's own row turns the state first."""
    size, rank, config = LAYERS.hidden_size, MIXED.markov_rank, MIXED
    rng = np.random.default_rng(0)
    shapes = expected_block_tensors(config)
    tensors = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    tensors["d2t"] = np.zeros(config.draft_vocab_size, int)
    params = DrafterParams(own=block_params_from_tensors(config, tensors), shared=None)
    rows = rng.normal(size=(1, config.block_size, size)).astype(np.float32)
    anchor, later = 7, [3, 90, 12]

    def bias(params, rows):
        start = markov_start(net, params, rows, jnp.asarray([anchor]))
        previous = jnp.asarray([[anchor, *later]])
        return net.markov(params).unrolled(start, previous, rows[:, 1:])

    net = make_block_net(config)
    got = fast(bias)(params, jnp.asarray(rows))[0]
    w1, w2, joint, shift = (
        tensors[f"markov_head.{name}"]
        for name in (
            "markov_w1.weight",
            "markov_w2.weight",
            "joint_proj.weight",
            "joint_proj.bias",
        )
    )
    state, want = np.zeros(rank), []
    for row, previous in zip(rows[0], [anchor, anchor, *later], strict=True):
        z = joint @ np.concatenate([state, w1[previous], row]) + shift
        gate, candidate, out = np.split(z, 3)
        gate = 1 / (1 + np.exp(-gate))
        state = gate * state + (1 - gate) * np.tanh(candidate)
        want.append(w2 @ np.tanh(out))
    np.testing.assert_allclose(got, want[1:], atol=1e-4)
