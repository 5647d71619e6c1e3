"""Serving on a simulated clock: the scheduler's own code, with costs for a device.

Whether a policy holds its bound, and what a load does to waiting times, depends on how
long chunks and steps take, not on what the tokens are. Here a `CostTable` takes the
device's place under the very loop that serves requests (`jaxdec.serving_loop`), and a
clock that jumps the place of time. So loads that no machine at hand carries can be
looked at, exactly and again: all randomness comes from seeds.

A step emits one token, and draft tokens by the measured probability that each is
accepted given that the one before it was, drawn for every request apart.

Several replicas are as many devices, each with a queue of its own; a request is routed
when it arrives, by what is known then.
"""

import copy
import dataclasses
import heapq
import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int

from jaxdec.batching import Emitted
from jaxdec.counts import Number
from jaxdec.latency import Record
from jaxdec.policies import Limits, Policy, check_ranked, check_whole
from jaxdec.scheduling import CostTable
from jaxdec.serving_loop import Served, ServingLoop
from jaxdec.speculation import Acceptance
from jaxdec.types import FinishReason

ROUTES = ("least_loaded", "round_robin")
"""To the replica with the fewest open requests, or to one after the other."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request of a load."""

    arrival_s: float
    prompt_length: int
    output_length: int
    """Tokens that it really says."""
    priority: int = 0
    deadline_s: float = float("inf")

    def __post_init__(self):
        check_ranked(arrival_s=self.arrival_s)
        check_whole("prompt_length", self.prompt_length)
        check_whole("output_length", self.output_length, least=0)


def poisson_times(rate: Number, num: int, seed: int) -> Float[np.ndarray, "num"]:
    """Arrival times in seconds: independent requests, `rate` a second on average."""
    _check_rate(rate)
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, num))


def bursty_times(
    rate: Number, num: int, seed: int, *, burst: Number = 8
) -> Float[np.ndarray, "num"]:
    """Arrival times of bursts: `burst` requests at once on average, `rate` a second.

    Bursts are a Poisson process, and their sizes geometric.

    Args:
        rate: requests per second in the long run.
        num: requests.
        seed: of the draws.
        burst: mean size; 1 is `poisson_times` in law.
    """
    _check_rate(rate)
    if burst < 1:
        raise ValueError(f"a burst has at least 1 request, got {burst}; use 1 or more")
    rng = np.random.default_rng(seed)
    sizes = rng.geometric(1 / burst, num)
    times = np.cumsum(rng.exponential(burst / rate, num))
    return np.repeat(times, sizes)[:num]


def lognormal_lengths(
    median: Number, sigma: Number, most: int, num: int, seed: int
) -> Int[np.ndarray, "num"]:
    """Lengths in tokens, as those of real prompts and answers: a few are very long.

    Args:
        median: half are shorter.
        sigma: of the logarithm; 0 makes all alike.
        most: longer ones are cut to this.
        num: how many.
        seed: of the draws.
    """
    drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, num)
    return np.clip(np.rint(drawn), 1, most).astype(np.int64)


def load(
    times: Float[np.ndarray, "num"],
    prompt_lengths: Int[np.ndarray, "num"],
    output_lengths: Int[np.ndarray, "num"],
) -> tuple[Arrival, ...]:
    """Requests from their times and lengths."""
    rows = zip(times, prompt_lengths, output_lengths, strict=True)
    return tuple(
        Arrival(arrival_s=float(t), prompt_length=int(p), output_length=int(o))
        for t, p, o in rows
    )


