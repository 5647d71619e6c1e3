"""Many requests in pictures: load, the tail of token gaps, and whose turn it is."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxdec import load_run, speculation
from jaxdec.counts import Number
from jaxdec.course.display import LINES, Picture, Table, canvas
from jaxdec.course.drafting import MARKS
from jaxdec.latency import Objective, Record
from jaxdec.report.tables import Record as Report
from jaxdec.serving_costs import Profile

KINDS = (*load_run.SPECULATION, "plain")


def max_rate(setup: load_run.Setup, profile: Profile) -> float:
    """Requests per second at which all slots are always busy, without any queue.

    Above it a queue grows without end. With the draft length that is best there.
    """
    num = setup.num_slots
    length = speculation.best_lengths(profile.costs, profile.acceptance)[num - 1]
    rate = speculation.tokens_per_second(profile.costs, profile.acceptance, num, length)
    arrivals = setup.draw()
    tokens = np.mean([arrival.output_length for arrival in arrivals])
    chunks = np.mean([-(-a.prompt_length // setup.prefill_chunk) for a in arrivals])
    # A chunk goes between two steps, so reading prompts takes time from all.
    return float(1 / (tokens / rate + chunks * profile.costs.chunk_s))


def at_rate(setup: load_run.Setup, rate: Number) -> load_run.Setup:
    """The same load, with so many requests per second."""
    return dataclasses.replace(
        setup, traffic=dataclasses.replace(setup.traffic, rate=rate)
    )


def latency_table(runs: Mapping[str, Sequence[Record]], profile: Profile) -> Table:
    """How long requests waited for what, a row a run."""
    bound, _ = load_run.bound_ms(profile)
    rows = []
    for label, records in runs.items():
        found = load_run.figures([records], Objective(), bound)
        rows.append(
            (
                label,
                found["finished"],
                found["queue_wait_ms"],
                found["ttft_ms"],
                found["tpot_ms"],
                found["p50_token_gap_ms"],
                found["p99_token_gap_ms"],
                found["max_token_gap_ms"],
                bound,
                found["throughput_tokens_per_s"],
            )
        )
    titles = (
        "run",
        "finished",
        "queue ms",
        "TTFT ms",
        "TPOT ms",
        "gap P50",
        "gap P99",
        "longest gap",
        "bound ms",
        "tokens/s",
    )
    return Table(titles, rows)


def draw_gaps(
    runs: Mapping[str, Sequence[Record]], profile: Profile, title: str = "token gaps"
) -> Picture:
    """The share of token gaps that are at most so long, a curve a run; and P99."""
    bound, _ = load_run.bound_ms(profile)
    figure, axes = canvas()
    for i, (label, records) in enumerate(runs.items()):
        gaps = np.sort([1000 * gap for r in records for gap in r.token_gaps_s])
        if not gaps.size:
            continue
        shares = np.arange(1, gaps.size + 1) / gaps.size
        axes.step(gaps, shares, where="post", color=LINES[i % len(LINES)], label=label)
    axes.axhline(0.99, color="gray", linestyle=":")
    axes.annotate("P99", (0, 0.99), xytext=(2, -10), textcoords="offset points")
    if bound is not None:
        axes.axvline(bound, color="black", linestyle="--", label="bound")
    axes.set_xlabel("gap between two tokens, ms")
    axes.set_ylabel("share of gaps")
    axes.set_title(title)
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.02)
    axes.legend(loc="lower right")
    return Picture(figure, f"{title}: {', '.join(runs)}")


def draw_requests(records: Sequence[Record], title: str) -> Picture:
    """A line a request: waiting, reading its prompt, and when it said tokens."""
    figure, axes = canvas(width=7.0, height=max(2.4, 0.18 * len(records) + 1.2))
    start = min(record.arrival_s for record in records)
    for line, record in enumerate(records):
        admitted = record.arrival_s if record.admitted_s is None else record.admitted_s
        times = [burst.time_s - start for burst in record.bursts]
        axes.barh(
            line,
            admitted - record.arrival_s,
            0.5,
            left=record.arrival_s - start,
            color="#f0b9b4",
        )
        if times:
            axes.barh(
                line,
                times[-1] - admitted + start,
                0.5,
                left=admitted - start,
                color="#d7e6f5",
            )
            axes.plot(times, [line] * len(times), "|", color=LINES[0], markersize=6)
    axes.set_xlabel("seconds (red: in the queue; marks: tokens)")
    axes.set_ylabel("request")
    axes.set_title(title)
    axes.invert_yaxis()
    return Picture(figure, f"{title}: {len(records)} requests over time")


def sweep_table(sweep: Sequence[Report]) -> Table:
    """The points of `jaxdec.load_run.sweep`, a row a rate and kind of drafting."""
    rows = [
        (
            round(point["rate"], 3),
            kind,
            point[kind]["throughput_tokens_per_s"],
            point[kind]["ttft_ms"],
            point[kind]["tpot_ms"],
            point[kind]["p99_token_gap_ms"],
        )
        for point in sweep
        for kind in KINDS
        if kind in point
    ]
    titles = ("requests/s", "drafts", "tokens/s", "TTFT ms", "TPOT ms", "gap P99 ms")
    return Table(titles, rows, "on the simulated clock, with the measured costs")


def draw_sweep(sweep: Sequence[Report], bound_ms: Number | None = None) -> Picture:
    """Throughput, TTFT and P99 gap over the load, a curve a kind of drafting."""
    figure, panels = canvas(3, width=11.0)
    keys = ("throughput_tokens_per_s", "ttft_ms", "p99_token_gap_ms")
    names = ("tokens per second", "TTFT, ms", "P99 of token gaps, ms")
    rates = [point["rate"] for point in sweep]
    for i, kind in enumerate(k for k in KINDS if sweep and k in sweep[0]):
        for axes, key in zip(panels, keys, strict=True):
            values = [point[kind][key] or float("nan") for point in sweep]
            axes.plot(rates, values, f"{MARKS[i]}-", color=LINES[i], label=kind)
    for axes, name in zip(panels, names, strict=True):
        axes.set_xlabel("requests per second")
        axes.set_ylabel(name)
    if bound_ms is not None:
        panels[2].axhline(bound_ms, color="black", linestyle="--", label="bound")
    panels[0].set_ylim(bottom=0)
    panels[1].set_yscale("log")
    panels[2].set_ylim(bottom=0)
    panels[2].legend()
    return Picture(figure, "throughput, TTFT and P99 of token gaps over the load")


def length_table(profile: Profile) -> Table:
    """By how many requests run: the best draft length, and tokens per second."""
    costs, acceptance = profile.costs, profile.acceptance
    best = speculation.best_lengths(costs, acceptance)
    rows = []
    for num, length in enumerate(best, start=1):

        def rate(k, num=num):
            return speculation.tokens_per_second(costs, acceptance, num, k)

        rows.append((num, length, rate(length), rate(0), rate(acceptance.length)))
    titles = ("running", "best length", "tokens/s there", "without", "with all")
    return Table(titles, rows)


def draw_lengths(table: Table) -> Picture:
    """`length_table`: tokens per second of best, no and full drafts."""
    figure, axes = canvas()
    for i, title in enumerate(table.titles[2:]):
        style = f"{MARKS[i]}-"
        axes.plot(
            table.column("running"),
            table.column(title),
            style,
            color=LINES[i],
            label={"tokens/s there": "best length"}.get(title, f"{title} drafts"),
        )
    axes.set_xlabel("requests that run")
    axes.set_ylabel("tokens per second")
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
    return Picture(figure, "tokens per second by running requests and draft length")
