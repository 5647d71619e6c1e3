"""Loads: drawn, driven through a tiny server, simulated, and told by the command."""

import dataclasses
import importlib.util
import inspect
import json
import math
import types

import numpy as np
import pytest
from helpers_tiny import write_model

import jaxdec
from jaxdec import console, load_command, load_run, simulation, traffic
from jaxdec.cli import app
from jaxdec.decoding import PREFILL_CHUNK
from jaxdec.latency import Objective, summarise
from jaxdec.load_run import Profile, Setup
from jaxdec.scheduling import CostTable
from jaxdec.simulation import Arrival
from jaxdec.speculation import Acceptance
from jaxdec.traffic import Traffic
from jaxdec.types import FinishReason

FIGURES = """
finished queue_wait_ms ttft_ms tpot_ms p50_token_gap_ms p95_token_gap_ms
p99_token_gap_ms token_gap_bound_ms throughput_tokens_per_s goodput
""".split()
COSTS = CostTable(
    step_s=(0.25, 0.375),
    limited_s=((0, (0.125, 0.25)), (1, (0.1875, 0.3125))),
    chunk_s=0.5,
    begin_s=0.0078125,
    insert_s=0.03125,
    extract_s=0.015625,
)
PROFILE = Profile(
    costs=COSTS,
    acceptance=Acceptance(conditional=(0.75, 0.5), draft_rate=0.5),
    prefill_chunk=16,
    strategy="lookup",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="module")
def lm(model):
    return jaxdec.load(model, dtype="float32")


def small(**options):
    """A setup of two slots, compiled once for all tests here."""
    load = dict(rate=4.0, num_requests=8, prompt_tokens=20, output_tokens=8)
    load |= options.pop("traffic", {})
    return Setup(
        **{
            "traffic": Traffic(**load, max_length=60, seed=3),
            "num_slots": 2,
            "prefill_chunk": 16,
            **options,
        }
    )


STRATEGY = jaxdec.lookup(2)


