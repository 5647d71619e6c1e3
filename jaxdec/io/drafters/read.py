"""Opens a published drafter, whatever its format, and reads it for a target."""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxdec.io.checkpoint import CheckpointError, LazyTensors, reading, shapes_of
from jaxdec.io.drafters import block, eagle, mtp
from jaxdec.io.drafters.checkpoint import DrafterCheckpoint
from jaxdec.io.hub import resolve
from jaxdec.io.safetensors import (
    folder_hash,
    open_stored,
    open_tensors,
    read_json,
)
from jaxdec.io.storage import Progress
from jaxdec.io.torch_files import read_torch_file
from jaxdec.models.config import ModelConfig

_FORMATS = ("F32", "F16", "BF16", "F64", "I64", "I32", "BOOL", "U8")
_PICKLED = "pytorch_model.bin"

_READERS = {
    "block": (block.recognise, block.read_block),
    "eagle": (eagle.recognise, eagle.read_eagle),
    "mtp": (mtp.recognise, mtp.read_mtp),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredDrafter:
    """A drafter on disk; no tensor is read yet."""

    values: Mapping[str, Any]
    """``config.json``."""
    tensors: Mapping[str, np.ndarray]
    """By the names in the file; of MTP modules, by canonical names."""
    family: str
    format: str
    """Who writes such files, in words."""
    source: str
    folder: Path
    content_hash: str

    @property
    def made_for(self) -> str | None:
        """The target, as the file calls it."""
        about = self.values.get("speculators_config")
        verifier = about.get("verifier") if isinstance(about, Mapping) else None
        named = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
        return named or self.values.get("target_model_name_or_path")


@reading("the drafter's config.json")
def says_drafter(values: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` by itself says that it is a drafter's.

    That of EAGLE-1 does not: it is its target's, with fewer layers.
    """
    if "speculators_model_type" in values or "draft_vocab_size" in values:
        return True
    architectures = values.get("architectures") or [""]
    is_eagle = any("eagle" in str(name).lower() for name in architectures)
    return is_eagle or block.recognise(values, {}) is not None


@reading("the drafter's config.json")
def open_drafter(name: str | Path, progress: Progress | None = None) -> StoredDrafter:
    """Finds a drafter, and says what it is.

    Args:
        name: a folder with ``config.json`` and weights, or a Hub id.
        progress: told when something slow begins.

    Raises:
        CheckpointError: nothing is there, or no format is recognised.
    """
    folder = resolve(name, progress, "drafter")
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is a file; a drafter is a folder with config.json and its "
            "weights. Pass the folder."
        )
    values = read_json(folder / "config.json")
    if (folder / _PICKLED).exists() and not list(folder.glob("*.safetensors*")):
        tensors = read_torch_file(folder / _PICKLED)
        content = (folder / _PICKLED).read_bytes()
        digest = hashlib.sha256((folder / "config.json").read_bytes() + content)
        content_hash = digest.hexdigest()
    else:
        tensors = open_stored(folder, _FORMATS)
        content_hash = folder_hash(folder)
    found = []
    for family, (recognise, _) in _READERS.items():
        view = tensors
        if family == "mtp" and isinstance(tensors, LazyTensors):
            # Modules lie among a model's tensors, and go by that model's names.
            view = open_tensors(folder)
        kind = recognise(values, shapes_of(view))
        if kind is not None:
            found.append((family, kind, view))
    if not found:
        raise CheckpointError(
            f"{folder} is no drafter of a known format: model_type is "
            f"{values.get('model_type')!r}, architectures "
            f"{values.get('architectures')!r}, and its tensors begin with "
            f"{', '.join(list(tensors)[:3])}. Known are EAGLE-1/2/3, P-EAGLE, DFlash, "
            "DSpark and MTP as SafeAILab, z-lab, DeepSpec and speculators write them; "
            "a whole language model drafts with jaxdec.draft_model."
        )
    family, kind, tensors = found[0]
    return StoredDrafter(
        values=values,
        tensors=tensors,
        family=family,
        format=kind,
        source=str(name),
        folder=folder,
        content_hash=content_hash,
    )


@reading("the drafter's config.json")
def read_drafter(
    stored: StoredDrafter,
    target: ModelConfig | None,
    overrides: Mapping[str, Any] | None = None,
) -> DrafterCheckpoint:
    """Reads a drafter for a target; nothing is loaded partly.

    MTP modules can be read without one (None), with the tables beside them.

    Raises:
        CheckpointError: it does not fit the target, or is not whole.
    """
    read = _READERS[stored.family][1]
    try:
        return read(stored.values, stored.tensors, target, dict(overrides or {}))
    except CheckpointError as error:
        raise CheckpointError(f"{stored.source}: {error}") from error
