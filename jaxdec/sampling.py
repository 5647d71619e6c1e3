"""The one place where a sampling distribution is defined.

The logits after a node become a distribution in a fixed order: bias, repetition
penalty, presence and frequency penalty (`jaxdec.adjustment`), bans (n-grams that would
repeat, stop tokens that come too early), the caller's processor; then temperature,
top-k, top-p and min-p. Temperature zero is the first token with the largest logit
before temperature.

A token is drawn by the Gumbel trick: the largest of ``log p + noise``. The noise is a
pure function of (request key, absolute position, stream), so what a request samples
depends neither on its batch mates nor on how many tokens a step drafts, and a drafter
that shares the noise agrees with the target as often as the distributions allow.

Vocabulary-wide work is what costs time here, so everything is batch-level and only runs
(`lax.cond`) when some row asks for it. There is no sort and no `argmax` over V: the
largest value and its first index are two cheap reductions, and a top-k or top-p filter
is a cut-off found by bisection on the bits of a float. Rows do not feel one another:
an "off" value changes nothing, bit for bit.

References: top-p is Holtzman et al., arXiv 1904.09751; min-p is Nguyen et al.,
arXiv 2407.01082; sharing noise with the drafter is Daliri et al., arXiv 2408.07978.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from jaxdec.adjustment import Nodes, adjust, chain_nodes, draft_nodes, needs_adjustment
from jaxdec.reductions import first_max, has_nan
from jaxdec.sampling_params import make_sampling_params
from jaxdec.types import (
    Judgement,
    LogitsProcessor,
    SamplingParams,
    Sequences,
    Vocabulary,
)

__all__ = [
    "ACCEPT",
    "DRAFT",
    "RESIDUAL",
    "TARGET",
    "Nodes",
    "adjust",
    "chain_nodes",
    "draft_nodes",
    "first_max",
    "gumbel",
    "gumbel_from_bits",
    "independent_sample",
    "judge",
    "log_probs",
    "make_sampling_params",
    "needs_adjustment",
    "perturbed",
    "position_key",
    "token_logprobs",
]

TARGET, DRAFT, ACCEPT, RESIDUAL = range(4)
"""Streams: the target's own samples, uncoupled drafts, accept tests, residual draws."""

_MASS_ROUNDING = 2.0**-20
_INFINITY_BITS = 0x7F800000
_SMALLEST_TEMPERATURE = 1e-30


def position_key(
    key: Key[Array, ""], position: Int[Array, ""], stream: int
) -> Key[Array, ""]:
    """The key for one use (`stream`) of randomness at one absolute position."""
    return jax.random.fold_in(jax.random.fold_in(key, position), stream)


def gumbel(
    key: Key[Array, "B"], position: Int[Array, "B T"], vocab_size: int, stream: int = 0
) -> Float[Array, "B T V"]:
    """Standard Gumbel noise for every token that could stand at `position`.

    The same (key, position, stream) gives the same noise, whatever B and T are.

    Args:
        key: Request keys; not used up.
        position: Absolute position of the token to be drawn.
        vocab_size: V.
        stream: TARGET (the default), DRAFT or RESIDUAL.
    """

    def draw(row_key, row_position):
        noise_key = position_key(row_key, row_position, stream)
        return gumbel_from_bits(jax.random.bits(noise_key, (vocab_size,), jnp.uint32))

    return jax.vmap(jax.vmap(draw, in_axes=(None, 0)))(key, position)


def gumbel_from_bits(bits: UInt32[Array, "*axes"]) -> Float[Array, "*axes"]:
    """Standard Gumbel noise from 32 random bits each.

    `jax.random.gumbel` starts from a uniform of 23 bits, so that tokens less likely
    than 1e-7 lose their share (tens of thousands of them can hold a percent together).
    Counting all 32 bits from the end where they matter costs the same and holds to
    1e-10.
    """
    uniform = (bits.astype(jnp.float32) + 0.5) * 2.0**-32
    exponential = -jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24))
    return -jnp.log(exponential)


