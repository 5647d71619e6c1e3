"""EAGLE drafters: small networks that read what the target felt, not only what it said.

Three ways of drafting with them, chosen by what the network is and by the caller:

    chain      one token after another; each row feeds on the one before
    tree       the likeliest continuations of each, pruned to the best nodes
    parallel   all tokens in one pass, with mask rows in place of what is not known yet
               (P-EAGLE); the tokens are then independent, given what was committed
"""

import jax.numpy as jnp

from jaxdec import drafting
from jaxdec.drafters.recurrent import (
    HeldRows,
    RecurrentNet,
    RecurrentState,
    can_draft,
    chain,
    make_drafter,
    vocabulary_of,
)
from jaxdec.models.eagle import make_network
from jaxdec.models.eagle_config import EagleConfig
from jaxdec.models.layers import Held
from jaxdec.types import Draft, Drafter, LogitsProcessor, Sequences


def recurrent_net(
    config: EagleConfig, *, dtype: str = "float32", cache_dtype: str = "float32"
) -> RecurrentNet:
    """The network of a configuration, as the drafting functions want it."""
    network = make_network(config, dtype, cache_dtype)

    def read(params, cache, held, start, hidden, tokens, position, held_position, mask):
        seen_from = position
        if not config.is_parallel:
            # A drafter that feeds on its own output was trained with a window that
            # stays where it is at the last true row.
            last = cache.length[:, None] - 1
            seen_from = jnp.broadcast_to(last, position.shape)
            held_position = jnp.broadcast_to(last, held_position.shape)
        rows = Held(held.keys, held.values, start, held_position, mask)
        (keys, values), hidden = network.read(
            params, cache, rows, hidden, tokens, position, seen_from
        )
        return HeldRows(keys=keys, values=values), hidden

    def init_held(batch_size, num_rows):
        keys, values = network.init_held(batch_size, num_rows)
        return HeldRows(keys=keys, values=values)

    is_first = config.fusion == "embedding"
    return RecurrentNet(
        name="eagle" if is_first else "peagle" if config.is_parallel else "eagle3",
        taps=config.taps,
        hidden_size=config.layers.hidden_size,
        max_positions=config.layers.max_positions,
        init_cache=network.init_cache,
        init_held=init_held,
        fuse=network.fuse,
        write=network.write,
        read=read,
        logits=network.logits,
        vocabulary=network.vocabulary,
    )


def eagle(
    config: EagleConfig,
    *,
    length: int | None = None,
    coupled: bool = True,
    processor: LogitsProcessor | None = None,
    dtype: str = "float32",
    cache_dtype: str = "float32",
) -> Drafter:
    """Drafts `length` tokens in a row.

    Args:
        config: what it is.
        length: K; None is what its authors draft.
        coupled: True for the rule `match` (the position's shared noise), False for
            `rejection` (independent noise, and the distributions it drew from).
        processor: the request's custom processor, so that drafts follow it too.
        dtype: of the weights.
        cache_dtype: of keys and values.

    Raises:
        ValueError: a length below 1.
    """
    length = config.draft_length if length is None else length
    net = recurrent_net(config, dtype=dtype, cache_dtype=cache_dtype)
    if not config.is_parallel:
        return chain(net, length, coupled=coupled, processor=processor)
    if length < 1:
        raise ValueError(f"draft length is {length}; give at least 1")
    network = make_network(config, dtype, cache_dtype)

    def propose(params, state: RecurrentState, sequences: Sequences):
        batch = sequences.length.shape[0]
        hidden = state.hidden[:, None]
        num = length - 1
        if num:
            index = jnp.arange(num, dtype=jnp.int32)
            position = state.cache.length[:, None] + index[None]
            masked = network.mask_hidden(params)[None, None]
            _, rows = net.read(
                params,
                state.cache,
                net.init_held(batch, num),
                jnp.int32(0),
                jnp.broadcast_to(masked, (batch, num, net.hidden_size)),
                jnp.full((batch, num), config.mask_token, jnp.int32),
                position,
                position,
                jnp.broadcast_to(index[:, None] >= index[None], (batch, num, num)),
            )
            hidden = jnp.concatenate([hidden, rows], axis=1)
        tokens, log_probs = drafting.sample_block(
            vocabulary_of(net, params),
            sequences,
            net.logits(params, hidden),
            coupled=coupled,
            processor=processor,
        )
        able = can_draft(net, state, sequences, length)
        return state, Draft(
            tokens=tokens,
            length=jnp.where(able, jnp.int32(length), 0),
            log_probs=log_probs,
        )

    return make_drafter(net, length, propose)
