"""One step of decoding in pictures: the law of the next token, and what a step reads.

For the notebook on greedy decoding and sampling.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdec import statistics
from jaxdec.course.display import (
    LINES,
    Picture,
    Table,
    canvas,
    evidence_of,
    token_text,
)
from jaxdec.planning.bandwidth import weight_bytes
from jaxdec.text import Generated, Outputs

MEGABYTE = 1e6


def law_of(answer: Generated) -> dict[int, float]:
    """The likeliest first tokens of an answer, and their probabilities.

    Args:
        answer: of a call with ``logprobs`` and ``processed_logprobs=True``.

    Raises:
        ValueError: the call did not ask for log-probabilities.
    """
    if not answer.top_logprobs:
        raise ValueError(
            "this answer has no log-probabilities; generate it with logprobs=8 and "
            "processed_logprobs=True"
        )
    return {token: float(np.exp(value)) for token, value in answer.top_logprobs[0]}


def draw_laws(outputs: Outputs, labels: Sequence[str]) -> Picture:
    """The law of the first token under several settings, a panel each.

    Args:
        outputs: one prompt, decoded with as many settings.
        labels: of the settings, in the same order.
    """
    lm, laws = outputs.run.call.lm, [law_of(answer) for answer in outputs]
    tokens = max(laws, key=len)
    figure, axes = canvas(
        len(laws), width=2.3 * len(laws), height=3.2, sharey=True, squeeze=False
    )
    for panel, law, label in zip(axes[0], laws, labels, strict=True):
        panel.barh(
            range(len(tokens)), [law.get(t, 0.0) for t in tokens], color=LINES[0]
        )
        panel.set_title(f"{label}\n{len(law)} shown, {sum(law.values()):.0%}")
        panel.set_xlim(0, 1)
    axes[0][0].set_yticks(range(len(tokens)), [token_text(lm, t) for t in tokens])
    axes[0][0].invert_yaxis()
    return Picture(figure, f"the law of the next token under {', '.join(labels)}")


def plain_table(outputs: Outputs, row: int = 0) -> Table:
    """What one answer of plain decoding took: steps, times, and state."""
    found = evidence_of(outputs)
    own = found.requests[row]
    rows = [
        ("prompt tokens", own.prompt_length),
        ("tokens said", own.output_length),
        ("steps", own.num_steps),
        ("time to first token, ms", own.ttft_s * 1000),
        ("time per token after it (TPOT), ms", own.tpot_ms),
        ("KV cache entries at the end", own.prompt_length + own.output_length - 1),
        ("ended by", own.finish_reason),
    ]
    return Table(("what", "value"), rows)


def reads_of(outputs: Outputs, row: int = 0) -> Table:
    """What each step of plain decoding read: weights, and keys and values."""
    lm = outputs.run.call.lm
    prompt = len(outputs.run.call.prompts[row])
    weights = weight_bytes(lm.config, lm.params) / MEGABYTE
    token = lm.kv_bytes_per_token / MEGABYTE
    rows = [
        (step + 1, prompt + step, weights, token * (prompt + step), token)
        for step in range(len(outputs[row].tokens))
    ]
    titles = ("step", "cache length", "weights MB", "KV read MB", "KV written MB")
    return Table(titles, rows)


def draw_reads(reads: Table) -> Picture:
    """`reads_of` over the steps, on a logarithmic axis."""
    figure, axes = canvas()
    for title, colour in zip(reads.titles[2:], LINES, strict=False):
        axes.plot(
            reads.column("step"), reads.column(title), "-", color=colour, label=title
        )
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("megabytes")
    axes.legend(loc="center right")
    return Picture(figure, "bytes of a step: weights, keys and values read, written")


def sampling_table(outputs: Outputs, temperatures: Sequence[float]) -> Table:
    """What temperature does to answers: a row a temperature.

    Args:
        outputs: answers to one prompt, with ``logprobs=0``.
        temperatures: of each answer.
    """
    groups: dict[float, list[Generated]] = {}
    for answer, temperature in zip(outputs, temperatures, strict=True):
        groups.setdefault(temperature, []).append(answer)
    rows = []
    for temperature, answers in groups.items():
        counts = [statistics.count_repetitions(a.tokens) for a in answers]
        repeated, total = (sum(values) for values in zip(*counts, strict=True))
        logprobs = [x for answer in answers for x in answer.logprobs or ()]
        rows.append(
            (
                temperature,
                len(answers),
                statistics.distinct_outputs([a.tokens for a in answers]),
                repeated / total if total else 0.0,
                statistics.perplexity(logprobs),
            )
        )
    titles = ("temperature", "answers", "different", "repetition", "perplexity")
    return Table(titles, rows, "perplexity: the model's own, of what was said")


def draw_sampling(table: Table) -> Picture:
    """`sampling_table` as curves."""
    figure, panels = canvas(2, width=8.0)
    temperatures = table.column("temperature")
    for axes, title, colour in zip(
        panels, ("repetition", "perplexity"), LINES, strict=False
    ):
        axes.plot(temperatures, table.column(title), "o-", color=colour)
        axes.set_xlabel("temperature")
        axes.set_ylabel(title)
    panels[0].set_ylim(0, 1)
    panels[1].set_yscale("log")
    return Picture(figure, "repetition and perplexity by temperature")


def compare_answers(outputs: Outputs, labels: Sequence[Any]) -> Table:
    """Answers side by side, one of each label; long ones are cut."""
    first: dict[Any, str] = {}
    for answer, label in zip(outputs, labels, strict=True):
        first.setdefault(label, answer.text[:160])
    return Table(("how", "what it said"), list(first.items()))
