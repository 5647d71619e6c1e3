"""Draft trees: everything that can be derived from `parents`.

A draft of K tokens has T = K + 1 nodes. Node 0 is the anchor (the last committed
token, not yet read); node i + 1 is draft token i, and ``parents[i]`` is the *node* it
follows. Parents precede children, so node order is a topological order, a path read
from the root has increasing node indices, and no other array needs to be stored.

Written for one sequence; the caller vmaps. A worked example, used below:

    node      0   1   2   3          0 ── 1 ── 3
    parent    -   0   0   1          └─── 2
    depth     0   1   1   2

    ancestors (row: node; column: what it may attend)
        1 0 0 0
        1 1 0 0
        1 0 1 0
        1 1 0 1

>>> import jax.numpy as jnp
>>> parents = jnp.array([0, 0, 1])
>>> print(ancestors(parents).astype(int))
[[1 0 0 0]
 [1 1 0 0]
 [1 0 1 0]
 [1 1 0 1]]
>>> print(depth(parents))
[0 1 1 2]
>>> print(path_to(parents, jnp.array(3)))
[0 1 3 3]
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def chain_parents(num_draft: int) -> Int[Array, "K"]:
    """Parents of a chain: every node follows the one before it.

    >>> print(chain_parents(3))
    [0 1 2]
    """
    return jnp.arange(num_draft, dtype=jnp.int32)


def ancestors(parents: Int[Array, "K"]) -> Bool[Array, "K+1 K+1"]:
    """Which nodes lie on the way from the root to each node, itself included.

    Row i is also what node i may attend to among the tail: its tree mask.

    Args:
        parents: Parent nodes; each in [0, i] for draft token i.
    """
    num_nodes = parents.shape[0] + 1
    # Pointer jumping: after n rounds a row holds every ancestor closer than 2**n, and
    # `jump` points 2**n nodes up. The root points to itself. Depth < num_nodes.
    root = jnp.zeros(1, parents.dtype)
    jump = jnp.concatenate([root, parents])
    is_ancestor = jnp.eye(num_nodes, dtype=bool)
    for _ in range((num_nodes - 1).bit_length()):
        is_ancestor = is_ancestor | is_ancestor[jump]
        jump = jump[jump]
    return is_ancestor


def depth(parents: Int[Array, "K"]) -> Int[Array, "K+1"]:
    """Distance of each node from the root, in tokens."""
    return jnp.sum(ancestors(parents), axis=-1, dtype=jnp.int32) - jnp.int32(1)


def path_to(parents: Int[Array, "K"], node: Int[Array, ""]) -> Int[Array, "K+1"]:
    """The nodes from the root to `node`, root first.

    Entries past the node's depth repeat `node`, so that every entry is a valid index.
    """
    num_nodes = parents.shape[0] + 1
    is_ancestor = ancestors(parents)
    node_depth = jnp.sum(is_ancestor, axis=-1, dtype=jnp.int32) - jnp.int32(1)
    slot = jnp.where(is_ancestor[node], node_depth, num_nodes)
    path = jnp.full(num_nodes, node.astype(jnp.int32))
    return path.at[slot].set(jnp.arange(num_nodes, dtype=jnp.int32), mode="drop")


def keep_best(
    scores: Float[Array, "K"], parents: Int[Array, "K"], num_kept: int
) -> tuple[Int[Array, "n"], Int[Array, "n"]]:
    """Prunes a tree to its best draft tokens, which form a tree again.

    A token counts for no more than the worst token on its path, so a kept token's
    parent is kept too. Among equals the earlier token wins; the order is unchanged.

    >>> kept, parents = keep_best(
    ...     jnp.array([-1.0, -0.5, -2.0, -0.7]), jnp.array([0, 0, 1, 2]), 3)
    >>> print(kept, parents)
    [0 1 3] [0 0 2]

    Args:
        scores: One per draft token, larger is better (for example the log-probability
            of the path).
        parents: The tree to prune.
        num_kept: How many draft tokens to keep, at most K.

    Returns:
        Indices of the kept draft tokens, increasing; and their parents as nodes of the
        pruned tree.

    Raises:
        ValueError: If `num_kept` is negative or larger than K.
    """
    num_draft = parents.shape[0]
    if not 0 <= num_kept <= num_draft:
        raise ValueError(
            f"num_kept must be between 0 and the {num_draft} draft tokens of the tree, "
            f"got {num_kept}; expand more nodes or keep fewer."
        )
    on_path = ancestors(parents)[1:, 1:]
    path_score = jnp.min(jnp.where(on_path, scores[None, :], jnp.inf), axis=-1)
    _, best = jax.lax.top_k(path_score, num_kept)
    return keep(best, parents)


def keep(
    best: Int[Array, "n"], parents: Int[Array, "K"]
) -> tuple[Int[Array, "n"], Int[Array, "n"]]:
    """Prunes a tree to these draft tokens; see `keep_best`.

    Args:
        best: indices of draft tokens, in any order. The parent of each must be the
            root, or be kept too.
        parents: of the tree to prune.

    Returns:
        As `keep_best`.
    """
    kept = jnp.sort(best)
    is_kept = jnp.zeros(parents.shape[0], bool).at[kept].set(True)
    # Node p of the old tree becomes node "kept tokens up to and including p".
    new_node = jnp.concatenate(
        [jnp.zeros(1, jnp.int32), jnp.cumsum(is_kept, dtype=jnp.int32)]
    )
    return kept.astype(jnp.int32), new_node[parents[kept]]
