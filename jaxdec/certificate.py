"""The losslessness certificate: does a strategy say what plain decoding says?

*Greedy, or sampled with shared noise.* The emitted tokens are replayed through the
plain step on the same prefix, position by position. Where its choice differs, the gap
between the two tokens' scores (at temperature > 0: log-probability plus noise) decides:

    same           the tokens are equal
    tie            gap < tolerance: rounding may order the two either way
    boundary_tie   the gap is larger, but one of the two tokens lies within tolerance of
                   a top-k, top-p or min-p cut-off, so rounding may have removed it
    divergence     anything else, a NaN gap included: the strategy is wrong

The comparison is strict: tolerance 0 (row classes that are equal bit for bit) allows no
tie at all.

*In law.* Where tokens need not be equal, their distribution is tested; see
`jaxdec.statistics`.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int, Shaped

from jaxdec.statistics import KSResult

TOLERANCE_FLOOR = {"float32": 1e-3, "bfloat16": 0.25}
"""Smallest tolerance, in logits, by the dtype of the model's activations."""


def rounding_tolerance(gap_changes: Float[np.ndarray, "N"], dtype: Any) -> float:
    """The gap below which two tokens count as tied, measured in the same run.

    Args:
        gap_changes: By how much the top-2 logit gap of one prefix changed between two
            widths of the target's forward; either sign.
        dtype: Of the model's activations, float32 or bfloat16 (a name or a dtype).

    Returns:
        In logits: 4 x the 99th percentile of the absolute changes, at least
        `TOLERANCE_FLOOR`.
    """
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if name not in TOLERANCE_FLOOR:
        raise ValueError(
            f"rounding is known for {sorted(TOLERANCE_FLOOR)}, got {name!r}; "
            "certify in one of those."
        )
    changes = np.abs(np.asarray(gap_changes, np.float64))
    if changes.size == 0 or not np.isfinite(changes).all():
        raise ValueError(
            f"a tolerance needs finite gap changes, got {changes.size} of which "
            f"{int(np.isfinite(changes).sum())} are finite; measure the same prefix "
            "at two widths, at positions with finite logits."
        )
    return max(4 * float(np.percentile(changes, 99)), TOLERANCE_FLOOR[name])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mismatch:
    """A position at which the plain step chose another token."""

    position: int
    plain_token: int
    emitted_token: int
    gap: float | None
    """Score of the plain token minus that of the emitted one; None if infinite or NaN
    (the plain step had ruled the emitted token out)."""
    kind: Literal["tie", "boundary_tie", "divergence"]
    request: int = 0
    """Which output it is in."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classification:
    """The verdict on every position of one output."""

    labels: Shaped[np.ndarray, "N"]
    """``same``, ``tie``, ``boundary_tie`` or ``divergence``."""
    ties: tuple[Mismatch, ...]
    """Ties of both kinds."""
    divergences: tuple[Mismatch, ...]


def classify_position(
    plain_choice: Int[np.ndarray, "N"],
    emitted: Int[np.ndarray, "N"],
    gap: Float[np.ndarray, "N"],
    tolerance: float,
    boundary_distance: Float[np.ndarray, "N"] | None = None,
    position: Int[np.ndarray, "N"] | None = None,
    request: int = 0,
) -> Classification:
    """Says of every position whether plain decoding agrees; see the module docstring.

    Args:
        plain_choice: The plain step's token on the emitted prefix.
        emitted: The token that the strategy emitted there.
        gap: Plain step's score of `plain_choice` minus its score of `emitted`, >= 0.
        tolerance: From `rounding_tolerance`, or 0.
        boundary_distance: How far, in log-probability, the nearer of the two tokens is
            from the nearest cut-off of the filters; None (or inf) without filters.
        position: Index of each entry in its sequence; 0, 1, ... by default.
        request: Which output this is.
    """
    if (gap < 0).any():
        raise ValueError(
            f"a gap is the plain choice's score minus the emitted token's, got "
            f"{float(np.nanmin(gap))}; swap the two."
        )
    distance = np.full(gap.shape, np.inf)
    if boundary_distance is not None:
        distance = np.abs(boundary_distance)
    is_same = plain_choice == emitted
    # A NaN compares false, so it falls through to divergence.
    labels = np.select(
        [is_same, gap < tolerance, distance < tolerance],
        ["same", "tie", "boundary_tie"],
        "divergence",
    )
    position = np.arange(gap.size) if position is None else position
    found = [
        Mismatch(
            position=int(position[i]),
            plain_token=int(plain_choice[i]),
            emitted_token=int(emitted[i]),
            gap=float(gap[i]) if np.isfinite(gap[i]) else None,
            kind=str(labels[i]),
            request=request,
        )
        for i in np.flatnonzero(~is_same)
    ]
    return Classification(
        labels=labels,
        ties=tuple(m for m in found if m.kind != "divergence"),
        divergences=tuple(m for m in found if m.kind == "divergence"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Certificate:
    """Proof, or refutation, that a strategy says what plain decoding says."""

    strategy: str
    """Its name."""
    mode: Literal["greedy", "sampled", "law"]
    """Tokens compared at temperature 0, tokens compared with shared noise, or the
    distribution tested."""
    dtype: str
    """Of the model's weights."""
    row_class: str
    """Which rows of a forward are bit-identical to each other, and which ran."""
    tolerance: float
    """In logits: gaps below it are ties."""
    num_positions: int
    """Emitted tokens that were compared."""
    ties: tuple[Mismatch, ...]
    """Places where rounding may order two tokens either way."""
    divergences: tuple[Mismatch, ...]
    """Places where the strategy is wrong."""
    ks: KSResult | None
    """The test of the distribution, where there was one."""
    passed: bool
    """Whether nothing diverged, and the test of the distribution passed."""
    reasons: tuple[str, ...]
    """Why it failed; empty if it passed."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-valid values."""
        return json.loads(json.dumps(dataclasses.asdict(self), allow_nan=False))

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """One line for people."""
        parts = [f"{self.num_positions} positions"]
        if self.mode != "law":
            parts.append(f"{len(self.ties)} ties within {self.tolerance:g}")
            parts.append(f"{len(self.divergences)} divergences")
        if self.ks is not None:
            parts.append(
                f"KS {self.ks.statistic:.4f} (at most {self.ks.threshold:.4f})"
            )
        verdict = "lossless" if self.passed else "NOT lossless"
        line = (
            f"{self.strategy}: {verdict} ({self.mode}, {self.dtype}, rows "
            f"{self.row_class}): {', '.join(parts)}"
        )
        return line if self.passed else f"{line}; {'; '.join(self.reasons)}"

    def share_that_match(
        self, outputs: Sequence[Sequence[int]], references: Sequence[Sequence[int]]
    ) -> float:
        """Share of outputs that equal their reference, or leave it at a named tie.

        Args:
            outputs: of the requests that were certified, in order.
            references: what plain decoding said to each.
        """
        ties = {(tie.request, tie.position) for tie in self.ties}
        wrong = {bad.request for bad in self.divergences}

        def matches(i, output, reference):
            if tuple(output) == tuple(reference):
                return True
            pairs = enumerate(zip(output, reference, strict=False))
            shorter = min(len(output), len(reference))
            first = next((at for at, (a, b) in pairs if a != b), shorter)
            return i not in wrong and (i, first) in ties

        pairs = zip(outputs, references, strict=True)
        found = [matches(i, *pair) for i, pair in enumerate(pairs)]
        return sum(found) / len(found)


