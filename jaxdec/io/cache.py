"""The front door: any model by name, quickly from the second time on.

Dequantising a GGUF file and rebuilding its tokenizer take seconds, and give the same
result every time. So the result is kept, named by the content of the file and the
number format, and later loads map it into memory. A Hugging Face folder needs no
conversion and is opened where it lies.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxdec.io.checkpoint import (
    Checkpoint,
    CheckpointError,
    config_from_json,
    config_to_json,
)
from jaxdec.io.gguf import file_hash, load_gguf
from jaxdec.io.hub import resolve
from jaxdec.io.names import split_tensors
from jaxdec.io.safetensors import load_folder, open_tensors
from jaxdec.io.storage import Progress, cache_folder, lock, publish
from jaxdec.io.tokenizer import Tokenizer

_VERSION = 2
"""Of the converted form; raise it when a conversion changes."""

_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def load_checkpoint(
    name: str | Path, dtype: Any = "float32", progress: Progress | None = None
) -> Checkpoint:
    """Loads a model from a folder, a GGUF file, a built-in name, or the Hub.

    Args:
        name: See `jaxdec.io.hub.resolve`.
        dtype: ``"float32"`` or ``"bfloat16"``: the number format of the tensors.
        progress: Told when something slow begins.

    Raises:
        CheckpointError: The model cannot be found, read, or is not supported.
    """
    wanted = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if wanted not in _DTYPES:
        raise CheckpointError(
            f"dtype must be 'float32' or 'bfloat16', got {dtype!r}; float16 overflows "
            "in some models."
        )
    path = _locate(name, progress)
    if path.is_dir():
        return load_folder(path, _DTYPES[wanted])
    return _converted(path, wanted, progress)


def open_checkpoint(name: str | Path, progress: Progress | None = None) -> Checkpoint:
    """Opens a model to look at it: its tensors are not read, nothing is converted.

    Args:
        name: See `jaxdec.io.hub.resolve`.
        progress: Told when something slow begins.

    Raises:
        CheckpointError: The model cannot be found, opened, or is not supported.
    """
    path = _locate(name, progress)
    load = load_folder if path.is_dir() else load_gguf
    return load(path, _DTYPES["float32"])


def _locate(name: str | Path, progress: Progress | None) -> Path:
    """The Hugging Face folder or the GGUF file of a model."""
    path = resolve(name, progress)
    if not path.is_dir():
        return path
    files = sorted(path.glob("*.gguf"))
    if (path / "config.json").exists() or not files:
        return path
    if len(files) > 1:
        raise CheckpointError(
            f"{path} holds several GGUF files; pass the path of one of them: "
            f"{', '.join(file.name for file in files)}."
        )
    return files[0]


def _converted(path: Path, dtype: str, progress: Progress | None) -> Checkpoint:
    key = f"{_key(path)}-{dtype}"
    target = cache_folder() / "converted" / key
    found = _read(target, path)
    if found is not None:
        return found
    try:
        with lock(target, progress) as is_alone:
            found = _read(target, path)
            if found is not None:
                return found
            checkpoint = _convert(path, dtype, progress)
            with publish(target, is_alone) as folder:
                _write(folder / "result", checkpoint)
    except OSError as error:
        # A full or read-only disk must not keep anyone from using a model.
        if progress is not None:
            progress(f"cannot keep the converted weights ({error})")
        return _convert(path, dtype, None)
    found = _read(target, path)
    return checkpoint if found is None else found


def _key(path: Path) -> str:
    """Names what a conversion depends on: the file, and the tokenizer beside it."""
    digest = hashlib.sha256(f"{_VERSION} {file_hash(path)}".encode())
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        beside = path.parent / name
        if beside.exists():
            digest.update(f"{name} {file_hash(beside)}".encode())
    return digest.hexdigest()[:32]


def _convert(path: Path, dtype: str, progress: Progress | None) -> Checkpoint:
    if progress is not None:
        progress(f"converting {path.name} to {dtype} (once)")
    return load_gguf(path, _DTYPES[dtype])


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    folder.mkdir()
    tensors = {**checkpoint.tensors, **checkpoint.extra}
    try:
        save_file(tensors, folder / "model.safetensors")
    except SafetensorError as error:
        # A full disk is reported like this, and has to look like one.
        raise OSError(str(error)) from error
    if checkpoint.tokenizer is not None:
        checkpoint.tokenizer.save(folder)
    record = {
        "config": config_to_json(checkpoint.config),
        "has_tokenizer": checkpoint.tokenizer is not None,
        "stop_tokens": checkpoint.stop_tokens,
        "content_hash": checkpoint.content_hash,
        "settings": checkpoint.settings,
        "metadata": checkpoint.metadata,
    }
    (folder / "checkpoint.json").write_text(json.dumps(record), encoding="utf-8")


def _read(folder: Path, source: Path) -> Checkpoint | None:
    """The converted checkpoint in a folder; None if it is absent or damaged."""
    if not folder.is_dir():
        return None
    try:
        record = json.loads((folder / "checkpoint.json").read_text(encoding="utf-8"))
        config = config_from_json(record["config"])
        tensors, extra = split_tensors(config, open_tensors(folder))
        tokenizer = Tokenizer.from_folder(folder) if record["has_tokenizer"] else None
        return Checkpoint(
            config=config,
            tensors=tensors,
            extra=extra,
            settings=record["settings"],
            tokenizer=tokenizer,
            stop_tokens=tuple(record["stop_tokens"]),
            source=str(source),
            content_hash=record["content_hash"],
            format="gguf",
            metadata=record["metadata"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
