import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_sampling import (
    GOLDEN,
    make_draft,
    make_sequences,
    random_parents,
    row,
    walk,
)

from jaxdec import drafting, sampling
from jaxdec.types import SamplingParams

FIELDS = tuple(SamplingParams.__dataclass_fields__)


def reference(logits, params, prompt, output, stop_tokens=(), processor=None):
    """The sampling distribution of one row, in float64 loops."""
    x = np.asarray(logits, np.float64).copy()
    for token, bias in params.get("logit_bias", {}).items():
        x[token] += bias
    context = list(prompt) + list(output)
    repetition = params.get("repetition_penalty", 1.0)
    for token in set(context):
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token, count in collections.Counter(output).items():
        x[token] -= params.get("presence_penalty", 0.0)
        x[token] -= params.get("frequency_penalty", 0.0) * count
    n = params.get("no_repeat_ngram", 0)
    if n:
        recent = context[len(context) - n + 1 :] if len(context) >= n - 1 else None
        for i in range(len(context) - n + 1):
            if context[i : i + n - 1] == recent:
                x[context[i + n - 1]] = -np.inf
    if len(output) < params.get("min_new_tokens", 0):
        x[list(stop_tokens)] = -np.inf
    if processor is not None:
        x = processor(context, x)
    temperature = params.get("temperature", 0.0)
    if temperature == 0:
        return np.eye(len(x))[int(np.argmax(x))]
    x = x / temperature
    top_k = params.get("top_k", 0)
    if 0 < top_k < len(x):
        x[x < np.sort(x)[-top_k]] = -np.inf
    p = np.exp(x - x.max())
    p /= p.sum()
    if params.get("top_p", 1.0) < 1:
        above = np.array([p[p > value].sum() for value in p])
        x[(above >= params["top_p"]) & (p < p.max())] = -np.inf
    p = np.exp(x - x.max())
    p /= p.sum()
    p[p < params.get("min_p", 0.0) * p.max() * (1 - 1e-12)] = 0.0
    return p / p.sum()


def simple_log_probs(logits, **params):
    """log_probs of one row of logits with no context."""
    logits = jnp.asarray(logits, jnp.float32)[None, None]
    sequences = make_sequences([[0]], 1, **params)
    nodes = sampling.chain_nodes(jnp.zeros((1, 1), jnp.int32))
    return np.asarray(context_free(sequences, nodes, logits))[0, 0]


def unchanged(tokens, length, logits):
    return logits


judge = jax.jit(sampling.judge, static_argnames=("processor", "with_log_probs"))
draft_sample = jax.jit(
    functools.partial(drafting.sample, None), static_argnames=("coupled",)
)
gumbel = jax.jit(sampling.gumbel, static_argnames=("vocab_size", "stream"))
context_free = jax.jit(
    lambda sequences, nodes, logits: sampling.log_probs(
        sequences.sampling, sampling.adjust(sequences, nodes, logits)
    )
)


@pytest.mark.parametrize("case", GOLDEN["logit_processing"]["cases"])
def test_golden_logit_processing(case):
    previous = case.get("previous_ids", [0])
    params = {"temperature": 1.0, **case["params"]}
    sequences = make_sequences([previous], len(previous), **params)
    nodes = sampling.chain_nodes(jnp.asarray([previous[-1:]], jnp.int32))
    logits = jnp.asarray(case["logits"], jnp.float32)[None, None]
    got = judge(sequences, nodes, logits, with_log_probs=True).log_probs[0, 0]
    np.testing.assert_allclose(np.exp(got), case["probs"], atol=1e-5)
    is_kept = np.array([x is not None for x in case["processed_logits"]])
    np.testing.assert_array_equal(np.isfinite(got), is_kept)


@pytest.mark.parametrize("case", GOLDEN["residual_and_temperature"]["logits_to_probs"])
def test_golden_temperature(case):
    got = np.exp(simple_log_probs(case["logits"], temperature=case["temperature"]))
    np.testing.assert_allclose(got, case["probs"], atol=1e-6)


