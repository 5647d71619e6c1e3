"""Drafting a tree with a recurrent network: EAGLE-2's dynamic tree.

The tree grows level by level. Every node of a frontier of `width` nodes is read by the
network, together, and offers its `width` likeliest continuations; the best `width` of
all those are the next frontier. A node is worth the probability of its whole path. In
the end the best nodes of all levels are kept, which form a tree, for a child is never
worth more than its parent (EAGLE-2, arXiv 2406.16858, section 4).

    level 1     the likeliest tokens after the anchor: no forward
    level d     one forward of `width` rows, whose tokens stand at depth d - 1

So a tree of depth D costs D - 1 forwards, as a chain of D tokens does; with width 1 it
is that chain. Rows read while growing stand beside the cache, each seeing its own path
only, and are forgotten with the proposal.

What are likely continuations where the target samples? Under the rule `match` a token
is kept if it is the target's own sample, which takes the largest of log p + noise, and
the noise of a position can be known beforehand. So with `noise` the logits are tempered
and the position's noise is added before anything is compared: what then looks likely is
what the target is likely to draw. Without it the tree grows as it was published, as if
for temperature 0. Either way the output is the target's.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxdec import drafting, tree
from jaxdec.adjustment import Nodes
from jaxdec.drafters.recurrent import (
    RecurrentNet,
    RecurrentState,
    can_draft,
    make_drafter,
    vocabulary_of,
)
from jaxdec.types import Draft, Drafter, LogitsProcessor, Sequences, pytree


@pytree
class Candidates:
    """Every node that growing looked at, level by level; parents precede children."""

    tokens: Int[Array, "B C"]
    parents: Int[Array, "B C"]
    """As nodes: 0 is the anchor, i + 1 is candidate i."""
    scores: Float[Array, "B C"]
    """Log-probability of the path; never above the parent's."""


@pytree
class _Frontier:
    """The nodes to be read next; k of them."""

    tokens: Int[Array, "B k"]
    nodes: Int[Array, "B k"]
    scores: Float[Array, "B k"]
    hidden: Float[Array, "B k H"]
    """The network's output at their parents."""
    seen: Any
    """Which of the R held rows are on their paths, ``[B, k, R]``."""


def most_nodes(depth: int, width: int) -> int:
    """How many nodes growing `depth` levels of `width` frontier nodes looks at.

    >>> most_nodes(1, 10), most_nodes(8, 10), most_nodes(5, 1)
    (10, 710, 5)
    """
    return width + (depth - 1) * width * width


def recurrent_tree(
    net: RecurrentNet,
    *,
    nodes: int,
    depth: int,
    width: int,
    noise: bool = True,
    processor: LogitsProcessor | None = None,
) -> Drafter:
    """Drafts the best `nodes` tokens of a tree; for the rule `match`.

    EAGLE's own code counts differently: its ``total_token`` is ``nodes + 1`` (it counts
    the anchor), its ``depth`` is ``depth - 1`` (it counts forwards), ``top_k`` is
    `width`.

    Args:
        net: the network.
        nodes: K, draft tokens; 0 drafts nothing.
        depth: tokens on the longest path.
        width: nodes read together, and continuations looked at of each.
        noise: whether to grow towards what the target will sample.
        processor: the request's custom processor, so that drafts follow it too.

    Raises:
        ValueError: sizes that make no tree, or (when traced) a width that is larger
            than the network's vocabulary.
    """
    if nodes < 0 or depth < 1 or width < 1:
        raise ValueError(
            f"a tree of {nodes} nodes, depth {depth} and width {width} is none; give "
            "nodes of at least 0, and a depth and a width of at least 1"
        )
    if nodes > most_nodes(depth, width):
        raise ValueError(
            f"a tree of depth {depth} and width {width} grows only "
            f"{most_nodes(depth, width)} nodes, got nodes={nodes}; lower it, or make "
            "the tree deeper or wider"
        )
    # No kept path is longer than there are nodes, and no kept level wider.
    depth, width = max(1, min(depth, nodes)), max(1, min(width, nodes))

    def propose(params, state: RecurrentState, sequences: Sequences):
        able = can_draft(net, state, sequences, depth)
        if nodes == 0:
            tokens = jnp.zeros((able.shape[0], 0), jnp.int32)
            return state, Draft(tokens=tokens, length=jnp.zeros_like(sequences.length))
        grown = grow(
            net,
            params,
            state,
            sequences,
            depth=depth,
            width=width,
            noise=noise,
            processor=processor,
        )
        tokens, parents, _ = best_nodes(grown, nodes)
        draft = Draft(
            tokens=tokens,
            parents=parents,
            length=jnp.where(able, jnp.int32(nodes), 0),
        )
        return state, draft

    return make_drafter(net, nodes, propose, max_depth=depth if nodes else None)


def best_nodes(
    grown: Candidates, nodes: int
) -> tuple[Int[Array, "B n"], Int[Array, "B n"], Float[Array, "B n"]]:
    """The best `nodes` of `grown`, in the order they grew: tokens, parents, scores.

    Among equals the earlier wins, and so a parent does against its child.
    """

    def choose(tokens, parents, scores):
        _, best = jax.lax.top_k(scores, nodes)
        kept, parents = tree.keep(best, parents)
        return tokens[kept], parents, scores[kept]

    return jax.vmap(choose)(grown.tokens, grown.parents, grown.scores)


