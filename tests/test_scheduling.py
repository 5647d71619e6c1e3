"""Policies, the bound on token gaps and the simulated clock; no model runs."""

import dataclasses

import numpy as np
import pytest

from jaxdec import policies, scheduling, simulation
from jaxdec.latency import Burst, Objective, Record, summarise
from jaxdec.policies import Job, Limits
from jaxdec.scheduling import CostTable, Plan, Queue, schedule
from jaxdec.serving_loop import ServingLoop
from jaxdec.simulation import Arrival, simulate
from jaxdec.types import FinishReason

COSTS = CostTable(step_s=(1.0, 1.1, 1.2, 1.3), chunk_s=1.6, insert_s=0.3, extract_s=0.2)
LIMITS = Limits(num_slots=4, row_tokens=600, chunk=16)
MODES = ("none", "recompute", "keep")


def job(number, prompt=1, new=10, **kwargs):
    kwargs = {"arrival_s": float(number)} | kwargs
    return Job(id=number, prompt_length=prompt, max_new_tokens=new, **kwargs)


def begun(policy, jobs, limits=LIMITS, now=100.0, slots=None):
    """The order in which jobs are put into slots, one a round."""
    queue = Queue(
        waiting=tuple(jobs), slots=(None,) * len(jobs) if slots is None else slots
    )
    order = []
    while queue.waiting or queue.reading:
        queue, plan = schedule(policies.find_policy(policy), limits, queue, now)
        if plan.insert is not None:
            order.append(plan.insert[0])
    return order


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("first_come", [0, 1, 2, 3]),
        ("priority", [2, 0, 3, 1]),
        # Rounds: 10 tokens; 3 chunks and 6 tokens; 40 tokens; 9 tokens.
        ("shortest_remaining", [1, 3, 0, 2]),
        ("deadline", [3, 2, 0, 1]),
    ],
)
def test_policies_say_who_goes_first(policy, order):
    jobs = [
        job(0, deadline_s=60.0),
        job(1, prompt=34, new=6, priority=-1),
        job(2, new=40, priority=5, deadline_s=50.0),
        job(3, new=9, deadline_s=40.0),
    ]
    assert begun(policy, jobs) == order
    assert begun(policy, jobs[::-1]) == order


def test_patience_goes_before_priority():
    jobs = [job(0), job(1), job(2, priority=5), job(3, priority=9)]
    for patience, order in ((98.5, [0, 1, 3, 2]), (200.0, [3, 2, 0, 1])):
        policy = policies.patient(policies.POLICIES["priority"], patience)
        assert begun(policy, jobs) == order


def test_ties_go_to_the_earlier_request():
    jobs = [job(number, arrival_s=1.0) for number in (2, 0, 1)]
    for policy in policies.POLICIES:
        assert begun(policy, jobs) == [0, 1, 2]


def test_one_chunk_a_round_and_no_more():
    queue = Queue(waiting=(job(0, prompt=34), job(1, prompt=17)), slots=(None, None))
    policy = policies.POLICIES["first_come"]
    plans = []
    for _ in range(5):
        queue, plan = schedule(policy, LIMITS, queue, 0.0)
        plans.append(plan)
    # 33 tokens are read in 3 chunks, 16 in one; the last of a prompt is left to a step.
    assert plans == [
        Plan(begin=0, read=0),
        Plan(read=0),
        Plan(read=0, insert=(0, 0)),
        Plan(begin=1, read=1, insert=(1, 1)),
        Plan(),
    ]


@pytest.mark.parametrize("mode", MODES)
def test_giving_way(mode):
    """The least of the running gives way, and only to a strictly better one."""
    limits = dataclasses.replace(LIMITS, num_slots=2, preemption=mode, max_kept=1)
    running = job(0, priority=2, has_row=True), job(1, priority=1, has_row=True)
    policy = policies.POLICIES["priority"]
    queue = Queue(waiting=(job(2, priority=1),), slots=running)
    assert schedule(policy, limits, queue, 5.0) == (queue, Plan())
    queue = Queue(waiting=(job(3, priority=3),), slots=running).said(1, 7)
    after, plan = schedule(policy, limits, queue, 5.0)
    if mode == "none":
        assert (after, plan) == (queue, Plan())
        return
    assert plan == Plan(
        drop=(1,) if mode == "recompute" else (),
        extract=(1, 1) if mode == "keep" else None,
        begin=3,
        insert=(3, 1),
    )
    (waiting,) = after.waiting
    assert (waiting.id, waiting.num_said) == (1, 7)
    assert waiting.has_row == (mode == "keep")
    assert waiting.num_unread == (0 if mode == "keep" else 7)
    # When a slot is free again it goes on: read anew, or put back as it is.
    after, plan = schedule(policy, limits, after.remove(3), 6.0)
    begin, read = (None, None) if mode == "keep" else (1, 1)
    assert plan == Plan(begin=begin, read=read, insert=(1, 1))
    assert after.slots[1].num_said == 7 and after.slots[1].num_unread == 0


