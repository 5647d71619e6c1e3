"""What a draft costs and brings: net benefit, break-even, and the best length.

For the notebooks on the proposal budget and on the benchmark. The arithmetic is
`jaxdec.planning.break_even`.
"""

import dataclasses
from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np

from jaxdec import measure
from jaxdec.compare import Comparison
from jaxdec.course.display import (
    COLOURS,
    LINES,
    Picture,
    Table,
    Tokens,
    canvas,
    evidence_of,
)
from jaxdec.course.drafting import MARKS
from jaxdec.planning.break_even import (
    Measured,
    Number,
    expected_tokens,
    predict_tpot,
)
from jaxdec.planning.ranking import Baseline, rank
from jaxdec.report import plots, tables, timeline
from jaxdec.report.comparison import survival
from jaxdec.report.figures import figures
from jaxdec.text import Outputs


def costs_of(outputs: Outputs) -> tuple[float, float]:
    """Milliseconds of a step's drafting, and of the rest of the step; timed alone."""
    tokens = [answer.tokens for answer in outputs]
    return measure.costs(outputs.run.program, outputs.run.call, tokens)


def measure_budget(outputs: Outputs, plain: Outputs) -> Measured:
    """What the break-even arithmetic needs of a run that drafted.

    In place of a certificate its tokens are compared with plain decoding's.

    Args:
        outputs: of the strategy; its costs are timed now, if they were not before.
        plain: plain decoding of the same prompts.
    """
    found, base = evidence_of(outputs), evidence_of(plain)
    config = outputs.run.call.config
    length = config.length
    if found.tpot_ms is None or base.tpot_ms is None:
        raise ValueError(
            "an answer that ends in its first step has no time per token; ask for more "
            "tokens, with stop_tokens=()"
        )
    draft_ms, verify_ms = costs_of(outputs)
    differ = [a.tokens for a in outputs] != [a.tokens for a in plain]
    return Measured(
        certified=not differ,
        certificate_reasons=("answers differ from plain decoding's",) * differ,
        tpot_ms=found.tpot_ms,
        tokens_per_step=found.tokens_per_step,
        draft_length=length,
        judged_per_step=found.num_judged / found.num_steps,
        acceptance_rate=found.acceptance_rate,
        conditional_acceptance_by_position=survival(found, length),
        draft_cost_ms=draft_ms,
        is_block=config.drafts_at_once,
        is_tree=config.is_tree,
        verify_cost_ms={0: costs_of(plain)[1], length: verify_ms},
    )


def budget_table(measured: Measured, plain_tpot_ms: Number) -> Table:
    """By draft length: expected tokens, time of a round, and what remains of it."""
    predicted = {0: plain_tpot_ms} | predict_tpot(measured)
    rows = []
    for k, tpot in predicted.items():
        tokens = expected_tokens(measured.conditional_acceptance_by_position, k)
        rows.append((k, tokens, tpot * tokens, tpot, 1 - tpot / plain_tpot_ms))
    titles = ("draft length", "tokens", "round ms", "ms per token", "net benefit")
    caption = "net benefit: share of plain decoding's time per token that is saved"
    return Table(titles, rows, caption)


def best_length(table: Table) -> int:
    """The draft length of `budget_table` with the least time per token; 0 is off."""
    return int(min(table.rows, key=lambda row: row[3])[0])


def break_even_table(runs: Mapping[str, Measured], plain_tpot_ms: Number) -> Table:
    """What acceptance each strategy needs, what it has, and what follows.

    The advice is `jaxdec.planning.ranking`'s: by measured times, not by predictions.
    """
    plain, rows = Baseline(tpot_ms=plain_tpot_ms), []
    for label, measured in runs.items():
        found = rank(label, measured, plain)
        rows.append(
            (
                label,
                measured.draft_length,
                measured.acceptance_rate,
                found.break_even_acceptance,
                1 - measured.tpot_ms / plain_tpot_ms,
                found.best_draft_length,
                _ADVICE[found.action],
                found.reason,
            )
        )
    titles = (
        "strategy",
        "length",
        "acceptance",
        "break-even",
        "net benefit",
        "best length",
        "advice",
        "why",
    )
    caption = (
        "break-even above 1: no acceptance can pay for a round; best length: predicted"
    )
    return Table(titles, rows, caption)


_ADVICE = {"keep": "use it", "turn_off": "turn it off", "not_ranked": "not ranked"}


def draw_budget(tables_by_name: Mapping[str, Table]) -> Picture:
    """`budget_table` of several strategies: expected tokens, and net benefit."""
    figure, panels = canvas(2, width=8.6)
    for i, (label, table) in enumerate(tables_by_name.items()):
        lengths = table.column("draft length")
        style = f"{MARKS[i % len(MARKS)]}-"
        for axes, title in zip(panels, ("tokens", "net benefit"), strict=True):
            values = table.column(title)
            axes.plot(lengths, values, style, color=LINES[i % len(LINES)], label=label)
    panels[0].set_ylabel("expected tokens per step")
    panels[1].set_ylabel("net benefit")
    panels[1].axhline(0, color="gray", linestyle=":")
    for axes in panels:
        axes.set_xlabel("draft length")
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[0].legend()
    return Picture(figure, "expected tokens and net benefit by draft length")