class Clock:
    """Time that passes only where somebody says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += max(seconds, 1e-7)  # Or rounding would stop the clock.


class SlowDevice:
    """A real device on a clock of its own, on which work takes what a table says."""

    def __init__(self, device, clock):
        self.device, self.clock = device, clock

    def begin(self, request, said, kept=None):
        assert kept is None
        self.clock.now += COSTS.begin_s
        return self.device.begin(request, said)

    def copy(self, row):
        raise AssertionError("simulated prompts share nothing")

    def read(self, row):
        self.clock.now += COSTS.chunk_s
        return self.device.read(row)

    def insert(self, row, slot):
        self.clock.now += COSTS.insert_s
        self.device.insert(row, slot)

    def extract(self, slot):
        self.clock.now += COSTS.extract_s
        return self.device.extract(slot)

    def discard(self, row):
        self.device.discard(row)

    def reset(self):
        self.device.reset()

    def step(self, is_free, draft_limit=None):
        self.clock.now += COSTS.step(int((~is_free).sum()), draft_limit)
        return self.device.step(is_free, draft_limit)


@pytest.mark.parametrize(
    ("policy", "preemption"), [("first_come", "none"), ("priority", "keep")]
)
def test_the_real_server_and_the_simulated_clock_agree(lm, policy, preemption):
    """Where work takes what the table says, every time of every record is the same."""
    setup = small(preemption=preemption, speculation="off", traffic={"rate": 0.7})
    clock = Clock()
    server = jaxdec.Server(
        lm,
        STRATEGY.with_widths(),
        num_slots=2,
        max_length=60,
        prefill_chunk=16,
        policy=policy,
        preemption=preemption,
        clock=clock,
        max_shared=0,
    )
    (group,) = server._groups
    group.loop.device = SlowDevice(group.device, clock)
    server.limit_drafts(PROFILE.rule("off"))
    arrivals = setup.draw()
    prompts = traffic.prompts_of(lm, [a.prompt_length for a in arrivals], 3)
    real = traffic.drive(
        server, arrivals, prompts, clock=clock, sleep=clock.sleep, temperature=0.0
    )
    simulated = load_run.imitate(setup, PROFILE, policy)
    assert any(r.interruptions_s for r in real) == (preemption == "keep")
    for record, other, arrival in zip(real, simulated, arrivals, strict=True):
        assert record.arrival_s == 100.0 + arrival.arrival_s
        assert record.num_tokens == arrival.output_length
        assert record.finish == FinishReason.LENGTH
        # Sleep ends at an arrival up to rounding.
        times = [b.time_s - 100 for b in record.bursts]
        np.testing.assert_allclose(times, [b.time_s for b in other.bursts], atol=1e-6)
        assert record.admitted_s - 100 == pytest.approx(other.admitted_s, abs=1e-6)
    ratios = load_run.agreement(
        load_run.figures([real], Objective(), None),
        load_run.figures([simulated], Objective(), None),
    )
    assert all(ratio == pytest.approx(1, abs=1e-4) for ratio in ratios.values())


def test_a_load_test_measures_serves_and_imitates(lm):
    setup = small(
        traffic={"rate": 500.0, "arrivals": "bursty", "num_requests": 6},
        policies=("first_come", "shortest_remaining"),
        objective=Objective(ttft_s=1e3),
    )
    seen = []
    report, profile = load_run.run(
        setup,
        lm=lm,
        strategy=STRATEGY,
        rates=(1.0, 1000.0),
        num_replicas=2,
        progress=lambda done, total, text: seen.append((done, total)),
    )
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert Profile.from_dict(json.loads(json.dumps(report["profile"]))) == profile
    assert profile.strategy == "lookup" and profile.acceptance.length == 2
    assert len(profile.plain.step_s) == 2 and profile.plain.limited_s == ()
    assert (
        len(profile.costs.step_s) == 2 and len(report["scheduled_draft_lengths"]) == 2
    )
    assert list(report["policies"]) == ["first_come", "shortest_remaining"]
    for found in (*report["policies"].values(), report):
        assert set(FIGURES) <= set(found)
    for found in report["policies"].values():
        assert found["finished"] == found["simulated"]["finished"] == 6
        assert set(found["agreement"]) == set(load_run.COMPARED)
        assert all(point["draft_length"] <= 2 for point in found["timeline"])
    assert report["finished"] == 12
    # The server is one, so it is held against one; the sweep is of two.
    for name, found in report["policies"].items():
        one = load_run.imitate(setup, profile, name)
        one = load_run.figures([one], setup.objective, found["token_gap_bound_ms"])
        assert found["simulated"] == one
    assert [point["rate"] for point in report["sweep"]] == [1.0, 1000.0]
    assert all(0 <= done <= total for done, total in seen)


def test_figures_of_several_runs_are_per_time_of_all_of_them():
    setup = small()
    runs = [
        load_run.imitate(setup, PROFILE, name) for name in ("first_come", "priority")
    ]
    both = load_run.figures(runs, Objective(), 9.0)
    one, two = (dataclasses.asdict(summarise(run)) for run in runs)
    tokens = sum(record.num_tokens for record in runs[0])
    spans = [tokens / found["throughput_tokens_per_s"] for found in (one, two)]
    assert both["throughput_tokens_per_s"] == pytest.approx(2 * tokens / sum(spans))
    assert both["finished"] == 16 and both["token_gap_bound_ms"] == 9.0
    assert both["ttft_ms"] == pytest.approx((one["ttft_ms"] + two["ttft_ms"]) / 2)


def test_draft_lengths_over_time():
    records = [
        r
        for r in load_run.imitate(small(speculation="fixed"), PROFILE, "first_come")
        if r.bursts
    ]
    line = load_run.timeline(records, num_bins=5)
    assert [p["time_s"] for p in line] == sorted(p["time_s"] for p in line)
    bursts = [b.num_drafted for r in records for b in r.bursts]
    assert len(line) <= 5 and 0 < max(p["draft_length"] for p in line) <= max(bursts)
    assert load_run.timeline([]) == []


def test_loads_are_drawn_alike_every_time(tmp_path):
    load = Traffic(rate=50.0, num_requests=400, max_length=300, seed=5)
    drawn = load.draw()
    assert drawn == load.draw() != dataclasses.replace(load, seed=6).draw()
    assert max(a.prompt_length for a in drawn) <= 150
    prompts = [a.prompt_length for a in drawn]
    assert np.median(prompts) == pytest.approx(64, rel=0.15)
    assert {a.priority for a in drawn} == {0, 1, 2}
    assert all(a.deadline_s > a.arrival_s + 2 for a in drawn)
    bursty = dataclasses.replace(load, arrivals="bursty").draw()
    assert len({a.arrival_s for a in bursty}) < 120
    path = tmp_path / "lengths.jsonl"
    path.write_text(
        '{"prompt_length": 7, "output_length": 3}\n\n'
        '{"prompt_length": 90, "output_length": 1}\n'
    )
    drawn = dataclasses.replace(load, lengths=str(path)).draw()
    found = {(a.prompt_length, a.output_length) for a in drawn}
    assert found == {(7, 3), (90, 1)}
    path.write_text('{"prompt_length": 7}\n{"prompt_length": 0, "output_length": 1}\n[')
    with pytest.raises(ValueError, match=r"3 bad lines \(line 1: no prompt_length .*3"):
        traffic.read_lengths(path, 300)
    path.write_text('{"prompt_length": 300, "output_length": 1}')
    with pytest.raises(ValueError, match="line 1: 301 tokens, but slots hold 300"):
        traffic.read_lengths(path, 300)


def test_prompts_are_text_of_the_lengths_asked_for(lm):
    lengths = [1, 7, 500]
    prompts = traffic.prompts_of(lm, lengths, 0)
    assert [len(p) for p in prompts] == lengths
    assert "the" in lm.tokenizer.decode(prompts[2])
    assert prompts == traffic.prompts_of(lm, lengths, 0)


def test_a_chat_model_is_asked_as_users_ask_it(lm, monkeypatch):
    def encode(lm, text, chat, system, row):
        return [1, 2, *lm.tokenizer.encode(text), 3, 4, 5]

    monkeypatch.setattr(traffic, "encode", encode)
    short, least, long = traffic.prompts_of(lm, [12, 13, 500], 0)
    assert [len(p) for p in (short, least, long)] == [12, 13, 500]
    assert short[:2] != [1, 2] and short[-3:] != [3, 4, 5]
    for prompt in (least, long):
        assert prompt[:2] == [1, 2] and prompt[-3:] == [3, 4, 5]
    assert "the" in lm.tokenizer.decode(long[2:-3])


def test_the_command_reads_chunks_as_large_as_the_engine_does():
    parameter = inspect.signature(load_command.load).parameters["prefill_chunk"]
    assert parameter.default == PREFILL_CHUNK


def test_a_sweep_has_a_server_without_a_drafter_beside_it():
    plain = CostTable(step_s=(0.1, 0.2), chunk_s=0.4, insert_s=0.03, extract_s=0.01)
    both = dataclasses.replace(PROFILE, plain=plain)
    assert Profile.from_dict(json.loads(json.dumps(both.to_dict()))) == both
    (point,) = load_run.sweep(small(), both, [4.0])
    alone = Profile(
        costs=plain, acceptance=Acceptance(), prefill_chunk=16, strategy="greedy"
    )
    assert both.without_drafter() == alone
    (expected,) = load_run.sweep(small(), alone, [4.0])
    assert point["plain"] == expected["off"] != point["off"]
    (without,) = load_run.sweep(small(), PROFILE, [4.0])
    assert "plain" not in without
    with pytest.raises(ValueError, match="'lookup' has no costs of plain decoding"):
        PROFILE.without_drafter()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"policies": ("fair",)}, "unknown policy 'fair'"),
        ({"policies": ()}, "no policy to test"),
        ({"speculation": "on"}, "one of scheduled, fixed, off, got 'on'"),
        ({"traffic": {"rate": 0.0}}, "rate is 0.0; a load has some"),
        ({"traffic": {"arrivals": "daily"}}, "one of poisson, bursty, got 'daily'"),
        ({"traffic": {"rate": math.inf}}, "rate is inf; a load has some of each"),
        ({"traffic": {"output_tokens": math.nan}}, "output_tokens is nan; a load"),
        ({"traffic": {"burst": 0.5}}, "burst is 0.5; give a number from 1 up"),
        ({"traffic": {"sigma": math.inf}}, "sigma is inf; give a number from 0 up"),
        ({"policies": ("priority",) * 2}, "priority, priority; name each of them once"),
        ({"objective": Objective(ttft_s=math.nan)}, "an objective is times above 0"),
        ({"objective": Objective(tpot_s=-1.0)}, "an objective is times above 0"),
    ],
)
def test_bad_loads_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        small(**options)


def test_a_profile_is_of_one_chunk_and_of_all_slots():
    with pytest.raises(ValueError, match="needs a model, or the profile"):
        load_run.run(small())
    with pytest.raises(ValueError, match="measured with a prefill chunk of 16 tokens"):
        load_run.imitate(small(prefill_chunk=32), PROFILE, "first_come")
    with pytest.raises(ValueError, match="steps of up to 2 requests, but there are 3"):
        load_run.imitate(small(num_slots=3), PROFILE, "first_come")
    with pytest.raises(ValueError, match="'lookup' with 2 draft tokens, but 'lookup'"):
        load_run.serve(None, jaxdec.lookup(3), small(), PROFILE, "first_come")
    with pytest.raises(ValueError, match="no profile of a server"):
        Profile.from_dict({"costs": {}})


def test_what_is_measured_of_a_tree_is_said_to_be_of_one(monkeypatch):
    """And of a mixture that has one."""
    chain = jaxdec.self_draft(1, length=3)
    tree = types.SimpleNamespace(proposal_mode="tree")
    server = types.SimpleNamespace(measure_costs=lambda *_, **__: COSTS)
    monkeypatch.setattr(Setup, "server", lambda *_: server)
    monkeypatch.setattr(load_run, "drive", lambda *_, **__: [])
    monkeypatch.setattr(load_run, "prompts_of", lambda *_: [])
    for members, is_tree in (((chain,), False), ((chain, tree), True)):
        config = types.SimpleNamespace(length=3, name="some", members=members)
        config.is_tree = type(chain).is_tree.fget(config)
        config.with_widths = lambda config=config: config
        assert load_run.measure(None, config, small()).acceptance.is_tree == is_tree


def test_a_load_that_no_server_takes_is_refused_before_anything_is_measured(lm):
    """A temperature for greedy decoding, say; a server is measured in minutes."""
    setup = small(temperature=0.7)
    watched = lambda *_: pytest.fail("measured")  # noqa: E731
    with pytest.raises(ValueError, match="'greedy' is temperature 0, got temperature"):
        load_run.measure(lm, jaxdec.greedy(), setup, watched)
    with pytest.raises(ValueError, match="temperature must be a finite number"):
        load_run.measure(lm, jaxdec.lookup(2), small(temperature=-1.0), watched)


def test_a_confidence_gets_the_rates_that_were_measured():
    """DSpark's budget across the batch, from the costs of the very server."""
    drafter = jaxdec.LoadedDrafter(
        family="block",
        config=types.SimpleNamespace(confidence="linear", markov="none", max_length=2),
        own=(),
        name="some",
        format="some",
        facts={},
    )
    config = jaxdec.trained(drafter, length=2)
    served = load_run.config_of(config, small(), PROFILE)
    assert served.widths == (0, 1, 2)
    expected = [1 / 0.25, 1 / 0.25, 1 / 0.3125, 1 / 0.3125, 1 / 0.375, 1 / 0.375]
    assert served.steps_per_second[1:] == pytest.approx(expected)
    for setup, profile in ((small(), None), (small(speculation="fixed"), PROFILE)):
        assert load_run.config_of(config, setup, profile).steps_per_second == ()
    limited = dataclasses.replace(config, threshold=0.5)
    assert load_run.config_of(limited, small(), PROFILE).steps_per_second == ()