def judge(
    sequences: Sequences,
    nodes: Nodes,
    logits: Float[Array, "B T V"],
    *,
    processor: LogitsProcessor | None = None,
    with_log_probs: bool = False,
) -> Judgement:
    """What the target says after every node.

    The token after a node at depth d stands at position ``sequences.length + d``, and
    is drawn with that position's noise. If all rows are greedy and nothing else is
    asked for, this costs two reductions over V.

    Args:
        sequences: The committed tokens, keys and sampling parameters.
        nodes: The T nodes.
        logits: Raw logits after each node.
        processor: The caller's own ``(tokens, length, logits) -> logits``.
        with_log_probs: Whether to return the distributions too.

    Returns:
        Tokens, always in [0, V); where they can be trusted; and the distributions, or
        None. A distribution that is not finite is replaced by a point mass.
    """
    sampling = sequences.sampling

    # As rows: XLA would copy [B, 1, V] for a branch, in which it is laid out otherwise.
    rows = logits.reshape(-1, logits.shape[-1])

    def plain():
        found = first_max(rows)
        tokens, peak = (x.reshape(logits.shape[:-1]) for x in found)
        return tokens, jnp.isfinite(peak), None

    def full():
        adjusted = adjust(sequences, nodes, logits, processor)
        greedy, peak = first_max(adjusted)
        raw = jnp.where(has_nan(logits), jnp.nan, jnp.max(logits, axis=-1))
        is_finite = jnp.isfinite(peak) & jnp.isfinite(raw)

        def draw():
            unnormalised = _filtered(sampling, adjusted)
            noise = _node_noise(sequences, nodes, adjusted.shape[-1], TARGET)
            drawn, _ = first_max(unnormalised + noise)
            tokens = jnp.where(_is_sampled(sampling)[:, None], drawn, greedy)
            if not with_log_probs:
                return tokens, None
            return tokens, _normalised(sampling, unnormalised, greedy, is_finite)

        def take():
            if not with_log_probs:
                return greedy, None
            return greedy, _point_mass(greedy, adjusted.shape[-1])

        tokens, probs = lax.cond(jnp.any(_is_sampled(sampling)), draw, take)
        return tokens, is_finite, probs

    if processor is not None or with_log_probs:
        tokens, is_finite, probs = full()
    else:
        is_plain = ~(jnp.any(_is_sampled(sampling)) | needs_adjustment(sampling))
        tokens, is_finite, probs = lax.cond(is_plain, plain, full)
    return Judgement(tokens=tokens, is_finite=is_finite, log_probs=probs)


def independent_sample(
    sequences: Sequences,
    nodes: Nodes,
    logits: Float[Array, "B T V"],
    processor: LogitsProcessor | None = None,
) -> tuple[Int[Array, "B T"], Float[Array, "B T V"]]:
    """A drafter's own sample after every node, for the rule `rejection`.

    With noise of its own and all filters; greedy rows take the largest logit. For the
    rule `match` see `jaxdec.drafting`.

    Args:
        sequences: The committed tokens, keys and sampling parameters.
        nodes: The T nodes to draft from.
        logits: The drafter's logits after each node.
        processor: The caller's own processor, as in `judge`.

    Returns:
        Tokens; and the very distribution they were drawn from.
    """
    sampling = sequences.sampling
    adjusted = adjust(sequences, nodes, logits, processor)
    greedy, peak = first_max(adjusted)
    vocab_size = adjusted.shape[-1]

    def draw():
        unnormalised = _filtered(sampling, adjusted)
        probs = _normalised(sampling, unnormalised, greedy, jnp.isfinite(peak))
        noise = _node_noise(sequences, nodes, vocab_size, DRAFT)
        return first_max(probs + noise)[0], probs

    return lax.cond(
        jnp.any(_is_sampled(sampling)),
        draw,
        lambda: (greedy, _point_mass(greedy, vocab_size)),
    )


