"""The tensors of a block drafter's file: their names, shapes, and map of tokens."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxdec.io.checkpoint import CheckpointError, shapes_of
from jaxdec.io.names import listed
from jaxdec.models.block import BlockConfig

Stored = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name in the file and shape of every tensor, by its name without ``model.``."""


def stored_tensors(tensors: Mapping[str, np.ndarray]) -> Stored:
    """What a file holds; nothing is read."""
    stored: dict[str, tuple[str, tuple]] = {}
    for name, shape in shapes_of(tensors).items():
        short = name.removeprefix("model.")
        if short in stored:
            raise CheckpointError(
                f"tensors {stored[short][0]!r} and {name!r} are both {short!r}; remove "
                "one of them"
            )
        stored[short] = (name, tuple(shape))
    return stored


def check_drafter_tensors(
    wanted: Mapping[str, tuple[int, ...]], config: BlockConfig, stored: Stored
) -> None:
    """Raises one error that lists every missing, unexpected and mis-shaped tensor."""

    def is_ignored(name: str) -> bool:
        return (
            name.startswith("verifier_")
            or name.endswith("rotary_emb.inv_freq")
            or name in ("d2t", "t2d")
            or (name == "embed_tokens.weight" and not config.own_embedding)
            or (name == "lm_head.weight" and not config.own_head)
            or (name.startswith("confidence_head.") and config.confidence == "none")
        )

    missing = [n for n in wanted if n not in stored and n != "d2t"]
    unexpected = [n for n in stored if n not in wanted and not is_ignored(n)]
    wrong = [
        f"{name}: has {list(stored[name][1])}, needs {list(shape)}"
        for name, shape in wanted.items()
        if name in stored and stored[name][1] != shape
    ]
    if not (missing or unexpected or wrong):
        return
    lines = ["the drafter's tensors do not fit its configuration:"]
    lines += listed(missing=missing, unexpected=unexpected, wrong_shape=wrong)
    if any(name.startswith("confidence_head.") for name in missing):
        lines.append(
            "  overrides={'confidence': 'none'} loads it without a confidence head, so "
            "that no draft can be cut short by it."
        )
    for name, tensor in (("embedding", "embed_tokens"), ("head", "lm_head")):
        if f"{tensor}.weight" in missing:
            lines.append(f"  overrides={{'{name}': 'target'}} takes the target's.")
    lines.append("  Take config.json and the weights from the same release.")
    raise CheckpointError("\n".join(lines))


def target_ids(
    config: BlockConfig,
    tensors: Mapping[str, np.ndarray],
    stored: Stored,
    overrides: Mapping[str, Any],
) -> np.ndarray:
    """The target's id of every token of a reduced vocabulary, from d2t and t2d.

    ``d2t`` holds offsets: token j of the drafter is token ``j + d2t[j]`` of the target.
    ``t2d`` says of every token of the target whether the drafter has it.
    """
    drafted, vocab = config.draft_vocab_size, config.layers.vocab_size
    read_as = overrides.get("token_map")
    if read_as not in (None, "offsets", "absolute"):
        raise CheckpointError(
            f"override token_map must be 'offsets' or 'absolute', got {read_as!r}"
        )
    kept = None
    if "t2d" in stored:
        kept = np.flatnonzero(np.asarray(tensors[stored["t2d"][0]]))
        if stored["t2d"][1] != (vocab,) or len(kept) != drafted:
            raise CheckpointError(
                f"t2d marks {len(kept)} of {stored['t2d'][1]} tokens, but the drafter "
                f"has {drafted} of {vocab}; take config.json and the weights from the "
                "same release"
            )
    if "d2t" not in stored:
        if kept is None:
            raise CheckpointError(
                f"the drafter has {drafted} of the target's {vocab} tokens, but "
                "neither d2t nor t2d says which; take the weights from a complete "
                "release"
            )
        return kept.astype(np.int32)
    raw = np.asarray(tensors[stored["d2t"][0]]).astype(np.int64)
    offsets = np.arange(drafted) + raw
    ids = raw if read_as == "absolute" else offsets
    is_absolute = kept is not None and np.array_equal(raw, kept)
    if read_as is None and kept is None and _is_ambiguous(raw):
        raise CheckpointError(
            "d2t may hold offsets or the ids themselves, and there is no t2d to tell; "
            "say which by overrides={'token_map': 'offsets'} or 'absolute'"
        )
    is_map = ids[0] >= 0 and ids[-1] < vocab and bool(np.all(np.diff(ids) > 0))
    if not is_map or (kept is not None and not np.array_equal(ids, kept)):
        hint = (
            "it holds the ids themselves, where files of this format hold offsets "
            "(id = j + d2t[j]); if that is so, overrides={'token_map': 'absolute'}"
            if is_absolute and read_as is None
            else "take the weights from a complete release"
        )
        raise CheckpointError(
            "d2t is not a map from the drafter's tokens to those that t2d marks: its "
            f"ids must be increasing and below {vocab}; {hint}"
        )
    return ids.astype(np.int32)


def _is_ambiguous(raw: np.ndarray) -> bool:
    """Whether a map could be ids as well as offsets, or was never filled in."""
    return bool(np.all(raw == 0) or np.all(np.diff(raw) > 0))


def check_identity(
    config: BlockConfig, tensors: Mapping[str, np.ndarray], stored: Stored
) -> None:
    """Raises if a full vocabulary comes with a map that is not the identity."""
    is_identity = all(
        bool(np.all(np.asarray(tensors[stored[name][0]]) == value))
        for name, value in (("d2t", 0), ("t2d", 1))
        if name in stored
    )
    if not is_identity:
        raise CheckpointError(
            f"the drafter has all {config.layers.vocab_size} tokens, but its d2t or "
            "t2d says otherwise; correct draft_vocab_size"
        )
