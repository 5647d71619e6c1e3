"""MTP drafters: the contract for every layout, and what is theirs alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import mtp_toys
import numpy as np
import pytest
import test_contract as contract
import toy
from mtp_toys import CONFIGS, ROWS, Reference, methods, mtp_config, weights

from jaxdec.drafters.mtp import mtp
from jaxdec.models.config import ModelConfig
from jaxdec.models.decoder import init_params, make_model
from jaxdec.models.mtp import (
    expected_mtp_tensors,
    init_mtp_params,
    make_mtp,
    mtp_params_from_tensors,
)
from jaxdec.types import Commit, DrafterParams

mtp_toys.register()

each = pytest.mark.parametrize("name", ROWS)
whole = pytest.mark.parametrize("name", ["mtp_three"])


# ---- The contract --------------------------------------------------------------------


@each
def test_greedy_parity(name):
    contract.test_greedy_parity(name)


@each
def test_sample_parity(name):
    contract.test_sample_parity(name)


@each
def test_one_shape_one_trace(name):
    contract.test_one_shape_one_trace(name)


@each
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


@each
def test_one_behind(name):
    """I1, B23: every module's cache is that of a teacher-forced pass over what was
    committed, after any number of accepted drafts."""
    made = methods()[name.removesuffix("_rejection")]
    reference = Reference(made.config, made.params)
    built = toy.method(name)
    state = built.prefill(built.params, contract.hot())
    for steps in (1, 1, 3):
        state, _, _ = built.generate(built.params, state, jnp.int32(steps))
    toy.assert_one_behind(built, state)
    _, output = toy.full_forward(state.sequences.tokens, toy.tiny(taps=made.taps))
    features = np.asarray(output.features)
    length = np.asarray(state.sequences.length)
    np.testing.assert_array_equal(state.drafter.cache.length, length - 1)
    for row, end in enumerate(length):
        tokens = np.asarray(state.sequences.tokens)[row, :end]
        assert_cache(state.drafter.cache, row, reference, tokens, features[row])


def assert_cache(cache, row, reference, tokens, hidden):
    """Live rows of every module in use against the reference."""
    num = len(cache.keys)
    for k, found in enumerate(reference.caches(tokens, hidden)[:num]):
        for ours, theirs in zip((cache.keys[k], cache.values[k]), found, strict=True):
            ours = np.asarray(ours)[row, :, : len(theirs)].transpose(1, 0, 2)
            np.testing.assert_allclose(ours, theirs, atol=2e-5, rtol=1e-5)


# ---- Against the slow reference ------------------------------------------------------

B, WIDE, CAPACITY = 4, 8, 256


@pytest.mark.parametrize("name", ["mtp_own", "mtp_turns", "mtp_few"])
def test_drafts_and_caches_after_any_commits(name):
    """B33: rows pair h_i with x_{i+1+k}, the first row as well as the others.

    Prompts of 1, 2, 5 and 8 tokens, then commits of random lengths, 0 among them; rows
    that held drafts are made again from what was committed instead.
    """
    made = methods()[name]
    drafter = made.drafter(coupled=False)

    @functools.partial(jax.jit, compiler_options=toy.FAST)
    def advance(params, state, commit, sequences):
        state = drafter.extend(params, state, commit)
        return state, drafter.propose(params, state, sequences)[1]

    reference = Reference(made.config, made.params)
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, toy.VOCAB, (B, 60)).astype(np.int32)
    hidden = rng.normal(size=(B, 60, 64)).astype(np.float32)
    state = drafter.init(B, CAPACITY)
    length = np.zeros(B, np.int32)  # Tokens that the target has read.
    commits = [np.array([0, 1, 4, 7])]
    commits += [rng.integers(0, made.length + 2, B) for _ in range(4)]
    for num in commits:
        index = length[:, None] + np.arange(WIDE + 1)
        commit = Commit(
            tokens=jnp.asarray(np.take_along_axis(tokens, index, axis=1)),
            features=jnp.asarray(
                np.take_along_axis(hidden, index[:, :WIDE, None], axis=1)
            ),
            length=jnp.asarray(num, jnp.int32),
        )
        length = (length + num).astype(np.int32)
        request = toy.make_request([[1]] * B, temperature=1.0, max_new=100)
        sequences = toy.sequences_with(request, tokens, length + 1)
        state, draft = advance(made.params, state, commit, sequences)
        np.testing.assert_array_equal(state.cache.length, length)
        can = length > 0
        np.testing.assert_array_equal(draft.length, np.where(can, made.length, 0))
        for row in np.flatnonzero(can):
            known = tokens[row, : length[row] + 1]
            before = hidden[row, : length[row]]
            assert_cache(state.cache, row, reference, known, before)
            drafted = np.asarray(draft.tokens[row])
            logits = reference.logits(known, before, drafted)
            theirs = jax.nn.log_softmax(logits, axis=-1)
            np.testing.assert_allclose(draft.log_probs[row], theirs, atol=2e-4)


def test_no_switch_is_silent():
    """What cannot be seen in the shapes changes the numbers."""
    config = mtp_config()
    assert config.taps == (toy.TINY_CONFIG.num_layers + 1,)
    assert dataclasses.replace(config, hidden_source="pre").taps == (2,)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, toy.VOCAB, (1, 6)), jnp.int32)
    pre = rng.normal(size=(1, 6, 64)).astype(np.float32)
    gain = 1 + 0.5 * rng.normal(size=64).astype(np.float32)
    post = pre / np.sqrt(np.mean(np.square(pre), -1, keepdims=True)) * gain

    @functools.partial(jax.jit, static_argnums=0, compiler_options=toy.FAST)
    def logits(config, own, hidden):
        network = make_mtp(config)
        params = DrafterParams(own=own, shared=toy.tiny_params())
        first = network.forward(params, 0, hidden, tokens)
        second = network.forward(params, 0, first, tokens)
        return network.logits(params, 0, second)

    own = weights(config)
    module = own["modules"][0]
    halves = jnp.split(module["project"]["weight"], 2, axis=0)
    swapped = {"weight": jnp.concatenate(halves[::-1], axis=0)}
    pre_recycled = dataclasses.replace(config, recycle="pre")
    usual = logits(config, own, post)
    for changed in (
        logits(config, own, pre),
        logits(pre_recycled, own, post),
        logits(config, {"modules": {0: module | {"project": swapped}}}, post),
    ):
        assert np.max(np.abs(usual - changed)) > 0.05


# ---- A module that knows the target's table: fully accepted --------------------------

V = 8
TABLE = ModelConfig(
    family="llama",
    vocab_size=V,
    hidden_size=V,
    intermediate_size=V,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=V,
    max_positions=1024,
)


def table_target():
    """A decoder whose logits are the row of a table that belongs to the last token."""
    params = init_params(TABLE, jax.random.key(0))
    table = jax.random.normal(jax.random.key(1), (V, V)) * 2
    params["embedding"] = jnp.eye(V)
    params["head"]["weight"] = table.T * V**-0.5
    layer = params["layers"][0]
    for linear in (layer["attention"]["out"], layer["mlp"]["down"]):
        linear["weight"] = jnp.zeros_like(linear["weight"])
    return params


def table_modules(config):
    """Modules that look at the token and at nothing else."""
    own = init_mtp_params(config, jax.random.key(2))
    for module in own["modules"].values():
        module["project"]["weight"] = jnp.eye(2 * V, V)
        block = module["block"]
        for linear in (block["attention"]["out"], block["mlp"]["down"]):
            linear["weight"] = jnp.zeros_like(linear["weight"])
    return own


def test_oracle():
    """B33: modules that copy the target's table are right at every place, also where
    the first drafts again after the last."""
    num_modules, length = 2, 4
    target = table_target()
    config = mtp_config(TABLE, num_modules, num_target_layers=1)
    drafter = mtp(make_mtp(config), length)
    built = toy.compiled(
        make_model(TABLE, taps=drafter.taps),
        drafter,
        target=target,
        own=table_modules(config),
        shared=target,
    )
    for temperature in (0.0, 0.7):
        request = toy.make_request(
            [[3], [5, 1], [2, 7, 4, 1, 0]],
            max_new=2 * (length + 1) + 1,
            temperature=temperature,
        )
        _, info, steps = toy.run(built, request)
        np.testing.assert_array_equal(info.num_accepted, info.num_judged)
        # A prompt of one token has no hidden state yet, and drafts nothing at first.
        assert np.asarray(info.num_drafted)[:, 0].tolist() == [0, length, length]
        assert int(steps) == 3


# ---- Bad input, and arrays -----------------------------------------------------------


def test_lengths_that_modules_cannot_share():
    network = make_mtp(mtp_config(num_modules=3))
    for length in (4, 5, 7):
        with pytest.raises(ValueError, match="give 1 to 3, or a multiple of 3"):
            mtp(network, length)
    with pytest.raises(ValueError, match="give at least 1"):
        mtp(network, 0)
    assert [mtp(network, k).max_length for k in (1, 2, 3, 6)] == [1, 2, 3, 6]
    # Modules that would draft nothing are not run.
    assert len(mtp(network, 2).init(1, 16).cache.keys) == 2


def test_params_from_tensors_are_the_arrays_of_the_network():
    for config, _ in CONFIGS.values():
        rng = np.random.default_rng(0)
        tensors = {
            name: rng.normal(size=shape).astype(np.float32)
            for name, shape in expected_mtp_tensors(config).items()
        }
        for dtype in ("float32", "bfloat16"):
            ours = mtp_params_from_tensors(config, tensors, dtype)
            theirs = jax.eval_shape(
                lambda config=config, dtype=dtype: init_mtp_params(
                    config, jax.random.key(0), dtype
                )
            )
            assert jax.tree.structure(ours) == jax.tree.structure(theirs)
            for x, y in zip(
                jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True
            ):
                assert (x.shape, x.dtype) == (y.shape, y.dtype)


def test_a_module_can_be_trained():
    """Gradients of the teacher-forced loss reach every array of every module."""
    config = mtp_config(num_modules=2)
    network = make_mtp(config)
    own = weights(config)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, toy.VOCAB, (2, 9)), jnp.int32)
    hidden = jnp.asarray(rng.normal(size=(2, 6, 64)), jnp.float32)

    def loss(own):
        params = DrafterParams(own=own, shared=toy.tiny_params())
        total, rows = 0.0, hidden
        for k in range(2):
            rows = network.forward(params, k, rows, tokens[:, k + 1 : k + 7])
            logits = network.logits(params, k, rows)
            labels = tokens[:, k + 2 : k + 8]
            log_probs = jax.nn.log_softmax(logits)
            picked = jnp.take_along_axis(log_probs, labels[..., None], axis=-1)
            total = total - jnp.mean(picked)
        return total

    gradients = jax.jit(jax.grad(loss), compiler_options=toy.FAST)(own)
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.all(np.isfinite(gradient)), path
        assert np.any(np.asarray(gradient) != 0), path
