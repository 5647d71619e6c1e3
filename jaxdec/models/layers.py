"""The layers of a decoder as Flax modules: norm, linear, MLP, attention, block.

Activations are float32 throughout; a matmul rounds its input to the weights' dtype and
accumulates in float32, which is both more exact than bf16 activations and, on CPU,
several times faster than a bf16 result. Projections that read the same input are one
matrix (q, k, v; gate, up).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxdec.cache import write_tail
from jaxdec.models.attention import attend
from jaxdec.models.config import ModelConfig
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
    ``[3, I]``, though the arithmetic is the same.
    """
    rows = jax.lax.dot_general(
        x.reshape(-1, x.shape[-1]).astype(weight.dtype),
        weight,
        (((1,), (1 if out_first else 0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return rows.reshape(*x.shape[:-1], rows.shape[-1])


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


class Attention(nnx.Module):
    """Grouped-query attention that reads and extends one layer's cache."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype, out_first, rngs):
        heads, groups, width = config.num_heads, config.num_kv_heads, config.head_dim
        self.shape = (heads, groups, width)
        scale = config.attention_scale
        self.scale = float(width**-0.5 if scale is None else scale)
        self.window = config.layer_windows[layer] if config.layer_windows else None
        kw = dict(dtype=dtype, out_first=out_first, rngs=rngs)
        fan_out = (heads + 2 * groups) * width
        self.qkv = Linear(config.hidden_size, fan_out, bias=config.qkv_bias, **kw)
        self.out = Linear(
            heads * width, config.hidden_size, bias=config.output_bias, **kw
        )
        self.query_norm = Norm(width, eps=config.norm_eps) if config.qk_norm else None
        self.key_norm = Norm(width, eps=config.norm_eps) if config.qk_norm else None

    def __call__(self, x, cos_sin, keys, values, length, position, mask):
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
        keys = write_tail(keys, key.transpose(0, 2, 1, 3), length)
        values = write_tail(values, value.transpose(0, 2, 1, 3), length)
        y = attend(
            query,
            keys,
            values,
            length,
            position,
            mask,
            scale=self.scale,
            window=self.window,
        )
        return self.out(y.reshape(batch, num, heads * width)), keys, values


class Block(nnx.Module):
    """Pre-norm attention and MLP; with `sandwich_norms`, their outputs normed too."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype, out_first, rngs):
        kw = dict(dtype=dtype, out_first=out_first, rngs=rngs)

        def norm():
            return Norm(config.hidden_size, eps=config.norm_eps, kind=config.norm)

        self.attention = Attention(config, layer, **kw)
        self.mlp = Mlp(config, **kw)
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
        x = x + (y if self.attention_out_norm is None else self.attention_out_norm(y))
        y = self.mlp(self.mlp_norm(x))
        x = x + (y if self.mlp_out_norm is None else self.mlp_out_norm(y))
        return x, keys, values
