"""Drafters, and targets with their MTP modules, as other engines load them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.drafters.write import mtp_tensors, write_drafter
from jaxdec.io.hf_write import config_to_hf, write_folder
from jaxdec.loaded_drafter import LoadedDrafter
from jaxdec.models.weights import layer_tensors


def export_drafter(
    folder: str | Path,
    drafter: LoadedDrafter,
    lm: Any,
    *,
    format: str | None = None,
    target_name: str | None = None,
    overwrite: bool = False,
) -> str:
    """Writes a drafter in the format that serving engines load.

    Args:
        folder: a new one.
        drafter: the drafter.
        lm: its target.
        format: ``"speculators"``, ``"zlab"`` (DFlash), ``"deepspec"`` (DSpark),
            ``"verifier"`` (MTP: the target's whole checkpoint with the modules in it)
            or ``"model"`` (a draft model: a language model); None is the usual one.
        target_name: what engines find the target by; None is its own name.
        overwrite: whether to replace what is there.

    Returns:
        The format.

    Raises:
        jaxdec.io.checkpoint.CheckpointError: the format cannot express the drafter, or
            the folder is in use.
    """
    is_draft = drafter.family == "draft"
    if format is None:
        format = {"mtp": "verifier", "draft": "model"}.get(drafter.family)
    if is_draft != (format == "model"):
        raise CheckpointError(
            f"a drafter of kind {drafter.kind!r} cannot be written as {format!r}; a "
            "draft model is written as 'model', and nothing else is"
        )
    if is_draft:
        tensors = layer_tensors(drafter.config, drafter.own, drafter.dtype)
        _write_model(folder, drafter.config, tensors, {}, lm, overwrite)
        return format
    if format == "verifier":
        if drafter.family != "mtp":
            raise CheckpointError(
                f"a drafter of kind {drafter.kind!r} is no part of a target's own "
                "checkpoint; only MTP modules are, so leave format out"
            )
        fields, modules = mtp_tensors(drafter.checkpoint)
        tensors = layer_tensors(lm.config, lm.params, lm.dtype) | modules
        _write_model(folder, lm.config, tensors, fields, lm, overwrite)
        return format
    return write_drafter(
        folder,
        drafter.checkpoint,
        target=lm.config,
        target_name=lm.name if target_name is None else target_name,
        tables=_tables(lm),
        format=format,
        draft_length=drafter.draft_length,
        overwrite=overwrite,
    )


def _tables(lm: Any) -> dict[str, np.ndarray]:
    embedding = np.asarray(lm.params["embedding"])
    head = lm.params.get("head")
    return {
        "embedding": embedding,
        "head": embedding if head is None else np.asarray(head["weight"]),
    }


def _write_model(folder, config, tensors, fields, lm, overwrite) -> None:
    """A language model with the target's tables and tokenizer."""
    tables = _tables(lm)
    tensors = tensors | {"model.embed_tokens.weight": tables["embedding"]}
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = tables["head"]
    values = config_to_hf(config, stop_tokens=lm.stop_tokens) | fields
    values["torch_dtype"] = lm.dtype
    folder = write_folder(folder, values, tensors, overwrite=overwrite)
    if lm.tokenizer is not None:
        lm.tokenizer.save(folder)
    text = json.dumps({"eos_token_id": list(lm.stop_tokens)})
    if lm.stop_tokens:
        (folder / "generation_config.json").write_text(text + "\n")
