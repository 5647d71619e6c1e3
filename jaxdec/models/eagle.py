"""The networks of the EAGLE family as pure functions over plain trees of arrays.

A row reads a hidden state and the token that followed it, and says what comes next. The
hidden state is made from the target's features where those are known, and is the
network's own output of the row before where they are not. So there are three ways
through the layers, all with the same arithmetic: `write` puts rows into a cache, `read`
attends a cache and rows held beside it, and `read_all` makes one of several passes over
whole sequences, for training: the first from features, each later one from the outputs
of the pass before, where a place attends the first pass's rows and its own since then.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxdec.cache import KVCache, init_kv_cache
from jaxdec.models.decoder import prefers_out_first
from jaxdec.models.eagle_config import EagleConfig
from jaxdec.models.layers import Attention, Held, Linear, Mlp, Norm, matmul, take_rows
from jaxdec.models.rope import rotation
from jaxdec.models.vocabulary import vocabulary_params
from jaxdec.types import DrafterParams, Params, Vocabulary


class EagleBlock(nnx.Module):
    """A decoder block, which may read the embedding beside its input."""

    def __init__(self, config: EagleConfig, layer: int, *, dtype, out_first, rngs):
        body = config.layers
        kw = dict(dtype=dtype, out_first=out_first, rngs=rngs)
        kind = config.kind_of_layer(layer)
        width = body.hidden_size

        def norm():
            return Norm(width, eps=body.norm_eps)

        self.adds_to_normed = config.norm_before_residual
        num_in = 2 * width if kind == "wide" else width
        self.attention = Attention(body, layer, num_in=num_in, **kw)
        self.attention_norm = None if kind == "bare" else norm()
        self.hidden_norm = norm() if kind == "wide" else None
        self.mlp, self.mlp_norm = Mlp(body, **kw), norm()

    def enter(self, hidden, embedded):
        """What attention reads, and what its output is added to."""
        if self.attention_norm is None:
            return hidden, hidden
        if self.hidden_norm is None:
            return self.attention_norm(hidden), hidden
        normed = self.hidden_norm(hidden)
        x = jnp.concatenate([self.attention_norm(embedded), normed], axis=-1)
        return x, normed if self.adds_to_normed else hidden

    def leave(self, residual, attended):
        """Both residual sums."""
        x = residual + attended
        return x + self.mlp(self.mlp_norm(x))


class Eagle(nnx.Module):
    """A drafter's own arrays: fusion, layers, norm; embedding and head if it has them.

    The rotation of rows is by their position, whatever is visible to them.
    """

    def __init__(self, config: EagleConfig, *, dtype, out_first, rngs):
        self.config = config
        body = config.layers
        width, tap = body.hidden_size, config.target_hidden_size
        kw = dict(dtype=dtype, out_first=out_first, rngs=rngs)
        joined = len(config.taps) * tap if config.fusion == "taps" else width + tap
        self.fusion = Linear(joined, width, bias=config.fusion_bias, **kw)
        sizes = {"none": [], "all": [joined], "each": [tap] * len(config.taps)}
        self.fusion_norms = nnx.List(
            [Norm(size, eps=body.norm_eps) for size in sizes[config.fusion_norm]]
        )
        self.layers = nnx.List(
            [EagleBlock(config, layer, **kw) for layer in range(body.num_layers)]
        )
        has_norm = config.output_norm != "none"
        self.norm = Norm(width, eps=body.norm_eps) if has_norm else None

        def table(rows, columns):
            x = jax.random.normal(rngs.params(), (rows, columns), jnp.float32)
            return nnx.Param((x * columns**-0.5).astype(dtype))

        own = config.own_embedding
        self.embedding = table(body.vocab_size, width) if own else None
        self.head = table(config.draft_vocab_size, width) if config.own_head else None
        self.mask_hidden = table(1, joined) if config.is_parallel else None

    def fuse(self, features):
        """The hidden state of rows whose features are known."""
        if self.config.fusion == "embedding":
            return features
        parts = [features]
        if self.config.fusion_norm == "each":
            parts = jnp.split(features, len(self.config.taps), axis=-1)
        if self.config.fusion_norm != "none":
            pairs = zip(self.fusion_norms, parts, strict=True)
            parts = [norm(part) for norm, part in pairs]
        return self.fusion(jnp.concatenate(parts, axis=-1))

    def enter(self, hidden, tokens, shared):
        """What the first layer reads: a hidden state, and an embedding."""
        table = shared["embedding"] if self.embedding is None else self.embedding[...]
        # Ids are in range by contract; "clip" keeps scratch rows from making NaN.
        embedded = take_rows(table, tokens)
        if self.config.fusion == "embedding":
            hidden = self.fusion(jnp.concatenate([embedded, hidden], axis=-1))
        return hidden, embedded

    def finish(self, hidden):
        """What passes on to the next row."""
        return self.norm(hidden) if self.config.output_norm == "recurrent" else hidden

    def logits(self, hidden, shared):
        """What rows say, given what passes on from them; over the own vocabulary."""
        if self.head is not None:
            head = self.head[...]
        elif "head" in shared:
            head = shared["head"]["weight"]
        else:
            head = shared["embedding"]
        return matmul(self.normed(hidden), head, out_first=True)

    def normed(self, hidden):
        """What the head reads, given what passes on."""
        return self.norm(hidden) if self.config.output_norm == "head" else hidden

    def rotate(self, position):
        """Cosine and sine of every position's angles."""
        body = self.config.layers
        return rotation(body.ropes[0], body.head_dim, position)

    def write(self, cache, hidden, tokens, position, shared):
        """Reads T rows after the live entries, and writes them to the tail."""
        hidden, embedded = self.enter(hidden, tokens, shared)
        turned = self.rotate(position)
        keys, values = list(cache.keys), list(cache.values)
        for i, layer in enumerate(self.layers):
            x, residual = layer.enter(hidden, embedded)
            y, keys[i], values[i] = layer.attention(
                x, turned, keys[i], values[i], cache.length, position, None
            )
            hidden = layer.leave(residual, y)
        cache = cache.replace(keys=tuple(keys), values=tuple(values))
        return cache, self.finish(hidden)

    def read(self, cache, held, hidden, tokens, position, seen_from, shared):
        """The same beside the cache, which stays as it is; see `EagleNetwork.read`."""
        hidden, embedded = self.enter(hidden, tokens, shared)
        turned = self.rotate(position)
        keys, values = list(held.keys), list(held.values)
        for i, layer in enumerate(self.layers):
            x, residual = layer.enter(hidden, embedded)
            y, (keys[i], values[i]) = layer.attention.read(
                x,
                turned,
                (cache.keys[i], cache.values[i]),
                cache.length,
                seen_from,
                held._replace(keys=keys[i], values=values[i]),
            )
            hidden = layer.leave(residual, y)
        return (tuple(keys), tuple(values)), self.finish(hidden)

    def read_all(self, hidden, tokens, position, place, earlier, shared):
        """Whole sequences at once, from nothing; for training."""
        hidden, embedded = self.enter(hidden, tokens, shared)
        turned = self.rotate(position)
        rows = []
        for i, layer in enumerate(self.layers):
            x, residual = layer.enter(hidden, embedded)
            before = [made[i] for made in earlier]
            y, row = layer.attention.read_all(x, turned, place, before)
            rows.append(row)
            hidden = layer.leave(residual, y)
        return tuple(rows), self.finish(hidden)


