"""Reads published block drafters: DFlash and DSpark of z-lab, DeepSpec, speculators.

A drafter that is wired wrongly still runs, and still gives the target's text; it is
only slow. So everything that can be checked is checked here, before a single token: the
layout, the taps against the width of the fusion, the vocabulary and its map, every
tensor's name, shape and values, and the target that it belongs to.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxdec.io.checkpoint import (
    CheckpointError,
    check_finite,
    check_floating,
    shapes_of,
)
from jaxdec.io.drafters.block_formats import (
    Described,
    read_deepspec,
    read_speculators,
    read_zlab,
)
from jaxdec.io.drafters.block_tensors import (
    check_drafter_tensors,
    check_identity,
    stored_tensors,
    target_ids,
)
from jaxdec.io.drafters.checkpoint import DrafterCheckpoint
from jaxdec.io.drafters.words import attention, name_layers, owner
from jaxdec.models.block import BlockConfig
from jaxdec.models.block_weights import expected_block_tensors
from jaxdec.models.config import ModelConfig

_SPECFORGE = ("DSparkDraftModel", "DominoDraftModel", "DFlash2DraftModel")

_OVERRIDES: dict[str, str] = {
    "taps": "residual streams of the target to read, 0 the embedding",
    "sample_from_anchor": "true if row k says the token after its position",
    "mask_token_id": "the mask's id",
    "attention": "'training', 'vllm' or 'full': how sliding layers see the block",
    "embedding": "'own' or 'target'",
    "head": "'own' or 'target'",
    "embedding_scale": "what rows of the embedding are multiplied by",
    "confidence": "'none' to do without a confidence head",
    "token_map": "'offsets' or 'absolute': what d2t holds",
}


def recognise(
    values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> str | None:
    """The format of a block drafter's configuration; None if it is something else.

    Formats that are known but not supported are named too, and refused by `read_block`.
    """
    del shapes
    kind = values.get("speculators_model_type")
    if kind is not None:
        return {"dflash": "speculators DFlash", "dspark": "speculators DSpark"}.get(
            kind
        )
    architecture = (values.get("architectures") or [""])[0]
    if architecture == "Qwen3DSparkModel":
        has_heads = values.get("markov_rank") or values.get("enable_confidence_head")
        return "DeepSpec DSpark" if has_heads else "DeepSpec DFlash"
    if architecture == "Gemma4DSparkModel":
        return "DeepSpec DSpark for Gemma 4"
    inner = values.get("dflash_config")
    inner = inner if isinstance(inner, Mapping) else {}
    projector = inner.get("projector_type", values.get("projector_type"))
    if architecture in _SPECFORGE or projector not in (None, "dflash"):
        return "SpecForge block drafter"
    if architecture == "DFlashDraftModel" or inner:
        return "z-lab DFlash"
    return None


def read_block(
    values: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    target: ModelConfig,
    overrides: Mapping[str, Any] | None = None,
) -> DrafterCheckpoint:
    """Reads a block drafter, and checks it against its target.

    Args:
        values: the parsed ``config.json``.
        tensors: of the weights file, under its names, with or without ``model.``.
        target: the model it is to draft for.
        overrides: answers to questions that the file leaves open; see `Raises`.

    Raises:
        CheckpointError: the format or a variant is not supported, a field is missing,
            the drafter belongs to another target, tensors are missing, unexpected,
            mis-shaped or not finite, or an override is unknown.
    """
    overrides = dict(overrides or {})
    unknown = sorted(set(overrides) - set(_OVERRIDES))
    if unknown:
        known = "; ".join(f"{name}: {what}" for name, what in _OVERRIDES.items())
        raise CheckpointError(
            f"unknown overrides {', '.join(unknown)}; a block drafter has {known}"
        )
    stored = stored_tensors(tensors)
    kind = recognise(values, shapes_of(tensors))
    if kind == "z-lab DFlash":
        found = read_zlab(values, target)
    elif kind in ("DeepSpec DSpark", "DeepSpec DFlash"):
        found = read_deepspec(values)
    elif kind in ("speculators DSpark", "speculators DFlash"):
        found = read_speculators(values)
    else:
        raise CheckpointError(
            f"this drafter is a {kind or 'drafter of another family'}, which is not "
            "supported; supported are DFlash and DSpark of z-lab (DFlash), DeepSpec "
            "(for Qwen3) and speculators"
        )
    config = _resolve(found, stored, target, overrides)
    _check_pairing(config, found, stored, target)
    wanted = expected_block_tensors(config)
    check_drafter_tensors(wanted, config, stored)
    loaded = {
        name: np.asarray(tensors[stored[name][0]]) for name in wanted if name != "d2t"
    }
    check_floating(loaded)
    check_finite(loaded)
    if "d2t" in wanted:
        ids = target_ids(config, tensors, stored, overrides)
        loaded["d2t"] = ids - np.arange(len(ids), dtype=np.int32)
    else:
        check_identity(config, tensors, stored)
    return DrafterCheckpoint(
        family="block",
        config=config,
        tensors=loaded,
        format=found.format,
        facts=_facts(config, found, overrides),
    )


def _resolve(found: Described, stored, target, overrides) -> BlockConfig:
    """The configuration, with what was asked for in place of what was found."""
    from_anchor = overrides.get("sample_from_anchor", found.sample_from_anchor)
    if not isinstance(from_anchor, bool):
        raise CheckpointError(
            f"override sample_from_anchor must be true or false, got {from_anchor!r}"
        )
    taps = overrides.get("taps", found.taps)
    num = target.num_layers
    if found.reads_outputs and num in found.taps and "taps" not in overrides:
        raise CheckpointError(
            f"taps {list(found.taps)} (layer ids + 1) hold the output of the target's "
            "last layer, which the reference code reads after the final norm and "
            f"serving engines before it; say which by overrides={{'taps': [...]}}, "
            f"{num + 1} being after and {num} before"
        )
    if not isinstance(taps, list | tuple) or any(type(t) is not int for t in taps):
        raise CheckpointError(
            f"override taps must be a list of whole numbers, got {taps!r}"
        )

    def choice(name, default, *allowed):
        value = overrides.get(name, default)
        if value not in allowed:
            raise CheckpointError(
                f"override {name} must be one of {', '.join(map(repr, allowed))}, got "
                f"{value!r}"
            )
        return value

    def source(name, tensor):
        default = {"nothing": "target", "all": "own"}.get(
            found.brings, "own" if tensor in stored else "target"
        )
        if found.brings == "some" and default == "target" and name not in overrides:
            found.choices[name] = f"not in the file ({tensor}), so the target's"
        return choice(name, default, "own", "target") == "own"

    attention = choice("attention", "training", "training", "vllm", "full")
    num = found.layers.num_layers
    windows, causal, window_from = found.windows, found.causal, found.window_from
    if attention == "vllm":
        causal, window_from = found.vllm_causal, "row"
    elif attention == "full":
        windows, causal = (None,) * num, (False,) * num
    scale = overrides.get("embedding_scale", found.embedding_scale)
    mask = overrides.get("mask_token_id", found.mask_token)
    if type(mask) is not int or not isinstance(scale, int | float):
        raise CheckpointError(
            "overrides mask_token_id and embedding_scale must be numbers, got "
            f"{mask!r} and {scale!r}"
        )
    return BlockConfig(
        layers=found.layers,
        taps=tuple(taps),
        block_size=found.block_size,
        sample_from_anchor=from_anchor,
        mask_token=mask,
        draft_vocab_size=found.draft_vocab_size,
        own_embedding=source("embedding", "embed_tokens.weight"),
        own_head=source("head", "lm_head.weight"),
        embedding_scale=float(scale),
        logit_softcap=found.logit_softcap,
        markov=found.markov,
        markov_rank=found.markov_rank,
        confidence=choice("confidence", found.confidence, found.confidence, "none"),
        windows=windows,
        causal=causal,
        window_from=window_from,
    )


def _check_pairing(config: BlockConfig, found: Described, stored, target) -> None:
    """Raises where the drafter cannot belong to this target."""
    size, vocab = target.hidden_size, target.vocab_size
    layers = config.layers
    for what, ours, theirs in (
        ("hidden size", layers.hidden_size, size),
        ("vocabulary", layers.vocab_size, vocab),
        ("number of target layers", found.num_target_layers, target.num_layers),
    ):
        if ours is not None and ours != theirs:
            raise CheckpointError(
                f"the drafter was made for another target: {what} {ours}, but the "
                f"target's is {theirs}; load the target that it was trained with"
            )
    bad = [tap for tap in config.taps if not 0 <= tap <= target.num_layers + 1]
    if bad or not config.taps:
        raise CheckpointError(
            f"taps {list(config.taps)} are out of range: a target of "
            f"{target.num_layers} layers has taps 0 (the embedding) to "
            f"{target.num_layers}, and {target.num_layers + 1} after the final norm; "
            "correct the layer ids"
        )
    width = stored["fc.weight"][1][-1] if "fc.weight" in stored else None
    if width is not None and width != len(config.taps) * size:
        raise CheckpointError(
            f"fc.weight reads {width} features, but {len(config.taps)} taps "
            f"{list(config.taps)} of a target of width {size} give "
            f"{len(config.taps) * size}; correct the layer ids, or load the target "
            "that the drafter was trained with"
        )
    if not 0 <= config.mask_token < vocab:
        raise CheckpointError(
            f"mask token {config.mask_token} is not in the embedding, which has "
            f"{vocab} rows; correct mask_token_id"
        )
    if config.draft_vocab_size > vocab:
        raise CheckpointError(
            f"the drafter has {config.draft_vocab_size} tokens, more than the target's "
            f"{vocab}; load the target that it was trained with"
        )
    if config.max_length < 1:
        raise CheckpointError(
            f"a block of {config.block_size} rows in the 1 + N layout drafts nothing; "
            "correct block_size or sample_from_anchor"
        )


def _facts(config: BlockConfig, found: Described, overrides) -> dict[str, Any]:
    """What ``jaxdec inspect`` tells a person."""
    head = config.markov
    sees = {
        "none": "none",
        "hidden": "of the hidden state",
        "hidden_and_previous": "of the hidden state and the token before",
    }
    return {
        "layers": config.layers.num_layers,
        "width": config.layers.hidden_size,
        "layout": "anchor first: a row says the token after its place"
        if config.sample_from_anchor
        else "1 + N: a masked row says the token at its place",
        "block_size": config.block_size,
        "draft_length": config.max_length,
        "taps": list(config.taps),
        "vocabulary": config.layers.vocab_size,
        "draft_vocabulary": config.draft_vocab_size,
        "embedding": owner(config.own_embedding),
        "head": owner(config.own_head),
        "markov_head": head if head == "none" else f"{head}, rank {config.markov_rank}",
        "confidence_head": sees[config.confidence],
        "attention": _attention(config),
        "context": config.layers.max_positions,
        "mask_token": config.mask_token,
        "proposal": "at temperature 0 the likeliest tokens, else sampled"
        + (" (z-lab's own code drafts greedily)" if "z-lab" in found.format else ""),
        "choices": dict(found.choices),
        "overrides": {name: overrides[name] for name in sorted(overrides)},
    }


def _attention(config: BlockConfig) -> str:
    """What a row sees: of the context, and of the block that it is in."""
    context = attention(config.windows)
    causal = [i for i, is_causal in enumerate(config.causal) if is_causal]
    if not causal:
        return f"{context}; all of its block"
    where = "" if all(config.causal) else f" in {name_layers(causal)}, else all of it"
    return f"{context}; of its block no later row{where}"
