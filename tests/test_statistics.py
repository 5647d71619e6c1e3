import math

import ml_dtypes
import numpy as np
import pytest

from jaxdec import statistics
from jaxdec.certificate import certify, classify_position, rounding_tolerance
from jaxdec.statistics import kolmogorov_smirnov, pit_values

# The law that a fault emits, and the right one (section 0 of the fault list).
WRONG_LAWS = {
    "argmax_draft": ([0.5, 1 / 6, 1 / 3], [0.5, 0.3, 0.2]),
    "resample_on_mismatch": ([0.64, 0.24, 0.12], [0.5, 0.3, 0.2]),
    "no_residual": ([0.4, 0.32, 0.28], [0.5, 0.3, 0.2]),
    "wrong_temperature": ([0.616, 0.307, 0.077], [0.658, 0.237, 0.105]),
    "unfiltered_residual": ([0.625, 0.2875, 0.0875], [0.625, 0.375, 0.0]),
    "siblings_not_renormalised": ([0.4, 0.4, 0.2], [0.5, 0.3, 0.2]),
    "draft_dropped_by_value": ([0.25, 0.75], [0.5, 0.5]),
}


def ks_of(emitted_law, right_law, seed, n=20_000):
    rng = np.random.default_rng(seed)
    emitted_law, right_law = np.array(emitted_law), np.array(right_law)
    right_law = right_law / right_law.sum()
    tokens = rng.choice(len(emitted_law), n, p=emitted_law / emitted_law.sum())
    below = np.cumsum(right_law) - right_law
    u = pit_values(below[tokens], right_law[tokens], rng.random(n))
    return kolmogorov_smirnov(u)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", WRONG_LAWS)
def test_wrong_rules_are_rejected_and_right_ones_accepted(name, seed):
    wrong, right = WRONG_LAWS[name]
    assert not ks_of(wrong, right, seed).passed
    assert ks_of(right, right, seed).passed


def speculate(p, q, rule, rng, n):
    """Tokens of one drafted position under a rule, drawn in bulk."""
    if rule == "one_hot_argmax":
        q = np.eye(len(p))[np.argmax(q)]
    draft = rng.choice(len(p), n, p=q)
    target = rng.choice(len(p), n, p=p)
    if rule == "match":
        return np.where(draft == target, draft, target)
    residual = np.maximum(p - q, 0)
    recovered = rng.choice(len(p), n, p=residual / residual.sum())
    other = target if rule == "no_residual" else recovered
    is_accepted = rng.random(n) < np.minimum(1, p / np.maximum(q, 1e-30))[draft]
    return np.where(is_accepted, draft, other)


@pytest.mark.parametrize(
    "rule, is_right",
    [
        ("rejection", True),
        ("match", True),
        ("one_hot_argmax", True),
        ("no_residual", False),
    ],
)
def test_simulated_rules(rule, is_right):
    rng = np.random.default_rng(7)
    p, q, n = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6]), 20_000
    tokens = speculate(p, q, rule, rng, n)
    u = pit_values((np.cumsum(p) - p)[tokens], p[tokens], rng.random(n))
    assert kolmogorov_smirnov(u).passed == is_right


def test_threshold_is_the_stated_bound():
    rng = np.random.default_rng(0)
    result = kolmogorov_smirnov(rng.random(20_000))
    assert result.threshold == pytest.approx(math.sqrt(math.log(2e4) / 40_000))
    assert result.n == 20_000 and result.passed
    # 5 % asked for: at most 5 % seen, give or take three standard errors.
    alarms = sum(
        not kolmogorov_smirnov(rng.random(40), 0.05).passed for _ in range(2000)
    )
    assert alarms / 2000 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)


def test_statistic_against_scipy():
    stats = pytest.importorskip("scipy.stats")
    u = np.random.default_rng(3).random(501) ** 1.1
    expected = stats.kstest(u, "uniform").statistic
    assert kolmogorov_smirnov(u).statistic == pytest.approx(expected, abs=1e-12)


def test_ks_asks_for_data():
    with pytest.raises(ValueError, match="at least one token"):
        kolmogorov_smirnov(np.zeros(0))
    with pytest.raises(ValueError, match="is a probability"):
        kolmogorov_smirnov(np.zeros(3), 0.0)
    with pytest.raises(ValueError, match="NaN"):
        pit_values(np.array([np.nan]), np.array([0.5]), np.array([0.5]))


def test_quality_metrics():
    assert statistics.repetition_rate([1, 2, 3]) is None
    assert statistics.repetition_rate([7] * 8) == 4 / 5
    assert statistics.repetition_rate(range(20)) == 0.0
    with pytest.raises(ValueError, match="n >= 1"):
        statistics.repetition_rate([1], n=0)
    assert statistics.exact_match([], []) is None
    assert statistics.exact_match([(1, 2), [3]], [[1, 2], [3, 4]]) == 0.5
    with pytest.raises(ValueError, match="one reference per output"):
        statistics.exact_match([[1]], [])
    assert statistics.perplexity([]) is None
    assert statistics.perplexity([math.log(0.25)] * 3) == pytest.approx(4.0)
    assert statistics.perplexity([-np.inf]) == np.inf
    with pytest.raises(ValueError, match="nonfinite"):
        statistics.perplexity([np.nan])
    assert statistics.distinct_outputs([[1, 2], (1, 2), (2, 1)]) == 2


