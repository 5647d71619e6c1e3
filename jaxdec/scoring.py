"""Teacher-forced passes: what the target says of a sequence that is already there.

One sequence at a time, read in chunks through the same decoder as everything else, so
that one compiled program serves any number of sequences of a length bucket.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdec import sampling
from jaxdec.decoding import PREFILL_CHUNK
from jaxdec.models.decoder import make_model
from jaxdec.program import bucket
from jaxdec.types import Model


@functools.partial(jax.jit, static_argnames=("model", "chunk", "reduce_fn"))
def _teacher_forced(params, tokens, length, *, model: Model, chunk: int, reduce_fn):
    """``reduce_fn(logits, next tokens)`` at every place, `chunk` rows a forward."""
    batch, size = tokens.shape
    offset = jnp.arange(chunk, dtype=jnp.int32)
    padded = jnp.pad(tokens, ((0, 0), (0, chunk + 1)))

    def read(i, carry):
        cache, found = carry
        start = i.astype(jnp.int32) * chunk
        window = jax.lax.dynamic_slice_in_dim(padded, start, chunk + 1, axis=1)
        position = jnp.broadcast_to(start + offset, (batch, chunk))
        cache, output = model.forward(params, cache, window[:, :-1], position, None)
        cache = cache.commit(None, jnp.full((batch,), chunk, jnp.int32))
        own = reduce_fn(output.logits, window[:, 1:])
        found = jax.lax.dynamic_update_slice_in_dim(found, own, start, axis=1)
        return cache, found

    num = (jnp.max(length) + chunk - 1) // chunk
    empty = jnp.zeros((batch, size + chunk), jnp.float32)
    cache = model.init_cache(batch, size + chunk)
    _, found = jax.lax.fori_loop(0, num, read, (cache, empty))
    return found


def _own_logprob(logits, tokens):
    return sampling.token_logprobs(logits, tokens, 0)[0]


def _top_gap(logits, tokens):
    del tokens
    first, best = sampling.first_max(logits)
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    _, second = sampling.first_max(
        jnp.where(index == first[..., None], -jnp.inf, logits)
    )
    return best - second


@functools.cache
def _scoring_model(config, dtype, cache_dtype):
    return make_model(config, dtype=dtype, cache_dtype=cache_dtype)


def _read(lm: Any, tokens: Sequence[int], chunk: int, reduce_fn) -> np.ndarray:
    """`reduce_fn` at every place of one sequence; one program per bucket of lengths."""
    buffer = np.zeros((1, bucket(len(tokens) + 1, 256)), np.int32)
    buffer[0, : len(tokens)] = tokens
    found = _teacher_forced(
        lm.params,
        jnp.asarray(buffer),
        jnp.asarray([len(tokens)], jnp.int32),
        model=_scoring_model(lm.config, lm.dtype, lm.cache_dtype),
        chunk=chunk,
        reduce_fn=reduce_fn,
    )
    return np.asarray(found)[0, : len(tokens)]


Scores = dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]]
"""Of prompts and outputs."""


def score(
    lm: Any,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    known: Scores | None = None,
) -> list[list[float]]:
    """Log-probability of every output token under the target, teacher-forced.

    Raw logits, as sampling parameters leave them alone; one request at a time, so that
    one compiled program serves any number of them.

    Args:
        lm: the target.
        prompts: token ids.
        outputs: what was said to each.
        known: scores of the same target that need not be found again; those that are
            found are added. Lossless strategies say the same.
    """
    known = {} if known is None else known
    scores = []
    for prompt, output in zip(prompts, outputs, strict=True):
        pair = tuple(prompt), tuple(output)
        if pair not in known:
            found = _read(lm, [*prompt, *output], PREFILL_CHUNK, _own_logprob)
            first = len(prompt) - 1
            known[pair] = found[first : first + len(output)].tolist()
        scores.append(list(known[pair]))
    return scores


def row_gaps(lm: Any, tokens: Sequence[int], num_rows: int) -> np.ndarray:
    """Gap between the two largest logits at every place, read `num_rows` at a time.

    The difference between two widths is what rounding does to the gap.
    """
    return _read(lm, tokens, num_rows, _top_gap)
