"""Serving on a simulated clock: the scheduler's own code, with costs for a device.

Whether a policy holds its bound, and what a load does to waiting times, depends on how
long chunks and steps take, not on what the tokens are. Here a `CostTable` takes the
device's place under the very loop that serves requests (`jaxdec.serving_loop`), and a
clock that jumps the place of time. So loads that no machine at hand carries can be
looked at, exactly and again: all randomness comes from seeds.

A step emits one token, and draft tokens by the measured probability that each is
accepted given that the one before it was, drawn for every request apart.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from jaxdec.batching import Emitted
from jaxdec.counts import Number
from jaxdec.latency import Record
from jaxdec.policies import Limits, Policy
from jaxdec.scheduling import CostTable
from jaxdec.serving_loop import Served, ServingLoop
from jaxdec.types import FinishReason


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request of a load."""

    arrival_s: float
    prompt_length: int
    output_length: int
    """Tokens that it really says."""
    priority: int = 0
    deadline_s: float = float("inf")


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
    acceptance: Sequence[float] = (),
    seed: int = 0,
) -> list[Record]:
    """Serves a load on a simulated clock.

    Args:
        arrivals: the load, in any order.
        policy: whom to prefer.
        limits: what the device has to give.
        costs: what its work takes.
        acceptance: of draft token i, given that the one before it was accepted; empty
            is plain decoding. As many are drafted in every step.
        seed: of the acceptance.

    Returns:
        The records, in the order of `arrivals`.

    Raises:
        ValueError: a request that could never run, or costs for fewer slots.
    """
    if len(costs.step_s) < limits.num_slots:
        raise ValueError(
            f"costs has steps of up to {len(costs.step_s)} requests, but there are "
            f"{limits.num_slots} slots; measure a step with every slot running"
        )
    device = SimulatedDevice(costs, limits.num_slots, acceptance)
    loop = ServingLoop(device, policy, limits, clock=lambda: device.now_s)
    order = sorted(range(len(arrivals)), key=lambda i: arrivals[i].arrival_s)
    served = {}
    num_arrived = 0
    while num_arrived < len(order) or loop.is_busy:
        while num_arrived < len(order):
            index = order[num_arrived]
            arrival = arrivals[index]
            if arrival.arrival_s > device.now_s:
                break
            num_arrived += 1
            served[index] = loop.submit(
                SimulatedRow(arrival, np.random.default_rng((seed, index))),
                job_id=index,
                prompt_length=arrival.prompt_length,
                max_new_tokens=arrival.output_length,
                client=_Listener(),
                arrival_s=arrival.arrival_s,
                priority=arrival.priority,
                deadline_s=arrival.deadline_s,
            )
        if not loop.round() and num_arrived < len(order):
            device.now_s = arrivals[order[num_arrived]].arrival_s
    return [served[index].record for index in range(len(arrivals))]


class SimulatedRow:
    """A request, and how far it got."""

    def __init__(self, arrival: Arrival, rng: np.random.Generator):
        self.arrival = arrival
        self.rng = rng
        self.num_said = 0


class SimulatedDevice:
    """A device that does nothing, and takes the time that it would take."""

    def __init__(
        self, costs: CostTable, num_slots: int, acceptance: Sequence[float] = ()
    ):
        self.now_s = 0.0
        self.costs = costs
        self.acceptance = np.asarray(acceptance, np.float64)
        self.slots: list[SimulatedRow | None] = [None] * num_slots

    def begin(self, request: SimulatedRow, said: Sequence[int]) -> SimulatedRow:
        """The request as it stands; `said` is known to it."""
        assert len(said) == request.num_said
        return request

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

    def step(self, is_free: np.ndarray) -> Emitted:
        """Takes the time of a step, and draws what is accepted."""
        num_slots, num_drafts = len(self.slots), len(self.acceptance)
        self.now_s += self.costs.step_s[num_slots - int(is_free.sum()) - 1]
        tokens = np.zeros((num_slots, num_drafts + 1), np.int32)
        num, finish, drafted, accepted = np.zeros((4, num_slots), np.int32)
        for slot in np.flatnonzero(~is_free):
            row = self.slots[slot]
            assert row is not None
            left = row.arrival.output_length - row.num_said
            drafted[slot] = min(num_drafts, left - 1)
            draws = row.rng.random(num_drafts) < self.acceptance
            kept = int(np.cumprod(draws).sum())
            accepted[slot] = min(kept, drafted[slot])
            num[slot] = accepted[slot] + 1
            row.num_said += int(num[slot])
            if num[slot] == left:
                finish[slot] = FinishReason.LENGTH
        return Emitted(
            tokens=tokens,
            num_tokens=num,
            finish=finish,
            num_drafted=drafted,
            num_accepted=accepted,
        )


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
