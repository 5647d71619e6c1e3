"""How fast a step is, against the matrix products that it cannot do without.

A step's products are counted where they are traced, so none is forgotten and none that
the compiler drops is counted. Each of their shapes is then timed as a plain product of
the weights' dtype with a float32 result: the sum is the time of a step that did nothing
else, and did that as well as this machine can.
"""

import collections
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

Shape = tuple[int, int, int, int]
"""Batch, rows, what is summed over, columns."""


def products(fn: Callable, *arguments: Any) -> collections.Counter[Shape]:
    """How many products of every shape a function needs."""
    closed = jax.make_jaxpr(fn)(*arguments)
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return _count(jaxpr)


def _count(jaxpr: Any) -> collections.Counter[Shape]:
    found: collections.Counter[Shape] = collections.Counter()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found[_shape(equation)] += 1
        times = equation.params.get("length", 1)
        inner = [x for value in equation.params.values() for x in _jaxprs(value)]
        for part in inner:
            for shape, number in _count(part).items():
                found[shape] += number * times
    return found


def _jaxprs(value: Any) -> list[Any]:
    values = value if isinstance(value, tuple | list) else [value]
    plain = [getattr(x, "jaxpr", x) for x in values]
    return [x for x in plain if hasattr(x, "eqns")]


def _shape(equation: Any) -> Shape:
    (over_a, over_b), (batch, _) = equation.params["dimension_numbers"]
    a, b = (x.aval.shape for x in equation.invars)
    num_batch = math.prod(a[i] for i in batch)
    summed = math.prod(a[i] for i in over_a)
    rows = math.prod(a) // max(num_batch * summed, 1)
    columns = math.prod(b) // max(num_batch * math.prod(b[i] for i in over_b), 1)
    return num_batch, rows, summed, columns


def num_operations(shapes: collections.Counter[Shape]) -> int:
    """Floating-point operations of all products."""
    return sum(2 * math.prod(shape) * number for shape, number in shapes.items())


def plain_seconds(
    shapes: collections.Counter[Shape], dtype: str, repeats: int = 5
) -> float:
    """The time of the products alone, each at its best of some repeats."""

    @jax.jit
    def product(a, b):
        return jnp.einsum("bij,bjk->bik", a, b, preferred_element_type=jnp.float32)

    @jax.jit
    def plain(a, b):
        return jax.lax.dot(a, b, preferred_element_type=jnp.float32)

    total = 0.0
    for (batch, rows, summed, columns), number in shapes.items():
        a = jnp.ones((batch, rows, summed), dtype)
        b = jnp.ones((batch, summed, columns), dtype)
        run = product
        if batch == 1:
            a, b, run = a[0], b[0], plain
        run(a, b).block_until_ready()
        total += number * min(_timed(run, a, b) for _ in range(repeats))
    return total


def _timed(fn: Callable, *arguments: Any) -> float:
    begun = time.perf_counter()
    jax.block_until_ready(fn(*arguments))
    return time.perf_counter() - begun


def measure_step(run: Any, repeats: int = 3) -> dict[str, float]:
    """The speed of a run's step (`jaxdec.training.trainer.Run`); it is not taken.

    Returns:
        ``step_seconds``; ``gflops``, achieved; ``plain_gflops``, of the products alone;
        and ``part_of_plain``, of the two.
    """
    part = next(run.order.from_step(run.step))
    batch = run.rows(run.host_batch(part))
    keys = run.rows(jax.random.split(jax.random.key(0), run.recipe.batch_size))
    rest = (run.fixed, run.frozen, batch, keys)
    shapes = products(run.programs.step, run.state, *rest)
    best = math.inf
    for _ in range(1 + repeats):
        state = jax.tree.map(jnp.copy, run.state)  # It is given up.
        jax.block_until_ready(state)
        best = min(best, _timed(run.programs.step, state, *rest))
    operations, plain = num_operations(shapes), plain_seconds(shapes, run.dtype)
    return {
        "step_seconds": round(best, 4),
        "gflops": round(operations / best / 1e9, 1),
        "plain_gflops": round(operations / plain / 1e9, 1),
        "part_of_plain": round(plain / best, 3),
    }
