"""From tensors with published names to an EAGLE drafter's arrays, and back.

Canonical are the names of the speculators format: ``fc``, ``input_norm`` or
``fc_norm.j``, ``layers.i.*`` (in the first layers with ``hidden_norm``), ``norm``,
``embed_tokens``, ``lm_head``, ``d2t`` (offsets), ``mask_hidden``.
"""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from jaxdec.models.decoder import prefers_out_first
from jaxdec.models.eagle_config import EagleConfig
from jaxdec.models.vocabulary import offsets_of, target_ids_of, vocabulary_params
from jaxdec.models.weights import TensorWriter
from jaxdec.types import Params


def expected_eagle_tensors(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor that a drafter of this configuration has."""
    body = config.layers
    width, inner = body.hidden_size, body.intermediate_size
    query, key = body.num_heads * body.head_dim, body.num_kv_heads * body.head_dim
    tap = config.target_hidden_size
    joined = len(config.taps) * tap if config.fusion == "taps" else width + tap
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name, rows, columns, bias=False):
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    linear("fc", width, joined, config.fusion_bias)
    if config.fusion_norm == "all":
        shapes["input_norm.weight"] = (joined,)
    if config.fusion_norm == "each":
        shapes |= {f"fc_norm.{j}.weight": (tap,) for j in range(len(config.taps))}
    for i in range(body.num_layers):
        kind = config.kind_of_layer(i)
        layer, columns = f"layers.{i}", 2 * width if kind == "wide" else width
        norms = ["post_attention_layernorm"]
        norms += [] if kind == "bare" else ["input_layernorm"]
        norms += ["hidden_norm"] if kind == "wide" else []
        shapes |= {f"{layer}.{norm}.weight": (width,) for norm in norms}
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        linear(f"{attention}.q_proj", query, columns, body.qkv_bias)
        linear(f"{attention}.k_proj", key, columns, body.qkv_bias)
        linear(f"{attention}.v_proj", key, columns, body.qkv_bias)
        linear(f"{attention}.o_proj", width, query, body.output_bias)
        if body.qk_norm:
            shapes[f"{attention}.q_norm.weight"] = (body.head_dim,)
            shapes[f"{attention}.k_norm.weight"] = (body.head_dim,)
        linear(f"{mlp}.gate_proj", inner, width, body.mlp_bias)
        linear(f"{mlp}.up_proj", inner, width, body.mlp_bias)
        linear(f"{mlp}.down_proj", width, inner, body.mlp_bias)
    if config.output_norm != "none":
        shapes["norm.weight"] = (width,)
    if config.own_embedding:
        shapes["embed_tokens.weight"] = (body.vocab_size, width)
    if config.own_head:
        shapes["lm_head.weight"] = (config.draft_vocab_size, width)
    if config.is_reduced:
        shapes["d2t"] = (config.draft_vocab_size,)
    if config.is_parallel:
        shapes["mask_hidden"] = (joined,)
    return shapes


def eagle_params_from_tensors(
    config: EagleConfig, tensors: Mapping[str, np.ndarray], dtype: str = "float32"
) -> Params:
    """A drafter's own arrays, on the default device.

    Args:
        config: what it is; the tensors must fit it (the loader has checked).
        tensors: by canonical name.
        dtype: of matrices and embeddings; norms and biases stay float32.
    """
    out_first = prefers_out_first(dtype)
    body = config.layers

    def array(value, kind=dtype):
        return jnp.asarray(np.ascontiguousarray(value).astype(jnp.dtype(kind)))

    def join(suffix, names):
        parts = [np.asarray(tensors[f"{name}.{suffix}"]) for name in names]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def linear(*names, bias):
        weight = join("weight", names)
        tree = {"weight": array(weight if out_first else weight.T)}
        return tree | ({"bias": array(join("bias", names), "float32")} if bias else {})

    def norm(name):
        return {"scale": array(tensors[f"{name}.weight"], "float32")}

    def layer(i):
        kind = config.kind_of_layer(i)
        name = f"layers.{i}"
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        projections = [f"{attention}.{x}_proj" for x in "qkv"]
        gate_up = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
        tree = {
            "attention": {
                "qkv": linear(*projections, bias=body.qkv_bias),
                "out": linear(f"{attention}.o_proj", bias=body.output_bias),
            },
            "mlp": {
                "up": linear(*gate_up, bias=body.mlp_bias),
                "down": linear(f"{mlp}.down_proj", bias=body.mlp_bias),
            },
            "mlp_norm": norm(f"{name}.post_attention_layernorm"),
        }
        if kind != "bare":
            tree["attention_norm"] = norm(f"{name}.input_layernorm")
        if kind == "wide":
            tree["hidden_norm"] = norm(f"{name}.hidden_norm")
        if body.qk_norm:
            tree["attention"]["query_norm"] = norm(f"{attention}.q_norm")
            tree["attention"]["key_norm"] = norm(f"{attention}.k_norm")
        return tree

    norms = {
        "none": [],
        "all": ["input_norm"],
        "each": [f"fc_norm.{j}" for j in range(len(config.taps))],
    }[config.fusion_norm]
    params = {
        "fusion": linear("fc", bias=config.fusion_bias),
        "layers": {i: layer(i) for i in range(body.num_layers)},
    }
    if norms:
        params["fusion_norms"] = {j: norm(name) for j, name in enumerate(norms)}
    if config.output_norm != "none":
        params["norm"] = norm("norm")
    if config.own_embedding:
        params["embedding"] = array(tensors["embed_tokens.weight"])
    if config.own_head:
        params["head"] = array(tensors["lm_head.weight"])
    if config.is_reduced:
        ids = target_ids_of(tensors["d2t"])
        params["vocabulary"] = vocabulary_params(ids, body.vocab_size)
    if config.is_parallel:
        params["mask_hidden"] = array(np.reshape(tensors["mask_hidden"], (1, -1)))
    return params


def eagle_tensors_from_params(
    config: EagleConfig, params: Params, dtype: str
) -> dict[str, np.ndarray]:
    """The inverse of `eagle_params_from_tensors`; `dtype` is that of the arrays."""
    body, writer = config.layers, TensorWriter(dtype)
    writer.linear(params["fusion"], {"fc": body.hidden_size})
    for j, tree in params.get("fusion_norms", {}).items():
        each = config.fusion_norm == "each"
        writer.norm(f"fc_norm.{j}" if each else "input_norm", tree)
    for i in range(body.num_layers):
        layer = params["layers"][i]
        writer.block(body, f"layers.{i}", layer)
        if "hidden_norm" in layer:
            writer.norm(f"layers.{i}.hidden_norm", layer["hidden_norm"])
    if "norm" in params:
        writer.norm("norm", params["norm"])
    if config.own_embedding:
        writer.array("embed_tokens.weight", params["embedding"])
    if config.own_head:
        writer.array("lm_head.weight", params["head"])
    if config.is_reduced:
        writer.array("d2t", offsets_of(np.asarray(params["vocabulary"]["target_ids"])))
    if config.is_parallel:
        writer.array("mask_hidden", np.reshape(params["mask_hidden"], -1))
    return writer.tensors
