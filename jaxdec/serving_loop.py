"""The host's side of continuous batching: rounds, deliveries, cancellation, records.

A loop asks the scheduler what to do, has the device do it, and hands every request what
it said. The device is behind a small protocol, so the same loop runs on an accelerator
(`jaxdec.batching.SlotDevice`) and on a simulated clock (`jaxdec.simulation`).

A request's *client* takes its tokens, may end it (at a stop string, say), and is then
notified, when all is in order again. A notification is the caller's code: it may submit
and cancel, and if it raises, only its own request ends. Its neighbours notice nothing.

A round on the device is done whole, or not at all: if something is raised in the middle
of it (memory that runs out, Control-C), nobody knows what the rows hold, so all
requests end as cancelled, with what they said before, and the loop begins anew.
"""

import collections
import contextlib
import dataclasses
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxdec.batching import Emitted
from jaxdec.latency import Burst, Record
from jaxdec.policies import Job, Limits, Policy, check_fits, check_ranked
from jaxdec.prefixes import Prefixes
from jaxdec.scheduling import Plan, Queue, schedule
from jaxdec.types import FinishReason


@runtime_checkable
class Client(Protocol):
    """Whom a request is served for."""

    def bind(self, served: "Served") -> None:
        """Called first, and once."""
        ...

    def take(self, tokens: list[int], finish: FinishReason) -> tuple[int, FinishReason]:
        """Takes what a step said, or nothing at the end of a cancelled request.

        Returns:
            How many of the tokens are kept, and why the request ends there, if so.
        """
        ...

    def notify(self) -> None:
        """Called after `take`, when records and slots are in order; may raise.

        What was taken may have been notified already, if another caller cancelled it.
        """
        ...


@runtime_checkable
class Device(Protocol):
    """Where rows are read and slots are stepped; see `jaxdec.batching`."""

    def begin(self, request: Any, said: Sequence[int], kept: Any = None) -> Any:
        """A row that has read nothing, or as much as a kept one, which stays."""
        ...

    def copy(self, row: Any) -> Any:
        """The same row, to be kept."""
        ...

    def read(self, row: Any) -> Any:
        """The row after its next chunk."""
        ...

    def insert(self, row: Any, slot: int) -> None:
        """Puts a row into a slot."""
        ...

    def extract(self, slot: int) -> Any:
        """The row in a slot, to be kept."""
        ...

    def discard(self, row: Any) -> None:
        """Takes back a row that is given up."""
        ...

    def step(self, is_free: np.ndarray, draft_limit: int | None = None) -> Emitted:
        """One round of the slots that are not free, with at most so many drafts."""
        ...

    def reset(self) -> None:
        """All slots free, whatever happened to them."""
        ...


@dataclasses.dataclass(kw_only=True, eq=False)
class Served:
    """A request on its way through a loop."""

    request: Any
    """What the device takes; None when it is done."""
    client: Client
    record: Record
    prompt: Any = ()
    """Its tokens, as an array; none when it is done."""
    tokens: list[int] = dataclasses.field(default_factory=list)
    """What it said so far."""
    row: Any = None
    """While it has one beside the slots."""
    error: BaseException | None = None
    """What its client raised when notified, or what ended a round in the middle."""


