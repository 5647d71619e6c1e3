"""The comparison as one web page that needs nothing but itself.

Everything is made from the dictionary that ``report.json`` holds, so that a page can be
made again from the file alone; what is missing there is shown as "-". The page loads
nothing: style, script and drawings are in it, and its own policy forbids the rest.
"""

import functools
import importlib.resources
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from jaxdec.report import tables
from jaxdec.report.answers import answers
from jaxdec.report.figures import Figure, data, figures, number, percent
from jaxdec.report.svg import draw
from jaxdec.report.tables import Record

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data:"
)
_MODES = {
    "greedy": "the tokens were replayed through plain greedy decoding",
    "sampled": "the tokens were replayed through plain sampling with the same noise",
    "law": "the distribution of the tokens was tested against the target's",
}


def html(report: Mapping[str, Any]) -> str:
    """The page of a report.

    Args:
        report: from `Comparison.to_dict`, or read from a ``report.json``.
    """
    report = _tolerant(report)
    title = f"Decoding strategies compared: {report['model']['name'] or 'a model'}"
    sections = (
        ("advice", "What to do", _advice(report)),
        ("strategies", "Strategies", _strategies(report)),
        ("figures", "Figures", _figures(figures(report))),
        ("answers", "Answers, token by token", answers(report)),
        ("certificates", "Certificates", _certificates(report)),
        ("parameters", "Parameters and versions", _parameters(report)),
        ("reading", "How to read it", _list(report["settings"]["notes"] or ())),
    )
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in sections)
    body = "".join(
        f'<section id="{name}"><h2>{title}</h2>{content}</section>'
        for name, title, content in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title>'
        f"<style>{_file('page.css')}</style></head><body>"
        '<a class="skip" href="#main">Skip to the report</a>'
        f"<header><h1>{escape(title)}</h1><p>{escape(tables.caption(report))}</p>"
        f'<nav aria-label="Parts of the report">{links}</nav></header>'
        f'<main id="main">{body}</main>'
        '<div id="tip" role="tooltip" hidden></div>'
        f"<script>{_file('page.js')}</script></body></html>\n"
    )


_LISTS = (
    "strategies",
    "requests",
    "prompts",
    "ties",
    "divergences",
    "findings",
    "rankings",
)
"""Of records, wherever they are in a report."""


class _Tolerant(dict):
    """A record in which what is missing is None."""

    def __missing__(self, key: str) -> None:
        return None


def _tolerant(report: Mapping[str, Any]) -> Record:
    """A copy in which nothing that the page looks for is missing."""
    found = _whole(json.loads(json.dumps(report), object_hook=_Tolerant))
    for name in ("model", "settings", "certificates", "advice"):
        found[name] = found[name] or _Tolerant()
    certificates = found["certificates"]
    found["certificates"] = _Tolerant({k: c for k, c in certificates.items() if c})
    found["strategies"] = found["strategies"] or []
    found["settings"]["prompts"] = found["settings"]["prompts"] or []
    advice = found["advice"]
    for name, nothing in (("verdict", ""), ("findings", []), ("rankings", [])):
        advice[name] = advice[name] or nothing
    return found


def _whole(value: Any, name: str = "") -> Any:
    """Puts an empty record where one of a list is missing."""
    if isinstance(value, dict):
        return _Tolerant({key: _whole(item, key) for key, item in value.items()})
    if not isinstance(value, list):
        return value
    if name in _LISTS:
        value = [_Tolerant() if item is None else item for item in value]
    return [_whole(item) for item in value]


@functools.cache
def _file(name: str) -> str:
    folder = importlib.resources.files(__package__)
    return (folder / name).read_text(encoding="utf-8")


def _advice(report: Record) -> str:
    advice = report["advice"]
    verdict = "".join(
        f"<p>{escape(line)}</p>" for line in advice["verdict"].splitlines()
    )
    parts = [f'<div class="verdict">{verdict or "<p>No advice.</p>"}</div>']
    if advice["findings"]:
        items = (
            f"<li><b>{escape(_shown(finding['strategy']))}</b>: "
            f"{escape(_shown(finding['reason']))}.<br>"
            f"<em>{escape(_capital(_shown(finding['instruction'])))}.</em></li>"
            for finding in advice["findings"]
        )
        parts.append(f'<h3>Findings</h3><ul class="findings">{"".join(items)}</ul>')
    if advice["rankings"]:
        items = (
            f"<li><b>{escape(_shown(ranking['strategy']))}</b>, "
            f"{escape(_shown(ranking['action']).replace('_', ' '))}: "
            f"{escape(_shown(ranking['reason']))}.<br><em>{_ranked(ranking)}</em></li>"
            for ranking in advice["rankings"]
        )
        parts.append(f'<h3>Ranking</h3><ol class="findings">{"".join(items)}</ol>')
    return "".join(parts)


