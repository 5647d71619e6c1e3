"""Exact verification in pictures: states that stay, drafts refused, laws that hold.

For the notebook on classic speculative decoding.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdec import counts, program, statistics
from jaxdec.call import check
from jaxdec.course.choosing import law_of
from jaxdec.course.display import COLOURS, LINES, Picture, Table, canvas, token_text
from jaxdec.lm import LM
from jaxdec.text import Generated
from jaxdec.types import DecodeState, Request, StepInfo, Strategy, StrategyParams

_BEFORE = 4
"""Tokens that are drawn before the anchor."""


def open_strategy(
    lm: LM, prompt: Any, strategy: Any, **options: Any
) -> tuple[Strategy, StrategyParams, Request]:
    """The pure functions behind a call of `jaxdec.generate`, and what they take.

    state = strategy.prefill(params, request)
    state, info = strategy.step(params, state)

    Args:
        lm: the target.
        prompt: one prompt.
        strategy: a name or a configuration.
        **options: as for `jaxdec.generate`.

    Raises:
        ValueError: bad input, as for `jaxdec.generate`.
    """
    call = check(lm, prompt, single=True, strategy=strategy, **options)
    opened, params = program.build(lm, call.key)
    return opened, params, call.request


def is_same(one: DecodeState, other: DecodeState) -> bool:
    """Whether two states are equal in every number of theirs."""

    def plain(state):
        keys = jax.random.key_data(state.sequences.key)
        state = state.replace(sequences=state.sequences.replace(key=keys))
        return [np.asarray(x) for x in jax.tree.leaves(state)]

    pairs = zip(plain(one), plain(other), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def step_table(before: DecodeState, info: StepInfo, after: DecodeState) -> Table:
    """What a step did to the lengths that say what counts."""
    rows = [
        (
            name,
            int(state.sequences.length[0]),
            int(state.cache.length[0]),
            None if counts is None else int(counts.num_drafted[0]),
            None if counts is None else int(counts.num_accepted[0]),
            None if counts is None else int(counts.num_emitted[0]),
        )
        for name, state, counts in (("before", before, None), ("after", after, info))
    ]
    titles = ("state", "tokens", "in the cache", "drafted", "accepted", "emitted")
    return Table(titles, rows, "a token is in the cache once it has been read")


def draw_step(
    lm: LM, before: DecodeState, info: StepInfo, after: DecodeState
) -> Picture:
    """The tokens of a row before a step, its draft, and the tokens after it."""
    begin = int(before.sequences.length[0])
    end, num = int(after.sequences.length[0]), int(info.num_drafted[0])
    first, last = max(begin - _BEFORE, 0), max(begin + num, end)
    accepted = int(info.num_accepted[0])
    judged, emitted = int(info.num_judged[0]), int(info.num_emitted[0])
    own = counts.origins(judged, accepted, emitted)[-1]
    figure, axes = canvas(width=0.95 * (last - first) + 1.4, height=2.4)

    def box(place: int, line: int, text: str, colour: str, is_read: bool = True):
        edge = dict(edgecolor="black", linewidth=0.8, linestyle="-" if is_read else ":")
        axes.bar(place, 0.8, 0.94, bottom=line, color=colour, **edge)
        axes.annotate(text, (place, line + 0.4), ha="center", va="center", fontsize=9)

    said = np.asarray(before.sequences.tokens[0])
    for place in range(first, begin):
        for line in (0, 2):
            is_read = line == 0 or place < begin - 1
            box(place, line, token_text(lm, said[place]), COLOURS["plain"], is_read)
    drafted = np.asarray(info.draft_tokens[0])[:num]
    for i, token in enumerate(drafted):
        kind = "accepted" if i < accepted else "refused"
        box(begin + i, 1, token_text(lm, token), COLOURS[kind])
    said = np.asarray(after.sequences.tokens[0])
    for i, place in enumerate(range(begin, end)):
        kind = "accepted" if i < accepted else own
        text = token_text(lm, said[place])
        box(place, 0, text, COLOURS[kind], is_read=place < end - 1)
    axes.set_yticks([2.4, 1.4, 0.4], ["before", "draft", "after"])
    axes.set_xlim(first - 0.7, last - 0.3)
    axes.set_ylim(-0.2, 3)
    axes.set_xlabel("position (dotted: said, not yet read)")
    return Picture(
        figure, f"a step that drafted {num} tokens and kept {accepted} of them"
    )


Step = Callable[[StrategyParams, DecodeState], tuple[DecodeState, StepInfo]]
"""The step of a strategy, compiled."""


class Walked(NamedTuple):
    """A step that was taken, and the states before and after it."""

    before: DecodeState
    info: StepInfo
    after: DecodeState


def walk(
    step: Step, params: StrategyParams, state: DecodeState, num: int
) -> list[Walked]:
    """Takes steps one after another and keeps every state on the way."""
    walked = []
    for _ in range(num):
        after, info = step(params, state)
        walked.append(Walked(state, info, after))
        state = after
    return walked


def first_refusal(walked: Sequence[Walked]) -> Walked:
    """The first step in which a draft token was refused; without any, the first."""
    refused = [w for w in walked if int(w.info.num_judged[0] - w.info.num_accepted[0])]
    return (refused or walked)[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Futures:
    """Steps from one and the same state, with noise of their own each."""

    emitted: tuple[int, ...]
    """The first token that each step said."""
    drafted: tuple[int, ...]
    """The first token of each draft; of a step without one, nothing."""
    num_accepted: tuple[int, ...]


def futures(
    step: Step,
    params: StrategyParams,
    state: DecodeState,
    seeds: Iterable[int],
) -> Futures:
    """Takes one step from a state again and again; the state is never spent.

    Args:
        step: of a strategy, compiled.
        params: of the strategy.
        state: of one request.
        seeds: a request key for every step.
    """
    place = int(state.sequences.length[0])
    emitted, drafted, accepted = [], [], []
    for seed in seeds:
        key = program.request_key(seed)[None]
        own = state.replace(sequences=state.sequences.replace(key=key))
        after, info = step(params, own)
        emitted.append(int(after.sequences.tokens[0, place]))
        if int(info.num_drafted[0]):
            drafted.append(int(info.draft_tokens[0, 0]))
        accepted.append(int(info.num_accepted[0]))
    return Futures(
        emitted=tuple(emitted), drafted=tuple(drafted), num_accepted=tuple(accepted)
    )


def law_table(lm: LM, found: Futures, plain: Generated) -> Table:
    """The target's law of a token beside what drafts and steps said.

    Args:
        lm: the target.
        found: steps from the state before that token.
        plain: plain decoding's answer from there, with all its ``logprobs``.
    """
    law = law_of(plain)
    rows = [
        (
            token_text(lm, token),
            chance,
            found.drafted.count(token) / max(len(found.drafted), 1),
            found.emitted.count(token) / len(found.emitted),
        )
        for token, chance in law.items()
    ]
    others = [
        sum(token not in law for token in tokens) / max(len(tokens), 1)
        for tokens in (found.drafted, found.emitted)
    ]
    if any(others):
        rows.append(("others", max(1 - sum(law.values()), 0.0), *others))
    return Table(("token", "target", "drafted", "emitted"), rows)


def draw_law(table: Table, num: int) -> Picture:
    """`law_table` as bars, with what is chance: two standard errors of `num` draws."""
    figure, axes = canvas(width=7.0)
    places = np.arange(len(table.rows))
    law = np.array(table.column("target"))
    spread = 2 * np.sqrt(law * (1 - law) / max(num, 1))
    axes.bar(
        places - 0.27, law, 0.27, yerr=spread, color=LINES[0], capsize=3, label="target"
    )
    axes.bar(places, table.column("emitted"), 0.27, color=LINES[2], label="emitted")
    drafted = table.column("drafted")
    axes.bar(places + 0.27, drafted, 0.27, color=LINES[1], label="drafted")
    axes.set_xticks(places, table.column("token"))
    axes.set_ylabel("probability")
    axes.legend()
    return Picture(figure, "the target's law of a token, and what was drafted and said")


def law_test(
    found: Futures, plain: Generated, *, of: str = "emitted"
) -> statistics.KSResult:
    """Whether tokens follow the target's law (`jaxdec.statistics`).

    Args:
        found: steps from one state.
        plain: as for `law_table`.
        of: ``"emitted"`` or ``"drafted"``.
    """
    law = law_of(plain)
    order = sorted(law)
    below = np.concatenate([[0.0], np.cumsum([law[t] for t in order])])
    tokens = getattr(found, of)
    # A token that the target cannot say lies past all that it can.
    at = np.array([order.index(t) if t in law else len(order) for t in tokens])
    chance = np.array([law.get(t, 0.0) for t in tokens])
    uniform = np.random.default_rng(0).random(len(tokens))
    values = statistics.pit_values(np.minimum(below[at], 1.0), chance, uniform)
    return statistics.kolmogorov_smirnov(values)


def law_tests(found: Futures, plain: Generated) -> Table:
    """`law_test` of what was said and of what was drafted, a row each."""
    rows = []
    for of in ("emitted", "drafted"):
        test = law_test(found, plain, of=of)
        rows.append((of, test.n, test.statistic, test.threshold, test.passed))
    titles = ("tokens", "how many", "distance", "at most", "follow the target")
    return Table(titles, rows, "Kolmogorov-Smirnov; false alarms: 1 in 10,000")