def certify(
    *,
    strategy: str,
    mode: Literal["greedy", "sampled", "law"],
    dtype: str,
    row_class: str,
    tolerance: float,
    num_positions: int,
    ties: Sequence[Mismatch] = (),
    divergences: Sequence[Mismatch] = (),
    ks: KSResult | None = None,
    num_impossible: int = 0,
    errors: Sequence[str] = (),
) -> Certificate:
    """Draws the conclusion from what was compared.

    Args:
        strategy: Its name.
        mode: What was compared; see `Certificate`.
        dtype: Of the model's activations.
        row_class: See `Certificate`.
        tolerance: See `classify_position`.
        num_positions: How many emitted tokens were checked.
        ties: Of all outputs.
        divergences: Of all outputs.
        ks: The distribution test; ``mode="law"`` needs it.
        num_impossible: Emitted tokens whose probability was zero, further from a
            cut-off than the tolerance.
        errors: What else was found wrong, such as an answer that ends too early.
    """
    reasons = list(errors)
    if num_positions < 1 and not errors:
        reasons.append("nothing was compared: generate at least one token")
    if divergences:
        first = divergences[0]
        gap = "no finite gap" if first.gap is None else f"gap {first.gap:g}"
        reasons.append(
            f"{len(divergences)} of {num_positions} tokens differ beyond rounding, "
            f"first at position {first.position}: {first.emitted_token} in place of "
            f"{first.plain_token}, {gap}"
        )
    if mode == "law" and ks is None:
        reasons.append("no distribution test was run: pass ks")
    if ks is not None and not ks.passed:
        reasons.append(
            f"the tokens do not follow the target's law: KS distance "
            f"{ks.statistic:.4f} exceeds {ks.threshold:.4f} with {ks.n} tokens"
        )
    if num_impossible:
        reasons.append(f"{num_impossible} tokens have probability zero in the target")
    return Certificate(
        strategy=strategy,
        mode=mode,
        dtype=dtype,
        row_class=row_class,
        tolerance=tolerance,
        num_positions=num_positions,
        ties=tuple(ties),
        divergences=tuple(divergences),
        ks=ks,
        passed=not reasons,
        reasons=tuple(reasons),
    )