def test_the_kv_budget_is_waited_for_and_never_passed_over():
    limits = dataclasses.replace(LIMITS, kv_tokens=100)
    queue = Queue(slots=(job(0, new=59, has_row=True), None, None, None))
    queue = queue.submit(job(1, new=49)).submit(job(2, new=9))
    policy = policies.POLICIES["first_come"]
    assert schedule(policy, limits, queue, 9.0) == (queue, Plan())
    _, plan = schedule(policy, limits, queue.remove(1), 9.0)
    assert plan.insert == (2, 1)
    _, plan = schedule(policy, limits, queue.remove(0), 9.0)
    assert plan.insert == (1, 0)


def test_for_memory_the_one_that_is_read_gives_way_first():
    """It gives way to the better one in any case; nobody who runs is moved for it."""
    limits = dataclasses.replace(
        LIMITS, num_slots=2, kv_tokens=100, preemption="recompute"
    )
    policy = policies.POLICIES["priority"]
    queue = Queue(
        waiting=(job(3, new=30, priority=9),),
        reading=job(2, prompt=30, new=9, priority=5, has_row=True),
        slots=(job(0, new=29, has_row=True), job(1, new=29, has_row=True)),
    )
    after, plan = schedule(policy, limits, queue, 9.0)
    # One is dropped for the memory, and one for the slot when the prompt is read.
    assert plan.drop == (2, 1) and plan.insert == (3, 1)
    assert after.slots[0] == queue.slots[0]
    queue = dataclasses.replace(queue, waiting=(job(3, prompt=30, new=5, priority=9),))
    after, plan = schedule(policy, limits, queue, 9.0)
    assert plan.drop == (2,) and after.running == queue.running


def test_what_is_shared_counts_as_read_for_the_shortest():
    """Before it has a row as after: 64 tokens that are kept need not be read again."""
    jobs = [job(0, prompt=81, new=3, num_shared=64), job(1, prompt=33, new=3)]
    assert begun("shortest_remaining", jobs) == [0, 1]
    jobs = [dataclasses.replace(j, num_shared=0) for j in jobs]
    assert begun("shortest_remaining", jobs) == [1, 0]


def test_requests_of_the_simulated_clock_may_say_nothing_but_not_ask_nothing():
    arrivals = [
        Arrival(arrival_s=0.5 * i, prompt_length=20, output_length=n)
        for i, n in enumerate((0, 2, 0, 0, 1))
    ]
    records = simulate(arrivals, policies.POLICIES["first_come"], LIMITS, COSTS)
    assert [r.num_tokens for r in records] == [0, 2, 0, 0, 1]
    assert records[0].finished_s == 0 and records[1].bursts[0].time_s == 0.5 + 4.5
    with pytest.raises(ValueError, match="prompt_length is 0; give at least 1"):
        Arrival(arrival_s=0.0, prompt_length=0, output_length=1)
    with pytest.raises(ValueError, match="arrival_s is nan, and requests are put in"):
        Arrival(arrival_s=float("nan"), prompt_length=1, output_length=1)


def test_a_request_that_cannot_fit_is_refused():
    policies.check_fits(LIMITS, 500, 100)
    with pytest.raises(ValueError, match=r"601 tokens .*a slot holds 600; shorten"):
        policies.check_fits(LIMITS, 500, 101)
    limits = dataclasses.replace(LIMITS, kv_tokens=550)
    with pytest.raises(ValueError, match=r"551 tokens .*budget is 550; shorten"):
        policies.check_fits(limits, 500, 51)
    with pytest.raises(ValueError, match="unknown policy 'fair'; use one of first"):
        policies.find_policy("fair")