def random_params(rng):
    return {
        "temperature": float(rng.choice([0.0, 0.3, 1.0, 1.7])),
        "top_k": int(rng.choice([0, 1, 3, 8, 50])),
        "top_p": float(rng.choice([1.0, 0.9, 0.5, 0.05])),
        "min_p": float(rng.choice([0.0, 0.02, 0.3])),
        "repetition_penalty": float(rng.choice([1.0, 1.3, 0.7])),
        "presence_penalty": float(rng.choice([0.0, 0.8, -0.4])),
        "frequency_penalty": float(rng.choice([0.0, 0.5])),
        "no_repeat_ngram": int(rng.choice([0, 1, 2, 3])),
        "min_new_tokens": int(rng.choice([0, 3, 6])),
        "logit_bias": {
            int(t): float(rng.choice([-2.0, 3.0, -np.inf]))
            for t in rng.integers(0, 12, rng.integers(0, 3))
        },
    }


def batch_params(rows):
    return {name: [params[name] for params in rows] for name in rows[0]}


def bracketed(context, x):
    """A processor that depends on the last token and the length (reference)."""
    y = x.copy()
    y[context[-1]] -= 1.5
    y[len(context) % len(x)] += 1.0
    return y


def bracketed_processor(tokens, length, logits):
    logits = logits.at[tokens[length - 1]].add(-1.5)
    return logits.at[length % logits.shape[0]].add(1.0)


@pytest.mark.parametrize("with_processor", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_random_parameters_and_trees_equal_the_reference(seed, with_processor):
    """Order of operations, contexts and filters; penalties count node paths (B43)."""
    rng = np.random.default_rng(seed)
    vocab_size, batch_size, num_draft, prompt_length = 12, 4, 5, 4
    rows = [
        list(rng.integers(0, vocab_size, prompt_length + rng.integers(1, 6)))
        for _ in range(batch_size)
    ]
    params = [random_params(rng) for _ in rows]
    stop_tokens = [int(t) for t in rng.choice(vocab_size, 2, replace=False)]
    sequences = make_sequences(
        rows, prompt_length, stop_tokens=stop_tokens, **batch_params(params)
    )
    parents = random_parents(rng, num_draft)
    draft = make_draft(
        rng.integers(0, vocab_size, (batch_size, num_draft)),
        parents=None if seed % 2 else parents,
    )
    if seed % 2:
        parents = np.arange(num_draft)
    anchor = jnp.asarray([r[-1] for r in rows], jnp.int32)
    nodes = sampling.draft_nodes(anchor, draft)
    logits = rng.normal(0, 2, (batch_size, num_draft + 1, vocab_size))
    logits = logits.astype(np.float32)
    got = judge(
        sequences,
        nodes,
        jnp.asarray(logits),
        with_log_probs=True,
        processor=bracketed_processor if with_processor else None,
    )
    for b in range(batch_size):
        for node in range(num_draft + 1):
            path = [int(draft.tokens[b, n - 1]) for n in walk(parents, node)[1:]]
            wanted = reference(
                logits[b, node],
                params[b],
                rows[b][:prompt_length],
                rows[b][prompt_length:] + path,
                stop_tokens,
                bracketed if with_processor else None,
            )
            np.testing.assert_allclose(
                np.exp(got.log_probs[b, node]), wanted, atol=2e-5
            )
            assert wanted[got.tokens[b, node]] > 0
    assert not np.isnan(got.log_probs).any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_node_is_the_plain_step_on_its_path(temperature):
    """Judging a draft gives what decoding token by token gives, noise included."""
    rng = np.random.default_rng(7)
    vocab_size, num_draft = 11, 6
    rows = [[1, 2, 3, 1, 2], [4, 4, 5]]
    params = dict(
        temperature=temperature,
        top_p=0.9,
        repetition_penalty=1.3,
        frequency_penalty=0.7,
        presence_penalty=0.7,
        no_repeat_ngram=3,
        min_new_tokens=7,
        logit_bias={3: -np.inf, 5: 2.0},
    )
    args = dict(stop_tokens=[2], **params)
    sequences = make_sequences(rows, 2, **args)
    table = rng.normal(0, 1, (vocab_size, vocab_size)).astype(np.float32)
    for parents in (None, random_parents(rng, num_draft)):
        draft = make_draft(rng.integers(0, vocab_size, (2, num_draft)), parents=parents)
        anchor = jnp.asarray([r[-1] for r in rows], jnp.int32)
        nodes = sampling.draft_nodes(anchor, draft)
        got = judge(sequences, nodes, jnp.asarray(table)[nodes.tokens])
        shape = np.arange(num_draft) if parents is None else parents
        for b in range(2):
            for node in range(num_draft + 1):
                path = [int(draft.tokens[b, n - 1]) for n in walk(shape, node)[1:]]
                said = make_sequences([r + path for r in rows], 2, **args)
                last = jnp.asarray([(r + path)[-1:] for r in rows], jnp.int32)
                plain = judge(
                    said, sampling.chain_nodes(last), jnp.asarray(table)[last]
                )
                assert plain.tokens[b, 0] == got.tokens[b, node]


def test_the_tokens_do_not_depend_on_what_else_is_asked_for():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(0, 2, (3, 4, 17)), jnp.float32)
    for temperature in (0.0, 0.8, [0.0, 0.5, 2.0]):
        sequences = make_sequences([[1], [2, 3], [4]], 1, temperature=temperature)
        nodes = sampling.chain_nodes(jnp.ones((3, 4), jnp.int32))
        plain = judge(sequences, nodes, logits)
        full = judge(sequences, nodes, logits, with_log_probs=True)
        processed = judge(sequences, nodes, logits, processor=unchanged)
        for other in (full, processed):
            np.testing.assert_array_equal(plain.tokens, other.tokens)
            np.testing.assert_array_equal(plain.is_finite, other.is_finite)
        assert plain.log_probs is None


