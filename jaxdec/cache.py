"""The KV cache: what a decoder remembers, one entry per token read.

A cache is storage plus one number per row. Entries below `length` are live; entries
at or past it are scratch, written freely and never read ("length is the only truth").
A forward writes its T new entries at ``length + arange(T)``, the *tail*, and leaves
`length` alone; `commit` makes a path through that tail permanent by moving it to the
front of the tail and adding to `length`. A rejected draft therefore needs no undo: the
next forward writes over it, and the state before the step is still a valid state.

Storage is one array per layer, laid out ``[B, G, S, D]`` so that a key/value head is
one contiguous matrix. It is never stacked over layers: on CPU a slice is a copy.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxdec.types import pytree

BLOCK = 256
"""Slots that attention reads at a time; capacities are multiples of it."""

SHORT_UPDATE = 16
"""Entries; a longer update may reach past the end of a row, on a CPU."""


def round_capacity(capacity: int) -> int:
    """The smallest multiple of `BLOCK` that holds `capacity` slots.

    >>> round_capacity(1), round_capacity(256), round_capacity(257)
    (256, 256, 512)
    """
    return -(-capacity // BLOCK) * BLOCK


def headroom(chunk: int, num_nodes: int, min_rows: int) -> int:
    """Slots that a row needs past what it may come to say.

    A drafter with a cache of its own may write K tokens and a padded forward past what
    the target has read; so may a chunk, where `write_tail` does not drop what does not
    fit.

    Args:
        chunk: prompt tokens read per forward.
        num_nodes: of a step, its root too.
        min_rows: rows that forwards are padded to.
    """
    is_dropped = chunk > SHORT_UPDATE and jax.default_backend() == "cpu"
    return max(0 if is_dropped else chunk, num_nodes + min_rows)


@pytree
class KVCache:
    """Keys and values of every layer, and how many entries of each row are live."""

    keys: tuple[Float[Array, "B G S D"], ...]
    """One array a layer."""
    values: tuple[Float[Array, "B G S D"], ...]
    """One array a layer."""
    length: Int[Array, "B"]
    """Live entries of each row, one per token read."""

    def put(self, rows: tuple) -> "KVCache":
        """Writes `rows`, a pair of ``[B, G, T, D]`` per layer, to the tail."""
        keys = [
            write_tail(k, r, self.length)
            for k, (r, _) in zip(self.keys, rows, strict=True)
        ]
        values = [
            write_tail(v, r, self.length)
            for v, (_, r) in zip(self.values, rows, strict=True)
        ]
        return self.replace(keys=tuple(keys), values=tuple(values))

    def commit(self, path: Int[Array, "B T"] | None, num: Int[Array, "B"]) -> "KVCache":
        """Makes the first `num` tail entries of `path` permanent.

        Args:
            path: tail indices, root first, in increasing order; None says that the path
                is 0, 1, 2, ... (a chain), which needs no move.
            num: entries to keep per row; 0 keeps none.
        """
        keys, values = self.keys, self.values
        if path is not None:
            keys = tuple(_compact(k, path, self.length) for k in keys)
            values = tuple(_compact(v, path, self.length) for v in values)
        return KVCache(keys=keys, values=values, length=self.length + num)


def init_kv_cache(
    batch_size: int,
    capacity: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: jnp.dtype = jnp.float32,
) -> KVCache:
    """An empty cache with `capacity` slots a row, rounded up to whole blocks."""
    shape = (batch_size, num_kv_heads, round_capacity(capacity), head_dim)
    return KVCache(
        keys=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        values=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        length=jnp.zeros((batch_size,), jnp.int32),
    )


def write_tail(
    buffer: Float[Array, "B G S D"],
    rows: Float[Array, "B G T D"],
    length: Int[Array, "B"],
) -> Float[Array, "B G S D"]:
    """Writes T entries a row at slots ``length .. length + T - 1``.

    An update past the end would be clamped silently. The caller guarantees room for
    what a step writes, by `headroom`. On a CPU a chunk of a prompt may be padded past
    the end: of updates longer than `SHORT_UPDATE`, what does not fit is dropped there.
    """
    rows = rows.astype(buffer.dtype)
    if rows.shape[2] <= SHORT_UPDATE:
        return _write(buffer, rows, length)
    # XLA for TPU copies a cache that is read where it is then written.
    return jax.lax.platform_dependent(
        buffer, rows, length, cpu=_write_what_fits, default=_write
    )


def _write(buffer, rows, length):
    """Writes in place, where there is room.

    One row is a slice update, and several the scatter that `vmap` makes of it: one
    slice update after another makes XLA on CPU copy the whole buffer.
    """
    zero = jnp.int32(0)
    if buffer.shape[0] == 1:
        start = (zero, zero, length[0], zero)
        return jax.lax.dynamic_update_slice(buffer, rows, start)

    def write(buffer, rows, start):
        return jax.lax.dynamic_update_slice(buffer, rows, (zero, start, zero))

    return jax.vmap(write)(buffer, rows, length)


def _write_what_fits(buffer, rows, length):
    """The same, but what lies past the end is dropped."""

    def write(buffer, rows, start):
        num = min(rows.shape[1], buffer.shape[1])
        zero, first = jnp.int32(0), jnp.minimum(start, buffer.shape[1] - num)
        # The slots before `start` that the update then covers keep what they hold.
        index = jnp.arange(num, dtype=jnp.int32) - (start - first)
        old = jax.lax.dynamic_slice_in_dim(buffer, first, num, axis=1)
        new = jnp.take(rows, jnp.maximum(index, 0), axis=1, mode="clip")
        new = jnp.where((index >= 0)[None, :, None], new, old)
        return jax.lax.dynamic_update_slice(buffer, new, (zero, first, zero))

    if buffer.shape[0] == 1:
        return write(buffer[0], rows[0], length[0])[None]
    return jax.vmap(write)(buffer, rows, length)


def _compact(buffer, path, length):
    """Moves the tail entries of `path` to the front of the tail.

    A path may be shorter than the tail it leads through.
    """
    slot = (length[:, None] + path)[:, None, :, None]
    moved = jnp.take_along_axis(buffer, slot, axis=2, mode="clip")
    return write_tail(buffer, moved, length)
