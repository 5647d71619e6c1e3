"""The target answers prompts, on the engine that everything else runs on.

Drafters learn from what the target itself says, so the answers in data sets are of no
use. Prompts are answered a batch at a time by one compiled program, greedily or
sampled, and every batch becomes a shard of the store at once. What is in the store is
not done again: so a run that is killed loses one batch, and a longer list of prompts
adds to what is there.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxdec.call import check, encode
from jaxdec.prompts import Prompt
from jaxdec.text import execute
from jaxdec.training.store import Record, TokenStore, read_store, write_shard

Progress = Callable[[int, int, str], None]


class Job(NamedTuple):
    """A prompt to be answered once."""

    prompt: Prompt
    is_greedy: bool
    is_validation: bool
    seed: int

    @property
    def name(self) -> tuple[str, bool]:
        """What tells it from others in a store."""
        return self.prompt.id, self.is_greedy


def plan(
    prompts: Sequence[Prompt],
    *,
    num_validation: int = 500,
    sampled: float = 0.5,
    seed: int = 0,
) -> list[Job]:
    """Which prompts are answered how.

    Args:
        prompts: all there are; the last are kept for validation.
        num_validation: so many; they are answered greedily.
        sampled: the part of the others that is sampled.
        seed: of the samples; a prompt's own depends on it and on its id only.

    Raises:
        ValueError: prompts with one id, or a part that is none.
    """
    if not 0 <= sampled <= 1:
        raise ValueError(f"sampled is a part of all prompts, 0 to 1, got {sampled!r}")
    names = [prompt.id for prompt in prompts]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"two prompts have the id {twice!r}; give each its own, so that what is "
            "answered can be told from what is not"
        )
    jobs = []
    for number, prompt in enumerate(prompts):
        digest = hashlib.sha256(f"{seed}/{prompt.id}".encode()).digest()
        own = int.from_bytes(digest[:4], "big")
        is_validation = number >= len(prompts) - num_validation
        # By the id, not the place: so it stays the same when prompts are added.
        is_sampled = int.from_bytes(digest[4:8], "big") < sampled * 2**32
        jobs.append(
            Job(
                prompt=prompt,
                is_greedy=is_validation or not is_sampled,
                is_validation=is_validation,
                seed=own,
            )
        )
    return jobs


def begin_with(folder: str | Path, start: str | Path) -> None:
    """Fills a store with the records of another; leaves one that has some alone.

    Raises:
        jaxdec.io.checkpoint.CheckpointError: `start` is no token store.
    """
    folder = Path(folder)
    if any(folder.glob("[0-9]*.npz")):
        return
    store = read_store(start)
    records = []
    for i in range(len(store)):
        ids, length = store.tokens(i).tolist(), int(store.prompt_length[i])
        records.append(
            Record(
                prompt=ids[:length],
                answer=ids[length:],
                prompt_id=str(store.prompt_id[i]),
                source=str(store.source[i]),
                is_greedy=bool(store.is_greedy[i]),
                is_validation=bool(store.is_validation[i]),
            )
        )
    write_shard(folder, records)


def regenerate(
    lm: Any,
    jobs: Sequence[Job],
    folder: str | Path,
    *,
    batch_size: int = 32,
    max_new_tokens: int = 192,
    temperature: float = 0.7,
    strategy: Any = "sample",
    until: int | None = None,
    progress: Progress | None = None,
) -> TokenStore:
    """Answers what the store in `folder` does not have, and returns the store.

    Args:
        lm: the target.
        jobs: from `plan`.
        folder: of the store; made if it does not exist.
        batch_size: prompts that are answered together.
        max_new_tokens: of an answer, at most; 0 keeps the prompts alone, for recipes
            that learn from them (`Recipe.with_prompts`).
        temperature: of the jobs that are sampled.
        strategy: how to decode; with the rule ``match`` all give the same tokens.
        until: stop once there are so many answer tokens.
        progress: told ``(answers, answers wanted, text)``.

    Raises:
        ValueError: prompts that are too long for the target, before any is answered;
            nothing to do and no store.
    """
    folder = Path(folder)
    store = read_store(folder) if any(folder.glob("[0-9]*.npz")) else None
    done = set() if store is None else _names(store, max_new_tokens > 0)
    if max_new_tokens == 0:
        # Nothing is drawn, so it matters not how it would be.
        jobs = [job._replace(is_greedy=True, is_validation=False) for job in jobs]
        done |= {(name, True) for name, _ in done}
    left = [job for job in jobs if job.name not in done]
    num_tokens = 0 if store is None else store.num_answer_tokens
    encoded = [encode(lm, job.prompt.text, None, None, i) for i, job in enumerate(left)]
    longest = max(map(len, encoded), default=0)
    if longest + max_new_tokens > lm.config.max_positions:
        raise ValueError(
            f"a prompt has {longest} tokens, which with {max_new_tokens} new ones is "
            f"more than the target's {lm.config.max_positions} positions; leave it "
            "out, or lower max_new_tokens"
        )
    if max_new_tokens == 0 and left:
        prompts = zip(encoded, left, strict=True)
        write_shard(folder, [_record(ids, [], job) for ids, job in prompts])
        return read_store(folder)
    # One program for all: as long as the longest needs, the last batch filled up.
    capacity = 0
    for begin in range(0, len(left), batch_size):
        if until is not None and num_tokens >= until:
            break
        part = left[begin : begin + batch_size]
        ids = encoded[begin : begin + batch_size]
        some = [i % len(part) for i in range(batch_size)]

        def checked(prompts, **shape):
            return check(
                lm,
                prompts,
                strategy=strategy,
                max_new_tokens=max_new_tokens,
                temperature=[0.0 if part[i].is_greedy else temperature for i in some],  # noqa: B023
                seed=[part[i].seed for i in some],  # noqa: B023
                **shape,
            )

        if not capacity:
            capacity = checked([[0] * longest] * batch_size).key.capacity
        call = checked([ids[i] for i in some], capacity=capacity)
        outputs = execute(call)
        records = [
            _record(ids[i], list(outputs[i].tokens), job) for i, job in enumerate(part)
        ]
        write_shard(folder, records)
        num_tokens += sum(len(record.answer) for record in records)
        if progress is not None:
            num = len(jobs) - len(left) + begin + len(part)
            progress(num, len(jobs), f"{num_tokens:,} answer tokens")
    return read_store(folder)


def _names(store: TokenStore, only_answers: bool) -> set[tuple[str, bool]]:
    """What is in a store already; of prompts that are there alone only if asked."""
    has_answer = store.length > store.prompt_length
    rows = zip(store.prompt_id, store.is_greedy, has_answer, strict=True)
    return {
        (str(name), bool(is_greedy))
        for name, is_greedy, answered in rows
        if answered or not only_answers
    }


def _record(prompt: list[int], answer: list[int], job: Job) -> Record:
    return Record(
        prompt=prompt,
        answer=answer,
        prompt_id=job.prompt.id,
        source=job.prompt.source,
        is_greedy=job.is_greedy,
        is_validation=job.is_validation,
    )