@pytest.mark.parametrize("size", [49152, 49153, 700])
def test_the_first_of_the_largest_values_is_found_in_every_part(size):
    rows = np.random.default_rng(0).normal(size=(8, 1, size)).astype(np.float32)
    for i, ties in enumerate([(0,), (size - 1,), (5, 255), (255, 256), (600, 300)]):
        rows[i, 0, list(ties)] = 9
    rows[5] = -np.inf
    rows[6, 0, 400] = np.nan
    rows[7, 0, 300] = np.inf
    index, largest = jax.jit(sampling.first_max)(rows)
    assert index[:6, 0].tolist() == [0, size - 1, 5, 255, 300, 0]
    assert largest[:6, 0].tolist() == [9.0] * 5 + [-np.inf]
    assert np.isnan(largest[6, 0]) and 0 <= index[6, 0] < size
    assert (index[7, 0], largest[7, 0]) == (300, np.inf)


def test_greedy_rows_are_a_point_mass_on_the_first_maximum():
    got = simple_log_probs([1.0, 3.0, 3.0, -np.inf], temperature=0.0, top_k=2)
    np.testing.assert_array_equal(got, [-np.inf, 0.0, -np.inf, -np.inf])


def test_ties_at_a_cutoff_all_stay():
    logits = np.log([0.4, 0.2, 0.2, 0.1, 0.1])
    cases = [
        (dict(top_p=0.5), 3),
        (dict(top_p=0.95), 5),
        (dict(top_p=0.39), 1),
        (dict(top_k=2), 3),
        (dict(top_k=4), 5),
        (dict(min_p=0.5), 3),
        (dict(min_p=1.0), 1),
        (dict(top_k=3, top_p=0.4), 1),
        # Top-p acts on what top-k left: .4 of .8 is half.
        (dict(top_k=3, top_p=0.51), 3),
        (dict(top_k=3, top_p=0.49), 1),
    ]
    for params, num_kept in cases:
        got = simple_log_probs(logits.astype(np.float32), temperature=1.0, **params)
        assert np.isfinite(got).sum() == num_kept, params


