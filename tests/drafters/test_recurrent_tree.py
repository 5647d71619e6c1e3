"""How a tree grows: against a slow walk, against the chain, with the noise known."""

import functools

import eagle_toys
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxdec import acceptance, decoding, drafting, sampling
from jaxdec.drafters.eagle import eagle, recurrent_net
from jaxdec.drafters.recurrent_tree import (
    Candidates,
    best_nodes,
    grow,
    most_nodes,
    recurrent_tree,
)
from jaxdec.types import Commit, Sequences

DEPTH, WIDTH = 4, 3
PROMPT = [5, 17, 40, 40, 2, 71, 17]


def jit(function):
    return jax.jit(function, compiler_options=toy.FAST)


def sequences_of(prompts, **kwargs) -> Sequences:
    """What the engine would show a drafter of these committed tokens."""
    request = toy.make_request(prompts, max_new=40, buffer=64, **kwargs)
    batch = len(prompts)
    return Sequences(
        tokens=request.prompt,
        length=request.prompt_length,
        prompt_length=jnp.minimum(request.prompt_length, 2),
        limit=request.prompt_length + 40,
        finish=jnp.zeros((batch,), jnp.int32),
        max_draft_length=request.max_draft_length,
        stop_tokens=request.stop_tokens,
        num_stop_tokens=request.num_stop_tokens,
        key=request.key,
        sampling=request.sampling,
    )


def asking(num: int) -> Sequences:
    """Rows that ask for noise, for penalties, for both, for neither; in turn."""
    prompts = [PROMPT[: 3 + i % 5] for i in range(num)]
    some = np.arange(num)
    return sequences_of(
        prompts,
        temperature=np.where(some % 2, 0.9, 0.0).tolist(),
        repetition_penalty=np.where(some % 4 >= 2, 1.7, 1.0).tolist(),
        frequency_penalty=np.where(some % 4 == 3, 0.6, 0.0).tolist(),
    )


@functools.cache
def extended(num: int):
    """The drafter "eagle3" after the committed tokens of `asking(num)`."""
    sequences = asking(num)
    taps, build, params = eagle_toys.methods()["eagle3"]
    _, output = toy.full_forward(sequences.tokens, toy.tiny(taps=taps))
    width = sequences.tokens.shape[1] - 1
    commit = Commit(
        tokens=sequences.tokens,
        features=output.features[:, :width],
        length=sequences.length - 1,
    )
    drafter = build()
    return jit(drafter.extend)(params, drafter.init(num, 256), commit)


# ---- Growth --------------------------------------------------------------------------


@functools.cache
def _slow_parts():
    """One row of the network after some held rows; scores of what may follow a node."""
    _, _, params = eagle_toys.methods()["eagle3"]
    net = recurrent_net(eagle_toys.EAGLE_3)

    def read(state, held, index, hidden, token):
        place = jnp.arange(DEPTH, dtype=jnp.int32)[None]
        position = state.cache.length[:, None]
        mask = (place <= index)[:, None]
        return net.read(
            params, state.cache, held, index, hidden, token, position + index,
            position + place, mask,
        )  # fmt: skip

    def scores(sequences, context, node, hidden):
        nodes = sampling.chain_nodes(context, node)
        wide = drafting.widen(net.vocabulary(params), net.logits(params, hidden))
        wide = sampling.adjust(sequences, nodes, wide)
        noise = sampling.gumbel(
            sequences.key, sequences.length[:, None] + node, wide.shape[-1]
        )
        return wide[0, 0], noise[0, 0]

    return net, jit(read), jit(scores)


