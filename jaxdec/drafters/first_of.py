"""Several drafters in order of preference: each row takes the first that has a draft.

Prompt lookup costs nothing and is right in long runs where text repeats itself, and has
nothing to say elsewhere; a trained drafter always has. Per row and step, on device, the
first drafter with a draft proposes. All of them learn what is committed, so that each
can take over at any step. A later drafter is asked only when some row needs it, if its
`propose` keeps its state (`Drafter.keeps_state`).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxdec import tree
from jaxdec.types import (
    Commit,
    Draft,
    Drafter,
    DrafterParams,
    FinishReason,
    Sequences,
)


def first_of(*drafters: Drafter) -> Drafter:
    """The drafter that proposes what the first of `drafters` with a draft proposes.

    Its params are ``DrafterParams`` whose `own` and `shared` are tuples, one entry per
    drafter. `Draft.source` numbers the drafters as they are given. Drafts are judged by
    the rule `match` only, which forgives whatever decides between drafters.

    Raises:
        ValueError: fewer than two drafters.
    """
    if len(drafters) < 2:
        raise ValueError(
            f"first_of takes two or more drafters, got {len(drafters)}; use a single "
            "drafter as it is"
        )
    length = max(d.max_length for d in drafters)
    depth = max(_depth(d) for d in drafters)
    is_tree = any(d.max_depth is not None for d in drafters)
    num_taps = sum(len(d.taps) for d in drafters)

    def params_of(params: DrafterParams, i: int):
        return DrafterParams(own=params.own[i], shared=params.shared[i])

    def init(batch_size, capacity):
        return tuple(d.init(batch_size, capacity) for d in drafters)

    def extend(params, state, commit: Commit):
        width = commit.features.shape[-1] // max(num_taps, 1)
        states, start = [], 0
        for i, drafter in enumerate(drafters):
            end = start + len(drafter.taps) * width
            part = commit.replace(features=commit.features[..., start:end])
            states.append(drafter.extend(params_of(params, i), state[i], part))
            start = end
        return tuple(states)

    def propose(params, state, sequences: Sequences):
        batch = sequences.length.shape[0]
        chosen = _empty(batch, length, is_tree)
        states: list = []
        has_confidence: list[bool] = []
        for i, drafter in enumerate(drafters):
            # A finished row needs nobody; rows that have a draft must not count where
            # a later drafter's confidence decides how many tokens are judged.
            needs = (chosen.length == 0) & (sequences.finish == FinishReason.NONE)
            most = jnp.where(needs, sequences.max_draft_length, 0)
            asking = sequences.replace(max_draft_length=most) if i else sequences

            def ask(i=i, drafter=drafter, asking=asking):
                own, draft = drafter.propose(params_of(params, i), state[i], asking)
                has_confidence.append(draft.confidence is not None)
                return own, _padded(draft, length, is_tree, i)

            if drafter.keeps_state and i:
                draft = jax.lax.cond(
                    jnp.any(needs),
                    lambda ask=ask: ask()[1],
                    lambda: _empty(batch, length, is_tree),
                )
                states.append(state[i])
            else:
                own, draft = ask()
                states.append(own)
            chosen = _choose(needs & (draft.length > 0), draft, chosen)
        if not any(has_confidence):
            chosen = chosen.replace(confidence=None)
        return tuple(states), chosen

    return Drafter(
        name="first_of",
        max_length=length,
        taps=tuple(tap for d in drafters for tap in d.taps),
        init=init,
        extend=extend,
        propose=propose,
        max_depth=depth if is_tree else None,
        keeps_state=all(d.keeps_state for d in drafters),
        sources=tuple(d.name for d in drafters),
    )


def _depth(drafter: Drafter) -> int:
    return drafter.max_length if drafter.max_depth is None else drafter.max_depth


def _empty(batch: int, length: int, is_tree: bool) -> Draft:
    """No draft, in the shape that all drafts are brought to."""
    return Draft(
        tokens=jnp.zeros((batch, length), jnp.int32),
        parents=_chain(batch, length) if is_tree else None,
        length=jnp.zeros((batch,), jnp.int32),
        # Sure, so that a limit leaves alone what has no confidence of its own.
        confidence=jnp.ones((batch, length), jnp.float32),
        source=jnp.zeros((batch,), jnp.int32),
    )


def _chain(batch: int, length: int) -> Int[Array, "B K"]:
    return jnp.broadcast_to(tree.chain_parents(length)[None], (batch, length))


def _padded(draft: Draft, length: int, is_tree: bool, source: int) -> Draft:
    batch, num = draft.tokens.shape
    if draft.log_probs is not None:
        raise ValueError(
            "first_of mixes drafters, whose drafts can only be judged by the rule "
            "'match'; build its drafters for that rule"
        )
    empty = _empty(batch, length, is_tree)

    def put(whole, part):
        return part if num == length else whole.at[:, :num].set(part)

    parents = empty.parents
    if draft.parents is not None:
        parents = put(parents, draft.parents)
    confidence = empty.confidence
    if draft.confidence is not None:
        confidence = put(confidence, draft.confidence)
    return Draft(
        tokens=put(empty.tokens, draft.tokens),
        parents=parents,
        length=draft.length,
        confidence=confidence,
        source=jnp.full((batch,), source, jnp.int32),
    )


def _choose(is_new, new: Draft, old: Draft) -> Draft:
    """Rows of `new` where it is wanted, else those of `old`."""

    def pick(x, y):
        return jnp.where(is_new.reshape(-1, *(1,) * (x.ndim - 1)), x, y)

    return jax.tree.map(pick, new, old)
