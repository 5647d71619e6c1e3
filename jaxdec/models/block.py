"""The network of block drafters: masked places filled at once, beside a context.

DFlash (z-lab; arXiv 2602.06036) and DSpark (DeepSeek; arXiv 2607.05147) share it. The
target's features at every token read, fused into one vector c, are a context that the
network attends and never computes anything on: a layer's keys and values of c are pure
functions of feature and position, so they are written once and kept. A pass reads the
anchor and masks,

    position    0 .. s-1        s       s+1     ...   s+B-1
    row         c_0 .. c_{s-1}  anchor  mask    ...   mask
    attended as context         block, both ways (or causally, where a layer says so)

and what a row says of which position is a matter of layout (`BlockConfig`). The rows of
the block stand beside the cache and are forgotten.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxdec.cache import KVCache, init_kv_cache, write_tail
from jaxdec.models.attention import attend_all, attend_beside
from jaxdec.models.block_heads import ConfidenceHead, MarkovHead
from jaxdec.models.config import ModelConfig
from jaxdec.models.decoder import prefers_out_first
from jaxdec.models.layers import Linear, Mlp, Norm, matmul, take_rows
from jaxdec.models.rope import rotate, rotation
from jaxdec.models.vocabulary import vocabulary_params
from jaxdec.types import DrafterParams, Vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """A block drafter with every option resolved. Hashable."""

    layers: ModelConfig
    """Width, heads, norms and rotation of its layers; its `vocab_size` is the target's,
    and its windows are not used (see `windows`)."""
    taps: tuple[int, ...]
    """Which residual streams of the target are the features, in order."""
    block_size: int
    """B: rows of the block, the anchor's among them."""
    sample_from_anchor: bool
    """True: row k says the token after its position, and B tokens are drafted. False
    ("1 + N"): a masked row says the token at its position, and B - 1 are."""
    mask_token: int
    draft_vocab_size: int
    """Tokens it can say; fewer than the target's with a map of ids."""
    own_embedding: bool
    """Whether it brings an embedding; otherwise it reads the target's."""
    own_head: bool
    """Whether it brings an output head; otherwise the target's is used."""
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    """``tanh(logits / cap) * cap``; None is no cap."""
    markov: Literal["none", "vanilla", "gated", "rnn"] = "none"
    markov_rank: int = 0
    confidence: Literal["none", "hidden", "hidden_and_previous"] = "none"
    temperatures: tuple[float, ...] = ()
    """What the log-odds of each draft token's confidence are divided by; empty is 1."""
    windows: tuple[int | None, ...]
    """Per layer, how far back the context is attended; None is all of it."""
    causal: tuple[bool, ...]
    """Per layer, whether a row of the block attends no later row."""
    window_from: Literal["anchor", "row"] = "anchor"
    """"anchor": the W positions before the anchor, for all rows (training mask of
    speculators). "row": the W - 1 positions before each row."""

    @property
    def first(self) -> int:
        """The first row that says a draft token."""
        return 0 if self.sample_from_anchor else 1

    @property
    def max_length(self) -> int:
        """K: draft tokens of a pass."""
        return self.block_size - self.first


class BlockAttention(nnx.Module):
    """Grouped-query attention whose queries and keys are made apart.

    The context needs keys and values only.
    """

    def __init__(self, config: ModelConfig, *, dtype, out_first, rngs):
        heads, groups, width = config.num_heads, config.num_kv_heads, config.head_dim
        self.shape = (heads, groups, width)
        kw = dict(dtype=dtype, out_first=out_first, rngs=rngs)
        size, bias = config.hidden_size, config.qkv_bias
        self.query = Linear(size, heads * width, bias=bias, **kw)
        self.key_value = Linear(size, 2 * groups * width, bias=bias, **kw)
        self.out = Linear(heads * width, size, bias=config.output_bias, **kw)
        self.query_norm = Norm(width, eps=config.norm_eps)
        self.key_norm = Norm(width, eps=config.norm_eps)

    def queries(self, x, cos_sin):
        """``[B, T, H, D]``."""
        heads, _, width = self.shape
        query = self.query(x).reshape(*x.shape[:2], heads, width)
        return rotate(self.query_norm(query), cos_sin)

    def keys_values(self, x, cos_sin):
        """As a cache holds them: ``[B, G, T, D]`` each."""
        _, groups, width = self.shape
        both = self.key_value(x).reshape(*x.shape[:2], 2 * groups, width)
        key, value = both[:, :, :groups], both[:, :, groups:]
        key = rotate(self.key_norm(key), cos_sin)
        # 0 x NaN is NaN: a broken value would reach even rows that may not see it.
        is_finite = jnp.all(jnp.isfinite(value), axis=-1, keepdims=True)
        key = jnp.where(is_finite, key, jnp.nan)
        value = jnp.where(is_finite, value, 0.0)
        return key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)


