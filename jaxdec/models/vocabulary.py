"""The smaller vocabulary of a drafter, as arrays."""

import jax.numpy as jnp
import numpy as np

from jaxdec.types import Params


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


def target_ids_of(d2t: np.ndarray) -> np.ndarray:
    """The target's token for each of a reduced vocabulary; ``d2t`` holds offsets.

    >>> print(target_ids_of(np.array([1, 2, 2, 6])))
    [1 3 4 9]
    """
    return np.arange(len(d2t)) + np.asarray(d2t, np.int64)


def offsets_of(target_ids: np.ndarray) -> np.ndarray:
    """The inverse of `target_ids_of`.

    >>> print(offsets_of(np.array([1, 3, 4, 9])))
    [1 2 2 6]
    """
    target_ids = np.asarray(target_ids, np.int64)
    return target_ids - np.arange(len(target_ids))
