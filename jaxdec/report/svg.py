"""Figures as inline SVG, at a size that is legible on a phone.

A drawing is `WIDTH` units wide and shown at about as many pixels, so that its text is
never small; colours are CSS classes of the page, which knows light and dark.
"""

import html
import math
from collections.abc import Iterable, Sequence

from jaxdec.report.figures import Bars, Curves, Figure, Number, Points, number

WIDTH = 360
NUM_COLOURS = 7
"""Classes ``c0``, ``c1``, ... that the page has colours for."""
_ROW = 38
"""Height of a bar and the words above it."""
_LEFT, _TOP, _PLOT, _RIGHT, _BOTTOM = 38, 10, 190, 12, 40
"""Margins of a plot with axes, and the height of what they enclose."""
_LETTER = 6.6
"""Width of a letter, about."""
_SHAPES = (
    (),  # A circle.
    ((-1, -1), (1, -1), (1, 1), (-1, 1)),
    ((0, -1.3), (1.2, 1), (-1.2, 1)),
    ((0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)),
)
"""Corners of the marks."""


def draw(figure: Figure) -> str:
    """A figure as an ``<svg>`` element; or a sentence where there is nothing to see."""
    if isinstance(figure, Bars):
        return _bars(figure)
    if isinstance(figure, Curves):
        return _curves(figure)
    assert isinstance(figure, Points)
    return _points(figure)


def steps_strip(steps: Sequence[tuple[int, str, int]], title: str) -> str:
    """A column a step: what it accepted and its own token upwards, refused ones down.

    Args:
        steps: of each, accepted tokens, the origin of its own token ("" if it has
            none), and refused tokens.
        title: what it is, for those who cannot see it.
    """
    if not steps:
        return ""
    unit = 4
    top = unit * max(accepted + bool(own) for accepted, own, _ in steps)
    bottom = unit * max(refused for *_, refused in steps)
    wide = min(10.0, WIDTH / len(steps))
    shapes = []
    for i, (accepted, own, refused) in enumerate(steps):
        x, y = i * wide, float(top)
        for name, num in (("accepted", accepted), (own, 1)):
            if name and num:
                y -= unit * num
                shapes.append(_rect(x, y, wide - 0.8, unit * num, name))
        if refused:
            shapes.append(_rect(x, top + 1, wide - 0.8, unit * refused, "refused"))
    return _svg(shapes, title, top + bottom + 1, width=wide * len(steps), css="strip")


def _bars(figure: Bars) -> str:
    values = [values for _, values in figure.parts]
    totals = [sum(v or 0.0 for v in row) for row in zip(*values, strict=True)]
    if not totals:
        return _nothing("No strategy was measured.")
    most = max(totals) or 1.0
    is_split = len(figure.parts) > 1
    shapes = []
    for i, name in enumerate(figure.labels):
        own = [column[i] for column in values]
        best = " best" if name == figure.best else ""
        shapes.append(_text(0, i * _ROW + 13, name, f"label{best}"))
        told = number(None if all(v is None for v in own) else totals[i], figure.unit)
        shapes.append(_text(WIDTH, i * _ROW + 13, told, f"value{best}"))
        x = 0.0
        for j, value in enumerate(own):
            size = WIDTH * (value or 0.0) / most
            css = f"c{j}" if is_split else f"bar{best}"
            said = f"{name}: {figure.parts[j][0]} {number(value, figure.unit)}"
            shapes.append(_rect(x, i * _ROW + 19, size, 11, css, said))
            x += size
    parts = (
        (name, _rect(0, 1, 28, 12, f"c{j}")) for j, (name, _) in enumerate(figure.parts)
    )
    drawn = _svg(shapes, figure.title, _ROW * len(figure.labels))
    return drawn + (_legend(parts) if is_split else "")