def test_the_bound_is_a_chunk_and_the_steps_with_slack():
    assert scheduling.token_gap_bound(COSTS) == pytest.approx(1.25 * (1.6 + 1.3))
    other = CostTable(step_s=(2.0,), chunk_s=1.0)
    assert scheduling.token_gap_bound(COSTS, other) == pytest.approx(1.25 * 4.9)
    # Chunks behind a long prompt take longer, and are what somebody waits for.
    behind = dataclasses.replace(COSTS, last_chunk_s=2.0)
    assert scheduling.token_gap_bound(behind) == pytest.approx(1.25 * (2.0 + 1.3))
    slow = dataclasses.replace(COSTS, insert_s=0.6)
    with pytest.raises(ValueError, match="0.8 s, more than the slack of 0.725 s"):
        scheduling.token_gap_bound(slow)
    # A round that copies rows may take another two.
    slow = dataclasses.replace(COSTS, insert_s=0.1, extract_s=0.2)
    assert scheduling.token_gap_bound(slow) == pytest.approx(1.25 * 2.9)
    slow = dataclasses.replace(slow, extract_s=0.3)
    with pytest.raises(ValueError, match="1 s, more than the slack of 0.725 s"):
        scheduling.token_gap_bound(slow, shares=True)
    with pytest.raises(ValueError, match="0.8 s, more than the slack of 0.725 s"):
        scheduling.token_gap_bound(dataclasses.replace(slow, begin_s=0.4))
    with pytest.raises(ValueError, match="one or more steps"):
        CostTable(step_s=(), chunk_s=1.0)


def test_b59_long_prompts_do_not_starve_a_running_request():
    """One request runs; a prompt of 64 tokens arrives in every step's time."""
    arrivals = [Arrival(arrival_s=0.0, prompt_length=1, output_length=200)] + [
        Arrival(arrival_s=0.5 + i, prompt_length=64, output_length=2)
        for i in range(100)
    ]
    records = simulate(arrivals, policies.POLICIES["first_come"], LIMITS, COSTS)
    gaps = np.array(records[0].token_gaps_s)
    assert len(gaps) == 199
    assert gaps.max() <= 1.6 + 0.3 + 1.2 + 1e-9  # Two run at once, at most.
    assert np.mean(gaps > 2.5) > 0.3, "chunks went between its steps"
    assert all(r.finish == FinishReason.LENGTH for r in records)
    admitted = [r.admitted_s for r in records]
    assert admitted == sorted(admitted)


def bursty_load(num, seed):
    arrivals = simulation.load(
        simulation.bursty_times(0.3, num, seed, burst=5.0),
        simulation.lognormal_lengths(15, 1.0, 400, num, seed + 1),
        simulation.lognormal_lengths(20, 0.8, 200, num, seed + 2),
    )
    rng = np.random.default_rng(seed)
    return [
        dataclasses.replace(
            arrival,
            priority=int(rng.integers(3)),
            deadline_s=arrival.arrival_s + float(rng.integers(50, 500)),
        )
        for arrival in arrivals
    ]


@pytest.mark.parametrize("mode", MODES)
def test_every_policy_keeps_the_bound_and_loses_nothing(mode, monkeypatch):
    limits = dataclasses.replace(LIMITS, kv_tokens=900, preemption=mode, max_kept=2)
    arrivals = bursty_load(36, 3)
    prepare, kept = ServingLoop.prepare, []

    def watched(loop):
        moved = prepare(loop)
        queue = loop.queue
        beside = [j for j in queue.waiting if j.has_row]
        reading = [queue.reading] if queue.reading else []
        held = [*queue.running, *reading, *beside]
        assert sum(j.num_reserved for j in held) <= limits.kv_tokens
        kept.append(len(beside))
        return moved

    monkeypatch.setattr(ServingLoop, "prepare", watched)
    waits = {}
    for name, policy in policies.POLICIES.items():
        records = simulate(
            arrivals, policy, limits, COSTS, acceptance=(0.8, 0.6, 0.4), seed=5
        )
        for arrival, record in zip(arrivals, records, strict=True):
            assert record.finish == FinishReason.LENGTH
            assert record.num_tokens == arrival.output_length
            assert record.admitted_s >= arrival.arrival_s
        # A row out, a chunk, a row in, and a step: no more comes between two tokens.
        longest = max(max(r.token_gaps_s, default=0) for r in records)
        assert longest <= 0.2 + 1.6 + 0.3 + 1.3 + 1e-9
        assert longest <= scheduling.token_gap_bound(COSTS)
        assert bool(sum(len(r.interrupted_gaps_s) for r in records)) == (
            mode != "none" and name != "first_come"
        )
        # Nobody is moved for nothing: an arrival moves one, or two where memory is low.
        assert sum(len(r.interruptions_s) for r in records) <= 2 * len(records)
        waits[name] = summarise(records).queue_wait_ms
    assert waits["shortest_remaining"] < waits["first_come"]
    assert (0 < max(kept) <= 2) if mode == "keep" else max(kept) == 0


