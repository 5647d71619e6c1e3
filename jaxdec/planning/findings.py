"""Findings that look past the choice of strategy, each with numbers and what to do.

    round_time    a round takes long
    num_rounds    there are too many rounds
    acceptance    drafts are refused too often
    scheduling    many requests wait for each other
    timing        the times are not to be trusted

The thresholds below are where a finding starts; they never change the verdict.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

from jaxdec.planning.break_even import Measured, Number, costs_at
from jaxdec.planning.ranking import Baseline, Ranking

HIGH_ROUND_RATIO = 2.0
"""A round is long from this many plain steps (plain: this many bandwidth floors)."""
MANY_ROUNDS_SHARE = 0.8
"""Rounds dominate when they take this share of a request's time, prefill included."""
FEW_TOKENS_PER_STEP = 1.5
"""Below it, tokens per step is what limits the number of rounds."""
HIGH_GAP_RATIO = 3.0
"""A P99 token gap is high from this many rounds (a round's tokens come together)."""
STEADY_RATIO = 1.6
"""Plain steps of one request, on average, take at most this many times those of the
median request; with drafts, whose steps differ, twice as many."""
LOW_BATCH_SPEEDUP = 1.5
"""Several requests should give this many times one request's tokens per second."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One row of advice."""

    code: Literal[
        "round_time",
        "num_rounds",
        "acceptance",
        "scheduling",
        "certificate",
        "timing",
    ]
    strategy: str
    reason: str
    """What was seen, with the numbers."""
    instruction: str


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
            f"a step takes {round_ms:.2f} ms, {round_ms / plain.tpot_ms:.2f} "
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
            f"it needs {needed:.1%} to break even"
        ),
        instruction=instruction,
    )


def timing_finding(
    step_ms: Mapping[str, Sequence[float]], plain: Sequence[str]
) -> Finding | None:
    """Steps that took very different times in different requests.

    Args:
        step_ms: by strategy, the mean time of each request's steps.
        plain: the strategies that draft nothing: all their steps cost the same.
    """
    worst, found = 1.0, None
    for name, times in step_ms.items():
        if len(times) < 2:
            continue
        middle = statistics.median(times)
        limit = STEADY_RATIO * (1 if name in plain else 2)
        if max(times) / middle / limit > worst:
            worst = max(times) / middle / limit
            found = Finding(
                code="timing",
                strategy=name,
                reason=(
                    f"steps took {min(times):.1f} to {max(times):.1f} ms on average, "
                    f"from request to request (median {middle:.1f}): something else "
                    "used the machine"
                ),
                instruction=(
                    "run it again when the machine is quiet, or with more repeats "
                    "(--repeats 3), before you choose"
                ),
            )
    return found


def num_rounds_finding(
    name: str,
    tpot_ms: Number,
    tokens_per_step: Number,
    prefill_ms: Number,
    output_length: Number,
    *,
    is_plain: bool,
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
            f"{math.ceil(output_length / tokens_per_step)} steps for "
            f"{output_length:.4g} tokens ({tokens_per_step:.2f} a step) take "
            f"{share:.0%} of the time, prefill {1 - share:.0%}"
        ),
        instruction=(
            "output length or tokens per step is the limit: ask for shorter outputs, "
            "or try "
            + (
                "speculation (lookup needs no weights; a trained drafter gives more)"
                if is_plain
                else "a drafter that is right more often, such as one trained for "
                "this target"
            )
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
            f"times a step of {round_ms:.2f} ms"
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
