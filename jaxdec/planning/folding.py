"""Evaluates the small numbers of a traced program with NumPy: lengths and flags.

Not an interpreter: what is larger than a few hundred numbers, or made by an operation
that is not listed, is simply not known.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

MOST_NUMBERS = 512
"""In an array whose values are followed."""


def is_small(array: Any) -> bool:
    """Whether an array's values are followed; PRNG keys have none."""
    is_plain = np.issubdtype(getattr(array, "dtype", object), np.number)
    is_plain = is_plain or getattr(array, "dtype", None) == np.bool_
    return is_plain and math.prod(array.shape) <= MOST_NUMBERS


def evaluate(eqn: Any, given: Sequence[Any]) -> np.ndarray | None:
    """The result of an operation with one result; None where it is not followed.

    Args:
        eqn: an equation of a jaxpr.
        given: objects with a field `value`, one for each input.
    """
    rule = _RULES.get(eqn.primitive.name)
    values = [x.value for x in given]
    if rule is None or any(v is None for v in values) or len(eqn.outvars) != 1:
        return None
    aval = eqn.outvars[0].aval
    if not is_small(aval):
        return None
    with np.errstate(all="ignore"):
        return np.asarray(rule(eqn.params, *values)).astype(aval.dtype)


def _quotient(params, x, y):
    if np.issubdtype(x.dtype, np.floating):
        return x / y
    return np.trunc(np.true_divide(x, y))  # Towards zero; exact, for the numbers are.


def _spread(params, x):
    shape, axes = params["shape"], params["broadcast_dimensions"]
    kept = [1] * len(shape)
    for axis, size in zip(axes, x.shape, strict=True):
        kept[axis] = size
    return np.broadcast_to(x.reshape(kept), shape)


def _count_up(params):
    size = params["shape"][params["dimension"]]
    kept = [1] * len(params["shape"])
    kept[params["dimension"]] = size
    return np.broadcast_to(np.arange(size).reshape(kept), params["shape"])


def _cut(params, x):
    strides = params["strides"] or (1,) * x.ndim
    bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return x[tuple(slice(*each) for each in bounds)]


def _cut_at(params, x, *starts):
    sizes = params["slice_sizes"]
    first = [
        int(np.clip(start, 0, size - part))
        for start, size, part in zip(starts, x.shape, sizes, strict=True)
    ]
    return x[tuple(slice(i, i + part) for i, part in zip(first, sizes, strict=True))]


def _over(reduce: Callable) -> Callable:
    return lambda params, x: reduce(x, axis=tuple(params["axes"]))


def _plain(function: Callable) -> Callable:
    return lambda params, *values: function(*values)


_RULES: dict[str, Callable] = {
    name: _plain(function)
    for name, function in {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "max": np.maximum,
        "min": np.minimum,
        "rem": np.fmod,
        "neg": np.negative,
        "sign": np.sign,
        "floor": np.floor,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
        "eq": np.equal,
        "ne": np.not_equal,
        "and": lambda x, y: x & y,
        "or": lambda x, y: x | y,
        "not": lambda x: ~x,
        "clamp": lambda low, x, high: np.clip(x, low, high),
        "select_n": lambda which, *cases: np.choose(which.astype(int), cases),
        "convert_element_type": lambda x: x,
    }.items()
} | {
    "div": _quotient,
    "broadcast_in_dim": _spread,
    "iota": _count_up,
    "slice": _cut,
    "dynamic_slice": _cut_at,
    "reshape": lambda params, x: x.reshape(params["new_sizes"]),
    "squeeze": lambda params, x: np.squeeze(x, tuple(params["dimensions"])),
    "transpose": lambda params, x: x.transpose(params["permutation"]),
    "concatenate": lambda params, *xs: np.concatenate(xs, params["dimension"]),
    "reduce_max": _over(np.max),
    "reduce_min": _over(np.min),
    "reduce_sum": _over(np.sum),
    "reduce_or": _over(np.any),
    "reduce_and": _over(np.all),
}