def simulate(
    arrivals: Sequence[Arrival],
    policy: Policy,
    limits: Limits,
    costs: CostTable,
    *,
    acceptance: Acceptance | Sequence[float] = (),
    seed: int = 0,
    draft_limit: Callable[[int], int] | None = None,
    num_replicas: int = 1,
    route: str = "least_loaded",
    progress: Callable[[int, int, str], None] = lambda *_: None,
) -> list[Record]:
    """Serves a load on a simulated clock.

    Args:
        arrivals: the load, in any order.
        policy: whom to prefer.
        limits: what a device has to give.
        costs: what its work takes.
        acceptance: what becomes of drafts; or only the probabilities of draft token i,
            given that the one before it was accepted. Empty is plain decoding.
        seed: of the acceptance.
        draft_limit: how many run to the most draft tokens of each; None drafts as many
            as `acceptance` has.
        num_replicas: devices with a queue of their own each.
        route: which of them a request goes to, when it arrives: one of `ROUTES`.
        progress: called with requests arrived, all, and words.

    Returns:
        The records, in the order of `arrivals`.

    Raises:
        ValueError: a request that could never run, costs for fewer slots, or no such
            way to route.
    """
    if len(costs.step_s) < limits.num_slots:
        raise ValueError(
            f"costs has steps of up to {len(costs.step_s)} requests, but there are "
            f"{limits.num_slots} slots; measure a step with every slot running"
        )
    if num_replicas < 1 or route not in ROUTES:
        raise ValueError(
            f"a load needs at least 1 replica and a route of {', '.join(ROUTES)}, got "
            f"{num_replicas} and {route!r}"
        )
    if not isinstance(acceptance, Acceptance):
        acceptance = Acceptance(conditional=tuple(acceptance))
    replicas = [
        _Replica(policy, limits, costs, acceptance, draft_limit)
        for _ in range(num_replicas)
    ]
    order = sorted(range(len(arrivals)), key=lambda i: arrivals[i].arrival_s)
    records: dict[int, Record] = {}
    busy: list[tuple[float, int]] = []  # A heap: who is behind in time goes on first.

    def run_until(time_s: float) -> None:
        while busy and busy[0][0] < time_s:
            _, which = busy[0]
            replica = replicas[which]
            assert replica.loop.round(), "a request waits, and nothing happens"
            if replica.loop.is_busy:
                heapq.heapreplace(busy, (replica.device.now_s, which))
            else:
                heapq.heappop(busy)

    for number, index in enumerate(order):
        arrival = arrivals[index]
        run_until(arrival.arrival_s)
        which = number % num_replicas
        if route == "least_loaded":
            which = min(range(num_replicas), key=lambda i: replicas[i].loop.num_open)
        replica = replicas[which]
        was_busy = replica.loop.is_busy
        if not was_busy:
            replica.device.now_s = max(replica.device.now_s, arrival.arrival_s)
        served = replica.loop.submit(
            SimulatedRow(arrival, acceptance, np.random.default_rng((seed, index))),
            job_id=index,
            prompt_length=arrival.prompt_length,
            max_new_tokens=arrival.output_length,
            client=_Listener(),
            arrival_s=arrival.arrival_s,
            priority=arrival.priority,
            deadline_s=arrival.deadline_s,
        )
        records[index] = served.record
        if replica.loop.is_busy and not was_busy:
            heapq.heappush(busy, (replica.device.now_s, which))
        progress(number, len(order), f"{arrival.arrival_s:.1f} s of the load")
    run_until(math.inf)
    return [records[index] for index in range(len(arrivals))]


class SimulatedRow:
    """A request, what will become of its drafts, and how far it got."""

    def __init__(
        self, arrival: Arrival, acceptance: Acceptance, rng: np.random.Generator
    ):
        self.arrival = arrival
        self.num_said = 0
        self.num_steps = 0
        # A step says a token at least, so it takes no more steps than tokens.
        draws = rng.random((arrival.output_length, acceptance.length + 1))
        is_kept = draws[:, 1:] < np.array(acceptance.conditional)[None]
        self._is_tree = acceptance.is_tree
        self._has_draft = (draws[:, 0] < acceptance.draft_rate).tolist()
        self._num_kept = np.cumprod(is_kept, axis=1).sum(axis=1).tolist()

    def step(self, most: int) -> tuple[int, int]:
        """Drafts at most so many tokens; how many it drafts, and are accepted."""
        room = self.arrival.output_length - self.num_said - 1
        drafted = 0
        if room and self._has_draft[self.num_steps]:
            # How deep a tree is accepted is cut, not how many nodes it has.
            drafted = most if self._is_tree else min(most, room)
        accepted = min(drafted, room, self._num_kept[self.num_steps])
        self.num_steps += 1
        self.num_said += accepted + 1
        return drafted, accepted


