"""Losses over a vocabulary, without ever holding all logits.

Logits of a batch would fill gigabytes, and on a CPU moving them costs more than making
them. So they are made a chunk at a time, and because a loss is the last thing that is
computed, its gradient is known at once: a chunk's logits become a number and a gradient
of the hidden states, and are forgotten. What comes back is the sum of the losses, whose
derivative is that gradient.

A teacher's law p is restricted to the drafter's vocabulary and renormalised there (as
EAGLE-3's authors do), for no drafter can say more.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxdec.models.layers import matmul, outer_sum


class RowLoss(NamedTuple):
    """What a chunk of R rows of logits comes to."""

    loss: Float[Array, ""]
    """The weighted sum."""
    gradient: Float[Array, "R W"]
    """Of the sum, by the logits."""
    extra: Any
    """Anything else that is computed per row."""


def head_loss(
    row_loss: Callable[..., RowLoss],
    prepare: Callable[[Any], Any],
    hidden: Sequence[Float[Array, "G S R _"]],
    heads: Sequence[Float[Array, "W _"]],
    shared: Any,
    own: Any,
    trained: Sequence[bool] = (),
) -> tuple[Float[Array, ""], Any]:
    """The sum of `row_loss` over chunks; differentiable in hidden states and heads.

    Args:
        row_loss: ``(logits[R, W], prepared, own of the chunk, its number of the S) ->
            RowLoss``.
        prepare: what S chunks have in common, made once from the group's `shared`.
        hidden: parts of what the heads read; the logits are the sum of their products.
        heads: one for each part, in the dtype to multiply in.
        shared: arrays that lead with G.
        own: arrays that lead with G and S.
        trained: which heads need a gradient; none, if empty.

    Returns:
        The sum, and the extras ``[G, S, ...]``.
    """
    num = hidden[0].shape[1]
    trained = list(trained) or [False] * len(heads)
    learning = [i for i, is_trained in enumerate(trained) if is_trained]
    frozen = [jax.lax.stop_gradient(head) for head in heads]

    def group(sums, inputs):
        rows, common, each = inputs
        loss, of_heads = sums
        prepared = prepare(common)
        gradients, extras = [], []
        for i in range(num):
            parts = [part[i] for part in rows]
            pairs = zip(parts, frozen, strict=True)
            logits = sum(matmul(x, head, out_first=True) for x, head in pairs)
            mine = jax.tree.map(lambda x: x[i], each)  # noqa: B023
            found = row_loss(logits, prepared, mine, i)
            loss = loss + found.loss
            gradient = found.gradient.astype(frozen[0].dtype)
            gradients.append(
                [matmul(gradient, head, out_first=False) for head in frozen]
            )
            of_heads = [
                total + outer_sum(gradient, parts[j].astype(gradient.dtype))
                for total, j in zip(of_heads, learning, strict=True)
            ]
            extras.append(found.extra)
        stack = [jnp.stack(part) for part in zip(*gradients, strict=True)]
        extras = jax.tree.map(lambda *x: jnp.stack(x), *extras)
        return (loss, of_heads), (stack, extras)

    rows = [jax.lax.stop_gradient(part) for part in hidden]
    zeros = [jnp.zeros(heads[j].shape, jnp.float32) for j in learning]
    (loss, of_heads), (gradients, extras) = jax.lax.scan(
        group, (jnp.float32(0), zeros), (rows, shared, own)
    )
    values = [*hidden, *(heads[j].astype(jnp.float32) for j in learning)]
    for value, gradient in zip(values, [*gradients, *of_heads], strict=True):
        # Zero, with the derivative that is wanted.
        term = jnp.sum(value * jax.lax.stop_gradient(gradient))
        loss = loss + term - jax.lax.stop_gradient(term)
    return loss, jax.lax.stop_gradient(extras)


def probabilities(logits: Float[Array, "... W"]) -> Float[Array, "... W"]:
    """Softmax over the last axis."""
    weight = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    return weight / jnp.sum(weight, axis=-1, keepdims=True)


def soft_cross_entropy(
    logits: Float[Array, "R W"],
    law: Float[Array, "R W"],
    weight: Float[Array, "R"],
    label: Int[Array, "R"],
) -> RowLoss:
    """``-sum_v p log q``; its extra says where `label` is the likeliest.

    Args:
        logits: of q.
        law: p.
        weight: of each row.
        label: of the drafter's vocabulary; W where the token cannot be said.
    """
    top = jnp.max(logits, axis=-1)
    part = jnp.exp(logits - top[:, None])
    total = jnp.sum(part, axis=-1)
    cross = jnp.log(total) + top - jnp.sum(law * logits, axis=-1)
    gradient = (part * (weight / total)[:, None]) - law * weight[:, None]
    return RowLoss(
        loss=jnp.sum(weight * cross),
        gradient=gradient,
        extra=is_likeliest(logits, top, label),
    )


def is_likeliest(
    logits: Float[Array, "R W"], top: Float[Array, "R"], label: Int[Array, "R"]
) -> Bool[Array, "R"]:
    """Whether the largest logit is the label's (argmax is slow, and not needed)."""
    size = logits.shape[1]
    found = jnp.take_along_axis(logits, jnp.minimum(label, size - 1)[:, None], axis=1)
    return (found[:, 0] >= top) & (label < size)
