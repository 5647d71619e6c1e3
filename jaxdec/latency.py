"""How long a request waited for what: records of serving, and what follows from them.

Every quantity has one definition, in seconds of one clock, real or simulated:

    queue wait    admission - arrival. Admitted is who first gets a row to be read into.
    TTFT          time of the first token - arrival.
    token gap     time between two bursts of tokens of a request; the tokens of a step
                  come together. Gaps in which it gave way to another are no gaps of a
                  *running* request, and are listed apart.
    TPOT          (last burst - first burst) / tokens after the first burst
    span          first arrival to last burst of all requests together
    throughput    tokens of all requests / span
    goodput       requests per second of the span that finished within an `Objective`

Of several requests, TPOT is the sum of times over the sum of tokens, and percentiles of
gaps are over all gaps of all of them.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxdec.counts import ratio
from jaxdec.types import FinishReason


class Burst(NamedTuple):
    """What a step committed of a request."""

    time_s: float
    num_tokens: int
    num_drafted: int = 0
    num_accepted: int = 0


@dataclasses.dataclass(kw_only=True)
class Record:
    """What happened to a request, and when."""

    id: int
    arrival_s: float
    prompt_length: int = 0
    admitted_s: float | None = None
    """When it first got a row."""
    bursts: list[Burst] = dataclasses.field(default_factory=list)
    interruptions_s: list[float] = dataclasses.field(default_factory=list)
    """When it gave way to another request."""
    finished_s: float | None = None
    finish: FinishReason = FinishReason.NONE

    @property
    def is_done(self) -> bool:
        """Whether nothing more will happen."""
        return self.finish != FinishReason.NONE

    @property
    def num_tokens(self) -> int:
        """Tokens said."""
        return sum(burst.num_tokens for burst in self.bursts)

    @property
    def queue_wait_s(self) -> float | None:
        """Arrival to admission; None if it never was admitted."""
        return None if self.admitted_s is None else self.admitted_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token; None without one."""
        return self.bursts[0].time_s - self.arrival_s if self.bursts else None

    @property
    def decode_s(self) -> float:
        """First burst to last."""
        return self.bursts[-1].time_s - self.bursts[0].time_s if self.bursts else 0.0

    @property
    def num_later_tokens(self) -> int:
        """Tokens after the first burst."""
        return sum(burst.num_tokens for burst in self.bursts[1:])

    @property
    def tpot_s(self) -> float | None:
        """Time per token after the first burst; None if there are no more."""
        return ratio(self.decode_s, self.num_later_tokens)

    @property
    def token_gaps_s(self) -> tuple[float, ...]:
        """Between bursts, while it was running."""
        return self._gaps(is_interrupted=False)

    @property
    def interrupted_gaps_s(self) -> tuple[float, ...]:
        """Between bursts before and after it gave way."""
        return self._gaps(is_interrupted=True)

    def _gaps(self, is_interrupted: bool) -> tuple[float, ...]:
        times = [burst.time_s for burst in self.bursts]
        return tuple(
            after - before
            for before, after in zip(times[:-1], times[1:], strict=True)
            if any(before <= t < after for t in self.interruptions_s) == is_interrupted
        )


class Objective(NamedTuple):
    """What a request must keep to count as good; by default anything does."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf

    def is_met(self, record: Record) -> bool:
        """Whether a request was answered in full, and in time."""
        is_answered = record.is_done and record.finish not in (
            FinishReason.CANCELLED,
            FinishReason.NONFINITE,
        )
        if not is_answered or record.ttft_s is None or record.ttft_s > self.ttft_s:
            return False
        return record.tpot_s is None or record.tpot_s <= self.tpot_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latency:
    """Figures of many requests; None where there is nothing to count."""

    finished: int
    """Requests that were answered in full."""
    queue_wait_ms: float | None
    """Mean."""
    ttft_ms: float | None
    """Mean."""
    tpot_ms: float | None
    p50_token_gap_ms: float | None
    p95_token_gap_ms: float | None
    p99_token_gap_ms: float | None
    max_token_gap_ms: float | None
    throughput_tokens_per_s: float | None
    goodput: float | None
    """Requests per second that met the objective."""


def span(records: Sequence[Record]) -> float:
    """Seconds from first arrival to last burst; 0 where nobody said anything."""
    last = [record.bursts[-1].time_s for record in records if record.bursts]
    return max(last) - min(r.arrival_s for r in records) if last else 0.0


def summarise(
    records: Sequence[Record],
    objective: Objective | None = None,
    span_s: float | None = None,
) -> Latency:
    """The figures of requests.

    Args:
        records: what happened to them.
        objective: what counts as good.
        span_s: what rates are per; None is the span of requests that were served
            together. Of several runs it is the sum of their spans.
    """
    objective = Objective() if objective is None else objective
    gaps = np.array([gap for record in records for gap in record.token_gaps_s])
    span_s = span(records) if span_s is None else span_s

    def mean_ms(values) -> float | None:
        known = [value for value in values if value is not None]
        return 1000 * float(np.mean(known)) if known else None

    def percentile_ms(q: int) -> float | None:
        return 1000 * float(np.percentile(gaps, q)) if gaps.size else None

    later = sum(record.num_later_tokens for record in records)
    decode_ms = 1000 * sum(r.decode_s for r in records if r.num_later_tokens)
    return Latency(
        finished=sum(Objective().is_met(record) for record in records),
        queue_wait_ms=mean_ms(record.queue_wait_s for record in records),
        ttft_ms=mean_ms(record.ttft_s for record in records),
        tpot_ms=ratio(decode_ms, later),
        p50_token_gap_ms=percentile_ms(50),
        p95_token_gap_ms=percentile_ms(95),
        p99_token_gap_ms=percentile_ms(99),
        max_token_gap_ms=percentile_ms(100),
        throughput_tokens_per_s=ratio(sum(r.num_tokens for r in records), span_s),
        goodput=ratio(sum(objective.is_met(record) for record in records), span_s),
    )
