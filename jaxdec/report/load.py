"""A load test as a report: JSON values, a table, and plots.

Plots need matplotlib, which the package does without: ``pip install 'jaxdec[plots]'``.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Report = Mapping[str, Any]

HEADERS = (
    "\npolicy",
    "\nclock",
    "\nfinished",
    "queue wait\nms",
    "TTFT\nms",
    "TPOT\nms",
    "gap P50\nms",
    "gap P95\nms",
    "gap P99\nms",
    "bound\nms",
    "tokens\n/s",
    "good\nrequests/s",
)
"""Titles of the columns of `rows`."""
_COLUMNS = (
    ("queue_wait_ms", ".0f"),
    ("ttft_ms", ".0f"),
    ("tpot_ms", ".1f"),
    ("p50_token_gap_ms", ".1f"),
    ("p95_token_gap_ms", ".1f"),
    ("p99_token_gap_ms", ".1f"),
    ("token_gap_bound_ms", ".1f"),
    ("throughput_tokens_per_s", ".1f"),
    ("goodput", ".2f"),
)
SWEEP_HEADERS = (
    "\nrequests/s",
    "\ndrafts",
    "tokens\n/s",
    "TTFT\nms",
    "TPOT\nms",
    "gap P99\nms",
    "good\nrequests/s",
)


def rows(report: Report) -> list[tuple[str, ...]]:
    """A row a policy and clock, under `HEADERS`; and one of all together."""

    def row(name: str, clock: str, found: Report) -> tuple[str, ...]:
        cells = (_cell(found[key], form) for key, form in _COLUMNS)
        return (name, clock, str(found["finished"]), *cells)

    clock = report["settings"]["clock"]
    lines = []
    for name, found in report["policies"].items():
        lines.append(row(name, clock, found))
        if "simulated" in found:
            lines.append(row(name, "simulated", found["simulated"]))
    if len(report["policies"]) > 1:
        lines.append(row("all", clock, report))
    return lines


def sweep_rows(report: Report) -> list[tuple[str, ...]]:
    """A row a rate and kind of speculation, under `SWEEP_HEADERS`."""
    keys = ("throughput_tokens_per_s", "ttft_ms", "tpot_ms", "p99_token_gap_ms")
    return [
        (
            f"{point['rate']:g}",
            kind,
            *(_cell(point[kind][key], ".1f") for key in keys),
            _cell(point[kind]["goodput"], ".2f"),
        )
        for point in report["sweep"]
        for kind in point
        if kind != "rate"
    ]


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def check_plots() -> None:
    """Raises ValueError where plots cannot be drawn, before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "plots need matplotlib, which is not installed; pip install "
            "'jaxdec[plots]', or leave --plots out and draw from --json"
        )


def plot(report: Report, folder: Path) -> list[Path]:
    """Draws what there is to draw into a folder; returns the files.

    gaps.png: P99 of the gap between tokens against load, with the bound.
    throughput.png: tokens per second against load, for every kind of speculation.
    draft_length.png: draft tokens of a request's step over time.
    """
    check_plots()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    if report["sweep"]:
        curves = [
            (kind, [p["rate"] for p in report["sweep"]], kind)
            for kind in report["sweep"][0]
            if kind != "rate"
        ]

        def of(key: str) -> list[tuple[str, list[float], list[float | None]]]:
            return [
                (name, rates, [point[kind][key] for point in report["sweep"]])
                for name, rates, kind in curves
            ]

        written.append(
            _draw(
                folder / "gaps.png",
                of("p99_token_gap_ms"),
                ("requests per second", "P99 of the gap between tokens, ms"),
                is_log=True,
                bound=report["token_gap_bound_ms"],
            )
        )
        written.append(
            _draw(
                folder / "throughput.png",
                of("throughput_tokens_per_s"),
                ("requests per second", "tokens per second"),
                is_log=True,
            )
        )
    lines = [
        (name, [p["time_s"] for p in line], [p["draft_length"] for p in line])
        for name, line in (
            (name, found["timeline"]) for name, found in report["policies"].items()
        )
        if line
    ]
    if lines:
        written.append(
            _draw(
                folder / "draft_length.png",
                lines,
                ("seconds", "draft tokens of a request's step"),
            )
        )
    return written


def _draw(
    path: Path,
    curves: Sequence[tuple[str, Sequence[float], Sequence[float | None]]],
    labels: tuple[str, str],
    *,
    is_log: bool = False,
    bound: float | None = None,
) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, x, y in curves:
        axes.plot(x, [float("nan") if v is None else v for v in y], "o-", label=name)
    if bound is not None:
        axes.axhline(bound, color="black", linestyle="--", label="bound")
    if is_log:
        axes.set_xscale("log")
        rates = curves[0][1]
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.legend()
    figure.savefig(path, dpi=150)
    return path
