"""Draft lengths that follow the load: the rule, the simulated clock, a tiny server."""

import functools

import numpy as np
import pytest
from helpers_tiny import write_model

import jaxdec
from jaxdec import policies, serving_costs, simulation, speculation
from jaxdec.batching import Emitted
from jaxdec.latency import Burst, Record, summarise
from jaxdec.policies import Limits
from jaxdec.scheduling import CostTable
from jaxdec.simulation import simulate
from jaxdec.speculation import Acceptance
from jaxdec.types import FinishReason

NUM_SLOTS, K = 16, 4


def costs_of(free_rows, num_slots=NUM_SLOTS):
    """A device that waits for its weights up to so many rows, then for arithmetic."""

    def steps(length):
        rows = np.arange(1, num_slots + 1) * (length + 1)
        draft_s = 0.001 * length
        return tuple((0.010 * np.maximum(rows / free_rows, 1) + draft_s).tolist())

    return CostTable(
        step_s=steps(K),
        limited_s=tuple((length, steps(length)) for length in (0, 1, 2)),
        chunk_s=0.012,
        insert_s=0.0005,
    )


COSTS = costs_of(16)
ACCEPTANCE = Acceptance(conditional=(0.8, 0.7, 0.7, 0.6))


def test_the_rule_is_the_best_of_all_lengths_and_goes_off_above_the_break_even():
    lengths = speculation.best_lengths(COSTS, ACCEPTANCE)
    assert lengths[0] == K and lengths[-1] == 0
    assert list(lengths) == sorted(lengths, reverse=True)
    assert len(set(lengths)) > 2, "shorter drafts come between"
    for n, length in enumerate(lengths, start=1):
        # n E(k) / step, written out.
        tokens = 1 + np.cumprod([0.8, 0.7, 0.7, 0.6])[:length].sum()
        step_s = 0.010 * max(n * (length + 1) / 16, 1) + 0.001 * length
        if length in (0, 1, 2, 4):
            found = speculation.tokens_per_second(COSTS, ACCEPTANCE, n, length)
            assert found == pytest.approx(n * tokens / step_s)
        for other in (0, 1, 2, 4):
            assert speculation.tokens_per_second(
                COSTS, ACCEPTANCE, n, length
            ) >= speculation.tokens_per_second(COSTS, ACCEPTANCE, n, other)
    rule = speculation.scheduled(COSTS, ACCEPTANCE)
    assert [rule(n) for n in range(1, NUM_SLOTS + 1)] == list(lengths)
    with pytest.raises(ValueError, match="17 requests run, but costs were .* up to 16"):
        rule(17)
    # Drafts that are always refused, or never there, are not worth a step's time.
    for useless in (Acceptance(conditional=(0.0,) * K), Acceptance(draft_rate=0.5)):
        assert set(speculation.best_lengths(COSTS, useless)) == {0}


def test_of_a_tree_only_the_whole_is_known():
    """Nodes are no depth: three of twelve nodes do not say what a tree of depth 3 says.

    So the rule drafts all of it or nothing.
    """
    chain = Acceptance(conditional=(0.8, 0.7, 0.6, 0.0))
    tree = speculation.measured([], K, is_tree=True)
    assert tree.is_tree and not chain.is_tree
    tree = Acceptance(conditional=chain.conditional, is_tree=True)
    assert tree.tokens(4) == chain.tokens(4) == chain.tokens(3) > 2
    assert [tree.tokens(k) for k in (0, 1, 3)] == [1, 1, 1]
    assert set(speculation.best_lengths(COSTS, tree)) == {0, K}
    assert set(speculation.best_lengths(COSTS, chain)) - {0, K}
    # On the simulated clock the end of a request cuts how deep, not how many nodes.
    arrival = simulation.Arrival(arrival_s=0.0, prompt_length=1, output_length=6)
    sure = Acceptance(conditional=(1.0, 1.0, 1.0, 0.0), is_tree=True)
    row = simulation.SimulatedRow(arrival, sure, np.random.default_rng(0))
    assert [row.step(K), row.step(K)] == [(4, 3), (4, 1)] and row.num_said == 6


