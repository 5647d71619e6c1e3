"""Reads GGUF files: one file with metadata, quantised weights and a vocabulary.

Parsing and dequantising are the ``gguf`` library's. What is left is to undo what the
converters did: rename tensors and settings, restore the row order of query and key
projections where a converter changed it, and read the tied head from its absence.

**The row order.** llama.cpp rotates adjacent pairs of a head's dimensions, where this
library pairs dimension i with i + D/2. Converters of the Llama class therefore
interleave the two halves of each head's rows; all others leave them as they are. A
model loaded without undoing this still writes fluent text, with other logits.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxdec.io import gguf_tokenizer
from jaxdec.io.checkpoint import (
    Checkpoint,
    CheckpointError,
    LazyTensors,
    as_dtype,
)
from jaxdec.io.gguf_config import (
    ROPE_FACTORS,
    architecture_settings,
    config_from_gguf,
)
from jaxdec.io.gguf_names import ARCHITECTURES, gguf_parts
from jaxdec.io.names import split_tensors
from jaxdec.io.tokenizer import Tokenizer


def _open(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata as Python values, and tensors by name."""
    import gguf

    class Reader(gguf.GGUFReader):
        """Stops at the end of the file; its base goes on with empty arrays there."""

        def _get(self, offset, dtype, count=1, *arguments, **options):
            found = super()._get(offset, dtype, count, *arguments, **options)
            if found.size != int(count):
                raise EOFError(f"the file ends at byte {len(self.data)}")
            return found

    try:
        reader = Reader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; check the path.") from None
    except Exception as error:
        # Damage shows wherever the reader happens to stumble over it.
        raise CheckpointError(
            f"{path} cannot be read as GGUF ({type(error).__name__}: {error}). It is "
            "damaged, incomplete, or of a format that the installed gguf package does "
            "not know: fetch it again, or update that package."
        ) from error
    if reader.byte_order != "I":
        raise CheckpointError(
            f"{path} has the byte order of another kind of machine; convert it with "
            "gguf-convert-endian."
        )
    if fields.get("split.count", 0) > 1:
        raise CheckpointError(
            f"{path} is one of {fields['split.count']} parts; join them first with "
            "llama-gguf-split --merge."
        )
    return fields, tensors


def restore_rows(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes the interleaving of a projection's rows (or of its bias).

    Example:
        >>> restore_rows(np.array([0, 2, 1, 3]), num_heads=1)
        array([0, 1, 2, 3])
    """
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def _dequantize(path: Path, tensor: Any, index: tuple = ()) -> np.ndarray:
    """A tensor, or a piece of it along leading axes (blocks run along the last)."""
    import gguf

    try:
        return gguf.dequantize(tensor.data[index], tensor.tensor_type)
    except Exception as error:
        raise CheckpointError(
            f"tensor {tensor.name!r} of {path} has number format "
            f"{tensor.tensor_type.name}, which cannot be dequantised ({error}); use a "
            "file quantised in another way, or update the gguf package."
        ) from error


def _tokenizer(path: Path, fields: Mapping[str, Any]) -> Tokenizer | None:
    if fields.get("tokenizer.ggml.model") in (None, "none", "no_vocab"):
        return None
    if (path.parent / "tokenizer.json").exists():
        beside = Tokenizer.from_folder(path.parent)
        tokens = fields["tokenizer.ggml.tokens"]
        # A folder may hold several models, so the file beside has to be the right one.
        if all(
            beside.token_id(token) == index
            for index, token in enumerate(tokens)
            if token != f"[PAD{index}]"
        ):
            inside = fields.get("tokenizer.chat_template")
            beside.chat_template = beside.chat_template or inside
            return beside
    try:
        return Tokenizer.from_gguf(fields)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"the tokenizer of {path}: {error}") from error


def file_hash(path: Path) -> str:
    """The SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_gguf(path: str | Path, dtype: np.dtype) -> Checkpoint:
    """Opens a GGUF file; tensors are dequantised to `dtype` when read.

    Raises:
        CheckpointError: The file is damaged, or not of a supported kind.
    """
    path = Path(path)
    fields, found = _open(path)
    embeddings = found.get("token_embd.weight")
    if embeddings is None:
        raise CheckpointError(
            f"{path} has no token_embd.weight; it is no text decoder."
        )
    factors: tuple[float, ...] = ()
    if ROPE_FACTORS in found:
        values = _dequantize(path, found[ROPE_FACTORS])
        factors = tuple(float(factor) for factor in values.reshape(-1))
    shapes = {n: tuple(int(d) for d in reversed(t.shape)) for n, t in found.items()}
    try:
        config = config_from_gguf(fields, shapes, factors)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} has metadata that make no sense ({type(error).__name__}: "
            f"{error}); it is damaged, so fetch it again."
        ) from error
    shapes.pop(ROPE_FACTORS, None)
    arch = fields["general.architecture"]
    heads = {}
    if ARCHITECTURES[arch].has_permuted_rows:
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}

    def read(name: str) -> np.ndarray:
        part = parts[name]
        tensor = _dequantize(path, found[part.source], part.index)
        rows = heads.get(name.split(".")[-2])
        return tensor if rows is None else restore_rows(tensor, rows)

    try:
        parts = gguf_parts(arch, config, shapes)
        tensors, extra = split_tensors(
            config,
            LazyTensors({n: p.shape(shapes[p.source]) for n, p in parts.items()}, read),
        )
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None

    def converted(name: str, tensor: np.ndarray) -> np.ndarray:
        return as_dtype(name, tensor, dtype)

    formats = Counter(tensor.tensor_type.name for tensor in found.values())
    return Checkpoint(
        config=config,
        tensors=tensors.select(tensors, converted),
        extra=extra.select(extra, converted),
        settings=architecture_settings(fields),
        tokenizer=_tokenizer(path, fields),
        stop_tokens=gguf_tokenizer.stop_tokens(fields),
        source=str(path),
        content_hash=file_hash(path),
        format="gguf",
        metadata={
            key: value
            for key, value in fields.items()
            if key.startswith("general.") and isinstance(value, (str, int, float))
        }
        | {"number_formats": dict(formats)},
    )
