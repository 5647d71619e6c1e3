"""Attention over the live part of a cache, in blocks, in one program.

Four ways: `attend` reads a cache into which this forward has written its own entries;
`attend_in_order` reads the same, but sums every token's entries in the order of their
positions. `attend_beside` leaves the cache alone and holds the new keys and values
beside it: for branches, which must not return caches, and for entries that will never
be permanent, which is what a drafter reads of its own proposals. `attend_all` has no
cache: it reads whole sequences, for training.

Reading the whole allocation would make a large capacity slow from the first token. So
keys and values are read `BLOCK` slots at a time, up to the longest live row, with a
dynamic trip count and a running softmax (Milakov & Gimelshein, arXiv 1805.02867). A
block that is wholly masked for a row leaves that row's sums bit for bit unchanged, so
the trip count, and with it the neighbours in the batch, never show in the numbers.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxdec.cache import BLOCK

# Finite, so that a row whose blocks so far are all masked does not turn into NaN; the
# first visible key rescales what it summed by exp(-1e30 - m) = 0.
_MASKED = -1e30


def visible_slots(
    first_slot: Int[Array, ""],
    length: Int[Array, "B"],
    position: Int[Array, "B T"],
    mask: Bool[Array, "B T T"] | None,
    window: int | None,
) -> Bool[Array, "B T block"]:
    """Which of the `BLOCK` slots from `first_slot` each new token may attend.

    A live slot holds the token of its own position. A tail slot holds a token of this
    forward: visible by `mask`, or, when that is None, if it is not a later one.

    Args:
        first_slot: of the block.
        length: live slots.
        position: of the new tokens.
        mask: ``mask[b, i, j]``: whether tail token i may attend tail token j.
        window: positions that a token sees, its own counted; None is all.
    """
    num = position.shape[1]
    slot = first_slot + jnp.arange(BLOCK, dtype=jnp.int32)
    tail = slot[None, :] - length[:, None]
    index = jnp.arange(num, dtype=jnp.int32)
    if mask is None:
        visible = tail[:, None, :] <= index[None, :, None]
        slot_position = jnp.broadcast_to(slot[None, :], tail.shape)
    else:
        # A comparison with every tail index, not a gather: T is small, and XLA fuses
        # it with what follows.
        hit = tail[:, None, :] == index[None, :, None]
        among = jnp.any(mask[:, :, :, None] & hit[:, None, :, :], axis=2)
        visible = (tail < 0)[:, None, :] | among
        depth = jnp.sum(jnp.where(hit, position[:, :, None], jnp.int32(0)), axis=1)
        slot_position = jnp.where(tail < 0, slot[None, :], depth)
    if window is not None:
        distance = position[:, :, None] - slot_position[:, None, :]
        visible = visible & (distance < window)
    return visible


def attend(
    query: Float[Array, "B T H D"],
    keys: Float[Array, "B G S D"],
    values: Float[Array, "B G S D"],
    length: Int[Array, "B"],
    position: Int[Array, "B T"],
    mask: Bool[Array, "B T T"] | None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Array, "B T H D"]:
    """Attends every live entry and the allowed tail entries; softmax in float32.

    The tail of this forward must already be written at ``length .. length + T - 1``.

    Args:
        query: rotated, not scaled.
        keys: the cache's.
        values: the cache's.
        length: live entries.
        position: of the new tokens.
        mask: as for `visible_slots`.
        scale: of the scores.
        window: as for `visible_slots`.
        softcap: scores become ``tanh(score / softcap) * softcap``; None is no cap.
    """
    num = query.shape[1]
    query = _grouped(query, keys, scale)

    def visible(first):
        return visible_slots(first, length, position, mask, window)

    carry = _read_cache(query, keys, values, length + num, visible, softcap)
    return _ungrouped(carry, num)


def attend_in_order(
    query: Float[Array, "B T H D"],
    keys: Float[Array, "B G S D"],
    values: Float[Array, "B G S D"],
    length: Int[Array, "B"],
    mask: Bool[Array, "B T T"] | None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Array, "B T H D"]:
    """`attend`, rounded as if each token were read alone after its own path.

    Sums of floats depend on the order of their terms. In the tail of a tree a node's
    ancestors lie scattered among its rivals; plain decoding has them one after the
    other. So every token gets keys and values of its own here, in which the entry of
    position s is in slot s, whatever else was drafted: T times as much to read, which
    only the exact mode pays.

    Args:
        query: of the T tokens that ask.
        keys: the cache's, this forward's entries at its tail.
        values: the cache's.
        length: live entries, which do not include the tail.
        mask: which of the T each of them may attend: its ancestors and itself, which
            come in the order of their positions. None: all that are not later.
        scale: of the scores.
        window: an entry further back than this many positions is not attended.
        softcap: ``tanh(scores / softcap) * softcap``.
    """
    batch, num, heads, width = query.shape
    groups = keys.shape[1]
    if mask is None:
        causal = jnp.tril(jnp.ones((num, num), bool))
        mask = jnp.broadcast_to(causal[None], (batch, num, num))
    count = jnp.sum(mask, axis=2, dtype=jnp.int32)
    # The j-th ancestor of a node; past its last one, whatever comes: never visible.
    path = jnp.argsort(~mask, axis=2, stable=True).astype(jnp.int32)
    end = length[:, None] + count
    alone = batch * num

    def tail_of(buffer):
        """The entries this forward wrote, ``[B, T, G, D]``."""

        def one(buffer, start):
            # Where a chunk reaches past the end, the rest is not there to be read.
            slot = start + jnp.arange(num, dtype=jnp.int32)
            return jnp.take(buffer, slot, axis=1, mode="clip")

        return jax.vmap(one)(buffer, length).transpose(0, 2, 1, 3)

    def in_order(buffer, tail, first):
        """Slots of a block as each token sees them, ``[B T, G, block, D]``."""
        size = (batch, groups, BLOCK, width)
        zero = jnp.int32(0)
        block = jax.lax.dynamic_slice(buffer, (zero, zero, first, zero), size)
        slot = first + jnp.arange(BLOCK, dtype=jnp.int32)
        step = slot[None, :] - length[:, None]
        which = jnp.take_along_axis(
            path, jnp.clip(step, 0, num - 1)[:, None, :], axis=2, mode="clip"
        )
        own = jax.vmap(lambda rows, index: rows[index])(tail, which)
        is_tail = (step >= 0)[:, None, None, :, None]
        seen = jnp.where(is_tail, own.transpose(0, 1, 3, 2, 4), block[:, None])
        return seen.reshape(alone, groups, BLOCK, width)

    def visible(first):
        slot = first + jnp.arange(BLOCK, dtype=jnp.int32)[None, None]
        seen = slot < end[:, :, None]
        if window is not None:
            seen = seen & (end[:, :, None] - 1 - slot < window)
        return seen.reshape(alone, 1, BLOCK)

    tails = tail_of(keys), tail_of(values)

    def block(first):
        return in_order(keys, tails[0], first), in_order(values, tails[1], first)

    query = _grouped(query.reshape(alone, 1, heads, width), keys, scale)
    carry = _read_blocks(
        query, block, keys.shape[2], end.reshape(alone), visible, softcap
    )
    return _ungrouped(carry, 1).reshape(batch, num, heads, width)


def attend_beside(
    query: Float[Array, "B T H D"],
    keys: Float[Array, "B G S D"],
    values: Float[Array, "B G S D"],
    length: Int[Array, "B"],
    position: Int[Array, "B T"],
    held_keys: Float[Array, "B G R D"],
    held_values: Float[Array, "B G R D"],
    held_position: Int[Array, "B R"],
    mask: Bool[Array, "B T R"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Array, "B T H D"]:
    """Attends every live entry of a cache, and entries held beside it.

    Args:
        query: of the T tokens that ask.
        keys: the cache's; slot i holds the token of position i.
        values: the cache's.
        length: live entries of the cache; what lies past them is not read.
        position: of the T tokens.
        held_keys: keys of R further tokens, those of the T among them.
        held_values: their values; entries that no query may attend must be finite.
        held_position: their positions, for windows.
        mask: which of the R each of the T may attend; at least one each.
        scale: of the scores.
        window: an entry further back than this many positions is not attended.
        softcap: ``tanh(scores / softcap) * softcap``.
    """
    num = query.shape[1]
    query = _grouped(query, keys, scale)

    def visible(first):
        slot = first + jnp.arange(BLOCK, dtype=jnp.int32)[None, None]
        seen = jnp.broadcast_to(slot < length[:, None, None], (*position.shape, BLOCK))
        if window is None:
            return seen
        return seen & (position[:, :, None] - slot < window)

    carry = _read_cache(query, keys, values, length, visible, softcap, _zero_of(query))
    if window is not None:
        distance = position[:, :, None] - held_position[:, None, :]
        mask = mask & (distance < window)
    held_keys, held_values = (x.astype(keys.dtype) for x in (held_keys, held_values))
    carry = _absorb(carry, query, held_keys, held_values, mask, softcap)
    return _ungrouped(carry, num)


def attend_all(
    query: Float[Array, "B T H D"],
    keys: Float[Array, "B G R D"],
    values: Float[Array, "B G R D"],
    mask: Bool[Array, "B T R"],
    own: Sequence[tuple[Array, Array]] = (),
    *,
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "B T H D"]:
    """Attends the keys that `mask` allows, and those of the query's own.

    Args:
        query: of the T tokens that ask.
        keys: of the R that they may attend.
        values: theirs.
        mask: at least one key for each query, unless it has some of its own.
        own: further keys and values ``[B, G, T, D]``, of which query t attends the
            t-th only: what it drafted itself.
        scale: of the scores.
        softcap: ``tanh(scores / softcap) * softcap``.
    """
    num = query.shape[1]
    query = _grouped(query, keys, scale)
    carry = _absorb(_nothing(query), query, keys, values, mask, softcap)
    for key, value in own:
        carry = _absorb_own(carry, query, key, value, softcap)
    return _ungrouped(carry, num)


def _grouped(query, keys, scale):
    """Queries by the key/value head they share: ``[B, G, H/G * T, D]``."""
    batch, num, heads, width = query.shape
    groups = keys.shape[1]
    per_group = heads // groups
    query = (query * jnp.float32(scale)).astype(keys.dtype)
    query = query.reshape(batch, num, groups, per_group, width)
    return query.transpose(0, 2, 3, 1, 4).reshape(batch, groups, per_group * num, width)


def _ungrouped(carry, num):
    """The finished running softmax as ``[B, T, H, D]``."""
    _, total, weighted = carry
    out = weighted / total[..., None]
    batch, groups, rows, width = out.shape
    out = out.reshape(batch, groups, rows // num, num, width)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, num, -1, width)


def _zero_of(x):
    """0, which XLA on CPU believes to depend on `x`.

    What a forward leaves alone could be read at any time, and XLA reads it all at
    once, before the first layer: 60 blocks at the same time in fresh memory, where
    otherwise one place serves them all. It took half of a step.
    """
    return jax.lax.platform_dependent(
        x[(0,) * x.ndim],
        cpu=lambda one: (one > jnp.inf).astype(jnp.int32),
        default=lambda one: jnp.int32(0),
    )


def _read_cache(query, keys, values, end, visible, softcap, zero=None):
    """The running softmax over slots below `end`; `visible` masks within a block."""
    batch, groups, _, width = query.shape
    zero = jnp.int32(0) if zero is None else zero
    size = (batch, groups, BLOCK, width)

    def block(first):
        at = (jnp.int32(0), jnp.int32(0), first + zero, jnp.int32(0))
        return (
            jax.lax.dynamic_slice(keys, at, size),
            jax.lax.dynamic_slice(values, at, size),
        )

    return _read_blocks(query, block, keys.shape[2], end, visible, softcap)


def _read_blocks(query, block_fn, capacity, end, visible, softcap):
    """`_read_cache`, of keys and values that ``block_fn(first slot)`` returns."""

    def read(first, carry):
        key, value = block_fn(first)
        # Scratch may hold NaN, and 0 x NaN is NaN: mask the values too.
        slot = first + jnp.arange(BLOCK, dtype=jnp.int32)[None]
        written = slot < end[:, None]
        value = jnp.where(written[:, None, :, None], value, jnp.zeros((), value.dtype))
        return _absorb(carry, query, key, value, visible(first), softcap)

    carry = read(jnp.int32(0), _nothing(query))
    if capacity > BLOCK:
        # The padding of a chunk may lie past the end.
        num_blocks = (jnp.minimum(jnp.max(end), capacity) + BLOCK - 1) // BLOCK
        carry = jax.lax.fori_loop(
            1, num_blocks, lambda i, c: read(i.astype(jnp.int32) * BLOCK, c), carry
        )
    return carry


def _nothing(query):
    """The running softmax before any key."""
    return (
        jnp.full(query.shape[:3], 2 * _MASKED, jnp.float32),
        jnp.zeros(query.shape[:3], jnp.float32),
        jnp.zeros(query.shape, jnp.float32),
    )


def _absorb(carry, query, key, value, visible, softcap):
    """One round of the running softmax, over the keys given."""
    highest, total, weighted = carry
    batch, groups, rows, _ = query.shape
    num, size = visible.shape[1:]
    scores = _product("bgrd,bgsd->bgrs", query, key)
    if softcap is not None:
        scores = jnp.tanh(scores / softcap) * softcap
    visible = jnp.broadcast_to(
        visible[:, None, None, :, :], (batch, groups, rows // num, num, size)
    ).reshape(batch, groups, rows, size)
    scores = jnp.where(visible, scores, jnp.float32(_MASKED))
    # What is subtracted cancels out, so it has no gradient.
    top = jax.lax.stop_gradient(jnp.maximum(highest, jnp.max(scores, axis=-1)))
    shrink = jnp.exp(highest - top)
    weight = jnp.exp(scores - top[..., None])
    gathered = _product("bgrs,bgsd->bgrd", weight.astype(value.dtype), value)
    return (
        top,
        total * shrink + jnp.sum(weight, axis=-1),
        weighted * shrink[..., None] + gathered,
    )


def _absorb_own(carry, query, key, value, softcap):
    """The same over one key for each query, its own."""
    highest, total, weighted = carry
    # Rows are heads by tokens; the heads of a group have the same keys.
    per_group = query.shape[2] // key.shape[2]
    key, value = (
        jnp.tile(x, (1, 1, per_group, 1)).astype(jnp.float32) for x in (key, value)
    )
    scores = jnp.sum(query.astype(jnp.float32) * key, axis=-1)
    if softcap is not None:
        scores = jnp.tanh(scores / softcap) * softcap
    top = jax.lax.stop_gradient(jnp.maximum(highest, scores))
    shrink, weight = jnp.exp(highest - top), jnp.exp(scores - top)
    return (
        top,
        total * shrink + weight,
        weighted * shrink[..., None] + weight[..., None] * value,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(spec, a, b):
    """An einsum with a float32 result, its gradient's too."""
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _product_fwd(spec, a, b):
    return _product(spec, a, b), (a, b)


def _product_bwd(spec, kept, gradient):
    a, b = kept
    gradient = gradient.astype(a.dtype)
    inputs, out = spec.split("->")
    of_a, of_b = inputs.split(",")
    gradients = (
        _product(f"{out},{of_b}->{of_a}", gradient, b),
        _product(f"{of_a},{out}->{of_b}", a, gradient),
    )
    return tuple(x.astype(a.dtype) for x in gradients)


_product.defvjp(_product_fwd, _product_bwd)
