import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_sampling import GOLDEN, make_draft, make_sequences

from jaxdec import draft_length as lengths
from jaxdec.types import Drafter, FinishReason


def rates(sps):
    """The golden's table {tokens: rate} as an array; unused entries are poison."""
    table = np.full(max(map(int, sps)) + 1, 1e9, np.float32)
    for tokens, rate in sps.items():
        table[int(tokens)] = rate
    return jnp.asarray(table)


def run(length_fn, confidence, draft_length=None, is_active=None):
    confidence = jnp.asarray(confidence, jnp.float32)
    num_rows, num_draft = confidence.shape
    if draft_length is None:
        draft_length = [num_draft] * num_rows
    if is_active is None:
        is_active = [True] * num_rows
    got = length_fn(
        confidence, jnp.asarray(draft_length, jnp.int32), jnp.asarray(is_active)
    )
    return list(np.asarray(got))


def algorithm_1(confidence, draft_length, is_active, sps):
    """DSpark's Algorithm 1, literally."""
    survival = np.cumprod(np.asarray(confidence, np.float32), axis=1, dtype=np.float32)
    entries = [
        (-survival[r, j], j, r)
        for r in range(len(survival))
        for j in range(draft_length[r])
        if is_active[r] and survival[r, j] > 0
    ]
    num_rows = sum(is_active)
    length = [0] * len(survival)
    tau, tokens = float(num_rows), num_rows
    best, recorded = tau * sps[tokens], list(length)
    for negative, j, r in sorted(entries):
        length[r] = j + 1
        tokens, tau = tokens + 1, tau - negative
        if tau * sps[tokens] <= best:
            break
        best, recorded = tau * sps[tokens], list(length)
    return recorded


@pytest.mark.parametrize("case", GOLDEN["static_confidence_threshold"]["cases"])
def test_golden_threshold(case):
    confidence = jax.nn.sigmoid(jnp.asarray(case["confidence_logits"]))
    got = run(lengths.threshold(case["threshold"], on="slot"), confidence[None])
    assert got == [case["length"]]


@pytest.mark.parametrize("case", GOLDEN["dspark_scheduler"]["cases"])
def test_golden_scheduler(case):
    confidence = jnp.asarray(case["confidences"], jnp.float32)
    np.testing.assert_allclose(
        lengths.survival(confidence), case["survival"], rtol=1e-6
    )
    table = rates(case["sps"])
    assert run(lengths.throughput(table), confidence) == case["lengths"]
    num_rows, num_draft = confidence.shape
    budget = lengths.best_budget(
        confidence,
        jnp.full(num_rows, num_draft, jnp.int32),
        jnp.ones(num_rows, bool),
        table,
    )
    assert int(budget) == sum(case["global_argmax_lengths"])


@pytest.mark.parametrize("case", GOLDEN["dspark_scheduler"]["asynchronous"]["cases"])
def test_golden_asynchronous(case):
    stale = jnp.asarray(case["stale_confidences"], jnp.float32)
    budget = lengths.best_budget(
        stale,
        jnp.full(stale.shape[0], stale.shape[1], jnp.int32),
        jnp.ones(stale.shape[0], bool),
        rates(case["sps"]),
    )
    assert int(budget) == case["capacity"]
    got = run(lengths.within_budget(budget), case["current_confidences"])
    assert got == case["lengths"]


def test_golden_counterexample_does_not_look_ahead():
    case = GOLDEN["dspark_scheduler"]["counterexample"]
    length_fn = lengths.throughput(rates(case["sps"]))
    for token, wanted in case["early_stop"]["length_if_first_draft_is"].items():
        confidence = [[case["c1"], case["c2_if_first_draft_is"][token]]]
        assert run(length_fn, confidence) == [wanted]


@pytest.mark.parametrize("seed", range(50))
def test_throughput_equals_algorithm_1(seed):
    rng = np.random.default_rng(seed)
    num_rows, num_draft = 3, 4
    confidence = rng.choice(
        np.array([0.0, 0.5, 0.8, 0.95, 1.0], np.float32), (num_rows, num_draft)
    )
    draft_length = rng.integers(0, num_draft + 1, num_rows)
    is_active = rng.random(num_rows) < 0.8
    drop = rng.uniform(0.9, 1, num_rows * (num_draft + 1) + 1)
    sps = np.cumprod(drop).astype(np.float32)
    got = run(lengths.throughput(jnp.asarray(sps)), confidence, draft_length, is_active)
    assert got == algorithm_1(confidence, draft_length, is_active, sps)


