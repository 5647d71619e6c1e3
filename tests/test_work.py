"""Counting FLOPs and bytes of a traced program, against arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdec.planning.work import Operand, count

WEIGHTS = Operand(label="weights")
SQUARE = jax.ShapeDtypeStruct((8, 8), jnp.float32)
ROW = jax.ShapeDtypeStruct((1, 8), jnp.float32)
PRODUCT, SIZE = 2 * 8 * 8, 8 * 8 * 4
"""FLOPs of a row times the square, and its bytes."""


def count_of(function, value=None):
    """Of ``function(weights, row, number)``; the number is known if given."""
    number = jax.ShapeDtypeStruct((), jnp.int32)
    known = None if value is None else np.asarray(value, np.int32)
    operands = WEIGHTS, Operand(), Operand(value=known)
    return count(function, (SQUARE, ROW, number), operands)


def test_a_product_reads_weights_in_the_dtype_they_lie_in():
    half = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
    for weights, size in ((SQUARE, 4), (half, 2)):
        found = count(
            lambda w, x: x @ w.astype(jnp.float32), (weights, ROW), (WEIGHTS, Operand())
        )
        assert found.flops == PRODUCT
        assert found.bytes_by_label == {"weights": 8 * 8 * size}
        assert found.num_bytes == 8 * 8 * size


def test_a_split_array_counts_by_its_part():
    split = Operand(label="weights", share=0.25)
    found = count(lambda w, x: x @ w.T, (SQUARE, ROW), (split, Operand()))
    assert (found.flops, found.num_bytes) == (PRODUCT / 4, SIZE / 4)


@pytest.mark.parametrize("trips", [0, 1, 7])
def test_a_loop_counts_by_its_trips(trips):
    def function(w, x, num):
        return jax.lax.fori_loop(0, num, lambda i, y: y @ w, x)

    found = count_of(function, trips)
    assert (found.flops, found.num_bytes) == (trips * PRODUCT, trips * SIZE)
    assert found.num_open_loops == 0
    unknown = count_of(function)
    assert (unknown.flops, unknown.num_open_loops) == (0, 1)


def test_a_scan_takes_the_branch_of_each_turn():
    def function(w, x, _):
        def body(y, i):
            y = jax.lax.cond(i % 3 == 0, lambda: y @ w, lambda: y)
            return y, y[0, 0]

        return jax.lax.scan(body, x, jnp.arange(10, dtype=jnp.int32))

    assert count_of(function).flops == 4 * PRODUCT


def test_an_unknown_branch_is_the_dearest():
    def function(w, x, which):
        branches = [lambda: x, lambda: x @ w @ w, lambda: x @ w]
        return jax.lax.switch(which, branches)

    assert count_of(function).flops == 2 * PRODUCT
    assert count_of(function, 2).flops == PRODUCT


def test_only_what_is_looked_up_or_written_is_counted():
    cache = jax.ShapeDtypeStruct((1024, 8), jnp.float32)

    def function(cache, x, at):
        cache = jax.lax.dynamic_update_slice(cache, x, (at, jnp.int32(0)))
        part = jax.lax.dynamic_slice(cache, (at, jnp.int32(0)), (16, 8))
        return cache, x @ part.T, cache[jnp.array([3, 5])]

    number = jax.ShapeDtypeStruct((), jnp.int32)
    operands = Operand(label="kv"), Operand(), Operand()
    found = count(function, (cache, ROW, number), operands)
    written, sliced, looked_up = 1, 16, 2
    assert found.bytes_by_label["kv"] == (written + sliced + looked_up) * 8 * 4


def test_numbers_are_carried_along():
    def function(w, x, num):
        half = jnp.maximum((num * 2 + 1) // 2 - 3, 0)
        half = jnp.where(jnp.any(half > 100), 1, half)
        return jax.lax.fori_loop(0, half, lambda i, y: y @ w, x)

    for value, trips in ((9, 6), (2, 0), (1000, 1)):
        assert count_of(function, value).flops == trips * PRODUCT