@pytest.mark.parametrize("top_k", [None, 0, 8, 9, 10**6, 10**12])
def test_top_k_off_keeps_all(top_k):
    """B11."""
    np.testing.assert_allclose(
        simple_log_probs(np.zeros(8), temperature=1.0, top_k=top_k), -np.log(8.0)
    )


def test_top_p_zero_keeps_the_argmax():
    """B11."""
    logits = [0.0, 2.0, 1.0]
    for top_p in (0, 1e-9):
        got = simple_log_probs(logits, temperature=1.0, top_p=top_p)
        np.testing.assert_array_equal(got, [-np.inf, 0.0, -np.inf])
    assert np.isfinite(simple_log_probs(logits, temperature=1.0, top_p=1)).all()


def test_mixed_batch_keeps_rows_apart():
    """B11, B44: a parameter of one row leaves the others bit for bit unchanged."""
    rng = np.random.default_rng(3)
    logits = jnp.asarray(rng.normal(0, 1, (2, 3, 9)), jnp.float32)
    nodes = sampling.chain_nodes(jnp.ones((2, 3), jnp.int32))
    rows = [[1, 2, 1], [1, 2, 1]]
    off = make_sequences(rows, 1, temperature=1.0)
    wanted = judge(off, nodes, logits, with_log_probs=True)
    changes = dict(
        top_k=[2, 0],
        top_p=[0.3, 1.0],
        min_p=[0.4, 0.0],
        repetition_penalty=[2.0, 1.0],
        presence_penalty=[1.0, 0.0],
        no_repeat_ngram=[2, 0],
        min_new_tokens=[9, 0],
        logit_bias=[{3: 100.0}, {}],
        banned_tokens=[[4], []],
    )
    for name, value in changes.items():
        on = make_sequences(rows, 1, stop_tokens=[5], temperature=1.0, **{name: value})
        got = judge(on, nodes, logits, with_log_probs=True)
        np.testing.assert_array_equal(got.log_probs[1], wanted.log_probs[1])
        np.testing.assert_array_equal(got.tokens[1], wanted.tokens[1])
        assert (np.asarray(got.log_probs[0]) != np.asarray(wanted.log_probs[0])).any()


def test_bias_reaches_every_node():
    """B44."""
    logits = jnp.zeros((1, 5, 6)).at[:, :, 4].set(9.0)
    nodes = sampling.chain_nodes(jnp.full((1, 5), 4, jnp.int32))
    banned = make_sequences([[4]], 1, banned_tokens=[4])
    assert (np.asarray(judge(banned, nodes, logits).tokens) != 4).all()
    wanted = make_sequences([[4]], 1, logit_bias={3: 100.0}, temperature=1.0)
    assert (np.asarray(judge(wanted, nodes, logits).tokens) == 3).all()
    tokens, _ = draft_sample(banned, nodes, logits, coupled=True)
    assert (np.asarray(tokens) != 4).all()


def test_tiny_temperatures_are_nearly_greedy_and_never_nan():
    """B09."""
    logits = np.array([1.0, 1.5, -np.inf, 0.0])
    for temperature in (1e-7, 1e-5, 1e-38, 1e-30):
        got = simple_log_probs(logits, temperature=temperature, top_p=0.9, top_k=2)
        np.testing.assert_array_equal(got, [-np.inf, 0.0, -np.inf, -np.inf])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("fault", ["nan", "inf", "empty"])
