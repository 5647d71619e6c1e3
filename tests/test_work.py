"""Counting FLOPs and bytes of a traced program: against arithmetic, and against XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdec.planning.work import ACTIVATIONS, Operand, count

WEIGHTS = Operand(label="weights")
SQUARE = jax.ShapeDtypeStruct((8, 8), jnp.float32)
ROW = jax.ShapeDtypeStruct((1, 8), jnp.float32)
PRODUCT = 2 * 8 * 8
"""FLOPs of a row times the square."""


def number(value):
    return jax.ShapeDtypeStruct((), jnp.int32), Operand(
        value=np.asarray(value, np.int32)
    )


def test_one_product():
    work = count(lambda w, x: x @ w, (SQUARE, ROW), (WEIGHTS, Operand()))
    assert work.flops == work.matmul_flops == PRODUCT
    assert work.bytes_by_label == {"weights": 8 * 8 * 4, ACTIVATIONS: 2 * 8 * 4}
    assert work.num_bytes == 256 + 64


def test_a_split_array_counts_by_its_part():
    split = Operand(label="weights", share=0.25)
    work = count(lambda w, x: x @ w.T, (SQUARE, ROW), (split, Operand()))
    assert work.flops == PRODUCT / 4
    assert work.bytes_by_label["weights"] == 8 * 8 * 4 / 4


def test_arrays_are_read_in_the_dtype_they_lie_in():
    half = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
    work = count(
        lambda w, x: x @ w.astype(jnp.float32), (half, ROW), (WEIGHTS, Operand())
    )
    assert work.bytes_by_label["weights"] == 8 * 8 * 2


@pytest.mark.parametrize("trips", [0, 1, 7])
def test_a_loop_counts_by_its_trips(trips):
    def function(w, x, num):
        return jax.lax.fori_loop(0, num, lambda i, y: y @ w, x)

    shape, operand = number(trips)
    arguments, operands = (SQUARE, ROW, shape), (WEIGHTS, Operand(), operand)
    work = count(function, arguments, operands)
    assert work.matmul_flops == trips * PRODUCT
    assert work.bytes_by_label.get("weights", 0) == trips * 256
    assert work.num_open_loops == 0
    written = count(function, arguments, operands, as_written=True)
    assert written.matmul_flops == PRODUCT


def test_a_scan_takes_the_branch_of_each_turn():
    def function(w, x):
        def body(y, i):
            y = jax.lax.cond(i % 3 == 0, lambda: y @ w, lambda: y)
            return y, y[0, 0]

        return jax.lax.scan(body, x, jnp.arange(10, dtype=jnp.int32))

    arguments, operands = (SQUARE, ROW), (WEIGHTS, Operand())
    assert count(function, arguments, operands).matmul_flops == 4 * PRODUCT
    written = count(function, arguments, operands, as_written=True)
    assert written.matmul_flops == PRODUCT


def test_loops_that_depend_on_data_are_said_to():
    def counting(w, x, num):
        return jax.lax.fori_loop(0, num, lambda i, y: y @ w, x)

    def searching(w, x, num):
        del num
        return jax.lax.while_loop(
            lambda y: jnp.any(y > 0) | jnp.all(y < -1), lambda y: y @ w, x
        )

    shape, _ = number(0)
    for function, trips in ((counting, 3), (searching, 0)):
        work = count(
            function,
            (SQUARE, ROW, shape),
            (WEIGHTS, Operand(), Operand()),
            open_trips=3,
        )
        assert work.num_open_loops == 1
        assert work.matmul_flops == trips * PRODUCT


def test_an_unknown_branch_is_the_dearest():
    def function(w, x, which):
        branches = [lambda: x, lambda: x @ w @ w, lambda: x @ w]
        return jax.lax.switch(which, branches)

    shape, _ = number(0)
    unknown = count(function, (SQUARE, ROW, shape), (WEIGHTS, Operand(), Operand()))
    assert unknown.matmul_flops == 2 * PRODUCT
    shape, known = number(2)
    work = count(function, (SQUARE, ROW, shape), (WEIGHTS, Operand(), known))
    assert work.matmul_flops == PRODUCT


def test_only_what_is_looked_up_or_written_is_counted():
    cache = jax.ShapeDtypeStruct((1024, 8), jnp.float32)

    def function(cache, x, at):
        cache = jax.lax.dynamic_update_slice(cache, x, (at, jnp.int32(0)))
        part = jax.lax.dynamic_slice(cache, (at, jnp.int32(0)), (16, 8))
        return cache, x @ part.T, cache[jnp.array([3, 5])]

    shape, operand = number(5)
    work = count(
        function, (cache, ROW, shape), (Operand(label="KV"), Operand(), operand)
    )
    written, sliced, looked_up = 1, 16, 2
    assert work.bytes_by_label["KV"] == (written + sliced + looked_up) * 8 * 4


def test_numbers_are_followed_like_numpy():
    def function(w, x, num):
        half = jnp.maximum((num * 2 + 1) // 2 - 3, 0)
        half = jnp.where(jnp.any(half > 100), 1, half)
        return jax.lax.fori_loop(0, half, lambda i, y: y @ w, x)

    for value, trips in ((9, 6), (2, 0), (1000, 1)):
        shape, operand = number(value)
        work = count(function, (SQUARE, ROW, shape), (WEIGHTS, Operand(), operand))
        assert work.matmul_flops == trips * PRODUCT