def _curves(figure: Curves) -> str:
    if not figure.curves:
        return _nothing("No strategy drafted a token that was judged.")
    most = max(len(values) for _, values in figure.curves)

    def place(position: int) -> float:
        room = WIDTH - _LEFT - _RIGHT
        return _LEFT + room * (0.5 if most == 1 else (position - 1) / (most - 1))

    def height(share: Number) -> float:
        return _TOP + _PLOT * (1 - share)

    shapes = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        shapes += _across(height(share), f"{share:.0%}")
    for position in _marks(most):
        y = _TOP + _PLOT + 15
        shapes.append(_text(place(position), y, str(position), "tick middle"))
    legend = []
    for name, values in figure.curves:
        i = figure.order.index(name)
        css, dash = f"c{i % NUM_COLOURS}", f"d{i % 4}"
        known = [(p, v) for p, v in enumerate(values, start=1) if v is not None]
        path = " ".join(f"{place(p):.1f},{height(v):.1f}" for p, v in known)
        shapes.append(f'<polyline class="line {css} {dash}" points="{path}"/>')
        for position, value in known:
            said = f"{name}, place {position}: {value:.1%}"
            shapes.append(_mark(place(position), height(value), i, f"mark {css}", said))
        sample = f'<line class="line {css} {dash}" x2="28" y1="7" y2="7"/>'
        legend.append((name, sample + _mark(14, 7, i, f"mark {css}")))
    shapes.append(_text(WIDTH - _RIGHT, _TOP + _PLOT + 33, figure.across, "axis end"))
    return _svg(shapes, figure.title, _TOP + _PLOT + _BOTTOM) + _legend(legend)


def _points(figure: Points) -> str:
    if not figure.points:
        return _nothing("No strategy has both a time per token and a perplexity.")
    ticks_x = _ticks(0.0, max(1.0, *(p.x for p in figure.points)))
    ticks_y = _ticks(
        min(p.y for p in figure.points), max(p.y for p in figure.points), is_open=True
    )

    def place(point_x: Number) -> float:
        share = (point_x - ticks_x[0]) / (ticks_x[-1] - ticks_x[0])
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * share

    def height(point_y: Number) -> float:
        share = (point_y - ticks_y[0]) / (ticks_y[-1] - ticks_y[0])
        return _TOP + _PLOT * (1 - share)

    shapes = []
    for tick in ticks_y:
        shapes += _across(height(tick), f"{tick:.4g}")
    for tick in ticks_x:
        x = place(tick)
        shapes.append(_text(x, _TOP + _PLOT + 15, f"{tick:g}x", "tick middle"))
    shapes.append(
        f'<line class="plain" x1="{place(1):.1f}" x2="{place(1):.1f}" '
        f'y1="{_TOP}" y2="{_TOP + _PLOT}"/>'
    )
    places = [(place(p.x), height(p.y)) for p in figure.points]
    labels = _labels([p.label for p in figure.points], places)
    legend = []
    for point, (x, y), words in zip(figure.points, places, labels, strict=True):
        i = figure.order.index(point.label)
        css = f"mark{'' if point.is_certified else ' open'} c{i % NUM_COLOURS}"
        verdict = "certified" if point.is_certified else "not certified"
        said = (
            f"{point.label}: {point.x:.2f} times greedy, perplexity {point.y:.2f}, "
            f"{verdict}"
        )
        shapes += [_mark(x, y, i, css, said), words]
        legend.append((point.label, _mark(14, 7, i, css)))
    shapes.append(_text(0, _TOP + _PLOT + 33, f"up: {figure.up}", "axis"))
    shapes.append(_text(WIDTH - _RIGHT, _TOP + _PLOT + 33, figure.across, "axis end"))
    drawn = _svg(shapes, figure.title, _TOP + _PLOT + _BOTTOM) + _legend(legend)
    if figure.missing:
        drawn += _nothing(f"Not measured: {', '.join(figure.missing)}.")
    return drawn


