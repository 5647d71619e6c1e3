"""What happens to logits before temperature: bias, penalties, bans, the caller's rule.

Speculation must not change what these mean, so every node has a context of its own: the
committed tokens and the draft tokens on its path. Nothing is counted up from step to
step; counts are taken from the committed tokens when a row needs them, so a rejected
draft cannot leave a trace.

Order: bias, repetition penalty (prompt and output), presence and frequency penalty
(output only), bans, the caller's processor. The repetition penalty is Keskar et al.,
arXiv 1909.05858; presence and frequency penalty are those of the OpenAI API.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxdec import tree
from jaxdec.types import Draft, LogitsProcessor, SamplingParams, Sequences, pytree


@pytree
class Nodes:
    """The contexts of T scored nodes: paths through the anchor and N - 1 draft tokens.

    The target scores all nodes of a draft, T = N. A drafter that drafts one token at a
    time scores one, T = 1.
    """

    tokens: Int[Array, "B N"]
    """The anchor, then draft tokens."""
    ancestors: Bool[Array, "B T N"]
    """Which tokens lie on the path to each scored node, itself included."""
    depth: Int[Array, "B T"]
    """Draft tokens on the path."""
    is_chain: bool = struct.field(pytree_node=False, default=False)
    """Whether no two scored nodes have the same depth."""

    def first(self, num: int) -> "Nodes":
        """The first `num` nodes alone; parents precede children, so they are whole."""
        return Nodes(
            tokens=self.tokens[:, :num],
            ancestors=self.ancestors[:, :num, :num],
            depth=self.depth[:, :num],
            is_chain=self.is_chain,
        )

    def padded(self, num: int) -> "Nodes":
        """`num` nodes at least: those added are of no path, and mean nothing."""
        have = self.depth.shape[1]
        more = max(0, num - have)
        own = jnp.arange(have + more) >= have
        ancestors = jnp.pad(self.ancestors, ((0, 0), (0, more), (0, more)))
        # Along a chain they just go on; in a tree they see nobody but themselves.
        sees = jnp.eye(have + more, dtype=bool)
        steps = jnp.zeros((more,), jnp.int32)
        if self.is_chain:
            sees = jnp.tril(jnp.ones((have + more, have + more), bool))
            steps = jnp.arange(1, more + 1, dtype=jnp.int32)
        last = self.depth[:, -1:]
        return Nodes(
            tokens=jnp.pad(self.tokens, ((0, 0), (0, more))),
            ancestors=ancestors | (sees & own[:, None])[None],
            depth=jnp.concatenate([self.depth, last + steps[None]], axis=1),
            is_chain=self.is_chain,
        )


def chain_nodes(
    tokens: Int[Array, "B N"], node: Int[Array, ""] | int | None = None
) -> Nodes:
    """Nodes of a chain: all of them, or (while drafting) the single node `node`."""
    batch_size, num_tokens = tokens.shape
    if node is None:
        depth = jnp.arange(num_tokens, dtype=jnp.int32)
    else:
        depth = jnp.asarray(node, jnp.int32)[None]
    ancestors = jnp.arange(num_tokens, dtype=jnp.int32)[None, :] <= depth[:, None]
    return Nodes(
        tokens=tokens,
        ancestors=jnp.broadcast_to(ancestors, (batch_size, *ancestors.shape)),
        depth=jnp.broadcast_to(depth, (batch_size, *depth.shape)),
        is_chain=True,
    )


def draft_nodes(anchor: Int[Array, "B"], draft: Draft) -> Nodes:
    """The T = K + 1 nodes of a draft, anchor first."""
    tokens = jnp.concatenate([anchor[:, None], draft.tokens], axis=1)
    if draft.parents is None:
        return chain_nodes(tokens)
    return Nodes(
        tokens=tokens,
        ancestors=jax.vmap(tree.ancestors)(draft.parents),
        depth=jax.vmap(tree.depth)(draft.parents),
    )


def needs_adjustment(sampling: SamplingParams) -> Bool[Array, ""]:
    """Whether `adjust` would change any logits, the caller's processor apart."""
    return (
        jnp.any(sampling.num_bias > 0)
        | _needs_penalties(sampling)
        | jnp.any(sampling.no_repeat_ngram > 0)
        | jnp.any(sampling.min_new_tokens > 0)
    )