def perturbed(
    sequences: Sequences,
    nodes: Nodes,
    adjusted: Float[Array, "B T W"],
    vocabulary: Vocabulary | None = None,
) -> Float[Array, "B T W"]:
    """What a drafter that shares the target's noise takes the largest of.

    Args:
        sequences: The committed tokens, keys and sampling parameters.
        nodes: The T nodes; or one, whose position's noise serves them all.
        adjusted: The drafter's logits, adjusted.
        vocabulary: Which tokens they are of; None is all.

    Returns:
        Logits after temperature plus noise; a greedy row's as they are.
    """
    wide = adjusted if vocabulary is None else vocabulary.draft_index
    noise = _node_noise(sequences, nodes, wide.shape[-1], TARGET)
    if vocabulary is not None:
        noise = jnp.take(noise, vocabulary.target_ids, axis=-1, mode="clip")
    drawn = noise - _distance(sequences.sampling, adjusted)
    return jnp.where(_is_sampled(sequences.sampling)[:, None, None], drawn, adjusted)


def log_probs(
    sampling: SamplingParams, adjusted: Float[Array, "B T V"]
) -> Float[Array, "B T V"]:
    """The sampling distribution of adjusted logits: temperature, filters, normalised.

    Args:
        sampling: Temperature, top-k, top-p and min-p act here, in this order.
        adjusted: What `adjust` returns.

    Returns:
        Log-probabilities, -inf for tokens that cannot be drawn; never NaN. A greedy row
        is a point mass, and so is a row that has nothing to draw from.
    """
    greedy, peak = first_max(adjusted)
    unnormalised = _filtered(sampling, adjusted)
    return _normalised(sampling, unnormalised, greedy, jnp.isfinite(peak))


def token_logprobs(
    logits: Float[Array, "B T V"], tokens: Int[Array, "B T"], num_top: int
) -> tuple[Float[Array, "B T"], Float[Array, "B T n"], Int[Array, "B T n"]]:
    """Log-probabilities under the raw logits, untouched by sampling parameters.

    Args:
        logits: Raw logits.
        tokens: The tokens to report, in [0, V).
        num_top: How many of the likeliest tokens to report too, at most V.

    Returns:
        Log-probability of `tokens`; of the likeliest tokens, best first (of equals the
        smaller id first); and the ids of those.

    Raises:
        ValueError: If `num_top` is negative or larger than V.
    """
    vocab_size = logits.shape[-1]
    if not 0 <= num_top <= vocab_size:
        raise ValueError(
            f"num_top must be between 0 and the vocabulary size {vocab_size}, got "
            f"{num_top}; ask for fewer tokens."
        )
    logits = logits.astype(jnp.float32)
    total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0] - total
    index = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)

    def take_best(rest, _):
        best, value = first_max(rest)
        return jnp.where(index == best[..., None], -jnp.inf, rest), (value, best)

    _, (values, ids) = lax.scan(take_best, logits, length=num_top)
    return (
        chosen,
        jnp.moveaxis(values, 0, -1) - total[..., None],
        jnp.moveaxis(ids, 0, -1),
    )


def _is_sampled(sampling: SamplingParams) -> Bool[Array, "B"]:
    """Rows that draw; the others are greedy."""
    return sampling.temperature > 0


def _distance(
    sampling: SamplingParams, adjusted: Float[Array, "B T V"]
) -> Float[Array, "B T V"]:
    """How far below the likeliest token each token is, in nats, after temperature.

    At least 0, so that the bits of the float are ordered as its values are.
    """
    peak = jnp.max(adjusted, axis=-1, keepdims=True)
    # Without the guard a row of nothing but -inf would be NaN.
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    temperature = jnp.maximum(sampling.temperature, _SMALLEST_TEMPERATURE)
    temperature = jnp.where(_is_sampled(sampling), temperature, 1.0)
    return (peak - adjusted) / temperature[:, None, None]


