"""What becomes of drafts: accepted by position, expected tokens, calibration.

For the notebooks on MTP and on parallel drafts.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxdec.course.display import LINES, Picture, Table, canvas, evidence_of
from jaxdec.evidence import Evidence
from jaxdec.planning.break_even import expected_tokens
from jaxdec.text import Outputs

MARKS = "osD^vP"


def counts_table(runs: Mapping[str, Outputs]) -> Table:
    """What each run committed and what it took, a row a run."""
    rows = []
    for label, outputs in runs.items():
        found = evidence_of(outputs)
        rows.append(
            (
                label,
                found.tokens_per_step,
                found.acceptance_rate,
                found.num_drafted,
                found.num_accepted,
                found.num_rollbacks,
                found.proposal_mode,
                (found.drafter_param_bytes or 0) / 1e6,
            )
        )
    titles = (
        "run",
        "tokens per step",
        "acceptance rate",
        "drafted",
        "accepted",
        "rollbacks",
        "mode",
        "own weights MB",
    )
    return Table(titles, rows)


def native_table(outputs: Outputs) -> Table:
    """The evidence that a drafter drafted: what a silent fallback would not show."""
    found = evidence_of(outputs)
    rows = [
        ("modules of the drafter", found.num_native_modules),
        ("own parameters", found.pairing.get("own_parameters")),
        ("draft tokens judged", found.num_judged),
        ("draft tokens accepted", found.num_accepted),
        ("drafter's state, bytes", found.drafter_state_bytes),
    ]
    return Table(("evidence", "value"), rows)


def conditional(found: Evidence) -> tuple[float, ...]:
    """How often draft token i was accepted when the one before it was.

    Ends at the last position that was reached.
    """
    known = [c for c in found.conditional_acceptance_by_position if c is not None]
    return tuple(known)


def draw_acceptance(runs: Mapping[str, Outputs]) -> Picture:
    """Acceptance by place in the draft: given the one before, and of all drafts."""
    figure, panels = canvas(2, width=8.6, sharey=True)
    for i, (label, outputs) in enumerate(runs.items()):
        found = evidence_of(outputs)
        given, block = conditional(found), found.block_acceptance
        for axes, values in zip(panels, (given, block), strict=True):
            places = range(1, len(values) + 1)
            style = f"{MARKS[i % len(MARKS)]}-"
            axes.plot(places, values, style, color=LINES[i % len(LINES)], label=label)
    for axes, title in zip(
        panels, ("given that the one before was", "of all drafts"), strict=True
    ):
        axes.set_title(f"accepted, {title}")
        axes.set_xlabel("place in the draft")
        axes.set_ylim(0, 1.03)
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[1].legend()
    return Picture(figure, f"acceptance by place in the draft of {', '.join(runs)}")


def expected_table(longest: Outputs, measured: Mapping[int, Outputs]) -> Table:
    """E(k) from one run with long drafts, beside runs whose drafts were that long.

    Args:
        longest: the run whose conditional acceptance is used.
        measured: by draft length, runs to hold against it.
    """
    given = conditional(evidence_of(longest))
    # Places that no draft came to have nothing to give.
    given += (0.0,) * (max(measured, default=0) - len(given))
    rates = {k: evidence_of(run).tokens_per_step for k, run in measured.items()}
    rows = [(k, expected_tokens(given, k), rates.get(k)) for k in range(len(given) + 1)]
    return Table(("draft length", "expected", "measured"), rows)


def draw_expected(table: Table) -> Picture:
    """`expected_table` as a curve with points."""
    figure, axes = canvas()
    lengths = table.column("draft length")
    axes.plot(lengths, table.column("expected"), "-", color=LINES[0], label="E(k)")
    points = [(k, m) for k, _, m in table.rows if m is not None]
    places, values = zip(*points, strict=True) if points else ((), ())
    axes.plot(places, values, "o", color=LINES[1], label="measured")
    axes.axhline(1, color="gray", linestyle=":", label="plain decoding")
    axes.set_xlabel("draft length k")
    axes.set_ylabel("tokens per step")
    axes.set_ylim(bottom=0)
    axes.legend()
    return Picture(figure, "expected and measured tokens per step by draft length")


def reliability_table(outputs: Outputs, num_bins: int = 10) -> Table:
    """How often drafts survived of those that the drafter gave such a chance.

    The survival of a draft token is the product of the confidences up to it. It is held
    against whether the token was accepted, over all that were judged.

    Raises:
        ValueError: the drafter has no confidence.
    """
    said, happened = [], []
    for request in evidence_of(outputs).requests:
        steps = request.steps
        for confidence, judged, accepted in zip(
            steps.draft_confidence, steps.num_judged, steps.num_accepted, strict=True
        ):
            said.extend(np.cumprod(confidence)[:judged])
            happened.extend(np.arange(judged) < accepted)
    if not any(said):
        raise ValueError(
            "no draft of this run had a confidence; decode with a drafter that has a "
            "confidence head, such as 'dspark'"
        )
    which = np.minimum((np.array(said) * num_bins).astype(int), num_bins - 1)
    rows = [
        (
            f"{b / num_bins:.1f} to {(b + 1) / num_bins:.1f}",
            int(np.sum(which == b)),
            float(np.mean(np.array(said)[which == b])),
            float(np.mean(np.array(happened)[which == b])),
        )
        for b in sorted(set(which.tolist()))
    ]
    return Table(("survival", "tokens", "said", "happened"), rows)


def draw_reliability(table: Table) -> Picture:
    """`reliability_table` as a reliability diagram: calibrated is on the diagonal."""
    figure, axes = canvas(width=4.6, height=4.4)
    axes.plot([0, 1], [0, 1], ":", color="gray", label="calibrated")
    sizes = np.sqrt(np.array(table.column("tokens"), float))
    axes.plot(
        table.column("said"), table.column("happened"), "-", color=LINES[0], alpha=0.5
    )
    axes.scatter(
        table.column("said"),
        table.column("happened"),
        s=12 * sizes,
        color=LINES[0],
        label="measured (area: tokens)",
    )
    axes.set_xlabel("survival that the drafter said")
    axes.set_ylabel("share that was accepted")
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.legend()
    return Picture(figure, "reliability of the drafter's confidence")


def threshold_table(
    outputs: Outputs, thresholds: Sequence[float] = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
) -> Table:
    """What a threshold on survival would have judged and kept of the drafts of a run.

    Every draft is cut before the first token whose survival is below the threshold.
    What a shorter draft would have changed in the steps after it is left out.
    """
    rows = []
    for threshold in thresholds:
        judged_sum = kept_sum = steps_sum = 0
        for request in evidence_of(outputs).requests:
            steps = request.steps
            for confidence, judged, accepted in zip(
                steps.draft_confidence,
                steps.num_judged,
                steps.num_accepted,
                strict=True,
            ):
                survives = np.cumprod(confidence)[:judged] >= threshold
                judged = int(np.cumprod(survives).sum())
                judged_sum += judged
                kept_sum += min(accepted, judged)
                steps_sum += 1
        rows.append(
            (
                threshold,
                judged_sum / steps_sum,
                1 + kept_sum / steps_sum,
                kept_sum / judged_sum if judged_sum else None,
            )
        )
    titles = ("threshold", "judged per step", "tokens per step", "acceptance rate")
    return Table(titles, rows)


def draw_thresholds(table: Table, measured: Mapping[str, Outputs]) -> Picture:
    """`threshold_table` as a curve, with runs that had a threshold as points."""
    figure, axes = canvas()
    judged, tokens = table.column("judged per step"), table.column("tokens per step")
    axes.plot(judged, tokens, "o-", color=LINES[0], label="cut afterwards")
    for threshold, x, y in zip(table.column("threshold"), judged, tokens, strict=True):
        axes.annotate(f" {threshold:g}", (x, y), fontsize=8, va="top")
    for i, (label, outputs) in enumerate(measured.items()):
        found = evidence_of(outputs)
        axes.plot(
            found.num_judged / found.num_steps,
            found.tokens_per_step,
            MARKS[1 + i % 5],
            color=LINES[1 + i % 5],
            label=label,
        )
    axes.set_xlabel("draft tokens judged per step")
    axes.set_ylabel("tokens per step")
    axes.legend()
    return Picture(figure, "tokens per step against tokens judged, by threshold")
