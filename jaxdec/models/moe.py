"""Mixture of experts: which experts a token goes to, and running only those.

Tokens are brought into the order of their experts, and each expert multiplies its own
in blocks of a fixed number of rows, in a loop whose length is the number of blocks that
are needed. So an expert's weights are read once per block and only where it was chosen,
for one token as for a whole prompt, and no array is larger than the tokens' own.

A token's numbers do not depend on its neighbours: in a forward over R tokens every
multiplication has one shape (`block_rows`), and the chosen experts are added up in the
order of their weights. Forwards over very different R have blocks of different size.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxdec.models.config import MoeConfig

BLOCK_ROWS = 8
"""Rows that an expert multiplies at a time, at least."""


def route(
    logits: Float[Array, "R X"], config: MoeConfig
) -> tuple[Int[Array, "R k"], Float[Array, "R k"]]:
    """The experts of every token, the likeliest first, and their weights.

    Softmax over all experts comes first; the weights of the chosen ones are made to sum
    to one only if the configuration says so.
    """
    weights, chosen = jax.lax.top_k(
        jax.nn.softmax(logits, axis=-1), config.num_experts_per_token
    )
    if config.norm_topk_prob:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return chosen, weights


def block_rows(num_assignments: int, num_experts: int) -> int:
    """Rows of a block: more where experts have many, so that weights are read less."""
    rows = BLOCK_ROWS
    while rows < 128 and 2 * rows * num_experts <= num_assignments:
        rows *= 2
    return rows


def apply_experts(
    x: Float[Array, "R E"],
    chosen: Int[Array, "R k"],
    weights: Float[Array, "R k"],
    num_experts: int,
    expert_fn: Callable[[Float[Array, "m E"], Int[Array, ""]], Float[Array, "m E"]],
) -> Float[Array, "R E"]:
    """The weighted sum, for every token, of what its experts make of it.

    Args:
        x: the tokens.
        chosen: experts of each token.
        weights: of these experts.
        num_experts: how many there are.
        expert_fn: ``(rows, expert) -> rows``: one expert on some rows.
    """
    num_rows, width = x.shape
    per_token = chosen.shape[1]
    total = num_rows * per_token
    size = block_rows(total, num_experts)
    expert_of = chosen.reshape(total)
    order = jnp.argsort(expert_of, stable=True).astype(jnp.int32)
    every = jnp.arange(num_experts, dtype=jnp.int32)
    counts = jnp.sum(expert_of[:, None] == every[None], axis=0, dtype=jnp.int32)
    blocks = (counts + size - 1) // size
    last_block = jnp.cumsum(blocks)
    first_row = jnp.cumsum(counts) - counts
    # The last block may read past the end: those rows are read but belong to nobody.
    padded = jnp.pad(order // per_token, (0, size))

    def block(i, out):
        """One block of one expert's tokens."""
        expert = jnp.sum(last_block <= i, dtype=jnp.int32)
        within = i - (last_block[expert] - blocks[expert])
        start = first_row[expert] + within * size
        rows = x[jax.lax.dynamic_slice(padded, (start,), (size,))]
        # What a block writes past its expert's tokens, the next blocks write over.
        return jax.lax.dynamic_update_slice(
            out, expert_fn(rows, expert), (start, jnp.int32(0))
        )

    out = jnp.zeros((total + size, width), jnp.float32)
    out = jax.lax.fori_loop(jnp.int32(0), last_block[-1], block, out)
    place = (
        jnp.zeros((total,), jnp.int32).at[order].set(jnp.arange(total, dtype=jnp.int32))
    )
    parts = out[place].reshape(num_rows, per_token, width)
    result = parts[:, 0] * weights[:, :1]
    for i in range(1, per_token):
        result = result + parts[:, i] * weights[:, i : i + 1]
    return result
