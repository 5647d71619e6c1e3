import json

import pytest

from jaxdec.advice import advise
from jaxdec.planning.break_even import (
    Measured,
    break_even_acceptance,
    expected_tokens,
    predict_tpot,
)

# Greedy takes 20 ms a token. A round: 4 ms drafting, 22 verifying, 2 the rest = 28 ms.
GOOD = dict(
    certified=True,
    tpot_ms=10.0,
    tokens_per_step=2.8,
    draft_length=4,
    acceptance_rate=0.45,
    conditional_acceptance_by_position=[0.8, 0.75, 0.5, 0.5],
    draft_cost_ms=4.0,
    verify_cost_ms=22.0,
)
# 1.2 tokens from a round of 28.8 ms: 24 ms a token.
REFUSED = GOOD | dict(
    tpot_ms=24.0,
    tokens_per_step=1.2,
    acceptance_rate=0.05,
    conditional_acceptance_by_position=[0.15, 0.3, 0.0, None],
)


def codes(advice):
    return [(f.code, f.strategy) for f in advice.findings]


def by_name(advice):
    return {r.strategy: r for r in advice.rankings}


def test_expected_tokens():
    assert expected_tokens([0.5, 0.5], 0) == 1.0
    assert expected_tokens([0.8, 0.75, 0.5, 0.5], 3) == pytest.approx(2.7)
    assert expected_tokens([0.8] * 4, 4) == pytest.approx(3.3616)
    with pytest.raises(ValueError, match="longer draft"):
        expected_tokens([0.8, None], 2)
    with pytest.raises(ValueError, match="longer draft"):
        expected_tokens([0.8], 2)


def test_break_even_by_hand():
    # 30 ms a round against 20 a token must emit 1.5 tokens: half a draft token of 4.
    assert break_even_acceptance(30.0, 20.0, 4) == 0.125
    assert break_even_acceptance(20.0, 20.0, 4) == 0.0
    # 100 ms must emit 5 tokens: all 4 drafts, exactly; 120 ms never.
    assert break_even_acceptance(100.0, 20.0, 4) == 1.0
    assert break_even_acceptance(120.0, 20.0, 4) > 1
    with pytest.raises(ValueError, match="needs a draft"):
        break_even_acceptance(30.0, 20.0, 0)


def test_prediction_by_hand():
    # Proportional draft cost 1 ms a token, overhead 28 - 26 = 2.
    assert predict_tpot(Measured(**GOOD)) == pytest.approx(
        {
            1: (1 + 22 + 2) / 1.8,
            2: (2 + 22 + 2) / 2.4,
            3: (3 + 22 + 2) / 2.7,
            4: (4 + 22 + 2) / 2.85,
        }
    )
    block = predict_tpot(Measured(**GOOD | dict(is_block=True)))
    assert block[1] == pytest.approx((4 + 22 + 2) / 1.8)
    # Verify table: 2 rows cost 20, 4 rows 24; nothing beyond is predicted.
    table = Measured(**GOOD | dict(verify_cost_ms={2: 20.0, 4: 24.0}))
    assert predict_tpot(table) == pytest.approx(
        {1: 21 / 1.8, 2: 22 / 2.4, 3: 25 / 2.7, 4: 28 / 2.85}
    )
    short = Measured(**GOOD | dict(verify_cost_ms={1: 20.0, 2: 24.0}))
    assert predict_tpot(short) == {}
    assert predict_tpot(Measured(**GOOD | dict(draft_cost_ms=None))) == {}
    assert list(predict_tpot(Measured(**REFUSED))) == [1, 2, 3]


def test_a_tree_is_predicted_as_it_was_run():
    """Its depths are reached with all of its nodes, not with as few as the depth."""
    rates = [0.8, 0.5, 0, 0, 0, 0]
    deep = dict(draft_length=6, conditional_acceptance_by_position=rates)
    table = dict(is_tree=True, verify_cost_ms={0: 15.0, 6: 22.0})
    predicted = predict_tpot(Measured(**GOOD | deep | table))
    assert predicted == {6: pytest.approx((4 + 22 + 2) / 2.2)}


def test_best_certified_strategy_is_used():
    faster = GOOD | dict(certified=False, tpot_ms=2.0)
    slower = GOOD | dict(tpot_ms=15.0)
    advice = advise(
        {"slow": slower, "wrong": faster, "good": GOOD, "bad": REFUSED},
        plain_tpot_ms=20.0,
    )
    assert advice.best == "good"
    actions = {name: r.action for name, r in by_name(advice).items()}
    assert actions == {
        "good": "use",
        "slow": "keep",
        "bad": "turn_off",
        "wrong": "not_ranked",
    }
    assert advice.rankings[-1].strategy == "wrong"
    assert ("certificate", "wrong") in codes(advice)
    assert (
        "Best draft length 4: predicted 9.82 ms a token; at 4, as run, measured 10.00."
    ) in advice.verdict
    assert "wrong is not ranked: not certified" in advice.verdict
    json.dumps(advice.to_dict(), allow_nan=False)


