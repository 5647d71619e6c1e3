"""The comparison on a tiny model: every count again from the tokens, nothing null."""

import dataclasses
import importlib
import json
import types

import jax.numpy as jnp
import numpy as np
import pytest
from helpers_tiny import write_model

import jaxdec
from jaxdec import concurrency
from jaxdec.certificate import Mismatch
from jaxdec.certificate import certify as conclude
from jaxdec.concurrency import Together, run_together
from jaxdec.models.config import ModelConfig, MoeConfig
from jaxdec.planning import bandwidth
from jaxdec.planning.break_even import expected_tokens
from jaxdec.prompts import Prompt
from jaxdec.report import tables
from jaxdec.report.comparison import survival
from jaxdec.statistics import repetition_rate

# By this name: the package has a function of the same name.
compare_module = importlib.import_module("jaxdec.compare")
compare, plan = compare_module.compare, compare_module.plan

PROMPTS = (
    Prompt(id="one", text="ab ab ab ab ab", task="code"),
    Prompt(id="two", text="What is this?", task="chat"),
    Prompt(id="three", text="1, 2, 3, 1, 2, 3, 1, 2,", task="math"),
)
STRATEGIES = ("greedy", "sample", "lookup", "self_draft")


WRONG = Mismatch(position=0, plain_token=1, emitted_token=2, gap=9.0, kind="divergence")


@pytest.fixture(autouse=True)
def one_at_a_time(monkeypatch):
    """Programs for several requests are compiled only where they are looked at."""
    monkeypatch.setattr(compare_module, "TOGETHER", 1)
    monkeypatch.setattr(bandwidth, "NUM_BYTES", 2**20)


@pytest.fixture(scope="module")
def compared():
    """Where `report` keeps what it found."""
    return {}


@pytest.fixture
def certify(monkeypatch):
    """A certificate that always passes, and what it was asked."""
    state = types.SimpleNamespace(calls=[], failing=())

    def fake(lm, prompts, strategy, **options):
        state.calls.append((strategy.name, list(prompts), options))
        return conclude(
            strategy=strategy.name,
            mode="greedy",
            dtype=lm.dtype,
            row_class="2 to 7",
            tolerance=1e-3,
            num_positions=9,
            divergences=[WRONG] * (strategy.name in state.failing),
        )

    monkeypatch.setattr(compare_module, "certify", fake)
    return state


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("tiny") / "model")
    return jaxdec.load(folder, dtype="float32")


@pytest.fixture
def report(lm, certify, tmp_path, compared):
    """One comparison for all tests that read it, and what certificates were asked."""
    if not compared:
        compared["report"] = written(lm, tmp_path)
        compared["calls"] = certify.calls
    certify.calls = compared["calls"]
    return compared["report"]


def written(lm, tmp_path):
    told = []
    strategies = [*STRATEGIES[:3], jaxdec.self_draft(1, length=3)]
    compare(
        lm,
        PROMPTS,
        strategies,
        max_new_tokens=24,
        out=tmp_path,
        progress=lambda *event: told.append(event),
    )
    assert told[-1][:2] == (told[-1][1],) * 2
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    text = (tmp_path / "report.json").read_text(encoding="utf-8")
    return json.loads(text), (tmp_path / "report.md").read_text(encoding="utf-8")


def nulls(value, path=""):
    if value is None:
        return [path]
    if isinstance(value, dict):
        return [p for k, v in value.items() for p in nulls(v, f"{path}.{k}")]
    if isinstance(value, list):
        return [p for i, v in enumerate(value) for p in nulls(v, f"{path}[{i}]")]
    return []


FIELDS = """
tokens_per_step acceptance_rate acceptance_length acceptance_by_position
conditional_acceptance_by_position num_steps num_drafted num_judged num_accepted
num_emitted num_rollbacks ttft_s tpot_ms e2e_s throughput_tokens_per_s compile_s
num_compilations draft_cost_ms verify_cost_ms cache_length kv_bytes_read
kv_bytes_written drafter_param_bytes drafter_state_bytes finish_reasons exact_match
perplexity repetition_rate format_success_rate distinct_outputs versions hashes seed
sampling
""".split()


