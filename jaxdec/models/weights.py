"""From tensors with published names to a decoder's arrays, and back.

Loaders give every checkpoint under canonical names (`jaxdec.io.names`), matrices as
``[out, in]``; here the projections that read one input are joined, the experts of a
mixture are stacked, and all are laid out for the backend.
"""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from jaxdec.models.config import ModelConfig
from jaxdec.models.decoder import prefers_out_first
from jaxdec.types import Params


class TensorReader:
    """Turns tensors into arrays on the default device.

    Args:
        tensors: by canonical name; gains of norms as they multiply.
        dtype: of matrices and embeddings; norms and biases stay float32.
        on_host: give NumPy arrays instead.
    """

    def __init__(
        self, tensors: Mapping[str, np.ndarray], dtype: str, *, on_host: bool = False
    ):
        self._tensors = tensors
        self._on_host = on_host
        self._dtype = jnp.dtype(dtype)
        self._out_first = prefers_out_first(dtype)

    def _get(self, names):
        parts = [np.asarray(self._tensors[name]) for name in names]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=0)

    def _array(self, value, kind):
        value = np.ascontiguousarray(value).astype(kind)
        return value if self._on_host else jnp.asarray(value)

    def _vector(self, names):
        return self._array(self._get(names), np.float32)

    def array(self, name: str):
        """A tensor as it is, in the dtype of the weights."""
        return self._array(self._get([name]), self._dtype)

    def linear(self, *names: str, bias: bool = False) -> Params:
        """A linear layer; several names are joined, for they read one input."""
        weight = self._get([f"{name}.weight" for name in names])
        weight = weight if self._out_first else weight.T
        tree = {"weight": self._array(weight, self._dtype)}
        if bias:
            tree["bias"] = self._vector([f"{name}.bias" for name in names])
        return tree

    def norm(self, name: str, *, bias: bool = False) -> Params:
        """A norm; with `bias`, a LayerNorm."""
        tree = {"scale": self._vector([f"{name}.weight"])}
        if bias:
            tree["bias"] = self._vector([f"{name}.bias"])
        return tree

    def experts(self, *names: list[str]):
        """Matrices of all experts; `names` has the joined ones of each."""
        parts = [self._get([f"{name}.weight" for name in group]) for group in names]
        stacked = np.stack(parts)
        if not self._out_first:
            stacked = stacked.swapaxes(1, 2)
        return self._array(stacked, self._dtype)


def params_from_tensors(
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray],
    dtype: str = "float32",
    *,
    on_host: bool = False,
) -> Params:
    """The arrays of a decoder, on the default device.

    Args:
        config: the architecture; the tensors must fit it (the loader has checked).
        tensors: by canonical name; gains of norms as they multiply.
        dtype: of matrices and embeddings; norms and biases stay float32.
        on_host: return NumPy arrays, for whoever places them: a model may be too large
            for one device.
    """
    read = TensorReader(tensors, dtype, on_host=on_host)
    layers = range(config.num_layers)
    if config.learned_positions:
        params = {
            "embedding": read.array("wte.weight"),
            "positions": read.array("wpe.weight"),
            "layers": {i: _gpt2(config, i, read) for i in layers},
            "norm": read.norm("ln_f", bias=True),
        }
    else:
        params = {
            "embedding": read.array("model.embed_tokens.weight"),
            "layers": {
                i: block_params(config, i, f"model.layers.{i}", read) for i in layers
            },
            "norm": read.norm("model.norm"),
        }
    if not config.tie_embeddings:
        params["head"] = {"weight": read.array("lm_head.weight")}
    return params


def layer_params(
    config: ModelConfig, tensors: Mapping[str, np.ndarray], dtype: str = "float32"
) -> Params:
    """The inverse of `layer_tensors`: a decoder's arrays but for its tables."""
    read = TensorReader(tensors, dtype)
    layers = range(config.num_layers)
    return {
        "layers": {
            i: block_params(config, i, f"model.layers.{i}", read) for i in layers
        },
        "norm": read.norm("model.norm"),
    }


def _gpt2(config: ModelConfig, layer: int, read: TensorReader) -> dict:
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
        "attention_norm": read.norm(f"{prefix}.ln_1", bias=True),
        "mlp_norm": read.norm(f"{prefix}.ln_2", bias=True),
    }


def block_params(
    config: ModelConfig, layer: int, prefix: str, read: TensorReader
) -> Params:
    """The arrays of one layer of Llama's descendants, under names with `prefix`."""
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
    if config.attention_gate:
        tree["attention"]["gate"] = linear(f"{attn}.gate", bias=config.qkv_bias)
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


