"""How a strategy does against plain decoding, and why it loses where it does.

Only a certified strategy is ranked, and only by its measured time per output token
(TPOT) against plain decoding's. A prediction (`jaxdec.planning.break_even`) chooses the
draft length to try, never the winner.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from jaxdec.planning.break_even import (
    Measured,
    Number,
    break_even_acceptance,
    costs_at,
    predict_tpot,
)

MIN_GAIN = 0.03
"""A strategy must beat plain decoding by more than this fraction of its TPOT."""

GREEDY = "greedy"
"""The strategy that plain decoding is at temperature 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Baseline:
    """The plain decoding that strategies are measured against."""

    name: str = GREEDY
    tpot_ms: Number

    @property
    def kind(self) -> str:
        """The word for it: only at temperature 0 is plain decoding greedy."""
        return "greedy" if self.name == GREEDY else "plain"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranking:
    """What to do with one strategy."""

    strategy: str
    action: Literal["use", "keep", "turn_off", "not_ranked"]
    """`use` is the best one; `keep` beats the baseline but is not the best."""
    reason: str
    measured_tpot_ms: Number | None
    """None where every answer ended in its first step."""
    draft_length: int | None
    """K, as it was run."""
    predicted_tpot_ms: Mapping[int, float]
    """By draft length; empty where costs or acceptance are missing."""
    best_draft_length: int | None
    break_even_acceptance: float | None
    """Acceptance rate at which its round at K equals plain decoding; above 1: never."""


def rank(name: str, measured: Measured, plain: Baseline) -> Ranking:
    """Compares one strategy with plain decoding; never says ``use``."""
    predicted = predict_tpot(measured)
    best_length = min(predicted, key=predicted.get) if predicted else None
    even = None
    judged = measured.judged_per_step or measured.draft_length
    if judged:
        even = break_even_acceptance(measured.round_ms, plain.tpot_ms, judged)
    gain = 1 - measured.tpot_ms / plain.tpot_ms
    against = (
        f"{measured.tpot_ms:.2f} ms a token against {plain.kind} decoding's "
        f"{plain.tpot_ms:.2f}"
    )
    if not measured.certified:
        why = "; ".join(measured.certificate_reasons) or "no passed certificate"
        action, reason = "not_ranked", f"not certified as lossless: {why}"
    elif gain > MIN_GAIN:
        action, reason = "keep", f"{against} ({gain:.1%} less)"
    else:
        action = "turn_off"
        reason = f"{against}, not the {MIN_GAIN:.0%} gain that it needs"
        reason += explain_loss(measured, even, predicted, best_length, plain)
    return Ranking(
        strategy=name,
        action=action,
        reason=reason,
        measured_tpot_ms=measured.tpot_ms,
        draft_length=measured.draft_length,
        predicted_tpot_ms=predicted,
        best_draft_length=best_length,
        break_even_acceptance=even,
    )


def unranked(name: str) -> Ranking:
    """A strategy without a time per token: every answer ended in its first step."""
    return Ranking(
        strategy=name,
        action="not_ranked",
        reason=(
            "every answer ended in its first step, so there is no time per token; "
            "ask for longer answers"
        ),
        measured_tpot_ms=None,
        draft_length=None,
        predicted_tpot_ms={},
        best_draft_length=None,
        break_even_acceptance=None,
    )


def explain_loss(
    measured: Measured,
    break_even: float | None,
    predicted: Mapping[int, float],
    best_length: int | None,
    plain: Baseline,
) -> str:
    """Why a strategy loses: acceptance, draft cost and break-even, as far as known."""
    parts = []
    if measured.acceptance_rate is not None:
        parts.append(f"it accepts {measured.acceptance_rate:.1%} of its draft tokens")
    costs = costs_at(measured, measured.draft_length)
    if measured.draft_length and costs is not None:
        parts.append(f"drafting costs {costs[0]:.2f} ms and verifying {costs[1]:.2f}")
    if break_even is not None and break_even > 1:
        parts.append(
            f"a step is so long that even full acceptance of {measured.draft_length} "
            "tokens would not pay"
        )
    elif break_even is not None and (measured.acceptance_rate or 0) >= break_even:
        parts.append(
            f"that is above the {max(break_even, 0):.1%} of break-even, but not enough"
        )
    elif break_even is not None:
        parts.append(f"break-even is at {break_even:.1%} acceptance")
    if best_length and predicted[best_length] < plain.tpot_ms * (1 - MIN_GAIN):
        parts.append(
            f"before giving it up, measure draft length {best_length}: predicted "
            f"{predicted[best_length]:.2f} ms a token"
        )
    return "".join(f"; {part}" for part in parts)
