"""What a drafter says, given its logits: in the target's vocabulary or a smaller one.

Many drafters know only the W most frequent of the target's V tokens. Their logits stay
W wide: they are widened to V (-inf elsewhere) only where something asks for it, that is
for penalties, bans, the caller's processor, and the distributions of `rejection`. Noise
is always drawn for V tokens and then picked, so that a token has the same noise
whichever vocabulary it is drawn from.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxdec import sampling
from jaxdec.sampling import Nodes
from jaxdec.types import LogitsProcessor, Sequences, Vocabulary


def widen(
    vocabulary: Vocabulary | None, logits: Float[Array, "B T W"]
) -> Float[Array, "B T V"]:
    """Logits over the target's vocabulary; -inf for tokens that cannot be said."""
    if vocabulary is None:
        return logits
    return jnp.take(
        logits, vocabulary.draft_index, axis=-1, mode="fill", fill_value=-jnp.inf
    )


def adjust(
    vocabulary: Vocabulary | None,
    sequences: Sequences,
    nodes: Nodes,
    logits: Float[Array, "B T W"],
    processor: LogitsProcessor | None = None,
) -> Float[Array, "B T W"]:
    """`sampling.adjust` for logits over a smaller vocabulary; free where it is off."""
    if vocabulary is None:
        return sampling.adjust(sequences, nodes, logits, processor)

    def adjusted():
        wide = widen(vocabulary, logits)
        wide = sampling.adjust(sequences, nodes, wide, processor)
        return jnp.take(wide, vocabulary.target_ids, axis=-1, mode="clip")

    if processor is not None:
        return adjusted()
    is_needed = sampling.needs_adjustment(sequences.sampling)
    return jax.lax.cond(is_needed, adjusted, lambda: logits)


def choose(
    choose_fn: Callable[[Float[Array, "B T W"]], Any],
    vocabulary: Vocabulary | None,
    sequences: Sequences,
    nodes: Nodes,
    logits: Float[Array, "B T W"],
    *,
    noise_at: Nodes | None,
    processor: LogitsProcessor | None = None,
) -> Any:
    """What `choose_fn` takes of what a drafter compares under the rule `match`.

    That is its logits, adjusted and tempered, plus the noise of the target at their
    positions. No filters: they can only remove agreement. A drafter with the target's
    logits is then always right, unless the target filters.

    Where a request asks for none of this the bare logits are compared, in a branch of
    its own: one that returned them would copy them.

    Args:
        choose_fn: ``scores -> pytree``, for example the index of the largest.
        vocabulary: of the logits; None is all of the target's.
        sequences: committed tokens and sampling parameters.
        nodes: the context of each row of logits.
        logits: the drafter's.
        noise_at: the nodes whose positions' noise is added, or one for all; None is no
            noise and no temperature.
        processor: custom processor.
    """
    sampling_params = sequences.sampling
    is_noisy = jnp.bool_(False)
    if noise_at is not None:
        is_noisy = jnp.any(sampling_params.temperature > 0)

    def full():
        scores = adjust(vocabulary, sequences, nodes, logits, processor)
        if noise_at is not None:
            scores = jax.lax.cond(
                is_noisy,
                lambda: sampling.perturbed(sequences, noise_at, scores, vocabulary),
                lambda: scores,
            )
        return choose_fn(scores)

    if processor is not None:
        return full()
    is_full = is_noisy | sampling.needs_adjustment(sampling_params)
    return jax.lax.cond(is_full, full, lambda: choose_fn(logits))


def sample(
    vocabulary: Vocabulary | None,
    sequences: Sequences,
    nodes: Nodes,
    logits: Float[Array, "B T W"],
    *,
    coupled: bool,
    processor: LogitsProcessor | None = None,
) -> tuple[Int[Array, "B T"], Float[Array, "B T V"] | None]:
    """A drafter's own sample after every node. Greedy rows take the largest logit.

    Args:
        vocabulary: of the logits; None is all of the target's.
        sequences: committed tokens and sampling parameters.
        nodes: the nodes to draft from.
        logits: the drafter's, after each node.
        coupled: True for the rule `match`, see `choose`; False for `rejection`, see
            `jaxdec.sampling.independent_sample`.
        processor: custom processor, as in `jaxdec.sampling.judge`.

    Returns:
        Tokens of the target; and, if not coupled, the distribution over its vocabulary
        that they were drawn from.
    """
    if not coupled:
        wide = widen(vocabulary, logits)
        return sampling.independent_sample(sequences, nodes, wide, processor)
    index = choose(
        lambda scores: sampling.first_max(scores)[0],
        vocabulary,
        sequences,
        nodes,
        logits,
        noise_at=nodes,
        processor=processor,
    )
    if vocabulary is not None:
        index = jnp.take(vocabulary.target_ids, index, mode="clip")
    return index, None


def sample_block(
    vocabulary: Vocabulary | None,
    sequences: Sequences,
    logits: Float[Array, "B K W"],
    *,
    coupled: bool,
    processor: LogitsProcessor | None = None,
) -> tuple[Int[Array, "B K"], Float[Array, "B K V"] | None]:
    """Samples K tokens in a row whose logits are all known beforehand.

    At once, unless a penalty, a ban or a processor looks at the tokens before: then one
    after another, each in the context of those drawn.
    """
    batch, num, _ = logits.shape
    anchor = sequences.anchor[:, None]
    unknown = jnp.zeros((batch, num), jnp.int32)

    def draw(context, node, logits):
        return sample(
            vocabulary,
            sequences,
            sampling.chain_nodes(context, node),
            logits,
            coupled=coupled,
            processor=processor,
        )

    def together():
        context = jnp.concatenate([anchor, unknown[:, 1:]], axis=1)
        return draw(context, None, logits)

    def in_turn():
        def step(context, node):
            row = jax.lax.dynamic_slice_in_dim(logits, node, 1, axis=1)
            token, log_probs = draw(context, node, row)
            context = jax.lax.dynamic_update_slice_in_dim(
                context, token, node + 1, axis=1
            )
            return context, log_probs

        context = jnp.concatenate([anchor, unknown], axis=1)
        nodes = jnp.arange(num, dtype=jnp.int32)
        context, log_probs = jax.lax.scan(step, context, nodes)
        if log_probs is not None:
            log_probs = jnp.moveaxis(log_probs[:, :, 0], 0, 1)
        return context[:, 1:], log_probs

    if processor is not None:
        return in_turn()
    is_needed = sampling.needs_adjustment(sequences.sampling)
    return jax.lax.cond(is_needed, in_turn, together)
