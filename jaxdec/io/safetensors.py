"""Reads Hugging Face folders: ``config.json`` beside one or more safetensors files.

Weights stay on disk until a tensor is asked for. Every file is opened once, and all
files that the index names must be there before anything is read.
"""

import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (safetensors finds bfloat16 only once it is imported)
import numpy as np

from jaxdec.io.checkpoint import (
    Checkpoint,
    CheckpointError,
    LazyTensors,
    as_dtype,
)
from jaxdec.io.hf_config import config_from_hf, stop_tokens_from_hf
from jaxdec.io.names import canonical_parts, split_tensors
from jaxdec.io.tokenizer import Tokenizer

_DTYPES = ("F32", "F16", "BF16", "F64")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ADDS_ONE = ("gemma3",)
"""Families whose files hold w where the norm multiplies by 1 + w."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an error names the file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"the folder {path.parent.resolve()} has no {path.name}; pass a folder "
            "with the whole release of a model or drafter."
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{path} is not valid JSON ({error}); fetch it again."
        ) from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds no JSON object; fetch it again.")
    return values


def _shards(folder: Path) -> dict[Path, list[str] | None]:
    """Files to open, each with the tensors to take from it (None: all)."""
    index, single = folder / _INDEX, folder / _SINGLE
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map; fetch it again.")
        shards: dict[Path, list[str] | None] = {}
        for name, file in weight_map.items():
            shards.setdefault(folder / file, []).append(name)
        absent = [path.name for path in shards if not path.exists()]
        if absent:
            raise CheckpointError(
                f"{len(absent)} of {len(shards)} files that {index} names are absent: "
                f"{', '.join(absent)}; finish the download."
            )
        return shards
    if single.exists():
        return {single: None}
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return {others[0]: None}
    have = ", ".join(sorted(p.name for p in folder.iterdir())) or "nothing"
    raise CheckpointError(
        f"{folder} holds neither {_SINGLE} nor {_INDEX}, but {have}. Pickled weights "
        "(.bin, .pt) are not read; use a release in safetensors, or a GGUF file."
    )


def open_stored(folder: str | Path, dtypes: Collection[str] = _DTYPES) -> LazyTensors:
    """All tensors of a folder under the names in its files, none of them read yet.

    Args:
        folder: with ``model.safetensors``, or shards and their index.
        dtypes: number formats that may be read.

    Raises:
        CheckpointError: A file is absent or damaged, a tensor that the index names is
            not in its file; when it is read, a number format that is not supported.
    """
    from safetensors import SafetensorError, safe_open

    handles: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path, names in _shards(Path(folder)).items():
        try:
            handle = safe_open(path, framework="np")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}); it is damaged or incomplete, so "
                "fetch it again."
            ) from error
        present = handle.keys()
        absent = sorted(set(names or ()) - set(present))
        if absent:
            raise CheckpointError(
                f"{path} lacks tensors that the index places there: "
                f"{', '.join(absent)}; fetch the index and all files of one release."
            )
        for name in names or present:
            part = handle.get_slice(name)
            shapes[name] = tuple(part.get_shape())
            # An unsupported format matters only where a tensor is read.
            handles[name] = (handle, part.get_dtype(), path)

    def read(name: str) -> np.ndarray:
        handle, dtype, path = handles[name]
        if dtype not in dtypes:
            raise CheckpointError(
                f"tensor {name!r} in {path} has number format {dtype}; only "
                f"{', '.join(dtypes)} are read. Use an unquantised release."
            )
        return handle.get_tensor(name)

    return LazyTensors(shapes, read)


def open_tensors(folder: str | Path) -> LazyTensors:
    """All tensors of a folder under canonical names, none of them read yet.

    Raises:
        CheckpointError: As `open_stored`; or two names mean the same tensor.
    """
    stored = open_stored(folder)
    parts = canonical_parts(stored.shapes)

    def read(name: str) -> np.ndarray:
        part = parts[name]
        tensor = stored[part.source]
        tensor = tensor[part.index] if part.index else tensor
        return tensor.T if part.is_transposed else tensor

    return LazyTensors(
        {name: part.shape(stored.shapes[part.source]) for name, part in parts.items()},
        read,
    )


def folder_hash(folder: Path) -> str:
    """Names the weights of a folder without reading them all.

    The hash covers ``config.json``, and of each file its size, its header (names,
    shapes, offsets) and 256 bytes from the middle of every tensor: two fine-tunes of
    one model differ there, though their headers are equal.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(_shards(folder)):
        with open(path, "rb") as file:
            prefix = file.read(8)
            header = file.read(int.from_bytes(prefix, "little"))
            digest.update(f"{path.name} {path.stat().st_size} ".encode() + header)
            start = 8 + len(header)
            for name, entry in json.loads(header).items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    file.seek(start + max(begin, (begin + end) // 2 - 128))
                    digest.update(file.read(min(256, end - begin)))
    return digest.hexdigest()


def load_folder(folder: str | Path, dtype: np.dtype) -> Checkpoint:
    """Opens a Hugging Face folder; tensors are converted to `dtype` when read.

    Raises:
        CheckpointError: The folder is incomplete, or not of a supported kind.
    """
    folder = Path(folder)
    values = read_json(folder / "config.json")
    config = config_from_hf(values)
    tensors = open_tensors(folder)
    try:
        tensors, extra = split_tensors(config, tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else None
    tokenizer = None
    if (folder / "tokenizer.json").exists():
        try:
            tokenizer = Tokenizer.from_folder(folder)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
    stops = stop_tokens_from_hf(generation, values)
    if not stops and tokenizer is not None and tokenizer.eos_id is not None:
        stops = (tokenizer.eos_id,)

    def converted(name: str, tensor: np.ndarray) -> np.ndarray:
        if config.family in _ADDS_ONE and name.endswith("norm.weight"):
            tensor = tensor.astype(np.float32) + 1
        return as_dtype(name, tensor, dtype)

    return Checkpoint(
        config=config,
        tensors=tensors.select(tensors, converted),
        extra=extra.select(extra, lambda name, x: as_dtype(name, x, dtype)),
        settings=values,
        tokenizer=tokenizer,
        stop_tokens=stops,
        source=str(folder),
        content_hash=folder_hash(folder),
        format="safetensors",
        metadata={
            "model_type": values.get("model_type"),
            "architectures": values.get("architectures"),
            "stored_dtype": values.get("dtype") or values.get("torch_dtype"),
        },
    )
