"""Exercises of the last four notebooks: blocks, budgets, benchmark, scheduling.

Right answers are found by the library's own functions, not written down here; how
answers are looked at is told in `jaxdec.course.checking`.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxdec import draft_length
from jaxdec.compare import Comparison
from jaxdec.course.budgeting import best_length
from jaxdec.course.checking import agrees, is_close, judge
from jaxdec.course.display import Table
from jaxdec.planning.break_even import break_even_acceptance, expected_tokens
from jaxdec.scheduling import GAP_SLACK

# ---- 05: parallel drafts -------------------------------------------------------------

CONFIDENCE = (0.9, 0.8, 0.6, 0.95)


def check_survival(survival: Callable[[Sequence[float]], Any]) -> None:
    """``survival(confidence)``: how likely each token and all before it are kept."""
    rows = jnp.asarray([CONFIDENCE], jnp.float32)
    wanted = np.asarray(draft_length.survival(rows)[0])
    found = survival(list(CONFIDENCE))
    judge(
        found,
        lambda answer: is_close(answer, wanted),
        f"Of {CONFIDENCE} the first survives with 0.9, the second with 0.9 x 0.8, and "
        "so on.",
        "Survival only falls, so a threshold cuts a draft at one place, and the "
        "decision about a token never looks past it.",
    )


def check_judged(answer: int | None) -> None:
    """How many tokens of `CONFIDENCE` are judged with a threshold of 0.5?"""
    rows = jnp.asarray([CONFIDENCE], jnp.float32)
    everything = jnp.asarray([len(CONFIDENCE)], jnp.int32)
    rule = draft_length.threshold(0.5)
    wanted = int(rule(rows, everything, jnp.asarray([True]))[0])
    judge(
        answer,
        lambda found: is_close(found, wanted),
        f"Compare the survival (the running product of {CONFIDENCE}) with 0.5, not the "
        "confidence itself.",
        "The fourth token is likely by itself, but it is only reached if the third is "
        "kept.",
    )


# ---- 06: proposal budget -------------------------------------------------------------


def check_break_even(needed: Callable[[float, float, int], Any]) -> None:
    """``needed(round_ms, plain_ms, length)``: the acceptance rate that just pays."""
    for case in ((30.0, 20.0, 4), (66.0, 20.0, 2)):
        found, wanted = needed(*case), break_even_acceptance(*case)
        if not agrees(found, wanted):
            break
    judge(
        found,
        lambda answer: is_close(answer, wanted),
        f"A round of {case[0]:g} ms pays when it says {case[0]:g} / {case[1]:g} "
        "tokens; one of them is the target's own, the others come from "
        f"{case[2]} draft tokens.",
        "Above 1 no drafter is good enough: the round itself is too long.",
    )


BUDGET = dict(draft_ms=2.0, verify_ms=30.0, plain_ms=28.0, given=0.7)


def check_best_length(answer: int | None) -> None:
    """The best draft length with the costs and the acceptance of `BUDGET`."""

    def per_token(k: int) -> float:
        if k == 0:
            return BUDGET["plain_ms"]
        tokens = expected_tokens([BUDGET["given"]] * k, k)
        return (k * BUDGET["draft_ms"] + BUDGET["verify_ms"]) / tokens

    wanted = min(range(13), key=per_token)
    near = {k: round(per_token(k), 2) for k in (1, 2, 3)}
    judge(
        answer,
        lambda found: is_close(found, wanted),
        f"Time per token is (k x {BUDGET['draft_ms']:g} + {BUDGET['verify_ms']:g}) / "
        f"E(k) with E(k) = 1 + 0.7 + 0.7^2 + ...; it begins {near}. Go on until it "
        "rises.",
        "Beyond it, each further draft token costs more than it brings.",
    )


def check_own_best_length(answer: int | None, table: Table) -> None:
    """The draft length that `table` of your own run speaks for; 0 is to turn it off."""
    judge(
        answer,
        lambda found: is_close(found, best_length(table)),
        "Look for the smallest time per token in the table, plain decoding (length 0) "
        "included.",
        "It is a prediction from one run; try it, and let the benchmark decide.",
    )


# ---- 07: benchmark -------------------------------------------------------------------


def check_choice(answer: str | None, comparison: Comparison) -> None:
    """The strategy that the evidence of your own run speaks for."""
    best = comparison.advice.best
    judge(
        answer,
        lambda found: str(found) == best,
        "Leave out whoever is not certified as lossless. Of the rest take the least "
        "TPOT, but only if it beats plain decoding by more than 3 %.",
        comparison.advice.verdict.splitlines()[0],
    )


def check_most_tokens(answer: str | None, comparison: Comparison) -> None:
    """The strategy with most tokens per step in your own run."""
    rates = {
        label: found.tokens_per_step for label, found in comparison.evidence.items()
    }
    judge(
        answer,
        lambda found: rates.get(str(found)) == max(rates.values()),
        f"It is one of {', '.join(rates)}; look at the column tokens/step.",
        "Whether it is also the fastest depends on what its rounds cost.",
    )


# ---- 08: scheduling ------------------------------------------------------------------

WAITING = (100, 5, 20)
"""Tokens that each of three requests has to say."""


def check_order(answer: Sequence[int] | None) -> None:
    """In which order does one slot serve `WAITING` with the least mean latency?"""

    def mean_end(order: Sequence[int]) -> float:
        return float(np.mean(np.cumsum(order)))

    least = min(map(mean_end, itertools.permutations(WAITING)))
    judge(
        answer,
        lambda found: (
            sorted(found) == sorted(WAITING) and mean_end(list(found)) == least
        ),
        f"Give the three numbers of {WAITING} in another order. Whoever goes first "
        "lets all others wait; the mean end of a first, b next, c last is "
        "(3 a + 2 b + c) / 3.",
        "That is the policy shortest_remaining. It is the long requests that pay.",
    )


def check_gap_bound(bound: Callable[[float, float], Any]) -> None:
    """``bound(chunk_ms, step_ms)``: the longest gap between tokens of a running one."""
    found = bound(64.0, 40.0)
    judge(
        found,
        lambda answer: 104.0 <= float(answer) <= 104.0 * GAP_SLACK + 1e-6,
        "A round reads at most one chunk of a new prompt, and then makes one step of "
        "all who run. What is the longest time from one step to the next?",
        f"The library allows a slack of {GAP_SLACK:g} for moving rows. However long "
        "the queue and the prompts are, the bound stays.",
    )


def check_percentile(p99: Callable[[Sequence[float]], Any]) -> None:
    """``p99(gaps)``: the gap that 99 of 100 gaps do not exceed."""
    gaps = np.concatenate([np.full(97, 10.0), [50.0, 60.0, 90.0]])
    np.random.default_rng(0).shuffle(gaps)
    found = p99(gaps.tolist())
    judge(
        found,
        lambda answer: 60.0 <= float(answer) <= 90.0,
        "Sort the gaps and look 99 % of the way up; the mean of these gaps is "
        f"{gaps.mean():.1f} and hides the tail.",
        "Ninety-seven gaps of a hundred were 10 ms, and still a reader meets a long "
        "one in every hundred tokens.",
    )
