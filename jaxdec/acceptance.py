"""Acceptance rules: which part of a draft is kept, without changing the target's law.

Write p for the target's sampling distribution after a node and q for the distribution
that the drafter drew the next draft token d from, both after sampling parameters.

`match` samples the target itself, ``y ~ p``, after every node, and follows the draft
while it agrees:

    keep d  iff  d = y;    the first y that no child equals ends the step.

What is emitted is always y, so the output is the target's own sample whatever the
draft is: chain or tree, sampled or not. Greedy verification is this rule at temperature
zero. For a point-mass draft it accepts with probability p(d), as rejection sampling
does. With noise shared between drafter and target it is the drafter-invariant scheme of
Daliri et al. (arXiv 2408.07978).

`rejection` (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318) reads a
chain in order and

    keeps d  with probability  min(1, p(d) / q(d));
    at the first d not kept, emits a token of  max(p - q, 0) / sum(max(p - q, 0));
    after the last d, emits a token of p.

The emitted tokens have the target's law, as q(x) min(1, p(x)/q(x)) + P(reject) times
the residual is p(x). That needs three things: q is what the token was really drawn
from, the randomness of test, residual and draft is independent, and whether d is judged
does not depend on d (a draft length chosen by looking at d is biased).

`sibling_rejection` is the same step for several candidates after one node (SpecInfer,
Miao et al., arXiv 2305.09781): a rejected candidate leaves the residual as the new p.

vLLM's words: *accepted* tokens are the kept d; the token that ends a step is
*recovered* (after a rejection) or *bonus* (after full acceptance); *output* tokens are
all of these. Here the ending token is always `next_token`.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxdec import sampling, tree
from jaxdec.types import Acceptance, AcceptFn, Draft, Judgement, Sequences

_LEAST_RESIDUAL_MASS = 1e-8


def _match(sequences: Sequences, draft: Draft, judgement: Judgement) -> Acceptance:
    del sequences
    path, num_accepted = matching_path(
        draft.tokens, draft.parents, draft.length, judgement.tokens
    )
    return Acceptance(
        path=path,
        num_accepted=num_accepted,
        next_token=judgement.tokens[path[num_accepted]],
    )


def _rejection(sequences: Sequences, draft: Draft, judgement: Judgement) -> Acceptance:
    if draft.log_probs is None:
        raise ValueError(
            "rejection needs draft.log_probs, but the drafter proposes a point mass; "
            "use acceptance.match."
        )
    if draft.parents is not None:
        raise ValueError(
            "rejection needs a chain, but the draft has parents; use acceptance.match, "
            "or let the drafter leave parents=None."
        )
    if judgement.log_probs is None:
        raise ValueError(
            "rejection needs judgement.log_probs, but the target's distributions were "
            "not computed; judge with_log_probs=True."
        )
    num_draft = draft.tokens.shape[0]
    num_nodes = num_draft + 1
    path = jnp.arange(num_nodes, dtype=jnp.int32)
    if num_draft == 0:
        return Acceptance(
            path=path,
            num_accepted=jnp.zeros((), jnp.int32),
            next_token=judgement.tokens[0],
        )

    def uniform(position):
        key = sampling.position_key(sequences.key, position, sampling.ACCEPT)
        return jax.random.uniform(key, dtype=jnp.float32)

    position = sequences.length + path
    num_accepted, is_rejected, law = rejection_chain(
        draft.tokens,
        draft.length,
        jnp.exp(judgement.log_probs),
        jnp.exp(draft.log_probs),
        jax.vmap(uniform)(position[:-1]),
    )
    noise = sampling.gumbel(
        sequences.key[None],
        position[num_accepted][None, None],
        law.shape[0],
        sampling.RESIDUAL,
    )[0, 0]
    recovered, _ = sampling.first_max(jnp.log(law) + noise)
    bonus = judgement.tokens[num_accepted]
    return Acceptance(
        path=path,
        num_accepted=num_accepted,
        next_token=jnp.where(is_rejected, recovered, bonus),
    )


match = AcceptFn(name="match", needs_log_probs=False, accept=_match)
"""Keeps what equals the target's own sample; lossless for every draft."""

rejection = AcceptFn(name="rejection", needs_log_probs=True, accept=_rejection)
"""Leviathan's rule; lossless for sampled chains, and accepts the most."""


