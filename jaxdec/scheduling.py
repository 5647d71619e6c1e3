"""Who is read and who runs next: data in, data out.

A scheduler sees no model and no array. It is given a `Queue` of `Job` records and the
time, and returns the queue as it will be and a `Plan` of what to do to get there. The
same function serves the device and the simulated clock (`jaxdec.simulation`).

A *round* is at most one prefill chunk, then one step of all running requests. So a
running request never waits longer for its next token than a chunk and a step take
(`token_gap_bound`), however long the prompts are that arrive.

Who goes first is up to the policy (`jaxdec.policies`). The best request is never passed
over for one that happens to fit: it is waited for.

With preemption a running request gives way to a waiting one of strictly smaller rank.
Nothing is lost: "recompute" keeps its tokens and reads them again later, "keep" keeps
its whole row. Either way it goes on with the very next token, since the noise of a
token depends on its position alone.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxdec.policies import Job, Limits, Policy

GAP_SLACK = 1.25
"""What copying a row, the host's own work and jitter may add to a round."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Queue:
    """Every request that is not done, by where it is."""

    waiting: tuple[Job, ...] = ()
    """Those with a row gave way, and wait to go on."""
    reading: Job | None = None
    """The one whose prompt is being read."""
    slots: tuple[Job | None, ...]

    @property
    def running(self) -> tuple[Job, ...]:
        """Jobs in slots."""
        return tuple(job for job in self.slots if job is not None)

    def submit(self, job: Job) -> "Queue":
        """With one more request waiting."""
        return dataclasses.replace(self, waiting=(*self.waiting, job))

    def share(self, num_shared: Callable[[Job], int]) -> "Queue":
        """With what new rows of the waiting begin with."""
        waiting = [
            dataclasses.replace(job, num_shared=num_shared(job)) for job in self.waiting
        ]
        return dataclasses.replace(self, waiting=tuple(waiting))

    def find(self, job_id: int) -> Job:
        """A job, wherever it is."""
        everybody = (*self.waiting, self.reading, *self.slots)
        return next(job for job in everybody if job is not None and job.id == job_id)

    def remove(self, job_id: int) -> "Queue":
        """Without a request, wherever it is."""
        if self.reading is not None and self.reading.id == job_id:
            return dataclasses.replace(self, reading=None)
        for slot, job in enumerate(self.slots):
            if job is not None and job.id == job_id:
                return self._with_slot(slot, None)
        waiting = tuple(job for job in self.waiting if job.id != job_id)
        return dataclasses.replace(self, waiting=waiting)

    def said(self, slot: int, num_tokens: int) -> "Queue":
        """After the request in a slot emitted tokens, and read as many."""
        job = self.slots[slot]
        assert job is not None
        job = dataclasses.replace(
            job,
            num_said=job.num_said + num_tokens,
            num_read=job.num_read + num_tokens,
        )
        return self._with_slot(slot, job)

    def _with_slot(self, slot: int, job: Job | None) -> "Queue":
        slots = (*self.slots[:slot], job, *self.slots[slot + 1 :])
        return dataclasses.replace(self, slots=slots)

    def _put_back(self, job: Job, has_row: bool) -> "Queue":
        """A job that gave way, among the waiting."""
        if not has_row:
            job = _without_row(job)
        return self.remove(job.id).submit(job)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do before the next step, in this order. Ids of jobs, and slots."""

    drop: tuple[int, ...] = ()
    """Rows to give up; their requests are read again later."""
    extract: tuple[int, int] | None = None
    """``(job, slot)``: its row is kept beside the slots."""
    begin: int | None = None
    """Gets a new row."""
    read: int | None = None
    """Its row reads a chunk."""
    insert: tuple[int, int] | None = None
    """``(job, slot)``: its row goes into the slot."""


def schedule(
    policy: Policy, limits: Limits, queue: Queue, now_s: float
) -> tuple[Queue, Plan]:
    """Decides what happens before the next step.

    Args:
        policy: whom to prefer.
        limits: what there is.
        queue: where everybody is.
        now_s: the time, for policies that look at it.

    Returns:
        The queue after the plan was carried out, and the plan.
    """
    return _Round(policy, limits, queue, now_s).run()


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostTable:
    """What a device's work takes, in seconds; measured or assumed."""

    step_s: tuple[float, ...]
    """Entry n - 1: a step with n running requests, and all the drafts there are."""
    chunk_s: float
    """On average of a prompt's chunks."""
    last_chunk_s: float = 0.0
    """Where that is longer: of a chunk behind a long prompt, which attends to it."""
    begin_s: float = 0.0
    """Of a new row for a request."""
    insert_s: float = 0.0
    extract_s: float = 0.0
    limited_s: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """``(draft length, step_s)``, increasing: steps that judge at most so many draft
    tokens of a row, where that was measured too."""

    def __post_init__(self):
        steps = (self.step_s, *(times for _, times in self.limited_s))
        moves = (self.begin_s, self.insert_s, self.extract_s)
        costs = (*sum(steps, ()), self.chunk_s, self.last_chunk_s, *moves)
        if not self.step_s or not all(cost >= 0 for cost in costs):
            raise ValueError(
                f"costs are seconds of at least 0, with one or more steps, got {self}; "
                "measure them on the device"
            )
        lengths = [length for length, _ in self.limited_s]
        if lengths != sorted(set(lengths)) or len({len(t) for t in steps}) > 1:
            raise ValueError(
                "limited_s are increasing draft lengths, each with as many steps as "
                f"step_s, got {self.limited_s}; measure all for the same slots"
            )

    def step(self, num_running: int, draft_limit: int | None = None) -> float:
        """Seconds of a step with at most so many draft tokens of a row."""
        if draft_limit is not None:
            for length, times in self.limited_s:
                if draft_limit <= length:
                    return times[num_running - 1]
        return self.step_s[num_running - 1]

    @property
    def longest_chunk_s(self) -> float:
        """The longest of all chunks."""
        return max(self.chunk_s, self.last_chunk_s)

    @property
    def longest_step_s(self) -> float:
        """The longest of all steps."""
        return max(max(self.step_s), *(max(t) for _, t in self.limited_s), 0.0)


