"""What the evidence says to do: use this strategy at this length, or turn it off.

Strategies are ranked against plain decoding (`jaxdec.planning.ranking`), and four kinds
of findings look past the choice among them (`jaxdec.planning.findings`). Here the two
become one record, and a verdict in words.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxdec.planning.break_even import Measured, Number
from jaxdec.planning.findings import (
    Finding,
    acceptance_finding,
    num_rounds_finding,
    plain_round_finding,
    round_time_finding,
    scheduling_finding,
    timing_finding,
)
from jaxdec.planning.ranking import GREEDY, Baseline, Ranking, rank, unranked

__all__ = ["GREEDY", "Advice", "Finding", "Ranking", "advise", "verdict"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice:
    """What a report says."""

    best: str
    """A strategy, or the baseline if none beats it."""
    verdict: str
    findings: tuple[Finding, ...]
    rankings: tuple[Ranking, ...]
    """Fastest first; strategies that are not certified, or not timed, come last."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-valid values."""
        record = dataclasses.asdict(self)
        for ranking in record["rankings"]:
            table = ranking["predicted_tpot_ms"]
            ranking["predicted_tpot_ms"] = {str(k): v for k, v in table.items()}
        record["findings"] = list(record["findings"])
        record["rankings"] = list(record["rankings"])
        return record


def advise(
    strategies: Mapping[str, Mapping[str, Any]],
    *,
    plain_tpot_ms: Number,
    baseline: str = GREEDY,
    untimed: Sequence[str] = (),
    prefill_ms: Number = 0.0,
    output_lengths: Sequence[int] = (),
    num_requests: int = 1,
    throughput_tokens_per_s: Number | None = None,
    p99_gap_ms: Number | None = None,
    floor_ms: Number | None = None,
    step_ms: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> Advice:
    """Says which strategy to use, at which length, and which to turn off.

    Args:
        strategies: By name, the fields of `break_even.Measured`; not the baseline.
        plain_tpot_ms: Plain decoding's TPOT on the same prompts and machine.
        baseline: The name of plain decoding: another than greedy where tokens are
            sampled.
        untimed: Strategies that ended every answer in its first step.
        prefill_ms: Mean time of a request's prefill.
        output_lengths: Tokens of each request.
        num_requests: Requests in flight together.
        throughput_tokens_per_s: Of all requests together, in the strategy in use.
        p99_gap_ms: 99th percentile of the time between a request's tokens.
        floor_ms: Time that reading the weights and KV state once takes, if known.
        step_ms: By strategy, plain decoding among them, the mean time of the steps of
            each request.
    """
    if not (math.isfinite(plain_tpot_ms) and plain_tpot_ms > 0):
        raise ValueError(
            f"advice needs plain decoding's TPOT in ms, got {plain_tpot_ms}; "
            f"measure the baseline {baseline!r} on the same prompts."
        )
    if baseline in strategies:
        raise ValueError(
            f"{baseline!r} is the baseline of the advice, got it as a strategy; pass "
            "its TPOT as plain_tpot_ms."
        )
    plain = Baseline(name=baseline, tpot_ms=plain_tpot_ms)
    measured = {name: Measured(**fields) for name, fields in strategies.items()}
    rankings = [rank(name, m, plain) for name, m in measured.items()]
    rankings.sort(key=lambda r: (r.action == "not_ranked", r.measured_tpot_ms))
    rankings += [unranked(name) for name in untimed]
    if rankings and rankings[0].action == "keep":
        rankings[0] = dataclasses.replace(rankings[0], action="use")
    best = rankings[0] if rankings and rankings[0].action == "use" else None

    steadiness = timing_finding(step_ms, [n for n in step_ms if n not in strategies])
    findings = [steadiness]
    if floor_ms is not None:
        findings.append(plain_round_finding(plain, floor_ms))
    for ranking in rankings:
        name = ranking.strategy
        if name in untimed:
            continue
        if ranking.action == "not_ranked":
            findings.append(
                Finding(
                    code="certificate",
                    strategy=name,
                    reason=ranking.reason,
                    instruction="do not use it before its certificate passes",
                )
            )
            continue
        m = measured[name]
        findings.append(round_time_finding(name, m, plain))
        findings.append(acceptance_finding(name, m, ranking, plain))
    name = best.strategy if best else plain.name
    tpot_ms = best.measured_tpot_ms if best else plain.tpot_ms
    tokens_per_step = measured[name].tokens_per_step if best else 1.0
    if len(output_lengths):
        length = float(np.mean(output_lengths))
        findings.append(
            num_rounds_finding(
                name,
                tpot_ms,
                tokens_per_step,
                prefill_ms,
                length,
                is_plain=best is None,
            )
        )
    findings.append(
        scheduling_finding(
            name,
            tpot_ms,
            tokens_per_step,
            num_requests,
            throughput_tokens_per_s,
            p99_gap_ms,
        )
    )
    return Advice(
        best=name,
        verdict=verdict(best, rankings, plain, steadiness),
        findings=tuple(f for f in findings if f is not None),
        rankings=tuple(rankings),
    )


def verdict(
    best: Ranking | None,
    rankings: Sequence[Ranking],
    plain: Baseline,
    unsteady: Finding | None = None,
) -> str:
    """The sentences that close a report."""
    lines = []
    if unsteady is not None:
        lines.append(
            f"The times are not to be trusted ({unsteady.strategy}: "
            f"{unsteady.reason}): {unsteady.instruction}. What they say:"
        )
    if best is None:
        lines.append(f"Use {plain.kind} decoding: {plain.tpot_ms:.2f} ms a token.")
    else:
        lines.append(f"Use {best.strategy}: {best.reason}.")
        k, used = best.best_draft_length, best.draft_length
        if k and len(best.predicted_tpot_ms) > 1:  # Else there was no choice.
            at_used = best.predicted_tpot_ms.get(used)
            as_run = f"at {used}, as run"
            if k != used and at_used is not None:
                as_run += f", predicted {at_used:.2f} and"
            else:
                as_run += ","
            lines.append(
                f"Best draft length {k}: predicted {best.predicted_tpot_ms[k]:.2f} ms "
                f"a token; {as_run} measured {best.measured_tpot_ms:.2f}."
            )
    for ranking in rankings:
        if ranking.action == "turn_off":
            lines.append(f"Turn {ranking.strategy} off: {ranking.reason}.")
        if ranking.action == "not_ranked":
            lines.append(f"{ranking.strategy} is not ranked: {ranking.reason}.")
    return "\n".join(lines)
