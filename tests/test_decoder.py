"""The decoder as a `Model`: chunks, trees, windows, padding and capacity."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxdec import tree
from jaxdec.models.config import ModelConfig, RopeConfig
from jaxdec.models.decoder import init_params, make_model

FAMILIES = {
    "llama": toy.TINY_CONFIG,
    "tied": dataclasses.replace(toy.TINY_CONFIG, tie_embeddings=True),
    "qwen3": dataclasses.replace(toy.TINY_CONFIG, qk_norm=True),
    "qwen2": dataclasses.replace(toy.TINY_CONFIG, qkv_bias=True),
    "gemma3": dataclasses.replace(
        toy.TINY_CONFIG,
        activation="gelu_tanh",
        sandwich_norms=True,
        qk_norm=True,
        embedding_scale=8.0,
        ropes=(RopeConfig(), RopeConfig(theta=500.0)),
        layer_rope=(1, 0),
        layer_windows=(5, None),
        logit_softcap=30.0,
    ),
    "gpt2": dataclasses.replace(
        toy.TINY_CONFIG,
        norm="layer",
        gated_mlp=False,
        activation="gelu_tanh",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        learned_positions=True,
        num_kv_heads=4,
        tie_embeddings=True,
    ),
    "window": dataclasses.replace(toy.TINY_CONFIG, layer_windows=(4, 7)),
}


@functools.cache
def family(name: str):
    """Model, params, and a jitted forward that starts from any cache."""
    config: ModelConfig = FAMILIES[name]
    params = init_params(config, jax.random.key(5))
    if config.learned_positions:
        table = jax.random.normal(jax.random.key(6), params["positions"].shape)
        params["positions"] = table * 0.3
    model = make_model(config, taps=(0, 1, 2))
    return model, params, jax.jit(model.forward, compiler_options=toy.FAST)


def tokens_for(batch, num, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(0, toy.VOCAB, (batch, num)), jnp.int32)


def read(name, cache, tokens, mask=None, position=None):
    model, params, forward = family(name)
    if position is None:
        index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        position = cache.length[:, None] + index
    return forward(params, cache, tokens, position, mask)


def close(x, y, atol=2e-5):
    np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=0, atol=atol)


@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_equal_one_forward(name):
    model, _, _ = family(name)
    tokens = tokens_for(2, 24)
    whole_cache, whole = read(name, model.init_cache(2, 64), tokens)
    cache = model.init_cache(2, 64)
    start = 0
    for size in (8, 8, *[1] * 8):
        before = cache.length
        cache, output = read(name, cache, tokens[:, start : start + size])
        np.testing.assert_array_equal(cache.length, before)
        for part, full in zip(
            jax.tree.leaves(output), jax.tree.leaves(whole), strict=True
        ):
            close(part, full[:, start : start + size])
        cache = cache.commit(None, jnp.full((2,), size, jnp.int32))
        start += size
    for ours, theirs in zip(cache.keys, whole_cache.keys, strict=True):
        close(ours[:, :, :24], theirs[:, :, :24])


PARENTS = np.array([0, 0, 1, 1, 2, 4, 4, 6], np.int32)


@pytest.mark.parametrize("name", FAMILIES)
def test_b30_a_node_reads_its_root_path(name):
    """Logits of every tree node equal those of its path as a plain sequence.

    Rows of different lengths; positions are depths, so that siblings share one.
    """
    model, _, _ = family(name)
    context, drafted = tokens_for(2, 8, seed=1), tokens_for(2, 9, seed=2)
    cache, _ = read(name, model.init_cache(2, 64), context)
    cache = cache.commit(None, jnp.asarray([8, 5], jnp.int32))
    parents = jnp.asarray(PARENTS)
    depth = tree.depth(parents)
    mask = jnp.broadcast_to(tree.ancestors(parents)[None], (2, 9, 9))
    position = cache.length[:, None] + depth[None]
    _, output = read(name, cache, drafted, mask, position)
    chain, _ = toy_path_logits(name, cache, drafted, parents)
    for node in range(9):
        close(output.logits[:, node], chain[node])


def toy_path_logits(name, cache, drafted, parents):
    """For each node, the logits after its path, read as a chain of padded length."""
    logits, paths = [], []
    for node in range(9):
        path = np.asarray(tree.path_to(parents, jnp.int32(node)))
        depth = int(tree.depth(parents)[node])
        _, output = read(name, cache, drafted[:, path])
        logits.append(np.asarray(output.logits)[:, depth])
        paths.append(path[: depth + 1])
    return logits, paths


@pytest.mark.parametrize("name", ["llama", "gemma3", "window"])
def test_a_committed_path_is_a_plain_prefix(name):
    """After committing a tree path, the next token reads what a chain would."""
    model, _, _ = family(name)
    context, drafted = tokens_for(2, 8, seed=1), tokens_for(2, 9, seed=2)
    start, _ = read(name, model.init_cache(2, 64), context)
    start = start.commit(None, jnp.asarray([8, 5], jnp.int32))
    parents = jnp.asarray(PARENTS)
    mask = jnp.broadcast_to(tree.ancestors(parents)[None], (2, 9, 9))
    position = start.length[:, None] + tree.depth(parents)[None]
    cache, _ = read(name, start, drafted, mask, position)
    path = jnp.stack([tree.path_to(parents, jnp.int32(n)) for n in (7, 3)])
    num = jnp.asarray([4, 2], jnp.int32)
    cache = cache.commit(path, num)
    chain = jnp.take_along_axis(drafted, path, axis=1)
    plain, _ = read(name, start, chain)
    plain = plain.commit(None, num)
    following = tokens_for(2, 3, seed=4)
    _, ours = read(name, cache, following)
    _, theirs = read(name, plain, following)
    close(ours.logits, theirs.logits)


@pytest.mark.parametrize("name", ["gemma3", "window", "llama"])
@pytest.mark.parametrize("is_tree", [False, True])
def test_windows_against_a_full_mask(name, is_tree):
    """`attend` against softmax over an explicit mask, head by head, in float64."""
    from jaxdec.models.attention import attend

    rng = np.random.default_rng(8)
    batch, num, heads, groups, width, slots = 2, 5, 4, 2, 8, 512
    length = np.array([262, 30])
    query = rng.normal(size=(batch, num, heads, width))
    keys, values = rng.normal(size=(2, batch, groups, slots, width))
    parents = np.array([0, 0, 1, 2], np.int32)
    is_ancestor = np.asarray(tree.ancestors(jnp.asarray(parents)))
    depth = np.arange(num)
    if is_tree:
        depth = np.asarray(tree.depth(jnp.asarray(parents)))
    window = {"gemma3": 5, "window": 260, "llama": None}[name]
    expected = np.zeros((batch, num, heads, width))
    for b in range(batch):
        for t in range(num):
            at = np.r_[0 : length[b], length[b] + depth]
            seen = np.r_[
                np.ones(length[b], bool),
                is_ancestor[t] if is_tree else np.arange(num) <= t,
            ]
            if window is not None:
                seen &= length[b] + depth[t] - at < window
            for h in range(heads):
                score = keys[b, h // 2, : len(at)] @ query[b, t, h] * 0.3
                score = np.tanh(score / 5.0) * 5.0
                weight = np.exp(score - score.max()) * seen
                expected[b, t, h] = weight / weight.sum() @ values[b, h // 2, : len(at)]
    for b in range(batch):
        keys[b, :, length[b] + num :] = np.nan
        values[b, :, length[b] + num :] = np.nan
    ours = attend(
        jnp.asarray(query, jnp.float32),
        jnp.asarray(keys, jnp.float32),
        jnp.asarray(values, jnp.float32),
        jnp.asarray(length, jnp.int32),
        jnp.asarray(length[:, None] + depth, jnp.int32),
        jnp.broadcast_to(jnp.asarray(is_ancestor), (batch, num, num))
        if is_tree
        else None,
        scale=0.3,
        window=window,
        softcap=5.0,
    )
    close(ours, expected, atol=1e-5)


@functools.cache
def _two_reads(min_rows: int, is_tree: bool):
    """Output and cache of three tokens after six, padded to `min_rows` rows."""
    model = make_model(toy.TINY_CONFIG, min_rows=min_rows)
    mask, depth = None, jnp.arange(3, dtype=jnp.int32)
    if is_tree:
        parents = jnp.asarray([0, 0], jnp.int32)
        mask, depth = tree.ancestors(parents)[None], tree.depth(parents)

    def reads(params, context, drafted):
        cache = model.init_cache(1, 64)
        position = jnp.arange(6, dtype=jnp.int32)[None]
        cache, _ = model.forward(params, cache, context, position, None)
        cache = cache.commit(None, jnp.asarray([6], jnp.int32))
        position = cache.length[:, None] + depth[None]
        cache, output = model.forward(params, cache, drafted, position, mask)
        return output, cache.keys[1][:, :, :9]

    arrays = (toy.tiny_params(), tokens_for(1, 6), tokens_for(1, 3, seed=3))
    return jax.jit(reads, compiler_options=toy.FAST)(*arrays)


@pytest.mark.parametrize("min_rows", [2, 8, 16])
@pytest.mark.parametrize("is_tree", [False, True])
def test_padding_to_min_rows_changes_nothing(min_rows, is_tree):
    padded, plain = _two_reads(min_rows, is_tree), _two_reads(1, is_tree)
    assert padded[0].logits.shape == (1, 3, toy.VOCAB)
    jax.tree.map(close, padded, plain)


def test_capacity_does_not_change_numbers():
    """256 and 1024 slots, bit for bit; beyond one block the loop is another program."""
    tokens = tokens_for(2, 20)
    model, params, _ = family("llama")
    outputs = []
    for capacity in (256, 512, 1024):
        cache = model.init_cache(2, capacity)
        cache, first = read("llama", cache, tokens[:, :16])
        cache = cache.commit(None, jnp.asarray([16, 9], jnp.int32))
        cache, second = read("llama", cache, tokens[:, 16:])
        outputs.append((first, second, cache.keys[1][:, :, :13]))
    for other in outputs[1:]:
        jax.tree.map(np.testing.assert_array_equal, outputs[0], other)


def test_a_long_neighbour_does_not_change_numbers():
    """A row alone, and beside a row that makes the program read a second block."""
    model, _, _ = family("llama")
    cache = model.init_cache(2, 512)
    tokens = tokens_for(2, 300)
    cache, _ = read("llama", cache, tokens)
    logits = []
    for other in (20, 290):
        live = cache.commit(None, jnp.asarray([20, other], jnp.int32))
        _, output = read("llama", live, tokens[:, 20:23])
        logits.append(np.asarray(output.logits)[0])
    np.testing.assert_array_equal(logits[0], logits[1])


def test_taps_and_hidden_states():
    """Tap t enters layer t, tap N leaves the last layer; hidden feeds the head."""
    model, params, _ = family("llama")
    _, output = read("llama", model.init_cache(1, 32), tokens_for(1, 4))
    first, _, last = np.split(np.asarray(output.features), 3, axis=-1)
    assert model.num_features == output.features.shape[-1] == 3 * 64
    close(first, params["embedding"][tokens_for(1, 4)])
    close(last, output.hidden)
    rms = np.sqrt(np.mean(np.square(np.asarray(output.hidden)), -1, keepdims=True))
    close(output.normed_hidden, np.asarray(output.hidden) / rms, atol=1e-4)
    head = np.asarray(params["head"]["weight"])
    close(output.logits, np.asarray(output.normed_hidden) @ head.T, atol=1e-4)


def test_first_layers_are_the_layers_of_the_whole():
    whole, params, _ = family("llama")
    part = make_model(toy.TINY_CONFIG, num_layers=1, taps=(1,))
    tokens = tokens_for(1, 6)
    position = jnp.arange(6, dtype=jnp.int32)[None]
    _, output = read("llama", whole.init_cache(1, 32), tokens)
    cache, early = part.forward(params, part.init_cache(1, 32), tokens, position, None)
    assert len(cache.keys) == 1
    close(early.hidden, output.features[..., 64:128])
    close(early.features, early.hidden)


def test_a_tap_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"taps \[4\]"):
        make_model(toy.TINY_CONFIG, taps=(0, 4))


def test_the_last_taps_are_the_stream_before_and_after_the_norm():
    num = toy.TINY_CONFIG.num_layers
    _, params, _ = family("llama")
    model = make_model(toy.TINY_CONFIG, taps=(num, num + 1))
    position = jnp.arange(6, dtype=jnp.int32)[None]
    _, output = model.forward(
        params, model.init_cache(1, 32), tokens_for(1, 6), position, None
    )
    both = jnp.concatenate([output.hidden, output.normed_hidden], axis=-1)
    np.testing.assert_array_equal(output.features, both)
