"""How many draft tokens are worth judging, from the drafter's confidence.

A confidence is the estimated probability that a token is accepted, given that the one
before it was. The running product is the *survival*: the probability that the token is
reached and accepted, so the expected gain of judging it.

A `LengthFn` maps ``(confidence[B, K], draft_length[B], is_active[B])`` to lengths. It
sees the batch at once, since rows compete for the target's time; inactive rows get
length 0 and cost nothing. `limited` applies one to any drafter of chains.

**Non-anticipation.** With the rule `rejection`, whether token k is judged must not
depend on token k itself. The confidence of token k + 1 does depend on it, so a rule may
not look past k to decide about k. All rules here read confidences in order of survival
and stop; none searches. (`match` is lossless for any length.)

`throughput` and `best_budget` are DSpark's hardware-aware prefix scheduler (DeepSpec,
``deepseek-ai/DeepSpec``), in its synchronous and its asynchronous form.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxdec.types import Drafter, FinishReason, Params, Sequences

LengthFn = Callable[
    [Float[Array, "B K"], Int[Array, "B"], Bool[Array, "B"]], Int[Array, "B"]
]
"""``(confidence, draft_length, is_active) -> length``, at most `draft_length`."""


def survival(confidence: Float[Array, "B K"]) -> Float[Array, "B K"]:
    """Probability that each token and all before it are accepted."""
    return jnp.cumprod(confidence, axis=-1)


def threshold(minimum: float, on: str = "survival") -> LengthFn:
    """Judges tokens up to the first whose value is below `minimum`.

    Args:
        minimum: A probability; 0 judges all.
        on: What is compared: "survival", or "slot" for the bare confidence of each
            token (the rule in DeepSpec's own files).

    Raises:
        ValueError: If `minimum` is not a probability, or `on` is something else.
    """
    if not 0 <= minimum <= 1:
        raise ValueError(
            f"threshold takes a probability between 0 and 1, got {minimum!r}; 0 judges "
            "every draft token."
        )
    if on not in ("survival", "slot"):
        raise ValueError(
            f"threshold compares 'survival' or 'slot', got {on!r}; use 'survival' "
            "unless you reproduce DeepSpec's settings."
        )

    def length_fn(
        confidence: Float[Array, "B K"],
        draft_length: Int[Array, "B"],
        is_active: Bool[Array, "B"],
    ) -> Int[Array, "B"]:
        value = survival(confidence) if on == "survival" else confidence
        is_long_enough = jnp.cumprod(value >= minimum, axis=-1, dtype=jnp.int32)
        length = jnp.minimum(jnp.sum(is_long_enough, -1, dtype=jnp.int32), draft_length)
        return jnp.where(is_active, length, 0)

    return length_fn


def throughput(steps_per_second: Float[Array, "N"]) -> LengthFn:
    """DSpark's greedy prefix scheduler: judge while it raises tokens per second.

    With R active rows, lengths l and survival a, a step emits
    ``R + sum of a over judged tokens`` tokens, in expectation, and the target reads
    ``R + sum(l)`` tokens. Tokens are admitted in order of survival until the product of
    the former and `steps_per_second` of the latter first fails to rise. It is the best
    product only if it has a single peak on the way; looking further would be biased.

    Args:
        steps_per_second: Entry n is the measured rate of target forwards over n tokens
            in all; entry 0 is not used. Must reach ``B * (K + 1)``.
    """

    def length_fn(
        confidence: Float[Array, "B K"],
        draft_length: Int[Array, "B"],
        is_active: Bool[Array, "B"],
    ) -> Int[Array, "B"]:
        gain, theta = _visit(confidence, draft_length, is_active, steps_per_second)
        is_better = (theta[1:] > theta[:-1]) & (gain.sorted > 0)
        num_admitted = jnp.sum(jnp.cumprod(is_better, dtype=jnp.int32))
        return gain.lengths(num_admitted)

    return length_fn


def best_budget(
    confidence: Float[Array, "B K"],
    draft_length: Int[Array, "B"],
    is_active: Bool[Array, "B"],
    steps_per_second: Float[Array, "N"],
) -> Int[Array, ""]:
    """How many draft tokens to judge in all, by full search over *stale* confidences.

    The search looks ahead, so it must not see the drafts it decides about: give it the
    confidences of an earlier step, and its result to `within_budget`.

    Args:
        confidence: of every draft token, a probability.
        draft_length: how many were drafted.
        is_active: rows that still run.
        steps_per_second: as for `throughput`.
    """
    gain, theta = _visit(confidence, draft_length, is_active, steps_per_second)
    is_live = jnp.concatenate([jnp.ones(1, bool), gain.sorted > 0])
    return jnp.argmax(jnp.where(is_live, theta, -jnp.inf)).astype(jnp.int32)


def within_budget(budget: Int[Array, ""] | int) -> LengthFn:
    """Judges the `budget` draft tokens of the batch that are likeliest to survive."""

    def length_fn(
        confidence: Float[Array, "B K"],
        draft_length: Int[Array, "B"],
        is_active: Bool[Array, "B"],
    ) -> Int[Array, "B"]:
        return _Gain(confidence, draft_length, is_active).lengths(budget)

    return length_fn


def limited(drafter: Drafter, length_fn: LengthFn) -> Drafter:
    """The same drafter, with draft lengths chosen by `length_fn`.

    Raises:
        ValueError: At trace time, if a draft has no confidence or is a tree.
    """

    def propose(params: Params, state, sequences: Sequences):
        state, draft = drafter.propose(params, state, sequences)
        if draft.confidence is None:
            raise ValueError(
                f"limited needs draft.confidence, but drafter {drafter.name!r} has "
                "none; use it unlimited, or a drafter with a confidence head."
            )
        if draft.parents is not None:
            raise ValueError(
                f"limited needs a chain, but drafter {drafter.name!r} proposes a tree; "
                "prune the tree instead (tree.keep_best)."
            )
        length = jnp.minimum(draft.length, sequences.max_draft_length)
        is_active = sequences.finish == FinishReason.NONE.value
        length = length_fn(draft.confidence, length, is_active)
        return state, draft.replace(length=jnp.minimum(draft.length, length))

    return drafter._replace(propose=propose)


def when_wanted(drafter: Drafter) -> Drafter:
    """The same drafter, but where no running row may draft it does not propose.

    For servers, which may turn drafting off for a step. What the drafter learns from
    commits (`extend`) goes on, so that it can be turned on again at any time.
    """

    def propose(params: Params, state, sequences: Sequences):
        is_running = sequences.finish == FinishReason.NONE.value
        is_wanted = jnp.any(is_running & (sequences.max_draft_length > 0))
        shapes = jax.eval_shape(drafter.propose, params, state, sequences)[1]
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        if drafter.keeps_state:
            draft = jax.lax.cond(
                is_wanted,
                lambda: drafter.propose(params, state, sequences)[1],
                lambda: nothing,
            )
            return state, draft

        # What a branch returns is copied, what a loop carries is not: so it is a loop
        # of one trip or none, and a cache in the state stays in place.
        def once(carry):
            return *drafter.propose(params, carry[0], sequences), jnp.bool_(False)

        start = (state, nothing, is_wanted)
        return jax.lax.while_loop(lambda carry: carry[2], once, start)[:2]

    return drafter._replace(propose=propose)


class _Gain:
    """The draft tokens of a batch in the order in which they are worth judging.

    By survival; of equals the earlier position first, then the earlier row. Survival
    falls along a row, so what comes before any point is a prefix of every row.
    """

    def __init__(self, confidence, draft_length, is_active):
        self.shape = confidence.shape
        position = jnp.arange(self.shape[1], dtype=jnp.int32)[None, :]
        is_live = (position < draft_length[:, None]) & is_active[:, None]
        # Position-major, so that a stable sort breaks ties as stated.
        by_position = jnp.where(is_live, survival(confidence), 0.0).T.reshape(-1)
        self.order = jnp.argsort(-by_position, stable=True)
        self.sorted = by_position[self.order]

    def lengths(self, num_admitted) -> Int[Array, "B"]:
        """Draft tokens of each row among the first `num_admitted` of the batch."""
        rank = jnp.arange(self.sorted.shape[0], dtype=jnp.int32)
        is_admitted = (rank < num_admitted) & (self.sorted > 0)
        row = self.order % self.shape[0]
        lengths = jnp.zeros(self.shape[0], jnp.int32)
        return lengths.at[row].add(is_admitted.astype(jnp.int32))


def _visit(
    confidence, draft_length, is_active, steps_per_second
) -> tuple[_Gain, Float[Array, "n"]]:
    """The order of admission, and tokens per second after 0, 1, 2, ... admissions."""
    batch_size, num_draft = confidence.shape
    most_tokens = batch_size * (num_draft + 1)
    if steps_per_second.shape[0] <= most_tokens:
        raise ValueError(
            f"steps_per_second must reach {most_tokens} tokens (batch {batch_size} x "
            f"{num_draft + 1} tokens), got {steps_per_second.shape[0]} entries with "
            "entry 0; measure larger forwards, or repeat the last rate."
        )
    gain = _Gain(confidence, draft_length, is_active)
    num_rows = jnp.sum(is_active, dtype=jnp.int32)
    admitted = jnp.concatenate([jnp.zeros(1, jnp.float32), jnp.cumsum(gain.sorted)])
    num_tokens = num_rows + jnp.arange(admitted.shape[0], dtype=jnp.int32)
    rate = steps_per_second[num_tokens]
    return gain, (num_rows.astype(jnp.float32) + admitted) * rate