def token_gap_bound(*groups: CostTable, shares: bool = False) -> float:
    """The longest time in seconds between two bursts of tokens of a running request.

    A round reads one chunk, of one group, and makes a step of every group:

        bound = GAP_SLACK x (chunk time + sum of the step times)

    of the longest chunk and steps there are.

    What else a round does must fit into the slack: a row may be made, one moved out of
    a slot and another one in, and where beginnings are shared (`shares`), the new row
    may begin as a copy of a kept one, and be kept itself.

    Raises:
        ValueError: moving rows takes longer than the slack, so the bound is false.
    """
    chunk = max(costs.longest_chunk_s for costs in groups)
    steps = sum(costs.longest_step_s for costs in groups)
    copies = 3 if shares else 1
    moves = max(
        costs.begin_s + costs.insert_s + copies * costs.extract_s for costs in groups
    )
    bound = GAP_SLACK * (chunk + steps)
    if chunk + steps + moves > bound:
        raise ValueError(
            f"moving rows takes {moves:.4g} s, more than the slack of "
            f"{bound - chunk - steps:.4g} s in a round; use a larger prefill chunk, or "
            "a smaller capacity"
        )
    return bound


def _without_row(job: Job) -> Job:
    return dataclasses.replace(job, has_row=False, num_read=0)


