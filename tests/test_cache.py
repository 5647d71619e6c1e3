"""The KV cache: tails, commits of chains and trees, blocks of 256 slots."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxdec.cache import BLOCK, init_kv_cache, round_capacity, write_tail
from jaxdec.drafters.draft_model import draft_model
from jaxdec.drafters.none import none


def numbered(lengths, capacity=BLOCK):
    """A cache whose entry at slot s of row b is 1000 b + s, everywhere."""
    cache = init_kv_cache(len(lengths), capacity, 2, 2, 4)
    slots = cache.keys[0].shape[2]
    value = 1000.0 * np.arange(len(lengths))[:, None] + np.arange(slots)
    value = np.broadcast_to(value[:, None, :, None], cache.keys[0].shape)
    layers = (jnp.asarray(value, jnp.float32), jnp.asarray(-value, jnp.float32))
    return cache.replace(
        keys=layers, values=layers[::-1], length=jnp.asarray(lengths, jnp.int32)
    )


def slots_of(cache, row):
    """What the entries of a row are numbered, after checking that all heads agree."""
    key = np.asarray(cache.keys[0])[row]
    assert np.all(key == key[:1, :, :1])
    for layer in (*cache.keys, *cache.values):
        np.testing.assert_array_equal(np.abs(np.asarray(layer)[row]), np.abs(key))
    return key[0, :, 0].astype(int) - 1000 * row


def test_round_capacity():
    assert [round_capacity(n) for n in (1, 255, 256, 257, 512)] == [
        256,
        256,
        256,
        512,
        512,
    ]
    assert init_kv_cache(1, 300, 1, 1, 4).keys[0].shape == (1, 1, 512, 4)


def test_commit_of_a_chain_moves_nothing():
    cache = numbered([5, 0, 100])
    after = cache.commit(None, jnp.asarray([3, 0, 7], jnp.int32))
    assert after.length.tolist() == [8, 0, 107]
    for row in range(3):
        np.testing.assert_array_equal(slots_of(after, row), np.arange(BLOCK))
    assert cache.length.tolist() == [5, 0, 100]


def test_commit_of_a_tree_moves_the_path_to_the_front_of_the_tail():
    path = jnp.asarray(
        [[0, 2, 5, 5, 5, 5], [0, 1, 2, 3, 4, 5], [0, 4, 4, 4, 4, 4]], jnp.int32
    )
    cache = numbered([5, 0, 100])
    after = cache.commit(path, jnp.asarray([3, 1, 2], jnp.int32))
    assert after.length.tolist() == [8, 1, 102]
    assert slots_of(after, 0)[:8].tolist() == [0, 1, 2, 3, 4, 5, 7, 10]
    assert slots_of(after, 1)[:1].tolist() == [0]
    assert slots_of(after, 2)[98:102].tolist() == [98, 99, 100, 104]
    np.testing.assert_array_equal(slots_of(cache, 0), np.arange(BLOCK))


def test_commit_of_a_path_equals_a_slow_walk():
    rng = np.random.default_rng(0)
    for _ in range(20):
        start, nodes = int(rng.integers(0, 200)), int(rng.integers(1, 12))
        depth = int(rng.integers(1, nodes + 1))
        path = np.sort(rng.choice(nodes, depth, replace=False))
        # As long as the tree is deep, or longer; not as long as it has nodes.
        path = np.pad(path, (0, int(rng.integers(0, 3))), mode="edge")
        after = numbered([start]).commit(
            jnp.asarray(path[None], jnp.int32), jnp.asarray([depth], jnp.int32)
        )
        wanted = [*range(start), *(start + path[:depth])]
        assert slots_of(after, 0)[: start + depth].tolist() == wanted


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("start", [0, 250, 255, 256, 500])
def test_a_tail_may_lie_across_blocks(batch, start):
    cache = numbered([start] * batch, capacity=2 * BLOCK)
    rows = jnp.arange(batch * 2 * 9 * 4, dtype=jnp.float32).reshape(batch, 2, 9, 4)
    length = jnp.maximum(cache.length - jnp.arange(batch, dtype=jnp.int32), 0)
    written = write_tail(cache.keys[0], rows, length)
    for row, num in enumerate(np.asarray(length)):
        np.testing.assert_array_equal(written[row, :, num : num + 9], rows[row])
    for row, num in enumerate(np.asarray(length)):
        keep = np.r_[0:num, num + 9 : 2 * BLOCK]
        np.testing.assert_array_equal(
            np.asarray(written)[row, :, keep], np.asarray(cache.keys[0])[row, :, keep]
        )


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("start", [0, 200, 239, 240, 250, 255])
@pytest.mark.parametrize("num", [17, 100, 300])
def test_what_a_chunk_writes_past_the_end_is_dropped(batch, start, num):
    cache = numbered([start] * batch)
    length = jnp.maximum(cache.length - 7 * jnp.arange(batch, dtype=jnp.int32), 0)
    rows = -jnp.arange(batch * 2 * num * 4, dtype=jnp.float32).reshape(batch, 2, num, 4)
    written = np.asarray(write_tail(cache.keys[0], rows, length))
    wanted = np.array(cache.keys[0])
    for row, first in enumerate(np.asarray(length)):
        fits = min(num, BLOCK - first)
        wanted[row, :, first : first + fits] = rows[row, :, :fits]
    np.testing.assert_array_equal(written, wanted)


@pytest.mark.parametrize("kind", ["none", "draft", "tree", "exact"])
def test_a_prompt_whose_last_chunk_reaches_past_the_end(kind):
    own, drafter = (
        toy.weights(toy.DRAFT_CONFIG, 7),
        draft_model(toy.tiny_draft(), toy.K),
    )
    model = toy.tiny(**(dict(min_rows=16, is_exact=True) if kind == "exact" else {}))
    if kind == "tree":
        drafter = toy.tree_of(drafter)
    if kind == "none":
        drafter, own = none(), None
    toy.check_last_chunk(
        functools.partial(
            toy.compiled, model, drafter, target=toy.tiny_params(), own=own
        )
    )


@pytest.mark.parametrize("length", [239, 248, 255, 256, 257, 270])
def test_decoding_across_a_block(length):
    """A prompt that ends near slot 256, and one far from it, under tree and chain.

    The long row makes the program read a second block; the short row must not notice.
    """
    rng = np.random.default_rng(length)
    prompts = [rng.integers(0, toy.VOCAB, n).tolist() for n in (length, 12, 270, 3)]
    request = toy.make_request(prompts, max_new=20, buffer=280)
    expected = toy.tokens_of(toy.run(wide("plain"), request)[0])
    logits = _long_logits([[*p, *t] for p, t in zip(prompts, expected, strict=True)])
    for row, prompt in enumerate(prompts):
        choice = np.argmax(logits[row], axis=-1)[len(prompt) - 1 :][:20]
        assert choice.tolist() == expected[row]
    built = wide("tree")
    state = toy.poison(built.prefill(built.params, request), np.nan)
    state, _, _ = built.generate(built.params, state, jnp.int32(toy.SLOTS))
    assert toy.tokens_of(state) == expected
    small = toy.make_request([[5], prompts[1], [7, 7], prompts[3]], max_new=20)
    alone = toy.plain(small)
    assert [alone[1], alone[3]] == [expected[1], expected[3]]


def wide(name):
    """A contract strategy with room for two blocks."""
    return toy.method(name, capacity=512)


@jax.jit
def _long(params, tokens):
    model = toy.tiny()
    batch, num = tokens.shape
    position = jnp.broadcast_to(jnp.arange(num, dtype=jnp.int32)[None], (batch, num))
    cache = model.init_cache(batch, num)
    return model.forward(params, cache, tokens, position, None)[1].logits


def _long_logits(rows):
    tokens = np.zeros((4, 300), np.int32)
    for row, said in enumerate(rows):
        tokens[row, : len(said)] = said
    return np.asarray(_long(toy.tiny_params(), jnp.asarray(tokens)))
