"""The layers of a decoder as Flax modules: norm, linear, MLP, attention, block.

Activations are float32 throughout; a matmul rounds its input to the weights' dtype and
accumulates in float32, which is both more exact than bf16 activations and, on CPU,
several times faster than a bf16 result; so do the matmuls of its gradient. Projections
that read the same input are one matrix (q, k, v; gate, up).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxdec.cache import write_tail
from jaxdec.models.attention import (
    attend,
    attend_all,
    attend_beside,
    attend_in_order,
)
from jaxdec.models.config import ModelConfig
from jaxdec.models.moe import apply_experts, route
from jaxdec.models.rope import rotate

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "relu": jax.nn.relu,
}


def matmul(x: Float[Array, "... I"], weight: Array, *, out_first: bool) -> Array:
    """``x @ weight`` with a float32 result; `out_first` says weight is [out, in].

    As one matrix of rows: XLA on CPU takes 1.7 times as long for ``[1, 3, I]`` as for
    ``[3, I]``, though the arithmetic is the same; and a single bf16 row takes 15 times
    as long as two, so it is doubled.
    """
    shape = x.shape
    x = x.reshape(-1, shape[-1])
    num = x.shape[0]
    if num == 1 and weight.dtype == jnp.bfloat16:
        x = jnp.concatenate([x, x])
    rows = _product(x, weight, out_first)
    return rows[:num].reshape(*shape[:-1], rows.shape[-1])


def _dot(a, b, over_a, over_b):
    """A product with a float32 result, whatever the operands are."""
    contracted = ((over_a, over_b), ((), ()))
    return jax.lax.dot_general(a, b, contracted, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x, weight, out_first):
    return _dot(x.astype(weight.dtype), weight, (1,), (1 if out_first else 0,))


def _product_fwd(x, weight, out_first):
    x = x.astype(weight.dtype)
    return _dot(x, weight, (1,), (1 if out_first else 0,)), (x, weight)


def _product_bwd(out_first, kept, gradient):
    """The gradient's matmuls in the dtype of the weights too, summed in float32."""
    x, weight = kept
    # With the barrier it is computed once, and not again for each matmul.
    gradient = jax.lax.optimization_barrier(gradient.astype(weight.dtype))
    of_x = _dot(gradient, weight, (1,), (0 if out_first else 1,))
    of_weight = outer_sum(*((gradient, x) if out_first else (x, gradient)))
    return of_x, of_weight.astype(weight.dtype)


_product.defvjp(_product_fwd, _product_bwd)


def outer_sum(a: Float[Array, "R I"], b: Float[Array, "R O"]) -> Float[Array, "I O"]:
    """``a.T @ b``, the sum of the rows' outer products, in float32.

    XLA on CPU runs a bf16 product over the first axis of both in float32, three times
    slower, unless it is over two axes. The barrier keeps a transpose of the result from
    becoming part of that product, which then could not run at all.
    """
    if a.dtype != jnp.bfloat16 or a.shape[0] % 2:
        return _dot(a, b, (0,), (0,))
    a, b = (x.reshape(2, -1, x.shape[1]) for x in (a, b))
    return jax.lax.optimization_barrier(_dot(a, b, (0, 1), (0, 1)))


def take_rows(table: Float[Array, "V E"], index: Int[Array, "*axes"]) -> Array:
    """Rows of a table, as float32; an index out of range takes the nearest.

    XLA on CPU reads a row of bfloat16 as float32, and inside of a loop it would convert
    the whole table first, once, and keep the copy. With the barrier it cannot know
    before the loop that the table is the same in every round, and converts the rows.
    """
    table, index = jax.lax.optimization_barrier((table, index))
    return jnp.take(table, index, axis=0, mode="clip").astype(jnp.float32)