class EagleNetwork(NamedTuple):
    """Pure functions over ``DrafterParams`` (own arrays, and the target's)."""

    config: EagleConfig
    init_cache: Callable[[int, int], KVCache]
    """``(batch_size, capacity)``."""
    init_held: Callable[[int, int], tuple]
    """``(batch_size, num_rows)``: keys and values per layer, ``[B, G, R, D]``."""
    fuse: Callable[[DrafterParams, Float[Array, "B T F"]], Float[Array, "B T H"]]
    enter: Callable[..., tuple[Array, Array]]
    """``(params, hidden, tokens)``: what the first layer reads."""
    write: Callable[..., tuple[KVCache, Float[Array, "B T H"]]]
    """``(params, cache, hidden, tokens, position)``: causal rows at the tail."""
    read: Callable[..., tuple[tuple, Float[Array, "B T H"]]]
    """``(params, cache, held, hidden, tokens, position, seen_from)``: rows of `held`
    (a `jaxdec.models.layers.Held` with tuples of keys and values, one per layer). A
    sliding window reaches back from `seen_from`, ``[B, T]``."""
    read_all: Callable[..., tuple[tuple, Float[Array, "B T H"]]]
    """``(params, hidden, tokens, position, place[B,T], earlier)``: one pass over
    sequences; `earlier` are the rows that earlier passes returned, the first of which
    read them whole."""
    logits: Callable[[DrafterParams, Float[Array, "B T H"]], Float[Array, "B T W"]]
    normed: Callable[[DrafterParams, Float[Array, "B T H"]], Float[Array, "B T H"]]
    """What the head reads, given what passes on."""
    vocabulary: Callable[[DrafterParams], Vocabulary] | None
    """What the W tokens are; None where they are all of the target's."""
    mask_hidden: Callable[[DrafterParams], Float[Array, "H"]]
    """The hidden state of rows whose features will not be known (P-EAGLE)."""


