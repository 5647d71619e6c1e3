"""Reads MTP modules: native ones in the files of their model, and those of speculators.

Files differ in names, in the order of the projection's columns, in whether gains are
stored as w where norms multiply by 1 + w, and in which hidden state the modules were
trained on. The first three are undone. The last is a choice (``hidden_source``,
``recycle``) with a default per family, for files do not say it, and a wrong one shows
only in drafts that are accepted less often; it is recorded, and may be overridden.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxdec.io.checkpoint import CheckpointError, reading
from jaxdec.io.drafters.checkpoint import DrafterCheckpoint
from jaxdec.io.drafters.layer_config import HYBRID, full_attention_config, left_out
from jaxdec.io.drafters.mtp_layouts import NATIVE, SPECULATORS, Found, find_modules
from jaxdec.io.drafters.mtp_tensors import NORM, Choices, ModuleReader
from jaxdec.io.drafters.words import class_defaults
from jaxdec.io.hf_fields import HARMLESS, Fields
from jaxdec.models.config import ModelConfig

_COUNTS = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "num_mtp_layers",
    "nextn_predict_layers",
)
_OF_FASTMTP = {"num_speculative_steps", "mtp_loss_step_weights", "mtp_loss_weight"}
"""Settings of these fine-tunes of MiMo, which read the target after its final norm."""

_UNSUPPORTED = {
    "self_attn.kv_a_proj_with_mqa": "its attention keeps a compressed latent (MLA)",
    "mlp.shared_expert": "its mixture of experts has shared ones",
    "e_score_correction_bias": "its router corrects the scores of experts",
    "attention_sink_bias": "its attention has sinks",
}


def recognise(
    values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> str | None:
    """What kind of MTP modules a checkpoint holds, in words; None if it holds none.

    Args:
        values: Its ``config.json``, or the metadata of a GGUF file's architecture.
        shapes: Of its tensors, under canonical names (`jaxdec.io.names`).
    """
    if "speculators_model_type" in values:
        kind = values["speculators_model_type"]
        return SPECULATORS.name if kind == "mtp" else None
    if any(name.startswith("dspark_") for name in values):
        return None
    num_layers = _num_layers(_text_values(values))
    found = None if num_layers is None else find_modules(NATIVE, shapes, num_layers)
    return None if found is None else found.layout.name


def read_mtp(
    values: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    target: ModelConfig | None,
    overrides: Mapping[str, Any] | None = None,
) -> DrafterCheckpoint:
    """Reads MTP modules of any kind.

    Args:
        values: ``config.json``, or the metadata of a GGUF file's architecture.
        tensors: Everything in the files, under canonical names (`jaxdec.io.names`),
            gains as stored.
        target: The model to draft for. None takes the modules on their own, with the
            embedding and head that lie beside them.
        overrides: Choices to make otherwise than by default: see
            `jaxdec.io.drafters.mtp_tensors.OVERRIDES`.

    Raises:
        CheckpointError: No modules, modules of a kind that is not supported, tensors
            that do not fit, modules of another model, or an unknown override.
    """
    if values.get("speculators_model_type") == "mtp":
        return _read_speculators(values, tensors, target, overrides)
    checkpoint = read_native(values, tensors, target, overrides)
    if checkpoint is None:
        raise CheckpointError(
            "the checkpoint holds no multi-token-prediction modules: no tensors like "
            f"{', '.join(layout.prefix.format(0) for layout in NATIVE)}. Many releases "
            "leave them out; use one that has them."
        )
    return checkpoint


@reading("config.json, where it describes MTP modules,")
def read_native(
    values: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    target: ModelConfig | None,
    overrides: Mapping[str, Any] | None = None,
) -> DrafterCheckpoint | None:
    """The MTP modules in a model's own files, or None if there are none.

    Args:
        values: As in `read_mtp`.
        tensors: As in `read_mtp`; the model's own tensors may be left out, and then
            copies of its embedding and head are kept, equal or not.
        target: The model itself, or None.
        overrides: As in `read_mtp`.

    Raises:
        CheckpointError: As `read_mtp`.
    """
    text = _text_values(values)
    num_layers = _num_layers(text) if target is None else target.num_layers
    found = find_modules(NATIVE, tensors, 0 if num_layers is None else num_layers)
    if found is None:
        return None
    _check_kind(found)
    block = full_attention_config(text) if target is None else target
    is_gguf = "block_count" in values
    choices = Choices(found.layout, overrides)
    if found.layout.hidden_first and _OF_FASTMTP & set(text):
        choices.default("hidden_source", "post", "a FastMTP fine-tune")
    if found.layout.shared_prefix and block.family in HYBRID and not is_gguf:
        choices.default("gains", "1+w", block.family)
    reader = ModuleReader(
        found=found,
        block=block,
        num_target_layers=block.num_layers,
        tensors=tensors,
        choices=choices,
        takes_tables=target is None,
        needs_tables=target is None,
        has_own_table=bool(text.get("mtp_use_dedicated_embeddings")),
        # GGUF files leave it out where it is the model's.
        spare_norm=NORM if is_gguf else None,
    )
    count = next((text[name] for name in _COUNTS if text.get(name)), None)
    return reader.read(count, {})


def _read_speculators(values, tensors, target, overrides) -> DrafterCheckpoint:
    fields = Fields(values, "config.json")
    for name in ("speculators_model_type", "speculators_version", "draft_vocab_size"):
        fields.get(name, None)
    fields.get("tie_word_embeddings", None)
    layers = fields.get("transformer_layer_config")
    if not isinstance(layers, Mapping):
        raise CheckpointError(
            f"transformer_layer_config must be a dictionary, got {layers!r}; take "
            "config.json from the export again."
        )
    count = fields.count("num_nextn_predict_layers", default=1)
    facts = _speculators_facts(fields.get("speculators_config", None) or {})
    fields.finish(HARMLESS)
    found = find_modules((SPECULATORS,), tensors, 0)
    if found is None:
        raise CheckpointError(
            "the files hold no tensors of an MTP module (mtp_layers.0, ...); fetch "
            "the whole export."
        )
    _check_kind(found)
    block = full_attention_config(layers)
    num_layers = block.num_layers
    if target is not None:
        for name in ("hidden_size", "vocab_size"):
            ours, theirs = getattr(block, name), getattr(target, name)
            if ours != theirs:
                raise CheckpointError(
                    f"the MTP module has {name}={ours}, but the target has {theirs}: "
                    "it was made for another model. Load it with that one."
                )
        num_layers = target.num_layers
        block = dataclasses.replace(
            block,
            embedding_scale=target.embedding_scale,
            logit_softcap=target.logit_softcap,
        )
    choices = Choices(found.layout, overrides, class_defaults(left_out(layers)))
    if block.family in HYBRID:
        choices.default("gains", "1+w", block.family)
    reader = ModuleReader(
        found=found,
        block=block,
        num_target_layers=num_layers,
        tensors=tensors,
        choices=choices,
        takes_tables=True,
        needs_tables=target is None,
        is_whole=True,
    )
    return reader.read(count, facts)


def _speculators_facts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Advice in the file: it changes nothing that is computed."""
    facts: dict[str, Any] = {}
    methods = values.get("proposal_methods") or [{}]
    facts["draft_length"] = methods[0].get("speculative_tokens")
    facts["made_for"] = (values.get("verifier") or {}).get("name_or_path")
    return {name: value for name, value in facts.items() if value is not None}


def _text_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that is about text."""
    inner = values.get("text_config")
    return inner if isinstance(inner, Mapping) else values


def _num_layers(text: Mapping[str, Any]) -> int | None:
    """Of the model, without its modules."""
    if "block_count" in text:
        return text["block_count"] - text.get("nextn_predict_layers", 0)
    return text.get("num_hidden_layers")


def _check_kind(found: Found) -> None:
    for mark, reason in _UNSUPPORTED.items():
        marked = [name for name in found.names if mark in name]
        if marked:
            raise CheckpointError(
                f"the MTP module with tensor {marked[0]!r} is not supported: {reason}. "
                "Use a model whose modules have ordinary attention and a dense MLP, or "
                "a plain mixture of experts."
            )
