"""The configuration of a drafter's layers, from what its file says of them.

Files of `speculators` hold the configuration of a model class *as a difference*: a
setting that equals the default of its class is left out. So the defaults have to be
known, and they differ between classes. (Those that `jaxdec.io.hf_families` has anyway
are not repeated here.)
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.hf_config import config_from_hf
from jaxdec.models.config import ModelConfig

_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_QWEN = _LLAMA | {"vocab_size": 151936, "intermediate_size": 22016}
_HYBRID = {"num_attention_heads": 16, "head_dim": 256}
CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA | {"intermediate_size": 14336},
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "qwen3_moe": _QWEN
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24},
    "qwen3_next": _HYBRID
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
    },
    "qwen3_5_text": _HYBRID
    | {
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    "qwen3_5_moe_text": _HYBRID
    | {
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
    },
}

"""What a configuration means where it leaves a setting out, by ``model_type``."""

HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Most layers of these have linear attention. Their MTP modules are full-attention
layers with a gate; norms multiply by 1 + w, and a part of each head is rotated."""

_OF_LINEAR_LAYERS = frozenset(
    """
    linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
    linear_num_key_heads linear_num_value_heads full_attention_interval mamba_ssm_dtype
    output_gate_type
    """.split()
)
_OF_MROPE = frozenset("mrope_section mrope_interleaved partial_rotary_factor".split())
_OF_WINDOWS = frozenset(
    "layer_types sliding_window use_sliding_window max_window_layers".split()
)


def model_type(values: Mapping[str, Any]) -> str:
    """What kind of layers a configuration describes; a difference may omit it."""
    return values.get("model_type") or "qwen3"


def left_out(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a difference does not give, with what they then are."""
    kind = model_type(values)
    given = {"model_type": kind} | CLASS_DEFAULTS.get(kind, {})
    return {n: value for n, value in given.items() if values.get(n) is None}


def full_attention_config(values: Mapping[str, Any]) -> ModelConfig:
    """The layers of a configuration (or of a difference) as full-attention ones.

    Raises:
        jaxdec.io.checkpoint.CheckpointError: A kind of layers or a setting that is not
            supported.
    """
    kind = model_type(values)
    # What the model is called that has such layers says nothing about them.
    skipped = _OF_WINDOWS | {"architectures"}
    given = {name: value for name, value in values.items() if name not in skipped}
    whole = {"model_type": kind} | CLASS_DEFAULTS.get(kind, {}) | given
    ropes = whole.get("rope_parameters")
    if isinstance(ropes, Mapping) and isinstance(ropes.get("full_attention"), Mapping):
        whole["rope_parameters"] = ropes["full_attention"]
    if kind in HYBRID:
        return _hybrid(whole, kind)
    if kind == "mistral":
        whole["sliding_window"] = None
    return config_from_hf(whole)


def _hybrid(values: Mapping[str, Any], kind: str) -> ModelConfig:
    """A full-attention layer of a model whose other layers are linear.

    M-RoPE is ordinary rotary embedding for text.
    """
    if kind != "qwen3_5_text":
        raise CheckpointError(
            f"the MTP module of a {kind} model is a mixture with a shared expert, "
            "which is not supported; use a dense model of that family."
        )
    if not values.get("attn_output_gate", True):
        raise CheckpointError(
            f"attn_output_gate is false in a {kind} configuration; only layers with "
            "the gate are supported."
        )
    skipped = _OF_LINEAR_LAYERS | {"attn_output_gate", "partial_rotary_factor"}
    plain = {
        name: value
        for name, value in values.items()
        if name not in skipped and not name.startswith("mtp_")
    }
    rotated = values.get("partial_rotary_factor")
    for name in ("rope_parameters", "rope_scaling"):
        settings = plain.get(name)
        if isinstance(settings, Mapping):
            rotated = settings.get("partial_rotary_factor", rotated)
            plain[name] = {k: v for k, v in settings.items() if k not in _OF_MROPE}
    config = config_from_hf(plain | {"model_type": "qwen3"})
    (rope,) = config.ropes
    rotated = 0.25 if rotated is None else float(rotated)
    return dataclasses.replace(
        config,
        family=kind,
        attention_gate=True,
        ropes=(dataclasses.replace(rope, rotated=rotated),),
    )