def test_report_is_whole(report):
    record, text = report
    assert {"model", "settings", "strategies", "certificates"} <= set(record)
    assert [s["strategy"] for s in record["strategies"]] == list(STRATEGIES)
    for strategy in record["strategies"]:
        assert set(FIELDS) <= set(strategy)
        asked = {name: strategy[name] for name in FIELDS}
        assert nulls(asked) == [], strategy["strategy"]
        # No confidence, so nothing that it could be wrong by; all else is there.
        assert nulls(strategy) == [".calibration_error"]
        assert strategy["num_compilations"] > 0 and strategy["compile_s"] > 0
    for name in STRATEGIES:
        assert f"| {name}" in text
    assert "## Advice" in text


def test_counts_again_from_tokens_and_steps(report):
    record, _ = report
    for strategy in record["strategies"]:
        steps = [request["steps"] for request in strategy["requests"]]
        assert [r["prompt_id"] for r in strategy["requests"]] == ["one", "two", "three"]
        for request in strategy["requests"]:
            emitted = request["steps"]["num_emitted"]
            assert sum(emitted) == len(request["tokens"]) == request["output_length"]
            assert len(emitted) == request["num_steps"]
            assert request["finish_reason"] in ("length", "stop_token")
        for name in ("num_drafted", "num_judged", "num_accepted", "num_emitted"):
            assert strategy[name] == sum(sum(s[name]) for s in steps)
        num_steps = sum(len(s["num_emitted"]) for s in steps)
        assert strategy["num_steps"] == num_steps
        assert strategy["tokens_per_step"] == strategy["num_emitted"] / num_steps
        pairs = [
            pair
            for s in steps
            for pair in zip(s["num_judged"], s["num_accepted"], strict=True)
        ]
        assert strategy["num_rollbacks"] == sum(j > a for j, a in pairs)
        judged = strategy["num_judged"]
        rate = strategy["num_accepted"] / judged if judged else 0.0
        assert strategy["acceptance_rate"] == rate
        assert strategy["exact_match"] == 1.0
    greedy, sample, lookup, self_draft = record["strategies"]
    assert [r["tokens"] for r in greedy["requests"]] == [
        r["tokens"] for r in lookup["requests"]
    ]
    assert greedy["num_drafted"] == 0 and greedy["acceptance_by_position"] == []
    assert lookup["num_accepted"] > 0 and self_draft["num_judged"] > 0
    assert greedy["distinct_outputs"] == 1
    assert sample["temperature"] == 0.7 and 1 < sample["distinct_outputs"] <= 3


def test_certificates_see_the_outputs(report, certify):
    del report
    assert [name for name, _, _ in certify.calls] == list(STRATEGIES)
    for name, prompts, options in certify.calls:
        assert prompts == [prompt.text for prompt in PROMPTS]
        assert len(options["outputs"]) == len(PROMPTS)
        assert options["temperature"] == (0.7 if name == "sample" else 0.0)
        assert options["max_new_tokens"] == 24