class BlockLayer(nnx.Module):
    """Pre-norm attention and MLP; how the block attends is handed in."""

    def __init__(self, config: ModelConfig, *, dtype, out_first, rngs):
        kw = dict(dtype=dtype, out_first=out_first, rngs=rngs)
        self.attention = BlockAttention(config, **kw)
        self.mlp = Mlp(config, **kw)
        self.attention_norm = Norm(config.hidden_size, eps=config.norm_eps)
        self.mlp_norm = Norm(config.hidden_size, eps=config.norm_eps)

    def __call__(self, x, cos_sin, attend):
        z = self.attention_norm(x)
        key, value = self.attention.keys_values(z, cos_sin)
        y = attend(self.attention.queries(z, cos_sin), key, value)
        x = x + self.attention.out(y.reshape(*x.shape[:2], -1))
        return x + self.mlp(self.mlp_norm(x))


class BlockNetwork(nnx.Module):
    """All of a block drafter; `shared` is the target's tree of arrays."""

    def __init__(self, config: BlockConfig, *, dtype, out_first, rngs):
        self.config = config
        layers = config.layers
        size, vocab = layers.hidden_size, layers.vocab_size
        kw = dict(dtype=dtype, out_first=out_first, rngs=rngs)
        self.fc = Linear(len(config.taps) * size, size, bias=False, **kw)
        self.hidden_norm = Norm(size, eps=layers.norm_eps)
        self.layers = nnx.List(
            [BlockLayer(layers, **kw) for _ in range(layers.num_layers)]
        )
        self.norm = Norm(size, eps=layers.norm_eps)
        # One assignment each: Flax fixes an attribute as static when it is None first.
        self.embedding = (
            nnx.Param(_table(rngs, vocab, size, dtype))
            if config.own_embedding
            else None
        )
        drafted = config.draft_vocab_size
        head = dict(bias=False, dtype=dtype, out_first=True, rngs=rngs)
        self.head = Linear(size, drafted, **head) if config.own_head else None
        ids = np.arange(drafted) if drafted < vocab else None
        self.vocabulary = None if ids is None else OwnVocabulary(ids, vocab)
        rank = config.markov_rank
        self.markov = (
            None
            if config.markov == "none"
            else MarkovHead(config.markov, rank, size, vocab, drafted, **kw)
        )
        wide = size + (rank if config.confidence == "hidden_and_previous" else 0)
        self.confidence = (
            None if config.confidence == "none" else ConfidenceHead(wide, rngs=rngs)
        )

    def fuse(self, features):
        """What enters the key and value projections of every layer."""
        return self.hidden_norm(self.fc(features))

    def context(self, fused, position):
        """Keys and values of context rows, of every layer."""
        cos_sin = self._rotation(position)
        return [layer.attention.keys_values(fused, cos_sin) for layer in self.layers]

    def embed(self, shared, tokens):
        """Rows of the embedding, scaled where the target's are."""
        own = self.embedding
        table = shared["embedding"] if own is None else own[...]
        x = take_rows(table, tokens)
        if self.config.embedding_scale != 1.0:
            # The published models round the scale to the weights' dtype.
            scale = jnp.asarray(self.config.embedding_scale, table.dtype)
            x = x * scale.astype(jnp.float32)
        return x

    def fill(self, shared, anchor, position, attend):
        """One pass over blocks, ``[B, N]`` of them, as rows ``[B, N * block, E]``.

        `attend` is called with the number of each layer, queries, keys and values.
        """
        size = self.config.block_size
        batch, num = anchor.shape
        masks = jnp.full((batch, num, size - 1), self.config.mask_token, jnp.int32)
        tokens = jnp.concatenate([anchor[:, :, None], masks], axis=2)
        x = self.embed(shared, tokens.reshape(batch, num * size))
        cos_sin = self._rotation(position)
        for i, layer in enumerate(self.layers):
            x = layer(x, cos_sin, functools.partial(attend, i))
        return self.norm(x)

    def logits(self, shared, hidden):
        """Over the drafter's own vocabulary, before any bias."""
        if self.head is not None:
            logits = self.head(hidden)
        else:
            head = shared.get("head")
            weight = shared["embedding"] if head is None else head["weight"]
            logits = matmul(hidden, weight, out_first=True)
        cap = self.config.logit_softcap
        return logits if cap is None else jnp.tanh(logits / cap) * cap

    def confidence_inputs(self, hidden, previous):
        """What the confidence head reads, given the tokens before each place."""
        if self.config.confidence == "hidden_and_previous":
            hidden = jnp.concatenate([hidden, self.markov.row(previous)], axis=-1)
        return hidden

    def confidence_logits(self, hidden, previous):
        """Log-odds of acceptance."""
        return self.confidence(self.confidence_inputs(hidden, previous))

    def _rotation(self, position):
        layers = self.config.layers
        return rotation(layers.ropes[0], layers.head_dim, position)