def _ranked(ranking: Record) -> str:
    """The figures of a ranking."""
    length = ranking["best_draft_length"]
    predicted = (ranking["predicted_tpot_ms"] or {}).get(str(length))
    return (
        f"Measured {number(ranking['measured_tpot_ms'], 'ms')} a token; break-even at "
        f"{percent(ranking['break_even_acceptance'])} acceptance; best draft length "
        f"{_shown(length)}, predicted {number(predicted, 'ms')}."
    )


def _strategies(report: Record) -> str:
    best = report["advice"]["best"]
    is_best = [record["strategy"] == best for record in report["strategies"]]
    parts = [
        _table(tables.HEADERS, tables.rows(report), "Speed and losslessness", is_best)
    ]
    titles, rows = tables.task_table(report)
    if len(titles) > 4:
        parts.append("<h3>Tokens per step, by task</h3>")
        parts.append(_table(titles, rows, "Tokens per step, by task", is_best))
    parts.append("<h3>Quality</h3>")
    parts.append(_table(*tables.quality_table(report), "Quality", is_best, num_words=1))
    return "".join(parts)


def _figures(found: Iterable[Figure]) -> str:
    drawn = (
        f"<figure><figcaption>{escape(figure.title)}</figcaption>{draw(figure)}"
        f'<p class="note">{escape(figure.note)}</p>'
        "<details><summary>as numbers</summary>"
        f"{_table(*data(figure), figure.title)}</details></figure>"
        for figure in found
    )
    return f'<div class="figures">{"".join(drawn)}</div>'


def _certificates(report: Record) -> str:
    certificates = report["certificates"]
    if not certificates:
        return "<p>No certificate was drawn up, so no strategy is ranked.</p>"
    words = (
        "<p>A certificate says whether a strategy decodes what plain decoding decodes. "
        "Where a token differs, the gap between the two tokens' scores decides: below "
        "the tolerance, which this run measured, rounding may order them either way "
        "(a tie); anything else is a divergence, and the certificate is refused.</p>"
    )
    return words + "".join(
        f'<article class="certificate {_verdict_class(certificate)}">'
        f"<h3>{escape(name)}: {_verdict(certificate)}</h3>"
        f"<p>{escape(_sentence(certificate))}</p>"
        f"{_list(certificate['reasons'] or ())}{_mismatches(certificate)}</article>"
        for name, certificate in certificates.items()
    )


def _verdict(certificate: Record) -> str:
    if certificate["passed"] is None:
        return "-"
    return "lossless" if certificate["passed"] else "NOT lossless"


def _verdict_class(certificate: Record) -> str:
    return "passed" if certificate["passed"] else "failed"


def _sentence(certificate: Record) -> str:
    """What was compared and found, in words."""
    mode = certificate["mode"]
    parts = [
        f"{_shown(certificate['num_positions'])} positions; "
        f"{_MODES.get(mode, _shown(mode))}"
    ]
    if mode != "law":
        ties, divergences = certificate["ties"], certificate["divergences"]
        parts.append(
            f"{_several(ties, 'tie')} within {_shown(certificate['tolerance'])}, "
            f"{_several(divergences, 'divergence')}"
        )
    if certificate["ks"]:
        ks = certificate["ks"]
        parts.append(
            f"distance of the distributions (Kolmogorov-Smirnov) "
            f"{_shown(ks['statistic'])}, at most {_shown(ks['threshold'])} allowed"
        )
    parts.append(f"{_shown(certificate['dtype'])}, rows of a forward: ")
    return "; ".join(parts) + f"{_shown(certificate['row_class'])}."


def _several(found: Sequence[Any] | None, word: str) -> str:
    num = len(found or ())
    return f"{num} {word}{'' if num == 1 else 's'}"