def slow_tree(sequences, state):
    """Every candidate, in order: root paths, and log-probabilities, one by one."""
    net, read, scores = _slow_parts()
    temperature = float(sequences.sampling.temperature[0])

    def children(path):
        held, hidden = net.init_held(1, DEPTH), state.hidden[:, None]
        for index, token in enumerate(path):
            token = jnp.asarray([[token]], jnp.int32)
            held, hidden = read(state, held, jnp.int32(index), hidden, token)
        context = np.zeros((1, DEPTH + 1), np.int32)
        context[0, : len(path) + 1] = [int(sequences.anchor[0]), *path]
        logits, noise = scores(
            sequences, jnp.asarray(context), jnp.int32(len(path)), hidden
        )
        values = np.asarray(logits, np.float64)
        if temperature > 0:
            values = values / temperature + np.asarray(noise, np.float64)
        values = values - np.log(np.sum(np.exp(values - values.max()))) - values.max()
        return sorted(enumerate(values), key=lambda pair: -pair[1])[:WIDTH]

    found, frontier = [], [((), 0.0)]
    for _ in range(DEPTH):
        level = [
            ((*path, token), score + value)
            for path, score in frontier
            for token, value in children(path)
        ]
        found += level
        frontier = sorted(level, key=lambda node: -node[1])[:WIDTH]
    return found


def test_growth_equals_a_slow_walk():
    """B30, B43: each node with its own path, position, penalties and noise."""
    num = 4
    sequences, state = asking(num), extended(num)
    net = recurrent_net(eagle_toys.EAGLE_3)
    _, _, params = eagle_toys.methods()["eagle3"]

    @jit
    def fast(params, state, sequences):
        grown = grow(net, params, state, sequences, depth=DEPTH, width=WIDTH)
        return grown, best_nodes(grown, 9)

    grown, kept = jax.tree.map(np.asarray, fast(params, state, sequences))
    for row in range(num):
        slow = slow_tree(toy.pick(sequences, [row]), toy.pick(state, [row]))
        paths = [()]
        for token, parent in zip(grown.tokens[row], grown.parents[row], strict=True):
            paths.append((*paths[parent], int(token)))
        assert paths[1:] == [path for path, _ in slow]
        theirs = np.asarray([score for _, score in slow])
        np.testing.assert_allclose(grown.scores[row], theirs, rtol=0, atol=1e-4)
        order = np.argsort(-theirs, kind="stable")[:9]
        best = [paths[1 + i] for i in np.sort(order)]
        rebuilt = [()]
        for token, parent in zip(kept[0][row], kept[1][row], strict=True):
            rebuilt.append((*rebuilt[parent], int(token)))
        assert rebuilt[1:] == best
        known = set(np.asarray(params.own["vocabulary"]["target_ids"]).tolist())
        assert set(grown.tokens[row].tolist()) <= known


def no_repeats(tokens, length, logits):
    """A caller's own rule: neither of the last two tokens again."""
    last = tokens[length - 1], tokens[length - 2]
    return logits.at[jnp.stack(last)].set(-jnp.inf)


@pytest.mark.parametrize(("depth", "rule"), [(1, None), (DEPTH, no_repeats)])
def test_a_tree_of_width_one_is_the_chain(depth, rule):
    """B31: token for token, whatever is asked for."""
    num = 8
    sequences, state = asking(num), extended(num)
    _, _, params = eagle_toys.methods()["eagle3"]
    net = recurrent_net(eagle_toys.EAGLE_3)
    chain = eagle(eagle_toys.EAGLE_3, length=DEPTH, processor=rule)
    tree = recurrent_tree(net, nodes=depth, depth=depth, width=1, processor=rule)
    assert (tree.max_length, tree.max_depth, tree.taps) == (depth, depth, chain.taps)
    _, expected = jit(chain.propose)(params, state, sequences)
    _, draft = jit(tree.propose)(params, state, sequences)
    np.testing.assert_array_equal(draft.tokens, expected.tokens[:, :depth])
    np.testing.assert_array_equal(draft.parents, np.tile(np.arange(depth), (num, 1)))
    np.testing.assert_array_equal(draft.length, np.full(num, depth))
    if rule is not None:
        said = np.concatenate([sequences.anchor[:, None], draft.tokens], axis=1)
        for back in (1, 2):
            assert np.all(said[:, back:] != said[:, :-back])


