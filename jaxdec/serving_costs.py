"""What the work of a server takes, measured on its own device.

A `CostTable` is the median time of a step with 1, 2, ... running requests, with drafts
of every length that costs differently, of a chunk, of a new row, and of moving one in
and out. All of it on the very programs that serve, warm, each waited for; with a prompt
in the middle of a request's life, and drafts as long as they may be.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxdec import speculation
from jaxdec.scheduling import CostTable
from jaxdec.serving_loop import Device
from jaxdec.speculation import Acceptance

REPEATS = 5


@runtime_checkable
class TimedDevice(Device, Protocol):
    """A device whose work can be waited for."""

    def wait(self, row: Any = None) -> None:
        """Until the slots, and a row beside them, are there."""
        ...


def draft_lengths(length: int, widths: Sequence[int]) -> tuple[int, ...]:
    """Draft lengths up to K whose steps cost differently: none, and every width."""
    return tuple(sorted({0, length, *widths}))


def running_counts(num_slots: int) -> tuple[int, ...]:
    """How many requests to measure with: powers of two, and all; between, a line.

    >>> running_counts(12)
    (1, 2, 4, 8, 12)
    """
    powers = [2**i for i in range(num_slots.bit_length()) if 2**i < num_slots]
    return (*powers, num_slots)


def measure_costs(
    device: TimedDevice,
    request: Any,
    *,
    num_chunks: int,
    num_slots: int,
    lengths: Sequence[int] = (0,),
    repeats: int = REPEATS,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int, int, str], None] = lambda *_: None,
) -> CostTable:
    """Times a device that nobody else uses meanwhile.

    Args:
        device: whose slots are free; they are free again afterwards.
        request: a typical one, which always drafts and does not end within a step.
        num_chunks: chunks that its prompt takes.
        num_slots: of the device.
        lengths: draft lengths to measure, the last of which is K.
        repeats: samples of everything, after one that does not count.
        clock: seconds.
        progress: called with what is done, all, and words.

    Raises:
        ValueError: the request drafts less than it is asked to.
    """

    def timed(function: Callable[..., Any], *arguments) -> tuple[Any, float]:
        started = clock()
        result = function(*arguments)
        device.wait(result)
        return result, clock() - started

    begins, inserts, extracts = [], [], []
    chunks: list[list[float]] = [[] for _ in range(num_chunks)]
    row = None
    for _ in range(repeats + 1):
        row = device.begin(request, ())
        device.wait(row)
        for samples_at in chunks:
            row, spent = timed(device.read, row)
            samples_at.append(spent)

    def step(num_running: int, length: int) -> float:
        """One step from where the request begins, so that all samples are alike."""
        for slot in range(num_running):
            copy = device.copy(row)  # An inserted row is used up.
            device.wait(copy)
            inserts.append(timed(device.insert, copy, slot)[1])
        is_free = np.arange(num_slots) >= num_running
        started = clock()
        emitted = device.step(is_free, length)
        spent = clock() - started
        drafted = int(emitted.num_drafted[:num_running].max())
        if drafted < length:
            raise ValueError(
                f"a step was to draft {length} tokens, but the drafter gave {drafted}, "
                "so its cost cannot be measured; measure the strategy without a "
                "threshold of its own"
            )
        return spent

    # In turns, so that what else disturbs the machine meets all of them.
    counts = running_counts(num_slots)
    cases = [(length, num) for length in lengths for num in counts]
    samples: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    for turn in range(repeats + 1):
        for index, (length, num) in enumerate(cases):
            done, total = turn * len(cases) + index, (repeats + 1) * len(cases)
            progress(done, total, f"a step of {num}, {length} draft tokens")
            samples[length, num].append(step(num, length))
    by_length: dict[int, tuple[float, ...]] = {}
    for length in lengths:
        times = [statistics.median(samples[length, num][1:]) for num in counts]
        between = np.interp(np.arange(1, num_slots + 1), counts, times)
        by_length[length] = tuple(between.tolist())
    for _ in range(repeats + 1):
        # Into a slot and out of it again: whose memory the next one takes.
        for samples_of, make in (
            (extracts, lambda: device.extract(0)),
            (begins, lambda: device.begin(request, ())),
        ):
            device.insert(row, 0)
            device.wait()
            row, spent = timed(make)
            samples_of.append(spent)
    # Blanks what is left in the slots.
    device.step(np.ones(num_slots, bool), 0)
    chunk_s = [statistics.median(found[1:]) for found in chunks]
    return CostTable(
        step_s=by_length[lengths[-1]],
        limited_s=tuple((n, by_length[n]) for n in lengths[:-1]),
        chunk_s=statistics.mean(chunk_s),
        last_chunk_s=max(chunk_s),
        begin_s=statistics.median(begins[1:]),
        insert_s=statistics.median(inserts[1:]),
        extract_s=statistics.median(extracts[1:]),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """What was measured of a server: all that the simulated clock needs."""

    costs: CostTable
    acceptance: Acceptance
    prefill_chunk: int
    """Tokens of the chunk that was measured."""
    strategy: str
    plain: CostTable | None = None
    """The costs of plain decoding on a server of its own, which no drafter slows down;
    None where nothing is drafted, or it was not measured."""

    def rule(self, kind: str) -> Callable[[int], int] | None:
        """The rule of a server for one of `SPECULATION`."""
        if kind == "scheduled":
            return speculation.scheduled(self.costs, self.acceptance)
        return None if kind == "fixed" else lambda num_running: 0

    def without_drafter(self) -> "Profile":
        """The server of plain decoding that was measured beside this one.

        Raises:
            ValueError: none was.
        """
        if self.plain is None:
            raise ValueError(
                f"the profile of {self.strategy!r} has no costs of plain decoding; "
                "measure it again"
            )
        return dataclasses.replace(
            self,
            costs=self.plain,
            acceptance=Acceptance(),
            strategy="greedy",
            plain=None,
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Profile":
        """The profile that `to_dict` was of.

        Raises:
            ValueError: it is of something else.
        """
        try:
            acceptance = dict(values["acceptance"])
            acceptance["conditional"] = tuple(acceptance["conditional"])
            plain = values.get("plain")
            return cls(
                costs=_table(values["costs"]),
                acceptance=Acceptance(**acceptance),
                prefill_chunk=values["prefill_chunk"],
                strategy=values["strategy"],
                plain=None if plain is None else _table(plain),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"this is no profile of a server ({type(error).__name__}: {error}); "
                "make one with jaxdec load --save-profile"
            ) from None


def _table(values: Mapping[str, Any]) -> CostTable:
    """Costs, from JSON values."""
    costs = dict(values)
    limited = [(n, tuple(times)) for n, times in costs["limited_s"]]
    costs |= {"step_s": tuple(costs["step_s"]), "limited_s": tuple(limited)}
    return CostTable(**costs)
