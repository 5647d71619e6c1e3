"""From tensors with published names to a decoder's arrays, and back.

Loaders give every checkpoint in the Hugging Face names and ``[out, in]`` shapes; here
the projections that read one input are joined and laid out for the backend.
"""

from collections.abc import Callable, Mapping

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
        tensors: by published name; norm gains as stored in Hugging Face files.
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

    layers = {
        i: _block(config, f"model.layers.{i}", linear, norm)
        for i in range(config.num_layers)
    }
    params = {
        "embedding": array(get("model.embed_tokens.weight")),
        "layers": layers,
        "norm": norm("model.norm"),
    }
    if not config.tie_embeddings:
        params["head"] = {"weight": array(get("lm_head.weight"))}
    return params


def _block(config: ModelConfig, prefix: str, linear: Callable, norm: Callable) -> dict:
    attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    up = [f"{mlp}.gate_proj", f"{mlp}.up_proj"] if config.gated_mlp else []
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
        "mlp": {
            "up": linear(*(up or [f"{mlp}.up_proj"]), bias=config.mlp_bias),
            "down": linear(f"{mlp}.down_proj", bias=config.mlp_bias),
        },
        "attention_norm": norm(f"{prefix}.input_layernorm"),
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