def _labels(names: Sequence[str], places: Sequence[tuple[Number, Number]]) -> list[str]:
    """The names beside their points; "" where there is no room, as in a crowd."""
    taken = [(x - 7, x + 7, y - 7, y + 7) for x, y in places]
    found = []
    for name, (x, y) in zip(names, places, strict=True):
        size = _LETTER * len(name)
        ways = (
            ("start", x + 9, x + 9, y),
            ("end", x - 9, x - 9 - size, y),
            ("middle", x, x - size / 2, y - 15),
            ("middle", x, x - size / 2, y + 15),
        )
        words = ""
        for side, at_x, left, at_y in ways:
            box = (left, left + size, at_y - 7, at_y + 7)
            is_inside = box[0] > _LEFT and box[1] < WIDTH and box[2] > 0
            is_inside = is_inside and box[3] < _TOP + _PLOT + 3
            if is_inside and not any(_meet(box, other) for other in taken):
                taken.append(box)
                words = _text(at_x, at_y + 4, name, f"label {side}")
                break
        found.append(words)
    return found


def _meet(one: Sequence[Number], other: Sequence[Number]) -> bool:
    """Whether two boxes (left, right, top, bottom) share a point."""
    return (
        one[0] < other[1]
        and other[0] < one[1]
        and one[2] < other[3]
        and other[2] < one[3]
    )


def _ticks(low: Number, high: Number, *, is_open: bool = False) -> list[float]:
    """Four to six round numbers that enclose a range; `is_open` leaves some room."""
    if is_open:
        room = 0.15 * (high - low) or 0.1 * abs(high) or 1.0
        low, high = low - room, high + room
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * s for s in (1, 2, 2.5, 5, 10) if power * s >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * i, 10) for i in range(first, last + 1)]


def _marks(most: int) -> list[int]:
    """Positions that are numbered: all, or about ten."""
    every = max(1, math.ceil(most / 10))
    return [p for p in range(1, most + 1) if (p - 1) % every == 0]


def _across(y: Number, told: str) -> list[str]:
    grid = f'<line class="grid" x1="{_LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return [grid, _text(_LEFT - 5, y + 4, told, "tick end")]


def _mark(x: Number, y: Number, number: int, css: str, said: str = "") -> str:
    """A mark whose shape, too, tells strategies apart."""
    title = _title(said)
    corners = _SHAPES[number % len(_SHAPES)]
    if not corners:
        circle = f'<circle class="{css}" cx="{x:.1f}" cy="{y:.1f}" r="4.5">'
        return f"{circle}{title}</circle>"
    path = " ".join(f"{x + 4.2 * a:.1f},{y + 4.2 * b:.1f}" for a, b in corners)
    return f'<polygon class="{css}" points="{path}">{title}</polygon>'


def _title(said: str) -> str:
    """What a browser tells of a shape where the mouse is over it."""
    return f"<title>{html.escape(said)}</title>" if said else ""


def _rect(
    x: Number, y: Number, width: Number, height: Number, css: str, said: str = ""
) -> str:
    return (
        f'<rect class="{css}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" '
        f'height="{height:.2f}">{_title(said)}</rect>'
    )


def _text(x: Number, y: Number, text: str, css: str) -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}">{html.escape(text)}</text>'


def _svg(
    shapes: Iterable[str],
    title: str,
    height: Number,
    *,
    width: Number = WIDTH,
    css: str = "figure",
) -> str:
    return (
        f'<svg class="{css}" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{html.escape(title)}">{"".join(shapes)}</svg>'
    )


def _legend(names: Iterable[tuple[str, str]]) -> str:
    """A list of names, each with a shape from the drawing, 28 wide and 14 high."""
    items = (
        '<li><svg class="key" viewBox="0 0 28 14" aria-hidden="true">'
        f"{shape}</svg>{html.escape(name)}</li>"
        for name, shape in names
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _nothing(sentence: str) -> str:
    return f'<p class="nothing">{html.escape(sentence)}</p>'
