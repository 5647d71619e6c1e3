"""A small language model as drafter: classic draft/target speculation.

Any causal LM with the target's tokenizer (Leviathan et al., arXiv 2211.17192; Chen et
al., 2302.01318). The draft model has a cache of its own. Drafting reads the anchor and
K - 1 of its own proposals into the tail of that cache; what the target then commits is
compared with the tail, and the entries that agree become live. After full acceptance
the last draft token has not been read; it is read together with the next anchor, and
two rows cost as much as one. So nothing is read twice, and there is no special case.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxdec import drafting, sampling
from jaxdec.types import (
    Commit,
    Draft,
    Drafter,
    DrafterParams,
    LogitsProcessor,
    Model,
    Sequences,
    pytree,
)


@pytree
class DraftModelState:
    """The draft model's cache and what was read into its tail."""

    cache: Any
    tail: Int[Array, "B R"]
    """Tokens read after the live entries, in order."""
    tail_length: Int[Array, "B"]
    unread: Int[Array, "B W"]
    """Committed tokens (all but the anchor) that are not read yet."""
    num_unread: Int[Array, "B"]


def draft_model(
    model: Model,
    length: int,
    *,
    coupled: bool = True,
    processor: LogitsProcessor | None = None,
    max_unread: int = 1,
) -> Drafter:
    """Drafts `length` tokens, one small forward each.

    Args:
        model: the draft model; its params are ``params.own`` or, where it is part of
            the target, ``params.shared``.
        length: K.
        coupled: True for the rule `match` (the position's shared noise), False for
            `rejection` (independent noise, and the distributions it drew from).
        processor: the request's custom processor, so that drafts follow it too.
        max_unread: committed tokens besides the anchor that the first forward of a
            proposal can read; more than 1 only where proposals are skipped.

    Raises:
        ValueError: a length below 1, or no room for unread tokens.
    """
    if length < 1:
        raise ValueError(f"draft length is {length}; give at least 1")
    if max_unread < 1:
        raise ValueError(f"max_unread is {max_unread}; give at least 1")
    width = max_unread + 1
    tail_width = width + length - 1

    def params_of(params: DrafterParams):
        return params.shared if params.own is None else params.own

    def read(params, cache, tokens, mask=None):
        """Forward at the end of the live entries; length is unchanged."""
        steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        position = cache.length[:, None] + steps[None]
        return model.forward(params_of(params), cache, tokens, position, mask)

    def init(batch_size, capacity):
        def zeros(*shape):
            return jnp.zeros((batch_size, *shape), jnp.int32)

        return DraftModelState(
            cache=model.init_cache(batch_size, capacity),
            tail=zeros(tail_width),
            tail_length=zeros(),
            unread=zeros(max_unread),
            num_unread=zeros(),
        )

    def read_unread(params, state: DraftModelState):
        """The cache after reading what an earlier step left; no forward if nothing."""

        def is_left(carry):
            return jnp.any(carry[1] > 0)

        def catch_up(carry):
            cache, left = carry
            cache, _ = read(params, cache, state.unread)
            return cache.commit(None, left), jnp.zeros_like(left)

        carry = (state.cache, state.num_unread)
        return jax.lax.while_loop(is_left, catch_up, carry)[0]

    def extend(params, state: DraftModelState, commit: Commit) -> DraftModelState:
        tokens = commit.tokens[:, :-1]
        num = tokens.shape[1]
        if num > tail_width:  # A prefill chunk, or a step too wide to compare: read it.
            cache = read_unread(params, state)
            cache, _ = read(params, cache, tokens)
            return state.replace(
                cache=cache.commit(None, commit.length),
                tail_length=jnp.zeros_like(state.tail_length),
                num_unread=jnp.zeros_like(state.num_unread),
            )
        # What was unread and is now committed stands before what this step committed.
        pending, num_pending = _append(
            state.unread, state.num_unread, tokens, commit.length
        )
        index = jnp.arange(tail_width, dtype=jnp.int32)[None]
        shown = jnp.pad(pending, ((0, 0), (0, tail_width)))[:, :tail_width]
        agrees = (shown == state.tail) & (index < state.tail_length[:, None])
        agrees = agrees & (index < num_pending[:, None])
        num_read = jnp.sum(jnp.cumprod(agrees.astype(jnp.int32), axis=1), axis=1)
        cache = state.cache.commit(None, num_read)
        unread = _drop(pending, num_read)
        left = num_pending - num_read

        # Normally at most one token is left (after full acceptance). More are left
        # where another drafter proposed; then they are read here.
        def overfull(carry):
            return jnp.any(carry[2] > max_unread)

        def catch_up(carry):
            cache, unread, left = carry
            take = jnp.where(left > max_unread, jnp.minimum(left, width), 0)
            cache, _ = read(params, cache, unread[:, :width])
            return cache.commit(None, take), _drop(unread, take), left - take

        room = max(0, width - unread.shape[1])
        unread = jnp.pad(unread, ((0, 0), (0, room)))
        cache, unread, left = jax.lax.while_loop(
            overfull, catch_up, (cache, unread, left)
        )
        return state.replace(
            cache=cache,
            tail_length=jnp.zeros_like(state.tail_length),
            unread=unread[:, :max_unread],
            num_unread=left,
        )

    def propose(params, state: DraftModelState, sequences: Sequences):
        live = state.cache.length
        anchor = sequences.anchor[:, None]
        first, num_first = _append(
            state.unread, state.num_unread, anchor, jnp.ones_like(live)
        )
        cache, output = read(params, state.cache, first)
        last = (num_first - 1)[:, None, None]
        logits = jnp.take_along_axis(output.logits, last, axis=1)
        context = jnp.concatenate(
            [anchor, jnp.zeros((live.shape[0], length), jnp.int32)], axis=1
        )
        cache = cache.commit(None, num_first)

        def sample(context, logits, node):
            nodes = sampling.chain_nodes(context, node)
            token, log_probs = drafting.sample(
                None, sequences, nodes, logits, coupled=coupled, processor=processor
            )
            context = jax.lax.dynamic_update_slice_in_dim(
                context, token, node + 1, axis=1
            )
            return context, token, log_probs

        context, token, log_probs = sample(context, logits, jnp.int32(0))

        def more(carry, node):
            cache, context, token = carry
            cache, output = read(params, cache, token)
            cache = cache.commit(None, jnp.ones_like(live))
            context, token, log_probs = sample(context, output.logits, node)
            return (cache, context, token), log_probs

        nodes = jnp.arange(1, length, dtype=jnp.int32)
        (cache, context, _), rest = jax.lax.scan(more, (cache, context, token), nodes)
        tokens = context[:, 1:]
        if not coupled:
            rest = jnp.moveaxis(rest[:, :, 0], 0, 1)
            log_probs = jnp.concatenate([log_probs, rest], axis=1)
        tail, tail_length = _append(
            first, num_first, tokens[:, :-1], jnp.full_like(live, length - 1)
        )
        # A draft model that is out of positions drafts nothing: its rotary table, or
        # what it was trained on, ends there.
        fits = sequences.length + length <= model.max_positions
        state = state.replace(
            cache=cache.replace(length=live), tail=tail, tail_length=tail_length
        )
        draft = Draft(
            tokens=tokens,
            length=jnp.where(fits, jnp.int32(length), 0),
            log_probs=None if coupled else log_probs,
        )
        return state, draft

    return Drafter(
        name="draft_model",
        max_length=length,
        taps=(),
        init=init,
        extend=extend,
        propose=propose,
    )


def _append(
    first: Int[Array, "B M"],
    num_first: Int[Array, "B"],
    second: Int[Array, "B T"],
    num_second: Int[Array, "B"],
) -> tuple[Int[Array, "B M+T"], Int[Array, "B"]]:
    """Live entries of `first`, then those of `second`, left-aligned."""
    size = first.shape[1]
    if second.shape[1] == 0:
        return first, num_first
    buffer = jnp.concatenate([first, jnp.zeros_like(second)], axis=1)
    index = jnp.arange(size + second.shape[1], dtype=jnp.int32)[None]
    source = index - num_first[:, None]
    taken = jnp.take_along_axis(
        second, jnp.clip(source, 0, second.shape[1] - 1), axis=1
    )
    is_second = index >= num_first[:, None]
    return jnp.where(is_second, taken, buffer), num_first + num_second


def _drop(tokens: Int[Array, "B M"], num: Int[Array, "B"]) -> Int[Array, "B M"]:
    """The entries after the first `num`, left-aligned; the rest is scratch."""
    size = tokens.shape[1]
    index = jnp.arange(size, dtype=jnp.int32)[None] + num[:, None]
    return jnp.take_along_axis(tokens, jnp.minimum(index, size - 1), axis=1)
