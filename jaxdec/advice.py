"""What the evidence says to do: use this strategy at this length, or turn it off.

Only a certified strategy is ranked, and only by its measured time per output token
(TPOT) against plain decoding's; a prediction (`jaxdec.planning.break_even`) chooses
the draft length to try, never the winner.

Four findings look past the choice of strategy: `round_time` (a round takes long),
`num_rounds` (there are too many), `acceptance` (drafts are refused too often) and
`scheduling` (many requests wait for each other). Each states its numbers and what to
do. The thresholds below are where a finding starts; they never change the verdict.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxdec.planning.break_even import (
    Measured,
    Number,
    break_even_acceptance,
    costs_at,
    predict_tpot,
)

MIN_GAIN = 0.03
"""A strategy must beat plain decoding by more than this fraction of its TPOT."""
HIGH_ROUND_RATIO = 2.0
"""A round is long from this many plain steps (plain: this many bandwidth floors)."""
MANY_ROUNDS_SHARE = 0.8
"""Rounds dominate when they take this share of a request's time, prefill included."""
FEW_TOKENS_PER_STEP = 1.5
"""Below it, tokens per step is what limits the number of rounds."""
HIGH_GAP_RATIO = 3.0
"""A P99 token gap is high from this many rounds (a round's tokens come together)."""
LOW_BATCH_SPEEDUP = 1.5
"""Several requests should give this many times one request's tokens per second."""

GREEDY = "greedy"


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
class Finding:
    """One row of advice."""

    code: Literal["round_time", "num_rounds", "acceptance", "scheduling", "certificate"]
    strategy: str
    reason: str
    """What was seen, with the numbers."""
    instruction: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranking:
    """What to do with one strategy."""

    strategy: str
    action: Literal["use", "keep", "turn_off", "not_ranked"]
    """`use` is the best one; `keep` beats the baseline but is not the best."""
    reason: str
    measured_tpot_ms: Number | None
    """None where every answer ended in its first step."""
    predicted_tpot_ms: Mapping[int, float]
    """By draft length; empty where costs or acceptance are missing."""
    best_draft_length: int | None
    break_even_acceptance: float | None
    """Acceptance rate at which its round at K equals plain decoding; above 1: never."""


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
            f"a round is so long that even full acceptance of {measured.draft_length} "
            "tokens would not pay"
        )
    elif break_even is not None:
        parts.append(f"break-even is at {max(break_even, 0):.1%} acceptance")
    if best_length and predicted[best_length] < plain.tpot_ms * (1 - MIN_GAIN):
        parts.append(
            f"before giving it up, measure draft length {best_length}: predicted "
            f"{predicted[best_length]:.2f} ms a token"
        )
    return "".join(f"; {part}" for part in parts)


def round_time_finding(
    name: str, measured: Measured, plain: Baseline
) -> Finding | None:
    """High time per round: names its largest part."""
    round_ms = measured.round_ms
    if round_ms < HIGH_ROUND_RATIO * plain.tpot_ms:
        return None
    costs = costs_at(measured, measured.draft_length)
    parts, instruction = "", "measure draft and verify cost to see which part is long"
    if costs is not None:
        table = {
            "drafting": costs[0],
            "verifying": costs[1],
            "the rest": max(round_ms - sum(costs), 0.0),
        }
        parts = ": " + ", ".join(f"{part} {ms:.2f}" for part, ms in table.items())
        instruction = {
            "drafting": "use a smaller drafter, a shorter draft or a block drafter",
            "verifying": (
                "look at decode compute and KV access: fewer rows a forward, a lower "
                "capacity, a faster dtype"
            ),
            "the rest": (
                "look at sampling (top-k, top-p, penalties), at the drafter's extend "
                "and at what the host does between steps"
            ),
        }[max(table, key=table.get)]
    return Finding(
        code="round_time",
        strategy=name,
        reason=(
            f"a round takes {round_ms:.2f} ms, {round_ms / plain.tpot_ms:.2f} "
            f"{plain.kind} steps{parts}"
        ),
        instruction=instruction,
    )


def plain_round_finding(plain: Baseline, floor_ms: Number) -> Finding | None:
    """High time per plain step, against the time its bytes take to read."""
    if plain.tpot_ms < HIGH_ROUND_RATIO * floor_ms:
        return None
    return Finding(
        code="round_time",
        strategy=plain.name,
        reason=(
            f"a {plain.kind} step takes {plain.tpot_ms:.2f} ms, "
            f"{plain.tpot_ms / floor_ms:.2f} times the {floor_ms:.2f} ms that reading "
            "weights and KV state takes"
        ),
        instruction=(
            "look at decode compute, KV access (capacity, block of the attention) and "
            "sampling before speculating"
        ),
    )


