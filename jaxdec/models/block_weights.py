"""The tensors of a block drafter, and their way into the network and back.

Names are those that z-lab, DeepSpec and speculators all write, without ``model.``;
``d2t`` holds offsets: token j of a reduced vocabulary is the target's ``j + d2t[j]``.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdec.models.block import BlockConfig, BlockNetwork
from jaxdec.models.decoder import prefers_out_first
from jaxdec.models.vocabulary import offsets_of, target_ids_of, vocabulary_params
from jaxdec.models.weights import TensorWriter, qkv_rows
from jaxdec.types import Params


def expected_block_tensors(config: BlockConfig) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor that a drafter of this configuration reads."""
    layers = config.layers
    size, vocab = layers.hidden_size, layers.vocab_size
    heads = layers.num_heads * layers.head_dim
    groups = layers.num_kv_heads * layers.head_dim
    drafted, rank = config.draft_vocab_size, config.markov_rank
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name, rows, columns, bias=False):
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    if config.own_embedding:
        linear("embed_tokens", vocab, size)
    if config.own_head:
        linear("lm_head", drafted, size)
    if drafted < vocab:
        shapes["d2t"] = (drafted,)
    linear("fc", size, len(config.taps) * size)
    shapes["hidden_norm.weight"] = shapes["norm.weight"] = (size,)
    for i in range(layers.num_layers):
        attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"layers.{i}.{name}.weight"] = (size,)
        linear(f"{attention}.q_proj", heads, size, layers.qkv_bias)
        linear(f"{attention}.k_proj", groups, size, layers.qkv_bias)
        linear(f"{attention}.v_proj", groups, size, layers.qkv_bias)
        linear(f"{attention}.o_proj", size, heads, layers.output_bias)
        for name in ("q_norm", "k_norm"):
            shapes[f"{attention}.{name}.weight"] = (layers.head_dim,)
        linear(f"{mlp}.gate_proj", layers.intermediate_size, size)
        linear(f"{mlp}.up_proj", layers.intermediate_size, size)
        linear(f"{mlp}.down_proj", size, layers.intermediate_size)
    if config.markov != "none":
        linear("markov_head.markov_w1", vocab, rank)
        linear("markov_head.markov_w2", drafted, rank)
    if config.markov == "gated":
        linear("markov_head.gate_proj", rank, size + rank, True)
    if config.markov == "rnn":
        linear("markov_head.joint_proj", 3 * rank, 2 * rank + size, True)
    if config.confidence != "none":
        extra = rank if config.confidence == "hidden_and_previous" else 0
        linear("confidence_head.proj", 1, size + extra, True)
    return shapes


def block_params_from_tensors(
    config: BlockConfig, tensors: Mapping[str, np.ndarray], dtype: str = "float32"
) -> Params:
    """The drafter's own arrays; norms, biases and the confidence head stay float32."""
    out_first = prefers_out_first(dtype)

    def array(value, kind=dtype):
        return jnp.asarray(np.ascontiguousarray(value).astype(jnp.dtype(kind)))

    def matrix(value):
        return {"weight": array(value if out_first else np.asarray(value).T)}

    def joined(*names, part="weight"):
        return np.concatenate([np.asarray(tensors[f"{n}.{part}"]) for n in names])

    def linear(*names, bias=False):
        tree = matrix(joined(*names))
        if bias:
            tree["bias"] = array(joined(*names, part="bias"), "float32")
        return tree

    def norm(name):
        return {"scale": array(tensors[f"{name}.weight"], "float32")}

    def layer(i):
        attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        bias = config.layers.qkv_bias
        keys = (f"{attention}.k_proj", f"{attention}.v_proj")
        return {
            "attention": {
                "query": linear(f"{attention}.q_proj", bias=bias),
                "key_value": linear(*keys, bias=bias),
                "out": linear(f"{attention}.o_proj", bias=config.layers.output_bias),
                "query_norm": norm(f"{attention}.q_norm"),
                "key_norm": norm(f"{attention}.k_norm"),
            },
            "mlp": {
                "up": linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
                "down": linear(f"{mlp}.down_proj"),
            },
            "attention_norm": norm(f"layers.{i}.input_layernorm"),
            "mlp_norm": norm(f"layers.{i}.post_attention_layernorm"),
        }

    def markov():
        head = "markov_head"
        tree = {
            "rows": array(tensors[f"{head}.markov_w1.weight"]),
            "out": {"weight": array(np.asarray(tensors[f"{head}.markov_w2.weight"]).T)},
        }
        if config.markov != "vanilla":
            # Apart, because the hidden states' share is computed for all places at
            # once: columns are [hidden; row] for gated, [state; row; hidden] for rnn.
            is_gated = config.markov == "gated"
            name = f"{head}.{'gate_proj' if is_gated else 'joint_proj'}"
            weight = np.asarray(tensors[f"{name}.weight"])
            size, rank = config.layers.hidden_size, config.markov_rank
            hidden, before = (
                np.split(weight, [size], axis=1)
                if is_gated
                else np.split(weight, [2 * rank], axis=1)[::-1]
            )
            bias = array(tensors[f"{name}.bias"], "float32")
            tree["of_hidden"] = matrix(hidden) | {"bias": bias}
            tree["of_previous"] = matrix(before)
        return tree

    params: Params = {
        "fc": linear("fc"),
        "hidden_norm": norm("hidden_norm"),
        "layers": {i: layer(i) for i in range(config.layers.num_layers)},
        "norm": norm("norm"),
    }
    if config.own_embedding:
        params["embedding"] = array(tensors["embed_tokens.weight"])
    if config.own_head:
        params["head"] = {"weight": array(tensors["lm_head.weight"])}
    if config.draft_vocab_size < config.layers.vocab_size:
        ids = target_ids_of(tensors["d2t"])
        params["vocabulary"] = vocabulary_params(ids, config.layers.vocab_size)
    if config.markov != "none":
        params["markov"] = markov()
    if config.confidence != "none":
        proj = {
            part: array(tensors[f"confidence_head.proj.{part}"], "float32")
            for part in ("weight", "bias")
        }
        params["confidence"] = {"proj": proj}
    return params


