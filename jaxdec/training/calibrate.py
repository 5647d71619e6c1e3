"""Calibration of a confidence head: sequential temperature scaling.

A confidence c_k estimates whether draft token k is accepted if all before it are, and
their product, the survival, whether all up to k are. Each log-odds is divided by a
temperature of its own, found place by place: with those before it fixed, T_k is the one
with the smallest expected calibration error of the survival at k (DSpark, arXiv
2607.05147, section 4). Whether it helps is told on other rounds than it was found on.

    ECE     mean distance of predicted and observed rates, over 20 bins of prediction
    AUROC   the chance that an accepted draft is rated above a rejected one
    Brier   mean squared error; that of saying the base rate r always is r (1 - r)
"""

import dataclasses
from typing import Any

import numpy as np

NUM_BINS = 20
_GRID = np.geomspace(0.1, 10.0, 81)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rounds:
    """What a confidence head said of drafts, and what became of them."""

    odds: np.ndarray
    """``[rounds, K]``: log-odds, at temperature 1."""
    num_judged: np.ndarray
    """``[rounds]``: draft tokens that the target judged."""
    num_accepted: np.ndarray

    def part(self, which: np.ndarray) -> "Rounds":
        """Some of the rounds."""
        return Rounds(
            odds=self.odds[which],
            num_judged=self.num_judged[which],
            num_accepted=self.num_accepted[which],
        )

    def at(self, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """Which rounds say something of a depth (1 is the first), and whether all
        draft tokens up to it were accepted.
        """  # noqa: D205
        is_known = self.num_judged >= depth
        return is_known, self.num_accepted[is_known] >= depth


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quality:
    """How well survival at one depth is predicted."""

    depth: int
    rounds: int
    rate: float
    """Observed."""
    ece: float
    auroc: float | None
    """None where all were accepted, or none."""
    brier: float
    base_brier: float
    """Of saying the rate always."""


def rounds_of(outputs: Any) -> tuple[Rounds, np.ndarray]:
    """The rounds of a call with a drafter that has a confidence, and their requests.

    Args:
        outputs: of `jaxdec.generate`, all drafts judged.

    Raises:
        ValueError: the drafter has no confidence.
    """
    if not any(outputs.run.call.config.facts(outputs.run.call.lm)["has_confidence"]):
        raise ValueError(
            f"the strategy {outputs.run.call.config.name!r} has no confidence to "
            "calibrate; use one with a DSpark drafter"
        )
    info = outputs.run.info
    drafted = np.asarray(info.is_live) & (np.asarray(info.num_judged) > 0)
    request, step = np.nonzero(drafted)
    confidence = np.asarray(info.draft_confidence, np.float64)[request, step]
    confidence = np.clip(confidence, 1e-7, 1 - 1e-7)
    found = Rounds(
        odds=np.log(confidence) - np.log1p(-confidence),
        num_judged=np.asarray(info.num_judged)[request, step],
        num_accepted=np.asarray(info.num_accepted)[request, step],
    )
    return found, request


def joined(parts: list[Rounds]) -> Rounds:
    """Rounds of several calls."""
    return Rounds(
        odds=np.concatenate([p.odds for p in parts]),
        num_judged=np.concatenate([p.num_judged for p in parts]),
        num_accepted=np.concatenate([p.num_accepted for p in parts]),
    )


def survival(odds: np.ndarray, temperatures: np.ndarray) -> np.ndarray:
    """``[rounds, K]``: the product of the confidences up to each place."""
    return np.cumprod(1 / (1 + np.exp(-odds / temperatures)), axis=1)


def fit(rounds: Rounds) -> np.ndarray:
    """The temperatures of all places.

    A place that no round judged keeps 1.
    """
    num = rounds.odds.shape[1]
    temperatures = np.ones(num)
    before = np.ones(len(rounds.odds))
    for k in range(num):
        is_known, label = rounds.at(k + 1)
        if np.any(is_known):
            odds, so_far = rounds.odds[is_known, k], before[is_known]
            found = so_far[:, None] / (1 + np.exp(-odds[:, None] / _GRID[None]))
            errors = [ece(column, label) for column in found.T]
            squares = np.mean((found - label[:, None]) ** 2, axis=0)
            # The error is a step function; among its best the squared one decides.
            best = np.lexsort((squares, np.round(errors, 4)))[0]
            temperatures[k] = _GRID[best]
        before = before / (1 + np.exp(-rounds.odds[:, k] / temperatures[k]))
    return temperatures


def quality(rounds: Rounds, temperatures: np.ndarray | None = None) -> list[Quality]:
    """How well survival is predicted, for every depth that was judged."""
    num = rounds.odds.shape[1]
    temperatures = np.ones(num) if temperatures is None else temperatures
    predicted = survival(rounds.odds, temperatures)
    found = []
    for depth in range(1, num + 1):
        is_known, label = rounds.at(depth)
        if not np.any(is_known):
            continue
        guess, rate = predicted[is_known, depth - 1], float(np.mean(label))
        found.append(
            Quality(
                depth=depth,
                rounds=len(label),
                rate=rate,
                ece=ece(guess, label),
                auroc=auroc(guess, label),
                brier=float(np.mean((guess - label) ** 2)),
                base_brier=rate * (1 - rate),
            )
        )
    return found


def ece(guess: np.ndarray, label: np.ndarray, num_bins: int = NUM_BINS) -> float:
    """Expected calibration error, over bins of equal width.

    >>> ece(np.array([0.2, 0.2, 0.2, 0.2, 0.2]), np.array([1, 0, 0, 0, 0]))
    0.0
    """
    which = np.minimum((guess * num_bins).astype(int), num_bins - 1)
    count = np.bincount(which, minlength=num_bins)
    gap = np.bincount(which, weights=guess - label, minlength=num_bins)
    return round(float(np.sum(np.abs(gap)) / max(count.sum(), 1)), 12)


def auroc(guess: np.ndarray, label: np.ndarray) -> float | None:
    """Area under the ROC curve; equal guesses count half.

    >>> auroc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1]))
    0.75
    """
    label = np.asarray(label, bool)
    num, positive = len(label), int(np.sum(label))
    if positive in (0, num):
        return None
    values, which, counts = np.unique(guess, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[which]
    above = np.sum(rank[label]) - positive * (positive + 1) / 2
    return float(above / (positive * (num - positive)))


def reliability(
    rounds: Rounds,
    temperatures: np.ndarray | None = None,
    num_bins: int = NUM_BINS,
) -> list[dict[str, Any]]:
    """By depth, what a calibration plot shows: bins of prediction, observed rates."""
    if temperatures is None:
        temperatures = np.ones(rounds.odds.shape[1])
    predicted = survival(rounds.odds, temperatures)
    found = []
    for depth in range(1, rounds.odds.shape[1] + 1):
        is_known, label = rounds.at(depth)
        guess = predicted[is_known, depth - 1]
        which = np.minimum((guess * num_bins).astype(int), num_bins - 1)
        count = np.bincount(which, minlength=num_bins)
        live = count > 0
        found.append(
            {
                "depth": depth,
                "predicted": (
                    np.bincount(which, weights=guess, minlength=num_bins)[live]
                    / count[live]
                ).tolist(),
                "observed": (
                    np.bincount(which, weights=label, minlength=num_bins)[live]
                    / count[live]
                ).tolist(),
                "rounds": count[live].tolist(),
            }
        )
    return found
