"""What the figures of a comparison show, apart from how they are drawn.

`jaxdec.report.svg` draws them into a page, `jaxdec.report.plots` into PNG files. A
value that is missing is None, and is drawn as nothing.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from jaxdec.report.tables import Record, label

Number = float | int
Value = Number | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """What every figure has."""

    name: str
    """Of its file."""
    title: str
    note: str
    """How to read it, in a sentence or two."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bars(Figure):
    """A bar a strategy, of one part or of several that add up."""

    labels: tuple[str, ...]
    parts: tuple[tuple[str, tuple[Value, ...]], ...]
    """A name, and a value for every label."""
    unit: str
    best: str | None
    """The label that the advice names."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curves(Figure):
    """Shares from 0 to 1 over positions 1, 2, ..., a curve a strategy."""

    across: str
    up: str
    curves: tuple[tuple[str, tuple[Value, ...]], ...]
    order: tuple[str, ...]
    """All strategies, so that each looks alike in every figure."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One strategy."""

    label: str
    x: Number
    y: Number
    is_certified: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Points(Figure):
    """A point a strategy; both axes were measured."""

    across: str
    up: str
    points: tuple[Point, ...]
    missing: tuple[str, ...]
    """Strategies that lack one of the two."""
    order: tuple[str, ...]
    """All strategies, as in `Curves`."""


def figures(report: Record) -> list[Figure]:
    """All that a comparison has figures for."""
    return [*_bars(report), _acceptance(report), _quality(report), _costs(report)]


def _bars(report: Record) -> Iterator[Bars]:
    for key, title, unit, note in (
        (
            "tpot_ms",
            "Time per token",
            "ms",
            "TPOT: the time after the first step over the tokens after it. Less is "
            "better.",
        ),
        (
            "tokens_per_step",
            "Tokens per step",
            "",
            "What one round of the model commits; plain decoding commits 1. More is "
            "better, if a round does not cost more.",
        ),
    ):
        records = report["strategies"]
        yield Bars(
            name=key.removesuffix("_ms"),
            title=title,
            note=note,
            labels=tuple(map(label, records)),
            parts=((title, tuple(record[key] for record in records)),),
            unit=unit,
            best=_best(report),
        )


def _best(report: Record) -> str | None:
    """The label of the strategy that the advice names."""
    names = {record["strategy"]: label(record) for record in report["strategies"]}
    return names.get(report["advice"]["best"])


def _acceptance(report: Record) -> Curves:
    return Curves(
        name="acceptance",
        title="Acceptance by position",
        note="How often a draft token was accepted, of the steps that judged one at "
        "this place of the draft.",
        across="place in the draft",
        up="accepted",
        curves=tuple(
            (label(record), tuple(record["acceptance_by_position"]))
            for record in report["strategies"]
            if record["draft_length"] and record["acceptance_by_position"]
        ),
        order=tuple(map(label, report["strategies"])),
    )


def _quality(report: Record) -> Points:
    points, missing = [], []
    for record in report["strategies"]:
        x, y = record["speed_vs_greedy"], record["perplexity"]
        certificate = report["certificates"].get(record["strategy"])
        if x is None or y is None:
            missing.append(label(record))
            continue
        points.append(
            Point(
                label=label(record),
                x=x,
                y=y,
                is_certified=bool(certificate and certificate["passed"]),
            )
        )
    return Points(
        name="quality",
        title="Speed against quality",
        note="Perplexity is the target's own, of what the strategy said: strategies at "
        "one height said what the target finds equally likely. A filled mark is "
        "certified to decode as plain decoding does; an open one is not.",
        across="speed, times greedy decoding",
        up="perplexity",
        points=tuple(points),
        missing=tuple(missing),
        order=tuple(map(label, report["strategies"])),
    )


def _costs(report: Record) -> Bars:
    records = report["strategies"]
    return Bars(
        name="costs",
        title="What a round costs",
        note="Drafting and verifying are measured alone, after the run; the rest is "
        "what a round took beyond them, where it took more.",
        labels=tuple(map(label, records)),
        parts=(
            ("draft", tuple(record["draft_cost_ms"] for record in records)),
            ("verify", tuple(record["verify_cost_ms"] for record in records)),
            ("rest", tuple(map(_rest, records))),
        ),
        unit="ms",
        best=_best(report),
    )


def _rest(record: Record) -> Value:
    names = ("tpot_ms", "tokens_per_step", "draft_cost_ms", "verify_cost_ms")
    tpot, per_step, draft, verify = (record[name] for name in names)
    if None in (tpot, per_step, draft, verify):
        return None
    return max(tpot * per_step - draft - verify, 0.0)


def number(value: Value, unit: str = "") -> str:
    """A value for people; "-" if it is missing.

    >>> number(3.14159), number(31.5, "ms"), number(None, "ms")
    ('3.14', '31.5 ms', '-')
    """
    if value is None:
        return "-"
    return f"{value:.{1 if abs(value) >= 10 else 2}f}{f' {unit}' if unit else ''}"


def data(figure: Figure) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """A figure as a table: titles, and a row a strategy."""
    if isinstance(figure, Bars):
        unit = f", {figure.unit}" if figure.unit else ""
        titles = ("strategy", *(f"{name}{unit}" for name, _ in figure.parts))
        columns = [values for _, values in figure.parts]
        rows = zip(figure.labels, *columns, strict=True)
        return titles, [(name, *map(number, values)) for name, *values in rows]
    if isinstance(figure, Curves):
        most = max((len(values) for _, values in figure.curves), default=0)
        titles = ("strategy", *(str(i + 1) for i in range(most)))
        return titles, [
            (name, *map(percent, _padded(values, most)))
            for name, values in figure.curves
        ]
    assert isinstance(figure, Points)
    titles = ("strategy", figure.across, figure.up)
    rows = [(p.label, number(p.x), number(p.y)) for p in figure.points]
    return titles, rows + [(name, "-", "-") for name in figure.missing]


def _padded(values: Sequence[Value], size: int) -> list[Value]:
    return [*values, *[None] * (size - len(values))]


def percent(value: Value) -> str:
    """A share for people; "-" if it is missing."""
    return "-" if value is None else f"{value:.1%}"
