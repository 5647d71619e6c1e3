"""What a checkpoint is, and which models are at hand, as plain values.

Models and drafters of every format are told in the same words, which are also the keys
of the JSON. What does not apply is None, or empty.
"""

import json
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxdec.io.checkpoint import Checkpoint, CheckpointError, expected_tensors
from jaxdec.io.drafters.checkpoint import DrafterCheckpoint
from jaxdec.io.drafters.mtp import read_native
from jaxdec.io.drafters.words import attention, by_layer, name_layers
from jaxdec.io.hub import BUILT_IN, known_name
from jaxdec.io.storage import cache_folder
from jaxdec.loaded_drafter import LoadedDrafter
from jaxdec.models.config import ModelConfig, RopeConfig
from jaxdec.trained import add_drafter


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """The facts of a checkpoint, as JSON values; no tensor is read."""
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    shapes = expected_tensors(config)
    metadata = checkpoint.metadata
    name, moe = metadata.get("general.name"), config.moe
    stored = metadata.get("number_formats") or metadata.get("stored_dtype")
    return {
        "is": "a language model",
        "source": checkpoint.source,
        "format": checkpoint.format,
        "name": known_name(checkpoint.content_hash, name),
        "name in the file": name,
        "architecture": ", ".join(metadata.get("architectures") or ()) or None,
        "family": config.family,
        "parameters": _num_weights(shapes.values()),
        "tensors": len(shapes),
        "layers": config.num_layers,
        "width": config.hidden_size,
        "inner width": config.intermediate_size,
        "heads": config.num_heads,
        "key/value heads": config.num_kv_heads,
        "head width": config.head_dim,
        "experts": None if moe is None else moe.num_experts,
        "experts per token": None if moe is None else moe.num_experts_per_token,
        "vocabulary": config.vocab_size,
        "tied embeddings": config.tie_embeddings,
        "positions": _positions(config),
        "attention": attention(config.layer_windows),
        "context": config.max_positions,
        "stored as": stored,
        "tokenizer": None if tokenizer is None else f"{tokenizer.vocab_size:,} tokens",
        "chat template": tokenizer is not None and tokenizer.is_chat,
        "stop tokens": [
            f"{token} {tokenizer.decode([token], skip_special_tokens=False)}"
            if tokenizer is not None
            else str(token)
            for token in checkpoint.stop_tokens
        ],
        "hash": checkpoint.content_hash,
    }


def _num_weights(shapes) -> int:
    return int(sum(np.prod(shape) for shape in shapes))


def _positions(config: ModelConfig) -> str:
    """How the model knows where a token stands."""
    if config.learned_positions:
        return "learned"
    return by_layer([_rope(config.ropes[i]) for i in config.layer_rope or (0,)])


def _rope(rope: RopeConfig) -> str:
    theta = f"{rope.theta:,.0f}" if rope.theta == int(rope.theta) else f"{rope.theta:g}"
    text = f"rotary, theta {theta}"
    if rope.kind == "factors":
        return f"{text}, scaled for each frequency"
    return (
        text
        if rope.kind == "default"
        else f"{text}, scaled x {rope.factor:g} ({rope.kind})"
    )


_ORDER = (
    "num_native_modules",
    "layers",
    "width",
    "layout",
    "draft_length",
    "block_size",
    "taps",
    "reads",
    "vocabulary",
    "draft_vocabulary",
    "embedding",
    "head",
    "markov_head",
    "confidence_head",
    "attention",
    "context",
    "mask_token",
    "proposal",
    "made_for",
)
"""Facts of drafters; `choices` and `overrides` come last."""


def describe_drafter(
    checkpoint: DrafterCheckpoint,
    source: str,
    *,
    content_hash: str,
    made_for: str | None = None,
    target: ModelConfig | None = None,
) -> dict[str, Any]:
    """The facts of a drafter, as JSON values.

    Args:
        checkpoint: the drafter.
        source: the name that it was asked for by.
        content_hash: of its files.
        made_for: the target, as its authors call it.
        target: the target, if it is at hand.
    """
    facts = {"made_for": made_for} | _facts(checkpoint, target)
    return {
        "is": "a drafter",
        "source": source,
        "format": checkpoint.format,
        "strategies": _strategies(checkpoint),
        "parameters": _num_weights(np.shape(x) for x in checkpoint.tensors.values()),
        "tensors": len(checkpoint.tensors),
        **_in_words(facts),
        "hash": content_hash,
    }


def _facts(checkpoint: DrafterCheckpoint, target: ModelConfig | None) -> dict[str, Any]:
    """What the reader says, and the taps in words."""
    taps = checkpoint.facts["taps"]
    num_layers = None if target is None else target.num_layers
    if checkpoint.family == "mtp":
        num_layers = checkpoint.config.num_target_layers
    reads = taps if isinstance(taps, str) else _reads(taps, num_layers)
    return checkpoint.facts | {"reads": reads}


def _reads(taps: list[int], num_layers: int | None) -> str:
    """Residual streams of the target: tap t enters layer t."""
    last = float("inf") if num_layers is None else num_layers
    inner = [tap for tap in taps if tap < last]
    parts = [f"what enters {name_layers(inner)} of the target"] if inner else []
    if last in taps:
        parts.append("what leaves the last layer of the target")
    if last + 1 in taps:
        parts.append("the target's hidden state after its final norm")
    return "; ".join(parts)


def _in_words(facts: Mapping[str, Any]) -> dict[str, Any]:
    """In the common order, under names in words."""
    ordered = {name: facts[name] for name in _ORDER if name in facts}
    rest = {name: value for name, value in facts.items() if name not in ordered}
    names = {"num_native_modules": "modules"}
    return {
        names.get(name, name).replace("_", " "): value
        for name, value in (ordered | rest).items()
    }


def _strategies(checkpoint: DrafterCheckpoint) -> list[str]:
    """What a target can be asked for by name, once it has this drafter."""
    drafter = LoadedDrafter(
        family=checkpoint.family,
        config=checkpoint.config,
        own=(),
        name="",
        format=checkpoint.format,
        facts=checkpoint.facts,
    )
    names = add_drafter(types.SimpleNamespace(strategies={}, notes={}), drafter)
    return sorted(names, key=lambda name: name.startswith("first_of"))


def describe_native(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the multi-token-prediction modules in a model's own files are."""
    try:
        found = read_native(
            checkpoint.settings, checkpoint.extra, checkpoint.config, {}
        )
    except CheckpointError as error:
        return {"MTP": f"cannot be used: {error}"}
    if found is None:
        return {"MTP": None}
    words = _in_words(_facts(found, checkpoint.config))
    facts = {"strategies": _strategies(found), **words}
    return {"MTP": found.format} | {f"MTP {k}": v for k, v in facts.items()}


def cached() -> dict[str, Any]:
    """The built-in models and those converted before, as JSON values."""
    folder = cache_folder()
    fetched = list((folder / "models").glob("*.gguf"))
    converted = []
    for file in sorted((folder / "converted").glob("*/checkpoint.json")):
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            size = (file.parent / "model.safetensors").stat().st_size
            stored = record["metadata"].get("general.name")
            name = known_name(record["content_hash"], stored)
        except (OSError, ValueError, KeyError):
            # Damaged or half removed: a load converts it again.
            continue
        converted.append(
            {
                "name": name or record["config"]["family"],
                "name_in_the_file": stored,
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