def test_another_length_is_told_from_the_one_that_was_run():
    steep = GOOD | dict(conditional_acceptance_by_position=[0.9, 0.1, 0.1, 0.1])
    advice = advise({"good": steep}, plain_tpot_ms=20.0)
    # At 2: (2 + 22 + 2) / 1.99; at 4: (4 + 22 + 2) / 1.9999.
    assert (
        "Best draft length 2: predicted 13.07 ms a token; at 4, as run, predicted "
        "14.00 and measured 10.00."
    ) in advice.verdict


def test_disturbed_times_are_not_trusted():
    steady = {"greedy": [20.0, 21.0, 30.0], "good": [28.0, 30.0, 60.0]}
    advice = advise({"good": GOOD}, plain_tpot_ms=20.0, step_ms=steady)
    assert not codes(advice) and advice.verdict.startswith("Use good")
    # A plain step always does the same work, so here it is the machine.
    for step_ms in (
        steady | {"greedy": [20.0, 21.0, 40.0]},
        steady | {"good": [28.0, 30.0, 200.0]},
    ):
        advice = advise({"good": GOOD}, plain_tpot_ms=20.0, step_ms=step_ms)
        ((code, name),) = codes(advice)
        assert code == "timing" and step_ms[name] != steady[name]
        assert advice.verdict.startswith("The times are not to be trusted")
        assert "--repeats 3" in advice.verdict and "Use good" in advice.verdict


def test_a_strategy_without_time_per_token_comes_last():
    wrong = GOOD | dict(certified=False)
    advice = advise({"wrong": wrong}, plain_tpot_ms=20.0, untimed=["instant"])
    assert [(r.strategy, r.action) for r in advice.rankings] == [
        ("wrong", "not_ranked"),
        ("instant", "not_ranked"),
    ]
    assert advice.best == "greedy" and codes(advice) == [("certificate", "wrong")]
    assert "instant is not ranked: every answer ended in its first step" in (
        advice.verdict
    )
    json.dumps(advice.to_dict(), allow_nan=False)


def test_turn_it_off_says_why():
    advice = advise({"bad": REFUSED}, plain_tpot_ms=20.0)
    assert advice.best == "greedy"
    # Round 28.8 ms: (28.8 / 20 - 1) / 4 = 11 %.
    assert by_name(advice)["bad"].break_even_acceptance == pytest.approx(0.11)
    for part in (
        "Use greedy decoding: 20.00 ms",
        "Turn bad off",
        "accepts 5.0%",
        "drafting costs 4.00 ms and verifying 22.00",
        "break-even is at 11.0% acceptance",
    ):
        assert part in advice.verdict
    lucky = REFUSED | dict(acceptance_rate=0.2)
    text = advise({"bad": lucky}, plain_tpot_ms=20.0).verdict
    assert "accepts 20.0%" in text and "above the 11.0% of break-even" in text


def test_gain_must_exceed_three_percent():
    def best_at(tpot_ms):
        measured = {"s": GOOD | dict(tpot_ms=tpot_ms)}
        return advise(measured, plain_tpot_ms=100.0).best

    assert best_at(97.1) == "greedy"
    assert best_at(96.9) == "s"


def test_hopeless_round():
    slow = GOOD | dict(tpot_ms=60.0, tokens_per_step=2.8)
    advice = advise({"slow": slow}, plain_tpot_ms=20.0)
    assert by_name(advice)["slow"].break_even_acceptance > 1
    assert "even full acceptance of 4" in advice.verdict


def test_varying_lengths_break_even_on_what_was_judged():
    adaptive = REFUSED | dict(judged_per_step=2.0)
    ranking = by_name(advise({"a": adaptive}, plain_tpot_ms=20.0))["a"]
    assert ranking.break_even_acceptance == pytest.approx(0.22)


@pytest.mark.parametrize(
    "costs, word",
    [
        (dict(draft_cost_ms=30.0, verify_cost_ms=20.0), "smaller drafter"),
        (dict(draft_cost_ms=3.0, verify_cost_ms=45.0), "KV access"),
        (dict(draft_cost_ms=3.0, verify_cost_ms=10.0), "sampling"),
        (dict(draft_cost_ms=None), "measure draft and verify"),
    ],
)
def test_high_round_time_names_its_largest_part(costs, word):
    long = GOOD | dict(tpot_ms=20.0) | costs
    (finding,) = advise({"long": long}, plain_tpot_ms=20.0).findings[:1]
    assert (finding.code, finding.strategy) == ("round_time", "long")
    assert "56.00 ms, 2.80 greedy steps" in finding.reason
    assert word in finding.instruction


