"""Break-even arithmetic: what a draft length costs, yields and needs.

With c_i the measured probability that draft token i is accepted given that i - 1 was,
and k draft tokens a step,

    E(k)    = 1 + sum_{i<=k} prod_{j<=i} c_j                    expected tokens per step
    TPOT(k) = (draft(k) + verify(k) + overhead) / E(k)          predicted, in ms

where the overhead is what the measured round spends beyond drafting and verifying. A
round of r ms breaks even with plain decoding of g ms a token when it emits r / g
tokens. A step with K judged tokens emits 1 + K x acceptance rate, hence

    break-even acceptance rate = (r / g - 1) / K,

and above 1 no acceptance can pay for the round.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

Number = float | int
"""Milliseconds, rates or lengths; whole numbers are welcome."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured of one strategy; a field that was not measured is None."""

    certified: bool
    tpot_ms: Number
    tokens_per_step: Number
    draft_length: int = 0
    """K: most draft tokens a step, the nodes of a tree; 0 if it does not draft."""
    judged_per_step: Number | None = None
    """Mean judged tokens a step, where lengths vary; None is K."""
    acceptance_rate: Number | None = None
    conditional_acceptance_by_position: Sequence[Number | None] = ()
    draft_cost_ms: Number | Mapping[int, Number] | None = None
    """Per step at K, or a table from draft length to ms."""
    is_block: bool = False
    """One number for `draft_cost_ms` is the cost of any length (one forward fills the
    block); else it grows in proportion to the length."""
    is_tree: bool = False
    """How deep trees were accepted says nothing of trees with fewer nodes: only K
    itself is predicted."""
    verify_cost_ms: Number | Mapping[int, Number] | None = None
    """Per step at K, or a table from draft length (rows of the forward, less the
    anchor) to ms."""
    certificate_reasons: Sequence[str] = ()
    """Why its certificate was refused."""

    def __post_init__(self):
        for name in ("tpot_ms", "tokens_per_step"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(
                    f"advice needs a positive {name}, got {value}; leave the strategy "
                    "out, or measure it on prompts that emit tokens."
                )

    @property
    def round_ms(self) -> float:
        """Measured time of one step."""
        return float(self.tpot_ms * self.tokens_per_step)


def expected_tokens(
    conditional_acceptance: Sequence[Number | None], draft_length: int
) -> float:
    """E(k): expected tokens per step.

    Args:
        conditional_acceptance: By position; at least `draft_length` known values.
        draft_length: k.

    >>> round(expected_tokens([0.8] * 4, 4), 4)
    3.3616
    """
    known = conditional_acceptance[:draft_length]
    if len(known) < draft_length or None in known:
        raise ValueError(
            f"acceptance was measured at {conditional_acceptance}, too few positions "
            f"for draft length {draft_length}; measure with a longer draft."
        )
    return 1.0 + float(np.cumprod(np.array(known, np.float64)).sum())


def break_even_acceptance(
    round_ms: Number, plain_tpot_ms: Number, draft_length: Number
) -> float:
    """Acceptance rate at which a round's tokens cost what plain decoding's do.

    Returns:
        ``(round / plain - 1) / K``; at most 0 if even refused drafts cost nothing,
        above 1 if no acceptance is enough.

    >>> break_even_acceptance(30.0, 20.0, 4)
    0.125
    """
    if draft_length <= 0:
        raise ValueError(
            f"break-even needs a draft, got length {draft_length}; pass what a step "
            "judges on average."
        )
    return (round_ms / plain_tpot_ms - 1) / draft_length


def cost_at(
    cost: Number | Mapping[int, Number] | None,
    draft_length: int,
    measured_length: int,
    is_proportional: bool,
) -> float | None:
    """Cost in ms at a draft length; None outside of what was measured.

    A table is read by linear interpolation, and below its first length by its first
    value: a shorter draft costs no more. A number is the cost at `measured_length`, or
    that of any shorter length unless it is proportional.
    """
    if cost is None:
        return None
    if isinstance(cost, Mapping):
        lengths = sorted(cost)
        if not lengths or draft_length > lengths[-1]:
            return None
        values = [cost[length] for length in lengths]
        return float(np.interp(draft_length, lengths, values))
    if draft_length > measured_length:
        return None
    return (
        cost * draft_length / max(measured_length, 1)
        if is_proportional
        else float(cost)
    )


def costs_at(measured: Measured, draft_length: int) -> tuple[float, float] | None:
    """Draft and verify cost in ms; None unless both are known."""
    draft = cost_at(
        measured.draft_cost_ms,
        draft_length,
        measured.draft_length,
        is_proportional=not measured.is_block,
    )
    verify = cost_at(
        measured.verify_cost_ms, draft_length, measured.draft_length, False
    )
    return None if draft is None or verify is None else (draft, verify)


def predict_tpot(measured: Measured) -> dict[int, float]:
    """Predicted TPOT in ms of every draft length that the measurements reach."""
    at_measured = costs_at(measured, measured.draft_length)
    if measured.draft_length < 1 or at_measured is None:
        return {}
    overhead = max(measured.round_ms - sum(at_measured), 0.0)
    predicted = {}
    for k, c in enumerate(measured.conditional_acceptance_by_position, start=1):
        costs = costs_at(measured, k)
        if c is None or costs is None:
            break
        if measured.is_tree and k < measured.draft_length:
            continue
        tokens = expected_tokens(measured.conditional_acceptance_by_position, k)
        predicted[k] = (sum(costs) + overhead) / tokens
    return predicted
