"""What a target answered, as tokens: the data that drafters are trained on.

A store is a folder of numbered ``.npz`` shards, each complete or absent, so that it
grows while something writes it and survives when that is killed. A single ``.npz`` file
with the same arrays is a store too. A record is a prompt and its answer in one run of
ids; the answer begins at `prompt_length`, and only what is in it is learned.

    ids         uint16 (uint32 for larger vocabularies), records end to end
    offsets     [records + 1], where each begins
    prompt_len  [records], tokens of the prompt
    mode        [records], 0 greedy, 1 sampled
    is_val      [records], 1 where it is kept for validation
    prompt_id   [records], text; source the same
"""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from jaxdec.io.checkpoint import CheckpointError

_ARRAYS = ("ids", "offsets", "prompt_len", "mode", "is_val", "prompt_id", "source")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One prompt and its answer."""

    prompt: list[int]
    answer: list[int]
    prompt_id: str = ""
    source: str = ""
    is_greedy: bool = True
    is_validation: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenStore:
    """Records in memory: tokens are small."""

    ids: np.ndarray
    offsets: np.ndarray
    prompt_length: np.ndarray
    is_greedy: np.ndarray
    is_validation: np.ndarray
    prompt_id: np.ndarray
    source: np.ndarray

    def __len__(self):
        return len(self.prompt_length)

    def tokens(self, record: int | np.integer) -> np.ndarray:
        """Prompt and answer of a record."""
        return self.ids[self.offsets[record] : self.offsets[record + 1]]

    @functools.cached_property
    def length(self) -> np.ndarray:
        """Tokens of each record."""
        return np.diff(self.offsets)

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that the target said, in all records."""
        return int(np.sum(self.length - self.prompt_length))

    def with_prompts(self) -> "TokenStore":
        """As if all but the validation's prompts were part of the answers.

        What all records begin with, the template and its system prompt, is not: nothing
        can be learned there.
        """
        starts = [self.tokens(i)[: self.prompt_length[i]] for i in range(len(self))]
        common = min(map(len, starts))
        while len({tuple(ids[:common].tolist()) for ids in starts}) > 1:
            common -= 1
        length = np.where(self.is_validation, self.prompt_length, max(common, 1))
        return dataclasses.replace(self, prompt_length=length)

    def content_hash(self, num: int | None = None) -> str:
        """Names the first `num` records (all, if None): a store only grows."""
        num = len(self) if num is None else num
        digest = hashlib.sha256(self.offsets[: num + 1].astype(np.int64).tobytes())
        digest.update(self.ids[: self.offsets[num]].astype(np.uint32).tobytes())
        return digest.hexdigest()

    def split(self, num_validation: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The records to train on, and those to validate on.

        Args:
            num_validation: of the records that are kept for it and greedy, use the
                first so many; the others are not trained on either.

        Raises:
            CheckpointError: there is nothing for one of the two.
        """
        kept = np.flatnonzero(self.is_validation & self.is_greedy)[:num_validation]
        train = np.flatnonzero(~self.is_validation)
        if len(kept) == 0 or len(train) == 0:
            raise CheckpointError(
                f"the token store has {len(train)} records to train on and "
                f"{len(kept)} greedy ones for validation; both are needed, so let "
                "jaxdec regenerate answer prompts of both kinds"
            )
        return train, kept


def write_shard(folder: str | Path, records: Iterable[Record]) -> Path:
    """Adds records to a store, all of them or none.

    Args:
        folder: the store; made if it does not exist.
        records: at least one.
    """
    folder, records = Path(folder), list(records)
    folder.mkdir(parents=True, exist_ok=True)
    lengths = [len(r.prompt) + len(r.answer) for r in records]
    ids = np.array([t for r in records for t in (*r.prompt, *r.answer)], np.uint32)
    if ids.max(initial=0) < 2**16:
        ids = ids.astype(np.uint16)
    arrays = {
        "ids": ids,
        "offsets": np.cumsum([0, *lengths], dtype=np.int64),
        "prompt_len": np.array([len(r.prompt) for r in records], np.int32),
        "mode": np.array([not r.is_greedy for r in records], np.uint8),
        "is_val": np.array([r.is_validation for r in records], np.uint8),
        "prompt_id": np.array([r.prompt_id for r in records]),
        "source": np.array([r.source for r in records]),
    }
    path = folder / f"{len(_shards(folder)):06d}.npz"
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        np.savez_compressed(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return path


def read_store(path: str | Path) -> TokenStore:
    """Reads a store: a folder of shards, or one ``.npz`` file.

    Raises:
        CheckpointError: it is not there, is empty, or is no token store.
    """
    path = Path(path)
    shards = _shards(path) if path.is_dir() else [path]
    if not shards or not all(shard.is_file() for shard in shards):
        raise CheckpointError(
            f"{path} is no token store: it is neither an .npz file nor a folder of "
            "them; make one with jaxdec regenerate"
        )
    parts = [_read(shard) for shard in shards]
    joined = {name: np.concatenate([p[name] for p in parts]) for name in _ARRAYS[2:]}
    lengths = np.concatenate([np.diff(p["offsets"]) for p in parts])
    return TokenStore(
        ids=np.concatenate([p["ids"] for p in parts]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        prompt_length=joined["prompt_len"].astype(np.int64),
        is_greedy=joined["mode"] == 0,
        is_validation=joined["is_val"] != 0,
        prompt_id=joined["prompt_id"].astype(str),
        source=joined["source"].astype(str),
    )


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("[0-9]*.npz"))


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in _ARRAYS}
    except (KeyError, ValueError, OSError) as error:
        raise CheckpointError(
            f"{path} is no shard of a token store ({error}); it should hold "
            f"{', '.join(_ARRAYS)}"
        ) from error
    lengths, prompts = np.diff(arrays["offsets"]), arrays["prompt_len"]
    is_whole = len(arrays["ids"]) == arrays["offsets"][-1]
    if not is_whole or len(lengths) != len(prompts) or np.any(lengths < prompts):
        raise CheckpointError(
            f"{path}: offsets and prompt_len do not fit its {len(arrays['ids'])} ids; "
            "the file is damaged, so fetch or make it again"
        )
    return arrays
