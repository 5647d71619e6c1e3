"""Writes a model as Hugging Face does: ``config.json`` and one safetensors file.

The inverse of `jaxdec.io.hf_config` for Llama and Qwen3, which is what drafters and
their targets here are. A setting that the family cannot express is an error.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxdec.io.checkpoint import CheckpointError
from jaxdec.models.config import ModelConfig, RopeConfig

_CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def config_to_hf(
    config: ModelConfig, family: str | None = None, stop_tokens: tuple[int, ...] = ()
) -> dict[str, Any]:
    """``config.json`` of a decoder.

    Args:
        config: the architecture.
        family: "llama" or "qwen3"; None is the one with or without norms of queries
            and keys, as `config` has it.
        stop_tokens: the ids that end an answer.

    Raises:
        CheckpointError: the family has no such model.
    """
    if family is None:
        family = "qwen3" if config.qk_norm else "llama"
    _check(config, family)
    values = {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.qkv_bias,
        **_rope(config.ropes[0]),
    }
    if family == "llama":
        values["mlp_bias"] = config.mlp_bias
    if stop_tokens:
        ids = list(stop_tokens)
        values["eos_token_id"] = ids[0] if len(ids) == 1 else ids
    return values


def _check(config: ModelConfig, family: str) -> None:
    biased = config.qkv_bias or config.output_bias
    wrong = {
        "family": family not in _CLASSES,
        "norm": config.norm != "rms",
        "activation": config.activation != "silu" or not config.gated_mlp,
        "moe": config.moe is not None,
        "attention_gate": config.attention_gate,
        "sandwich_norms": config.sandwich_norms,
        "embedding_scale": config.embedding_scale != 1.0,
        "logit_softcap": config.logit_softcap is not None,
        "learned_positions": config.learned_positions,
        "layer_windows": any(w is not None for w in config.layer_windows),
        "ropes": len(config.ropes) != 1,
        "attention_scale": config.attention_scale not in (None, config.head_dim**-0.5),
        "qk_norm": config.qk_norm != (family == "qwen3"),
        "biases": biased and (family == "qwen3" or not config.output_bias),
    }
    found = [name for name, is_wrong in wrong.items() if is_wrong]
    if found:
        raise CheckpointError(
            f"a model with these settings cannot be written as {family}: "
            f"{', '.join(found)}; only plain Llama and Qwen3 layers can"
        )


def _rope(rope: RopeConfig) -> dict[str, Any]:
    values: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": None}
    if rope.kind == "linear":
        values["rope_scaling"] = {"rope_type": "linear", "factor": rope.factor}
    elif rope.kind == "llama3":
        values["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_positions,
        }
    elif rope.kind != "default" or rope.rotated != 1.0:
        raise CheckpointError(
            f"rotary embeddings of kind {rope.kind!r} (rotated {rope.rotated}) cannot "
            "be written yet; default, linear and llama3 can"
        )
    return values


def write_folder(
    folder: str | Path,
    values: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    overwrite: bool = False,
) -> Path:
    """Writes ``config.json`` and ``model.safetensors``; the weights come last.

    Raises:
        CheckpointError: the folder has a model already.
    """
    folder = Path(folder)
    weights = folder / "model.safetensors"
    if weights.exists() and not overwrite:
        raise CheckpointError(
            f"{weights} exists; choose another folder, or pass overwrite=True"
        )
    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps(dict(values), indent=2) + "\n"
    (folder / "config.json").write_text(config)
    partial = folder / "model.partial"
    save_file(
        {name: np.ascontiguousarray(x) for name, x in tensors.items()},
        partial,
        metadata={"format": "pt"},
    )
    os.replace(partial, weights)
    return folder
