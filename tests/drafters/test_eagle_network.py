"""The EAGLE networks by themselves, and what they say with a smaller vocabulary."""

import dataclasses
import functools

import eagle_toys
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from test_recurrent_tree import asking, extended, jit

from jaxdec import drafting, sampling
from jaxdec.drafters.eagle import eagle, recurrent_net
from jaxdec.models.eagle import (
    causal_pass,
    init_eagle_params,
    make_network,
    vocabulary_params,
)
from jaxdec.models.eagle_config import EagleConfig
from jaxdec.models.eagle_weights import (
    eagle_params_from_tensors,
    expected_eagle_tensors,
)
from jaxdec.types import DrafterParams, Vocabulary

CONFIGS = {
    "eagle1": dataclasses.replace(
        eagle_toys.EAGLE_1,
        fusion_bias=True,
        layers=dataclasses.replace(eagle_toys.LAYER, num_layers=2, qkv_bias=True),
    ),
    "eagle3": eagle_toys.EAGLE_3,
    "wide": dataclasses.replace(
        eagle_toys.EAGLE_3, wide_layers=2, fusion_norm="none", own_embedding=True
    ),
    "peagle": eagle_toys.P_EAGLE,
}


def tensors_of(config: EagleConfig):
    """Random tensors with published names."""
    rng = np.random.default_rng(5)
    shapes = expected_eagle_tensors(config)
    tensors = {
        name: rng.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    if config.is_reduced:
        tensors["d2t"] = np.arange(config.draft_vocab_size) // 3
    return tensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_loaded_and_random_arrays_are_of_one_shape(name, dtype):
    config = CONFIGS[name]
    loaded = eagle_params_from_tensors(config, tensors_of(config), dtype)
    random = jax.eval_shape(
        functools.partial(init_eagle_params, config, dtype=dtype), jax.random.key(0)
    )
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), loaded)
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), random)


@pytest.mark.parametrize("name", ["eagle3", "peagle"])
def test_bfloat16(name):
    """Activations stay float32, and nothing is promoted on the way."""
    config = CONFIGS[name]
    drafter = eagle(config, dtype="bfloat16", cache_dtype="bfloat16")
    own = init_eagle_params(config, jax.random.key(0), "bfloat16")
    params = DrafterParams(own=own, shared=toy.tiny_params())
    state = jax.eval_shape(lambda: drafter.init(4, 256))
    assert state.cache.keys[0].dtype == jnp.bfloat16
    after, draft = jax.eval_shape(drafter.propose, params, state, asking(4))
    assert after.hidden.dtype == jnp.float32 and draft.tokens.dtype == jnp.int32


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_a_whole_pass_is_what_the_cache_holds_and_has_gradients(name):
    """Windows and several layers too; nothing that can be trained is left out."""
    config = CONFIGS[name]
    network, params = make_network(config), eagle_toys.params_of(config)
    num = 9
    rng = np.random.default_rng(1)
    joined = len(config.taps) * eagle_toys.WIDTH
    features = jnp.asarray(rng.normal(size=(2, num, joined)), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, toy.VOCAB, (2, num)), jnp.int32)
    # Integers say which tokens there are; they are not trained.
    fixed = {k: v for k, v in params.own.items() if k == "vocabulary"}
    own = {k: v for k, v in params.own.items() if k not in fixed}

    @jit
    def both(own, features, tokens):
        params = DrafterParams(own=own | fixed, shared=toy.tiny_params())

        def loss(own):
            params = DrafterParams(own=own | fixed, shared=toy.tiny_params())
            hidden = causal_pass(network, params, features, tokens)
            logits = network.logits(params, hidden)
            return jnp.sum(jax.nn.log_softmax(logits)[..., 7]), hidden

        position = jnp.broadcast_to(jnp.arange(num, dtype=jnp.int32), (2, num))
        fused = network.fuse(params, features)
        cache = network.init_cache(2, 256)
        _, written = network.write(params, cache, fused, tokens, position)
        (_, hidden), gradient = jax.value_and_grad(loss, has_aux=True)(own)
        return written, hidden, gradient

    written, hidden, gradient = both(own, features, tokens)
    np.testing.assert_allclose(hidden, written, rtol=0, atol=2e-5)
    for path, x in jax.tree_util.tree_leaves_with_path(gradient):
        x = np.asarray(x)
        assert np.all(np.isfinite(x)) and np.any(x != 0), jax.tree_util.keystr(path)


def test_windows_of_drafted_rows():
    """One that feeds on its own output sees as far back as its last true row does."""
    window, num = 5, 12
    layers = dataclasses.replace(
        eagle_toys.EAGLE_3.layers, num_layers=1, layer_windows=(window,)
    )
    chain = dataclasses.replace(eagle_toys.EAGLE_3, layers=layers)
    parallel = dataclasses.replace(chain, mask_token=3)
    rng = np.random.default_rng(2)
    features = jnp.asarray(rng.normal(size=(1, num, 192)), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, toy.VOCAB, (1, num)), jnp.int32)

    def last_row(config):
        net, params = recurrent_net(config), eagle_toys.params_of(config)

        @jit
        def run(features):
            steps = jnp.arange(num, dtype=jnp.int32)[None]
            fused = net.fuse(params, features)
            cache, _ = net.write(params, net.init_cache(1, 256), fused, tokens, steps)
            cache = cache.commit(None, jnp.full((1,), num, jnp.int32))
            place = num + jnp.arange(3, dtype=jnp.int32)[None]
            _, hidden = net.read(
                params, cache, net.init_held(1, 3), jnp.int32(0),
                jnp.ones((1, 3, eagle_toys.WIDTH)), tokens[:, :3], place, place,
                jnp.tril(jnp.ones((1, 3, 3), bool)),
            )  # fmt: skip
            return hidden[0, -1]

        return run

    for config, first in ((chain, num - window), (parallel, num + 3 - window)):
        run = last_row(config)
        same = np.asarray(run(features))
        for row in range(first - 2, first + 2):
            changed = np.asarray(run(features.at[0, row].add(1.0)))
            assert np.array_equal(changed, same) == (row < first), row


