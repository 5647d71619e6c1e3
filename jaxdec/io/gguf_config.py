"""Reads the metadata of a GGUF file into a `ModelConfig`.

They are translated into the settings of ``config.json`` and read as those, so that both
kinds of file share one reader. A setting without translation is an error that names it.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.gguf_names import ARCHITECTURES
from jaxdec.io.hf_config import config_from_hf
from jaxdec.models.config import ModelConfig, RopeConfig

_SETTINGS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
}

_READ_ELSEWHERE = frozenset(
    """
    vocab_size attention.key_length attention.value_length rope.dimension_count
    rope.freq_base rope.scaling.type rope.scaling.factor
    rope.scaling.original_context_length rope.scaling.attn_factor
    rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.finetuned
    rope.scale_linear nextn_predict_layers
    """.split()
)

_OWN_SETTINGS = {
    "gpt2": {"attention.layer_norm_epsilon": "layer_norm_epsilon"},
    "qwen3moe": {
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_weights_norm": "norm_topk_prob",
    },
    "gemma3": {
        "attention.sliding_window": "sliding_window",
        "attention.sliding_window_pattern": "sliding_window_pattern",
        "rope.freq_base_swa": "rope_local_base_freq",
        "final_logit_softcapping": "final_logit_softcapping",
        "attn_logit_softcapping": "attn_logit_softcapping",
    },
}
"""Settings that only some architectures have."""

_NEUTRAL = {"expert_gating_func": 1, "expert_weights_scale": 1.0}
"""Settings with a value that says nothing new: softmax, unscaled."""

ROPE_FACTORS = "rope_freqs.weight"


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def config_from_gguf(
    fields: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: tuple[float, ...] = (),
) -> ModelConfig:
    """Translates GGUF metadata into the settings of ``config.json``, and reads those.

    Args:
        fields: Metadata as Python values.
        shapes: Of the tensors in the file, by their names there: some settings are
            nowhere else (a tied head, biases, which layers are mixtures of experts).
        rope_factors: Values of the tensor ``rope_freqs.weight``, if there is one: how
            GGUF stores the rotary scaling of Llama 3.
    """
    arch = fields.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise CheckpointError(
            f"GGUF architecture {arch!r} is not supported; supported are "
            f"{', '.join(ARCHITECTURES)}."
        )
    settings = architecture_settings(fields)
    names = _SETTINGS | _OWN_SETTINGS.get(arch, {})
    unknown = {
        key: value
        for key, value in settings.items()
        if key not in names and key not in _READ_ELSEWHERE
        # Converters write 0 and False for what a model does not have.
        if value not in (None, False, "", []) and value != _NEUTRAL.get(key)
    }
    if unknown:
        pairs = ", ".join(f"{arch}.{key}={value!r}" for key, value in unknown.items())
        raise CheckpointError(
            f"the GGUF file has settings that this library does not know: {pairs}. "
            "They might change what the model computes, so they are not ignored; use "
            "the safetensors release of the model."
        )
    values: dict[str, Any] = {
        "model_type": ARCHITECTURES[arch].model_type,
        "tie_word_embeddings": "output.weight" not in shapes,
        "vocab_size": shapes["token_embd.weight"][0],
    }
    values |= {new: settings[old] for old, new in names.items() if old in settings}
    # Blocks of multi-token-prediction modules are counted with the model's own.
    num_layers = values["num_hidden_layers"] - settings.get("nextn_predict_layers", 0)
    values["num_hidden_layers"] = num_layers
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        value = values.get(name)
        if isinstance(value, list):
            if len(set(value[:num_layers])) != 1:
                raise CheckpointError(
                    f"{name} differs between layers ({value}), which is not supported."
                )
            values[name] = value[0]
    own = _OWN_VALUES.get(arch, _rotary)(settings, values, shapes)
    config = config_from_hf(values | own)
    if arch not in ("qwen2", "gpt2"):
        # In those two, biases are part of the architecture.
        config = dataclasses.replace(
            config,
            qkv_bias=bool({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"} & set(shapes)),
            output_bias="blk.0.attn_output.bias" in shapes,
            mlp_bias="blk.0.ffn_up.bias" in shapes,
        )
    return _with_rope_factors(config, rope_factors) if rope_factors else config


def architecture_settings(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What the metadata say under the file's architecture, without that prefix."""
    prefix = f"{fields.get('general.architecture')}."
    return {
        key[len(prefix) :]: value
        for key, value in fields.items()
        if key.startswith(prefix)
    }