def test_equal_scores_keep_parents_and_the_earlier():
    """Certain children are worth as much as their parents; a tie must not orphan."""
    tokens = jnp.arange(12, dtype=jnp.int32)[None]
    parents = jnp.asarray([[0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]], jnp.int32)
    best = jit(lambda grown: best_nodes(grown, 5))
    for score in (-1.0, -np.inf):
        scores = jnp.full((1, 12), score, jnp.float32)
        grown = Candidates(tokens=tokens, parents=parents, scores=scores)
        kept, links, _ = best(grown)
        assert kept.tolist() == [[0, 1, 2, 3, 4]]
        assert links.tolist() == [[0, 0, 0, 1, 1]]


# ---- Growth towards what will be sampled ---------------------------------------------


@functools.cache
def sampled_continuations():
    """Prefixes of plain decoding of MARKOV at temperature 1, and what came next."""
    built = toy.method("plain")
    target = eagle_toys.markov_params(2.0)
    request = toy.ragged(max_new=24, temperature=1.0)
    state, _, _ = toy.run(built, request, params=built.params.replace(target=target))
    said = toy.tokens_of(state)
    prefixes, following, rows = [], [], []
    for row, prompt in enumerate(toy.PROMPTS):
        whole = [*prompt, *said[row]]
        for end in range(len(prompt) + 1, len(whole) - DEPTH + 1, 2):
            prefixes.append(whole[:end])
            following.append(whole[end : end + DEPTH])
            rows.append(row)
    sequences = sequences_of(prefixes, temperature=1.0)
    return sequences.replace(key=request.key[np.asarray(rows)]), following


@functools.cache
def drafted(noise: bool):
    """Trees of the oracle after every prefix."""
    sequences, _ = sampled_continuations()
    params = eagle_toys.oracle_params(2.0)
    net = recurrent_net(eagle_toys.EAGLE_1)
    tree = recurrent_tree(net, nodes=8, depth=DEPTH, width=WIDTH, noise=noise)
    batch, width = sequences.tokens.shape
    commit = Commit(
        tokens=sequences.tokens,
        features=jnp.zeros((batch, width - 1, eagle_toys.WIDTH), jnp.float32),
        length=sequences.length - 1,
    )

    @jit
    def propose(params, commit, sequences):
        state = tree.extend(params, tree.init(batch, 256), commit)
        return tree.propose(params, state, sequences)[1]

    return jax.tree.map(np.asarray, propose(params, commit, sequences))


def accepted_depth(tokens, parents, following):
    """How far the longest path of a tree agrees with what came next."""
    depth = [0]
    for token, parent in zip(tokens, parents, strict=True):
        on_path = depth[parent] is not None and depth[parent] < len(following)
        good = on_path and following[depth[parent]] == token
        depth.append(depth[parent] + 1 if good else None)
    return max(d for d in depth if d is not None)


def accepted_depths(noise: bool):
    _, following = sampled_continuations()
    draft = drafted(noise)
    rows = zip(draft.tokens, draft.parents, following, strict=True)
    return np.asarray([accepted_depth(*row) for row in rows])


def test_knowing_the_noise_is_worth_tokens():
    """At temperature 1 a tree grown with the noise keeps more than one without."""
    informed, blind = accepted_depths(True), accepted_depths(False)
    assert len(informed) > 30
    assert informed.mean() > 3.0 and blind.mean() < informed.mean() - 1.0