class SimulatedDevice:
    """A device that does nothing, and takes the time that it would take."""

    def __init__(self, costs: CostTable, num_slots: int, length: int = 0):
        self.now_s = 0.0
        self.costs = costs
        self.length = length
        self.slots: list[SimulatedRow | None] = [None] * num_slots

    def begin(
        self, request: SimulatedRow, said: Sequence[int], kept: None = None
    ) -> SimulatedRow:
        """Takes the time of a new row; `said` is known to the request."""
        assert len(said) == request.num_said and kept is None
        self.now_s += self.costs.begin_s
        return request

    def copy(self, row: SimulatedRow) -> SimulatedRow:
        """Takes the time of moving a row out."""
        self.now_s += self.costs.extract_s
        return copy.copy(row)

    def read(self, row: SimulatedRow) -> SimulatedRow:
        """Takes the time of a chunk."""
        self.now_s += self.costs.chunk_s
        return row

    def insert(self, row: SimulatedRow, slot: int) -> None:
        """Takes the time of an insertion."""
        self.now_s += self.costs.insert_s
        self.slots[slot] = row

    def extract(self, slot: int) -> SimulatedRow:
        """Takes the time of moving a row out."""
        self.now_s += self.costs.extract_s
        row = self.slots[slot]
        assert row is not None
        return row

    def discard(self, row: SimulatedRow) -> None:
        """Takes no time."""

    def reset(self) -> None:
        """Takes no time."""
        self.slots = [None] * len(self.slots)

    def step(self, is_free: np.ndarray, draft_limit: int | None = None) -> Emitted:
        """Takes the time of a step as wide as its longest draft."""
        most = self.length
        if draft_limit is not None:
            most = min(most, draft_limit)
        num_slots = len(self.slots)
        num, finish, drafted, accepted = np.zeros((4, num_slots), np.int32)
        running = np.flatnonzero(~is_free).tolist()
        for slot in running:
            row = self.slots[slot]
            assert row is not None
            drafted[slot], accepted[slot] = row.step(most)
            num[slot] = accepted[slot] + 1
            if row.num_said == row.arrival.output_length:
                finish[slot] = FinishReason.LENGTH
        self.now_s += self.costs.step(len(running), int(drafted.max()))
        return Emitted(
            tokens=np.zeros((num_slots, self.length + 1), np.int32),
            num_tokens=num,
            finish=finish,
            num_drafted=drafted,
            num_accepted=accepted,
        )


class _Replica:
    """A device with its queue."""

    def __init__(
        self,
        policy: Policy,
        limits: Limits,
        costs: CostTable,
        acceptance: Acceptance,
        draft_limit: Callable[[int], int] | None,
    ):
        device = SimulatedDevice(costs, limits.num_slots, acceptance.length)
        self.device = device
        self.loop = ServingLoop(device, policy, limits, clock=lambda: device.now_s)
        self.loop.draft_limit = draft_limit


class _Listener:
    """Takes everything, and has nothing to say to it."""

    def bind(self, served: Served) -> None:
        pass

    def take(self, tokens: list[int], finish: FinishReason) -> tuple[int, FinishReason]:
        return len(tokens), finish

    def notify(self) -> None:
        pass


def _check_rate(rate: Number) -> None:
    if not rate > 0:
        raise ValueError(f"a rate is requests per second above 0, got {rate}")
