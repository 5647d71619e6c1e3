"""Scoring a draft: one target forward over its nodes, and a judgement of each.

A forward over all nodes writes to the cache, then reads it. Where fewer nodes are often
enough (`jaxdec.draft_length`), a step may choose among a few widths, inside the one
compiled program: the forward then reads only the first nodes, as many as some row of
the batch has live. What a branch of a switch returns is copied, so such branches read
the cache and return rows, which are written afterwards.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxdec import sampling
from jaxdec.types import DecodeState, Judgement, LogitsProcessor, Model, Output, Params

ScoreFn = Callable[
    [Params, DecodeState, sampling.Nodes, Int[Array, "B"], bool],
    tuple[Any, Output, Judgement],
]
"""``(target params, state, nodes, draft_length, is_chain) -> (cache, output,
judgement)``; what is said of nodes past the draft's length means nothing."""


def scorer(
    model: Model,
    max_length: int,
    *,
    widths: tuple[int, ...] = (),
    processor: LogitsProcessor | None = None,
    with_log_probs: bool = False,
    keep_logits: bool = True,
) -> ScoreFn:
    """What a step scores its drafts with.

    Args:
        model: the target.
        max_length: K.
        widths: draft tokens that a forward may read, increasing up to K; empty: K.
        processor: the request's custom processor.
        with_log_probs: whether the acceptance rule reads distributions.
        keep_logits: whether `Output.logits` are needed; with several widths they are
            empty otherwise (and so are the hidden states).

    Raises:
        ValueError: widths that make no sense, or a model that cannot do them.
    """
    if widths:
        _check_widths(widths, model, max_length)

    def judge(sequences, nodes, logits):
        return sampling.judge(
            sequences,
            nodes,
            logits,
            processor=processor,
            with_log_probs=with_log_probs,
        )

    def inputs_of(sequences, nodes, is_chain):
        position = (sequences.length - 1)[:, None] + nodes.depth
        # None says "causal": no mask is built, and commit has nothing to move.
        return nodes.tokens, position, None if is_chain else nodes.ancestors

    def whole(params, state, nodes, length, is_chain):
        del length
        num = nodes.depth.shape[1]
        if model.is_exact:
            nodes = nodes.padded(exact_width(model, nodes.depth.shape[0]))
        inputs = inputs_of(state.sequences, nodes, is_chain)
        cache, output = model.forward(params, state.cache, *inputs)
        judgement = judge(state.sequences, nodes, output.logits)
        if model.is_exact:
            output, judgement = jax.tree.map(lambda x: x[:, :num], (output, judgement))
        return cache, output, judgement

    def in_widths(params, state, nodes, length, is_chain):
        def of_width(width):
            def branch():
                part = nodes.first(width + 1)
                inputs = inputs_of(state.sequences, part, is_chain)
                rows, output = model.read(params, state.cache, *inputs)
                judgement = judge(state.sequences, part, output.logits)
                nothing = output.hidden[..., :0]
                output = output.replace(
                    logits=output.logits if keep_logits else nothing,
                    hidden=nothing,
                    normed_hidden=nothing,
                )
                missing = max_length - width
                return (
                    _pad(rows, 2, missing),
                    _pad(output, 1, missing),
                    _pad(judgement, 1, missing),
                )

            return branch

        # The first width that holds the longest draft of the batch.
        longest = jnp.max(length)
        which = sum((longest > w).astype(jnp.int32) for w in widths[:-1])
        branches = [of_width(w) for w in widths]
        rows, output, judgement = jax.lax.switch(which, branches)
        return state.cache.put(rows), output, judgement

    return in_widths if len(widths) > 1 else whole


def exact_width(model: Model, batch_size: int) -> int:
    """Nodes that every step of an exact model scores, whatever was drafted."""
    return -(-model.min_rows // batch_size)


def _check_widths(widths: tuple[int, ...], model: Model, max_length: int) -> None:
    if list(widths) != sorted(set(widths)) or widths[0] < 0:
        raise ValueError(
            f"widths {widths} must be different numbers of draft tokens in increasing "
            "order; sort them"
        )
    if widths[-1] != max_length:
        raise ValueError(
            f"widths {widths} must end with the {max_length} tokens that may be "
            "drafted; add that number"
        )
    if len(widths) > 1 and model.read is None:
        raise ValueError(
            "several widths need a model that can read without writing (Model.read), "
            "and this one cannot; leave them out"
        )


def _pad(tree: Any, axis: int, missing: int) -> Any:
    """Zeros at the end of an axis of every leaf."""

    def pad(x):
        amounts = [(0, missing if i == axis else 0) for i in range(x.ndim)]
        return jnp.pad(x, amounts)

    return jax.tree.map(pad, tree)