@pytest.mark.parametrize("num_nodes", [3, 24])
def test_bad_logits_are_reported_not_sampled(fault, temperature, num_nodes):
    """B14: the row says so, its neighbour does not notice, tokens stay valid.

    Of many rows XLA's maximum on CPU is one without the NaN.
    """
    rng = np.random.default_rng(0)
    good = rng.normal(0, 1, (2, num_nodes, 301)).astype(np.float32)
    for index in (0, 5, 150, 300):
        bad = good.copy()
        if fault == "empty":
            bad[0, 1] = -np.inf
        else:
            bad[0, 1, index] = float(fault)
        for with_log_probs in (False, True):
            sequences = make_sequences([[1], [2]], 1, temperature=temperature)
            nodes = sampling.chain_nodes(jnp.ones((2, num_nodes), jnp.int32))
            got = judge(
                sequences, nodes, jnp.asarray(bad), with_log_probs=with_log_probs
            )
            wanted = judge(sequences, nodes, jnp.asarray(good))
            is_bad = np.zeros((2, num_nodes), bool)
            is_bad[0, 1] = True
            np.testing.assert_array_equal(got.is_finite, ~is_bad)
            np.testing.assert_array_equal(
                np.asarray(got.tokens)[~is_bad], np.asarray(wanted.tokens)[~is_bad]
            )
            assert 0 <= int(got.tokens[0, 1]) < 301
            if with_log_probs:
                assert not np.isnan(got.log_probs).any()


def test_banning_every_token_is_not_finite():
    """B14."""
    for temperature in (0.0, 1.0):
        sequences = make_sequences(
            [[1]], 1, banned_tokens=list(range(9)), temperature=temperature
        )
        assert sequences.sampling.bias_tokens.shape == (1, 64)
        nodes = sampling.chain_nodes(jnp.ones((1, 1), jnp.int32))
        got = judge(sequences, nodes, jnp.zeros((1, 1, 9)), with_log_probs=True)
        assert not got.is_finite[0, 0]
        assert not np.isnan(got.log_probs).any()
        assert 0 <= int(got.tokens[0, 0]) < 9


def test_noise_belongs_to_request_and_position():
    """B13: not to batch mates, not to the draft length."""
    keys = jax.random.split(jax.random.key(42), 3)
    position = jnp.asarray([[5, 6, 7], [9, 10, 11], [5, 6, 7]], jnp.int32)
    noise = np.asarray(gumbel(keys, position, 50))
    for b in range(3):
        for t in range(3):
            alone = gumbel(keys[b][None], position[b, t][None, None], 50)
            np.testing.assert_array_equal(alone[0, 0], noise[b, t])
    assert len({noise[b, t].tobytes() for b in range(3) for t in range(3)}) == 9


def test_tree_noise_is_shared_by_depth():
    sequences = make_sequences([[1, 2]], 1, temperature=1.0)
    draft = make_draft([[1, 1, 2, 3]], parents=[[0, 0, 1, 2]])
    nodes = sampling.draft_nodes(jnp.asarray([2], jnp.int32), draft)
    tree = judge(sequences, nodes, jnp.zeros((1, 5, 40))).tokens[0]
    chain = sampling.chain_nodes(jnp.ones((1, 3), jnp.int32))
    wanted = judge(sequences, chain, jnp.zeros((1, 3, 40))).tokens[0]
    np.testing.assert_array_equal(tree, wanted[np.array([0, 1, 1, 2, 2])])


def test_streams_and_seeds_are_distinct():
    """B12: no two uses of randomness share a key; a seed changes what is said."""
    seeds = jax.vmap(jax.random.key)(jnp.arange(100, dtype=jnp.uint32))
    position = jnp.arange(3, dtype=jnp.int32)
    streams = (sampling.TARGET, sampling.DRAFT, sampling.ACCEPT, sampling.RESIDUAL)
    data = {
        tuple(
            np.asarray(
                jax.random.key_data(
                    sampling.position_key(seeds[0], position[t], stream)
                )
            )
        )
        for t in range(3)
        for stream in streams
    }
    assert len(data) == 12
    sequences = make_sequences([[1]] * 100, 1, temperature=1.0, keys=seeds)
    nodes = sampling.chain_nodes(jnp.ones((100, 64), jnp.int32))
    tokens = np.asarray(judge(sequences, nodes, jnp.zeros((100, 64, 8))).tokens)
    assert set(tokens[:, 0]) == set(range(8))
    share = np.bincount(tokens[0], minlength=8) / 64
    share = share[share > 0]
    assert -(share * np.log2(share)).sum() > 2.5
    for period in range(1, 8):
        assert (tokens[0, period:] != tokens[0, :-period]).any()


