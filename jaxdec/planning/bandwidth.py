"""How fast this machine reads memory, and how soon a plain step could be over.

A step of one token multiplies a row or two by every weight, so nothing that it does can
take less time than reading the weights and the KV state once. How far a measured step
is from that floor says whether there is something to find in it.

    floor = (bytes of weights + bytes of KV state) / bandwidth

The bandwidth is measured by adding up an array that is larger than what caches keep:
whole numbers, because their additions may be reordered and so are as fast as memory.
"""

import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxdec.models.config import ModelConfig
from jaxdec.types import Params

NUM_BYTES = 2**28
"""Read at a time; more than a processor's caches hold for one program."""
REPEATS = 5

_PARTS, _WIDTH = 64, 1024


@functools.partial(jax.jit, static_argnames=("num_bytes",))
def _ones(num_bytes: int) -> jax.Array:
    return jnp.ones((_PARTS, num_bytes // (4 * _PARTS * _WIDTH), _WIDTH), jnp.int32)


@jax.jit
def _read(numbers: jax.Array) -> jax.Array:
    """Sums along the middle axis: parts run in parallel, columns in vectors."""
    return jnp.sum(numbers, axis=1)


@functools.cache
def memory_bandwidth() -> float:
    """Bytes per second that the default device reads, the best of a few tries.

    Measured once per process; takes a fraction of a second and 256 MB for as long.
    """
    numbers = _ones(NUM_BYTES)
    jax.block_until_ready(_read(numbers))
    spent = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        jax.block_until_ready(_read(numbers))
        spent.append(time.perf_counter() - started)
    return numbers.nbytes / min(spent)


def weight_bytes(config: ModelConfig, params: Params) -> int:
    """Bytes of a decoder's weights that a step of one token has to read.

    Of tables that are looked up a row is read, and of a mixture the chosen experts:
    their stacked matrices are the only weights with three axes.
    """
    share = 1.0
    if config.moe is not None:
        share = config.moe.num_experts_per_token / config.moe.num_experts
    # A tied table is read whole, as the head.
    tables = {"positions"} | (set() if config.tie_embeddings else {"embedding"})
    read: Mapping[str, Any] = {k: v for k, v in params.items() if k not in tables}
    return int(
        sum(x.nbytes * (share if x.ndim == 3 else 1.0) for x in jax.tree.leaves(read))
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Floor:
    """The least time that a plain step can take here."""

    memory_bandwidth_bytes_per_s: float
    weight_bytes: int
    kv_bytes: float
    """Of the KV state, a step on average."""
    floor_ms: float


def plain_floor(config: ModelConfig, params: Params, kv_bytes: float) -> Floor:
    """The floor of a decoder on this machine; measures the bandwidth if need be."""
    bandwidth, weights = memory_bandwidth(), weight_bytes(config, params)
    return Floor(
        memory_bandwidth_bytes_per_s=bandwidth,
        weight_bytes=weights,
        kv_bytes=kv_bytes,
        floor_ms=1000 * (weights + kv_bytes) / bandwidth,
    )
