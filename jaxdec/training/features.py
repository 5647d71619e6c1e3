"""What a target felt at every token of a store: computed as needed, or kept on disk.

Kept are residual streams (taps, see `jaxdec.models.decoder.make_model`) in bfloat16,
one row per token of the store, in the order of the store. The file grows record by
record; how many are complete is written only when they are on disk, so that a process
that is killed loses a batch at most. What the head reads follows from the last tap, so
it is never kept.
"""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float

from jaxdec.io.checkpoint import CheckpointError
from jaxdec.models.decoder import Reader, make_reader
from jaxdec.training.batches import Batch, Slice, bucket_lengths, make_batch
from jaxdec.training.store import TokenStore

Progress = Callable[[int, int, str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Features:
    """How features are named: which taps are kept, and how those wanted are made."""

    kept: tuple[int, ...]
    num_layers: int
    """Of the target."""
    reader: Reader

    def kept_of(self, params: Any, batch: Batch) -> Float[Array, "B T n E"]:
        """The kept taps of a batch: those it brings, or else computed here."""
        if batch.features.shape[2]:
            return batch.features
        output = self.reader.read(params, batch.tokens)
        shape = (*batch.tokens.shape, len(self.kept), -1)
        return output.features.reshape(shape)

    def of(
        self, params: Any, kept: Float[Array, "B T n E"], tap: int
    ) -> Float[Array, "B T E"]:
        """One tap of those kept; past the last layer, also after the final norm."""
        if tap == self.num_layers + 1:
            return self.reader.normed(params, self.of(params, kept, self.num_layers))
        return kept[:, :, self.kept.index(tap)].astype(jnp.float32)

    def joined(
        self, params: Any, kept: Float[Array, "B T n E"], taps: tuple[int, ...]
    ) -> Float[Array, "B T F"]:
        """What a drafter with these taps reads."""
        return jnp.concatenate([self.of(params, kept, tap) for tap in taps], axis=-1)


def features_of(lm: Any, taps: tuple[int, ...]) -> Features:
    """Features of a loaded target for a drafter with these taps, and for its teacher.

    The stream after the last layer is always kept: what the target says follows from
    it.
    """
    num = lm.config.num_layers
    kept = tuple(sorted({min(tap, num) for tap in taps} | {num}))
    reader = make_reader(lm.config, dtype=lm.dtype, taps=kept)
    return Features(kept=kept, num_layers=num, reader=reader)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class KeptFeatures:
    """Features on disk; call it with a record."""

    rows: np.ndarray
    """``[tokens of the store, n, E]``, mapped from the file."""
    offsets: np.ndarray
    columns: list[int]
    """Which of the n are wanted."""

    def __call__(self, record: int | np.integer) -> np.ndarray:
        """``[length, wanted, E]``, bfloat16."""
        rows = self.rows[self.offsets[record] : self.offsets[record + 1]]
        return rows[:, self.columns].view(ml_dtypes.bfloat16)


def keep_features(
    folder: str | Path,
    lm: Any,
    store: TokenStore,
    taps: tuple[int, ...],
    *,
    batch_size: int = 16,
    progress: Progress | None = None,
) -> KeptFeatures:
    """Computes what is not kept yet, and opens what is.

    Args:
        folder: where they are kept. One that keeps more taps than these will do, so
            that several kinds of drafters can share it.
        lm: the target.
        store: the tokens; one that has grown goes on where it ended.
        taps: what drafters will read.
        batch_size: records read together.
        progress: told ``(records done, records, text)``.

    Raises:
        CheckpointError: the folder holds features of another target or of other tokens,
            or lacks a tap.
    """
    folder, features = Path(folder), features_of(lm, taps)
    folder.mkdir(parents=True, exist_ok=True)
    wanted, found = features.kept, _taps_of(folder)
    if set(wanted) < set(found):
        features = features_of(lm, found)
    facts = {
        "target": lm.content_hash,
        "dtype": lm.dtype,
        "kept": list(features.kept),
        "width": lm.config.hidden_size,
    }
    num_done = _records_done(folder, facts, store)
    width = (len(features.kept), lm.config.hidden_size)
    shape = (int(store.offsets[-1]), *width)
    with open(folder / "features.bin", "ab") as file:
        file.truncate(shape[0] * width[0] * width[1] * 2)
    rows = np.memmap(folder / "features.bin", np.uint16, mode="r+", shape=shape)
    read = jax.jit(lambda params, batch: _compact(features, params, batch))
    lengths = bucket_lengths(store.length, 8)
    while num_done < len(store):
        some = np.arange(num_done, min(num_done + 32 * batch_size, len(store)))
        # Similar lengths together; the file's order is the store's all the same.
        some = some[np.argsort(store.length[some], kind="stable")]
        for i in range(0, len(some), batch_size):
            part = some[i : i + batch_size]
            size = next(n for n in lengths if n >= store.length[part].max())
            batch = make_batch(
                store, Slice(records=tuple(part.tolist()), length=size), batch_size
            )
            kept = np.asarray(read(lm.params, batch)).view(np.uint16)
            for row, record in enumerate(part):
                begin, end = store.offsets[record], store.offsets[record + 1]
                rows[begin:end] = kept[row, : end - begin]
        num_done += len(some)
        rows.flush()
        _write_json(
            folder / "features.json",
            facts | {"records": num_done, "tokens": store.content_hash(num_done)},
        )
        if progress is not None:
            progress(num_done, len(store), "features")
    columns = [features.kept.index(tap) for tap in wanted]
    return KeptFeatures(rows=rows, offsets=store.offsets, columns=columns)


def _compact(features: Features, params: Any, batch: Batch) -> Array:
    return features.kept_of(params, batch).astype(jnp.bfloat16)


def _taps_of(folder: Path) -> tuple[int, ...]:
    path = folder / "features.json"
    return tuple(json.loads(path.read_text())["kept"]) if path.exists() else ()


def _records_done(folder: Path, facts: dict, store: TokenStore) -> int:
    """How many of the store's first records are in the file already."""
    path = folder / "features.json"
    if not path.exists():
        return 0
    found = json.loads(path.read_text())
    num = min(found["records"], len(store))
    wrong = [name for name in facts if found.get(name) != facts[name]]
    if found["records"] > len(store) or found["tokens"] != store.content_hash(num):
        wrong.append("tokens")
    if wrong:
        raise CheckpointError(
            f"{folder} keeps features of something else (other {', '.join(wrong)}); "
            "name another folder, or remove this one"
        )
    return num


def _write_json(path: Path, values: dict) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(values))
    os.replace(partial, path)
