"""Mixtures of experts: routing, dispatch in blocks, strangers, and no large arrays."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxdec.models.config import MoeConfig
from jaxdec.models.decoder import abstract_params, make_model
from jaxdec.models.moe import BLOCK_ROWS, apply_experts, block_rows, route

NUM_EXPERTS, WIDTH = 6, 8


def moe(**changes):
    config = MoeConfig(
        num_experts=NUM_EXPERTS,
        num_experts_per_token=3,
        intermediate_size=16,
        norm_topk_prob=True,
        layers=(0, 1),
    )
    return dataclasses.replace(config, **changes)


def test_routing():
    logits = np.asarray([[0.0, 2.0, 1.0, -1.0, 3.0, 0.5]], np.float32)
    odds = np.exp(logits) / np.exp(logits).sum()
    chosen, weights = route(jnp.asarray(logits), moe(norm_topk_prob=False))
    np.testing.assert_array_equal(chosen, [[4, 1, 2]])
    np.testing.assert_allclose(weights, odds[:, [4, 1, 2]], rtol=1e-6)
    _, normed = route(jnp.asarray(logits), moe())
    np.testing.assert_allclose(np.sum(normed), 1, rtol=1e-6)
    np.testing.assert_allclose(normed / normed[:, :1], weights / weights[:, :1], 1e-6)


MATRICES = np.random.default_rng(0).normal(size=(NUM_EXPERTS, WIDTH, WIDTH))


@functools.cache
def program(num_rows):
    matrices = jnp.asarray(MATRICES, jnp.float32)

    def expert(rows, e):
        return jnp.tanh(rows @ matrices[e])

    def run(x, chosen, weights):
        return apply_experts(
            x,
            chosen,
            weights,
            NUM_EXPERTS,
            lambda rows, e: jnp.tanh(rows @ matrices[e]),
        )

    return jax.jit(run, compiler_options=toy.FAST)


def case(num_rows, routing):
    rng = np.random.default_rng(num_rows)
    x = rng.normal(size=(num_rows, WIDTH)).astype(np.float32)
    weights = rng.random((num_rows, 2)).astype(np.float32)
    if routing == "one":
        chosen = np.tile([4, 1], (num_rows, 1))
    else:
        chosen = np.stack([rng.permutation(NUM_EXPERTS)[:2] for _ in range(num_rows)])
    return x, chosen.astype(np.int32), weights


@pytest.mark.parametrize("routing", ["any", "one"])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_equals_all_experts_masked(num_rows, routing):
    """Few rows and many, spread over the experts and crowded on two of them."""
    x, chosen, weights = case(num_rows, routing)
    every = np.tanh(np.einsum("re,xef->rxf", x, MATRICES))
    expected = np.einsum(
        "rkf,rk->rf", np.take_along_axis(every, chosen[:, :, None], 1), weights
    )
    found = program(num_rows)(x, chosen, weights)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_rows_are_strangers():
    """Bit for bit alone and in company, and beside a row of NaN."""
    x, chosen, weights = case(3, "one")
    alone = [
        np.asarray(program(1)(x[i : i + 1], chosen[i : i + 1], weights[i : i + 1]))[0]
        for i in range(3)
    ]
    np.testing.assert_array_equal(program(3)(x, chosen, weights), np.stack(alone))
    x[1] = np.nan
    found = np.asarray(program(3)(x, chosen, weights))
    np.testing.assert_array_equal(found[[0, 2]], np.stack(alone)[[0, 2]])
    assert np.isnan(found[1]).all()


def test_blocks_grow_with_the_tokens_of_an_expert():
    assert block_rows(8 * 7, 128) == block_rows(512, 128) == BLOCK_ROWS
    assert block_rows(4096, 128) == 32 and block_rows(10**9, 128) == 128


def test_no_copy_of_all_experts():
    """Neither in another number format, nor one per token; not even in a loop."""
    config = dataclasses.replace(
        toy.TINY_CONFIG, moe=moe(num_experts=32, intermediate_size=512)
    )
    params = abstract_params(config, "bfloat16")
    model = make_model(config, dtype="bfloat16")

    def loop(params, cache, tokens):
        def body(i, cache):
            cache, _ = model.forward(params, cache, tokens, cache.length[:, None], None)
            return cache.commit(None, jnp.ones_like(cache.length))

        return jax.lax.fori_loop(jnp.int32(0), jnp.int32(5), body, cache)

    cache = jax.eval_shape(lambda: model.init_cache(2, 64))
    tokens = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    compiled = jax.jit(loop, donate_argnums=(1,)).lower(params, cache, tokens).compile()
    experts = params["layers"][0]["mlp"]["down"]
    assert experts.dtype == jnp.bfloat16
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * experts.size / 4