def acceptance_finding(
    name: str, measured: Measured, ranking: Ranking, plain: Baseline
) -> Finding | None:
    """Low acceptance: another length if one is predicted to pay, else give up."""
    accepted, needed = measured.acceptance_rate, ranking.break_even_acceptance
    if accepted is None or needed is None or accepted >= needed:
        return None
    best = ranking.best_draft_length
    instruction = "change the drafter, or give speculation up with this one"
    if best:
        predicted = ranking.predicted_tpot_ms[best]
        if best != measured.draft_length and predicted < plain.tpot_ms:
            instruction = (
                f"try draft length {best} (predicted {predicted:.2f} ms a token), or "
                "change the drafter"
            )
    return Finding(
        code="acceptance",
        strategy=name,
        reason=(
            f"{accepted:.1%} of {measured.draft_length} draft tokens are accepted; "
            f"its round needs {needed:.1%} to break even"
        ),
        instruction=instruction,
    )


def num_rounds_finding(
    name: str,
    tpot_ms: Number,
    tokens_per_step: Number,
    prefill_ms: Number,
    output_length: Number,
) -> Finding | None:
    """Too many rounds: the rounds of the strategy in use dominate."""
    decode_ms = tpot_ms * output_length
    share = decode_ms / (decode_ms + prefill_ms) if decode_ms else 0.0
    if share < MANY_ROUNDS_SHARE or tokens_per_step >= FEW_TOKENS_PER_STEP:
        return None
    return Finding(
        code="num_rounds",
        strategy=name,
        reason=(
            f"{math.ceil(output_length / tokens_per_step)} rounds for "
            f"{output_length:.0f} tokens ({tokens_per_step:.2f} a round) take "
            f"{share:.0%} of the time, prefill {1 - share:.0%}"
        ),
        instruction=(
            "output length or tokens per round is the limit: ask for shorter outputs, "
            "or try speculation (lookup needs no weights; a trained drafter gives more)"
        ),
    )


def scheduling_finding(
    name: str,
    tpot_ms: Number,
    tokens_per_step: Number,
    num_requests: int,
    throughput_tokens_per_s: Number | None,
    p99_gap_ms: Number | None,
) -> Finding | None:
    """Low throughput or high P99 with many requests."""
    if num_requests < 2:
        return None
    reasons = []
    single = 1000 / tpot_ms
    speedup = (throughput_tokens_per_s or math.inf) / single
    if speedup < LOW_BATCH_SPEEDUP:
        reasons.append(
            f"{num_requests} requests give {throughput_tokens_per_s:.1f} tokens/s, "
            f"{speedup:.2f} times the {single:.1f} of one alone"
        )
    round_ms = tpot_ms * tokens_per_step
    if p99_gap_ms is not None and p99_gap_ms > HIGH_GAP_RATIO * round_ms:
        reasons.append(
            f"the P99 token gap is {p99_gap_ms:.1f} ms, {p99_gap_ms / round_ms:.1f} "
            f"times a round of {round_ms:.2f} ms"
        )
    if not reasons:
        return None
    return Finding(
        code="scheduling",
        strategy=name,
        reason="; ".join(reasons),
        instruction=(
            "look at scheduling: batch requests continuously, prefill in smaller "
            "chunks between steps, spend less verification under load"
        ),
    )


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

    findings = []
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
            num_rounds_finding(name, tpot_ms, tokens_per_step, prefill_ms, length)
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
        verdict=verdict(best, rankings, plain),
        findings=tuple(f for f in findings if f is not None),
        rankings=tuple(rankings),
    )


def verdict(best: Ranking | None, rankings: Sequence[Ranking], plain: Baseline) -> str:
    """The sentences that open a report."""
    if best is None:
        lines = [f"Use {plain.kind} decoding: {plain.tpot_ms:.2f} ms a token."]
    else:
        lines = [f"Use {best.strategy}: {best.reason}."]
        k = best.best_draft_length
        if k:
            lines.append(
                f"Best draft length {k}: predicted "
                f"{best.predicted_tpot_ms[k]:.2f} ms a token, measured "
                f"{best.measured_tpot_ms:.2f}."
            )
    for ranking in rankings:
        if ranking.action == "turn_off":
            lines.append(f"Turn {ranking.strategy} off: {ranking.reason}.")
        if ranking.action == "not_ranked":
            lines.append(f"{ranking.strategy} is not ranked: {ranking.reason}.")
    return "\n".join(lines)
