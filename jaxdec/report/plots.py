"""The figures of a comparison as PNG files.

They need matplotlib, which the package does without: ``pip install 'jaxdec[plots]'``.
Without it there are no files, and `WITHOUT` says so; the page has every figure anyway.
"""

import importlib.util
from pathlib import Path
from typing import Any

from jaxdec.report.figures import Bars, Curves, Figure, Points, figures, number
from jaxdec.report.tables import Record

WITHOUT = (
    "no PNG files: matplotlib is not installed; pip install 'jaxdec[plots]' "
    "(report.html has the figures)"
)
"""What to tell where nothing can be drawn."""
_MARKS = "osD^vP*X"


def can_draw() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def plot(report: Record, folder: Path) -> list[Path]:
    """Draws a file a figure into a folder; returns them, none without matplotlib."""
    if not can_draw():
        return []
    written = []
    for figure in figures(report):
        path = folder / f"{figure.name}.png"
        draw(figure).savefig(path, dpi=150, bbox_inches="tight")
        written.append(path)
    return written


def plot_calibration(calibration: Record, folder: Path) -> list[Path]:
    """Draws a reliability diagram: a curve a depth, a calibrated one on the diagonal.

    Args:
        calibration: the report of `jaxdec.calibration.calibrate`.
        folder: where ``calibration.png`` is written.

    Returns:
        What was written; nothing without matplotlib.
    """
    if not can_draw():
        return []
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(5, 5))
    axes = canvas.subplots()
    axes.plot([0, 1], [0, 1], ":", color="gray", label="calibrated")
    for i, bins in enumerate(calibration["plot"]):
        marks = [6 * count**0.5 for count in bins["rounds"]]
        said, happened = bins["predicted"], bins["observed"]
        axes.plot(said, happened, f"C{i % 10}-", alpha=0.5)
        axes.scatter(
            said,
            happened,
            s=marks,
            color=f"C{i % 10}",
            marker=_MARKS[i % 8],
            label=f"token {bins['depth']}",
        )
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("survival that the drafter said")
    axes.set_ylabel("share that was accepted")
    axes.set_title("confidence on rounds held out")
    axes.legend()
    path = folder / "calibration.png"
    canvas.savefig(path, dpi=100, bbox_inches="tight")
    return [path]


def draw(figure: Figure) -> Any:
    """A figure as a ``matplotlib.figure.Figure``, which has to be installed."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(6, 4))
    axes = canvas.subplots()
    axes.set_title(figure.title)
    if isinstance(figure, Bars):
        _bars(figure, axes)
    elif isinstance(figure, Curves):
        _curves(figure, axes)
    else:
        assert isinstance(figure, Points)
        _points(figure, axes)
    return canvas


def _bars(figure: Bars, axes: Any) -> None:
    places = range(len(figure.labels))
    left = [0.0] * len(figure.labels)
    for name, values in figure.parts:
        widths = [value or 0.0 for value in values]
        axes.barh(places, widths, left=left, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    told = [
        number(None if all(values[i] is None for _, values in figure.parts) else total)
        for i, total in enumerate(left)
    ]
    for place, total, text in zip(places, left, told, strict=True):
        axes.annotate(f" {text}", (total, place), va="center")
    axes.set_yticks(places, figure.labels)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(left, default=0.0) or 1.0)
    axes.set_xlabel(figure.unit)
    if len(figure.parts) > 1 and figure.labels:
        axes.legend()


def _curves(figure: Curves, axes: Any) -> None:
    for name, values in figure.curves:
        i = figure.order.index(name)
        known = [(p, v) for p, v in enumerate(values, start=1) if v is not None]
        places, shares = [p for p, _ in known], [v for _, v in known]
        axes.plot(places, shares, f"C{i % 10}{_MARKS[i % 8]}-", label=name)
    axes.set_ylim(0, 1.05)
    axes.set_xlabel(figure.across)
    axes.set_ylabel(figure.up)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if figure.curves:
        axes.legend()


def _points(figure: Points, axes: Any) -> None:
    for point in figure.points:
        i = figure.order.index(point.label)
        axes.plot(
            point.x,
            point.y,
            f"C{i % 10}{_MARKS[i % 8]}",
            label=point.label + ("" if point.is_certified else " (not certified)"),
            fillstyle="full" if point.is_certified else "none",
        )
    axes.axvline(1, color="gray", linestyle=":")
    axes.set_xlim(left=0)
    axes.margins(0.2)
    axes.set_xlabel(figure.across)
    axes.set_ylabel(figure.up)
    if figure.points:
        axes.legend()
