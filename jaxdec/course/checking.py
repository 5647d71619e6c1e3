"""How an answer to an exercise is looked at.

None (or a function that returns None) is no answer yet, which is said and harms
nothing. A wrong answer raises `WrongAnswer` with what to look at; a right one is told
why it matters.
"""

from collections.abc import Callable
from typing import Any

import numpy as np


class WrongAnswer(AssertionError):
    """An answer that is not right yet; the message says what to look at."""


def judge(answer: Any, is_right: Callable[[Any], bool], hint: str, why: str) -> None:
    """Says what an answer is worth.

    Raises:
        WrongAnswer: it is wrong, or cannot be looked at.
    """
    if answer is None:
        print("Not answered yet. Put your answer in the place of None.")
        return
    try:
        found = bool(is_right(answer))
    except (TypeError, ValueError) as error:
        raise WrongAnswer(f"{answer!r} cannot be checked ({error}). {hint}") from None
    if not found:
        raise WrongAnswer(f"Not yet, with {_short(answer)}. {hint}")
    print(f"Right. {why}")


def _short(answer: Any) -> str:
    """The answer in few digits."""
    try:
        return str(np.round(np.asarray(answer, np.float64), 4).tolist())
    except (TypeError, ValueError):
        return str(answer)


def is_close(answer: Any, wanted: Any) -> bool:
    """Equal up to the rounding of a few digits, and of the same shape."""
    found, wanted = np.asarray(answer, np.float64), np.asarray(wanted, np.float64)
    return found.shape == wanted.shape and np.allclose(found, wanted, atol=6e-3)


def agrees(found: Any, wanted: Any) -> bool:
    """Whether an answer is there and close to the right one; never an error."""
    try:
        return found is not None and is_close(found, wanted)
    except (TypeError, ValueError):
        return False
