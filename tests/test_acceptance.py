import collections
import functools
import itertools

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

from jaxdec import acceptance, sampling
from jaxdec.types import Judgement

P, Q = (0.5, 0.3, 0.2), (0.2, 0.2, 0.6)

match = jax.jit(jax.vmap(acceptance.match.accept))
rejection = jax.jit(jax.vmap(acceptance.rejection.accept))
matching_paths = jax.jit(
    jax.vmap(acceptance.matching_path, in_axes=(None, None, None, 0))
)
rejection_chains = jax.jit(jax.vmap(acceptance.rejection_chain))


@functools.partial(jax.jit, static_argnames=("replacement",))
def sibling_rejections(tokens, p, q, uniforms, *, replacement):
    rule = functools.partial(acceptance.sibling_rejection, replacement=replacement)
    return jax.vmap(rule, in_axes=(0, None, None, 0))(tokens, p, q, uniforms)


def name(tokens):
    return ",".join(map(str, tokens))


def both_outcomes(ratio):
    """A uniform below the ratio and one above, each with its probability."""
    return [(0.5 * ratio, ratio), (0.5 * (1 + ratio), 1 - ratio)]


def enumerate_match(tokens, parents, laws, length=None):
    """The exact law of one step of `match`: every combination of target samples."""
    num_nodes, vocab_size = np.shape(laws)
    samples = np.array(
        list(itertools.product(range(vocab_size), repeat=num_nodes)), np.int32
    )
    weights = np.prod(np.asarray(laws)[np.arange(num_nodes), samples], axis=1)
    paths, counts = matching_paths(
        jnp.asarray(tokens, jnp.int32),
        None if parents is None else jnp.asarray(parents, jnp.int32),
        jnp.asarray(len(tokens) if length is None else length, jnp.int32),
        jnp.asarray(samples),
    )
    paths, counts = np.asarray(paths), np.asarray(counts)
    committed, accepted = collections.Counter(), np.zeros(num_nodes)
    for path, count, sample, weight in zip(
        paths, counts, samples, weights, strict=True
    ):
        said = [tokens[node - 1] for node in path[1 : count + 1]]
        committed[name([*said, sample[path[count]]])] += weight
        accepted[count] += weight
    return committed, accepted


def enumerate_rejection(p, q, num_draft, vocab_size, length_fn=None):
    """The exact law of one step of `rejection`.

    Every draft, and a uniform on either side of every test, run through the rule;
    `p` and `q` map a prefix to a law, `length_fn` maps a draft to its length.
    """
    rows = []
    for draft in itertools.product(range(vocab_size), repeat=num_draft):
        prefixes = [draft[:i] for i in range(num_draft + 1)]
        target = np.array([p[name(prefix)] for prefix in prefixes])
        drafted = np.array([q[name(prefix)] for prefix in prefixes[:-1]])
        chosen = drafted[np.arange(num_draft), draft]
        if np.prod(chosen) == 0:
            continue
        ratios = np.minimum(1, target[np.arange(num_draft), draft] / chosen)
        for uniforms in itertools.product(*map(both_outcomes, ratios)):
            weight = np.prod(chosen) * np.prod([w for _, w in uniforms])
            if weight > 0:
                length = num_draft if length_fn is None else length_fn(draft)
                rows.append(
                    (draft, length, target, drafted, [u for u, _ in uniforms], weight)
                )
    drafts, lengths, targets, drafted, uniforms, weights = zip(*rows, strict=True)
    counts, is_rejected, laws = rejection_chains(
        jnp.asarray(drafts, jnp.int32),
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(np.array(targets), jnp.float32),
        jnp.asarray(np.array(drafted), jnp.float32),
        jnp.asarray(uniforms, jnp.float32),
    )
    assert (np.asarray(counts) <= lengths).all() and (np.asarray(counts) >= 0).all()
    np.testing.assert_array_equal(is_rejected, np.asarray(counts) < lengths)
    committed, accepted = collections.Counter(), np.zeros(num_draft + 1)
    for draft, count, law, weight in zip(
        drafts, np.asarray(counts), np.asarray(laws, np.float64), weights, strict=True
    ):
        accepted[count] += weight
        for token in range(vocab_size):
            if law[token] > 0:
                committed[name([*draft[:count], token])] += weight * law[token]
    return committed, accepted


