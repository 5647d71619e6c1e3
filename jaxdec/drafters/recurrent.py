"""Drafting one token after another with a small network that reads the target.

EAGLE and MTP share one alignment. Row i of the network reads what the target felt at
token i and the token that followed it, and says what comes after that one:

    row            0          1                  s-1
    feature      f_0        f_1       ...     f_{s-1}     of the target
    token        x_1        x_2       ...       x_s       the last is the anchor
    says         x_2        x_3       ...     x_{s+1}

Rows made of true features are permanent and live in a cache, one behind the sequence
like the target's; `extend` writes them. Drafting goes on with the network's own output
where features are not known yet. Those rows stand beside the cache and are forgotten
after the proposal, even where their tokens are accepted: the next `extend` makes them
again from true features. So `propose` never writes to the cache.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxdec import drafting, sampling
from jaxdec.cache import KVCache
from jaxdec.types import (
    Commit,
    Draft,
    Drafter,
    DrafterParams,
    LogitsProcessor,
    Sequences,
    Vocabulary,
    pytree,
)


@pytree
class HeldRows:
    """Rows beside the cache: keys and values per layer, ``[B, G, R, D]``."""

    keys: tuple[Float[Array, "B G R D"], ...]
    values: tuple[Float[Array, "B G R D"], ...]


class RecurrentNet(NamedTuple):
    """A drafting network as pure functions over ``DrafterParams``.

    H is the width of what passes from row to row; the target's taps make F.
    """

    name: str
    taps: tuple[int, ...]
    """What the target must return; see `jaxdec.models.decoder.make_model`."""
    hidden_size: int
    max_positions: int
    init_cache: Callable[[int, int], KVCache]
    init_held: Callable[[int, int], HeldRows]
    """``(batch_size, num_rows) -> HeldRows``."""
    fuse: Callable[[DrafterParams, Float[Array, "B T F"]], Float[Array, "B T H"]]
    """The hidden input of rows whose features are known."""
    write: Callable[..., tuple[KVCache, Float[Array, "B T H"]]]
    """``(params, cache, hidden[B,T,H], tokens[B,T], position[B,T])``: causal rows at
    the cache's tail; its length is unchanged. Returns what passes on."""
    read: Callable[..., tuple[HeldRows, Float[Array, "B T H"]]]
    """``(params, cache, held, start, hidden, tokens, position, held_position[B,R],
    mask[B,T,R])``: rows ``start ..`` of `held`, which attend the live cache and those
    of the R that `mask` allows."""
    logits: Callable[[DrafterParams, Float[Array, "B T H"]], Float[Array, "B T W"]]
    """Over the network's own vocabulary."""
    vocabulary: Callable[[DrafterParams], Vocabulary] | None = None
    """Which W of the target's tokens those are; None says that they are all."""


@pytree
class RecurrentState:
    """The permanent rows, and what the last of them said."""

    cache: KVCache
    hidden: Float[Array, "B H"]
    """Output of the last permanent row; meaningless while there is none."""


def init_state(net: RecurrentNet, batch_size: int, capacity: int) -> RecurrentState:
    """No rows."""
    return RecurrentState(
        cache=net.init_cache(batch_size, capacity),
        hidden=jnp.zeros((batch_size, net.hidden_size), jnp.float32),
    )


def extend_rows(
    net: RecurrentNet, params: Any, state: RecurrentState, commit: Commit
) -> RecurrentState:
    """Makes a row permanent for every token that the target has read."""
    length = state.cache.length
    num = commit.features.shape[1]
    steps = jnp.arange(num, dtype=jnp.int32)
    cache, out = net.write(
        params,
        state.cache,
        net.fuse(params, commit.features),
        commit.tokens[:, 1:],
        length[:, None] + steps[None],
    )
    last = jnp.maximum(commit.length - 1, 0)[:, None, None]
    newest = jnp.take_along_axis(out, last, axis=1)[:, 0]
    is_new = (commit.length > 0)[:, None]
    return RecurrentState(
        cache=cache.commit(None, commit.length),
        hidden=jnp.where(is_new, newest, state.hidden),
    )


