"""What a drafter and its target have in common: vocabulary, embedding, head.

Drafters' arrays agree in these names: ``embedding``, ``head`` and ``vocabulary``. Where
one is absent the target's is used.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdec.types import DrafterParams, Params


def vocabulary_params(target_ids: np.ndarray, vocab_size: int) -> Params:
    """The arrays of a reduced vocabulary: the target's token of each, and the inverse.

    >>> print(vocabulary_params(np.array([1, 3, 4]), 6)["draft_index"])
    [3 0 3 1 2 3]
    """
    index = np.full(vocab_size, len(target_ids), np.int32)
    index[target_ids] = np.arange(len(target_ids))
    return {
        "target_ids": jnp.asarray(np.asarray(target_ids, np.int32)),
        "draft_index": jnp.asarray(index),
    }


def share_with_target(
    config: Any, own: Params, target: Params
) -> tuple[Any, DrafterParams]:
    """Lets a drafter use the target's arrays where it can, without holding them twice.

    Published files often hold copies of the target's embedding and head; they are
    dropped. A drafter with a vocabulary of its own and no head gets the target's rows
    for its tokens.

    Args:
        config: of the drafter; its fields `own_embedding` and `own_head` are set.
        own: its arrays.
        target: the target's arrays, in the same dtype.

    Returns:
        The configuration and the arrays to draft with.
    """
    own = dict(own)
    embedding = target["embedding"]
    head = target["head"]["weight"] if "head" in target else embedding
    if "embedding" in own and _is_copy(own["embedding"], embedding):
        del own["embedding"]
    if "head" in own and _is_copy(own["head"], head):
        del own["head"]
    elif "head" not in own and "vocabulary" in own:
        ids = own["vocabulary"]["target_ids"]
        own["head"] = jnp.take(_near(head, ids), ids, axis=0)
    config = dataclasses.replace(
        config, own_embedding="embedding" in own, own_head="head" in own
    )
    return config, DrafterParams(own=own, shared=target)


def _is_copy(x: jax.Array, y: jax.Array) -> bool:
    is_alike = x.shape == y.shape and x.dtype == y.dtype
    return is_alike and bool(jnp.array_equal(x, _near(y, x)))


def _near(x: jax.Array, other: jax.Array) -> jax.Array:
    """An array where `other` is: a target's may be spread over a mesh."""
    if x.sharding.device_set == other.sharding.device_set:
        return x
    return jnp.asarray(np.asarray(x))