def extended(committed, p, num_tokens, vocab_size):
    """The law of the first `num_tokens` tokens when p continues what was committed."""
    law = np.zeros((vocab_size,) * num_tokens)

    def extend(tokens, weight):
        if len(tokens) >= num_tokens:
            law[tokens[:num_tokens]] += weight
            return
        for token in range(vocab_size):
            extend((*tokens, token), weight * p[name(tokens)][token])

    for tokens, weight in committed.items():
        extend(tuple(map(int, tokens.split(","))), weight)
    return law


def target_law(p, num_tokens, vocab_size):
    return extended(
        {str(t): p[""][t] for t in range(vocab_size)}, p, num_tokens, vocab_size
    )


def assert_same_law(got, wanted, atol):
    for key in set(got) | set(wanted):
        assert abs(got.get(key, 0.0) - wanted.get(key, 0.0)) <= atol, key


@pytest.mark.parametrize(
    "case", GOLDEN["chain_rejection"]["cases"], ids=lambda c: c["label"]
)
def test_golden_chain_rejection(case):
    num_draft, vocab_size = case["K"], case["vocab"]
    committed, accepted = enumerate_rejection(
        case["p"], case["q"], num_draft, vocab_size
    )
    assert_same_law(committed, case["committed"], 1e-6)
    np.testing.assert_allclose(accepted, case["accepted_count_probs"], atol=1e-6)
    expected_tokens = (accepted * np.arange(1, num_draft + 2)).sum()
    assert abs(expected_tokens - case["expected_tokens"]) < 1e-6
    np.testing.assert_allclose(
        extended(committed, case["p"], num_draft + 1, vocab_size),
        target_law(case["p"], num_draft + 1, vocab_size),
        atol=1e-6,
    )


@pytest.mark.parametrize("case", GOLDEN["point_mass_tree"]["cases"])
def test_golden_point_mass_tree(case):
    """Also the order of siblings does not matter: the target's sample decides."""
    nodes = case["nodes"][1:]
    committed, accepted = enumerate_match(
        [node["token"] for node in nodes],
        [node["parent"] for node in nodes],
        [case["p_at_node"][str(i)] for i in range(len(nodes) + 1)],
    )
    assert_same_law(committed, case["committed"], 1e-6)
    wanted = np.zeros(len(accepted))
    wanted[: len(case["accepted_count_probs"])] = case["accepted_count_probs"]
    np.testing.assert_allclose(accepted, wanted, atol=1e-6)


def enumerate_siblings(q, num_candidates, replacement):
    """Every list of candidates drawn from q, with its probability."""
    drawn = [((), 1.0, np.array(q))]
    for _ in range(num_candidates):
        longer = []
        for tokens, weight, law in drawn:
            for token in np.flatnonzero(law):
                rest = law.copy()
                if not replacement:
                    rest[token] = 0
                    rest = rest / max(rest.sum(), 1e-300)
                longer.append(((*tokens, int(token)), weight * law[token], rest))
        drawn = longer
    return [(tokens, weight) for tokens, weight, _ in drawn]


def sibling_law(p, q, drawn, replacement):
    """The exact law of the committed token: the rule, integrated over its uniforms.

    A test's chance to pass, once all before it failed, is read off the library by
    bisection: the largest uniform with which the candidate is still kept. An infinite
    uniform fails every test.
    """
    tokens = np.array([t for t, _ in drawn], np.int32)
    reach = np.array([w for _, w in drawn])
    num_candidates = tokens.shape[1]

    def rule(uniforms):
        return sibling_rejections(
            jnp.asarray(tokens),
            jnp.asarray(p, jnp.float32),
            jnp.asarray(q, jnp.float32),
            jnp.asarray(uniforms, jnp.float32),
            replacement=replacement,
        )

    output, kept_at = np.zeros(len(p)), np.zeros(num_candidates)
    for i in range(num_candidates):
        low, high = np.zeros(len(tokens)), np.ones(len(tokens))
        for _ in range(30):
            uniforms = np.full(tokens.shape, np.inf)
            uniforms[:, i] = middle = (low + high) / 2
            is_kept = np.asarray(rule(uniforms)[0]) == i
            low, high = np.where(is_kept, middle, low), np.where(is_kept, high, middle)
        kept_at[i] = (reach * low).sum()
        np.add.at(output, tokens[:, i], reach * low)
        reach = reach * (1 - low)
    index, laws = rule(np.full(tokens.shape, np.inf))
    assert (np.asarray(index) == num_candidates).all()
    output = output + (reach[:, None] * np.asarray(laws, np.float64)).sum(0)
    return output, kept_at, reach.sum()