class Linear(nnx.Module):
    """A matrix, stored the way the backend multiplies by it fastest."""

    def __init__(self, num_in, num_out, *, bias, dtype, out_first, rngs):
        self.out_first = out_first
        shape = (num_out, num_in) if out_first else (num_in, num_out)
        scale = num_in**-0.5
        weight = jax.random.normal(rngs.params(), shape, jnp.float32) * scale
        self.weight = nnx.Param(weight.astype(dtype))
        self.bias = nnx.Param(jnp.zeros((num_out,), jnp.float32)) if bias else None

    def __call__(self, x):
        y = matmul(x, self.weight[...], out_first=self.out_first)
        if self.bias is not None:
            y = y + self.bias[...].reshape((1,) * (y.ndim - 1) + (-1,))
        return y


class Norm(nnx.Module):
    """RMSNorm, or LayerNorm with bias; float32. Gains are stored effective (1 + w)."""

    def __init__(self, width, *, eps, kind="rms"):
        self.eps = eps
        self.kind = kind
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((width,))) if kind == "layer" else None

    def __call__(self, x):
        ones = (1,) * (x.ndim - 1) + (-1,)
        if self.kind == "layer":
            x = x - jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(variance + self.eps) * self.scale[...].reshape(ones)
        return x if self.bias is None else x + self.bias[...].reshape(ones)


class Mlp(nnx.Module):
    """Gated (``down(act(gate x) * up x)``) or plain two-layer MLP."""

    def __init__(self, config: ModelConfig, *, dtype, out_first, rngs):
        width, inner = config.hidden_size, config.intermediate_size
        self.gated = config.gated_mlp
        self.activation = config.activation
        fan_out = 2 * inner if self.gated else inner
        kw = dict(bias=config.mlp_bias, dtype=dtype, out_first=out_first, rngs=rngs)
        self.up = Linear(width, fan_out, **kw)
        self.down = Linear(inner, width, **kw)

    def __call__(self, x):
        act = ACTIVATIONS[self.activation]
        y = self.up(x)
        if self.gated:
            gate, up = jnp.split(y, 2, axis=-1)
            return self.down(act(gate) * up)
        return self.down(act(y))


class Mixture(nnx.Module):
    """A mixture of gated MLPs, of which a router chooses a few for every token."""

    def __init__(self, config: ModelConfig, *, dtype, out_first, rngs):
        moe, width = config.moe, config.hidden_size
        self.config = moe
        self.activation = config.activation
        self.out_first = out_first
        kw = dict(dtype=dtype, out_first=out_first, rngs=rngs)
        self.router = Linear(width, moe.num_experts, bias=False, **kw)

        def matrices(num_in, num_out):
            shape = (num_out, num_in) if out_first else (num_in, num_out)
            shape = (moe.num_experts, *shape)
            weight = jax.random.normal(rngs.params(), shape, jnp.float32)
            return nnx.Param((weight * num_in**-0.5).astype(dtype))

        self.up = matrices(width, 2 * moe.intermediate_size)
        self.down = matrices(moe.intermediate_size, width)

    def __call__(self, x):
        act = ACTIVATIONS[self.activation]

        def of_expert(weights, expert):
            # XLA on CPU slices bfloat16 as float32, and would convert all experts once
            # before the loop: with the barrier it converts the slice.
            every, expert = jax.lax.optimization_barrier((weights[...], expert))
            return jax.lax.dynamic_index_in_dim(every, expert, keepdims=False)

        def expert_fn(rows, expert):
            y = matmul(rows, of_expert(self.up, expert), out_first=self.out_first)
            gate, up = jnp.split(y, 2, axis=-1)
            down = of_expert(self.down, expert)
            return matmul(act(gate) * up, down, out_first=self.out_first)

        rows = x.reshape(-1, x.shape[-1])
        chosen, weights = route(self.router(rows), self.config)
        num_experts = self.config.num_experts
        return apply_experts(rows, chosen, weights, num_experts, expert_fn).reshape(
            x.shape
        )


