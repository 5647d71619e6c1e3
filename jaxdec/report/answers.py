"""Answers of a report as HTML, token by token: what was drafted, and what became of it.

Each token is a `<span>` whose class says where it came from and whose title tells the
rest; the page's script turns titles into one tooltip for mouse, touch and keyboard.
"""

import collections
import math
from collections.abc import Sequence
from html import escape

from jaxdec.report.svg import steps_strip
from jaxdec.report.tables import Record, label
from jaxdec.report.timeline import Step, Token, steps

LEGEND = (
    ("accepted", "draft token that the target agreed with"),
    ("correction", "the target's own, in place of a refused draft token"),
    ("bonus", "the target's own, after a draft accepted whole"),
    ("plain", "the target's own, where nothing was drafted"),
    ("refused", "draft token that was not accepted; +2: it went on for two more"),
)
_WORDS = {
    "correction": "correction by the target",
    "bonus": "bonus token of the target",
    "plain": "token of the target; nothing was drafted",
}


def answers(report: Record) -> str:
    """The section's content: a part a prompt, an answer a strategy."""
    prompts = report["settings"]["prompts"] or []
    parts = []
    for i, about in enumerate(prompts):
        told = [
            _answer(record, (record["requests"] or [])[i], record["draft_length"])
            for record in report["strategies"]
            if i < len(record["requests"] or [])
        ]
        if not any(told):
            continue
        text = about["prompt"]
        shown = (
            f'<blockquote class="prompt">{escape(text)}</blockquote>' if text else ""
        )
        title = escape(f"{about['prompt_id'] or i + 1} ({about['task'] or 'user'})")
        is_open = "" if parts else " open"
        parts.append(
            f"<details{is_open}><summary>{title}</summary>{shown}{''.join(told)}"
            "</details>"
        )
    if not parts:
        return "<p>This report keeps no answer token by token.</p>"
    items = (
        f'<li><span class="t {name}">{name}</span> {escape(words)}</li>'
        for name, words in LEGEND
    )
    return (
        f'<ul class="origins">{"".join(items)}</ul>'
        "<p>Tokens of one step stand together between thin bars. Hover over a token, "
        "touch it, or go there with Tab and the arrow keys, for what was drafted. The "
        "columns above an answer are its steps: tokens kept upwards, refused ones "
        "downwards.</p>"
        '<p><label><input type="checkbox" id="refused" checked> show refused draft '
        f"tokens</label></p>{''.join(parts)}"
    )


def _answer(record: Record, request: Record, is_drafting: int | None) -> str:
    """One strategy's answer to one prompt; "" if it was not kept."""
    found = steps(request)
    if not found:
        return ""
    name = label(record)
    num = collections.Counter(t.origin for step in found for t in step.tokens)
    total = sum(num.values())
    counts = [f"{num[kind]} {kind}" for kind, _ in LEGEND if num[kind]]
    line = (
        f"{total} tokens in {len(found)} steps, {total / len(found):.2f} a step: "
        f"{', '.join(counts)}"
    )
    strip = steps_strip(
        [
            (
                step.num_accepted,
                step.tokens[-1].origin if len(step.tokens) > step.num_accepted else "",
                step.num_judged - step.num_accepted,
            )
            for step in found
        ],
        f"Steps of {name}: {line}",
    )
    body = (
        f"<p>{escape(line)}</p>{strip if is_drafting else ''}"
        f'<div class="tokens" role="group" aria-label="{escape(name)}, token by token">'
        f"{_spans(found)}</div>"
    )
    if is_drafting:
        return f"<h4>{escape(name)}</h4>{body}"
    return f"<details><summary>{escape(name)}</summary>{body}</details>"


def _spans(found: Sequence[Step]) -> str:
    parts, at = [], 0
    for number, step in enumerate(found, start=1):
        inner = []
        for i, token in enumerate(step.tokens):
            if i == step.num_accepted:
                inner.append(_refused(step))
            at += 1
            told = f"token {at}, step {number}: {_told(step, i)}"
            place = "0" if at == 1 else "-1"
            inner.append(
                f'<span class="t {token.origin}" tabindex="{place}" '
                f'title="{escape(told)}">{_visible(token.text)}</span>'
            )
        if step.num_accepted == len(step.tokens):
            inner.append(_refused(step))
        parts.append(f'<span class="step">{"".join(inner)}</span>')
    return "".join(parts)


def _refused(step: Step) -> str:
    """What was not accepted, where it would stand; of what followed it, how much."""
    words = "".join(
        f'<del class="t refused">{_visible(text, ends_lines=False)}</del>'
        for text in step.refused
    )
    more = f"<small>+{len(step.dropped)}</small>" if step.dropped else ""
    return f'<span class="drafted">{words}{more}</span>' if words else ""


def _told(step: Step, index: int) -> str:
    """All that is known of a token, in lines."""
    token = step.tokens[index]
    if token.origin == "accepted":
        lines = [
            f"accepted draft token {index + 1} of {step.num_judged}",
            f"draft {_quoted(token.text)}, target {_quoted(token.text)}",
            *_probability(token),
        ]
        if token.confidence is not None:
            lines.append(f"the drafter's confidence: {token.confidence:.1%}")
        return "\n".join(lines)
    lines = [_WORDS[token.origin]]
    target = f"target {_quoted(token.text)}"
    if token.origin == "correction" and step.refused:
        drafted = " or ".join(map(_quoted, step.refused))
        target = f"draft {drafted}, {target}"
    lines += [target, *_probability(token)]
    if step.refused and step.refused_confidence is not None:
        lines.append(
            f"the drafter's confidence in {_quoted(step.refused[0])}: "
            f"{step.refused_confidence:.1%}"
        )
    if step.dropped:
        lines.append(f"the draft went on: {''.join(map(_quoted, step.dropped))}")
    return "\n".join(lines)


def _probability(token: Token) -> list[str]:
    if token.logprob is None:
        return []
    return [f"the target's probability of it: {math.exp(token.logprob):.1%}"]


def _quoted(text: str) -> str:
    """Between quotes that show where spaces are; line ends as a sign."""
    return f"“{text.replace(chr(10), '↵')}”"


def _visible(text: str, *, ends_lines: bool = True) -> str:
    """Escaped; a line end has a sign, and a token without text a dot."""
    if not text:
        return '<i class="sign">·</i>'
    sign = '<i class="sign">↵</i>'
    return escape(text).replace("\n", f"{sign}\n" if ends_lines else sign)
