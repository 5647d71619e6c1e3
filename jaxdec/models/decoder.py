"""One decoder for every dense family: embedding, blocks, norm, head, as a `Model`.

The Flax module is split once: its graph definition is static and closed over, and its
arrays are a plain nested dict. The cache is an argument and a result.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxdec.cache import init_kv_cache
from jaxdec.models.config import ModelConfig
from jaxdec.models.layers import Block, Held, Linear, Norm, matmul, take_rows
from jaxdec.models.rope import rotation
from jaxdec.types import Model, Output, Params


class Decoder(nnx.Module):
    """A causal decoder with the static switches of `ModelConfig`."""

    def __init__(self, config: ModelConfig, *, dtype, out_first, rngs):
        self.config = config
        kw = dict(dtype=dtype, out_first=out_first, rngs=rngs)
        shape = (config.vocab_size, config.hidden_size)
        table = jax.random.normal(rngs.params(), shape, jnp.float32)
        self.embedding = nnx.Param((table * shape[1] ** -0.5).astype(dtype))
        # One assignment each: Flax fixes an attribute as static when it is None first.
        shape = (config.max_positions, config.hidden_size)
        has_positions = config.learned_positions
        self.positions = nnx.Param(jnp.zeros(shape, dtype)) if has_positions else None
        self.layers = nnx.List(
            [Block(config, layer, **kw) for layer in range(config.num_layers)]
        )
        self.norm = Norm(config.hidden_size, eps=config.norm_eps, kind=config.norm)
        # [V, E] like the embedding, whatever the layout of the other matrices.
        kw = dict(bias=False, dtype=dtype, out_first=True, rngs=rngs)
        shape = (config.hidden_size, config.vocab_size)
        self.head = None if config.tie_embeddings else Linear(*shape, **kw)

    def embed(self, tokens, position):
        """Tap 0: the residual stream that enters the first layer."""
        # Ids are in range by contract; "clip" keeps scratch rows from making NaN.
        x = take_rows(self.embedding[...], tokens)
        if self.config.embedding_scale != 1.0:
            # The published models round the scale to the weights' dtype.
            scale = jnp.asarray(self.config.embedding_scale, self.embedding.dtype)
            x = x * scale.astype(jnp.float32)
        if self.positions is not None:
            x = x + take_rows(self.positions[...], position)
        return x

    def logits(self, normed):
        """Head over hidden states after the final norm."""
        weight = self.embedding if self.head is None else self.head.weight
        logits = matmul(normed, weight[...], out_first=True)
        cap = self.config.logit_softcap
        return logits if cap is None else jnp.tanh(logits / cap) * cap

    def __call__(self, cache, tokens, position, mask, taps):
        """Writes the tokens to the cache's tail, and reads it."""
        keys, values = list(cache.keys), list(cache.values)

        def apply(i, layer, x, rotations):
            x, keys[i], values[i] = layer(
                x, rotations, keys[i], values[i], cache.length, position, mask
            )
            return x

        output = self._run(tokens, position, taps, apply)
        return cache.replace(keys=tuple(keys), values=tuple(values)), output

    def read(self, cache, tokens, position, mask, taps):
        """The same without writing: returns what the tail would hold."""
        num = tokens.shape[1]
        if mask is None:
            mask = jnp.tril(jnp.ones((num, num), bool))
            mask = jnp.broadcast_to(mask[None], (tokens.shape[0], num, num))
        rows = []

        def apply(i, layer, x, rotations):
            cached = cache.keys[i], cache.values[i]
            shape = (*cached[0].shape[:2], num, cached[0].shape[3])
            empty = jnp.zeros(shape, cached[0].dtype)
            held = Held(
                keys=empty,
                values=empty,
                start=jnp.int32(0),
                position=position,
                mask=mask,
            )
            x, row = layer.read(x, rotations, cached, cache.length, position, held)
            rows.append(row)
            return x

        output = self._run(tokens, position, taps, apply)
        return tuple(rows), output

    def read_all(self, tokens, taps):
        """Whole sequences at once, from nothing; for training."""
        place = places(tokens)

        def apply(_, layer, x, rotations):
            return layer.read_all(x, rotations, place)[0]

        return self._run(tokens, place, taps, apply)

    def _run(self, tokens, position, taps, apply):
        config = self.config
        rotations = [None]
        if not config.learned_positions:
            rotations = [rotation(r, config.head_dim, position) for r in config.ropes]
        x = self.embed(tokens, position)
        kept = {0: x}
        for i, layer in enumerate(self.layers):
            which = config.layer_rope[i] if config.layer_rope else 0
            x = apply(i, layer, x, rotations[which])
            kept[i + 1] = x
        normed = self.norm(x)
        kept[len(self.layers) + 1] = normed
        empty = jnp.zeros((*tokens.shape, 0), jnp.float32)
        return Output(
            logits=self.logits(normed),
            features=jnp.concatenate([empty, *(kept[t] for t in taps)], axis=-1),
            hidden=x,
            normed_hidden=normed,
        )


