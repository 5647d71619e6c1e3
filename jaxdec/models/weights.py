"""From tensors with published names to a decoder's arrays, and back.

Loaders give every checkpoint under canonical names (`jaxdec.io.names`), matrices as
``[out, in]``; here the projections that read one input are joined, the experts of a
mixture are stacked, and all are laid out for the backend.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxdec.models.config import ModelConfig
from jaxdec.models.decoder import prefers_out_first
from jaxdec.types import Params


def params_from_tensors(
    config: ModelConfig, tensors: Mapping[str, np.ndarray], dtype: str = "float32"
) -> Params:
    """The arrays of a decoder, on the default device.

    Args:
        config: the architecture; the tensors must fit it (the loader has checked).
        tensors: by canonical name; gains of norms as they multiply.
        dtype: of matrices and embeddings; norms and biases stay float32.
    """
    out_first = prefers_out_first(dtype)
    weight_dtype = jnp.dtype(dtype)

    def get(*names):
        parts = [np.asarray(tensors[name]) for name in names]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=0)

    def array(value, kind=weight_dtype):
        return jnp.asarray(np.ascontiguousarray(value).astype(kind))

    def linear(*names, bias=False):
        weight = get(*(f"{name}.weight" for name in names))
        tree = {"weight": array(weight if out_first else weight.T)}
        if bias:
            value = get(*(f"{name}.bias" for name in names))
            tree["bias"] = array(value, np.float32)
        return tree

    def norm(name):
        tree = {"scale": array(get(f"{name}.weight"), np.float32)}
        if config.norm == "layer":
            tree["bias"] = array(get(f"{name}.bias"), np.float32)
        return tree

    def experts(*names):
        """Matrices of all experts; `names` has the joined ones of each."""
        stacked = np.stack([get(*(f"{n}.weight" for n in group)) for group in names])
        return array(stacked if out_first else stacked.swapaxes(1, 2))

    read = _Readers(linear=linear, norm=norm, experts=experts)
    if config.learned_positions:
        params = {
            "embedding": array(get("wte.weight")),
            "positions": array(get("wpe.weight")),
            "layers": {i: _gpt2(config, i, read) for i in range(config.num_layers)},
            "norm": norm("ln_f"),
        }
    else:
        params = {
            "embedding": array(get("model.embed_tokens.weight")),
            "layers": {i: _llama(config, i, read) for i in range(config.num_layers)},
            "norm": norm("model.norm"),
        }
    if not config.tie_embeddings:
        params["head"] = {"weight": array(get("lm_head.weight"))}
    return params


class _Readers(NamedTuple):
    """How to read a linear layer, a norm, and the matrices of all experts."""

    linear: Callable
    norm: Callable
    experts: Callable


def _gpt2(config: ModelConfig, layer: int, read: _Readers) -> dict:
    prefix = f"h.{layer}"
    return {
        "attention": {
            "qkv": read.linear(f"{prefix}.attn.c_attn", bias=config.qkv_bias),
            "out": read.linear(f"{prefix}.attn.c_proj", bias=config.output_bias),
        },
        "mlp": {
            "up": read.linear(f"{prefix}.mlp.c_fc", bias=config.mlp_bias),
            "down": read.linear(f"{prefix}.mlp.c_proj", bias=config.mlp_bias),
        },
        "attention_norm": read.norm(f"{prefix}.ln_1"),
        "mlp_norm": read.norm(f"{prefix}.ln_2"),
    }


def _llama(config: ModelConfig, layer: int, read: _Readers) -> dict:
    prefix = f"model.layers.{layer}"
    attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    linear, norm = read.linear, read.norm
    tree = {
        "attention": {
            "qkv": linear(
                f"{attn}.q_proj",
                f"{attn}.k_proj",
                f"{attn}.v_proj",
                bias=config.qkv_bias,
            ),
            "out": linear(f"{attn}.o_proj", bias=config.output_bias),
        },
        "attention_norm": norm(f"{prefix}.input_layernorm"),
    }
    if config.moe is not None and layer in config.moe.layers:
        blocks = [f"{mlp}.experts.{e}" for e in range(config.moe.num_experts)]
        tree["mlp"] = {
            "router": linear(f"{mlp}.gate"),
            "up": read.experts(*([f"{b}.gate_proj", f"{b}.up_proj"] for b in blocks)),
            "down": read.experts(*([f"{b}.down_proj"] for b in blocks)),
        }
    else:
        tree["mlp"] = {
            "up": linear(f"{mlp}.gate_proj", f"{mlp}.up_proj", bias=config.mlp_bias),
            "down": linear(f"{mlp}.down_proj", bias=config.mlp_bias),
        }
    if config.qk_norm:
        tree["attention"]["query_norm"] = norm(f"{attn}.q_norm")
        tree["attention"]["key_norm"] = norm(f"{attn}.k_norm")
    if config.sandwich_norms:
        tree["attention_out_norm"] = norm(f"{prefix}.post_attention_layernorm")
        tree["mlp_norm"] = norm(f"{prefix}.pre_feedforward_layernorm")
        tree["mlp_out_norm"] = norm(f"{prefix}.post_feedforward_layernorm")
    else:
        tree["mlp_norm"] = norm(f"{prefix}.post_attention_layernorm")
    return tree