def test_a_false_bound_is_said_to_be_none():
    slow = dataclasses.replace(COSTS, insert_s=1.0)
    report, _ = load_run.run(small(), profile=dataclasses.replace(PROFILE, costs=slow))
    assert report["token_gap_bound_ms"] is None
    assert "no bound on token gaps holds: moving rows takes" in report["notes"][0]


def test_hundreds_of_replicas_carry_ten_thousand_requests_a_second():
    """About their part of the rate each: nobody waits for a slot, and all is told."""
    num = 300
    arrivals = [
        Arrival(arrival_s=float(t), prompt_length=20, output_length=4)
        for t in simulation.poisson_times(10_000.0, num, 0)
    ]
    records = simulation.simulate(
        arrivals,
        jaxdec.policies.POLICIES["first_come"],
        small().limits,
        COSTS,
        num_replicas=400,
    )
    assert max(r.queue_wait_s for r in records) == 0
    # A row, two chunks, a move, and a step alone in the slots.
    expected = 0.0078125 + 2 * 0.5 + 0.03125 + 0.125
    np.testing.assert_allclose([r.ttft_s for r in records], expected)


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs a command line in this process: exit status, stdout, stderr."""
    monkeypatch.setattr(console, "prepare_jax", lambda: None)
    monkeypatch.setattr(console, "QUIET_S", 1e9)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE.to_dict()))

    def call(*arguments):
        simulated = ["--simulate", "--profile", str(path), "--slots", "2"]
        simulated += ["--prefill-chunk", "16", "--max-length", "60"]
        simulated += ["--prompt-tokens", "20", "--output-tokens", "8"]
        status = console.run(app, ["load", *simulated, *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def test_the_command_tells_figures_and_draws_plots(run, tmp_path):
    plots = tmp_path / "plots"
    options = ["--requests", "20", "--sweep", "1, 4,16", "--plots", str(plots)]
    options += ["--policies", "first_come,deadline", "--ttft-ms", "4000"]
    status, out, err = run(*options, "--json")
    assert status == 0, err
    report = json.loads(out)
    assert set(FIGURES) <= set(report) and report["finished"] == 40
    assert report["settings"]["clock"] == "simulated"
    for found in report["policies"].values():
        assert set(FIGURES) <= set(found) and "simulated" not in found
        assert found["p99_token_gap_ms"] <= report["token_gap_bound_ms"]
        assert found["goodput"] < found["finished"]
    assert report["token_gap_bound_ms"] == pytest.approx(1000 * 1.25 * (0.5 + 0.375))
    for name in ("gaps", "throughput", "draft_length"):
        assert (plots / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"{name}.png" in err
    status, out, err = run("--requests", "20", "--sweep", "4")
    assert status == 0, err
    for word in ("first_come", "simulated", "gap P99", "scheduled", "fixed", "off"):
        assert word in out


def test_the_command_says_what_is_wrong(run, monkeypatch, tmp_path, capsys):
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    for options, told in (
        (["--sweep", "1,fast"], "--sweep takes requests per second with commas"),
        (["--policies", "fair"], "unknown policy 'fair'; use one of first_come"),
        (["--profile", str(bad)], "bad.json is not JSON"),
        (["--lengths", str(bad)], "1 bad lines (line 1: no prompt_length"),
        (["--kv-tokens", "9"], "but the KV budget is 9"),
        (["--replicas", "2", "--route", "any"], "a route of least_loaded, round_robin"),
        (["--rate", "inf", "--json"], "rate is inf; a load has some of each"),
        (["--save-profile", str(tmp_path / "new.json")], "leave one of them out"),
        (["--plots", str(bad)], "File exists"),
    ):
        status, out, err = run(*options)
        assert (status, out) == (1, "") and told in err and "Traceback" not in err
    for path in (tmp_path, tmp_path / "none" / "new.json"):
        status = console.run(app, ["load", "--save-profile", str(path)])
        assert status == 1
        assert "a file in a folder that exists, got" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    status, _, err = run("--plots", str(tmp_path))
    assert status == 1 and "pip install 'jaxdec[plots]', or leave --plots out" in err
