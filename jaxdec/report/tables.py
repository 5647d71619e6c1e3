"""The comparison as one table and a few words, for the terminal and for Markdown.

Everything here reads the dictionary that ``report.json`` holds, so a report can be
written again from the file alone. A figure that is missing is shown as "-".
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]


def _number(name: str, unit: str = "") -> Callable[[Record], str]:
    def show(record):
        value = record[name]
        return "-" if value is None else f"{value:.2f}{unit}"

    return show


def _milliseconds(name: str) -> Callable[[Record], str]:
    def show(record):
        value = record[name]
        return "-" if value is None else f"{value:.{1 if value >= 10 else 2}f}"

    return show


def _time_per_token(record: Record) -> str:
    """TPOT; without one, every answer ended in its first step."""
    return "1 step" if record["tpot_ms"] is None else _milliseconds("tpot_ms")(record)


def _percent(name: str) -> Callable[[Record], str]:
    def show(record):
        return "-" if record[name] is None else f"{record[name]:.0%}"

    return show


def _count(name: str) -> Callable[[Record], str]:
    return lambda record: "-" if record[name] is None else str(record[name])


def _if_drafting(show: Callable[[Record], str]) -> Callable[[Record], str]:
    return lambda record: show(record) if record["draft_length"] else "-"


def _memory(record: Record) -> str:
    size = (record["drafter_param_bytes"] or 0) + (record["drafter_state_bytes"] or 0)
    return f"{size / 1e6:.1f}" if size else "-"


def label(record: Record) -> str:
    """A strategy as it is called in tables, with its temperature unless that is 0."""
    temperature = record["temperature"]
    return _known(record["strategy"]) + (f" T{temperature:g}" if temperature else "")


_BEFORE_CERTIFICATE = (
    ("strategy", label),
    ("tokens\n/step", _number("tokens_per_step")),
    ("accept\nrate", _if_drafting(_percent("acceptance_rate"))),
    ("roll-\nbacks", _if_drafting(_count("num_rollbacks"))),
    ("TPOT\nms", _time_per_token),
    ("speed", _number("speed_vs_greedy", unit="x")),
    ("draft\nms", _if_drafting(_milliseconds("draft_cost_ms"))),
    ("verify\nms", _milliseconds("verify_cost_ms")),
    ("extra\nMB", _memory),
    ("exact\nmatch", _percent("exact_match")),
)
HEADERS = (*(title for title, _ in _BEFORE_CERTIFICATE), "lossless")
"""Titles of the columns of `rows`; some have two lines, to fit 80 characters."""


def rows(report: Record) -> list[tuple[str, ...]]:
    """One row a strategy, under `HEADERS`."""
    certificates = report["certificates"]
    return [
        (
            *(show(record) for _, show in _BEFORE_CERTIFICATE),
            verdict(certificates.get(record["strategy"])),
        )
        for record in report["strategies"]
    ]


def verdict(certificate: Record | None) -> str:
    """What a certificate says on losslessness, in a word or two."""
    if certificate is None:
        return "not tried"
    if not certificate["passed"]:
        return "-" if certificate["passed"] is None else "NO"
    ties = len(certificate["ties"] or ())
    return f"yes, {ties} tie{'s' if ties > 1 else ''}" if ties else "yes"


def advice_lines(report: Record) -> list[str]:
    """The advice as paragraphs: what was found and what to do, then the verdict."""
    advice = report["advice"]
    lines = [
        f"{finding['strategy']}: {finding['reason']}. {_sentence(finding)}"
        for finding in advice["findings"]
        if finding["code"] not in ("certificate", "timing")
    ]
    return lines + advice["verdict"].splitlines()


def _sentence(finding: Record) -> str:
    instruction = finding["instruction"]
    return f"{instruction[:1].upper()}{instruction[1:]}."


def caption(report: Record) -> str:
    """What was held fixed, in one line."""
    settings, model = report["settings"], report["model"]
    size = settings["batch_size"]
    together = "one at a time" if size == 1 else f"in batches of {_known(size)}"
    return (
        f"{_known(model['name'])} in {_known(model['dtype'])} on "
        f"{_known(settings['device'])}; {len(settings['prompts'] or ())} prompts "
        f"{together}, at most {_known(settings['max_new_tokens'])} new tokens, seed "
        f"{_known(settings['seed'])}"
    )


def _known(value: Any) -> str:
    return "-" if value is None else str(value)


def task_table(report: Record) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Tokens per step by task: titles, and a row a strategy."""
    records = report["strategies"]
    by_task = [record["tokens_per_step_by_task"] or {} for record in records]
    tasks = list(by_task[0]) if by_task else []
    titles = ("strategy", *tasks, "all", "not repetitive")
    rows = [
        (
            label(record),
            *(_number(task)({task: None} | found) for task in tasks),
            _number("tokens_per_step")(record),
            _number("tokens_per_step_not_repetitive")(record),
        )
        for record, found in zip(records, by_task, strict=True)
    ]
    return titles, rows


def markdown(report: Record) -> str:
    """The whole report as Markdown."""
    lines = ["# Decoding strategies compared", "", caption(report), ""]
    lines += table(HEADERS, rows(report))
    lines += ["", "## Tokens per step", ""]
    lines += table(*task_table(report))
    lines += ["", "## Advice", ""]
    lines += [f"- {line}" for line in advice_lines(report)]
    lines += ["", "## Quality", ""]
    lines += table(*quality_table(report))
    lines += ["", "## How to read it", ""]
    lines += [f"- {note}" for note in report["settings"]["notes"]]
    return "\n".join(lines) + "\n"


def quality_table(report: Record) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """What was said, not how fast: titles, and a row a strategy."""
    titles = ("strategy", "perplexity", "repetition", "format", "distinct", "finish")
    return titles, [_quality(record) for record in report["strategies"]]


def _quality(record: Record) -> tuple[str, ...]:
    reasons = record["finish_reasons"] or {}
    return (
        label(record),
        _number("perplexity")(record),
        _percent("repetition_rate")(record),
        _percent("format_success_rate")(record),
        _count("distinct_outputs")(record),
        ", ".join(f"{reason} {_known(count)}" for reason, count in reasons.items())
        or "-",
    )


def table(titles: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown."""

    def line(cells):
        plain = map(one_line, cells)
        return f"| {' | '.join(c.replace('|', chr(92) + '|') for c in plain)} |"

    return [line(titles), line(["---"] * len(titles)), *map(line, body)]


def one_line(title: str) -> str:
    r"""A title without its line breaks; a hyphen before one goes with it.

    >>> one_line("roll-\nbacks"), one_line("TPOT\nms")
    ('rollbacks', 'TPOT ms')
    """
    return title.replace("-\n", "").replace("\n", " ")