class _Round:
    """One decision, step by step; local to `schedule`."""

    def __init__(self, policy: Policy, limits: Limits, queue: Queue, now_s: float):
        self.limits = limits
        self.queue = queue
        self.rank: Callable[[Job], Any] = lambda job: policy.rank(job, now_s, limits)
        self.is_preemptive = limits.preemption != "none"
        self.drop: list[int] = []
        self.extract: tuple[int, int] | None = None
        self.begin: int | None = None

    def run(self) -> tuple[Queue, Plan]:
        self.choose()
        job = self.queue.reading
        if job is None:
            return self.queue, self.plan()
        read = insert = None
        if job.num_unread > 0:
            read = job.id
            num = min(job.num_unread, self.limits.chunk)
            job = dataclasses.replace(job, num_read=job.num_read + num)
            self.queue = dataclasses.replace(self.queue, reading=job)
        if job.num_unread == 0 and (slot := self.slot_for(job)) is not None:
            insert = (job.id, slot)
            self.queue = self.queue.remove(job.id)._with_slot(slot, job)
        return self.queue, self.plan(read=read, insert=insert)

    def plan(self, **rest) -> Plan:
        return Plan(
            drop=tuple(self.drop), extract=self.extract, begin=self.begin, **rest
        )

    def choose(self) -> None:
        """Lets the best of the waiting be read, if it may."""
        reading, is_full = self.queue.reading, None not in self.queue.slots
        if not self.is_preemptive and (reading is not None or is_full):
            return  # Nobody gives way: no need to look at the waiting.
        best = min(self.queue.waiting, key=self.rank, default=None)
        if best is None or not self.has_slot(best):
            return
        if reading is not None and not self.outranks(best, reading):
            return
        if not self.make_room(best):
            return
        reading = self.queue.reading
        if reading is not None:
            self.give_way(reading)
        if not best.has_row:
            self.begin = best.id
            best = dataclasses.replace(best, has_row=True, num_read=best.num_shared)
        self.queue = dataclasses.replace(self.queue.remove(best.id), reading=best)

    def has_slot(self, job: Job) -> bool:
        """Whether a slot is free, or held by somebody who would give way."""
        if None in self.queue.slots:
            return True
        return any(self.outranks(job, other) for other in self.queue.running)

    def outranks(self, job: Job, other: Job) -> bool:
        return self.is_preemptive and self.rank(job) < self.rank(other)

    def make_room(self, job: Job) -> bool:
        """Gives up rows until the KV budget holds the job; False if it cannot."""
        queue, most = self.queue, self.limits.kv_tokens
        if most is None or job.has_row:
            return True
        reading = () if queue.reading is None else (queue.reading,)
        kept = [other for other in queue.waiting if other.has_row]
        active = (*queue.running, *reading)
        excess = sum(other.num_reserved for other in (*kept, *active))
        excess += job.num_reserved - most
        losers = [other for other in queue.running if self.outranks(job, other)]
        # Kept rows go first, since nobody runs in them, then the one that is read,
        # which gives way in any case; of each kind the last in rank.
        kept.sort(key=self.rank, reverse=True)
        losers.sort(key=self.rank, reverse=True)
        given: list[Job] = []
        for other in (*kept, *reading, *losers):
            if excess > 0:
                given.append(other)
                excess -= other.num_reserved
        if excess > 0:
            return False
        for other in given:
            self.drop.append(other.id)
            self.queue = self.queue._put_back(other, has_row=False)
        return True

    def give_way(self, job: Job) -> bool:
        """Takes a job off its slot, or from being read; whether its row is kept."""
        kept = sum(other.has_row for other in self.queue.waiting)
        keeps = self.limits.preemption == "keep" and kept < self.limits.max_kept
        if not keeps:
            self.drop.append(job.id)
        self.queue = self.queue._put_back(job, has_row=keeps)
        return keeps

    def slot_for(self, job: Job) -> int | None:
        """A free slot, or that of the least of those who give way."""
        if None in self.queue.slots:
            return self.queue.slots.index(None)
        worst = max(self.queue.running, key=self.rank)
        if not self.outranks(job, worst):
            return None
        slot = self.queue.slots.index(worst)
        if self.give_way(worst):
            self.extract = (worst.id, slot)
        return slot
