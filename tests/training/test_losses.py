"""Losses a chunk at a time equal the plain formulas, and so do their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdec.models.layers import matmul, outer_sum
from jaxdec.training.block import BlockWeights, _row_loss
from jaxdec.training.losses import head_loss, probabilities, soft_cross_entropy

G, S, R, E, W = 3, 2, 4, 5, 7


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return {
        "hidden": normal(G, S, R, E),
        "code": normal(G, S, R, 2),
        "head": normal(W, E),
        "out": normal(W, 2),
        "law": probabilities(normal(G, R, W)),
        "weight": jnp.asarray(rng.uniform(size=(G, S, R)), jnp.float32),
        "label": jnp.asarray(rng.integers(0, W + 1, (G, S, R)), jnp.int32),
    }


def chunked(row_loss, arrays, hidden, code, head, out):
    return head_loss(
        row_loss,
        lambda law: law,
        [hidden, code],
        [head, out],
        arrays["law"],
        (arrays["weight"], arrays["label"]),
        [False, True],
    )


WEIGHTS = BlockWeights(soft=0.3, hard=0.2, distance=0.7)


def plain(arrays, hidden, code, head, out):
    """The same with optax and autodiff, all at once."""
    logits = jnp.einsum("gsre,we->gsrw", hidden, head)
    logits = logits + jnp.einsum("gsre,we->gsrw", code, out)
    law = arrays["law"][:, None]
    law = jnp.broadcast_to(law, logits.shape)
    guess = jax.nn.softmax(logits, axis=-1)
    soft = optax.softmax_cross_entropy(logits, law)
    label = jnp.minimum(arrays["label"], W - 1)
    hard = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    distance = jnp.sum(jnp.abs(guess - law), axis=-1)
    loss = WEIGHTS.soft * soft + WEIGHTS.hard * hard + WEIGHTS.distance * distance
    return jnp.sum(arrays["weight"] * loss), (logits, distance)


def test_all_parts_equal_autodiff(arrays):
    parts = [arrays[name] for name in ("hidden", "code", "head", "out")]

    def ours(hidden, code, head, out):
        return chunked(
            lambda logits, law, own, _: _row_loss(logits, law, *own, WEIGHTS),
            arrays,
            hidden,
            code,
            head,
            out,
        )

    which = (0, 1, 3)
    (got, (right, distance)), gradients = jax.value_and_grad(ours, which, True)(*parts)
    (expected, (logits, far)), wanted = jax.value_and_grad(
        lambda *x: plain(arrays, *x), which, True
    )(*parts)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    np.testing.assert_allclose(distance, far, rtol=1e-5)
    for ours_, theirs in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(ours_, theirs, rtol=1e-4, atol=1e-5)
    label = np.asarray(arrays["label"])
    is_right = (np.argmax(logits, axis=-1) == label) & (label < W)
    np.testing.assert_array_equal(right, is_right)
    assert is_right.any() and not is_right.all()


def test_soft_cross_entropy_is_the_first_part(arrays):
    logits = jnp.einsum("re,we->rw", arrays["hidden"][0, 0], arrays["head"])
    rows = (arrays["law"][0], arrays["weight"][0, 0], arrays["label"][0, 0])
    found = soft_cross_entropy(logits, *rows)
    other = _row_loss(logits, *rows, BlockWeights(soft=1.0))
    np.testing.assert_allclose(found.loss, other.loss, rtol=1e-5)
    np.testing.assert_allclose(found.gradient, other.gradient, atol=1e-6)
    np.testing.assert_array_equal(found.extra, other.extra[0])


@pytest.mark.parametrize("rows", [1, 5, 6])
@pytest.mark.parametrize("out_first", [True, False])
def test_a_matmul_has_the_gradient_of_its_rounded_inputs(rows, out_first):
    rng = np.random.default_rng(rows)

    def rounded(*shape):
        x = jnp.asarray(rng.normal(size=shape), jnp.float32)
        return x.astype(jnp.bfloat16).astype(jnp.float32)

    x, weight, side = rounded(rows, 4), rounded(3, 4), rounded(rows, 3)
    weight = weight if out_first else weight.T

    def loss(x, weight):
        return jnp.sum(matmul(x, weight, out_first=out_first) * side)

    half = jax.grad(loss, (0, 1))(x, weight.astype(jnp.bfloat16))
    full = jax.grad(loss, (0, 1))(x, weight)
    assert half[0].dtype == jnp.float32 and half[1].dtype == jnp.bfloat16
    np.testing.assert_allclose(half[0], full[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(
        half[1].astype(jnp.float32), full[1], rtol=8e-3, atol=1e-6
    )


def test_an_outer_sum_is_a_product():
    a = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.bfloat16)
    b = jnp.asarray(np.random.default_rng(1).normal(size=(6, 4)), jnp.bfloat16)
    expected = np.asarray(a, np.float32).T @ np.asarray(b, np.float32)
    np.testing.assert_allclose(outer_sum(a, b), expected, rtol=1e-5)