def test_there_is_no_cliff_where_the_length_changes():
    """Tokens per second rise with every request more, through all changes of length."""
    lengths = speculation.best_lengths(COSTS, ACCEPTANCE)
    speeds = [
        speculation.tokens_per_second(COSTS, ACCEPTANCE, n, length)
        for n, length in enumerate(lengths, start=1)
    ]
    assert np.all(np.diff(speeds) > -1e-9)


def test_acceptance_is_measured_where_drafts_were_not_cut():
    def record(number, counts):
        bursts = [
            Burst(float(i), accepted + 1, drafted, accepted)
            for i, (drafted, accepted) in enumerate(counts)
        ]
        return Record(id=number, arrival_s=0.0, bursts=bursts)

    records = [
        record(0, [(3, 3), (3, 1), (0, 0), (3, 0), (1, 1)]),
        record(1, [(3, 2), (3, 3), (0, 0), (3, 1), (2, 0)]),
    ]
    found = speculation.measured(records, 3)
    # Accepted 3, 1, 0, 2, 3, 1 of six drafts in eight steps.
    assert found.draft_rate == 6 / 8
    assert found.conditional == (5 / 6, 3 / 5, 2 / 3)
    assert found.tokens(3) == pytest.approx(1 + (3 + 1 + 0 + 2 + 3 + 1) / 8)
    # The limit of an answer cuts drafts in more steps than the last: 4 and 1 tokens
    # are left before these, and a draft of 3 takes room for 4.
    for last in records:
        last.bursts = [*last.bursts[:-1], Burst(5.0, 3, 3, 2), Burst(6.0, 1, 0, 0)]
        last.finish = FinishReason.LENGTH
    again = speculation.measured(records, 3)
    assert again.draft_rate == 8 / 10 and again.conditional[0] == 7 / 8
    for last in records:
        last.bursts = [*last.bursts[:-2], Burst(5.0, 2, 1, 1), Burst(6.0, 1, 0, 0)]
    assert speculation.measured(records, 3) == found
    for last in records:
        last.bursts = [Burst(5.0, 2, 1, 1), Burst(6.0, 1, 0, 0)]
    assert speculation.measured(records, 3).conditional == (1.0, 0.0, 0.0)
    nothing = speculation.measured([], 3)
    assert nothing == Acceptance(conditional=(0.0,) * 3, draft_rate=0.0)
    with pytest.raises(ValueError, match="probabilities from 0 to 1"):
        Acceptance(conditional=(1.2,))


def test_rates_for_a_confidence_are_those_of_the_longest_draft():
    rates = speculation.steps_per_second(COSTS, NUM_SLOTS, K)
    assert len(rates) == NUM_SLOTS * (K + 1) + 1
    for num_tokens, length in ((16, 0), (17, 1), (32, 1), (33, 2), (49, 4), (80, 4)):
        assert rates[num_tokens] == pytest.approx(1 / COSTS.step(NUM_SLOTS, length))


@functools.cache
def served(rate, kind, draft_rate=1.0, seed=0):
    """A load on the simulated clock: records of plain, fixed or scheduled decoding."""
    num = 60
    arrivals = simulation.load(
        simulation.poisson_times(rate, num, seed),
        simulation.lognormal_lengths(20, 0.8, 200, num, seed + 1),
        simulation.lognormal_lengths(25, 0.6, 80, num, seed + 2),
    )
    acceptance = Acceptance(conditional=ACCEPTANCE.conditional, draft_rate=draft_rate)
    rule = {
        "plain": lambda num_running: 0,
        "fixed": None,
        "scheduled": speculation.scheduled(COSTS, acceptance),
    }[kind]
    limits = Limits(num_slots=NUM_SLOTS, row_tokens=600, chunk=32)
    return simulate(
        arrivals,
        policies.POLICIES["first_come"],
        limits,
        COSTS,
        acceptance=acceptance,
        draft_limit=rule,
        seed=seed,
    )


def speed(rate, kind, **options):
    """Tokens per second of all requests together."""
    return summarise(served(rate, kind, **options)).throughput_tokens_per_s


RATES = (1.0, 20.0, 200.0)


