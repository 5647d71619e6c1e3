"""Block drafting: all draft tokens from one pass over the anchor and masks (DFlash).

The target's features at the tokens read become keys and values of every layer, once
(`extend`); a proposal is one pass that reads them with the block's own rows beside
(`jaxdec.models.block`; z-lab, arXiv 2602.06036). The places know nothing of each
other's tokens: each draws from its own marginal.

At a temperature the original drafts the likeliest tokens all the same (``greedy=True``
here). With the rule `match` the default shares the position's noise with the target
instead, which accepts more: a place then agrees with probability (1 - d) / (1 + d) at
least, d the distance of its marginal from the target's law, and with certainty where
they are equal. With `rejection` drafts are sampled independently, as DeepSpec does.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxdec import drafting
from jaxdec.cache import KVCache
from jaxdec.models.block import BlockNet
from jaxdec.types import (
    Commit,
    Draft,
    Drafter,
    DrafterParams,
    LogitsProcessor,
    Sequences,
    pytree,
)


@pytree
class BlockState:
    """The context: keys and values of the target's features, one behind the anchor."""

    cache: KVCache


def dflash(
    net: BlockNet,
    length: int | None = None,
    *,
    coupled: bool = True,
    greedy: bool = False,
    processor: LogitsProcessor | None = None,
) -> Drafter:
    """Drafts with a network that has no heads besides its output.

    Args:
        net: the network.
        length: draft tokens, at most and by default K of the layout. The pass is over a
            whole block whatever the length, as in training.
        coupled: True for the rule `match` (the position's shared noise), False for
            `rejection` (independent noise, and the distributions it drew from).
        greedy: draft the likeliest tokens at every temperature; a point mass.
        processor: the request's custom processor, so that drafts follow it too.

    Raises:
        ValueError: a length out of range, or a network with a Markov or confidence
            head, which `jaxdec.drafters.dspark.dspark` is for.
    """
    if net.config.markov != "none" or net.config.confidence != "none":
        raise ValueError(
            f"dflash got a network with heads (markov={net.config.markov!r}, "
            f"confidence={net.config.confidence!r}), which it would leave out; use "
            "dspark"
        )
    num = check_length(net, length)

    def propose(params: DrafterParams, state: BlockState, sequences: Sequences):
        rows = net.read(params, state.cache, sequences.anchor)
        logits = net.logits(params, rows[:, net.config.first :][:, :num])
        if greedy:
            sequences = without_temperature(sequences)
        tokens, log_probs = drafting.sample_block(
            net.vocabulary(params),
            sequences,
            logits,
            coupled=coupled,
            processor=processor,
        )
        able = can_draft(net, state, sequences)
        draft = Draft(
            tokens=tokens,
            length=jnp.where(able, jnp.int32(num), 0),
            log_probs=log_probs,
        )
        return state, draft

    return make_drafter(net, "dflash", num, propose)


def make_drafter(net: BlockNet, name: str, num: int, propose: Callable) -> Drafter:
    """A block drafter with this way to propose.

    Args:
        net: the network.
        name: of the drafter.
        num: K.
        propose: as `jaxdec.types.Drafter.propose`.
    """

    def init(batch_size: int, capacity: int) -> BlockState:
        return BlockState(cache=net.init_cache(batch_size, capacity))

    def extend(params: DrafterParams, state: BlockState, commit: Commit) -> BlockState:
        fused = net.fuse(params, commit.features)
        cache = net.write(params, state.cache, fused)
        return BlockState(cache=cache.commit(None, commit.length))

    return Drafter(
        name=name,
        max_length=num,
        taps=net.config.taps,
        init=init,
        extend=extend,
        propose=propose,
        keeps_state=True,
    )


def check_length(net: BlockNet, length: int | None) -> int:
    """The number of draft tokens, checked against the block.

    Args:
        net: the network, whose block drafts K tokens at most.
        length: how many are asked for; None is K.

    Raises:
        ValueError: it is not between 1 and K.
    """
    most = net.config.max_length
    if length is None:
        return most
    if not 1 <= length <= most:
        raise ValueError(
            f"draft length is {length}, but a block of {net.config.block_size} drafts "
            f"1 to {most} tokens; give one of those"
        )
    return length


def can_draft(
    net: BlockNet, state: BlockState, sequences: Sequences
) -> Bool[Array, "B"]:
    """Rows that have a context, and positions left for a whole block."""
    last = sequences.length - 1 + net.config.block_size
    return (state.cache.length > 0) & (last <= net.config.layers.max_positions)


def without_temperature(sequences: Sequences) -> Sequences:
    """The same requests, at temperature 0."""
    params = sequences.sampling
    cold = params.replace(temperature=jnp.zeros_like(params.temperature))
    return sequences.replace(sampling=cold)