class Attention(nnx.Module):
    """Grouped-query attention over one layer's cache.

    A call writes the new entries into the cache, then attends; `read` attends without
    writing, and `read_all` has no cache. `num_in` is the input's width where it is not
    the model's.
    """

    def __init__(
        self, config: ModelConfig, layer: int, *, dtype, out_first, rngs, num_in=None
    ):
        heads, groups, width = config.num_heads, config.num_kv_heads, config.head_dim
        self.shape = (heads, groups, width)
        scale = config.attention_scale
        self.scale = float(width**-0.5 if scale is None else scale)
        if config.is_scaled_by_layer:
            self.scale /= layer + 1
        self.window = config.layer_windows[layer] if config.layer_windows else None
        # Set by `make_model` for the exact mode.
        self.is_in_order = False
        kw = dict(dtype=dtype, out_first=out_first, rngs=rngs)
        fan_out = (heads + 2 * groups) * width
        num_in = config.hidden_size if num_in is None else num_in
        self.qkv = Linear(num_in, fan_out, bias=config.qkv_bias, **kw)
        self.out = Linear(
            heads * width, config.hidden_size, bias=config.output_bias, **kw
        )
        gate = dict(bias=config.qkv_bias, **kw)
        has_gate = config.attention_gate
        self.gate = Linear(num_in, heads * width, **gate) if has_gate else None
        self.query_norm = Norm(width, eps=config.norm_eps) if config.qk_norm else None
        self.key_norm = Norm(width, eps=config.norm_eps) if config.qk_norm else None

    def project(self, x, cos_sin):
        """Queries ``[B, T, H, D]``, and keys and values as a cache holds them."""
        batch, num, _ = x.shape
        heads, groups, width = self.shape
        qkv = self.qkv(x).reshape(batch, num, heads + 2 * groups, width)
        query, key = qkv[:, :, :heads], qkv[:, :, heads : heads + groups]
        if self.query_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if cos_sin is not None:
            query, key = rotate(query, cos_sin), rotate(key, cos_sin)
        value = qkv[:, :, heads + groups :]
        # 0 x NaN is NaN: a broken value would reach even tokens that may not see it.
        # As a broken key it reaches those that do, and no others.
        is_finite = jnp.all(jnp.isfinite(value), axis=-1, keepdims=True)
        key = jnp.where(is_finite, key, jnp.nan)
        value = jnp.where(is_finite, value, 0.0)
        return query, key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)

    def __call__(self, x, cos_sin, keys, values, length, position, mask):
        query, key, value = self.project(x, cos_sin)
        keys = write_tail(keys, key, length)
        values = write_tail(values, value, length)
        kw = dict(scale=self.scale, window=self.window)
        if self.is_in_order:
            y = attend_in_order(query, keys, values, length, mask, **kw)
        else:
            y = attend(query, keys, values, length, position, mask, **kw)
        return self.finish(x, y), keys, values

    def finish(self, x, attended):
        """The output projection, after the gate (if there is one)."""
        y = attended.reshape(*x.shape[:2], -1)
        if self.gate is not None:
            y = y * jax.nn.sigmoid(self.gate(x))
        return self.out(y)

    def read(self, x, cos_sin, cached, length, position, held: "Held"):
        """Attends a cache and the entries held beside it; the cache stays as it is.

        Args:
            x: ``[B, T, I]``.
            cos_sin: the rotation of the T tokens.
            cached: this layer's keys and values.
            length: live entries of the cache.
            position: ``[B, T]``.
            held: what is beside the cache; the T tokens are put into it first.

        Returns:
            ``[B, T, E]``, and the entries held, the new ones among them.
        """
        query, key, value = self.project(x, cos_sin)
        keys, values = held.put(key, value)
        y = attend_beside(
            query,
            *cached,
            length,
            position,
            keys,
            values,
            held.position,
            held.mask,
            scale=self.scale,
            window=self.window,
        )
        return self.finish(x, y), (keys, values)

    def read_all(self, x, cos_sin, place, earlier=()):
        """Whole sequences at once, from nothing; for training.

        Every product is in the dtype of the weights.

        Args:
            x: ``[B, T, I]``.
            cos_sin: the rotation of the T tokens.
            place: ``[B, T]``, where in the sequence each stands; it may attend the rows
                of the first pass up to there.
            earlier: keys and values of earlier passes. The first of them read all
                places, the later ones the same T. Of these, and of this pass, a place
                attends its own entry only.

        Returns:
            ``[B, T, E]``, and the keys and values of this pass.
        """
        query, key, value = self.project(x, cos_sin)
        dtype = self.qkv.weight.dtype
        rows = (key.astype(dtype), value.astype(dtype))
        (keys, values), *own = (*earlier, rows)
        index = jnp.arange(keys.shape[2], dtype=jnp.int32)
        distance = place[:, :, None] - index[None, None]
        mask = distance >= 0
        if self.window is not None:
            mask = mask & (distance < self.window)
        y = attend_all(query, keys, values, mask, own, scale=self.scale)
        return self.finish(x, y), rows