def matching_path(
    tokens: Int[Array, "K"],
    parents: Int[Array, "K"] | None,
    length: Int[Array, ""],
    samples: Int[Array, "K+1"],
) -> tuple[Int[Array, "K+1"], Int[Array, ""]]:
    """The deepest path of a draft on which every token is the target's sample.

    The deepest, not the first that agrees: two siblings may hold the same token.

    Args:
        tokens: Draft tokens.
        parents: Their parent nodes; None is a chain.
        length: Draft tokens at or past it are never kept.
        samples: The target's sample after each node.

    Returns:
        The path, root first, and how many draft tokens are on it. Entries past the end
        are valid node indices, and the first such path wins among equally deep ones.
    """
    num_draft = tokens.shape[0]
    parent = tree.chain_parents(num_draft) if parents is None else parents
    is_judged = jnp.arange(num_draft, dtype=jnp.int32) < length
    is_match = (tokens == samples[parent]) & is_judged
    if parents is None:
        num_accepted = jnp.sum(jnp.cumprod(is_match, dtype=jnp.int32), dtype=jnp.int32)
        return jnp.arange(num_draft + 1, dtype=jnp.int32), num_accepted
    is_ancestor = tree.ancestors(parents)
    is_good = jnp.concatenate([jnp.ones(1, bool), is_match])
    is_path = jnp.all(is_good[None, :] | ~is_ancestor, axis=-1)
    depth = tree.depth(parents)
    best = jnp.argmax(jnp.where(is_path, depth, -1))
    return tree.path_to(parents, best), depth[best]


def rejection_chain(
    tokens: Int[Array, "K"],
    length: Int[Array, ""],
    target: Float[Array, "K+1 V"],
    draft: Float[Array, "K V"],
    uniforms: Float[Array, "K"],
) -> tuple[Int[Array, ""], Bool[Array, ""], Float[Array, "V"]]:
    """The rejection rule as a function of its random numbers.

    Args:
        tokens: Draft tokens, K at least 1.
        length: Draft tokens at or past it are not judged.
        target: p, probabilities after each node.
        draft: q, probabilities each token was drawn from.
        uniforms: In [0, 1), one for each token's test.

    Returns:
        How many tokens are kept, whether one was rejected, and the law of the token
        that ends the step: the residual after a rejection, else p.
    """
    num_draft = tokens.shape[0]
    index = jnp.arange(num_draft, dtype=jnp.int32)
    # As a product, so that nothing is divided by zero and p = 0 is never accepted.
    is_kept = uniforms * draft[index, tokens] < target[index, tokens]
    is_kept = is_kept & (index < length)
    num_accepted = jnp.sum(jnp.cumprod(is_kept, dtype=jnp.int32), dtype=jnp.int32)
    is_rejected = num_accepted < jnp.minimum(length, num_draft)
    p = target[num_accepted]
    q = draft[jnp.minimum(num_accepted, num_draft - 1)]
    return num_accepted, is_rejected, jnp.where(is_rejected, residual(p, q), p)


def residual(p: Float[Array, "V"], q: Float[Array, "V"]) -> Float[Array, "V"]:
    """The law of the token that replaces a rejected one: norm(max(p - q, 0)).

    If nothing is left of p (a rejection then had probability zero, up to rounding), p.

    Args:
        p: the target's probabilities.
        q: the drafter's.
    """
    rest = jnp.maximum(p - q, 0.0)
    mass = jnp.sum(rest)
    has_mass = mass > _LEAST_RESIDUAL_MASS
    return jnp.where(has_mass, rest / jnp.where(has_mass, mass, 1.0), p)


def sibling_rejection(
    tokens: Int[Array, "C"],
    target: Float[Array, "V"],
    draft: Float[Array, "V"],
    uniforms: Float[Array, "C"],
    *,
    replacement: bool,
) -> tuple[Int[Array, ""], Float[Array, "V"]]:
    """Judges candidates that were sampled from one q after one node, in order.

    Candidate x is kept with probability min(1, P(x) / Q(x)), where P starts as p and Q
    as q. A rejection makes P the residual of P and Q; without replacement, Q loses x.

    Lossless only for *sampled* candidates: the top-C of q are not a sample of q, and
    testing them as if they were is biased (`match` is exact for those).

    Args:
        tokens: The C candidates in the order they were drawn.
        target: p.
        draft: q.
        uniforms: In [0, 1), one per candidate.
        replacement: Whether the candidates were drawn with replacement.

    Returns:
        Index of the kept candidate, C if none; and the law of the token to draw if none
        was kept.
    """
    num_candidates = tokens.shape[0]

    def judge(carry, candidate):
        kept, p, q = carry
        index, token, uniform = candidate
        is_open = kept == num_candidates
        kept = jnp.where(is_open & (uniform * q[token] < p[token]), index, kept)
        is_rejected = kept == num_candidates
        p = jnp.where(is_rejected, residual(p, q), p)
        if not replacement:
            rest = q.at[token].set(0.0)
            mass = jnp.sum(rest)
            q = jnp.where(mass > 0, rest / jnp.where(mass > 0, mass, 1.0), rest)
        return (kept, p, q), None

    index = jnp.arange(num_candidates, dtype=jnp.int32)
    start = (jnp.asarray(num_candidates, jnp.int32), target, draft)
    (kept, p, _), _ = lax.scan(judge, start, (index, tokens, uniforms))
    return kept, p