def test_format_success():
    texts = ['{"a": [1, null]}', "yes", "NaN", '{"a": 1} trailing', "12"]
    assert statistics.format_success_rate(texts, "json") == 2 / 5
    assert statistics.format_success_rate(texts, r"\d+|yes") == 2 / 5
    assert statistics.format_success_rate(["I say yes."], "yes") == 0.0
    assert statistics.format_success_rate(["I say yes."], "(?s).*yes.*") == 1.0
    assert statistics.format_success_rate(["[" * 100_000], "json") == 0.0
    assert statistics.format_success_rate([], "json") is None


def test_calibration_error():
    """By hand: three steps of two places, the last of which judges only one."""
    steps = ([[0.9, 0.5], [0.92, 0.5], [0.12, 0.99]], [2, 2, 1], [2, 1, 0])
    # Survival .9 (yes), .92 (yes) in one bin; .45 (yes), .46 (no) in another; .12 (no).
    by_hand = (abs(0.9 - 1 + 0.92 - 1) + abs(0.45 - 1 + 0.46) + 0.12) / 5
    assert statistics.calibration_error(*steps) == pytest.approx(by_hand)
    # With one bin for all, errors of opposite sign cancel.
    error = statistics.calibration_error(*steps, num_bins=1)
    assert error == pytest.approx(abs(0.9 + 0.92 + 0.45 + 0.46 + 0.12 - 3) / 5)
    assert statistics.calibration_error([[1.0] * 3], [3], [3]) == 0
    assert statistics.calibration_error([[1.0] * 3], [3], [0]) == 1
    assert statistics.calibration_error([[1.0] * 3], [0], [0]) is None


def test_calibration_error_vanishes_where_confidence_is_right():
    """5,000 steps whose drafts are accepted with the very probability named."""
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0.3, 1, (5_000, 4))
    hit = rng.random((5_000, 4)) < confidence
    counts = [4] * 5_000, np.cumprod(hit, axis=1).sum(axis=1).tolist()
    assert statistics.calibration_error(confidence.tolist(), *counts) < 0.015
    assert statistics.calibration_error(np.sqrt(confidence).tolist(), *counts) > 0.1


def test_rounding_tolerance():
    changes = np.linspace(-1.0, 1.0, 2001)
    assert rounding_tolerance(changes, "float32") == pytest.approx(4 * 0.99, rel=1e-3)
    tiny = np.full(10, 1e-6)
    assert rounding_tolerance(tiny, np.float32) == 1e-3
    assert rounding_tolerance(tiny, "bfloat16") == 0.25
    assert rounding_tolerance(tiny, ml_dtypes.bfloat16) == 0.25
    with pytest.raises(ValueError, match="certify in one of those"):
        rounding_tolerance(tiny, "int8")
    with pytest.raises(ValueError, match="finite gap changes"):
        rounding_tolerance(np.zeros(0), "float32")
    with pytest.raises(ValueError, match="finite gap changes"):
        rounding_tolerance(np.array([np.nan]), "float32")


def test_classify_position():
    found = classify_position(
        plain_choice=np.array([1, 2, 3, 4, 5, 6]),
        emitted=np.array([1, 9, 9, 9, 9, 9]),
        gap=np.array([0.0, 0.05, 0.1, np.inf, np.inf, np.nan]),
        tolerance=0.1,
        boundary_distance=np.array([0.0, 5.0, 5.0, -0.02, 3.0, 3.0]),
    )
    assert found.labels.tolist() == [
        "same",
        "tie",
        "divergence",
        "boundary_tie",
        "divergence",
        "divergence",
    ]
    tie, boundary = found.ties
    assert (tie.position, tie.plain_token, tie.emitted_token, tie.gap) == (
        1,
        2,
        9,
        0.05,
    )
    assert (boundary.kind, boundary.gap) == ("boundary_tie", None)
    assert [d.position for d in found.divergences] == [2, 4, 5]


def test_zero_tolerance_allows_no_tie():
    found = classify_position(np.array([1]), np.array([2]), np.array([0.0]), 0.0)
    assert found.labels.tolist() == ["divergence"]
    with pytest.raises(ValueError, match="swap the two"):
        classify_position(np.array([1]), np.array([2]), np.array([-0.1]), 1.0)


FACTS = dict(strategy="eagle3", dtype="float32", row_class="8+", tolerance=0.1)


def test_certificate():
    found = classify_position(
        np.array([1, 2, 3]), np.array([1, 9, 9]), np.array([0.0, 0.05, 2.0]), 0.1
    )
    good = certify(mode="greedy", num_positions=3, ties=found.ties, **FACTS)
    assert good.passed and good.reasons == ()
    assert good.summary() == (
        "eagle3: lossless (greedy, float32, rows 8+): 3 positions, "
        "1 ties within 0.1, 0 divergences"
    )
    bad = certify(
        mode="greedy",
        num_positions=3,
        ties=found.ties,
        divergences=found.divergences,
        **FACTS,
    )
    assert not bad.passed
    assert "first at position 2: 9 in place of 3, gap 2" in bad.summary()
    assert "\n" not in bad.summary()
    assert bad.to_dict()["divergences"][0]["kind"] == "divergence"
    assert not certify(mode="greedy", num_positions=0, **FACTS).passed


def test_certificate_in_law():
    right = ks_of([0.5, 0.5], [0.5, 0.5], seed=0)
    wrong = ks_of([0.4, 0.6], [0.5, 0.5], seed=0)
    law = dict(mode="law", num_positions=20_000, **FACTS)
    assert certify(ks=right, **law).passed
    assert "KS" in certify(ks=right, **law).summary()
    assert certify(ks=right, **law).to_dict()["ks"]["passed"] is True
    assert "do not follow" in certify(ks=wrong, **law).summary()
    assert "pass ks" in certify(**law).summary()
    assert "probability zero" in certify(ks=right, num_impossible=1, **law).summary()