class Held(NamedTuple):
    """Entries beside one layer's cache, and where the tokens at hand belong in them."""

    keys: Float[Array, "B G R D"]
    values: Float[Array, "B G R D"]
    start: Int[Array, ""]
    """The T tokens at hand are entries ``start .. start + T - 1``."""
    position: Int[Array, "B R"]
    mask: Bool[Array, "B T R"]
    """Which of the R each of the T may attend."""

    def put(self, key, value):
        """The entries with those of the tokens at hand in place."""
        zero = jnp.int32(0)
        at = (zero, zero, self.start, zero)
        return (
            jax.lax.dynamic_update_slice(self.keys, key.astype(self.keys.dtype), at),
            jax.lax.dynamic_update_slice(
                self.values, value.astype(self.values.dtype), at
            ),
        )


class Block(nnx.Module):
    """Pre-norm attention and MLP; with `sandwich_norms`, their outputs normed too."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype, out_first, rngs):
        kw = dict(dtype=dtype, out_first=out_first, rngs=rngs)

        def norm():
            return Norm(config.hidden_size, eps=config.norm_eps, kind=config.norm)

        self.attention = Attention(config, layer, **kw)
        is_mixture = config.moe is not None and layer in config.moe.layers
        self.mlp = (Mixture if is_mixture else Mlp)(config, **kw)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention_out_norm = norm() if config.sandwich_norms else None
        self.mlp_out_norm = norm() if config.sandwich_norms else None

    def __call__(
        self,
        x: Float[Array, "B T E"],
        cos_sin,
        keys: Float[Array, "B G S D"],
        values: Float[Array, "B G S D"],
        length: Int[Array, "B"],
        position: Int[Array, "B T"],
        mask: Bool[Array, "B T T"] | None,
    ):
        y, keys, values = self.attention(
            self.attention_norm(x), cos_sin, keys, values, length, position, mask
        )
        return self.finish(x, y), keys, values

    def read(self, x, cos_sin, cached, length, position, held: Held):
        """The block without writing to the cache; see `Attention.read`."""
        y, held = self.attention.read(
            self.attention_norm(x), cos_sin, cached, length, position, held
        )
        return self.finish(x, y), held

    def read_all(self, x, cos_sin, place, earlier=()):
        """The block over whole sequences; see `Attention.read_all`."""
        y, rows = self.attention.read_all(
            self.attention_norm(x), cos_sin, place, earlier
        )
        return self.finish(x, y), rows

    def finish(self, x, attended):
        """Both residual sums, given what attention returned."""
        norm = self.attention_out_norm
        x = x + (attended if norm is None else norm(attended))
        y = self.mlp(self.mlp_norm(x))
        return x + (y if self.mlp_out_norm is None else self.mlp_out_norm(y))