def grow(
    net: RecurrentNet,
    params: Any,
    state: RecurrentState,
    sequences: Sequences,
    *,
    depth: int,
    width: int,
    noise: bool = True,
    processor: LogitsProcessor | None = None,
) -> Candidates:
    """Looks at the likeliest continuations, `depth` levels of them.

    Within a level candidates stand in the order of their parents in the frontier, and
    those of one parent with the likeliest first.

    Args:
        net: the network.
        params: its arrays.
        state: what the drafter remembers; its cache's tail is written.
        sequences: committed tokens and sampling parameters.
        depth: levels, in tokens.
        width: nodes that are read together, and continuations looked at of each.
        noise: whether to grow towards what the target will sample.
        processor: the request's custom processor.

    Raises:
        ValueError: at trace time, a width above the drafter's vocabulary.
    """
    batch = sequences.length.shape[0]
    num_rows = (depth - 1) * width
    vocabulary = vocabulary_of(net, params)

    def children(hidden, nodes: Nodes):
        """The `width` best continuations of each node: tokens, log-probabilities."""
        logits = net.logits(params, hidden)
        if width > logits.shape[-1]:
            raise ValueError(
                f"a tree of width {width} needs as many tokens to choose from, and the "
                f"drafter's vocabulary has {logits.shape[-1]}; make the tree narrower"
            )
        # One node stands for all: they are as deep as one another.
        one = nodes.replace(
            ancestors=nodes.ancestors[:, :1], depth=nodes.depth[:, :1], is_chain=True
        )
        best, score = drafting.choose(
            lambda scores: _likeliest(scores, width),
            vocabulary,
            sequences,
            nodes,
            logits,
            noise_at=one if noise else None,
            processor=processor,
        )
        if vocabulary is not None:
            best = jnp.take(vocabulary.target_ids, best, mode="clip")
        return best, score

    def paths(row_tokens, seen, level):
        """The contexts of nodes at depth `level`, whose rows are on their paths."""
        anchored = jnp.ones((*seen.shape[:2], 1), bool)
        return Nodes(
            tokens=jnp.concatenate([sequences.anchor[:, None], row_tokens], axis=1),
            ancestors=jnp.concatenate([anchored, seen], axis=2),
            depth=jnp.broadcast_to(level, seen.shape[:2]).astype(jnp.int32),
        )

    row_tokens = jnp.zeros((batch, num_rows), jnp.int32)
    nothing = jnp.zeros((batch, 1, num_rows), bool)
    tokens, scores = children(
        state.hidden[:, None], paths(row_tokens, nothing, jnp.int32(0))
    )
    tokens, scores = tokens[:, 0], scores[:, 0]
    first = Candidates(tokens=tokens, parents=jnp.zeros_like(tokens), scores=scores)
    if depth == 1:
        return first
    slots = jnp.arange(width, dtype=jnp.int32)
    frontier = _Frontier(
        tokens=tokens,
        nodes=jnp.broadcast_to(1 + slots, (batch, width)),
        scores=scores,
        hidden=jnp.broadcast_to(state.hidden[:, None], (batch, width, net.hidden_size)),
        seen=jnp.zeros((batch, width, num_rows), bool),
    )
    live = state.cache.length[:, None]
    row_level = jnp.arange(num_rows, dtype=jnp.int32) // width
    row_position = live + row_level[None]

    def level_up(carry, level):
        held, row_tokens, frontier = carry
        start = level * width
        row_tokens = jax.lax.dynamic_update_slice_in_dim(
            row_tokens, frontier.tokens, start, axis=1
        )
        own = jnp.arange(num_rows, dtype=jnp.int32)[None] == start + slots[:, None]
        seen = frontier.seen | own[None]
        held, hidden = net.read(
            params,
            state.cache,
            held,
            start,
            frontier.hidden,
            frontier.tokens,
            jnp.broadcast_to(live + level, (batch, width)),
            row_position,
            seen,
        )
        tokens, scores = children(hidden, paths(row_tokens, seen, level + 1))
        found = Candidates(
            tokens=tokens.reshape(batch, -1),
            parents=jnp.repeat(frontier.nodes, width, axis=1),
            scores=(frontier.scores[:, :, None] + scores).reshape(batch, -1),
        )
        scores, chosen = jax.lax.top_k(found.scores, width)
        parent = chosen // width
        frontier = _Frontier(
            tokens=jnp.take_along_axis(found.tokens, chosen, axis=1),
            nodes=1 + width + level * width * width + chosen,
            scores=scores,
            hidden=jnp.take_along_axis(hidden, parent[..., None], axis=1),
            seen=jnp.take_along_axis(seen, parent[..., None], axis=1),
        )
        return (held, row_tokens, frontier), found

    carry = (net.init_held(batch, num_rows), row_tokens, frontier)
    levels = jnp.arange(depth - 1, dtype=jnp.int32)
    _, later = jax.lax.scan(level_up, carry, levels)

    def append(first, later):
        later = jnp.moveaxis(later, 0, 1).reshape(batch, -1)
        return jnp.concatenate([first, later], axis=1)

    return jax.tree.map(append, first, later)


def _likeliest(
    logits: Float[Array, "B T W"], num: int
) -> tuple[Int[Array, "B T k"], Float[Array, "B T k"]]:
    """The `num` likeliest of each row, the smaller index first among equals."""
    batch, rows, size = logits.shape
    # As a matrix: for that XLA has a selection, and needs no sort.
    best, index = jax.lax.top_k(logits.reshape(-1, size), num)
    best, index = best.reshape(batch, rows, num), index.reshape(batch, rows, num)
    peak = best[..., :1]
    total = jnp.log(jnp.sum(jnp.exp(logits - peak), axis=-1, keepdims=True))
    # Both terms are at most 0, so that no child is worth more than its parent. A row of
    # nothing but -inf, or with a NaN, is worth nothing.
    score = (best - peak) - total
    return index, jnp.where(jnp.isnan(score), -jnp.inf, score)