class OwnVocabulary(nnx.Module):
    """Which of the target's tokens a drafter can say; nothing to train."""

    def __init__(self, target_ids, vocab_size):
        arrays = vocabulary_params(target_ids, vocab_size)
        self.target_ids = nnx.Variable(arrays["target_ids"])
        self.draft_index = nnx.Variable(arrays["draft_index"])


def _table(rngs, rows, width, dtype):
    table = jax.random.normal(rngs.params(), (rows, width), jnp.float32)
    return (table * width**-0.5).astype(dtype)


class BlockNet(NamedTuple):
    """A block drafter as pure functions over ``DrafterParams``.

    E is the width of the network, V' the size of its own vocabulary.
    """

    config: BlockConfig
    init_cache: Callable[[int, int], KVCache]
    """``(batch_size, capacity) -> KVCache`` of the context."""
    fuse: Callable[[DrafterParams, Float[Array, "B T F"]], Float[Array, "B T E"]]
    write: Callable[..., KVCache]
    """``(params, cache, fused[B,T,E])``: context rows at the cache's tail; its length
    is unchanged."""
    read: Callable[[DrafterParams, KVCache, Int[Array, "B"]], Float[Array, "B n E"]]
    """``(params, cache, anchor)``: the rows of a block behind the live context."""
    read_all: Callable[..., Float[Array, "B N n E"]]
    """``(params, features[B,T,F], position[B,N], anchor[B,N])``: the blocks of anchors
    that stand anywhere in sequences; for training."""
    logits: Callable[[DrafterParams, Float[Array, "..."]], Float[Array, "..."]]
    """``(params, hidden[..., E]) -> [..., V']``, before the Markov bias."""
    vocabulary: Callable[[DrafterParams], Vocabulary | None]
    """Which tokens the logits are of; None is all of the target's."""
    markov: Callable[[DrafterParams], MarkovHead | None]
    """The head with its arrays in place."""
    confidence_inputs: Callable[..., Float[Array, "B K n"]]
    """``(params, hidden[B,K,E], previous[B,K])``: what the confidence head reads."""
    confidence: Callable[..., Float[Array, "B K"]]
    """Of the same: log-odds."""


@functools.cache
def split_block_network(config: BlockConfig, dtype: str) -> tuple[Any, Any]:
    """Graph definition and abstract arrays; nothing is allocated."""
    module = nnx.eval_shape(
        lambda: BlockNetwork(
            config,
            dtype=jnp.dtype(dtype),
            out_first=prefers_out_first(dtype),
            rngs=nnx.Rngs(0),
        )
    )
    return nnx.split(module)