def test_noise_is_gumbel():
    """Kolmogorov-Smirnov at a fixed key; false alarm 1e-6 (D < 2.69 / sqrt(n))."""
    noise = np.asarray(
        gumbel(jax.random.key(0)[None], jnp.zeros((1, 1), jnp.int32), 1_000_000)
    )[0, 0]
    assert np.isfinite(noise).all()
    cdf = np.exp(-np.exp(-np.sort(noise.astype(np.float64))))
    rank = np.arange(1, cdf.size + 1) / cdf.size
    assert np.abs(cdf - rank).max() < 2.69 / np.sqrt(cdf.size)


def test_rare_tokens_keep_their_share():
    """Gumbel noise is right far into the upper tail, which a 23-bit uniform is not."""
    bits = np.unique(np.geomspace(1, 2**32 - 1, 10_000).astype(np.uint32))
    bits = np.concatenate([np.arange(300, dtype=np.uint32), bits])
    uniform = np.minimum((bits.astype(np.float64) + 0.5) / 2**32, 1 - 2.0**-24)
    got = sampling.gumbel_from_bits(jnp.asarray(bits))
    np.testing.assert_allclose(got, -np.log(-np.log1p(-uniform)), rtol=1e-5, atol=1e-5)
    assert np.isfinite(got).all() and float(got.max()) > 22


def test_coupled_drafts_of_the_target_itself_always_agree():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(0, 2, (4, 6, 33)), jnp.float32)
    sequences = make_sequences(
        [[1, 2], [3, 4], [5, 5], [6, 1]],
        1,
        temperature=[0.0, 0.5, 1.0, 2.0],
        repetition_penalty=1.2,
        banned_tokens=[7],
    )
    nodes = sampling.chain_nodes(jnp.asarray(rng.integers(0, 33, (4, 6)), jnp.int32))
    tokens, log_probs = draft_sample(sequences, nodes, logits, coupled=True)
    assert log_probs is None
    np.testing.assert_array_equal(tokens, judge(sequences, nodes, logits).tokens)
    for node in range(6):
        # Drafting token by token sees the same context and noise as drafting at once.
        single = sampling.chain_nodes(nodes.tokens, jnp.asarray(node))
        one, _ = draft_sample(sequences, single, logits[:, node][:, None], coupled=True)
        np.testing.assert_array_equal(one[:, 0], tokens[:, node])


def test_uncoupled_drafts_come_from_the_distribution_they_return():
    """B05, B07: bit for bit, with independent noise and all filters."""
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(0, 2, (64, 3, 21)), jnp.float32)
    sequences = make_sequences(
        [[1, 2]] * 64, 1, temperature=[0.0, 1.0] * 32, top_k=5, top_p=0.9
    )
    nodes = sampling.chain_nodes(jnp.ones((64, 3), jnp.int32))
    tokens, got = draft_sample(sequences, nodes, logits, coupled=False)
    target = judge(sequences, nodes, logits, with_log_probs=True)
    np.testing.assert_array_equal(got, target.log_probs)
    position = sequences.length[:, None] + nodes.depth
    noise = gumbel(sequences.key, position, 21, sampling.DRAFT)
    np.testing.assert_array_equal(tokens, np.argmax(np.asarray(got + noise), -1))
    assert (np.asarray(tokens)[1::2] != np.asarray(target.tokens)[1::2]).any()
    np.testing.assert_array_equal(tokens[0::2], target.tokens[0::2])
    greedy, point = draft_sample(
        make_sequences([[1, 2]] * 64, 1), nodes, logits, coupled=False
    )
    np.testing.assert_array_equal(np.argmax(point, -1), greedy)