def test_junk_siblings_never_lower_what_is_accepted():
    _, following = sampled_continuations()
    draft = drafted(True)
    num = draft.tokens.shape[1]
    rng = np.random.default_rng(0)

    @jit
    @jax.vmap
    def depth(tokens, parents, samples):
        length = jnp.int32(tokens.shape[0])
        return acceptance.matching_path(tokens, parents, length, samples)[1]

    # Every node, the anchor too, gets a child that was not asked for.
    junk = rng.integers(0, toy.VOCAB, (len(following), num + 1))
    nodes = np.broadcast_to(np.arange(num + 1), junk.shape)
    tokens = np.concatenate([draft.tokens, junk], axis=1).astype(np.int32)
    parents = np.concatenate([draft.parents, nodes], axis=1).astype(np.int32)
    samples = np.full((len(following), 2 * num + 2), -1, np.int32)
    for row, after in enumerate(following):
        depths, good = [0], [True]
        for token, parent in zip(tokens[row], parents[row], strict=True):
            is_good = good[parent] and depths[parent] < DEPTH
            good.append(bool(is_good and after[depths[parent]] == token))
            depths.append(depths[parent] + 1)
        for node, (d, g) in enumerate(zip(depths, good, strict=True)):
            if g and d < DEPTH:
                samples[row, node] = after[d]
    with_junk = np.asarray(depth(tokens, parents, samples))
    without = np.asarray(depth(draft.tokens, draft.parents, samples[:, : num + 1]))
    np.testing.assert_array_equal(without, accepted_depths(True))
    assert np.all(with_junk >= without)


# ---- Sizes ---------------------------------------------------------------------------


def test_sizes_that_make_no_tree():
    net = recurrent_net(eagle_toys.EAGLE_3)
    for kwargs, words in (
        ({"nodes": -1, "depth": 2, "width": 2}, "nodes of at least 0"),
        ({"nodes": 4, "depth": 0, "width": 2}, "nodes of at least 0"),
        ({"nodes": 4, "depth": 2, "width": 0}, "nodes of at least 0"),
        ({"nodes": 7, "depth": 2, "width": 2}, "grows only 6 nodes, got nodes=7"),
    ):
        with pytest.raises(ValueError, match=words):
            recurrent_tree(net, **kwargs)
    assert most_nodes(2, 2) == 6


def test_a_tree_wider_than_the_vocabulary():
    """61 tokens can be said; a level of 62 cannot be chosen from them."""
    _, _, params = eagle_toys.methods()["eagle3"]
    net = recurrent_net(eagle_toys.EAGLE_3)
    tree = recurrent_tree(net, nodes=62, depth=1, width=62)
    with pytest.raises(ValueError, match="width 62 .* vocabulary has 61"):
        jax.eval_shape(tree.propose, params, extended(4), asking(4))


def test_no_nodes_is_no_draft():
    _, _, params = eagle_toys.methods()["eagle3"]
    net = recurrent_net(eagle_toys.EAGLE_3)
    tree = recurrent_tree(net, nodes=0, depth=3, width=2)
    assert tree.max_length == 0
    _, draft = tree.propose(params, extended(4), asking(4))
    assert draft.tokens.shape == (4, 0) and draft.length.tolist() == [0] * 4
    strategy = decoding.speculative(toy.tiny(taps=net.taps), tree, capacity=256)
    own = eagle_toys.params_of(eagle_toys.EAGLE_3)
    request = toy.make_request(toy.PROMPTS, max_new=4)
    jax.eval_shape(
        lambda request: strategy.step(
            toy.StrategyParams(target=toy.tiny_params(), drafter=own),
            strategy.prefill(
                toy.StrategyParams(target=toy.tiny_params(), drafter=own), request
            ),
        ),
        request,
    )


def test_nothing_is_sorted_over_the_vocabulary():
    """The likeliest are selected; a sort of every row would cost most of a step."""
    config = eagle_toys.EAGLE_1
    net = recurrent_net(config)
    tree = recurrent_tree(net, nodes=6, depth=2, width=WIDTH)
    params, sequences = eagle_toys.oracle_params(), asking(4)
    state = jax.eval_shape(lambda: tree.init(4, 256))
    text = jit(tree.propose).lower(params, state, sequences).compile().as_text()
    assert "TopK" in text
    sorts = [line for line in text.splitlines() if " sort(" in line]
    assert not any(f",{toy.VOCAB}]" in line for line in sorts)