def vocabulary_of(net: RecurrentNet, params: DrafterParams) -> Vocabulary | None:
    """The network's own vocabulary, where it is not the target's."""
    return None if net.vocabulary is None else net.vocabulary(params)


def can_draft(
    net: RecurrentNet, state: RecurrentState, sequences: Sequences, depth: int
) -> Bool[Array, "B"]:
    """Rows that can draft `depth` tokens: from something, at positions that exist."""
    fits = sequences.length + depth <= net.max_positions
    return (state.cache.length > 0) & fits


def chain(
    net: RecurrentNet,
    length: int,
    *,
    coupled: bool = True,
    processor: LogitsProcessor | None = None,
) -> Drafter:
    """Drafts `length` tokens in a row.

    Args:
        net: the network.
        length: K.
        coupled: True for the rule `match` (the position's shared noise), False for
            `rejection` (independent noise, and the distributions it drew from).
        processor: the request's custom processor, so that drafts follow it too.

    Raises:
        ValueError: a length below 1.
    """
    if length < 1:
        raise ValueError(f"draft length is {length}; give at least 1")

    def propose(params, state: RecurrentState, sequences: Sequences):
        batch = sequences.length.shape[0]
        first = state.cache.length
        context = jnp.concatenate(
            [sequences.anchor[:, None], jnp.zeros((batch, length), jnp.int32)], axis=1
        )
        held_position = first[:, None] + jnp.arange(length - 1, dtype=jnp.int32)[None]
        vocabulary = vocabulary_of(net, params)

        def sample(context, hidden, node):
            nodes = sampling.chain_nodes(context, node)
            token, log_probs = drafting.sample(
                vocabulary,
                sequences,
                nodes,
                net.logits(params, hidden[:, None]),
                coupled=coupled,
                processor=processor,
            )
            context = jax.lax.dynamic_update_slice_in_dim(
                context, token, node + 1, axis=1
            )
            return context, token, log_probs

        def step(carry, node):
            held, context, hidden = carry
            context, token, log_probs = sample(context, hidden, node)

            def read():
                earlier = jnp.arange(length - 1, dtype=jnp.int32) <= node
                out, hidden_after = net.read(
                    params,
                    state.cache,
                    held,
                    node,
                    hidden[:, None],
                    token,
                    (first + node)[:, None],
                    held_position,
                    jnp.broadcast_to(earlier[None, None], (batch, 1, length - 1)),
                )
                return out, hidden_after[:, 0]

            # The last token is not read: nothing is drafted from it.
            is_last = node == length - 1
            held, hidden = jax.lax.cond(is_last, lambda: (held, hidden), read)
            return (held, context, hidden), log_probs

        if length == 1:
            context, _, log_probs = sample(context, state.hidden, jnp.int32(0))
        else:
            carry = (net.init_held(batch, length - 1), context, state.hidden)
            nodes = jnp.arange(length, dtype=jnp.int32)
            (_, context, _), log_probs = jax.lax.scan(step, carry, nodes)
            if not coupled:
                log_probs = jnp.moveaxis(log_probs[:, :, 0], 0, 1)
        able = can_draft(net, state, sequences, length)
        draft = Draft(
            tokens=context[:, 1:],
            length=jnp.where(able, jnp.int32(length), 0),
            log_probs=None if coupled else log_probs,
        )
        return state, draft

    return make_drafter(net, length, propose)


def make_drafter(
    net: RecurrentNet, length: int, propose: Callable, max_depth: int | None = None
) -> Drafter:
    """A recurrent drafter with this way to propose.

    Args:
        net: the network.
        length: K.
        propose: as `jaxdec.types.Drafter.propose`.
        max_depth: longest path of a tree, in tokens; None for a chain.
    """

    def extend(params, state, commit):
        return extend_rows(net, params, state, commit)

    return Drafter(
        name=net.name if max_depth is None else f"{net.name} tree",
        max_length=length,
        taps=net.taps,
        init=lambda batch_size, capacity: init_state(net, batch_size, capacity),
        extend=extend,
        propose=propose,
        max_depth=max_depth,
        keeps_state=True,
    )
