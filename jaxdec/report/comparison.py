"""The record of a comparison: what ``report.json`` holds, and what follows from it."""

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdec import advice
from jaxdec.certificate import Certificate
from jaxdec.concurrency import Together
from jaxdec.evidence import Evidence, jsonable
from jaxdec.planning.bandwidth import Floor
from jaxdec.report.page import html
from jaxdec.report.plots import plot
from jaxdec.report.tables import markdown
from jaxdec.statistics import REPETITIVE, is_repetitive
from jaxdec.strategies import StrategyConfig

NUM_SEEDS = 3
"""Seeds whose outputs `distinct_outputs` tells apart."""

NOTES = (
    "A strategy that drafts nothing has acceptance rate 0 and no acceptance by "
    "position: nothing was accepted, since nothing was drafted.",
    "conditional_acceptance_by_position ends at the last position that was reached.",
    "exact_match is the share of outputs whose tokens equal plain decoding's at the "
    "same temperature and seed (for plain decoding itself: its own first run), or that "
    "part from them at a rounding tie which the certificate names.",
    "repetition_rate is 0 where no output is long enough to repeat four tokens.",
    f"not repetitive: outputs of which at most {REPETITIVE:.0%} of the 4-grams "
    "occurred before; an output that goes in circles is easy to draft.",
    "format_success_rate without an asked format: texts with something in them and no "
    "replacement character.",
    f"distinct_outputs counts the different outputs of the first prompt over "
    f"{NUM_SEEDS} seeds; at temperature 0 the seed is not used, so it is 1.",
    "A strategy that ends every answer in its first step ('1 step' in place of TPOT) "
    "has no time per token, so it cannot be ranked.",
    "Costs per step are measured alone, after the run; drafting, verifying and the "
    "rest need not add up to the round.",
    "Sampling changes what is said, not how fast, so 'sample' is not ranked.",
    "The floor of a plain step is the time in which this machine reads the weights and "
    "the KV state once. The requests of 'together' are the first ones, decoded as one "
    "batch by the strategy that is advised.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One strategy of a comparison."""

    label: str
    """Its name in the report: the strategy's, with K where one is listed twice."""
    config: StrategyConfig
    temperature: float
    reference: str
    """Label of the plain decoding that it must equal."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a comparison found."""

    model: Mapping[str, Any]
    """Name, family, size, dtype and hash of the model."""
    settings: Mapping[str, Any]
    """What all strategies had in common: options, prompts, device, notes."""
    entries: tuple[Entry, ...]
    """The strategies, in the order in which they are reported."""
    evidence: Mapping[str, Evidence]
    """By label."""
    certificates: Mapping[str, Certificate]
    """By label; empty if none was asked for."""
    advice: advice.Advice
    floor: Floor
    together: Together | None
    """None where there are not two requests to run at once."""
    requests: Mapping[str, tuple[Mapping[str, Any], ...]]
    """By label, what the report adds to each request: prompt and text."""

    def to_dict(self) -> dict[str, Any]:
        """The report: plain JSON values, the counts of every request among them."""
        return self._report

    @functools.cached_property
    def _report(self) -> dict[str, Any]:
        return {
            "model": dict(self.model),
            "settings": dict(self.settings),
            "strategies": [self._strategy(entry) for entry in self.entries],
            "certificates": {
                label: certificate.to_dict()
                for label, certificate in self.certificates.items()
            },
            "floor": dataclasses.asdict(self.floor),
            "together": self.together and dataclasses.asdict(self.together),
            "advice": jsonable(self.advice.to_dict()),
        }

    def _strategy(self, entry: Entry) -> dict[str, Any]:
        evidence = self.evidence[entry.label]
        fields = evidence.to_dict()
        for record in (fields, *fields["requests"], *fields["source"].values()):
            for name in ("acceptance_rate", "repetition_rate"):
                if name in record and record[name] is None:
                    record[name] = 0.0
        for record in (fields, *fields["requests"]):
            # What is not reached at one position is reached at no later one.
            reached = record["conditional_acceptance_by_position"]
            record["conditional_acceptance_by_position"] = [
                rate for rate in reached if rate is not None
            ]
        fields["requests"] = [
            {**more, **record}
            for more, record in zip(
                self.requests[entry.label], fields["requests"], strict=True
            )
        ]
        greedy, own = self.evidence[advice.GREEDY].tpot_ms, evidence.tpot_ms
        tasks = dict.fromkeys(request["task"] for request in fields["requests"])
        return {
            "strategy": entry.label,
            "draft_length": entry.config.length,
            "temperature": entry.temperature,
            "reference": entry.reference,
            "speed_vs_greedy": greedy / own if greedy and own else None,
            "tokens_per_step_by_task": {
                task: tokens_per_step(
                    [r for r in fields["requests"] if r["task"] == task]
                )
                for task in tasks
            },
            "tokens_per_step_not_repetitive": tokens_per_step(
                [r for r in fields["requests"] if not is_repetitive(r["tokens"])]
            ),
            **fields,
        }

    def save(self, folder: str | Path) -> list[Path]:
        """Writes ``report.json``, ``report.md``, ``report.html`` and PNG figures.

        The figures need matplotlib; without it they are left out. Returns what was
        written.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        report = self.to_dict()
        text = json.dumps(report, allow_nan=False, ensure_ascii=False)
        written = []
        for name, content in (
            ("report.json", text + "\n"),
            ("report.md", markdown(report)),
            ("report.html", html(report)),
        ):
            (folder / name).write_text(content, encoding="utf-8")
            written.append(folder / name)
        return written + plot(report, folder)


def tokens_per_step(requests: Sequence[Mapping[str, Any]]) -> float:
    """Of some requests together; 0 for none."""
    steps = sum(request["num_steps"] for request in requests)
    return sum(request["num_emitted"] for request in requests) / max(steps, 1)


def recommend(
    entries: Sequence[Entry],
    evidence: Mapping[str, Evidence],
    certificates: Mapping[str, Certificate],
    *,
    floor: Floor | None = None,
    together: Together | None = None,
) -> advice.Advice:
    """The advice that the evidence and the certificates support.

    Args:
        entries: what was compared.
        evidence: of each, by label.
        certificates: of each, by label.
        floor: of a plain step, for advice on its time.
        together: requests run at once, for advice on scheduling.

    Raises:
        ValueError: plain decoding has no time per token.
    """
    name = baseline(entries)
    plain = evidence[name]
    if plain.tpot_ms is None:
        raise ValueError(
            f"{name} decoding ended every answer at its first token, so there is no "
            "time per token to compare; use other prompts, or a higher max_new_tokens"
        )
    return advice.advise(
        dict(_measured(entries, evidence, certificates)),
        plain_tpot_ms=plain.tpot_ms,
        baseline=name,
        untimed=[
            entry.label
            for entry in entries
            if entry.config.length and evidence[entry.label].tpot_ms is None
        ],
        prefill_ms=max(1000 * plain.ttft_s - plain.tpot_ms, 0.0),
        output_lengths=[request.output_length for request in plain.requests],
        step_ms={
            entry.label: step_times(evidence[entry.label])
            for entry in entries
            if evidence[entry.label].tpot_ms is not None
        },
        floor_ms=None if floor is None else floor.floor_ms,
        num_requests=1 if together is None else together.num_requests,
        throughput_tokens_per_s=None
        if together is None
        else together.throughput_tokens_per_s,
        p99_gap_ms=None if together is None else together.p99_gap_ms,
    )


def baseline(entries: Sequence[Entry]) -> str:
    """The plain decoding that the drafting strategies are measured against."""
    return next((e.reference for e in entries if e.config.length), advice.GREEDY)


def _measured(
    entries: Sequence[Entry],
    evidence: Mapping[str, Evidence],
    certificates: Mapping[str, Certificate],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the advice needs of each strategy that drafts and was timed."""
    plain_verify_ms = evidence[baseline(entries)].verify_cost_ms
    for entry in entries:
        record, length = evidence[entry.label], entry.config.length
        if not length or record.tpot_ms is None:
            continue
        certificate = certificates.get(entry.label)
        reasons = ("no certificate was drawn up",)
        if certificate is not None:
            reasons = certificate.reasons
        yield (
            entry.label,
            {
                "certified": certificate is not None and certificate.passed,
                "certificate_reasons": reasons,
                "tpot_ms": record.tpot_ms,
                "tokens_per_step": record.tokens_per_step,
                "draft_length": length,
                "judged_per_step": record.num_judged / record.num_steps,
                "acceptance_rate": record.acceptance_rate,
                "conditional_acceptance_by_position": survival(record, length),
                "draft_cost_ms": record.draft_cost_ms,
                "is_block": entry.config.drafts_at_once,
                "is_tree": entry.config.is_tree,
                "verify_cost_ms": {0: plain_verify_ms, length: record.verify_cost_ms},
            },
        )


def step_times(record: Evidence) -> list[float]:
    """Mean time in ms of each request's steps after its first.

    Of requests that took 0.1 s at least: less is at the mercy of the clock.
    """
    times = []
    for request in record.requests:
        emitted = request.steps.num_emitted[1:]
        spent = (request.tpot_ms or 0.0) * sum(emitted)
        if spent >= 100:
            times.append(spent / len(emitted))
    return times


def survival(record: Evidence, length: int) -> list[float]:
    """Of the steps that accepted i draft tokens, the share that accepted one more.

    A step that drafted too few counts as one that did not, so that the expected tokens
    of a step at K are those that were measured, also for drafters of varying length.
    """
    accepted = [n for request in record.requests for n in request.steps.num_accepted]
    rates, reached = [], len(accepted)
    for i in range(length):
        more = sum(n > i for n in accepted)
        rates.append(more / reached if reached else 0.0)
        reached = more
    return rates