def test_high_greedy_round_time():
    advice = advise({}, plain_tpot_ms=20.0, floor_ms=8.0)
    assert codes(advice) == [("round_time", "greedy")]
    assert "2.50 times the 8.00 ms" in advice.findings[0].reason
    assert not advise({}, plain_tpot_ms=20.0, floor_ms=15.0).findings


def test_plain_decoding_is_greedy_only_at_temperature_0():
    facts = dict(plain_tpot_ms=20.0, baseline="sample", floor_ms=8.0)
    long = GOOD | dict(tpot_ms=21.0)
    advice = advise({"long": long, "bad": REFUSED}, output_lengths=[100], **facts)
    assert advice.best == "sample"
    assert codes(advice) == [
        ("round_time", "sample"),
        ("round_time", "long"),
        ("acceptance", "long"),
        ("acceptance", "bad"),
        ("num_rounds", "sample"),
    ]
    text = "\n".join([advice.verdict, *(f.reason for f in advice.findings)])
    for part in (
        "Use plain decoding: 20.00 ms a token",
        "24.00 ms a token against plain decoding's 20.00",
        "a plain step takes 20.00 ms, 2.50 times",
        "2.94 plain steps",
    ):
        assert part in text
    assert "greedy" not in text
    with pytest.raises(ValueError, match="'sample' is the baseline"):
        advise({"sample": GOOD}, plain_tpot_ms=20.0, baseline="sample")


def test_too_many_rounds():
    advice = advise({}, plain_tpot_ms=20.0, prefill_ms=100.0, output_lengths=[150, 50])
    assert codes(advice) == [("num_rounds", "greedy")]
    assert "100 steps for 100 tokens (1.00 a step) take 95%" in (
        advice.findings[0].reason
    )
    facts = dict(plain_tpot_ms=20.0, output_lengths=[100])
    assert not advise({}, prefill_ms=1000.0, **facts).findings
    assert not advise({"good": GOOD}, prefill_ms=100.0, **facts).findings
    assert "try speculation" in advice.findings[0].instruction
    # Where drafts are made already, more speculation is no advice.
    few = GOOD | dict(tokens_per_step=1.24)
    advice = advise({"good": few}, plain_tpot_ms=20.0, output_lengths=[11, 12])
    assert "10 steps for 11.5 tokens (1.24 a step)" in advice.findings[0].reason
    assert "right more often" in advice.findings[0].instruction


def test_low_acceptance():
    advice = advise({"bad": REFUSED}, plain_tpot_ms=20.0)
    assert codes(advice) == [("acceptance", "bad")]
    assert "5.0% of 4 draft tokens" in advice.findings[0].reason
    assert "give speculation up" in advice.findings[0].instruction
    # Cheap short drafts: 1 ms a draft token more, and verifying one costs 15 ms.
    shorter = REFUSED | dict(
        verify_cost_ms={1: 15.0, 4: 22.0},
        conditional_acceptance_by_position=[0.19, 0.0, None, None],
    )
    advice = advise({"bad": shorter}, plain_tpot_ms=20.0)
    assert "draft length 1" in advice.findings[0].instruction
    assert "before giving it up, measure draft length 1" in advice.verdict


def test_scheduling():
    facts = dict(plain_tpot_ms=20.0, num_requests=8)
    slow = advise({}, throughput_tokens_per_s=60.0, **facts)
    assert codes(slow) == [("scheduling", "greedy")]
    assert "60.0 tokens/s, 1.20 times the 50.0" in slow.findings[0].reason
    late = advise({}, p99_gap_ms=100.0, **facts)
    assert "5.0 times a step of 20.00 ms" in late.findings[0].reason
    # A round of 28 ms commits 2.8 tokens together: gaps of a round are its nature.
    assert not advise({"good": GOOD}, p99_gap_ms=80.0, **facts).findings
    assert not advise({}, throughput_tokens_per_s=300.0, **facts).findings
    alone = facts | dict(num_requests=1)
    assert not advise({}, p99_gap_ms=100.0, **alone).findings


def test_strategy_without_drafts():
    sampling = dict(certified=True, tpot_ms=20.1, tokens_per_step=1.0)
    ranking = by_name(advise({"sampling": sampling}, plain_tpot_ms=20.0))["sampling"]
    assert ranking.action == "turn_off"
    assert ranking.break_even_acceptance is None
    assert ranking.predicted_tpot_ms == {}


def test_errors_are_instructions():
    with pytest.raises(ValueError, match="baseline 'greedy'"):
        advise({}, plain_tpot_ms=float("nan"))
    with pytest.raises(ValueError, match="pass its TPOT as plain_tpot_ms"):
        advise({"greedy": GOOD}, plain_tpot_ms=20.0)
    with pytest.raises(ValueError, match="positive tpot_ms"):
        advise({"s": GOOD | dict(tpot_ms=0.0)}, plain_tpot_ms=20.0)
