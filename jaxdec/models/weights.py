"""From tensors with published names to a decoder's arrays, and back.

Loaders give every checkpoint in the Hugging Face names and ``[out, in]`` shapes; here
the projections that read one input are joined and laid out for the backend.
"""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from jaxdec.models.config import ModelConfig
from jaxdec.models.decoder import prefers_out_first
from jaxdec.types import Params


class TensorReader:
    """Turns published tensors into arrays on the default device.

    Args:
        tensors: by published name; matrices as ``[out, in]``.
        dtype: of matrices and embeddings; norms and biases stay float32.
    """

    def __init__(self, tensors: Mapping[str, np.ndarray], dtype: str):
        self._tensors = tensors
        self._dtype = jnp.dtype(dtype)
        self._out_first = prefers_out_first(dtype)

    def _get(self, names):
        parts = [np.asarray(self._tensors[name]) for name in names]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=0)

    def array(self, name: str):
        """A tensor as it is, in the dtype of the weights."""
        return self._array(self._get([name]), self._dtype)

    def linear(self, *names: str, bias: bool = False) -> Params:
        """Matrices that read one input, one below the other, as a `Linear`."""
        weight = self._get([f"{name}.weight" for name in names])
        weight = weight if self._out_first else weight.T
        tree = {"weight": self._array(weight, self._dtype)}
        if bias:
            tree["bias"] = self._vector([f"{name}.bias" for name in names])
        return tree

    def norm(self, name: str, *, bias: bool = False) -> Params:
        """The gains of a `Norm`, and its bias."""
        tree = {"scale": self._vector([f"{name}.weight"])}
        if bias:
            tree["bias"] = self._vector([f"{name}.bias"])
        return tree

    def _vector(self, names):
        return self._array(self._get(names), np.float32)

    @staticmethod
    def _array(value, kind):
        return jnp.asarray(np.ascontiguousarray(value).astype(kind))


def params_from_tensors(
    config: ModelConfig, tensors: Mapping[str, np.ndarray], dtype: str = "float32"
) -> Params:
    """The arrays of a decoder, on the default device.

    Args:
        config: the architecture; the tensors must fit it (the loader has checked).
        tensors: by published name; norm gains as stored in Hugging Face files.
        dtype: of matrices and embeddings; norms and biases stay float32.
    """
    read = TensorReader(tensors, dtype)
    layers = {
        i: block_params(config, i, f"model.layers.{i}", read)
        for i in range(config.num_layers)
    }
    params = {
        "embedding": read.array("model.embed_tokens.weight"),
        "layers": layers,
        "norm": read.norm("model.norm", bias=config.norm == "layer"),
    }
    if not config.tie_embeddings:
        params["head"] = {"weight": read.array("lm_head.weight")}
    return params


def block_params(
    config: ModelConfig, index: int, prefix: str, read: TensorReader
) -> Params:
    """The arrays of layer `index`, from tensors whose names start with `prefix`."""
    attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    up = [f"{mlp}.gate_proj", f"{mlp}.up_proj"] if config.gated_mlp else []

    def norm(name):
        return read.norm(f"{prefix}.{name}", bias=config.norm == "layer")

    tree = {
        "attention": {
            "qkv": read.linear(
                f"{attn}.q_proj",
                f"{attn}.k_proj",
                f"{attn}.v_proj",
                bias=config.qkv_bias,
            ),
            "out": read.linear(f"{attn}.o_proj", bias=config.output_bias),
        },
        "mlp": {
            "up": read.linear(*(up or [f"{mlp}.up_proj"]), bias=config.mlp_bias),
            "down": read.linear(f"{mlp}.down_proj", bias=config.mlp_bias),
        },
        "attention_norm": norm("input_layernorm"),
    }
    if config.attention_gate:
        tree["attention"]["gate"] = read.linear(f"{attn}.gate", bias=config.qkv_bias)
    if config.qk_norm:
        tree["attention"]["query_norm"] = read.norm(f"{attn}.q_norm")
        tree["attention"]["key_norm"] = read.norm(f"{attn}.k_norm")
    if config.sandwich_norms:
        tree["attention_out_norm"] = norm("post_attention_layernorm")
        tree["mlp_norm"] = norm("pre_feedforward_layernorm")
        tree["mlp_out_norm"] = norm("post_feedforward_layernorm")
    else:
        tree["mlp_norm"] = norm("post_attention_layernorm")
    return tree


def block_shapes(
    config: ModelConfig, index: int, prefix: str
) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor that `block_params` reads."""
    width = config.hidden_size
    query = config.num_heads * config.head_dim
    key = config.num_kv_heads * config.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name, rows, columns, bias=False):
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.sandwich_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for norm in norms:
        shapes[f"{prefix}.{norm}.weight"] = (width,)
    linear(f"{attention}.q_proj", query, width, config.qkv_bias)
    linear(f"{attention}.k_proj", key, width, config.qkv_bias)
    linear(f"{attention}.v_proj", key, width, config.qkv_bias)
    linear(f"{attention}.o_proj", width, query, config.output_bias)
    if config.attention_gate:
        linear(f"{attention}.gate", query, width, config.qkv_bias)
    if config.qk_norm:
        shapes[f"{attention}.q_norm.weight"] = (config.head_dim,)
        shapes[f"{attention}.k_norm.weight"] = (config.head_dim,)
    moe = config.moe
    if moe is not None and index in moe.layers:
        linear(f"{mlp}.gate", moe.num_experts, width)
        blocks = [f"{mlp}.experts.{e}" for e in range(moe.num_experts)]
        rows = moe.intermediate_size
    else:
        blocks, rows = [mlp], config.intermediate_size
    for block in blocks:
        linear(f"{block}.gate_proj", rows, width, config.mlp_bias)
        linear(f"{block}.up_proj", rows, width, config.mlp_bias)
        linear(f"{block}.down_proj", width, rows, config.mlp_bias)
    return shapes
