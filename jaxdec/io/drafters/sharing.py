"""What a drafter's file holds twice: the target's embedding and head.

Published files often hold copies of them, and some leave them out.
"""

import dataclasses
from typing import Any

import numpy as np

from jaxdec.io.drafters.checkpoint import DrafterCheckpoint
from jaxdec.io.drafters.words import owner
from jaxdec.types import Params

HEADS = ("lm_head.weight", "head.weight")
"""What the families call a head."""

_NAMES = {
    "embedding": ("embed_tokens.weight", "embedding.weight"),
    "head": HEADS,
}


def share_with_target(
    checkpoint: DrafterCheckpoint, params: Params
) -> DrafterCheckpoint:
    """Drops copies of the target's arrays, and takes the rows of its head that lack.

    A drafter with a vocabulary of its own and no head gets the target's rows for its
    tokens.

    Args:
        checkpoint: a drafter for this target.
        params: the target's arrays (see `jaxdec.models.decoder`).
    """
    if checkpoint.family == "draft":
        return checkpoint
    tensors = dict(checkpoint.tensors)
    head = params["head"]["weight"] if "head" in params else params["embedding"]
    tables = {"embedding": params["embedding"], "head": head}
    owned = {}
    for part, table in tables.items():
        names = [name for name in _NAMES[part] if name in tensors]
        for name in names:
            if _is_copy(tensors[name], table):
                del tensors[name]
        if part == "head" and not names and "d2t" in tensors:
            offsets = np.asarray(tensors["d2t"])
            names = [_NAMES[part][checkpoint.family == "mtp"]]
            rows = np.arange(len(offsets)) + offsets
            tensors[names[0]] = np.asarray(table)[rows]
        owned[part] = any(name in tensors for name in names)
    config = dataclasses.replace(
        checkpoint.config, own_embedding=owned["embedding"], own_head=owned["head"]
    )
    facts = checkpoint.facts | {part: owner(own) for part, own in owned.items()}
    return dataclasses.replace(checkpoint, config=config, tensors=tensors, facts=facts)


def _is_copy(tensor: np.ndarray, table: Any) -> bool:
    """Whether it is the table, in the number format of the latter."""
    if tensor.shape != table.shape:
        return False
    # Only now does the table leave its device, where it may be large.
    return np.array_equal(tensor.astype(table.dtype), np.asarray(table))
