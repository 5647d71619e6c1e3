"""DSpark: a block pass, then a small Markov head from left to right, and a confidence.

The pass is DFlash's. Its places are coherent with each other because, while tokens are
drawn in order, each adds a bias to the next place's logits. The confidence of a place
depends on the token before it and on no later one (it is *non-anticipating*), so it may
decide how many draft tokens are judged under any rule: see `jaxdec.draft_length`
(DeepSpec, deepseek-ai/DeepSpec; arXiv 2607.05147).

At a temperature DeepSpec samples its drafts, with noise of their own. So does this
under `rejection`; under `match` the noise is the target's, which accepts more.
"""

import jax
import jax.numpy as jnp

from jaxdec import drafting, sampling
from jaxdec.drafters.dflash import (
    BlockState,
    can_draft,
    check_length,
    dflash,
    make_drafter,
    without_temperature,
)
from jaxdec.models.block import BlockNet
from jaxdec.types import Draft, Drafter, DrafterParams, LogitsProcessor, Sequences


def dspark(
    net: BlockNet,
    length: int | None = None,
    *,
    coupled: bool = True,
    greedy: bool = False,
    processor: LogitsProcessor | None = None,
) -> Drafter:
    """Drafts with a network that has a Markov head, a confidence head, or both.

    Args:
        net: the network.
        length: draft tokens, at most and by default K of the layout. The pass is over a
            whole block whatever the length; the Markov head stops at it.
        coupled: True for the rule `match` (the position's shared noise), False for
            `rejection` (independent noise, and the distributions it drew from).
        greedy: draft the likeliest tokens at every temperature; a point mass.
        processor: the request's custom processor, so that drafts follow it too.

    Raises:
        ValueError: a length out of range, or a network without heads, which
            `jaxdec.drafters.dflash.dflash` is for.
    """
    config = net.config
    if config.markov == "none" and config.confidence == "none":
        raise ValueError(
            "dspark got a network with neither a Markov nor a confidence head; use "
            "dflash"
        )
    num = check_length(net, length)

    def propose(params: DrafterParams, state: BlockState, sequences: Sequences):
        anchor = sequences.anchor
        rows = net.read(params, state.cache, anchor)
        hidden = rows[:, config.first : config.first + num]
        drawn = without_temperature(sequences) if greedy else sequences
        tokens, log_probs = _draw(net, params, drawn, rows, hidden, coupled, processor)
        confidence = None
        if config.confidence != "none":
            previous = jnp.concatenate([anchor[:, None], tokens[:, :-1]], axis=1)
            odds = net.confidence(params, hidden, previous)
            if config.temperatures:
                calibrated = jnp.asarray(config.temperatures[:num], jnp.float32)
                odds = odds / calibrated[None]
            confidence = jax.nn.sigmoid(odds)
        able = can_draft(net, state, sequences)
        draft = Draft(
            tokens=tokens,
            length=jnp.where(able, jnp.int32(num), 0),
            log_probs=log_probs,
            confidence=confidence,
        )
        return state, draft

    return make_drafter(net, "dspark", num, propose)


def _draw(net, params, sequences, rows, hidden, coupled, processor):
    """Draft tokens from left to right, each biasing the logits of the next place."""
    logits = net.logits(params, hidden)
    vocabulary = net.vocabulary(params)
    options = dict(coupled=coupled, processor=processor)
    head = net.markov(params)
    if head is None:
        return drafting.sample_block(vocabulary, sequences, logits, **options)
    batch, num, _ = hidden.shape
    anchor = sequences.anchor

    prepared = head.prepare(hidden)

    def place(carry, node):
        context, previous, state = carry
        own, given = (
            jax.lax.dynamic_slice_in_dim(x, node, 1, axis=1) for x in (logits, prepared)
        )
        state, code = head.code(state, previous, given[:, 0])
        tokens, log_probs = drafting.sample(
            vocabulary,
            sequences,
            sampling.chain_nodes(context, node),
            own + head.out(code)[:, None],
            **options,
        )
        context = jax.lax.dynamic_update_slice_in_dim(context, tokens, node + 1, axis=1)
        return (context, tokens[:, 0], state), log_probs

    unknown = jnp.zeros((batch, num), jnp.int32)
    context = jnp.concatenate([anchor[:, None], unknown], axis=1)
    carry = (context, anchor, markov_start(net, params, rows, anchor))
    nodes = jnp.arange(num, dtype=jnp.int32)
    (context, _, _), log_probs = jax.lax.scan(place, carry, nodes)
    if log_probs is not None:
        log_probs = jnp.moveaxis(log_probs[:, :, 0], 0, 1)
    return context[:, 1:], log_probs


def markov_start(net: BlockNet, params: DrafterParams, rows, anchor):
    """The Markov head's state before the first place that says a draft token.

    In the "1 + N" layout the anchor's own row says nothing, but training ran the head
    over it, so a recurrent head has seen it.

    Args:
        net: the network.
        params: its arrays.
        rows: hidden states of the block, ``[B, T, E]``; that of the anchor is first.
        anchor: the last committed token, ``[B]``.
    """
    head = net.markov(params)
    state = head.start(anchor.shape[0])
    if net.config.sample_from_anchor or net.config.markov != "rnn":
        return state
    return head.code(state, anchor, head.prepare(rows[:, :1])[:, 0])[0]


def block_drafter(net: BlockNet, length: int | None = None, **options) -> Drafter:
    """`dflash` or `dspark`, whichever the network's heads ask for.

    Args:
        net: the network.
        length: draft tokens a step; None is all that a block has.
        **options: of these two functions.

    Raises:
        ValueError: a length that a block does not have.
    """
    config = net.config
    has_heads = config.markov != "none" or config.confidence != "none"
    return (dspark if has_heads else dflash)(net, length, **options)
