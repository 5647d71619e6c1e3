"""Attention over a cache, and beside it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxdec.cache import write_tail
from jaxdec.models.attention import (
    attend,
    attend_all,
    attend_beside,
    attend_in_order,
)
from jaxdec.models.layers import matmul, take_rows

B, T, H, G, D = 3, 4, 4, 2, 8


def arrays(capacity):
    keys = jax.random.split(jax.random.key(0), 5)
    query = jax.random.normal(keys[0], (B, T, H, D))
    cached = [jax.random.normal(k, (B, G, capacity, D)) for k in keys[1:3]]
    rows = [jax.random.normal(k, (B, G, T, D)) for k in keys[3:]]
    return query, cached, rows


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("capacity", [256, 768])
def test_beside_the_cache_equals_in_the_cache(capacity, window):
    query, cached, rows = arrays(capacity)
    length = jnp.asarray([0, 5, capacity - T], jnp.int32)
    # A tree: two children of the anchor, and a child of the first.
    depth = jnp.asarray([0, 1, 1, 2], jnp.int32)
    seen = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], bool)
    mask = jnp.broadcast_to(jnp.asarray(seen), (B, T, T))
    position = length[:, None] + depth[None]
    options = dict(scale=D**-0.5, window=window)
    written = [write_tail(c, r, length) for c, r in zip(cached, rows, strict=True)]
    want = attend(query, *written, length, position, mask, **options)
    # What the cache holds past its length must not matter, however broken.
    slot = jnp.arange(capacity)[None, None, :, None]
    dirty = [jnp.where(slot < length[:, None, None, None], c, jnp.nan) for c in cached]
    got = attend_beside(
        query, *dirty, length, position, *rows, position, mask, **options
    )
    np.testing.assert_allclose(got, want, atol=2e-6)
    # Held entries that nobody may see change nothing, and rows are strangers.
    more = [jnp.concatenate([r, r + 1], axis=2) for r in rows]
    wide = jnp.concatenate([mask, jnp.zeros_like(mask)], axis=2)
    twice = jnp.concatenate([position, position], axis=1)
    again = attend_beside(
        query, *dirty, length, position, *more, twice, wide, **options
    )
    np.testing.assert_allclose(again, want, atol=2e-6)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("capacity", [256, 768])
def test_a_node_rounds_like_its_path_alone(capacity, window):
    """In order: the same bits for a node of a tree as for the end of a chain."""
    query, cached, rows = arrays(capacity)
    # Tails at the start, at or across the end of a block, and at the cache's end.
    length = jnp.asarray([0, min(254, capacity - T - 2), capacity - T], jnp.int32)
    seen = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)
    mask = jnp.broadcast_to(jnp.asarray(seen), (B, T, T))
    position = length[:, None] + jnp.asarray([0, 1, 1, 2], jnp.int32)[None]
    slot = jnp.arange(capacity)[None, None, :, None]
    live = slot < length[:, None, None, None]
    dirty = [jnp.where(live, c, jnp.nan) for c in cached]
    options = dict(scale=D**-0.5, window=window)

    def written(order):
        return [
            write_tail(c, r[:, :, order], length)
            for c, r in zip(dirty, rows, strict=True)
        ]

    got = attend_in_order(query, *written([0, 1, 2, 3]), length, mask, **options)
    for node, path in ((1, [0, 1, 2, 3]), (3, [0, 2, 3, 1])):
        chain = attend_in_order(query[:, path], *written(path), length, None, **options)
        np.testing.assert_array_equal(got[:, node], chain[:, path.index(node)])
    clean = [jnp.where(jnp.isnan(w), 0.0, w) for w in written([0, 1, 2, 3])]
    want = attend(query, *clean, length, position, mask, **options)
    np.testing.assert_allclose(got, want, atol=2e-6)
    # A later forward finds the same entries in the cache instead of in its tail.
    path = [0, 2, 3]
    later = [
        write_tail(write_tail(c, r[:, :, path], length), r[:, :, [3] * T], length + 2)
        for c, r in zip(dirty, rows, strict=True)
    ]
    last = attend_in_order(query[:, [3] * T], *later, length + 2, None, **options)
    fits = np.asarray(length) + 2 + T <= capacity
    np.testing.assert_array_equal(last[fits, 0], got[fits, 3])


def test_all_at_once_equals_the_definition():
    query, (keys, values), _ = arrays(6)
    mask = np.random.default_rng(0).random((B, T, 6)) < 0.5
    mask[:, :, 2] = True
    got = attend_all(query, keys, values, jnp.asarray(mask), scale=D**-0.5)
    keys, values = (np.repeat(np.asarray(x), H // G, axis=1) for x in (keys, values))
    scores = np.einsum("bthd,bhrd->bhtr", query, keys) * D**-0.5
    scores = np.where(mask[:, None], scores, -np.inf)
    weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weight = weight / weight.sum(axis=-1, keepdims=True)
    want = np.einsum("bhtr,bhrd->bthd", weight, values)
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_rows_of_a_table_are_converted_and_not_the_table():
    """A loop that reads rows of a bfloat16 table holds no float32 copy of it."""
    table = jax.random.normal(jax.random.key(0), (512, 24)).astype(jnp.bfloat16)
    index = jnp.asarray([3, -4, 600], jnp.int32)
    want = np.asarray(table, np.float32)[[3, 0, 511]]
    np.testing.assert_array_equal(take_rows(table, index), want)

    def copies(read):
        def loop(table, index, num):
            def body(_, index):
                signs = read(table, index) > 0
                return (index + jnp.sum(signs, axis=1, dtype=jnp.int32)) % 512

            return jax.lax.fori_loop(0, num, body, index)

        text = jax.jit(loop).lower(table, index, 9).compile(toy.OPTIMISED).as_text()
        return re.findall(r"= f32\[512,24\]\S* (?:fusion|copy)\(", text)

    def plainly(table, index):
        return jnp.take(table, index, axis=0, mode="clip").astype(jnp.float32)

    assert copies(take_rows) == []
    assert len(copies(plainly)) == 1, "the compiler has changed: take_rows may go"


def test_one_bf16_row_equals_the_same_row_among_two():
    x = jax.random.normal(jax.random.key(0), (1, 1, 32))
    weight = jax.random.normal(jax.random.key(1), (48, 32)).astype(jnp.bfloat16)
    both = matmul(jnp.concatenate([x, x], axis=1), weight, out_first=True)
    np.testing.assert_array_equal(matmul(x, weight, out_first=True), both[:, :1])
