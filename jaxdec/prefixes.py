"""Beginnings that prompts share, such as a system prompt, are read once.

A row that has read r tokens knows r + 1 of them: a drafter reads each token with the
one after it. So requests with the same r + 1 first tokens have the same row up to
there, target and drafter alike, and it can be kept and copied. Kept are only rows that
have read whole chunks: a request that begins with one of them reads the rest in the
very chunks that it would have read alone, and rounds alike.

A beginning is worth a row once two prompts share it. Rows are kept as long as they are
among the `most` last used.
"""

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jaxdec.policies import check_whole

Prompt = Sequence[int] | np.ndarray
"""Tokens."""

REMEMBERED = 64
"""Prompts of the past that a new one is compared with."""


class Kept(NamedTuple):
    """A row that others begin with."""

    tokens: Int[np.ndarray, "r+1"]
    """What it knows."""
    row: Any

    @property
    def num_read(self) -> int:
        """Tokens that the row has read."""
        return len(self.tokens) - 1

    def begins(self, prompt: Int[np.ndarray, "n"]) -> bool:
        """Whether a prompt's row goes through this one."""
        return np.array_equal(prompt[: len(self.tokens)], self.tokens)


class Prefixes:
    """The rows that are kept, and the beginnings that are worth one."""

    def __init__(self, chunk: int, most: int):
        """Nothing yet.

        Args:
            chunk: tokens that a prefill chunk reads.
            most: rows to keep; 0 keeps none.

        Raises:
            ValueError: fewer than none.
        """
        check_whole("max_shared", most, least=0)
        self._chunk, self._most = chunk, most
        self._kept: list[Kept] = []
        # Both as arrays of tokens.
        self._wanted: collections.deque = collections.deque(maxlen=REMEMBERED)
        self._seen: collections.deque = collections.deque(maxlen=REMEMBERED)

    def __len__(self):
        return len(self._kept)

    def see(self, prompt: Prompt) -> None:
        """Remembers a prompt; what it shares with earlier ones is worth a row."""
        if not self._most:
            return
        new = _array(prompt)
        shared = max((self._num_shared(new, old) for old in self._seen), default=0)
        if shared and not any(
            np.array_equal(new[: shared + 1], old) for old in self._wanted
        ):
            self._wanted.append(new[: shared + 1])
        self._seen.append(new)

    def find(self, prompt: Prompt) -> Kept | None:
        """The kept row that has read most of a prompt."""
        if not self._kept:
            return None
        tokens = _array(prompt)
        fits = [kept for kept in self._kept if kept.begins(tokens)]
        return max(fits, key=lambda kept: kept.num_read, default=None)

    def clear(self) -> None:
        """Forgets all rows."""
        self._kept = []

    def use(self, kept: Kept) -> None:
        """Marks a row as used last."""
        self._kept = [*(k for k in self._kept if k is not kept), kept]

    def is_wanted(self, prompt: Prompt, num_read: int) -> bool:
        """Whether the row of a prompt is worth keeping where it stands."""
        known = _array(prompt[: num_read + 1])
        if len(known) <= num_read or not any(
            np.array_equal(known, wanted) for wanted in self._wanted
        ):
            return False
        found = self.find(prompt[: num_read + 1])
        return found is None or found.num_read < num_read

    def keep(self, prompt: Prompt, num_read: int, row: Any) -> list[Any]:
        """Keeps a row; gives back those that there is no more room for."""
        self._kept.append(Kept(_array(prompt[: num_read + 1]), row))
        old, self._kept = self._kept[: -self._most], self._kept[-self._most :]
        return [kept.row for kept in old]

    def _num_shared(self, one, other) -> int:
        """Tokens in whole chunks that two prompts may read as one row."""
        num = min(len(one), len(other))
        differs = np.flatnonzero(one[:num] != other[:num])
        known = int(differs[0]) if len(differs) else num
        return max(known - 1, 0) // self._chunk * self._chunk


def _array(tokens: Prompt) -> Int[np.ndarray, "n"]:
    """As it is, where it is one already."""
    return np.asarray(tokens, np.int64)
