"""Which numbers of rows round alike on this device.

A matmul library chooses its kernel by the number of rows, and kernels add in different
orders. So a forward over one token and a forward over a draft can differ in the last
bits, and a near tie between two tokens can fall the other way: a difference that says
nothing about the strategy. Row counts whose results are equal bit for bit form a class.
Keeping plain decoding in the class of the drafts (by padding a row or two, which costs
nothing where reading the weights is what takes time) removes the difference.

Classes depend on the device, the dtype and the version of XLA, so they are measured, on
the model's own matrices, the first time that they are asked for.

A class of matmuls is not the whole of a forward: other operations depend on shapes too,
and beyond a few rows they were seen to differ. So the exact mode does not rely on
classes: it pads every forward, plain decoding's too, to the very same number of rows,
and attention then sums in the order of positions (`models.attention.attend_in_order`),
since the nodes of a tree lie elsewhere in the cache than the tokens of a chain. What
adds up over the vocabulary (top-p, log-probabilities) runs over as many rows, too.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdec.models.decoder import prefers_out_first
from jaxdec.models.layers import matmul
from jaxdec.types import Params

WIDTHS = (1, 2, 3, 4, 6, 7, 8, 12, 16, 32, 64, 96)
"""Row counts that are measured; those between are taken to be like the next larger."""

EXACT_WIDTH = 16
"""Rows that ``exact=True`` covers unless more is asked for."""

COMMON = 7
"""Rows that plain decoding shares a class with unless more is asked for: K up to 6."""


@functools.partial(jax.jit, static_argnames=("out_first",))
def _product(x, weight, *, out_first: bool):
    return matmul(x, weight, out_first=out_first)


def measure_classes(params: Params, dtype: str) -> tuple[tuple[int, ...], ...]:
    """Partition of `WIDTHS` into classes that round alike.

    Every row of a product holds the same input, so that a kernel which treats its last
    rows differently is seen: a width with unequal rows is a class of its own.

    Args:
        params: of a decoder; the matrices of its first layer and its head are
            multiplied.
        dtype: of the weights.
    """
    layer = params["layers"][0]
    out_first = prefers_out_first(dtype)
    mlp = layer["mlp"]
    # Experts multiply blocks of rows, of one size for all forwards of a few tokens.
    inner = [mlp["router"]] if "router" in mlp else [mlp["up"], mlp["down"]]
    weights = [
        (part["weight"], out_first)
        for part in (layer["attention"]["qkv"], layer["attention"]["out"], *inner)
    ]
    head = params["head"]["weight"] if "head" in params else params["embedding"]
    weights.append((head, True))
    signature: dict[int, list[bytes]] = {width: [] for width in WIDTHS}
    for weight, is_out_first in weights:
        size = weight.shape[1 if is_out_first else 0]
        row = np.random.default_rng(0).standard_normal((1, size)).astype(np.float32)
        for width in WIDTHS:
            x = jnp.asarray(np.repeat(row, width, axis=0))
            found = np.asarray(_product(x, weight, out_first=is_out_first))
            is_even = bool((found == found[:1]).all())
            mark = b"" if is_even else f"uneven {width}".encode()
            signature[width].append(found[0].tobytes() + mark)
    classes: dict[tuple[bytes, ...], list[int]] = {}
    for width in WIDTHS:
        classes.setdefault(tuple(signature[width]), []).append(width)
    return tuple(tuple(c) for c in classes.values())


def rows_for(classes: Sequence[Sequence[int]], width: int) -> int | None:
    """Fewest rows, at least 2, that round like all row counts from there to `width`.

    >>> classes = ((1,), (2,), (3, 4, 6, 7, 8, 12, 16), (32, 64, 96))
    >>> rows_for(classes, 7), rows_for(classes, 20), rows_for(classes, 97)
    (3, 32, None)

    Returns:
        None where no class reaches `width`.
    """
    wanted = next((w for w in WIDTHS if w >= width), None)
    if wanted is None:
        return None
    home = next(set(c) for c in classes if wanted in c)
    best = wanted
    for candidate in sorted((w for w in WIDTHS if 2 <= w <= wanted), reverse=True):
        if candidate not in home:
            break
        best = candidate
    return best


def describe(classes: Sequence[Sequence[int]]) -> str:
    """The classes in words.

    >>> describe(((1,), (2,), (3, 4, 5)))
    '1 | 2 | 3..5'
    """
    return " | ".join(str(c[0]) if len(c) == 1 else f"{c[0]}..{c[-1]}" for c in classes)


def plain_rows(lm: Any) -> int:
    """Rows that every forward of a model is padded to outside the exact mode.

    So few that they cost nothing, and in one class with drafts of up to 6 tokens.

    Args:
        lm: the model; it keeps its classes once they are measured.
    """
    return rows_for(lm.row_classes, COMMON) or 2