def draw_break_even(measured: Measured, plain_tpot_ms: Number) -> Picture:
    """Net benefit by draft length and acceptance, with this machine's costs.

    The line is break-even: below it drafting is a loss. The point is the measured run.
    """
    lengths = range(1, measured.draft_length + 1)
    shares = np.linspace(0, 1, 41)
    benefit = np.zeros((len(shares), len(lengths)))
    for i, share in enumerate(shares):
        alike = [float(share)] * measured.draft_length
        guess = dataclasses.replace(measured, conditional_acceptance_by_position=alike)
        predicted = predict_tpot(guess)
        benefit[i] = [1 - predicted[k] / plain_tpot_ms for k in lengths]
    figure, axes = canvas(width=6.2, height=3.8)
    most = max(abs(benefit.max()), 0.1)
    drawn = axes.pcolormesh(
        list(lengths),
        shares,
        benefit,
        cmap="RdYlGn",
        vmin=-most,
        vmax=most,
        shading="nearest",
    )
    figure.colorbar(drawn, label="net benefit")
    if len(lengths) > 1 and benefit.min() < 0 < benefit.max():
        axes.contour(list(lengths), shares, benefit, levels=[0], colors="black")
    given = measured.conditional_acceptance_by_position
    if given:
        # The acceptance that, alike at every place, gives as many tokens.
        longest = measured.draft_length
        tokens = [expected_tokens([float(x)] * longest, longest) for x in shares]
        alike = np.interp(expected_tokens(given, longest), tokens, shares)
        axes.plot(longest, alike, "k*", markersize=12)
    axes.set_xlabel("draft length")
    axes.set_ylabel("acceptance, given the token before")
    axes.xaxis.get_major_locator().set_params(integer=True)
    return Picture(figure, "net benefit by draft length and acceptance; break-even")


def costs_table(runs: Mapping[str, Outputs]) -> Table:
    """Milliseconds of a step: drafting, verifying; timed alone, after the run."""
    rows = []
    for label, outputs in runs.items():
        draft_ms, verify_ms = costs_of(outputs)
        length = outputs.run.call.config.length
        each = draft_ms / length if length else None
        rows.append((label, length, draft_ms, each, verify_ms))
    titles = ("run", "draft length", "draft ms", "per draft token", "verify ms")
    return Table(titles, rows)


def comparison_table(comparison: Comparison) -> Table:
    """The table of a report: speed and losslessness, a row a strategy."""
    report = comparison.to_dict()
    titles = [tables.one_line(title) for title in tables.HEADERS]
    return Table(titles, tables.rows(report), tables.caption(report))


def quality_table(comparison: Comparison) -> Table:
    """The quality of what each strategy said."""
    return Table(*tables.quality_table(comparison.to_dict()))


def comparison_pictures(comparison: Comparison) -> dict[str, Picture]:
    """The figures of a report by name: tpot, tokens_per_step, acceptance, ..."""
    canvas()  # Says what to install, where there is no matplotlib.
    return {
        figure.name: Picture(plots.draw(figure), f"{figure.title}. {figure.note}")
        for figure in figures(comparison.to_dict())
    }


def comparison_tokens(comparison: Comparison, strategy: str) -> Tokens:
    """A strategy's answer to the first prompt, token by token.

    Raises:
        ValueError: it was not compared.
    """
    for record in comparison.to_dict()["strategies"]:
        if record["strategy"] == strategy:
            return Tokens(timeline.steps(record["requests"][0]))
    names = ", ".join(entry.label for entry in comparison.entries)
    raise ValueError(f"{strategy!r} was not compared; there are {names}")


class Advice:
    """The advice of a comparison, as a notebook shows it."""

    def __init__(self, comparison: Comparison):
        """Takes the verdict and the findings of a comparison."""
        self.best = comparison.advice.best
        self.lines = tables.advice_lines(comparison.to_dict())

    def __repr__(self) -> str:
        return "\n".join(self.lines)

    def _repr_html_(self) -> str:
        items = "".join(f"<li>{escape(line)}</li>" for line in self.lines)
        style = f"background:{COLOURS['accepted']};color:#111;padding:2px 6px"
        return f'<p><b style="{style}">{escape(self.best)}</b></p><ul>{items}</ul>'


def certificate_table(comparison: Comparison) -> Table:
    """What the certificates say, a row a strategy."""
    rows: list[tuple[Any, ...]] = [
        (
            label,
            found.passed,
            found.mode,
            found.num_positions,
            len(found.ties),
            len(found.divergences),
        )
        for label, found in comparison.certificates.items()
    ]
    titles = ("strategy", "lossless", "mode", "positions", "ties", "divergences")
    return Table(titles, rows)