def test_batches_say_the_same_and_tasks_are_told_apart(lm, certify):
    # The third prompt twice: two batches of one shape.
    prompts = [*PROMPTS, dataclasses.replace(PROMPTS[2], id="four")]
    alone = compare(lm, PROMPTS, ["lookup"], max_new_tokens=24).to_dict()
    options = dict(max_new_tokens=24, batch_size=2)
    found = compare(lm, prompts, ["lookup"], **options).to_dict()
    assert found["settings"]["batch_size"] == 2
    assert len(certify.calls[-1][2]["outputs"]) == 2
    for record in found["strategies"]:
        one = next(
            s for s in alone["strategies"] if s["strategy"] == record["strategy"]
        )
        requests = record["requests"]
        names = [r["prompt_id"] for r in requests]
        assert names == ["one", "two", "three", "four"]
        for name in ("tokens", "text", "num_steps", "num_emitted"):
            assert [r[name] for r in requests[:3]] == [r[name] for r in one["requests"]]
            assert requests[3][name] == requests[2][name]
        by_task = {
            task: sum(r["num_emitted"] for r in of) / sum(r["num_steps"] for r in of)
            for task in ("code", "chat", "math")
            for of in [[r for r in requests if r["task"] == task]]
        }
        assert record["tokens_per_step_by_task"] == by_task
        plain = [r for r in requests if (repetition_rate(r["tokens"]) or 0) <= 0.3]
        steps = sum(r["num_steps"] for r in plain)
        per_step = sum(r["num_emitted"] for r in plain) / steps if steps else 0.0
        assert record["tokens_per_step_not_repetitive"] == per_step
    title = "| strategy | code | chat | math | all | not repetitive |"
    assert title in tables.markdown(found)


def test_advice_ranks_only_what_is_certified(lm, certify):
    certify.failing = ("lookup",)
    strategies = ["lookup", jaxdec.self_draft(1)]
    found = compare(lm, PROMPTS[:1], strategies, max_new_tokens=8)
    report = found.to_dict()
    rankings = {r["strategy"]: r["action"] for r in report["advice"]["rankings"]}
    assert rankings["lookup"] == "not_ranked"
    assert rankings["self_draft"] in ("use", "keep", "turn_off")
    assert report["advice"]["best"] != "lookup"
    assert "lookup is not ranked" in report["advice"]["verdict"]
    assert not report["certificates"]["lookup"]["passed"]
    assert [s["strategy"] for s in report["strategies"]][0] == "greedy"


def test_nothing_is_ranked_without_certificates(lm):
    found = compare(lm, ["abab"], ["lookup"], max_new_tokens=8, certify=False)
    assert not found.certificates
    assert {r.action for r in found.advice.rankings} == {"not_ranked"}
    assert found.advice.best == "greedy"


def test_a_strategy_that_ends_in_its_first_step_is_said_not_to_be_ranked(lm, certify):
    """The tiny model repeats itself, so lookup has both tokens at once."""
    del certify
    prompt = lm.tokenizer.encode("abcabcabcabc")
    prompt += jaxdec.generate(lm, prompt, max_new_tokens=12, stop_tokens=[])[0].tokens
    found = compare(lm, [prompt], ["lookup"], max_new_tokens=2)
    assert found.evidence["lookup"].num_steps == 1
    assert found.evidence["lookup"].num_emitted == 2
    report = found.to_dict()
    (ranking,) = report["advice"]["rankings"]
    assert (ranking["strategy"], ranking["action"]) == ("lookup", "not_ranked")
    assert ranking["measured_tpot_ms"] is None
    assert report["advice"]["best"] == "greedy"
    why = "lookup is not ranked: every answer ended in its first step"
    assert any(line.startswith(why) for line in tables.advice_lines(report))
    column = [title.replace("\n", " ") for title in tables.HEADERS].index("TPOT ms")
    greedy, lookup = tables.rows(report)
    assert lookup[column] == "1 step" and float(greedy[column]) > 0
    assert "1 step" in tables.markdown(report)


def test_second_comparison_compiles_nothing(lm, certify):
    del certify
    options = {"max_new_tokens": 16, "repeats": 1}
    compare(lm, PROMPTS[:2], ["lookup"], **options)
    programs = dict(lm.programs)
    compare(lm, PROMPTS[1:], ["lookup"], seed=5, **options)
    assert lm.programs == programs


def test_sampled_drafts_equal_plain_sampling(lm, certify):
    del certify
    found = compare(
        lm, PROMPTS, ["lookup"], temperature=0.8, seed=3, max_new_tokens=16, top_k=20
    )
    assert list(found.evidence) == ["greedy", "sample", "lookup"]
    assert found.evidence["lookup"].exact_match == 1.0
    assert found.evidence["lookup"].distinct_outputs > 1
    assert found.evidence["greedy"].sampling["temperature"] == 0.0
    tokens = [r.tokens for r in found.evidence["lookup"].requests]
    assert tokens == [r.tokens for r in found.evidence["sample"].requests]
    assert found.advice.best in ("sample", "lookup")
    assert "against plain decoding's" in found.advice.rankings[0].reason
    assert "greedy" not in "\n".join(tables.advice_lines(found.to_dict()))


