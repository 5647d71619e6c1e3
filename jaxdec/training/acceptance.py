"""Tokens a step, found on answers that are known, without decoding.

Where the target's answer was greedy, a drafter's proposal at any place can be judged by
the answer itself: a draft token is accepted if it, and all before it, are what follows.
So the rounds that decoding would take can be walked through: begin at the last prompt
token, skip what was accepted and the target's own token, and go on there. This is what
decoding does, but for rounding.
"""

import dataclasses
from typing import Any

import numpy as np

from jaxdec.statistics import is_repetitive
from jaxdec.training.batches import Batch


@dataclasses.dataclass(kw_only=True)
class Walk:
    """Counts over answers."""

    tokens: int = 0
    steps: int = 0
    judged: np.ndarray
    """By depth: draft tokens whose predecessors were all accepted."""
    accepted: np.ndarray

    @property
    def tokens_per_step(self) -> float:
        """1 where nothing is accepted."""
        return self.tokens / max(self.steps, 1)

    @property
    def rates(self) -> list[float]:
        """By depth: how many are accepted, of those whose predecessors were."""
        return (self.accepted / np.maximum(self.judged, 1)).tolist()

    def add(self, right: np.ndarray, begin: int, end: int) -> None:
        """Walks through one answer.

        Args:
            right: ``[T, K]``, as of `jaxdec.training.objective.Objective`.
            begin: of the answer.
            end: of the answer.
        """
        length = begin
        while length < end:
            # The target has read all but the last token; row i = length - 2.
            run = right[length - 2] if length >= 2 else np.zeros(right.shape[1], bool)
            most = min(len(run), end - length)
            wrong = np.flatnonzero(~run[:most])
            num = int(wrong[0]) if len(wrong) else most
            self.judged[: min(num + 1, most)] += 1
            self.accepted[:num] += 1
            taken = min(num + 1, end - length)
            self.tokens, self.steps = self.tokens + taken, self.steps + 1
            length += taken


def walk(depth: int) -> Walk:
    """No answers yet."""
    return Walk(judged=np.zeros(depth, np.int64), accepted=np.zeros(depth, np.int64))


class Validation:
    """Walks of several draft lengths at once, and of the answers that do not repeat."""

    def __init__(self, depth: int):
        self.by_length = {k: walk(k) for k in range(1, depth + 1)}
        self.plain = walk(depth)
        self.depth = depth

    def add(self, batch: Batch, right: np.ndarray) -> None:
        """Walks through the answers of a batch."""
        for row in range(len(right)):
            begin, end = int(batch.prompt_length[row]), int(batch.length[row])
            if end <= begin:
                continue
            for length, found in self.by_length.items():
                found.add(right[row, :, :length], begin, end)
            if not is_repetitive(batch.tokens[row, begin:end].tolist()):
                self.plain.add(right[row], begin, end)

    def summary(self) -> dict[str, Any]:
        """Figures by name."""
        full = self.by_length[self.depth]
        return {
            "tokens_per_step": round(full.tokens_per_step, 4),
            "tokens_per_step_by_length": {
                k: round(w.tokens_per_step, 4) for k, w in self.by_length.items()
            },
            "tokens_per_step_not_repetitive": round(self.plain.tokens_per_step, 4),
            "acceptance_by_depth": [round(rate, 4) for rate in full.rates],
            "acceptance": round(
                float(full.accepted.sum() / max(full.judged.sum(), 1)), 4
            ),
        }