def adjust(
    sequences: Sequences,
    nodes: Nodes,
    logits: Float[Array, "B T V"],
    processor: LogitsProcessor | None = None,
) -> Float[Array, "B T V"]:
    """The logits after every node, adjusted as the request asks; before temperature.

    Args:
        sequences: The committed tokens and sampling parameters; entries at or past
            `length` are not read.
        nodes: The context of each row of logits.
        logits: Raw logits.
        processor: Applied last; sees a buffer with the node's path written in after
            the committed tokens.

    Raises:
        ValueError: If the processor returns anything but V logits.
    """
    logits = logits.astype(jnp.float32)
    sampling = sequences.sampling

    def adjusted():
        x = logits + _bias(sampling, logits.shape[-1])[:, None, :]
        x = lax.cond(
            _needs_penalties(sampling),
            lambda: _penalised(sequences, nodes, x),
            lambda: x,
        )
        x = lax.cond(
            jnp.any(sampling.no_repeat_ngram > 0),
            lambda: jnp.where(
                _repeats_ngram(sequences, nodes, x.shape[-1]), -jnp.inf, x
            ),
            lambda: x,
        )
        return jnp.where(_stops_early(sequences, nodes, x.shape[-1]), -jnp.inf, x)

    logits = lax.cond(needs_adjustment(sampling), adjusted, lambda: logits)
    if processor is None:
        return logits
    return _processed(processor, sequences, nodes, logits)


def _needs_penalties(sampling: SamplingParams) -> Bool[Array, ""]:
    return jnp.any(
        (sampling.repetition_penalty != 1)
        | (sampling.presence_penalty != 0)
        | (sampling.frequency_penalty != 0)
    )


def _count(
    tokens: Int[Array, "N"], weight: Float[Array, "N"], vocab_size: int
) -> Float[Array, "V"]:
    """Sum of the weights of each token id; ids outside the vocabulary do not count."""
    # A negative index would wrap around, so it is sent past the end, where it drops.
    is_valid = (tokens >= 0) & (weight != 0)
    index = jnp.where(is_valid, tokens, vocab_size)
    return jnp.zeros(vocab_size, jnp.float32).at[index].add(weight, mode="drop")


def _bias(sampling: SamplingParams, vocab_size: int) -> Float[Array, "B V"]:
    num_slots = sampling.bias_tokens.shape[1]
    slot = jnp.arange(num_slots, dtype=jnp.int32)[None, :]
    value = jnp.where(slot < sampling.num_bias[:, None], sampling.bias_values, 0.0)
    return jax.vmap(_count, in_axes=(0, 0, None))(
        sampling.bias_tokens, value, vocab_size
    )


def _penalised(
    sequences: Sequences, nodes: Nodes, logits: Float[Array, "B T V"]
) -> Float[Array, "B T V"]:
    sampling = sequences.sampling
    vocab_size = logits.shape[-1]
    count = jax.vmap(_count, in_axes=(0, 0, None))
    count_paths = jax.vmap(
        jax.vmap(_count, in_axes=(None, 0, None)), in_axes=(0, 0, None)
    )

    position = jnp.arange(sequences.tokens.shape[1], dtype=jnp.int32)[None, :]
    is_prompt = position < sequences.prompt_length[:, None]
    is_live = position < sequences.length[:, None]
    is_draft = nodes.ancestors.at[:, :, 0].set(False)

    prompt = count(
        sequences.tokens, (is_prompt & is_live).astype(jnp.float32), vocab_size
    )
    output = count(
        sequences.tokens, (~is_prompt & is_live).astype(jnp.float32), vocab_size
    )
    generated = output[:, None, :] + count_paths(
        nodes.tokens, is_draft.astype(jnp.float32), vocab_size
    )
    is_generated = generated > 0
    is_seen = is_generated | (prompt > 0)[:, None, :]

    def per_row(value: Float[Array, "B"]) -> Float[Array, "B 1 1"]:
        return value[:, None, None]

    repetition = per_row(sampling.repetition_penalty)
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(is_seen, repeated, logits)
    presence = per_row(sampling.presence_penalty) * is_generated.astype(jnp.float32)
    return logits - presence - per_row(sampling.frequency_penalty) * generated