def test_prediction_at_the_measured_length(lm, certify):
    """E(K) from the survival of drafts is what was measured, also for lookup."""
    del certify
    found = compare(lm, PROMPTS, ["lookup"], max_new_tokens=24)
    evidence = found.evidence["lookup"]
    assert evidence.num_judged < 6 * evidence.num_steps
    rates = survival(evidence, 6)
    assert expected_tokens(rates, 6) == pytest.approx(evidence.acceptance_length)
    assert 6 in found.advice.rankings[0].predicted_tpot_ms


class Clock:
    """A clock that a test sets forward."""

    def __init__(self, monkeypatch, module, spent):
        self.now, self.spent, self.is_running = 0.0, iter(spent), False
        clock = types.SimpleNamespace(perf_counter=self.read)
        monkeypatch.setattr(module, "time", clock)

    def read(self):
        # Every second reading ends what the one before began.
        self.now += next(self.spent) if self.is_running else 0.0
        self.is_running = not self.is_running
        return self.now


def test_memory_bandwidth_is_the_fastest_of_the_tries(monkeypatch):
    bandwidth.memory_bandwidth.cache_clear()
    Clock(monkeypatch, bandwidth, [0.5, 0.3, 0.25, 0.7, 0.3])
    try:
        assert bandwidth.memory_bandwidth() == 2**20 / 0.25
        floor = bandwidth.plain_floor(MIXTURE, WEIGHTS, 1000.0)
    finally:
        bandwidth.memory_bandwidth.cache_clear()
    assert floor.floor_ms == 1000 * (13_600 + 1000) / (2**20 / 0.25)


MIXTURE = ModelConfig(
    family="toy",
    vocab_size=100,
    hidden_size=10,
    intermediate_size=0,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=10,
    max_positions=50,
    moe=MoeConfig(
        num_experts=8,
        num_experts_per_token=2,
        intermediate_size=20,
        norm_topk_prob=True,
        layers=(0,),
    ),
)
WEIGHTS = {
    "embedding": jnp.zeros((100, 10)),
    "positions": jnp.zeros((50, 10)),
    "layers": {0: {"out": jnp.zeros((20, 10)), "up": jnp.zeros((8, 20, 30))}},
    "head": {"weight": jnp.zeros((100, 20))},
}


def test_weights_that_a_step_reads():
    """Two experts of eight; of the tables that are only looked up, nothing."""
    read = bandwidth.weight_bytes(MIXTURE, WEIGHTS)
    assert read == 4 * (20 * 10 + 2 * 20 * 30 + 100 * 20) == 13_600
    tied = dataclasses.replace(MIXTURE, tie_embeddings=True, moe=None)
    layer = {"out": jnp.zeros((20, 10), jnp.bfloat16)}
    params = {"embedding": WEIGHTS["embedding"], "layers": {0: layer}}
    assert bandwidth.weight_bytes(tied, params) == 4 * 1000 + 2 * 200


def test_requests_at_once_are_timed_step_by_step(lm, monkeypatch):
    """Gaps of 1, 2, ... seconds for the requests that run; one ends after 3 steps."""
    texts = [prompt.text for prompt in PROMPTS]
    limits, num = [3, 12, 12], 11
    Clock(monkeypatch, concurrency, range(1, num + 1))
    found = run_together(
        lm,
        texts,
        jaxdec.greedy(),
        label="plain",
        seeds=[1, 2, 3],
        max_new_tokens=limits,
        stop_tokens=[],
    )
    gaps = [s for s in range(1, num + 1) for _ in range(3 if s < 3 else 2)]
    assert found.num_requests == 3 and found.strategy == "plain"
    assert found.p99_gap_ms == pytest.approx(1000 * np.percentile(gaps, 99))
    assert found.throughput_tokens_per_s == pytest.approx((2 + 11 + 11) / 66)
    alone = dict(label="x", seeds=[0] * 3, max_new_tokens=4)
    assert run_together(lm, texts, jaxdec.lookup(6), exact=13, **alone) is None
    assert run_together(lm, texts[:1], jaxdec.greedy(), **alone) is None
    once = alone | dict(max_new_tokens=1)
    assert run_together(lm, texts, jaxdec.greedy(), **once) is None