@pytest.mark.parametrize("draft_rate", [1.0, 0.4])
def test_scheduled_speculation_is_the_better_of_both_at_every_load(draft_rate):
    won = set()
    for rate in RATES:
        kinds = ("plain", "fixed", "scheduled")
        plain, fixed, found = (speed(rate, k, draft_rate=draft_rate) for k in kinds)
        assert found >= 0.95 * max(plain, fixed), rate
        won.add("plain" if plain > 1.05 * fixed else "fixed")
    # Each of the two is clearly the better one somewhere, or there were no choice.
    assert won == {"plain", "fixed"}
    slow, fast = (
        summarise(served(1.0, kind, draft_rate=draft_rate)).tpot_ms
        for kind in ("plain", "scheduled")
    )
    assert fast < 0.8 * slow


def test_speculation_goes_off_with_the_load_and_comes_back():
    """Few requests, then a crowd, then few again."""
    groups = [(0.0, 2), (1.0, 60), (30.0, 2)]
    arrivals = [
        simulation.Arrival(arrival_s=start, prompt_length=5, output_length=60)
        for start, num in groups
        for _ in range(num)
    ]
    records = simulate(
        arrivals,
        policies.POLICIES["first_come"],
        Limits(num_slots=NUM_SLOTS, row_tokens=600, chunk=32),
        COSTS,
        acceptance=ACCEPTANCE,
        draft_limit=speculation.scheduled(COSTS, ACCEPTANCE),
    )

    def drafted(records):
        return np.mean([b.num_drafted for r in records for b in r.bursts[:-5]])

    crowd = records[2:62]
    assert drafted(records[:2]) > 3 and drafted(records[-2:]) > 3
    assert drafted(crowd[:-NUM_SLOTS]) < 0.5
    assert all(r.num_tokens == 60 for r in records)


def test_replicas_share_a_load():
    num = 60
    arrivals = simulation.load(
        simulation.poisson_times(90.0, num, 3),
        np.full(num, 10),
        simulation.lognormal_lengths(20, 1.0, 100, num, 4),
    )
    limits = Limits(num_slots=4, row_tokens=600, chunk=32)
    policy = policies.POLICIES["first_come"]

    def run(**options):
        return simulate(arrivals, policy, limits, COSTS, **options)

    turns = run(num_replicas=3, route="round_robin")
    # In turns, each serves its own part of the load as if it were alone.
    for which in range(3):
        alone = simulate(arrivals[which::3], policy, limits, COSTS)
        for record, other in zip(turns[which::3], alone, strict=True):
            assert record.bursts == other.bursts
            assert record.admitted_s == other.admitted_s
    waits = {
        name: summarise(records).queue_wait_ms
        for name, records in {
            "one": run(),
            "turns": turns,
            "least": run(num_replicas=3, route="least_loaded"),
        }.items()
    }
    assert waits["least"] < waits["turns"] < waits["one"]
    with pytest.raises(ValueError, match="at least 1 replica and a route of least_loa"):
        run(num_replicas=2, route="random")


class FakeDevice:
    """Takes known times on a clock of its own, after a slow first call of each."""

    def __init__(self, num_slots, drafts=K):
        self.now, self.pending, self.warm = 0.0, 0.0, set()
        self.num_slots, self.drafts = num_slots, drafts
        self.slots = set()

    def clock(self):
        return self.now

    def work(self, name, seconds):
        """Goes on in the background until somebody waits."""
        self.pending += seconds if name in self.warm else seconds + 9.0
        self.warm.add(name)

    def wait(self, row=None):
        self.now, self.pending = self.now + self.pending, 0.0

    def copy(self, row):
        self.work("copy", 3.0)
        return row

    def begin(self, request, said, kept=None):
        self.work("begin", 5.0)
        return 0

    def read(self, row):
        self.work("read", 2.0 + 0.5 * row)
        return row + 1

    def insert(self, row, slot):
        assert row in (0, 3), "the whole prompt is read, or nothing of it"
        self.slots.add(slot)
        self.work("insert", 0.25)

    def discard(self, row):
        raise AssertionError("no row is given up while costs are measured")

    def extract(self, slot):
        self.work("extract", 0.125)
        return 3

    def reset(self):
        raise AssertionError("nothing fails while costs are measured")

    def step(self, is_free, draft_limit=None):
        running = np.flatnonzero(~is_free)
        assert set(running.tolist()) <= self.slots
        self.work(("step", len(running)), 1 + 0.1 * len(running) + 0.01 * draft_limit)
        self.wait()
        num = np.zeros(self.num_slots, np.int32)
        num[running] = min(draft_limit, self.drafts)
        return Emitted(
            tokens=np.zeros((self.num_slots, K + 1), np.int32),
            num_tokens=num,
            finish=num,
            num_drafted=num,
            num_accepted=num,
        )


