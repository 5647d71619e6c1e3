"""Reads a Hugging Face ``config.json`` into a `ModelConfig`: finds the family."""

from collections.abc import Mapping
from typing import Any

from jaxdec.io.checkpoint import CheckpointError, reading
from jaxdec.io.hf_families import FAMILIES, REFUSED
from jaxdec.io.hf_fields import HARMLESS, Fields
from jaxdec.models.config import ModelConfig


@reading("config.json")
def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Reads the contents of a ``config.json``.

    Args:
        values: The parsed file. A multimodal wrapper is read for its text model.

    Raises:
        CheckpointError: The model family, an activation, a kind of rotary embedding or
            a setting is not supported, or a needed setting is absent.
    """
    if values.get("quantization_config") is not None:
        raise CheckpointError(
            "the weights are quantised (quantization_config in config.json), which is "
            "not supported for safetensors; use the unquantised release, or a GGUF "
            "file."
        )
    if isinstance(values.get("text_config"), Mapping):
        inner = dict(values["text_config"])
        if "tie_word_embeddings" in values:
            inner.setdefault("tie_word_embeddings", values["tie_word_embeddings"])
        return config_from_hf(inner)
    kind = values.get("model_type")
    if kind in REFUSED:
        raise CheckpointError(
            f"model_type {kind!r} is not supported: {REFUSED[kind]}. Use a model of "
            f"one of {', '.join(FAMILIES)}."
        )
    if kind not in FAMILIES:
        raise CheckpointError(
            f"model_type {kind!r} is not supported; supported are "
            f"{', '.join(FAMILIES)}."
        )
    family = FAMILIES[kind]
    architectures = values.get("architectures") or [family.architecture]
    if list(architectures) != [family.architecture]:
        raise CheckpointError(
            f"architecture {', '.join(architectures)} is not a plain {kind} language "
            f"model ({family.architecture}); if it is a drafter, load it as one."
        )
    fields = Fields(values, "config.json")
    config = family.read(fields)
    fields.finish(HARMLESS)
    return config


@reading("config.json or generation_config.json")
def stop_tokens_from_hf(
    generation: Mapping[str, Any] | None, config: Mapping[str, Any]
) -> tuple[int, ...]:
    """The ids that end an answer: an int, a list, or nothing.

    ``generation_config.json`` is preferred: instruction-tuned releases list the end of
    a turn only there.
    """
    text = config.get("text_config")
    sources = (generation or {}, config, text if isinstance(text, Mapping) else {})
    for source in sources:
        ids = source.get("eos_token_id")
        if ids is not None:
            ids = [ids] if isinstance(ids, int) else ids
            return tuple(dict.fromkeys(int(i) for i in ids))
    return ()