def _stops_early(
    sequences: Sequences, nodes: Nodes, vocab_size: int
) -> Bool[Array, "B T V"]:
    """Stop tokens after nodes with fewer than `min_new_tokens` generated tokens."""
    slot = jnp.arange(sequences.stop_tokens.shape[1], dtype=jnp.int32)[None, :]
    is_live = slot < sequences.num_stop_tokens[:, None]
    is_stop = jax.vmap(_count, in_axes=(0, 0, None))(
        sequences.stop_tokens, is_live.astype(jnp.float32), vocab_size
    )
    num_generated = sequences.length - sequences.prompt_length
    is_early = (
        num_generated[:, None] + nodes.depth
        < sequences.sampling.min_new_tokens[:, None]
    )
    return is_early[:, :, None] & (is_stop > 0)[:, None, :]


def _written(
    sequences: Sequences, nodes: Nodes
) -> tuple[Int[Array, "B T L"], Int[Array, "B T"]]:
    """The token buffer as it would be if each node's path were committed."""
    capacity = sequences.tokens.shape[1]

    def write(row, length, tokens, on_path):
        # Parents precede children, so the running count is the depth.
        depth = jnp.cumsum(on_path, dtype=jnp.int32) - 1
        is_draft = on_path & (depth > 0)
        slot = jnp.where(is_draft, length - 1 + depth, capacity)
        return row.at[slot].set(tokens, mode="drop")

    per_node = jax.vmap(write, in_axes=(None, None, None, 0))
    buffers = jax.vmap(per_node)(
        sequences.tokens, sequences.length, nodes.tokens, nodes.ancestors
    )
    return buffers, sequences.length[:, None] + nodes.depth


def _repeats_ngram(
    sequences: Sequences, nodes: Nodes, vocab_size: int
) -> Bool[Array, "B T V"]:
    """Tokens that would complete an n-gram that is already there."""
    buffers, length = _written(sequences, nodes)
    size = sequences.sampling.no_repeat_ngram[:, None, None]
    capacity = buffers.shape[-1]
    end = jnp.arange(capacity, dtype=jnp.int32)[None, None, :]
    last = length[:, :, None] - 1

    def compare(back, is_match):
        # The token `back + 1` before each end, and the one `back` before the last.
        before = jnp.take(buffers, jnp.clip(end[0, 0] - 1 - back, 0), axis=-1)
        recent = jnp.take_along_axis(buffers, jnp.clip(last - back, 0), axis=-1)
        return is_match & ((back >= size - 1) | (before == recent))

    is_match = (size > 0) & (end >= size - 1) & (end <= last)
    # An n-gram longer than the buffer cannot stand in it twice.
    longest = jnp.minimum(jnp.max(size), jnp.int32(capacity))
    is_match = lax.fori_loop(0, longest - 1, compare, is_match)
    count = jax.vmap(jax.vmap(_count, in_axes=(0, 0, None)), in_axes=(0, 0, None))
    return count(buffers, is_match.astype(jnp.float32), vocab_size) > 0


def _processed(
    processor: LogitsProcessor,
    sequences: Sequences,
    nodes: Nodes,
    logits: Float[Array, "B T V"],
) -> Float[Array, "B T V"]:
    buffers, length = _written(sequences, nodes)
    processed = jax.vmap(jax.vmap(processor))(buffers, length, logits)
    if jnp.shape(processed) != logits.shape:
        raise ValueError(
            f"the logits processor must return {logits.shape[-1:]} logits for each "
            f"sequence, got shape {jnp.shape(processed)[2:]}; return "
            "logits of the shape that it was given."
        )
    return processed.astype(jnp.float32)