def test_costs_are_medians_of_warm_work_that_was_waited_for():
    device = FakeDevice(6)
    costs = serving_costs.measure_costs(
        device,
        "request",
        num_chunks=3,
        num_slots=6,
        lengths=serving_costs.draft_lengths(K, (0, 2, K)),
        clock=device.clock,
    )
    steps = {k: 1 + 0.1 * np.arange(1, 7) + 0.01 * k for k in (0, 2, 4)}
    np.testing.assert_allclose(costs.step_s, steps[4])
    for (length, times), expected in zip(costs.limited_s, (0, 2), strict=True):
        assert length == expected
        np.testing.assert_allclose(times, steps[expected])
    found = (costs.chunk_s, costs.begin_s, costs.insert_s, costs.extract_s)
    np.testing.assert_allclose(found, (2.5, 5.0, 0.25, 0.125))
    assert costs.longest_chunk_s == 3.0, "the last of three"
    assert costs.longest_step_s == pytest.approx(1.64)
    # Between, the smallest measured length that holds the draft counts.
    at = [costs.step(2, limit) for limit in (0, 1, 2, 3, 4, None)]
    np.testing.assert_allclose(at, [1.2, 1.22, 1.22, 1.24, 1.24, 1.24])
    with pytest.raises(ValueError, match="draft 4 tokens, but the drafter gave 2"):
        serving_costs.measure_costs(
            FakeDevice(2, drafts=2), "", num_chunks=3, num_slots=2, lengths=(0, K)
        )
    with pytest.raises(ValueError, match="increasing draft lengths, each with as many"):
        CostTable(step_s=(1.0, 1.0), chunk_s=1.0, limited_s=((0, (1.0,)),))


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return jaxdec.load(write_model(tmp_path_factory.mktemp("tiny")), dtype="float32")


PROMPTS = ["abcabcabcabc", "the cat and the cat and", "x", "one two three " * 3]


@pytest.mark.parametrize("name", ["lookup", "self_draft"])
def test_draft_lengths_change_no_token_of_a_server(lm, name):
    """Off, on and between at random, in the one compiled step."""
    made = jaxdec.lookup(4) if name == "lookup" else jaxdec.self_draft(1, length=4)
    strategy = made.with_widths()
    assert strategy.widths == (0, 2, 4) and made.with_length(2).widths == ()
    assert strategy.with_length(3).widths == (0, 1, 3)
    server = jaxdec.Server(
        lm, strategy, num_slots=2, max_length=90, prefill_chunk=16, num_biases=8
    )
    expected = jaxdec.generate(
        lm, PROMPTS, strategy="sample", max_new_tokens=24, temperature=0.8, seed=7
    )
    rng = np.random.default_rng(0)
    limits, running = [], []

    def rule(num_running):
        limits.append(int(rng.integers(0, 5)) if len(limits) % 6 < 4 else 0)
        running.append(num_running)
        return limits[-1]

    server.limit_drafts(rule)
    tickets = [
        server.submit(
            prompt, max_new_tokens=24, temperature=0.8, seed=7, draft_length=length
        )
        for prompt, length in zip(PROMPTS, (None, None, 3, 2), strict=True)
    ]
    server.run()
    assert [ticket.generated for ticket in tickets] == list(expected)
    drafted = {b.num_drafted for t in tickets for b in t.record.bursts}
    assert drafted <= {0, 1, 2, 3, 4} and len(drafted) > 2
    last = [max(b.num_drafted for b in t.record.bursts) for t in tickets]
    assert last[2] <= 3 and last[3] <= 2
    assert set(running) == {1, 2}
    # Off altogether, then again without a limit.
    for rule, some in ((lambda num_running: 0, False), (None, True)):
        server.limit_drafts(rule)
        ticket = server.submit(PROMPTS[0], max_new_tokens=24, temperature=0.8, seed=7)
        assert server.result(ticket) == expected[0]
        assert any(b.num_drafted for b in ticket.record.bursts) == some
