"""Layers with a sliding window take rejected drafts back exactly.

The windows are shorter than the prompts, the drafts and the depth of the trees, so that
every step reads keys that only some of its nodes may see. There is nothing to restore:
a window is a mask by position over entries that are all kept.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxdec import tree
from jaxdec.models.config import RopeConfig
from jaxdec.models.decoder import make_model

CONFIG = dataclasses.replace(
    toy.TINY_CONFIG,
    layer_windows=(3, 5),
    ropes=(RopeConfig(), RopeConfig(theta=500.0)),
    layer_rope=(1, 0),
    qk_norm=True,
)
K = 6
STEPS = 40


@functools.cache
def params():
    return toy.weights(CONFIG, 11)


@functools.cache
def model():
    return make_model(CONFIG)


@functools.cache
def method(name):
    drafter = toy.script(K) if name == "chain" else toy.tree_of(toy.script(K))
    nothing = toy.make_script(np.zeros((4, toy.SLOTS, K)), np.zeros((4, toy.CAPACITY)))
    return toy.compiled(model(), drafter, target=params(), own=nothing)


@functools.cache
def plain(temperature):
    """What decoding says that judges no draft."""
    request = toy.ragged(max_new=STEPS, temperature=temperature, max_draft=0)
    return toy.run(method("chain"), request)[0]


def script(temperature):
    """Right up to a slot that moves with row and step; then wrong, then right again."""
    drafts = np.full((4, toy.SLOTS, K), toy.ORACLE)
    for row in range(4):
        for step in range(toy.SLOTS):
            wrong = (row + 3 * step) % (K + 2)
            drafts[row, step, wrong : wrong + 1] = toy.WRONG
    return toy.make_script(drafts, plain(temperature).sequences.tokens)


def run(name, temperature, spoil):
    """A whole run, `spoil` applied to the state before every other step."""
    built = method(name)
    arrays = built.params.replace(drafter=script(temperature))
    state = built.prefill(arrays, toy.ragged(max_new=STEPS, temperature=temperature))
    accepted = []
    for _ in range(STEPS // 2):
        state, info, _ = built.generate(arrays, spoil(state), jnp.int32(2))
        accepted.append(np.asarray(info.num_accepted)[:, :2])
    return state, np.concatenate(accepted, axis=1)


def test_decoding_says_the_full_forwards_choice():
    """From nothing, in one forward, without a cache: windows over plain positions."""
    state = plain(0.0)
    _, output = toy.full_forward(state.sequences.tokens, model(), params())
    choice = np.asarray(output.logits).argmax(-1)
    said = np.asarray(state.sequences.tokens)
    for row, prompt in enumerate(toy.PROMPTS):
        places = np.arange(len(prompt), len(prompt) + STEPS)
        np.testing.assert_array_equal(said[row, places], choice[row, places - 1])
        assert len(set(said[row, places].tolist())) > 3


each = pytest.mark.parametrize("name", ["chain", "tree"])


@each
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_rejected_nodes_leave_nothing_behind(name, temperature):
    """Whatever is not live is NaN before every other step."""
    spoil = functools.partial(toy.poison, value=np.nan)
    state, accepted = run(name, temperature, spoil)
    assert toy.tokens_of(state) == toy.tokens_of(plain(temperature))
    # Nothing, everything and each length between was kept.
    assert set(accepted.reshape(-1).tolist()) == set(range(K + 1))
    fresh, _ = toy.full_forward(state.sequences.tokens, model(), params())
    for ours, theirs in zip(state.cache.keys, fresh.keys, strict=True):
        for row, num in enumerate(np.asarray(state.sequences.length) - 1):
            np.testing.assert_allclose(
                np.asarray(ours)[row, :, :num],
                np.asarray(theirs)[row, :, :num],
                rtol=0,
                atol=2e-5,
            )


PARENTS = np.array([0, 1, 1, 2, 4, 5, 5, 6, 8, 0, 10], np.int32)
"""Deeper than both windows, with a late second branch from the root."""


def test_a_node_sees_the_window_of_its_own_path():
    """Against the path as one plain sequence, read from nothing."""
    rng = np.random.default_rng(2)
    context = rng.integers(0, toy.VOCAB, (2, 12)).astype(np.int32)
    nodes = rng.integers(0, toy.VOCAB, (2, len(PARENTS) + 1)).astype(np.int32)
    parents, length = jnp.asarray(PARENTS), np.asarray([11, 7], np.int32)
    num = nodes.shape[1]

    def verify(arrays, context, nodes, length):
        cache = model().init_cache(2, 64)
        position = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32)[None], (2, 12))
        cache, _ = model().forward(arrays, cache, context, position, None)
        cache = cache.commit(None, length)
        mask = jnp.broadcast_to(tree.ancestors(parents)[None], (2, num, num))
        position = length[:, None] + tree.depth(parents)[None]
        return model().forward(arrays, cache, nodes, position, mask)[1].logits

    logits = jax.jit(verify, compiler_options=toy.FAST)(
        params(), context, nodes, jnp.asarray(length)
    )
    depth = np.asarray(tree.depth(parents))
    assert depth.max() > 5
    plain = np.zeros((2 * num, toy.FULL), np.int32)
    for row in range(2):
        for node in range(num):
            path = np.asarray(tree.path_to(parents, jnp.int32(node)))
            path = path[: depth[node] + 1]
            sequence = [*context[row, : length[row]], *nodes[row, path]]
            plain[row * num + node, : len(sequence)] = sequence
    expected = np.concatenate(
        [
            toy.full_forward(plain[at : at + 4], model(), params())[1].logits
            for at in range(0, 2 * num, 4)
        ]
    )
    for row in range(2):
        for node in range(num):
            last = length[row] + depth[node]
            np.testing.assert_allclose(
                np.asarray(logits)[row, node],
                expected[row * num + node, last],
                rtol=0,
                atol=2e-5,
            )


def test_the_windows_matter():
    """Or else the tests above would say nothing."""
    tokens = np.arange(24, dtype=np.int32)
    padded = np.tile(np.pad(tokens, (0, toy.FULL - 24)), (4, 1))
    wide = make_model(dataclasses.replace(CONFIG, layer_windows=()))
    _, narrow = toy.full_forward(padded, model(), params())
    _, full = toy.full_forward(padded, wide, params())
    difference = np.abs(np.asarray(narrow.logits - full.logits)[0]).max(axis=-1)
    assert np.all(difference[:3] < 1e-4) and np.all(difference[3:24] > 1e-2)
