"""The optimiser of a recipe: Muon on matrices with Adam on the rest, or AdamW.

Muon (Jordan, 2024; arXiv 2502.16982) moves a matrix along the orthogonal matrix nearest
to its momentum. optax has it too, in the dtype of the weights; here the iteration that
finds that matrix multiplies in bfloat16 and sums in float32, as its authors do, which
on a CPU takes a third of the time.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxdec.models.layers import matmul
from jaxdec.training.recipe import Recipe

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5
_UPDATE_SIZE = 0.2
"""The size of an entry of an update, about that of Adam's."""

_TABLES = ("rows", "markov", "embedding", "head", "confidence")
"""Parts whose matrices are looked up, or end in the vocabulary: Adam's."""


def schedule(recipe: Recipe) -> optax.Schedule:
    """The learning rate: a warm-up, then as it is, then down to 0."""
    peak, total = recipe.learning_rate, recipe.steps
    warm = min(recipe.warmup, total)
    held = max(int(recipe.hold * total), warm)
    if recipe.schedule == "constant":
        after: optax.Schedule = optax.constant_schedule(peak)
    elif recipe.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, max(total - held, 1))
    else:
        after = optax.linear_schedule(peak, 0.0, max(total - held, 1))
    return optax.join_schedules(
        # The first step moves too.
        [
            optax.linear_schedule(peak / (warm + 1), peak, warm),
            optax.constant_schedule(peak),
            after,
        ],
        [warm, held],
    )


def make_optimiser(recipe: Recipe, dtype: str) -> optax.GradientTransformation:
    """The optimiser, gradients clipped to the recipe's norm first.

    Args:
        recipe: what is to be done.
        dtype: to multiply in.
    """
    rate = schedule(recipe)
    adam = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=recipe.weight_decay)
    if recipe.optimiser == "muon":
        plain = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.0)
        muon = optax.chain(
            optax.trace(decay=0.95, nesterov=True),
            orthogonalise(dtype),
            optax.add_decayed_weights(recipe.weight_decay),
            optax.scale_by_learning_rate(rate),
        )
        adam = optax.partition({"muon": muon, "adam": plain}, is_matrix)
    return _lenient(optax.chain(optax.clip_by_global_norm(recipe.clip), adam))


def _lenient(optimiser: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same where number types must not mix; optax mixes them."""

    def update(updates, state, params=None):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return optimiser.update(updates, state, params)

    return optax.GradientTransformation(optimiser.init, update)


def is_matrix(params: Any) -> Any:
    """Which arrays are Muon's, by the label "muon", and which are Adam's."""

    def label(path, leaf):
        names = {str(getattr(entry, "key", "")) for entry in path}
        is_muon = leaf.ndim == 2 and not names & set(_TABLES)
        return "muon" if is_muon else "adam"

    return jax.tree_util.tree_map_with_path(label, params)


def orthogonalise(dtype: str) -> optax.GradientTransformation:
    """Replaces matrices by the nearest orthogonal ones, all entries of one size."""

    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda x: _nearest(x, jnp.dtype(dtype)), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _nearest(x: Float[Array, "I O"], dtype) -> Float[Array, "I O"]:
    """The orthogonal matrix nearest to `x`, scaled; by Newton and Schulz's iteration.

    It is one of x's odd polynomials, that drives all singular values towards 1.
    """
    is_tall = x.shape[0] > x.shape[1]
    y = x.T if is_tall else x
    y = y / (jnp.linalg.norm(y) + 1e-8)
    first, third, fifth = _NEWTON_SCHULZ

    def iterate(_, y):
        low = y.astype(dtype)
        gram = matmul(y, low, out_first=True)
        square = matmul(gram, gram.astype(dtype), out_first=False)
        return first * y + matmul(third * gram + fifth * square, low, out_first=False)

    # Unrolled, XLA on CPU puts all sums and the transposes into one slow loop.
    y = jax.lax.fori_loop(0, _NUM_ITERATIONS, iterate, y)
    y = y.T if is_tall else y
    return y * (_UPDATE_SIZE * max(x.shape) ** 0.5)