def make_block_net(
    config: BlockConfig, *, dtype: str = "float32", cache_dtype: str = "float32"
) -> BlockNet:
    """The network as pure functions over a plain tree of arrays."""
    graph, abstract = split_block_network(config, dtype)
    layers = config.layers

    def merged(params: DrafterParams) -> BlockNetwork:
        state = jax.tree.map(lambda leaf: leaf, abstract)
        nnx.replace_by_pure_dict(state, params.own)
        return nnx.merge(graph, state)

    def init_cache(batch_size, capacity):
        return init_kv_cache(
            batch_size,
            capacity,
            layers.num_layers,
            layers.num_kv_heads,
            layers.head_dim,
            jnp.dtype(cache_dtype),
        )

    def write(params, cache, fused):
        steps = jnp.arange(fused.shape[1], dtype=jnp.int32)
        rows = merged(params).context(fused, cache.length[:, None] + steps[None])

        def put(caches, which):
            pairs = zip(caches, rows, strict=True)
            return tuple(write_tail(c, row[which], cache.length) for c, row in pairs)

        return cache.replace(keys=put(cache.keys, 0), values=put(cache.values, 1))

    def read(params, cache, anchor):
        batch = anchor.shape[0]
        steps = jnp.arange(config.block_size, dtype=jnp.int32)
        position = cache.length[:, None] + steps[None]

        def attend(i, query, key, value):
            start, window = _reach(config, i, cache.length[:, None], position)
            mask = jnp.asarray(_among(config, i))[None]
            return attend_beside(
                query,
                cache.keys[i],
                cache.values[i],
                cache.length,
                start,
                key,
                value,
                position,
                jnp.broadcast_to(mask, (batch, *mask.shape[1:])),
                scale=layers.head_dim**-0.5,
                window=window,
            )

        return merged(params).fill(params.shared, anchor[:, None], position, attend)

    def read_all(params, features, position, anchor):
        network = merged(params)
        batch, num = anchor.shape
        size, total = config.block_size, features.shape[1]
        steps = jnp.arange(size, dtype=jnp.int32)
        rows = (position[:, :, None] + steps[None, None]).reshape(batch, num * size)
        begin = jnp.repeat(position, size, axis=1)
        slot = jnp.broadcast_to(jnp.arange(total, dtype=jnp.int32), (batch, total))
        context = network.context(network.fuse(features), slot)
        kind = network.fc.weight.dtype

        def attend(i, query, key, value):
            start, window = _reach(config, i, begin, rows)
            seen = slot[:, None, :] < begin[:, :, None]
            if window is not None:
                seen = seen & (start[:, :, None] - slot[:, None, :] < window)
            own = np.kron(np.eye(num, dtype=bool), _among(config, i))
            own = jnp.broadcast_to(jnp.asarray(own), (batch, *own.shape))
            return attend_all(
                query,
                jnp.concatenate([context[i][0], key], axis=2).astype(kind),
                jnp.concatenate([context[i][1], value], axis=2).astype(kind),
                jnp.concatenate([seen, own], axis=2),
                scale=layers.head_dim**-0.5,
            )

        hidden = network.fill(params.shared, anchor, rows, attend)
        return hidden.reshape(batch, num, size, -1)

    def vocabulary(params):
        own = params.own.get("vocabulary")
        return None if own is None else Vocabulary(**own)

    return BlockNet(
        config=config,
        init_cache=init_cache,
        fuse=lambda params, features: merged(params).fuse(features),
        write=write,
        read=read,
        read_all=read_all,
        logits=lambda params, hidden: merged(params).logits(params.shared, hidden),
        vocabulary=vocabulary,
        markov=lambda params: merged(params).markov,
        confidence_inputs=lambda params, *rows: merged(params).confidence_inputs(*rows),
        confidence=lambda params, *rows: merged(params).confidence_logits(*rows),
    )


def _reach(config: BlockConfig, layer: int, anchor, position):
    """Where a window is counted from, and how many positions it holds."""
    window = config.windows[layer]
    if window is None or config.window_from == "row":
        return position, window
    # The W positions before the anchor, and the anchor.
    return jnp.broadcast_to(anchor, position.shape), window + 1


def _among(config: BlockConfig, layer: int) -> np.ndarray:
    """Which rows of a block each row attends."""
    ahead = np.subtract.outer(*[np.arange(config.block_size)] * 2)  # row - other
    mask = ahead >= 0 if config.causal[layer] else np.ones_like(ahead, bool)
    window = config.windows[layer]
    if window is not None and config.window_from == "row":
        mask = mask & (np.abs(ahead) < window)
    return mask
