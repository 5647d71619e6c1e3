"""jaxdec's own format for drafters: their own tensors with orbax, and what they are.

What is the target's is not kept, not even the rows of its head that a smaller
vocabulary needs, so a file is as small as what was trained. The tensors have canonical
names, so they go the way of any published drafter's, whatever the dtype.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxdec.io.checkpoint import CheckpointError, config_from_json, config_to_json
from jaxdec.io.drafters.checkpoint import DrafterCheckpoint
from jaxdec.io.drafters.sharing import HEADS
from jaxdec.io.orbax import load_metadata, load_params, save_params
from jaxdec.models.block import BlockConfig
from jaxdec.models.block_weights import expected_block_tensors
from jaxdec.models.config import ModelConfig
from jaxdec.models.eagle_config import EagleConfig
from jaxdec.models.eagle_weights import expected_eagle_tensors
from jaxdec.models.mtp import MtpConfig, expected_mtp_tensors
from jaxdec.models.weights import block_shapes

FORMAT = "jaxdec"

_RECORDS: dict[str, tuple[type, str]] = {
    "eagle": (EagleConfig, "layers"),
    "block": (BlockConfig, "layers"),
    "mtp": (MtpConfig, "block"),
}
"""The family's record, and the field of it that holds its layers."""

_EXPECTED = {
    "eagle": expected_eagle_tensors,
    "block": expected_block_tensors,
    "mtp": expected_mtp_tensors,
}


def write_own(
    folder: str | Path,
    checkpoint: DrafterCheckpoint,
    *,
    shares_head: bool,
    target: str,
    card: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a drafter.

    Args:
        folder: a new one.
        checkpoint: the drafter.
        shares_head: whether its head is rows of the target's, which are left out.
        target: the hash of the target's content.
        card: JSON values about how it came to be.
        overwrite: whether to replace what is there.

    Raises:
        CheckpointError: the folder exists.
    """
    tensors = dict(checkpoint.tensors)
    if shares_head:
        tensors = {k: v for k, v in tensors.items() if k not in HEADS}
    facts = {
        "drafter": checkpoint.family,
        "config": _config_to_json(checkpoint),
        "shares_head": shares_head,
        "target": target,
        "facts": checkpoint.facts,
        "card": dict(card or {}),
    }
    save_params(folder, tensors, facts, overwrite=overwrite)


def is_own(folder: Path) -> bool:
    """Whether a folder holds a drafter that `write_own` wrote."""
    if not (folder / "_CHECKPOINT_METADATA").exists():
        return False
    return "drafter" in load_metadata(folder)


def read_own(
    folder: Path, target: ModelConfig | None, content_hash: str
) -> tuple[DrafterCheckpoint, dict[str, Any]]:
    """Reads a drafter for a target, and its card.

    Args:
        folder: what `write_own` wrote.
        target: what it is to draft for; None does not compare.
        content_hash: the target's.

    Raises:
        CheckpointError: it was made for another target, or is not whole.
    """
    tensors, record = load_params(folder)
    tensors = {name: np.asarray(value) for name, value in tensors.items()}
    config = _config_from_json(record["drafter"], record["config"])
    if target is not None:
        _check_pairing(folder, record["drafter"], config, target)
    wanted = expected_own_tensors(record["drafter"], config)
    lacks = [
        name
        for name, shape in wanted.items()
        if name not in tensors or tensors[name].shape != tuple(shape)
    ]
    lacks = [n for n in lacks if n not in HEADS or not record["shares_head"]]
    strange = [name for name in tensors if name not in wanted]
    if lacks or strange:
        raise CheckpointError(
            f"{folder}: the drafter's tensors do not fit its configuration (missing or "
            f"of another shape: {', '.join(lacks) or 'none'}; unexpected: "
            f"{', '.join(strange) or 'none'}); write it again"
        )
    facts = dict(record["facts"])
    if target is not None:
        is_same = record["target"] == content_hash
        facts["made_for"] = "this target" if is_same else "a target of other weights"
    checkpoint = DrafterCheckpoint(
        family=record["drafter"],
        config=config,
        tensors=tensors,
        format=FORMAT,
        facts=facts,
    )
    return checkpoint, record["card"]


def _check_pairing(folder: Path, family: str, config: Any, target: ModelConfig) -> None:
    layers = getattr(config, _RECORDS[family][1]) if family in _RECORDS else config
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(layers, name), getattr(target, name)
        if ours != theirs:
            raise CheckpointError(
                f"{folder}: the drafter was trained for a target with {name} {ours}, "
                f"and this one has {theirs}; load the target that it was trained for"
            )
    taps = getattr(config, "taps", ())
    if any(tap > target.num_layers + 1 for tap in taps):
        raise CheckpointError(
            f"{folder}: the drafter reads taps {list(taps)}, and the target has "
            f"{target.num_layers} layers; load the target that it was trained for"
        )


def expected_own_tensors(family: str, config: Any) -> dict[str, tuple[int, ...]]:
    """The canonical name and shape of every tensor."""
    if family in _EXPECTED:
        return _EXPECTED[family](config)
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (config.hidden_size,)}
    for i in range(config.num_layers):
        shapes |= block_shapes(config, i, f"model.layers.{i}")
    return shapes


def _config_to_json(checkpoint: DrafterCheckpoint) -> dict[str, Any]:
    if isinstance(checkpoint.config, ModelConfig):
        return config_to_json(checkpoint.config)
    return dataclasses.asdict(checkpoint.config)


def _config_from_json(family: str, values: Mapping[str, Any]) -> Any:
    if family not in _RECORDS:
        return config_from_json(values)
    record, part = _RECORDS[family]
    plain = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return record(**plain | {part: config_from_json(values[part])})
