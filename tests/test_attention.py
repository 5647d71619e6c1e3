"""Attention over a cache, and beside it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdec.cache import write_tail
from jaxdec.models.attention import attend, attend_beside
from jaxdec.models.layers import matmul

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


def test_one_bf16_row_equals_the_same_row_among_two():
    x = jax.random.normal(jax.random.key(0), (1, 1, 32))
    weight = jax.random.normal(jax.random.key(1), (48, 32)).astype(jnp.bfloat16)
    both = matmul(jnp.concatenate([x, x], axis=1), weight, out_first=True)
    np.testing.assert_array_equal(matmul(x, weight, out_first=True), both[:, :1])
