"""Writes drafters as serving engines load them: speculators, z-lab, DeepSpec.

    eagle3   speculators
    dflash   z-lab (all of the target's tokens), or speculators
    dspark   speculators, or DeepSpec (all of the target's tokens, tables included)
    mtp      speculators, or native: beside the target's layers in one checkpoint
             (`mtp_tensors`, DeepSeek's layout)

What is written is what `jaxdec.io.drafters.read` reads, field for field; a drafter that
a format cannot express is an error, never an approximation.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.drafters.calibration import write_calibration
from jaxdec.io.drafters.checkpoint import DrafterCheckpoint
from jaxdec.io.drafters.mtp_layouts import NATIVE, SPECULATORS, Layout
from jaxdec.io.hf_write import config_to_hf, write_folder
from jaxdec.models.config import ModelConfig
from jaxdec.models.mtp import MtpConfig

VERSION = "0.5.0"
"""Of the speculators format that is written."""

FORMATS = {
    "eagle": ("speculators",),
    "block": ("speculators", "zlab", "deepspec"),
    "mtp": ("speculators",),
}
"""By family, the formats of a folder of its own, the usual one first."""


def write_drafter(
    folder: str | Path,
    checkpoint: DrafterCheckpoint,
    *,
    target: ModelConfig,
    target_name: str,
    tables: Mapping[str, np.ndarray],
    format: str | None = None,
    draft_length: int,
    overwrite: bool = False,
) -> str:
    """Writes a drafter into a folder of its own; returns the format.

    Args:
        folder: a new one.
        checkpoint: the drafter.
        target: what it drafts for.
        target_name: what engines find that by.
        tables: the target's ``embedding`` and ``head``, for formats with copies.
        format: one of `FORMATS`; None is the usual one of its kind.
        draft_length: tokens that are drafted.
        overwrite: whether to replace what is there.

    Raises:
        CheckpointError: the format cannot express it, or the folder is in use.
    """
    family, config = checkpoint.family, checkpoint.config
    if family not in FORMATS:
        raise CheckpointError(
            "a draft model is a language model of its own; write it with its tables, "
            "by jaxdec.export_drafter"
        )
    has_heads = family == "block" and (config.markov, config.confidence) != (
        "none",
        "none",
    )
    if format is None:
        is_dflash = family == "block" and not has_heads and not config.own_head
        format = "zlab" if is_dflash else "speculators"
    if format not in FORMATS[family]:
        raise CheckpointError(
            f"drafters of this family are written as {' or '.join(FORMATS[family])}, "
            f"not as {format!r}"
        )
    tensors = dict(checkpoint.tensors)
    verifier = {"name_or_path": target_name, "architectures": [_class_of(target)]}
    if family == "eagle":
        values = _eagle3(config, verifier, draft_length)
    elif family == "mtp":
        values, tensors = _mtp(config, tensors, verifier, draft_length)
    elif format == "zlab":
        values = _zlab(config, target)
    elif format == "deepspec":
        values = _deepspec(config, target, target_name)
        tensors |= {
            "embed_tokens.weight": tables["embedding"],
            "lm_head.weight": tables["head"],
        }
    else:
        values = _speculators_block(config, verifier, has_heads, draft_length)
    if "d2t" in tensors:
        offsets = np.asarray(tensors["d2t"], np.int64)
        kept = np.zeros(target.vocab_size, bool)
        kept[np.arange(len(offsets)) + offsets] = True
        tensors |= {"d2t": offsets, "t2d": kept}
    folder = write_folder(folder, values, tensors, overwrite=overwrite)
    write_calibration(folder, checkpoint)
    return format


def _class_of(target: ModelConfig) -> str:
    return config_to_hf(target)["architectures"][0]


def _speculators(kind: str, layers: dict[str, Any], verifier, draft_length: int):
    """What all files of speculators have."""
    names = {
        "eagle3": "Eagle3DraftModel",
        "dflash": "DFlashDraftModel",
        "dspark": "DSparkDraftModel",
        "mtp": "MTPDraftModel",
    }
    layers = {k: v for k, v in layers.items() if k != "architectures"}
    return {
        "architectures": [names[kind]],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "tie_word_embeddings": False,
        "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": draft_length,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": verifier,
        },
    }


def _eagle3(config, verifier, draft_length) -> dict[str, Any]:
    if config.fusion != "taps" or config.is_parallel or config.fusion_bias:
        raise CheckpointError(
            "only EAGLE-3 drafters can be written as speculators' eagle3; this one "
            "is EAGLE-1 or P-EAGLE"
        )
    if config.wide_layers != 1:
        raise CheckpointError(
            f"speculators' eagle3 has one layer that reads the embedding, this drafter "
            f"{config.wide_layers}; train one with wide_layers=1"
        )
    return _speculators(
        "eagle3", config_to_hf(config.layers), verifier, draft_length
    ) | {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.fusion_norm == "all",
        "fc_norm": config.fusion_norm == "each",
        "norm_output": config.output_norm == "recurrent",
        "embed_requires_grad": config.own_embedding,
    }


def _mtp(config: MtpConfig, tensors, verifier, draft_length):
    if config.num_native_modules != 1:
        raise CheckpointError(
            f"speculators' mtp has one module, this drafter "
            f"{config.num_native_modules}; export them beside the target's layers"
        )
    if (config.hidden_source, config.recycle) != ("post", "post"):
        raise CheckpointError(
            "speculators' mtp is served with hidden states after the final norm, and "
            f"this module reads {config.hidden_source!r} and passes on "
            f"{config.recycle!r}; it cannot be written so"
        )
    layers = config_to_hf(config.block) | {
        "num_hidden_layers": config.num_target_layers
    }
    values = _speculators("mtp", layers, verifier, draft_length)
    values |= {"num_nextn_predict_layers": 1}
    return values, _renamed(SPECULATORS, _module_tensors(config, tensors), 0)


def mtp_tensors(
    checkpoint: DrafterCheckpoint,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Fields and tensors that a target's own checkpoint gets for its MTP modules.

    In DeepSeek's layout: modules follow the last layer, and read and pass on hidden
    states after the norms.

    Raises:
        CheckpointError: the modules were not trained so.
    """
    config = checkpoint.config
    if (config.hidden_source, config.recycle) != ("post", "post"):
        raise CheckpointError(
            "in DeepSeek's layout modules read hidden states after the norms, and "
            f"this one was trained on {config.hidden_source!r}, {config.recycle!r}; "
            "it cannot be written so"
        )
    tensors = _module_tensors(config, checkpoint.tensors)
    tensors = _renamed(NATIVE[0], tensors, config.num_target_layers)
    return {"num_nextn_predict_layers": config.num_native_modules}, tensors