def places(tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The positions of sequences that begin at 0."""
    steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    return jnp.broadcast_to(steps[None], tokens.shape)


@functools.cache
def _split(config: ModelConfig, dtype: str, out_first: bool):
    """Graph definition and abstract arrays of a decoder; nothing is allocated."""
    module = nnx.eval_shape(
        lambda: Decoder(
            config, dtype=jnp.dtype(dtype), out_first=out_first, rngs=nnx.Rngs(0)
        )
    )
    graph, state = nnx.split(module)
    return graph, state


def prefers_out_first(dtype: str) -> bool:
    """Whether matrices are stored [out, in].

    Measured on CPU: 8 % faster so in bf16, and 50 % slower in float32 beyond one row.
    """
    return jnp.dtype(dtype) == jnp.bfloat16


def abstract_params(config: ModelConfig, dtype: str = "float32") -> Params:
    """Shapes and dtypes of a decoder's arrays, as a nested dict."""
    return nnx.to_pure_dict(_split(config, dtype, prefers_out_first(dtype))[1])


def init_params(config: ModelConfig, key: jax.Array, dtype: str = "float32") -> Params:
    """Random weights, for tests and for training from scratch."""
    module = Decoder(
        config,
        dtype=jnp.dtype(dtype),
        out_first=prefers_out_first(dtype),
        rngs=nnx.Rngs(params=key),
    )
    return nnx.to_pure_dict(nnx.split(module)[1])


class Reader(NamedTuple):
    """A decoder over whole sequences, without a cache; differentiable."""

    read: Callable[[Params, Int[Array, "B T"]], Output]
    """``(params, tokens)``; logits that nobody uses are not computed."""
    normed: Callable[[Params, Float[Array, "B T E"]], Float[Array, "B T E"]]
    """``(params, hidden)``: what the head reads, given the residual stream at the end.
    """


def make_reader(
    config: ModelConfig, *, dtype: str = "float32", taps: tuple[int, ...] = ()
) -> Reader:
    """The decoder for training; arguments as in `make_model`."""
    graph, abstract = _split(config, dtype, prefers_out_first(dtype))

    def merged(params):
        state = jax.tree.map(lambda leaf: leaf, abstract)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)

    def read(params, tokens):
        return merged(params).read_all(tokens, taps)

    def normed(params, hidden):
        norm = Norm(config.hidden_size, eps=config.norm_eps, kind=config.norm)
        norm_graph, norm_state = nnx.split(norm)
        nnx.replace_by_pure_dict(norm_state, params["norm"])
        return nnx.merge(norm_graph, norm_state)(hidden)

    return Reader(read=read, normed=normed)


def make_model(
    config: ModelConfig,
    *,
    dtype: str = "float32",
    taps: tuple[int, ...] = (),
    cache_dtype: str = "float32",
    min_rows: int = 2,
    num_layers: int | None = None,
    is_exact: bool = False,
) -> Model:
    """The decoder as pure functions over a plain tree of arrays.

    Args:
        config: the architecture.
        dtype: of the weights; activations and logits are float32.
        taps: which residual streams `Output.features` concatenates: tap t enters layer
            t, tap N leaves the last layer before the final norm, and tap N + 1 after.
        cache_dtype: of keys and values. float32 is also the faster one on CPU.
        min_rows: a forward of fewer than this many rows (B x T) is padded to it. XLA
            rounds a one-row matmul differently (and on CPU runs it far slower) than one
            of 2 to 7 rows; keeping plain and speculative decoding in one such class
            makes them equal bit for bit.
        num_layers: run only the first this many layers (then norm and head).
        is_exact: sum attention in the order of positions, so that forwards of equally
            many rows (see `min_rows`) give a token of a tree the very bits that plain
            decoding gives it; slower, and without `Model.read`.

    Raises:
        ValueError: a tap that the model does not have.
    """
    total = config.num_layers
    bad = [t for t in taps if not 0 <= t <= total + 1]
    if bad:
        raise ValueError(
            f"taps {bad} are out of range; a model of {total} layers has taps 0 (the "
            f"embedding) to {total} (after the last layer) and {total + 1} (after the "
            "final norm)"
        )
    graph, abstract = _split(config, dtype, prefers_out_first(dtype))
    depth = total if num_layers is None else num_layers

    def init_cache(batch_size, capacity):
        return init_kv_cache(
            batch_size,
            capacity,
            depth,
            config.num_kv_heads,
            config.head_dim,
            jnp.dtype(cache_dtype),
        )

    def prepare(params, tokens, position, mask):
        """The module with its arrays, and the tokens padded to a class of rows."""
        batch, num = tokens.shape
        extra = max(0, -(-min_rows // batch) - num)
        if extra:
            tokens = jnp.pad(tokens, ((0, 0), (0, extra)))
            position = jnp.pad(position, ((0, 0), (0, extra)), mode="edge")
            if mask is not None:
                own = jnp.eye(num + extra, dtype=bool)[None]
                mask = jnp.pad(mask, ((0, 0), (0, extra), (0, extra))) | own
        state = jax.tree.map(lambda leaf: leaf, abstract)
        nnx.replace_by_pure_dict(state, params)
        module = nnx.merge(graph, state)
        if depth != total:
            module.layers = nnx.List(list(module.layers)[:depth])
        for layer in module.layers:
            layer.attention.is_in_order = is_exact
        return module, (tokens, position, mask)

    def forward(params, cache, tokens, position, mask):
        num = tokens.shape[1]
        module, inputs = prepare(params, tokens, position, mask)
        cache, output = module(cache, *inputs, taps)
        return cache, jax.tree.map(lambda x: x[:, :num], output)

    def read(params, cache, tokens, position, mask):
        num = tokens.shape[1]
        module, inputs = prepare(params, tokens, position, mask)
        rows, output = module.read(cache, *inputs, taps)
        rows = jax.tree.map(lambda x: x[:, :, :num], rows)
        return rows, jax.tree.map(lambda x: x[:, :num], output)

    return Model(
        init_cache=init_cache,
        forward=forward,
        read=None if is_exact else read,
        is_exact=is_exact,
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
        num_features=len(taps) * config.hidden_size,
        min_rows=min_rows,
    )