@pytest.mark.parametrize("case", GOLDEN["sampled_sibling_tree"]["cases"])
def test_golden_sampled_siblings(case):
    drawn = enumerate_siblings(case["q"], case["candidates"], case["replacement"])
    output, kept_at, none = sibling_law(
        case["p"], case["q"], drawn, case["replacement"]
    )
    np.testing.assert_allclose(output, case["output"], atol=1e-6)
    np.testing.assert_allclose(kept_at, case["accepted_index_probs"], atol=1e-6)
    assert abs(none - case["none_accepted_prob"]) < 1e-6


def test_golden_counterexample_needs_match():
    """B08: top-2 candidates are not a sample of q; `match` is exact for them."""
    case = GOLDEN["sampled_sibling_tree"]["counterexample"]
    candidates = case["candidates"]
    drawn = [(tuple(candidates), 1.0)]
    wrong, _, _ = sibling_law(case["p"], case["q"], drawn, replacement=False)
    np.testing.assert_allclose(wrong, case["biased_output"], atol=1e-6)
    committed, _ = enumerate_match(candidates, [0, 0], [case["p"]] * 3)
    first = collections.Counter()
    for tokens, weight in committed.items():
        first[int(tokens.split(",")[0])] += weight
    np.testing.assert_allclose([first[t] for t in range(3)], case["p"], atol=1e-12)


def processed(logits, params):
    """Probabilities by the library."""
    params = {"temperature": 1.0, **params}
    sequences = make_sequences([[0]], 1, **params)
    adjusted = jnp.asarray(logits, jnp.float32)[None, None]
    law = np.exp(sampling.log_probs(sequences.sampling, adjusted))[0, 0]
    return law.astype(np.float64) / law.sum(dtype=np.float64)


@pytest.mark.parametrize("case", GOLDEN["filtered_chain"]["cases"])
def test_golden_filtered_chain(case):
    """B07: filters on either side, or both; what is filtered never appears."""
    p = {
        prefix: processed(logits, case["target_params"])
        for prefix, logits in case["target_logits"].items()
    }
    q = {"": processed(case["draft_logits"], case["draft_params"])}
    for prefix, law in case["p"].items():
        np.testing.assert_allclose(p[prefix], law, atol=1e-5)
    np.testing.assert_allclose(q[""], case["q"], atol=1e-5)
    committed, accepted = enumerate_rejection(p, q, 1, case["vocab"])
    assert_same_law(committed, case["committed"], 1e-5)
    np.testing.assert_allclose(accepted, case["accepted_count_probs"], atol=1e-5)


@pytest.mark.parametrize("case", GOLDEN["residual_and_temperature"]["residual"])
def test_golden_residual(case):
    p, q = (jnp.asarray(case[x], jnp.float32) for x in "pq")
    np.testing.assert_allclose(acceptance.residual(p, q), case["residual"], atol=1e-6)


def test_b41_truncation_may_not_look_at_the_token_it_drops():
    half = {"": [0.5, 0.5], "0": [0.5, 0.5], "1": [0.5, 0.5]}
    wrong, _ = enumerate_rejection(half, half, 1, 2, lambda draft: draft[0])
    np.testing.assert_allclose(extended(wrong, half, 1, 2), [0.25, 0.75], atol=1e-6)
    case = GOLDEN["chain_rejection"]["cases"][0]
    for length_fn in (
        lambda draft: 0,
        lambda draft: 1,
        lambda draft: 1 + (draft[0] != 2),
    ):
        committed, _ = enumerate_rejection(case["p"], case["q"], 2, 3, length_fn)
        np.testing.assert_allclose(
            extended(committed, case["p"], 3, 3),
            target_law(case["p"], 3, 3),
            atol=1e-6,
        )
    # `match` forgives: the length may look at anything.
    right = collections.Counter()
    for draft in range(2):
        law, _ = enumerate_match([draft], None, [[0.5, 0.5]] * 2, length=draft)
        for tokens, weight in law.items():
            right[tokens] += weight / 2
    np.testing.assert_allclose(extended(right, half, 1, 2), [0.5, 0.5], atol=1e-12)


def slow_match(tokens, parents, length, samples):
    """The deepest node all of whose path agrees, by hand."""
    best = 0
    for node in range(1, len(tokens) + 1):
        path = walk(parents, node)
        agrees = all(
            n <= length and tokens[n - 1] == samples[parents[n - 1]] for n in path[1:]
        )
        if agrees and len(path) > len(walk(parents, best)):
            best = node
    return walk(parents, best)


