"""What a run measured: one record of counts, times, costs and quality.

"Faster" means more committed tokens per step, not fewer model calls. The central figure
is `tokens_per_step`, and the record keeps it beside everything that could contradict
it. The counts are defined in `jaxdec.counts`. Every total is computed from the step
lists that each request keeps, so merging runs is exact: rates are never averaged.

Times are of warm programs: compilation is reported apart and is part of no other
figure. The first segment is prefill and one step; it ends at `ttft_s`, and `tpot_ms`
leaves its tokens out.
"""

import collections
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxdec import statistics
from jaxdec.counts import (
    Counts,
    Number,
    RequestSteps,
    count_by_source,
    count_steps,
    ratio,
    request_steps,
)
from jaxdec.types import FinishReason, StepInfo


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestEvidence(Counts):
    """One request of a run."""

    steps: RequestSteps
    finish_reason: str
    prompt_length: int
    output_length: int
    ttft_s: float | None = None
    tpot_ms: float | None = None
    e2e_s: float | None = None
    tokens: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    exact_match: bool | None = None
    """Whether the tokens equal the reference's."""
    format_success: bool | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a run knows besides its steps; all of it is passed in."""

    e2e_s: Number | None = None
    """Wall clock of the run: all requests, prefill included, compilation not."""
    compile_s: Number | None = None
    num_compilations: Number | None = None
    draft_cost_ms: Number | None = None
    """Time of one `propose` and `extend`, per step."""
    verify_cost_ms: Number | None = None
    """Time of one target forward over a draft, its acceptance and commit, per step."""
    kv_bytes_read: Number | None = None
    """By all steps together; see `kv_bytes`."""
    kv_bytes_written: Number | None = None
    drafter_param_bytes: Number | None = None
    """The drafter's own weights; what it shares with the target is not counted."""
    drafter_state_bytes: Number | None = None
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    hashes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Of checkpoints, tokenizer and prompts."""
    seed: int | tuple[int, ...] | None = None
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    proposal_mode: str | None = None
    """How drafts are made: none, lookup, chain, tree, block, or a mixture."""
    proposal_budget: str | None = None
    """What decides how many draft tokens are judged."""
    tree_width: int | None = None
    """Children that a node of a draft tree is given; 1 for a chain."""
    tree_depth: int | None = None
    """Longest path of a draft, in tokens."""
    num_native_modules: int | None = None
    """MTP modules of the target that ran; 0 for other drafters."""
    pairing: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What the drafter is, and what ties it to this target."""
    sources: tuple[str, ...] = ()
    """Names of the drafters that `draft_source` numbers."""
    has_confidence: tuple[bool, ...] = ()
    """Which of them estimate how likely their tokens are accepted; empty: all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence(Counts, RunFacts):
    """The evidence of a run, or of several merged ones."""

    ttft_s: float | None
    """Mean over requests: call to first token."""
    tpot_ms: float | None
    """Time after the first segment over the tokens after it, summed over requests."""
    throughput_tokens_per_s: float | None
    """Emitted tokens of all requests per second of `e2e_s`."""
    cache_length: int | None
    """Most live cache entries of a request at its end: one per token but the last."""
    finish_reasons: Mapping[str, int]
    """How many requests ended for each reason."""
    exact_match: float | None
    """Share of the requests whose tokens equal the reference's, from 0 to 1."""
    perplexity: float | None
    """Of the output under the target, ``exp`` of the mean negative log-probability."""
    repetition_rate: float | None
    """Of 4-grams; see `statistics.repetition_rate`."""
    format_success_rate: float | None
    """Share of the texts that have the format asked for, from 0 to 1."""
    distinct_outputs: int | None
    """How many different outputs there are."""
    source: Mapping[str, Mapping[str, Any]]
    """What each of `sources` contributed; see `counts.count_by_source`."""
    calibration_error: float | None
    """Of the drafter's confidence; None where it has none. See `statistics`."""
    requests: tuple[RequestEvidence, ...]
    """The same figures of each request, and its steps."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-valid values; a number that is not finite becomes None."""
        return jsonable(dataclasses.asdict(self))

    def to_json(self, indent: int | None = None) -> str:
        """Strict JSON: no NaN, no Infinity."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)


def jsonable(value: Any) -> Any:
    """Turns NumPy values, mappings and tuples into what JSON can hold."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return jsonable(value.tolist())
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def collect(
    info: StepInfo,
    *,
    prompt_length: Int[np.ndarray, "B"],
    finish: Int[np.ndarray, "B"],
    facts: RunFacts | None = None,
    ttft_s: Sequence[float] | None = None,
    request_e2e_s: Sequence[float] | None = None,
    tokens: Sequence[Sequence[int]] | None = None,
    logprobs: Sequence[Sequence[float]] | None = None,
    references: Sequence[Sequence[int]] | None = None,
    texts: Sequence[str] | None = None,
    output_format: str | None = None,
) -> Evidence:
    """Makes the record of one batch.

    Args:
        info: Leaves ``[B, steps, ...]``, after `cut` where a stop string ended a row.
        prompt_length: Tokens.
        finish: `FinishReason` of each row.
        facts: What the run knows besides.
        ttft_s: Of each request: call to the end of its first segment.
        request_e2e_s: Of each request: call to its last token.
        tokens: Output tokens of each request.
        logprobs: Of each output token, in nats.
        references: Plain decoding's tokens, for `exact_match`.
        texts: Of each request, for `format_success_rate`.
        output_format: See `statistics.is_well_formed`; needed with `texts`.
    """
    if (texts is None) != (output_format is None):
        raise ValueError(
            "the format check needs both texts and output_format, got one of them; "
            "pass both or none."
        )
    if references is not None and tokens is None:
        raise ValueError("references are compared with tokens; pass tokens too.")
    info = StepInfo(**{k: np.asarray(v) for k, v in vars(info).items()})
    requests = []
    for row in range(info.is_live.shape[0]):
        steps = request_steps(info, row)
        counts = count_steps([steps])
        if tokens is not None and len(tokens[row]) != counts.num_emitted:
            raise ValueError(
                f"row {row} returns {len(tokens[row])} tokens but its steps emitted "
                f"{counts.num_emitted}; cut tokens and steps at one index (`cut`)."
            )
        # A request that asks for no tokens takes no step and has no times.
        ran = counts.num_steps > 0
        first = float(ttft_s[row]) if ran and ttft_s is not None else None
        last = float(request_e2e_s[row]) if ran and request_e2e_s is not None else None
        later = sum(steps.num_emitted[1:])
        timed = first is not None and last is not None
        requests.append(
            RequestEvidence(
                **vars(counts),
                steps=steps,
                finish_reason=FinishReason(int(finish[row])).label,
                prompt_length=int(prompt_length[row]),
                output_length=counts.num_emitted,
                ttft_s=first,
                tpot_ms=ratio(1000 * (last - first), later) if timed else None,
                e2e_s=last,
                tokens=None if tokens is None else tuple(map(int, tokens[row])),
                logprobs=None if logprobs is None else tuple(map(float, logprobs[row])),
                exact_match=None
                if references is None
                else [int(t) for t in tokens[row]] == [int(t) for t in references[row]],
                format_success=None
                if texts is None
                else statistics.is_well_formed(texts[row], output_format),
            )
        )
    return summarise(requests, RunFacts() if facts is None else facts)


