"""What a notebook's cells show: tables, pictures, and answers token by token.

Each knows how a notebook draws it (``_repr_html_``, ``_repr_png_``) and has a plain
text for everything else. Pictures need matplotlib, which the package does without:
``pip install 'jaxdec[plots]'``.
"""

import dataclasses
import importlib.util
import io
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from jaxdec import measure
from jaxdec.evidence import Evidence
from jaxdec.report import timeline
from jaxdec.text import Outputs

COLOURS = {
    "accepted": "#a6dfae",
    "correction": "#f6d68a",
    "bonus": "#a9cdf5",
    "plain": "#e4e4e4",
    "refused": "#f0b9b4",
}
"""By what became of a token; light, so that dark text on them is legible everywhere."""
LINES = ("#2a6fbb", "#c8641e", "#2f8f4e", "#9a4fb0", "#b3373c", "#6b6b6b")
"""Of curves, in order."""
_DOTS_PER_INCH = 110


class Table:
    """Named columns and a row a thing; values are kept as they are, and shown short."""

    def __init__(
        self, titles: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = ""
    ):
        """Takes the values of all rows.

        Args:
            titles: of the columns; the first names the rows.
            rows: as many values each.
            caption: what it is, in a sentence.

        Raises:
            ValueError: a row that is not as long as `titles`.
        """
        self.titles = tuple(titles)
        self.rows = tuple(tuple(row) for row in rows)
        self.caption = caption
        wrong = [row for row in self.rows if len(row) != len(self.titles)]
        if wrong:
            raise ValueError(
                f"a row has {len(wrong[0])} values for {len(self.titles)} columns "
                f"({', '.join(self.titles)}); give one for each"
            )

    def column(self, title: str) -> tuple[Any, ...]:
        """The values of a column, from top to bottom."""
        place = self.titles.index(title)
        return tuple(row[place] for row in self.rows)

    def row(self, name: Any) -> dict[str, Any]:
        """The values of the row of this name, by title."""
        found = next(row for row in self.rows if row[0] == name)
        return dict(zip(self.titles, found, strict=True))

    def _texts(self) -> list[list[str]]:
        return [[shown(value) for value in row] for row in self.rows]

    def __repr__(self) -> str:
        lines = [list(self.titles), *self._texts()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        told = [
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True))
            for line in lines
        ]
        return "\n".join([line.rstrip() for line in told] + [self.caption]).rstrip()

    def _repr_html_(self) -> str:
        style = "text-align:left;padding:2px 12px 2px 0"
        head = "".join(f'<th style="{style}">{escape(t)}</th>' for t in self.titles)
        body = "".join(
            "<tr>"
            + "".join(f'<td style="{style}">{escape(cell)}</td>' for cell in row)
            + "</tr>"
            for row in self._texts()
        )
        caption = f"<p><i>{escape(self.caption)}</i></p>" if self.caption else ""
        return (
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
            f"{caption}"
        )


def shown(value: Any) -> str:
    """A value for people; "-" if there is none.

    >>> shown(3.14159), shown(1234.5), shown(7), shown(None), shown(True)
    ('3.14', '1234', '7', '-', 'yes')
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


class Picture:
    """A matplotlib figure that a notebook shows without further ado."""

    def __init__(self, figure: Any, says: str):
        """Takes a figure.

        Args:
            figure: a ``matplotlib.figure.Figure``.
            says: what one sees, in a sentence, for those who cannot see it.
        """
        self.figure = figure
        self.says = says

    def __repr__(self) -> str:
        return f"Picture: {self.says}"

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=_DOTS_PER_INCH)
        return buffer.getvalue()

    def save(self, path: str | Path) -> None:
        """Writes it to a file, whose ending says in which format."""
        self.figure.savefig(path, dpi=_DOTS_PER_INCH)


def canvas(
    columns: int = 1, *, width: float = 6.0, height: float = 3.4, **options: Any
) -> tuple[Any, Any]:
    """A new figure, and its axes: one, or an array of them side by side.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "pictures need matplotlib, and it is not installed; run "
            "pip install 'jaxdec[plots]'"
        )
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns, **options)


class Tokens:
    """An answer token by token: where each came from, and what was refused."""

    def __init__(self, steps: Sequence[timeline.Step]):
        """Takes the steps of an answer, from `jaxdec.report.timeline.steps`."""
        self.steps = tuple(steps)

    def _parts(self) -> Iterator[tuple[str, str]]:
        """Texts with what became of them, refused ones where they would stand."""
        for step in self.steps:
            for i, token in enumerate(step.tokens):
                if i == step.num_accepted:
                    yield from ((text, "refused") for text in step.refused)
                yield token.text, token.origin

    def __repr__(self) -> str:
        marks = {"accepted": "[]", "correction": "{}", "bonus": "<>", "refused": "~~"}
        return "".join(
            f"{marks[kind][0]}{text}{marks[kind][1]}" if kind in marks else text
            for text, kind in self._parts()
        )

    def _repr_html_(self) -> str:
        legend = " ".join(_span(name, name) for name in COLOURS)
        body = "".join(_span(text, kind) for text, kind in self._parts())
        return f'<p>{legend}</p><div style="line-height:1.9">{body}</div>'


def _span(text: str, kind: str) -> str:
    style = f"background:{COLOURS[kind]};color:#111;padding:1px;margin:0 1px"
    if kind == "refused":
        style += ";text-decoration:line-through;opacity:0.75"
    text = escape(text).replace("\n", "↵<br>") if kind != "refused" else escape(text)
    return f'<span style="{style}" title="{kind}">{text or "·"}</span>'


def show_tokens(outputs: Outputs, row: int = 0) -> Tokens:
    """An answer of `jaxdec.generate`, coloured by where its tokens came from."""
    found = evidence_of(outputs).requests[row]
    kept = timeline.record(
        outputs.run.call.lm.tokenizer, outputs[row].tokens, outputs.run.info, row
    )
    request = {"timeline": kept, "steps": dataclasses.asdict(found.steps)}
    return Tokens(timeline.steps(request))


def evidence_of(outputs: Outputs) -> Evidence:
    """The evidence of a call as far as it takes no further model call.

    ``outputs.evidence`` times drafting and verifying too, and finds the perplexity.
    """
    return measure.evidence(outputs.run, outputs.items, with_costs=False)


def token_text(lm: Any, token: int | np.integer) -> str:
    """A token for a picture: spaces and line ends are seen."""
    text = lm.tokenizer.token_bytes(int(token)).decode("utf-8", "replace")
    return text.replace("\n", "↵").replace(" ", "␣").replace("$", r"\$") or "·"