def _module_tensors(config: MtpConfig, tensors) -> dict[str, np.ndarray]:
    """Without a smaller vocabulary: files have none, engines choose it as they run."""
    parts = ("head.weight", "d2t") if config.is_reduced else ()
    return {name: x for name, x in tensors.items() if name not in parts}


def _renamed(layout: Layout, tensors, first: int) -> dict[str, np.ndarray]:
    return {layout.file_name(name, first): x for name, x in tensors.items()}


def _ids(config) -> list[int]:
    """The layers whose outputs are read."""
    if 0 in config.taps:
        raise CheckpointError(
            "a drafter that reads the embedding (tap 0) cannot be written in a format "
            "whose ids name outputs of layers; write it as speculators"
        )
    return [tap - 1 for tap in config.taps]


def _plain_layers(config) -> dict[str, Any]:
    """The layers' own fields, all with full attention."""
    if any(w is not None for w in config.windows) or any(config.causal):
        raise CheckpointError(
            "block drafters with windows or causal blocks cannot be written yet; "
            "those with full attention can"
        )
    values = config_to_hf(config.layers, "qwen3")
    return values | {
        "layer_types": ["full_attention"] * config.layers.num_layers,
        "use_sliding_window": False,
    }


def _zlab(config, target: ModelConfig) -> dict[str, Any]:
    is_other = config.markov != "none" or config.confidence != "none"
    if is_other or config.sample_from_anchor or config.own_head:
        raise CheckpointError(
            "z-lab's DFlash fills masks in place, says all of the target's tokens and "
            "has no further heads, unlike this drafter; write it as speculators"
        )
    return _plain_layers(config) | {
        "architectures": ["DFlashDraftModel"],
        "tie_word_embeddings": True,
        "block_size": config.block_size,
        "num_target_layers": target.num_layers,
        "dflash_config": {
            "mask_token_id": config.mask_token,
            "target_layer_ids": _ids(config),
        },
    }


def _deepspec(config, target: ModelConfig, target_name: str) -> dict[str, Any]:
    if not config.sample_from_anchor or config.draft_vocab_size != target.vocab_size:
        raise CheckpointError(
            "DeepSpec's drafters begin at the anchor and say all of the target's "
            f"tokens; this one says {config.draft_vocab_size} of {target.vocab_size} "
            f"(from the anchor: {config.sample_from_anchor}); write it as speculators"
        )
    values = _plain_layers(config) | {
        "architectures": ["Qwen3DSparkModel"],
        "tie_word_embeddings": False,
        "num_target_layers": target.num_layers,
        "target_layer_ids": _ids(config),
        "target_model_name_or_path": target_name,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token,
        "num_anchors": 512,
        "markov_rank": config.markov_rank,
        "enable_confidence_head": config.confidence != "none",
    }
    if config.markov != "none":
        values["markov_head_type"] = config.markov
    if config.confidence != "none":
        values["confidence_head_with_markov"] = (
            config.confidence == "hidden_and_previous"
        )
    return values


def _speculators_block(config, verifier, has_heads, draft_length) -> dict[str, Any]:
    kind = "dspark" if has_heads else "dflash"
    layers = _plain_layers(config)
    values = _speculators(kind, layers, verifier, draft_length) | {
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": list(config.taps),
        "mask_token_id": config.mask_token,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": False,
        "target_hidden_size": config.layers.hidden_size,
    }
    if has_heads:
        values |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": "vanilla" if config.markov == "none" else config.markov,
            "enable_confidence_head": config.confidence != "none",
            "confidence_head_with_markov": config.confidence == "hidden_and_previous",
        }
    return values