def _mismatches(certificate: Record) -> str:
    """Ties and divergences, each with its tokens."""
    found = [*(certificate["divergences"] or ()), *(certificate["ties"] or ())]
    if not found:
        return ""
    titles = ("kind", "request", "position", "plain token", "emitted token", "gap")
    keys = ("kind", "request", "position", "plain_token", "emitted_token", "gap")
    rows = [[_shown(bad[key]).replace("_", " ") for key in keys] for bad in found]
    return (
        "<details><summary>where tokens differ</summary>"
        f"{_table(titles, rows, 'Where tokens differ')}</details>"
    )


def _parameters(report: Record) -> str:
    settings = {
        key: value
        for key, value in report["settings"].items()
        if key not in ("notes", "prompts")
    }
    groups = [
        ("Model", report["model"]),
        ("Settings", settings),
        ("Versions", next((s["versions"] for s in report["strategies"]), None)),
        ("Machine", {"floor": report["floor"], "together": report["together"]}),
    ]
    parts = [_pairs(title, values) for title, values in groups]
    names = [p["prompt_id"] or "-" for p in report["settings"]["prompts"]]
    parts.append(_pairs("Prompts", {"prompts": ", ".join(names) or None}))
    for record in report["strategies"]:
        keys = ("versions", "hashes", "seed", "sampling", "pairing", *_FACTS)
        values = {key: record[key] for key in keys if key in record}
        title = f"Strategy {tables.label(record)}"
        parts.append(
            f"<details><summary>{escape(title)}</summary>{_pairs(title, values)}"
            "</details>"
        )
    return "".join(parts)


_FACTS = (
    "draft_length",
    "temperature",
    "proposal_mode",
    "proposal_budget",
    "tree_width",
    "tree_depth",
    "num_native_modules",
    "num_steps",
    "num_drafted",
    "num_judged",
    "num_accepted",
    "num_emitted",
    "ttft_s",
    "e2e_s",
    "throughput_tokens_per_s",
    "compile_s",
    "num_compilations",
    "cache_length",
    "kv_bytes_read",
    "kv_bytes_written",
    "drafter_param_bytes",
    "drafter_state_bytes",
    "calibration_error",
)
"""Of a strategy, what no table shows."""


def _pairs(title: str, values: Mapping[str, Any] | None) -> str:
    """Names and values, one a row; records in records by their names with dots."""
    rows = list(_flat(values or {}))
    return f"<h3>{escape(title)}</h3>" + _table(("", ""), rows, title, num_words=1)


def _flat(values: Mapping[str, Any], before: str = "") -> Iterable[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}".replace("_", " "), _shown(value)


def _table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    name: str,
    is_best: Sequence[bool] = (),
    *,
    num_words: int = 0,
) -> str:
    """A table that scrolls by itself where the page is narrow.

    Args:
        titles: Of the columns; none are shown if all are empty.
        rows: Cells, the first of which names the row.
        name: What it is, for those who cannot see it.
        is_best: Rows that the advice names.
        num_words: How many columns at the end hold words, not figures.
    """

    def cells(row: Sequence[str]) -> str:
        first, *others = map(escape, row)
        words = len(others) - num_words
        return f'<th scope="row">{first}</th>' + "".join(
            f"<td{' class=words' if i >= words else ''}>{cell}</td>"
            for i, cell in enumerate(others)
        )

    head = "".join(
        f'<th scope="col"{" class=words" if i >= len(titles) - num_words else ""}>'
        f"{escape(tables.one_line(title))}</th>"
        for i, title in enumerate(titles)
    )
    body = "".join(
        f"<tr{' class=best' if i < len(is_best) and is_best[i] else ''}>"
        f"{cells(row)}</tr>"
        for i, row in enumerate(rows)
    )
    shown = f"<thead><tr>{head}</tr></thead>" if any(titles) else ""
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(name)}">'
        f"<table>{shown}<tbody>{body}</tbody></table></div>"
    )


def _list(lines: Iterable[Any]) -> str:
    items = "".join(f"<li>{escape(_shown(line))}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def _shown(value: Any) -> str:
    """A value of a report as text; "-" if it is missing."""
    if value is None or value == [] or value == {}:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return str(value)


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"