@pytest.mark.parametrize("seed", range(3))
def test_match_equals_a_slow_walk(seed):
    """Siblings may repeat; tokens past the draft's length are never kept (B09)."""
    rng = np.random.default_rng(seed)
    batch_size, num_draft = 200, 9
    parents = np.stack([random_parents(rng, num_draft) for _ in range(batch_size)])
    tokens = rng.integers(0, 2, (batch_size, num_draft)).astype(np.int32)
    samples = rng.integers(0, 2, (batch_size, num_draft + 1)).astype(np.int32)
    length = rng.integers(0, num_draft + 1, batch_size).astype(np.int32)
    sequences = make_sequences([[1]] * batch_size, 1)
    judgement = Judgement(
        tokens=jnp.asarray(samples),
        is_finite=jnp.ones(samples.shape, bool),
        log_probs=None,
    )
    draft = make_draft(tokens, parents).replace(length=jnp.asarray(length))
    got = match(sequences, draft, judgement)
    chain = match(sequences, draft.replace(parents=None), judgement)
    for b in range(batch_size):
        for result, shape in ((got, parents[b]), (chain, np.arange(num_draft))):
            path = slow_match(tokens[b], shape, length[b], samples[b])
            count = int(result.num_accepted[b])
            assert count == len(path) - 1
            assert list(np.asarray(result.path[b, : count + 1])) == path
            assert result.next_token[b] == samples[b, path[-1]]


def test_the_deepest_of_equal_siblings_wins():
    draft = make_draft([[5, 5, 6]], parents=[[0, 0, 2]])
    judgement = Judgement(
        tokens=jnp.asarray([[5, 9, 6, 7]], jnp.int32),
        is_finite=jnp.ones((1, 4), bool),
        log_probs=None,
    )
    got = match(make_sequences([[1]], 1), draft, judgement)
    assert list(np.asarray(got.path[0])) == [0, 2, 3, 3]
    assert (int(got.num_accepted[0]), int(got.next_token[0])) == (2, 7)


def decode(p, q, num_rows, num_draft=1, draft_params=None, **params):
    """Rows of one step of rejection with fixed keys; p and q are context-free."""
    keys = jax.random.split(jax.random.key(2024), num_rows)
    rows = [[0]] * num_rows
    sequences = make_sequences(rows, 1, capacity=8, keys=keys, **params)
    drafting = make_sequences(rows, 1, capacity=8, keys=keys, **draft_params or params)
    nodes = sampling.chain_nodes(jnp.zeros((num_rows, num_draft + 1), jnp.int32))

    def logits(law):
        law = jnp.log(jnp.asarray(law, jnp.float32))
        return jnp.broadcast_to(law, (num_rows, num_draft + 1, law.shape[0]))

    @jax.jit
    def step():
        tokens, log_probs = sampling.independent_sample(drafting, nodes, logits(q))
        draft = make_draft(tokens[:, :-1], log_probs=log_probs[:, :-1])
        judgement = sampling.judge(sequences, nodes, logits(p), with_log_probs=True)
        return draft, jax.vmap(acceptance.rejection.accept)(sequences, draft, judgement)

    draft, got = step()
    first = np.where(got.num_accepted > 0, draft.tokens[:, 0], got.next_token)
    return draft, got, first


@pytest.mark.parametrize(
    ("p", "q", "params", "draft_params", "wanted", "accepted"),
    [
        (P, Q, {}, None, P, 0.6),
        ((0.6, 0.4), (0.8, 0.2), {}, None, (0.6, 0.4), 0.8),
        (P, Q, dict(temperature=0.5), None, (0.658, 0.237, 0.105), None),
        (P, (0.7, 0.2, 0.1), dict(top_k=2), None, (0.625, 0.375, 0), None),
        (P, (0.7, 0.2, 0.1), dict(top_k=2), {}, (0.625, 0.375, 0), None),
        (P, Q, dict(top_p=0.8), None, (0.625, 0.375, 0), None),
    ],
)
def test_o2_law_through_keys(p, q, params, draft_params, wanted, accepted):
    """B05, B07: 20,000 rows, fixed key.

    A standard error is at most 0.0035; a deviation of 0.015 has probability 2e-5 each,
    below 4e-4 in all.
    """
    if draft_params is not None:
        draft_params = {"temperature": 1.0, **draft_params}
    params = {"temperature": 1.0, **params}
    _, got, first = decode(p, q, 20_000, draft_params=draft_params, **params)
    law = np.bincount(first, minlength=len(p)) / 20_000
    np.testing.assert_allclose(law, wanted, atol=0.015)
    assert (law[np.asarray(wanted) == 0] == 0).all()
    if accepted is not None:
        assert abs(float(got.num_accepted.mean()) - accepted) < 0.015


