"""Temperature scaling finds the temperatures that made the data, and says so."""

import dataclasses

import numpy as np
import pytest
from scipy import stats

from jaxdec.training import confidence
from jaxdec.training.calibrate import (
    Rounds,
    auroc,
    ece,
    fit,
    quality,
    reliability,
    survival,
)


def rounds(temperatures, num=20000, seed=0):
    """Draft tokens accepted with the true chance; log-odds told too large by T."""
    rng = np.random.default_rng(seed)
    temperatures = np.asarray(temperatures)
    odds = rng.normal(0.5, 1.2, (num, len(temperatures)))
    accepted = rng.uniform(size=odds.shape) < 1 / (1 + np.exp(-odds))
    run = np.cumprod(accepted, axis=1).sum(axis=1)
    judged = np.where(rng.uniform(size=num) < 0.1, 1, len(temperatures))
    return Rounds(
        odds=odds * temperatures,
        num_judged=judged,
        num_accepted=np.minimum(run, judged),
    )


def test_the_temperatures_that_were_are_found():
    true = [2.5, 0.6, 1.0]
    found = fit(rounds(true))
    np.testing.assert_allclose(found, true, rtol=0.3)
    held = rounds(true, seed=1)
    before, after = quality(held), quality(held, found)
    assert [q.depth for q in after] == [1, 2, 3]
    for old, new in zip(before, after, strict=True):
        assert new.ece < 0.02 and new.rounds == old.rounds
        assert new.brier < 0.95 * new.base_brier
    assert before[0].ece > 0.05
    # A temperature keeps the order of its own depth.
    assert before[0].auroc == pytest.approx(after[0].auroc, abs=1e-12)


def test_rounds_that_were_not_judged_that_far_say_nothing():
    found = rounds([1.0, 1.0])
    known, label = found.at(2)
    assert known.sum() == (found.num_judged >= 2).sum() == len(label)
    assert quality(found)[0].rounds > quality(found)[1].rounds
    nobody = Rounds(
        odds=np.zeros((3, 2)), num_judged=np.ones(3, int), num_accepted=np.zeros(3, int)
    )
    assert len(quality(nobody)) == 1 and fit(nobody)[1] == 1.0


def test_auroc_and_ece_equal_their_definitions():
    rng = np.random.default_rng(3)
    guess = np.round(rng.uniform(size=200), 2)  # With ties.
    label = rng.uniform(size=200) < guess
    above = guess[label][:, None] - guess[~label][None]
    expected = np.mean((above > 0) + 0.5 * (above == 0))
    assert auroc(guess, label) == pytest.approx(expected)
    statistic = stats.mannwhitneyu(guess[label], guess[~label]).statistic
    assert auroc(guess, label) == pytest.approx(
        statistic / (label.sum() * (~label).sum())
    )
    assert auroc(guess, np.ones(200, bool)) is None
    edges = np.linspace(0, 1, 21)
    total = 0.0
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        inside = (guess >= low) & ((guess < high) | (high == 1.0))
        if inside.any():
            gap = abs(guess[inside].mean() - label[inside].mean())
            total += gap * inside.sum()
    assert ece(guess, label) == pytest.approx(total / 200, abs=0.02)


def test_survival_is_a_product_and_the_plot_has_every_round():
    found = rounds([1.0, 1.0], num=500)
    alive = survival(found.odds, np.ones(2))
    one = 1 / (1 + np.exp(-found.odds))
    np.testing.assert_allclose(alive[:, 1], one[:, 0] * one[:, 1])
    first, second = reliability(found, np.ones(2))
    assert sum(first["rounds"]) == 500
    assert sum(second["rounds"]) == (found.num_judged >= 2).sum()


def asked_rounds(weight, bias, num=6000, seed=0):
    """Rounds whose drafts are accepted with the chance that a true head says."""
    rng = np.random.default_rng(seed)
    depth = 3
    inputs = rng.normal(size=(num, depth, len(weight))).astype(np.float32)
    chance = 1 / (1 + np.exp(-confidence.log_odds(inputs, weight, bias)))
    run = np.cumprod(rng.uniform(size=chance.shape) < chance, axis=1).sum(axis=1)
    judged = np.where(rng.uniform(size=num) < 0.2, 2, depth)
    return confidence.HeadRounds(
        inputs=inputs,
        rounds=Rounds(
            odds=np.zeros((num, depth)),
            num_judged=judged,
            num_accepted=np.minimum(run, judged),
        ),
        request=np.arange(num) // 20,
    )


def test_what_is_asked_of_a_head_is_what_decoding_asks():
    """A draft token after a refused one was never judged on its own."""
    found = confidence.HeadRounds(
        inputs=np.zeros((3, 3, 1), np.float32),
        rounds=Rounds(
            odds=np.zeros((3, 3)),
            num_judged=np.array([3, 3, 1]),
            num_accepted=np.array([1, 3, 1]),
        ),
        request=np.zeros(3, int),
    )
    assert found.is_asked.tolist() == [
        [True, True, False],
        [True, True, True],
        [True, False, False],
    ]
    assert found.is_accepted[:, 0].tolist() == [True, True, True]
    assert found.is_accepted[0].tolist() == [True, False, False]


@pytest.mark.parametrize("begin", [2.0, 5.0, -4.0])
def test_a_head_is_fitted_to_what_became_of_drafts(begin):
    """Also from where a whole step of Newton's method leads away."""
    true, bias = np.array([1.0, -0.5, 0.0, 0.3]), 0.4
    found = asked_rounds(true, bias)
    weight, shift, _ = confidence.fit(found, np.zeros(4), begin)
    np.testing.assert_allclose(weight, true, atol=0.08)
    assert shift == pytest.approx(bias, abs=0.08)


def test_what_a_head_says_of_a_request_was_learned_of_others(monkeypatch):
    """Other outcomes of a request change what is said of others, not of itself."""
    monkeypatch.setattr(confidence, "_STRENGTHS", (0.01,))  # One that all share.
    found = asked_rounds(np.array([1.0, -0.5]), 0.2, num=1000)
    _, _, before = confidence.fit(found, np.zeros(2), 0.0)
    mine = confidence.folds(found.request) == 3
    accepted = np.where(mine, 0, found.rounds.num_accepted)
    changed = dataclasses.replace(
        found, rounds=dataclasses.replace(found.rounds, num_accepted=accepted)
    )
    _, _, after = confidence.fit(changed, np.zeros(2), 0.0)
    np.testing.assert_allclose(after[mine], before[mine], atol=1e-6)
    assert np.abs(after[~mine] - before[~mine]).mean() > 0.05
    alone = dataclasses.replace(found, request=np.zeros(1000, int))
    with pytest.raises(ValueError, match="of two or more requests, got those of 1"):
        confidence.fit(alone, np.zeros(2), 0.0)


def test_of_few_rounds_a_head_learns_little_but_the_bias():
    """Inputs that say nothing, more of them than rounds: it stays as it was."""
    rng = np.random.default_rng(1)
    weight = rng.normal(size=60) / 8
    found = asked_rounds(weight, -1.0, num=40)
    fitted, shift, _ = confidence.fit(found, weight, 1.0)
    assert np.linalg.norm(fitted - weight) < 0.3 * np.linalg.norm(weight)
    assert shift < 0.3