# ---- Vocabularies --------------------------------------------------------------------


def test_b37_proposals_are_the_targets_ids():
    vocabulary = Vocabulary(**vocabulary_params(np.array([1, 3, 4, 9]), 16))
    logits = jnp.asarray([[[0.5, 2.0, -1.0, 1.0]]])
    wide = np.asarray(drafting.widen(vocabulary, logits))[0, 0]
    np.testing.assert_array_equal(np.flatnonzero(np.isfinite(wide)), [1, 3, 4, 9])
    np.testing.assert_array_equal(wide[[1, 3, 4, 9]], logits[0, 0])
    mass = np.exp(np.asarray(jax.nn.log_softmax(wide)))
    assert abs(mass.sum() - 1) < 1e-6 and mass[0] == 0
    assert drafting.widen(None, logits) is logits


@functools.cache
def _logits():
    rng = np.random.default_rng(3)
    return jnp.asarray(rng.normal(size=(8, 4, 61)) * 2, jnp.float32)


def test_a_smaller_vocabulary_has_the_same_noise():
    """As if the logits had been widened with -inf, whatever the rows ask for."""
    params = eagle_toys.params_of(eagle_toys.EAGLE_3)
    vocabulary = Vocabulary(**params.own["vocabulary"])
    sequences, logits = asking(8), _logits()
    context = jnp.concatenate([sequences.anchor[:, None], asking(8).tokens[:, :3]], 1)

    @jit
    def narrow_and_wide(sequences):
        nodes = sampling.chain_nodes(context)
        narrow = drafting.sample(vocabulary, sequences, nodes, logits, coupled=True)
        wide = drafting.widen(vocabulary, logits)
        wide = drafting.sample(None, sequences, nodes, wide, coupled=True)
        return narrow[0], wide[0]

    narrow, wide = narrow_and_wide(sequences)
    np.testing.assert_array_equal(narrow, wide)
    assert set(np.asarray(narrow).ravel().tolist()) <= set(
        np.asarray(vocabulary.target_ids).tolist()
    )


@pytest.mark.parametrize("coupled", [True, False])
def test_a_block_is_sampled_at_once_or_in_turn(coupled):
    """In turn only where tokens depend on those before; else it is the same."""
    params = eagle_toys.params_of(eagle_toys.EAGLE_3)
    vocabulary = Vocabulary(**params.own["vocabulary"])
    sequences, logits = asking(8), _logits()

    @jit
    def block(sequences):
        return drafting.sample_block(vocabulary, sequences, logits, coupled=coupled)

    @jit
    def one(sequences, context, node):
        row = jax.lax.dynamic_slice_in_dim(logits, node, 1, axis=1)
        nodes = sampling.chain_nodes(context, node)
        return drafting.sample(vocabulary, sequences, nodes, row, coupled=coupled)

    plain = sequences.replace(
        sampling=toy.sampling.make_sampling_params(
            8, temperature=sequences.sampling.temperature.tolist(), num_bias_slots=1
        )
    )
    for asked in (sequences, plain):
        tokens, log_probs = block(asked)
        context = np.zeros((8, 5), np.int32)
        context[:, 0] = asked.anchor
        for node in range(4):
            token, expected = one(asked, jnp.asarray(context), jnp.int32(node))
            context[:, node + 1] = np.asarray(token)[:, 0]
            if not coupled:
                theirs = np.asarray(expected)[:, 0]
                np.testing.assert_allclose(
                    np.asarray(log_probs)[:, node], theirs, rtol=0, atol=1e-5
                )
        np.testing.assert_array_equal(tokens, context[:, 1:])
        assert (log_probs is None) == coupled


def test_rejection_knows_what_it_drew_from():
    """B05: every token has mass under the very distribution that is returned."""
    _, build, params = eagle_toys.methods()["eagle3"]
    drafter = build(coupled=False)
    _, draft = jit(drafter.propose)(params, extended(8), asking(8))
    log_probs, tokens = np.asarray(draft.log_probs), np.asarray(draft.tokens)
    assert log_probs.shape == (8, eagle_toys.LENGTH, toy.VOCAB)
    np.testing.assert_allclose(np.exp(log_probs).sum(-1), 1.0, rtol=0, atol=1e-5)
    drawn = np.take_along_axis(log_probs, tokens[..., None], -1)[..., 0]
    assert np.all(np.isfinite(drawn))
    greedy = np.asarray(asking(8).sampling.temperature) == 0
    np.testing.assert_array_equal(drawn[greedy], 0.0)
    known = np.zeros(toy.VOCAB, bool)
    known[np.asarray(params.own["vocabulary"]["target_ids"])] = True
    assert np.all(np.isneginf(log_probs[..., ~known]))