def test_token_logprobs_are_raw():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (2, 3, 20)).astype(np.float32)
    logits[0, 0, 4] = logits[0, 0, 9] = 8.0
    tokens = rng.integers(0, 20, (2, 3)).astype(np.int32)
    wanted = np.asarray(jax.nn.log_softmax(logits))
    got, values, ids = sampling.token_logprobs(
        jnp.asarray(logits), jnp.asarray(tokens), 4
    )
    order = np.argsort(-logits, axis=-1, kind="stable")[..., :4]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(values, np.take_along_axis(wanted, order, -1), atol=1e-5)
    np.testing.assert_allclose(
        got, np.take_along_axis(wanted, tokens[..., None], -1)[..., 0], atol=1e-5
    )
    _, values, ids = sampling.token_logprobs(
        jnp.asarray(logits), jnp.asarray(tokens), 0
    )
    assert values.shape == ids.shape == (2, 3, 0)
    with pytest.raises(ValueError, match="ask for fewer"):
        sampling.token_logprobs(jnp.asarray(logits), jnp.asarray(tokens), 21)


@pytest.mark.parametrize(
    "params",
    [
        *[dict(temperature=t) for t in (-1, float("nan"), float("inf"), "0", 1e39)],
        dict(temperature=[0.5]),
        dict(temperature=True),
        dict(temperature=None),
        dict(top_k=-1),
        dict(top_k=2.0),
        dict(top_p=1.1),
        dict(top_p=-0.1),
        dict(min_p=2),
        dict(repetition_penalty=0),
        dict(presence_penalty=float("nan")),
        dict(frequency_penalty=float("inf")),
        dict(no_repeat_ngram=-2),
        dict(min_new_tokens=-1),
        dict(logit_bias={3: float("inf")}),
        dict(logit_bias={3: float("nan")}),
        dict(logit_bias={-1: 0.0}),
        dict(logit_bias={10: 0.0}),
        dict(logit_bias=[{1: 0.0}]),
        dict(banned_tokens=[10]),
        dict(banned_tokens=[[1]]),
        dict(num_bias_slots=0),
    ],
    ids=str,
)
def test_what_cannot_be_sampled_from_is_refused(params):
    """B09: before any model call, and the message says what to write instead."""
    with pytest.raises(ValueError, match=r"got .*; "):
        sampling.make_sampling_params(2, vocab_size=10, **params)


def test_parameters_per_row_and_buckets():
    got = sampling.make_sampling_params(
        2,
        temperature=np.asarray([0.5, 1.0]),
        top_k=[None, np.int64(4)],
        logit_bias=[{1: 2.0}, None],
        banned_tokens=[[], [3, 5]],
    )
    np.testing.assert_array_equal(got.top_k, [0, 4])
    np.testing.assert_array_equal(got.num_bias, [1, 2])
    assert got.bias_tokens.shape == (2, 8)
    many = sampling.make_sampling_params(1, banned_tokens=range(65))
    assert many.bias_tokens.shape == (1, 512)
    default = sampling.make_sampling_params(1)
    assert not sampling.needs_adjustment(default)
    assert sampling.needs_adjustment(got)
    assert {x.shape[0] for x in jax.tree.leaves(row(got, slice(0, 1)))} == {1}
    assert set(FIELDS) == set(vars(got))


def test_a_processor_must_return_logits():
    sequences = make_sequences([[1]], 1)
    nodes = sampling.chain_nodes(jnp.ones((1, 1), jnp.int32))
    with pytest.raises(ValueError, match="shape that it was given"):
        sampling.judge(
            sequences, nodes, jnp.zeros((1, 1, 4)), processor=lambda t, n, x: x[:2]
        )


def test_plain_greedy_draws_nothing():
    """The fast path holds no noise, no scatter and no sort."""
    sequences = make_sequences([[1]], 1)
    nodes = sampling.chain_nodes(jnp.ones((1, 2), jnp.int32))
    jaxpr = jax.make_jaxpr(sampling.judge)(sequences, nodes, jnp.zeros((1, 2, 50)))
    (switch,) = [e for e in jaxpr.eqns if e.primitive.name == "cond"]
    fast = str(switch.params["branches"][1])
    for costly in ("threefry", "random", "scatter", "sort", "argmax", "while", "exp"):
        assert costly not in fast
    assert fast.count("reduce_max") == 1 and fast.count("reduce_min") == 1
