"""What a checkpoint is, and which models are at hand, as plain values."""

import json
from typing import Any

import numpy as np

from jaxdec.io.checkpoint import Checkpoint, CheckpointError, expected_tensors
from jaxdec.io.drafters.checkpoint import DrafterCheckpoint
from jaxdec.io.drafters.mtp import read_native
from jaxdec.io.hub import BUILT_IN
from jaxdec.io.storage import cache_folder


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """The facts of a checkpoint, as JSON values; no tensor is read."""
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    shapes = expected_tensors(config)
    metadata = checkpoint.metadata
    name = metadata.get("general.name") or metadata.get("architectures")
    stored = metadata.get("number_formats") or metadata.get("stored_dtype")
    return {
        "source": checkpoint.source,
        "format": checkpoint.format,
        "name": ", ".join(name) if isinstance(name, list) else name,
        "family": config.family,
        "parameters": int(sum(np.prod(shape) for shape in shapes.values())),
        "tensors": len(shapes),
        "layers": config.num_layers,
        "width": config.hidden_size,
        "inner width": config.intermediate_size,
        "heads": config.num_heads,
        "key/value heads": config.num_kv_heads,
        "head width": config.head_dim,
        "vocabulary": config.vocab_size,
        "context": config.max_positions,
        "rope": [f"{rope.kind}, theta {rope.theta:g}" for rope in config.ropes],
        "tied embeddings": config.tie_embeddings,
        "experts": None if config.moe is None else config.moe.num_experts,
        "stored as": stored,
        "tokenizer": None if tokenizer is None else f"{tokenizer.vocab_size} tokens",
        "chat template": tokenizer is not None and tokenizer.is_chat,
        "stop tokens": [
            f"{token} {tokenizer.decode([token], skip_special_tokens=False)}"
            if tokenizer is not None
            else str(token)
            for token in checkpoint.stop_tokens
        ],
        "hash": checkpoint.content_hash,
    }


def describe_drafter(checkpoint: DrafterCheckpoint, source: str) -> dict[str, Any]:
    """The facts of a drafter, as JSON values."""
    facts = dict(checkpoint.facts)
    shapes = [np.shape(x) for x in checkpoint.tensors.values()]
    first = {
        "source": source,
        "format": checkpoint.format,
        "is": f"a drafter ({checkpoint.family})",
        "parameters": int(sum(np.prod(shape) for shape in shapes)),
        "tensors": len(shapes),
    }
    order = ("layout", "taps", "vocabulary", "draft_vocabulary", "embedding", "head")
    named = {name: facts.pop(name) for name in order if name in facts}
    facts.pop("format", None)
    return first | named | facts


def describe_native(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the multi-token-prediction modules in a model's own files are."""
    try:
        found = read_native(
            checkpoint.settings, checkpoint.extra, checkpoint.config, {}
        )
    except CheckpointError as error:
        return {"native MTP": f"cannot be used: {error}"}
    if found is None:
        return {"native MTP": None}
    return {"native MTP": found.format} | {
        f"MTP {name.replace('_', ' ')}": value for name, value in found.facts.items()
    }


def cached() -> dict[str, Any]:
    """The built-in models and those converted before, as JSON values."""
    folder = cache_folder()
    fetched = list((folder / "models").glob("*.gguf"))
    converted = []
    for file in sorted((folder / "converted").glob("*/checkpoint.json")):
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            size = (file.parent / "model.safetensors").stat().st_size
            name = record["metadata"].get("general.name", record["config"]["family"])
        except (OSError, ValueError, KeyError):
            # Damaged or half removed: a load converts it again.
            continue
        converted.append(
            {
                "name": name,
                "dtype": file.parent.name.rpartition("-")[2],
                "bytes": size,
                "hash": record["content_hash"],
            }
        )
    return {
        "cache": str(folder),
        "built_in": [
            {"name": name, "is_fetched": _is_fetched(name, fetched)}
            for name in BUILT_IN
        ],
        "converted": converted,
    }


def _is_fetched(name: str, files: list) -> bool:
    return any(file.name.lower().startswith(name) for file in files)