def init_block_params(
    config: BlockConfig, key: jax.Array, dtype: str = "float32"
) -> Params:
    """Random weights, for tests and for training from scratch."""
    module = BlockNetwork(
        config,
        dtype=jnp.dtype(dtype),
        out_first=prefers_out_first(dtype),
        rngs=nnx.Rngs(params=key),
    )
    return nnx.to_pure_dict(nnx.split(module)[1])


def block_tensors_from_params(
    config: BlockConfig, params: Params, dtype: str
) -> dict[str, np.ndarray]:
    """The inverse of `block_params_from_tensors`; `dtype` is that of the arrays."""
    layers, writer = config.layers, TensorWriter(dtype)
    writer.linear(params["fc"], {"fc": layers.hidden_size})
    writer.norm("hidden_norm", params["hidden_norm"])
    for i in range(layers.num_layers):
        layer, attn = params["layers"][i], f"layers.{i}.self_attn"
        query, *keys = qkv_rows(layers, attn).items()
        writer.linear(layer["attention"]["query"], dict([query]))
        writer.linear(layer["attention"]["key_value"], dict(keys))
        writer.linear(layer["attention"]["out"], {f"{attn}.o_proj": layers.hidden_size})
        writer.norm(f"{attn}.q_norm", layer["attention"]["query_norm"])
        writer.norm(f"{attn}.k_norm", layer["attention"]["key_norm"])
        writer.mlp(layers, f"layers.{i}.mlp", layer["mlp"])
        writer.norm(f"layers.{i}.input_layernorm", layer["attention_norm"])
        writer.norm(f"layers.{i}.post_attention_layernorm", layer["mlp_norm"])
    writer.norm("norm", params["norm"])
    if config.own_embedding:
        writer.array("embed_tokens.weight", params["embedding"])
    if config.own_head:
        writer.array("lm_head.weight", params["head"]["weight"])
    if config.draft_vocab_size < layers.vocab_size:
        writer.array("d2t", offsets_of(np.asarray(params["vocabulary"]["target_ids"])))
    if config.markov != "none":
        _write_markov(config, params["markov"], writer)
    if config.confidence != "none":
        for part, value in params["confidence"]["proj"].items():
            writer.array(f"confidence_head.proj.{part}", value)
    return writer.tensors


def _write_markov(config: BlockConfig, tree: Params, writer: TensorWriter) -> None:
    head = "markov_head"
    writer.array(f"{head}.markov_w1.weight", tree["rows"])
    writer.array(f"{head}.markov_w2.weight", np.asarray(tree["out"]["weight"]).T)
    if config.markov == "vanilla":
        return
    writer.matrix("hidden", tree["of_hidden"]["weight"])
    writer.matrix("before", tree["of_previous"]["weight"])
    parts = [writer.tensors.pop(name) for name in ("hidden", "before")]
    is_gated = config.markov == "gated"
    name = f"{head}.{'gate_proj' if is_gated else 'joint_proj'}"
    joined = np.concatenate(parts if is_gated else parts[::-1], axis=1)
    writer.array(f"{name}.weight", joined)
    writer.array(f"{name}.bias", tree["of_hidden"]["bias"])