@functools.cache
def _split(config: EagleConfig, dtype: str):
    """Graph definition and abstract arrays; nothing is allocated."""
    module = nnx.eval_shape(lambda: _make(config, dtype, nnx.Rngs(0)))
    return nnx.split(module)


def _make(config: EagleConfig, dtype: str, rngs: nnx.Rngs) -> Eagle:
    out_first = prefers_out_first(dtype)
    return Eagle(config, dtype=jnp.dtype(dtype), out_first=out_first, rngs=rngs)


def init_eagle_params(
    config: EagleConfig, key: jax.Array, dtype: str = "float32"
) -> Params:
    """Random weights, for tests and for training from scratch.

    A reduced vocabulary is that of the first tokens; see `vocabulary_params`.
    """
    own = nnx.to_pure_dict(nnx.split(_make(config, dtype, nnx.Rngs(params=key)))[1])
    if config.is_reduced:
        own["vocabulary"] = vocabulary_params(
            np.arange(config.draft_vocab_size), config.layers.vocab_size
        )
    return own


def make_network(
    config: EagleConfig, dtype: str = "float32", cache_dtype: str = "float32"
) -> EagleNetwork:
    """The network of a configuration."""
    graph, abstract = _split(config, dtype)
    body = config.layers

    def module(params: DrafterParams) -> Eagle:
        state = jax.tree.map(lambda leaf: leaf, abstract)
        arrays = {k: v for k, v in params.own.items() if k != "vocabulary"}
        nnx.replace_by_pure_dict(state, arrays)
        return nnx.merge(graph, state)

    def init_cache(batch_size, capacity):
        return init_kv_cache(
            batch_size,
            capacity,
            body.num_layers,
            body.num_kv_heads,
            body.head_dim,
            jnp.dtype(cache_dtype),
        )

    def init_held(batch_size, num_rows):
        shape = (batch_size, body.num_kv_heads, num_rows, body.head_dim)
        rows = tuple(
            jnp.zeros(shape, jnp.dtype(cache_dtype)) for _ in range(body.num_layers)
        )
        return rows, rows

    def write(params, cache, hidden, tokens, position):
        return module(params).write(cache, hidden, tokens, position, params.shared)

    def read(params, cache, held, hidden, tokens, position, seen_from):
        return module(params).read(
            cache, held, hidden, tokens, position, seen_from, params.shared
        )

    def read_all(params, hidden, tokens, position, place, earlier=()):
        return module(params).read_all(
            hidden, tokens, position, place, earlier, params.shared
        )

    def mask_hidden(params):
        network = module(params)
        return network.fuse(network.mask_hidden[...].astype(jnp.float32)[None])[0, 0]

    def vocabulary(params):
        return Vocabulary(**params.own["vocabulary"])

    return EagleNetwork(
        config=config,
        init_cache=init_cache,
        init_held=init_held,
        fuse=lambda params, features: module(params).fuse(features),
        enter=lambda params, hidden, tokens: module(params).enter(
            hidden, tokens, params.shared
        ),
        write=write,
        read=read,
        read_all=read_all,
        logits=lambda params, hidden: module(params).logits(hidden, params.shared),
        normed=lambda params, hidden: module(params).normed(hidden),
        vocabulary=vocabulary if config.is_reduced else None,
        mask_hidden=mask_hidden,
    )


def causal_pass(
    network: EagleNetwork,
    params: DrafterParams,
    features: Float[Array, "B T F"],
    tokens: Int[Array, "B T"],
) -> Float[Array, "B T H"]:
    """What passes on from every row of whole sequences; differentiable.

    Args:
        network: the network.
        params: its arrays.
        features: the target's features of T tokens.
        tokens: the T tokens that followed them.
    """
    batch, num = tokens.shape
    steps = jnp.arange(num, dtype=jnp.int32)
    position = jnp.broadcast_to(steps[None], (batch, num))
    mask = jnp.broadcast_to(steps[:, None] >= steps[None], (batch, num, num))
    _, hidden = network.read(
        params,
        network.init_cache(batch, 1),
        Held(*network.init_held(batch, num), jnp.int32(0), position, mask),
        network.fuse(params, features),
        tokens,
        position,
        position,
    )
    return hidden