class ServingLoop:
    """Requests on the slots of one device, round by round."""

    def __init__(
        self,
        device: Device,
        policy: Policy,
        limits: Limits,
        clock: Callable[[], float],
        max_shared: int = 0,
    ):
        """Begins with no request.

        Args:
            device: where rows are.
            policy: whose turn it is.
            limits: of the device.
            clock: seconds.
            max_shared: rows of shared beginnings to keep (`jaxdec.prefixes`).
        """
        self.device = device
        self.policy = policy
        self.limits = limits
        self.clock = clock
        self.draft_limit: Callable[[int], int] | None = None
        """Most draft tokens of a row by how many run; see `jaxdec.speculation`."""
        self.queue = Queue(slots=(None,) * limits.num_slots)
        self.prefixes = Prefixes(limits.chunk, max_shared)
        self._served: dict[int, Served] = {}
        self._spoke: collections.deque[Served] = collections.deque()

    @property
    def is_busy(self) -> bool:
        """Whether some request is not done."""
        return bool(self._served)

    @property
    def num_open(self) -> int:
        """Requests that are not done."""
        return len(self._served)

    def serves(self, served: Served) -> bool:
        """Whether a request is one of those that are not done."""
        return self._served.get(served.record.id) is served

    def submit(
        self,
        request: Any,
        *,
        job_id: int,
        prompt_length: int,
        max_new_tokens: int,
        client: Client,
        prompt: Sequence[int] = (),
        arrival_s: float | None = None,
        priority: int = 0,
        deadline_s: float = float("inf"),
    ) -> Served:
        """Takes a request in; it is read and run by the rounds to come.

        Args:
            request: for `Device.begin`.
            job_id: its own number.
            prompt_length: tokens.
            max_new_tokens: tokens; 0 ends it at once.
            client: takes its tokens.
            prompt: its tokens, for what it shares with others.
            arrival_s: when it arrived; None is now.
            priority: see `policies.Job`.
            deadline_s: see `policies.Job`.

        Raises:
            ValueError: it could never run.
        """
        check_fits(self.limits, prompt_length, max_new_tokens)
        if arrival_s is None:
            arrival_s = self.clock()
        check_ranked(priority=priority, deadline_s=deadline_s, arrival_s=arrival_s)
        prompt = np.asarray(prompt, np.int64)
        job = Job(
            id=job_id,
            arrival_s=arrival_s,
            prompt_length=prompt_length,
            max_new_tokens=max_new_tokens,
            priority=priority,
            deadline_s=deadline_s,
        )
        record = Record(id=job_id, arrival_s=arrival_s, prompt_length=prompt_length)
        served = Served(request=request, client=client, record=record, prompt=prompt)
        client.bind(served)
        self._served[job_id] = served
        self.prefixes.see(prompt)
        job = dataclasses.replace(job, num_shared=self._num_shared(job))
        self.queue = self.queue.submit(job)
        if max_new_tokens == 0:
            self._notify(self._take(job_id, [], FinishReason.LENGTH, self.clock()))
        return served

    def cancel(self, job_id: int) -> bool:
        """Ends a request wherever it is; whether there was anything to end."""
        if job_id not in self._served:
            return False
        self._notify(self._take(job_id, [], FinishReason.CANCELLED, self.clock()))
        return True

    def round(self) -> bool:
        """At most one chunk, then a step of whoever runs; whether it did anything."""
        moved = self.prepare()
        return self.advance() or moved

    def prepare(self) -> bool:
        """Reads, moves and gives up rows as scheduled; whether there was anything."""
        now = self.clock()
        queue, plan = schedule(self.policy, self.limits, self.queue, now)
        with self._whole():
            self.queue = queue
            self._carry_out(plan, now)
        return plan != Plan()

    def advance(self) -> bool:
        """A step of all running requests, and its delivery; whether any ran."""
        self._tell()  # Whom an interrupt kept from hearing.
        running = [(slot, job.id) for slot, job in self._in_slots()]
        if not running:
            return False
        is_free = np.array([job is None for job in self.queue.slots])
        limit = self._draft_limit(len(running))
        # All take before any is notified: no caller can make another miss a token.
        with self._whole():
            emitted = self.device.step(is_free, limit)
            now = self.clock()
            for slot, job_id in running:
                num = int(emitted.num_tokens[slot])
                self.queue = self.queue.said(slot, num)
                served = self._take(
                    job_id,
                    emitted.tokens[slot, :num].tolist(),
                    FinishReason(int(emitted.finish[slot])),
                    now,
                    int(emitted.num_drafted[slot]),
                    int(emitted.num_accepted[slot]),
                )
                self._spoke.append(served)
        self._tell()
        return True

    def _draft_limit(self, num_running: int) -> int | None:
        """What the rule says of the next step.

        Raises:
            ValueError: it says no number of draft tokens.
        """
        limit = None if self.draft_limit is None else self.draft_limit(num_running)
        if limit is None or (isinstance(limit, numbers.Integral) and limit >= 0):
            return limit
        raise ValueError(
            f"the rule of draft lengths said {limit!r} for {num_running} running "
            "requests; it must give a whole number of at least 0, or None for no limit"
        )

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """What is done whole, or else ends all requests and begins anew."""
        try:
            yield
        except BaseException as error:
            now, cancelled = self.clock(), FinishReason.CANCELLED
            ended = [self._take(i, [], cancelled, now) for i in list(self._served)]
            self._spoke.extend(ended)
            self.queue = Queue(slots=(None,) * self.limits.num_slots)
            self.prefixes.clear()
            self.device.reset()
            self._tell()
            for served in ended:
                served.error = served.error or error
            raise

    def _tell(self) -> None:
        """Notifies all that took something."""
        while self._spoke:
            self._notify(self._spoke.popleft())

    def _in_slots(self) -> Iterator[tuple[int, Job]]:
        for slot, job in enumerate(self.queue.slots):
            if job is not None:
                yield slot, job

    def _carry_out(self, plan: Plan, now: float) -> None:
        """Does on the device what the scheduler decided."""
        for job_id in plan.drop:
            self._give_up(self._served[job_id])
            self._served[job_id].record.interruptions_s.append(now)
        if plan.extract is not None:
            job_id, slot = plan.extract
            self._served[job_id].row = self.device.extract(slot)
            self._served[job_id].record.interruptions_s.append(now)
        if plan.begin is not None:
            served = self._served[plan.begin]
            kept = self.prefixes.find(served.prompt)
            if kept is not None:
                self.prefixes.use(kept)
            row = None if kept is None else kept.row
            served.row = self.device.begin(served.request, served.tokens, row)
            if served.record.admitted_s is None:
                served.record.admitted_s = now
        if plan.read is not None:
            served = self._served[plan.read]
            served.row = self.device.read(served.row)
            self._keep(served, self.queue.find(plan.read).num_read)
        if plan.insert is not None:
            job_id, slot = plan.insert
            served = self._served[job_id]
            self.device.insert(served.row, slot)
            served.row = None
        if plan.drop:
            # What is kept may have changed while they ran.
            self.queue = self.queue.share(self._num_shared)

    def _num_shared(self, job: Job) -> int:
        """What a new row of a job begins with."""
        kept = self.prefixes.find(self._served[job.id].prompt)
        return 0 if kept is None else kept.num_read

    def _keep(self, served: Served, num_read: int) -> None:
        """Keeps a row that others will begin with, where it stands."""
        if self.prefixes.is_wanted(served.prompt, num_read):
            row = self.device.copy(served.row)
            for old in self.prefixes.keep(served.prompt, num_read, row):
                self.device.discard(old)
            self.queue = self.queue.share(self._num_shared)

    def _give_up(self, served: Served) -> None:
        """Hands back the row of a request, if it has one beside the slots."""
        if served.row is not None:
            self.device.discard(served.row)
            served.row = None

    def _take(
        self,
        job_id: int,
        tokens: list[int],
        finish: FinishReason,
        now: float,
        num_drafted: int = 0,
        num_accepted: int = 0,
    ) -> Served:
        """Hands a request what it said, and takes it out when it is done."""
        served = self._served[job_id]
        kept, finish = served.client.take(tokens, finish)
        served.tokens.extend(tokens[:kept])
        if kept:
            burst = Burst(now, kept, num_drafted, min(num_accepted, kept))
            served.record.bursts.append(burst)
        if finish != FinishReason.NONE:
            served.record.finish = finish
            served.record.finished_s = now
            # Its slot, its row and its place in the queue are free again; a caller who
            # keeps its record keeps no arrays.
            del self._served[job_id]
            self.queue = self.queue.remove(job_id)
            self._give_up(served)
            served.request, served.prompt = None, ()
        return served

    def _notify(self, served: Served) -> None:
        """Lets a caller's code run; what it raises ends its own request."""
        if served.error is not None:
            return
        try:
            served.client.notify()
        except Exception as error:
            served.error = error
            self.cancel(served.record.id)