def block_shapes(
    config: ModelConfig, layer: int, prefix: str
) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor that `block_params` reads."""
    width = config.hidden_size
    query = config.num_heads * config.head_dim
    key = config.num_kv_heads * config.head_dim
    attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
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
    linear(f"{attn}.q_proj", query, width, config.qkv_bias)
    linear(f"{attn}.k_proj", key, width, config.qkv_bias)
    linear(f"{attn}.v_proj", key, width, config.qkv_bias)
    linear(f"{attn}.o_proj", width, query, config.output_bias)
    if config.attention_gate:
        linear(f"{attn}.gate", query, width, config.qkv_bias)
    if config.qk_norm:
        shapes[f"{attn}.q_norm.weight"] = (config.head_dim,)
        shapes[f"{attn}.k_norm.weight"] = (config.head_dim,)
    moe = config.moe
    if moe is not None and layer in moe.layers:
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


class TensorWriter:
    """The inverse of `TensorReader`: arrays back to tensors by canonical name.

    Args:
        dtype: of the arrays, which says how their matrices lie.
    """

    def __init__(self, dtype: str):
        self.tensors: dict[str, np.ndarray] = {}
        self._out_first = prefers_out_first(dtype)

    def array(self, name: str, value) -> None:
        """A tensor as it is."""
        self.tensors[name] = np.asarray(value)

    def matrix(self, name: str, value) -> None:
        """A matrix, as ``[out, in]``."""
        value = np.asarray(value)
        value = value if self._out_first else value.T
        self.tensors[name] = np.ascontiguousarray(value)

    def linear(self, tree: Params, rows: Mapping[str, int]) -> None:
        """A linear layer; `rows` are those of each name that it joins, in order."""
        self.matrix("", tree["weight"])
        edges = np.cumsum(list(rows.values()))[:-1]
        for part in ("weight", "bias"):
            if part not in tree:
                continue
            joined = self.tensors.pop("") if part == "weight" else tree["bias"]
            for name, piece in zip(rows, np.split(np.asarray(joined), edges)):  # noqa: B905
                self.tensors[f"{name}.{part}"] = np.ascontiguousarray(piece)

    def norm(self, name: str, tree: Params) -> None:
        """A norm."""
        self.array(f"{name}.weight", tree["scale"])

    def block(self, config: ModelConfig, prefix: str, tree: Params) -> None:
        """The inverse of `block_params`, for dense layers without sandwich norms."""
        attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        self.linear(tree["attention"]["qkv"], qkv_rows(config, attn))
        self.linear(tree["attention"]["out"], {f"{attn}.o_proj": config.hidden_size})
        if "gate" in tree["attention"]:
            rows = config.num_heads * config.head_dim
            self.linear(tree["attention"]["gate"], {f"{attn}.gate": rows})
        if "query_norm" in tree["attention"]:
            self.norm(f"{attn}.q_norm", tree["attention"]["query_norm"])
            self.norm(f"{attn}.k_norm", tree["attention"]["key_norm"])
        self.mlp(config, mlp, tree["mlp"])
        if "attention_norm" in tree:
            self.norm(f"{prefix}.input_layernorm", tree["attention_norm"])
        self.norm(f"{prefix}.post_attention_layernorm", tree["mlp_norm"])

    def mlp(self, config: ModelConfig, name: str, tree: Params) -> None:
        """A gated MLP."""
        inner = config.intermediate_size
        rows = {f"{name}.gate_proj": inner, f"{name}.up_proj": inner}
        self.linear(tree["up"], rows)
        self.linear(tree["down"], {f"{name}.down_proj": config.hidden_size})


def qkv_rows(config: ModelConfig, name: str) -> dict[str, int]:
    """Rows of the projections that are joined into one, by name."""
    key = config.num_kv_heads * config.head_dim
    rows = {"q": config.num_heads * config.head_dim, "k": key, "v": key}
    return {f"{name}.{part}_proj": num for part, num in rows.items()}


def layer_tensors(
    config: ModelConfig, params: Params, dtype: str
) -> dict[str, np.ndarray]:
    """The layers and the last norm of a decoder, by canonical name; no tables.

    Args:
        config: the architecture: dense, of Llama's descendants.
        params: its arrays.
        dtype: theirs.
    """
    writer = TensorWriter(dtype)
    for i in range(config.num_layers):
        writer.block(config, f"model.layers.{i}", params["layers"][i])
    writer.norm("model.norm", params["norm"])
    return writer.tensors