def _filtered(
    sampling: SamplingParams, adjusted: Float[Array, "B T V"]
) -> Float[Array, "B T V"]:
    """Unnormalised log-probabilities, -inf where a filter removed the token."""
    distance = _distance(sampling, adjusted)
    vocab_size = distance.shape[-1]
    is_sampled = _is_sampled(sampling)
    has_top_k = is_sampled & (sampling.top_k > 0) & (sampling.top_k < vocab_size)
    has_top_p = is_sampled & (sampling.top_p < 1)
    no_limit = jnp.full(distance.shape[:2], jnp.inf, jnp.float32)

    def top_k_limit():
        limit = _cutoff(
            distance,
            jnp.ones_like(distance),
            jnp.broadcast_to(
                sampling.top_k.astype(jnp.float32)[:, None], no_limit.shape
            ),
        )
        return jnp.where(has_top_k[:, None], limit, no_limit)

    limit = lax.cond(jnp.any(has_top_k), top_k_limit, lambda: no_limit)

    def top_p_limit():
        weight = jnp.where(distance <= limit[..., None], jnp.exp(-distance), 0.0)
        # Two tokens of .5 and .3 hold a mass of .8 whichever way their sum rounds.
        enough = sampling.top_p[:, None] * (1 - _MASS_ROUNDING)
        mass = enough * jnp.sum(weight, axis=-1)
        cut = _cutoff(distance, weight, mass)
        return jnp.where(has_top_p[:, None], jnp.minimum(limit, cut), limit)

    limit = lax.cond(jnp.any(has_top_p), top_p_limit, lambda: limit)
    limit = jnp.minimum(limit, -jnp.log(sampling.min_p)[:, None])
    return jnp.where(distance <= limit[..., None], -distance, -jnp.inf)


def _cutoff(
    distance: Float[Array, "B T V"],
    weight: Float[Array, "B T V"],
    target: Float[Array, "B T"],
) -> Float[Array, "B T"]:
    """The smallest distance within which the weights sum to `target`, or infinity.

    Bisection on the bits: exact after 31 halvings, so equals of the token at the
    cut-off are all inside.
    """

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        limit = lax.bitcast_convert_type(middle, jnp.float32)
        inside = jnp.where(distance <= limit[..., None], weight, 0.0)
        is_enough = jnp.sum(inside, axis=-1) >= target
        return (
            jnp.where(is_enough, low, middle + 1),
            jnp.where(is_enough, middle, high),
        )

    low = jnp.zeros(target.shape, jnp.int32)
    high = jnp.full(target.shape, _INFINITY_BITS, jnp.int32)
    _, high = lax.fori_loop(0, 31, halve, (low, high))
    return lax.bitcast_convert_type(high, jnp.float32)


def _normalised(
    sampling: SamplingParams,
    unnormalised: Float[Array, "B T V"],
    greedy: Int[Array, "B T"],
    is_finite: Bool[Array, "B T"],
) -> Float[Array, "B T V"]:
    """Log-probabilities; a point mass where a row is greedy or not finite."""
    # The peak of `unnormalised` is 0, so the sum neither overflows nor vanishes.
    total = jnp.log(jnp.sum(jnp.exp(unnormalised), axis=-1, keepdims=True))
    is_drawn = _is_sampled(sampling)[:, None] & is_finite
    point_mass = _point_mass(greedy, unnormalised.shape[-1])
    return jnp.where(is_drawn[..., None], unnormalised - total, point_mass)


def _point_mass(tokens: Int[Array, "B T"], vocab_size: int) -> Float[Array, "B T V"]:
    """Log-probabilities of certainty."""
    index = lax.broadcasted_iota(jnp.int32, (*tokens.shape, vocab_size), 2)
    return jnp.where(index == tokens[..., None], 0.0, -jnp.inf)


def _node_noise(
    sequences: Sequences, nodes: Nodes, vocab_size: int, stream: int
) -> Float[Array, "B T V"]:
    """The noise of the position after each node.

    Nodes of equal depth share it, so a tree draws once per depth: noise costs more
    than everything else that happens to a node.
    """
    depth = nodes.depth
    if nodes.is_chain:
        position = sequences.length[:, None] + depth
        return gumbel(sequences.key, position, vocab_size, stream)

    def draw(level, noise):
        position = sequences.length[:, None] + level
        row = gumbel(sequences.key, position, vocab_size, stream)
        return lax.dynamic_update_slice_in_dim(noise, row, level, axis=1)

    num_levels = jnp.max(depth) + 1
    empty = jnp.zeros((*depth.shape, vocab_size), jnp.float32)
    by_depth = lax.fori_loop(0, num_levels, draw, empty)
    return jnp.take_along_axis(by_depth, depth[..., None], axis=1)