def summarise(requests: Sequence[RequestEvidence], facts: RunFacts) -> Evidence:
    """Totals of requests, each computed from the requests' own counts."""
    counts = count_steps([r.steps for r in requests])
    ttfts = [r.ttft_s for r in requests if r.ttft_s is not None]
    timed = [r for r in requests if r.tpot_ms is not None]
    later_ms = sum(1000 * (r.e2e_s - r.ttft_s) for r in timed)
    later_tokens = sum(sum(r.steps.num_emitted[1:]) for r in timed)
    tokens = [r.tokens for r in requests if r.tokens is not None]
    repetitions = [statistics.count_repetitions(t) for t in tokens]
    logprobs = [x for r in requests if r.logprobs is not None for x in r.logprobs]
    matches = [r.exact_match for r in requests if r.exact_match is not None]
    formats = [r.format_success for r in requests if r.format_success is not None]
    return Evidence(
        **vars(counts),
        **vars(facts),
        ttft_s=ratio(sum(ttfts), len(ttfts)),
        tpot_ms=ratio(later_ms, later_tokens),
        throughput_tokens_per_s=ratio(counts.num_emitted, facts.e2e_s or 0),
        cache_length=max(
            (r.prompt_length + r.output_length - 1 for r in requests), default=None
        ),
        finish_reasons=dict(collections.Counter(r.finish_reason for r in requests)),
        exact_match=ratio(sum(matches), len(matches)),
        perplexity=statistics.perplexity(logprobs),
        repetition_rate=ratio(
            sum(repeated for repeated, _ in repetitions),
            sum(total for _, total in repetitions),
        ),
        format_success_rate=ratio(sum(formats), len(formats)),
        distinct_outputs=statistics.distinct_outputs(tokens) if tokens else None,
        source=count_by_source([r.steps for r in requests], facts.sources),
        calibration_error=_calibration([r.steps for r in requests], facts),
        requests=tuple(requests),
    )