def test_b12_uses_of_randomness_are_uncorrelated():
    """20,000 rows, fixed key: |r| < 0.035 is five standard errors (6e-7 each)."""
    draft, got, _ = decode(P, Q, 20_000, temperature=1.0)
    keys = jax.random.split(jax.random.key(2024), 20_000)
    uniforms = jax.vmap(
        lambda key: jax.random.uniform(
            sampling.position_key(key, jnp.asarray(1), sampling.ACCEPT)
        )
    )(keys)
    accepted = np.asarray(got.num_accepted)
    drafted, following = np.asarray(draft.tokens[:, 0]), np.asarray(got.next_token)

    def correlation(x, y):
        return abs(np.corrcoef(x.astype(float), y.astype(float))[0, 1])

    uniforms = np.asarray(uniforms)
    assert correlation(uniforms, drafted) < 0.035
    bonus = accepted == 1
    assert correlation(drafted[bonus], following[bonus]) < 0.05
    assert correlation(uniforms[bonus], following[bonus]) < 0.05
    # The test really used these uniforms.
    ratio = np.minimum(1, np.array(P) / np.array(Q))[drafted]
    assert (accepted == (uniforms < ratio)).mean() > 0.9999


def test_rejection_at_temperature_zero_is_greedy_verification():
    rng = np.random.default_rng(0)
    for num_draft in (1, 3):
        p, q = rng.random((2, 7))
        _, got, first = decode(p, q, 3, num_draft=num_draft, temperature=0.0)
        assert (first == np.argmax(p)).all()
        same = np.argmax(p) == np.argmax(q)
        assert (np.asarray(got.num_accepted) == num_draft * same).all()
        assert (np.asarray(got.next_token) == np.argmax(p)).all()
        _, oracle, _ = decode(p, p, 3, num_draft=num_draft, temperature=0.0)
        assert (np.asarray(oracle.num_accepted) == num_draft).all()


def test_rejection_of_the_target_itself_accepts_all():
    p = np.random.default_rng(1).random(7)
    _, got, _ = decode(p, p, 50, num_draft=4, temperature=1.0, top_p=0.9)
    assert (np.asarray(got.num_accepted) == 4).all()


def test_empty_drafts():
    sequences = make_sequences([[1], [2]], 1)
    judgement = Judgement(
        tokens=jnp.asarray([[3], [4]], jnp.int32),
        is_finite=jnp.ones((2, 1), bool),
        log_probs=jnp.zeros((2, 1, 5)),
    )
    empty = np.zeros((2, 0))
    for rule, draft in (
        (match, make_draft(empty)),
        (match, make_draft(empty, np.zeros((2, 0)))),
        (rejection, make_draft(empty, log_probs=jnp.zeros((2, 0, 5)))),
    ):
        got = rule(sequences, draft, judgement)
        assert list(np.asarray(got.next_token)) == [3, 4]
        assert list(np.asarray(got.num_accepted)) == [0, 0]
        assert got.path.shape == (2, 1)


def test_refusals_name_the_way_out():
    sequences = row(make_sequences([[1]], 1), 0)
    judgement = Judgement(
        tokens=jnp.zeros(3, jnp.int32),
        is_finite=jnp.ones(3, bool),
        log_probs=jnp.zeros((3, 4)),
    )
    accept = acceptance.rejection.accept
    point_mass = row(make_draft([[1, 2]]), 0)
    with pytest.raises(ValueError, match="point mass; use acceptance.match"):
        accept(sequences, point_mass, judgement)
    sampled = point_mass.replace(log_probs=jnp.zeros((2, 4)))
    with pytest.raises(ValueError, match="needs a chain"):
        accept(sequences, sampled.replace(parents=jnp.zeros(2, jnp.int32)), judgement)
    with pytest.raises(ValueError, match="with_log_probs"):
        accept(sequences, sampled, judgement.replace(log_probs=None))
    assert not acceptance.match.needs_log_probs
    assert acceptance.rejection.needs_log_probs