def test_first_come_waits_as_queueing_theory_says():
    """One slot and equal answers: each wait follows from the one before (Lindley).

    ``wait[n + 1] = max(0, wait[n] + service - (arrival[n + 1] - arrival[n]))``
    """
    num, chunks, tokens = 150, 2, 3
    service = chunks * 1.6 + 0.3 + tokens * 1.0
    times = simulation.poisson_times(0.8 / service, num, seed=11)
    lengths = np.full(num, 2 * 16 + 1), np.full(num, tokens)
    limits = Limits(num_slots=1, row_tokens=600, chunk=16)
    records = simulate(
        simulation.load(times, *lengths), policies.POLICIES["first_come"], limits, COSTS
    )
    waits = [0.0]
    for gap in np.diff(times):
        waits.append(max(0.0, waits[-1] + service - gap))
    assert np.mean(np.array(waits) > service) > 0.3
    np.testing.assert_allclose([r.queue_wait_s for r in records], waits, atol=1e-9)


def test_arrivals_and_lengths_are_what_they_say():
    times = simulation.poisson_times(50.0, 5000, 0)
    assert np.all(np.diff(times) > 0)
    assert times[-1] == pytest.approx(100.0, rel=0.06)
    burst = simulation.bursty_times(50.0, 20_000, 0, burst=4.0)
    assert burst[-1] == pytest.approx(400.0, rel=0.08)
    sizes = np.unique(burst, return_counts=True)[1]
    assert sizes.mean() == pytest.approx(4.0, rel=0.05)
    lengths = simulation.lognormal_lengths(100, 1.0, 900, 5000, 0)
    assert np.median(lengths) == pytest.approx(100, rel=0.06)
    assert lengths.min() >= 1 and lengths.max() == 900
    with pytest.raises(ValueError, match="above 0, got 0"):
        simulation.poisson_times(0, 1, 0)
    with pytest.raises(ValueError, match="up to 1 requests, but there are 4 slots"):
        one = CostTable(step_s=(1.0,), chunk_s=1.0)
        simulate((), policies.POLICIES["priority"], LIMITS, one)


def test_the_quantities_of_a_record():
    record = Record(
        id=0,
        arrival_s=10.0,
        admitted_s=11.0,
        bursts=[Burst(12.0, 1), Burst(12.5, 3), Burst(15.0, 2), Burst(15.25, 1)],
        interruptions_s=[13.0],
        finished_s=15.25,
        finish=FinishReason.LENGTH,
    )
    assert (record.queue_wait_s, record.ttft_s, record.num_tokens) == (1.0, 2.0, 7)
    assert record.tpot_s == pytest.approx(3.25 / 6)
    assert record.token_gaps_s == (0.5, 0.25)
    assert record.interrupted_gaps_s == (2.5,)
    cancelled = Record(id=1, arrival_s=9.0, finish=FinishReason.CANCELLED)
    assert cancelled.queue_wait_s is None and cancelled.tpot_s is None
    found = summarise([record, cancelled])
    assert (found.finished, found.queue_wait_ms, found.ttft_ms) == (1, 1000, 2000)
    assert found.p50_token_gap_ms == 375 and found.max_token_gap_ms == 500
    assert found.throughput_tokens_per_s == pytest.approx(7 / 6.25)
    assert found.goodput == pytest.approx(1 / 6.25)
    assert summarise([record], Objective(tpot_s=0.5)).goodput == 0
    assert summarise([record], Objective(ttft_s=2.0)).goodput == pytest.approx(1 / 5.25)
    nothing = summarise([cancelled])
    assert (nothing.finished, nothing.ttft_ms, nothing.goodput) == (0, None, None)