def test_what_is_measured_at_the_end_reaches_the_advice(lm, certify, monkeypatch):
    del certify
    asked = []

    def slow(lm, prompts, strategy, *, label, seeds, **options):
        asked.append((list(prompts), strategy.name, label, list(seeds), options))
        return Together(
            strategy=label,
            num_requests=len(prompts),
            throughput_tokens_per_s=1e-3,
            p99_gap_ms=1e9,
        )

    monkeypatch.setattr(compare_module, "TOGETHER", 2)
    monkeypatch.setattr(compare_module, "run_together", slow)
    monkeypatch.setattr(bandwidth, "memory_bandwidth", lambda: 1e15)
    found = compare(lm, PROMPTS, ["lookup"], max_new_tokens=24, seed=7)
    best = found.advice.best
    texts = [prompt.text for prompt in PROMPTS[:2]]
    options = {"max_new_tokens": 24, "exact": False, "temperature": 0.0}
    assert asked == [(texts, best, best, [7, 8, 9], options)]
    report = found.to_dict()
    assert report["together"]["num_requests"] == 2
    greedy = report["strategies"][0]
    kv_bytes = greedy["kv_bytes_read"] / greedy["num_steps"]
    nbytes = bandwidth.weight_bytes(lm.config, lm.params) + kv_bytes
    assert report["floor"]["floor_ms"] == pytest.approx(1e3 * nbytes / 1e15)
    findings = report["advice"]["findings"]
    reasons = {(f["code"], f["strategy"]): f["reason"] for f in findings}
    assert "2 requests give 0.0 tokens/s" in reasons["scheduling", best]
    assert "the P99 token gap is 1000000000.0 ms" in reasons["scheduling", best]
    assert "a greedy step takes" in reasons["round_time", "greedy"]


def test_plan():
    entries = plan(["lookup", jaxdec.lookup(length=2)], 0.0)
    assert [e.label for e in entries] == ["greedy", "lookup-6", "lookup-2"]
    assert [e.config.length for e in plan(["sample", "lookup"], 0.0, 3)] == [0, 0, 3]
    sampled = {e.label: (e.temperature, e.reference) for e in plan(["lookup"], 0.5)}
    assert sampled == {
        "greedy": (0.0, "greedy"),
        "sample": (0.5, "sample"),
        "lookup": (0.5, "sample"),
    }


@pytest.mark.parametrize(
    ("strategies", "options", "words"),
    [
        (["nonsense"], {}, "unknown strategy"),
        (["lookup", "lookup"], {}, "twice"),
        (["lookup"], {"temperature": -1.0}, "temperature"),
        (["lookup"], {"temperature": float("nan")}, "temperature"),
        (["lookup"], {"draft_length": 0}, "draft length"),
        (["lookup"], {"max_new_tokens": 1}, "max_new_tokens"),
        (["lookup"], {"repeats": 0}, "repeats"),
        (["lookup"], {"batch_size": 0}, "batch_size"),
        (["lookup"], {"seed": -1}, "seed"),
    ],
)
def test_bad_input(lm, strategies, options, words):
    before = dict(lm.programs)
    with pytest.raises(ValueError, match=words):
        compare(lm, PROMPTS, strategies, **options)
    with pytest.raises(ValueError, match="no prompts"):
        compare(lm, [], ["lookup"])
    assert lm.programs == before