SAME = (
    "versions",
    "hashes",
    "sampling",
    "drafter_param_bytes",
    "proposal_mode",
    "proposal_budget",
    "tree_width",
    "tree_depth",
    "num_native_modules",
    "pairing",
    "sources",
    "has_confidence",
)
"""What runs must agree in to be merged."""


def merge(evidences: Sequence[Evidence]) -> Evidence:
    """One record of several runs of the same strategy, one after another.

    Counts, times, bytes and compilations add up; ratios are computed anew from the
    requests; costs per step are weighted by steps. What must not differ between the
    runs (versions, hashes, sampling, drafter weights) is checked; seeds that differ
    are listed in order. A figure that one run lacks is None.
    """
    if not evidences:
        raise ValueError("merge needs at least one record, got none; run first.")
    same = {}
    for name in SAME:
        values = [getattr(e, name) for e in evidences]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"merged runs must agree in {name}, got {values}; merge only runs of "
                "one strategy on the same models."
            )
        same[name] = values[0]

    def total(name, combine=sum):
        values = [getattr(e, name) for e in evidences]
        return None if None in values else combine(values)

    def per_step(name):
        values = [getattr(e, name) for e in evidences]
        steps = [e.num_steps for e in evidences]
        if None in values:
            return None
        return ratio(np.dot(values, steps), sum(steps))

    seeds = [e.seed for e in evidences]
    if all(seed == seeds[0] for seed in seeds):
        seed = seeds[0]
    else:
        parts = [s if isinstance(s, tuple) else (s,) for s in seeds]
        seed = tuple(s for part in parts for s in part)
    facts = RunFacts(
        **same,
        seed=seed,
        e2e_s=total("e2e_s"),
        compile_s=total("compile_s"),
        num_compilations=total("num_compilations"),
        draft_cost_ms=per_step("draft_cost_ms"),
        verify_cost_ms=per_step("verify_cost_ms"),
        kv_bytes_read=total("kv_bytes_read"),
        kv_bytes_written=total("kv_bytes_written"),
        drafter_state_bytes=total("drafter_state_bytes", max),
    )
    return summarise([r for e in evidences for r in e.requests], facts)


def _calibration(steps: Sequence[RequestSteps], facts: RunFacts) -> float | None:
    """Calibration error of the confidences in these steps; None if there are none."""

    def counts(source):
        return not facts.has_confidence or facts.has_confidence[source]

    rows = [
        (confidence, judged, accepted)
        for s in steps
        for confidence, judged, accepted, source in zip(
            s.draft_confidence,
            s.num_judged,
            s.num_accepted,
            s.draft_source,
            strict=True,
        )
        if counts(source) and any(confidence)
    ]
    if not rows:
        return None
    return statistics.calibration_error(*zip(*rows, strict=True))
