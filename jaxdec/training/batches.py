"""Batches of whole sequences; which come when is a function of the seed alone.

Sequences of similar length are batched together, in a few lengths, so that little is
computed on padding and few programs are compiled. What a step reads depends on nothing
but the records, the seed and the number of the step: so a run can go on at any step,
and two runs with one seed see the same.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxdec.training.store import TokenStore
from jaxdec.types import pytree


@pytree
class Batch:
    """Sequences from their start, padded at the end."""

    tokens: Int[Array, "B T"]
    length: Int[Array, "B"]
    """0 where a row only fills the batch up."""
    prompt_length: Int[Array, "B"]
    features: Float[Array, "B T n E"]
    """The target's residual streams that were kept, in their order."""

    @property
    def is_answer(self) -> Bool[Array, "B T"]:
        """Tokens that the target said."""
        place = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None]
        begin, end = (jnp.asarray(x) for x in (self.prompt_length, self.length))
        return (place >= begin[:, None]) & (place < end[:, None])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
    """The records of one batch, and the length that they are padded to."""

    records: tuple[int, ...]
    length: int


def bucket_lengths(lengths: np.ndarray, num: int, multiple: int = 32) -> list[int]:
    """The `num` lengths, or fewer, with which padding adds least.

    Args:
        lengths: of the records, at least one.
        num: lengths at most.
        multiple: every length is one of it.
    """
    sizes, counts = np.unique(-(-lengths // multiple) * multiple, return_counts=True)
    below = np.concatenate([[0], np.cumsum(counts)])
    # cost[j]: the least padded total of all records that fit sizes[:j].
    cost = np.where(np.arange(len(sizes) + 1) == 0, 0.0, np.inf)
    choices = []
    for _ in range(min(num, len(sizes))):
        padded = below[1:, None] - below[None, :-1]
        total = cost[None, :-1] + np.where(padded > 0, padded * sizes[:, None], np.inf)
        choices.append(np.argmin(total, axis=1))
        cost = np.concatenate([[np.inf], np.min(total, axis=1)])
    found, j = [], len(sizes)
    for choice in reversed(choices):
        found.append(int(sizes[j - 1]))
        j = int(choice[j - 1])
    return sorted(found)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """The order in which records are read."""

    lengths: np.ndarray
    """Of all records of the store."""
    records: np.ndarray
    """Those that are read."""
    batch_size: int
    seed: int
    num_buckets: int = 3

    @functools.cached_property
    def buckets(self) -> list[int]:
        """The lengths that there are."""
        return bucket_lengths(self.lengths[self.records], self.num_buckets)

    def epoch(self, number: int) -> list[Slice]:
        """The batches of one pass through the records.

        What is left of a length when no whole batch of it is, goes with longer ones;
        what is left of the longest waits for the next pass.
        """
        rng = np.random.default_rng((self.seed, number))
        records = self.records[rng.permutation(len(self.records))]
        lengths = self.lengths[records]
        slices, left, shorter = [], np.array([], np.int64), 0
        for size in self.buckets:
            fits = (lengths > shorter) & (lengths <= size)
            waiting = np.concatenate([left, records[fits]])
            whole = len(waiting) - len(waiting) % self.batch_size
            slices += [
                Slice(
                    records=tuple(waiting[i : i + self.batch_size].tolist()),
                    length=size,
                )
                for i in range(0, whole, self.batch_size)
            ]
            left, shorter = waiting[whole:], size
        if not slices:
            slices = [Slice(records=tuple(left.tolist()), length=self.buckets[-1])]
        return [slices[i] for i in rng.permutation(len(slices))]

    def from_step(self, step: int) -> Iterator[Slice]:
        """The batches of steps `step`, `step` + 1, ..., without an end."""
        number = 0
        while True:
            slices = self.epoch(number)
            if step < len(slices):
                yield from slices[step:]
                step = 0
            else:
                step -= len(slices)
            number += 1

    def once(self) -> list[Slice]:
        """All records in batches, the last of a length not full; for validation."""
        slices, shorter = [], 0
        for size in self.buckets:
            lengths = self.lengths[self.records]
            chosen = self.records[(lengths > shorter) & (lengths <= size)]
            slices += [
                Slice(
                    records=tuple(chosen[i : i + self.batch_size].tolist()), length=size
                )
                for i in range(0, len(chosen), self.batch_size)
            ]
            shorter = size
        return slices


def make_batch(
    store: TokenStore, part: Slice, batch_size: int, features: Any = None
) -> Batch:
    """The batch as host arrays.

    Args:
        store: the tokens.
        part: the records.
        batch_size: rows; those that no record fills are empty.
        features: ``record -> [length, n, E]``; None is no features.
    """
    tokens = np.zeros((batch_size, part.length), np.int32)
    length, prompt = (np.zeros(batch_size, np.int32) for _ in range(2))
    rows = []
    for row, record in enumerate(part.records):
        ids = store.tokens(record)
        tokens[row, : len(ids)] = ids
        length[row], prompt[row] = len(ids), store.prompt_length[record]
        if features is not None:
            rows.append(features(record))
    if rows:
        _, num, width = rows[0].shape
        kept = np.zeros((batch_size, part.length, num, width), rows[0].dtype)
        for row, values in enumerate(rows):
            kept[row, : len(values)] = values
    else:
        kept = np.zeros((batch_size, part.length, 0, 0), np.float32)
    return Batch(tokens=tokens, length=length, prompt_length=prompt, features=kept)
