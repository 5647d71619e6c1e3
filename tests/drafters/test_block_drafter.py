"""Block drafters: the contract for every layout, and what is theirs alone."""

import block_toys
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_contract as contract
import toy
from block_toys import CONFIGS, ROWS, WHOLE

from jaxdec.models.block import make_block_net

block_toys.register()

each = pytest.mark.parametrize("name", ROWS)
whole = pytest.mark.parametrize("name", WHOLE)


# ---- The contract --------------------------------------------------------------------


@each
def test_greedy_parity(name):
    contract.test_greedy_parity(name)


@pytest.mark.parametrize("name", CONFIGS)
def test_sample_parity(name):
    contract.test_sample_parity(name)


@each
def test_one_shape_one_trace(name):
    contract.test_one_shape_one_trace(name)


@each
def test_one_behind(name):
    """I1: the context is that of a fresh reading, made row by row or all at once."""
    config = CONFIGS[name.removesuffix("_rejection")]
    built = toy.method(name)
    state = built.prefill(built.params, contract.hot())
    for steps in (1, 1, 3):
        toy.assert_one_behind(built, state)
        _assert_context_is_fresh(config, built, state)
        state, _, _ = built.generate(built.params, state, jnp.int32(steps))
    toy.assert_one_behind(built, state)
    _assert_context_is_fresh(config, built, state)


def _assert_context_is_fresh(config, built, state):
    length = np.asarray(state.sequences.length) - 1
    cache = state.drafter.cache
    np.testing.assert_array_equal(cache.length, length)
    model = toy.tiny(taps=config.taps)
    _, output = toy.full_forward(state.sequences.tokens, model)
    fresh = _fresh_context(config)(built.params.drafter, output.features)
    toy.assert_live_equal(cache, fresh, length)


_CONTEXTS = {}


def _fresh_context(config):
    if config not in _CONTEXTS:
        net = make_block_net(config)

        def context(params, features):
            cache = net.init_cache(features.shape[0], features.shape[1])
            return net.write(params, cache, net.fuse(params, features))

        _CONTEXTS[config] = jax.jit(context, compiler_options=toy.FAST)
    return _CONTEXTS[config]


@whole
@pytest.mark.parametrize("value", [np.nan, 1e4])
def test_poison(name, value):
    contract.test_poison(name, value)


@whole
def test_strangers_of_other_slots_and_neighbours(name):
    contract.test_strangers_of_other_slots_and_neighbours(name)


@whole
def test_late_arrival(name):
    contract.test_late_arrival(name)


@whole
def test_nothing_spent(name):
    contract.test_nothing_spent(name)


@whole
@pytest.mark.parametrize("is_hot", [False, True])
def test_progress(name, is_hot):
    contract.test_progress(name, is_hot)


@whole
def test_finish(name):
    contract.test_finish(name)
