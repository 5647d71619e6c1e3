"""What is trained, as a record of pure functions; the loop knows nothing else of it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxdec.training.batches import Batch
from jaxdec.training.features import Features
from jaxdec.types import Params


class Losses(NamedTuple):
    """Sums over a batch, so that those of its parts add up."""

    loss: Float[Array, ""]
    weight: Float[Array, ""]
    """What `loss` is divided by, and so its gradient."""
    figures: dict[str, tuple[Array, Array]]
    """By name, what else is told: sums, and what they are divided by."""


class Objective(NamedTuple):
    """A drafter's training."""

    family: str
    """Of `jaxdec.loaded_drafter.LoadedDrafter`."""
    config: Any
    """The family's record."""
    features: Features
    """What it reads of the target."""
    draft_length: int
    """K, for validation."""
    init: Callable[[jax.Array], Params]
    """``(key)``: its arrays in the dtype that they are computed in."""
    frozen: Params
    """Arrays of the target's that it reads besides the features."""
    fixed: tuple[str, ...]
    """Top-level parts of its arrays that are not trained."""
    losses: Callable[[Params, Params, Batch, jax.Array], Losses]
    """``(own, frozen, batch, key)``."""
    right: Callable[[Params, Params, Batch], Bool[Array, "B T K"]]
    """``(own, frozen, batch)``: whether the k-th draft token is the true one, where the
    target has read rows 0 .. i, and all earlier draft tokens are."""


def frequent_tokens(
    ids: np.ndarray, vocab_size: int, num: int, always: tuple[int, ...] = ()
) -> np.ndarray:
    """The `num` most frequent tokens, in increasing order.

    Args:
        ids: what was said.
        vocab_size: of all tokens.
        num: how many to take.
        always: tokens that are among them whatever their count.
    """
    counts = np.bincount(ids, minlength=vocab_size).astype(np.int64)
    counts[list(always)] = counts.max(initial=0) + 1
    # Ties go to the smaller id, so that the choice is one of the data alone.
    return np.sort(np.argsort(-counts, kind="stable")[:num])


def shifted(tokens: Int[Array, "B T"], num: int) -> Int[Array, "B T"]:
    """The token `num` places later; 0 past the end."""
    return jnp.pad(tokens[:, num:], ((0, 0), (0, min(num, tokens.shape[1]))))


def cut(x: Shaped[Array, "B T ..."], begin: Int[Array, "B"], num: int) -> Array:
    """`num` places of every sequence, from `begin` on; none past the end."""

    def one(row, first):
        return jax.lax.dynamic_slice_in_dim(row, first, num)

    return jax.vmap(one)(x, begin)


def draw_places(batch: Batch, keys: Any, num: int, ahead: int) -> Int[Array, "B"]:
    """Where `num` neighbouring places begin whose tokens `ahead` are answers.

    All of an answer where it is as short as that, else a part of it drawn by the key.
    """
    first = jnp.maximum(jnp.asarray(batch.prompt_length) - ahead, 0)
    spare = jnp.maximum(jnp.asarray(batch.length) - ahead - num - first, 0)
    drawn = jax.vmap(lambda key, most: jax.random.randint(key, (), 0, most + 1))(
        keys, spare
    )
    return jnp.minimum(first + drawn, batch.tokens.shape[1] - num)


def is_drafted(batch: Batch, depth: int) -> Bool[Array, "B T"]:
    """Where a draft from row i (read tokens 0 .. i + 1) has a `depth`-th true token.

    The first draft token is at i + 2 for depth 0, and is part of the answer.
    """
    is_answer = batch.is_answer
    first, last = shifted_mask(is_answer, 2), shifted_mask(is_answer, 2 + depth)
    return first & last


def shifted_mask(mask: Bool[Array, "B T"], num: int) -> Bool[Array, "B T"]:
    """The mask `num` places later; False past the end."""
    return jnp.pad(mask[:, num:], ((0, 0), (0, min(num, mask.shape[1]))))


def head_of(params: Params) -> Float[Array, "V E"]:
    """A target's output head, whichever it has."""
    return params["head"]["weight"] if "head" in params else params["embedding"]