@pytest.mark.parametrize("seed", range(20))
def test_lengths_do_not_anticipate(seed):
    """Whether token k is judged must not change with anything after it (B41)."""
    rng = np.random.default_rng(seed)
    confidence = rng.uniform(0.3, 1, (1, 5)).astype(np.float32)
    sps = jnp.asarray(np.cumprod(rng.uniform(0.85, 1, 7)).astype(np.float32))
    for length_fn in (
        lengths.throughput(sps),
        lengths.threshold(0.5),
        lengths.threshold(0.5, on="slot"),
        lengths.within_budget(3),
    ):
        before = run(length_fn, confidence)[0]
        for k in range(5):
            changed = confidence.copy()
            changed[:, k + 1 :] = rng.uniform(0, 1, (1, 4 - k))
            after = run(length_fn, changed)[0]
            assert (before > k) == (after > k)


def test_survival_not_slots():
    """B41."""
    confidence = [[0.9, 0.9, 0.2, 0.95]]
    assert run(lengths.threshold(0.5), confidence) == [2]
    assert run(lengths.threshold(0.5, on="slot"), confidence) == [2]
    assert run(lengths.threshold(0.15), confidence) == [4]
    assert run(lengths.threshold(0.0), confidence) == [4]
    assert run(lengths.threshold(1.0), confidence) == [0]
    rows = [[0.9, 0.8, 0.7], [0.6, 0.5, 0.4]]
    assert run(lengths.within_budget(5), rows) == [3, 2]


def test_finished_rows_and_short_drafts_cost_nothing():
    rows = [[0.9, 0.8, 0.7], [0.99, 0.99, 0.99], [0.6, 0.5, 0.4]]
    args = ([3, 3, 1], [True, False, True])
    assert run(lengths.within_budget(4), rows, *args) == [3, 0, 1]
    assert run(lengths.threshold(0.0), rows, *args) == [3, 0, 1]
    flat = lengths.throughput(jnp.ones(13))
    assert run(flat, rows, *args) == [3, 0, 1]
    assert run(flat, rows, [3, 3, 1], [False] * 3) == [0, 0, 0]


def test_refusals():
    with pytest.raises(ValueError, match="between 0 and 1"):
        lengths.threshold(1.5)
    with pytest.raises(ValueError, match="'survival' or 'slot'"):
        lengths.threshold(0.5, on="logit")
    with pytest.raises(ValueError, match="must reach 8 tokens"):
        run(lengths.throughput(jnp.ones(8)), [[0.5] * 3] * 2)


def fake_drafter(draft):
    return Drafter(
        name="fake",
        max_length=draft.tokens.shape[1],
        taps=(),
        init=lambda batch_size, capacity: (),
        extend=lambda params, state, commit: state,
        propose=lambda params, state, sequences: (state, draft),
    )


def test_limited():
    sequences = make_sequences([[1, 2]] * 3, 2)
    sequences = sequences.replace(
        finish=jnp.asarray([0, FinishReason.LENGTH, 0], jnp.int32),
        max_draft_length=jnp.asarray([9, 9, 1], jnp.int32),
    )
    draft = make_draft([[1, 2, 3]] * 3).replace(confidence=jnp.full((3, 3), 0.8))
    drafter = fake_drafter(draft)
    limited = lengths.limited(drafter, lengths.threshold(0.6))
    assert type(limited) is Drafter and limited.name == "fake"
    _, got = limited.propose(None, (), sequences)
    assert list(np.asarray(got.length)) == [2, 0, 1]
    np.testing.assert_array_equal(got.tokens, draft.tokens)
    unsure = fake_drafter(draft.replace(confidence=None))
    with pytest.raises(ValueError, match="confidence head"):
        lengths.limited(unsure, lengths.threshold(0.6)).propose(None, (), sequences)
    tree = fake_drafter(draft.replace(parents=jnp.zeros((3, 3), jnp.int32)))
    with pytest.raises(ValueError, match="needs a chain"):
        lengths.limited(tree, lengths.threshold(0.6)).propose(None, (), sequences)