def _gpt2(settings, values, shapes) -> dict[str, Any]:
    """Learned positions, all heads alike."""
    groups = values.pop("num_key_value_heads", values["num_attention_heads"])
    if groups != values["num_attention_heads"]:
        raise CheckpointError(
            f"a GPT-2 has as many key/value heads as heads, got {groups} and "
            f"{values['num_attention_heads']}; the file is damaged."
        )
    epsilon = values.get("layer_norm_epsilon", 1e-5)
    return {"layer_norm_epsilon": _shortest(epsilon)}


def _rotary(settings, values, shapes) -> dict[str, Any]:
    """What Llama and its descendants have in common."""
    heads = values["num_attention_heads"]
    rotary = settings.get("rope.dimension_count")
    head_dim = settings.get("attention.key_length") or rotary
    if head_dim is None:
        head_dim = values["hidden_size"] // heads
    if settings.get("attention.value_length", head_dim) != head_dim or (
        rotary is not None and rotary != head_dim
    ):
        raise CheckpointError(
            f"keys are {head_dim} wide, values "
            f"{settings.get('attention.value_length', head_dim)}, and {rotary} "
            "dimensions are rotated; only models where all three agree are supported."
        )
    return {
        "num_key_value_heads": values.get("num_key_value_heads", heads),
        "rms_norm_eps": _shortest(values.get("rms_norm_eps", 1e-6)),
        "head_dim": head_dim,
        "rope_theta": _shortest(settings.get("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(settings),
    }


def _qwen3moe(settings, values, shapes) -> dict[str, Any]:
    """Which layers are mixtures can be seen only from their tensors."""
    found = (re.fullmatch(r"blk\.(\d+)\.ffn_up\.weight", name) for name in shapes)
    dense = sorted(int(match[1]) for match in found if match is not None)
    # Released models renormalise the chosen experts; most files do not say so.
    chosen = {"norm_topk_prob": True, "mlp_only_layers": dense}
    inner = {"intermediate_size": values.get("moe_intermediate_size")}
    return chosen | inner | values | _rotary(settings, values, shapes)


def _gemma3(settings, values, shapes) -> dict[str, Any]:
    """Two ropes; the pattern of windows and the scale of scores may be unsaid."""
    found = _rotary(settings, values, shapes)
    scalar = found["head_dim"]
    if values["num_hidden_layers"] == 62:
        # The 27B model alone, as its converter leaves it unsaid.
        scalar = values["hidden_size"] // values["num_attention_heads"]
    found["query_pre_attn_scalar"] = scalar
    found["rope_local_base_freq"] = _shortest(
        values.get("rope_local_base_freq", 10000.0)
    )
    pattern = values.get("sliding_window_pattern")
    if isinstance(pattern, list):
        del values["sliding_window_pattern"]
        found["layer_types"] = [
            "sliding_attention" if slides else "full_attention"
            for slides in pattern[: values["num_hidden_layers"]]
        ]
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        found[name] = values.get(name) or None
    return found


_OWN_VALUES = {"gpt2": _gpt2, "qwen3moe": _qwen3moe, "gemma3": _gemma3}


def _with_rope_factors(config: ModelConfig, factors: tuple[float, ...]) -> ModelConfig:
    kinds = [rope.kind for rope in config.ropes]
    half = config.head_dim // 2
    if kinds != ["default"] or len(factors) != half or config.learned_positions:
        raise CheckpointError(
            f"{ROPE_FACTORS} has {len(factors)} values beside rope scaling "
            f"{', '.join(kinds)}; only {half} values without other scaling are "
            "supported."
        )
    rope = RopeConfig(theta=config.ropes[0].theta, kind="factors", factors=factors)
    return dataclasses.replace(config, ropes=(rope,))


def _rope_scaling(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = settings.get("rope.scaling.type", "none")
    if settings.get("rope.scale_linear", 1.0) not in (0.0, 1.0):
        kind, factor = "linear", settings["rope.scale_linear"]
    else:
        factor = settings.get("rope.scaling.factor")
    if settings.get("rope.scaling.attn_factor", 1.0) != 1.0:
        raise CheckpointError(
            "rope.scaling.attn_factor is set in the GGUF file, which is not supported; "
            "use the safetensors release of the model."
        )
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        for old, new in (
            ("original_context_length", "original_max_position_embeddings"),
            ("yarn_beta_fast", "beta_fast"),
            ("yarn_beta_slow", "beta_slow"),
        ):
            scaling[new] = settings.get(f"rope.scaling.{old}")
    return scaling
