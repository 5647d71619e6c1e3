"""Multi-token prediction (MTP): modules that a model was trained with, to look ahead.

A module pairs what the target felt at token i with the token that followed it, and says
what comes after that one. Module 0, at row i::

    z_i = P [ norm_e(E(x_{i+1})) ; norm_h(h_i) ]      h: the target's hidden state
    u_i = block(z_i)                                  over the module's own rows 0 .. i
    y_i = norm_f(u_i),  logits_i = W y_i              says x_{i+2}

and module k, at the same row, pairs the output of module k - 1 with ``x_{i+1+k}`` and
says ``x_{i+2+k}``. E and W are the target's unless the checkpoint brings others; the
norms, P and the block are the module's own.

Which hidden state goes in, before or after the target's final norm, and which output
goes on (u or y), cannot be seen in the shapes. A wrong choice still drafts fluently,
and only fewer drafts are accepted. So both are fields of the configuration.

References: DeepSeek-V3 (arXiv 2412.19437), Gloeckle et al. (2404.19737), MiMo
(2505.07608), FastMTP (2509.18362).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxdec.cache import KVCache, init_kv_cache
from jaxdec.models.config import ModelConfig
from jaxdec.models.decoder import prefers_out_first
from jaxdec.models.layers import Block, Held, Linear, Norm, matmul, take_rows
from jaxdec.models.rope import rotation
from jaxdec.models.vocabulary import offsets_of, target_ids_of, vocabulary_params
from jaxdec.models.weights import (
    TensorReader,
    TensorWriter,
    block_params,
    block_shapes,
)
from jaxdec.types import DrafterParams, Params, Vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class MtpConfig:
    """The modules of one target, every variant resolved."""

    block: ModelConfig
    """Widths, vocabulary and switches; layer k is the block of module k."""
    num_target_layers: int
    hidden_source: Literal["pre", "post"]
    """Whether module 0 reads the target before or after the target's final norm."""
    recycle: Literal["pre", "post"]
    """Whether rows pass on u (before the module's final norm) or y (after)."""
    own_embedding: bool = False
    """Tokens are looked up in a table of the drafter's own, not the target's."""
    own_head: bool = False
    draft_vocab_size: int | None = None
    """Of the tokens that it can say; None is all. Its head then has a row for each."""

    @property
    def is_reduced(self) -> bool:
        """Whether it says some of the target's tokens only."""
        return self.draft_vocab_size not in (None, self.block.vocab_size)

    @property
    def head_size(self) -> int:
        """Rows of its head."""
        return self.draft_vocab_size if self.is_reduced else self.block.vocab_size

    @property
    def num_native_modules(self) -> int:
        """How many modules there are."""
        return self.block.num_layers

    @property
    def taps(self) -> tuple[int, ...]:
        """What the target must return; see `jaxdec.models.decoder.make_model`."""
        return (self.num_target_layers + (self.hidden_source == "post"),)


class MtpModule(nnx.Module):
    """One module, without embedding and head."""

    def __init__(self, config: MtpConfig, index: int, *, dtype, out_first, rngs):
        width = config.block.hidden_size
        kw = dict(dtype=dtype, out_first=out_first, rngs=rngs)

        def norm():
            return Norm(width, eps=config.block.norm_eps)

        self.embed_norm, self.hidden_norm = norm(), norm()
        self.project = Linear(2 * width, width, bias=False, **kw)
        self.block = Block(config.block, index, **kw)
        self.final_norm = norm()

    def combine(self, embedded, hidden):
        """What enters the block."""
        parts = [self.embed_norm(embedded), self.hidden_norm(hidden)]
        return self.project(jnp.concatenate(parts, axis=-1))


class Mtp(nnx.Module):
    """All modules, and the embedding and head that are not the target's."""

    def __init__(self, config: MtpConfig, *, dtype, out_first, rngs):
        kw = dict(dtype=dtype, out_first=out_first, rngs=rngs)
        block = config.block
        self.modules = nnx.List(
            [MtpModule(config, i, **kw) for i in range(config.num_native_modules)]
        )

        def table(num_rows):
            shape = (num_rows, block.hidden_size)
            values = jax.random.normal(rngs.params(), shape, jnp.float32)
            return nnx.Param((values * shape[1] ** -0.5).astype(dtype))

        self.embedding = table(block.vocab_size) if config.own_embedding else None
        self.head = table(config.head_size) if config.own_head else None


class MtpNetwork(NamedTuple):
    """The modules as pure functions over ``DrafterParams``; `shared` is the target's.

    What passes from row to row and from module to module is u or y, as `recycle` says;
    it is called `carried`, and the target's hidden state comes in its place at first.
    Row i of every module stands at position i. The cache has one layer per module and
    one length, s; module k holds live rows ``0 .. s - k - 1``, for its rows need tokens
    up to ``x_{i+1+k}``, and x_s is the last one known.
    """

    config: MtpConfig
    init_cache: Callable[[int, int], KVCache]
    """``(batch_size, capacity)``."""
    init_held: Callable[[int, int], tuple[Array, Array]]
    """``(batch_size, num_rows)``: keys and values beside the cache, of one module."""
    combine: Callable[..., Float[Array, "B T E"]]
    """``(params, module, hidden[B,T,E], tokens[B,T])``: what enters the block."""
    write: Callable[..., tuple[KVCache, Float[Array, "B T E"]]]
    """``(params, module, cache, hidden, tokens)``: causal rows after the module's live
    ones; the length is unchanged. Returns what is carried on."""
    read: Callable[..., tuple[tuple[Array, Array], Float[Array, "B T E"]]]
    """``(params, module, cache, held, start, hidden, tokens, position, held_position,
    mask)``: rows ``start ..`` of `held`, which attend the module's live rows and those
    held rows that ``mask[B, T, R]`` allows."""
    read_all: Callable[..., tuple[tuple, Float[Array, "B T E"]]]
    """``(params, module, hidden, tokens, position, place[B,T], earlier)``: one pass for
    training; `earlier` are the rows that earlier passes of the module returned, the
    first of which read whole sequences. Returns this pass's, and what is carried on.
    """
    forward: Callable[..., Float[Array, "B T E"]]
    """``(params, module, hidden, tokens)``: rows 0 .. T - 1 without a cache, causal.
    Returns what is carried on."""
    normed: Callable[..., Float[Array, "B T E"]]
    """``(params, module, carried)``: y, which the head reads."""
    head: Callable[..., Float[Array, "B T W"]]
    """``(params, normed)``: logits, of the tokens that it can say."""
    vocabulary: Callable[[DrafterParams], Vocabulary] | None
    """What the W tokens are; None where they are all of the target's."""

    def logits(self, params, module, carried) -> Float[Array, "B T W"]:
        """What a module says, given what it carries on."""
        return self.head(params, self.normed(params, module, carried))


@functools.cache
def _split(config: MtpConfig, dtype: str):
    """Graph definition and abstract arrays; nothing is allocated."""
    module = nnx.eval_shape(
        lambda: Mtp(
            config,
            dtype=jnp.dtype(dtype),
            out_first=prefers_out_first(dtype),
            rngs=nnx.Rngs(0),
        )
    )
    return nnx.split(module)


def abstract_mtp_params(config: MtpConfig, dtype: str = "float32") -> Params:
    """Shapes and dtypes of the arrays, as a nested dict."""
    return nnx.to_pure_dict(_split(config, dtype)[1])


def init_mtp_params(
    config: MtpConfig, key: jax.Array, dtype: str = "float32"
) -> Params:
    """Random weights, for tests and for training from scratch.

    A smaller vocabulary is that of the first tokens; see `vocabulary_params`.
    """
    module = Mtp(
        config,
        dtype=jnp.dtype(dtype),
        out_first=prefers_out_first(dtype),
        rngs=nnx.Rngs(params=key),
    )
    own = nnx.to_pure_dict(nnx.split(module)[1])
    if config.is_reduced:
        size = config.block.vocab_size
        own["vocabulary"] = vocabulary_params(np.arange(config.head_size), size)
    return own


def expected_mtp_tensors(config: MtpConfig) -> dict[str, tuple[int, ...]]:
    """The canonical name and shape of every tensor, matrices as ``[out, in]``."""
    width, vocab_size = config.block.hidden_size, config.block.vocab_size
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(config.num_native_modules):
        prefix = f"modules.{i}"
        for norm in ("embed_norm", "hidden_norm", "final_norm"):
            shapes[f"{prefix}.{norm}.weight"] = (width,)
        shapes[f"{prefix}.project.weight"] = (width, 2 * width)
        shapes |= block_shapes(config.block, i, f"{prefix}.block")
    if config.own_embedding:
        shapes["embedding.weight"] = (vocab_size, width)
    if config.own_head:
        shapes["head.weight"] = (config.head_size, width)
    if config.is_reduced:
        shapes["d2t"] = (config.head_size,)
    return shapes


def mtp_params_from_tensors(
    config: MtpConfig, tensors: Mapping[str, np.ndarray], dtype: str = "float32"
) -> Params:
    """The arrays, on the default device.

    Args:
        config: the modules; the tensors must fit `expected_mtp_tensors`.
        tensors: by canonical name; gains of norms as they multiply, the columns of a
            projection those of the embedding first.
        dtype: of matrices; norms and biases stay float32.
    """
    read = TensorReader(tensors, dtype)
    modules = {}
    for i in range(config.num_native_modules):
        prefix = f"modules.{i}"
        modules[i] = {
            "embed_norm": read.norm(f"{prefix}.embed_norm"),
            "hidden_norm": read.norm(f"{prefix}.hidden_norm"),
            "project": read.linear(f"{prefix}.project"),
            "block": block_params(config.block, i, f"{prefix}.block", read),
            "final_norm": read.norm(f"{prefix}.final_norm"),
        }
    params: dict = {"modules": modules}
    if config.own_embedding:
        params["embedding"] = read.array("embedding.weight")
    if config.own_head:
        params["head"] = read.array("head.weight")
    if config.is_reduced:
        ids = target_ids_of(tensors["d2t"])
        params["vocabulary"] = vocabulary_params(ids, config.block.vocab_size)
    return params


def mtp_tensors_from_params(
    config: MtpConfig, params: Params, dtype: str
) -> dict[str, np.ndarray]:
    """The inverse of `mtp_params_from_tensors`; `dtype` is that of the arrays."""
    writer = TensorWriter(dtype)
    for i, module in params["modules"].items():
        prefix = f"modules.{i}"
        for norm in ("embed_norm", "hidden_norm", "final_norm"):
            writer.norm(f"{prefix}.{norm}", module[norm])
        rows = {f"{prefix}.project": config.block.hidden_size}
        writer.linear(module["project"], rows)
        writer.block(config.block, f"{prefix}.block", module["block"])
    for part in ("embedding", "head"):
        if part in params:
            writer.array(f"{part}.weight", params[part])
    if config.is_reduced:
        writer.array("d2t", offsets_of(np.asarray(params["vocabulary"]["target_ids"])))
    return writer.tensors


def make_mtp(
    config: MtpConfig, *, dtype: str = "float32", cache_dtype: str = "float32"
) -> MtpNetwork:
    """The modules as pure functions over a plain tree of arrays.

    Args:
        config: the modules.
        dtype: of their weights; activations and logits are float32.
        cache_dtype: of keys and values.
    """
    graph, abstract = _split(config, dtype)
    block = config.block
    heads, width = block.num_kv_heads, block.head_dim

    def merged(params: DrafterParams) -> Mtp:
        state = jax.tree.map(lambda leaf: leaf, abstract)
        arrays = {k: v for k, v in params.own.items() if k != "vocabulary"}
        nnx.replace_by_pure_dict(state, arrays)
        return nnx.merge(graph, state)

    def rotations(index, position):
        which = block.layer_rope[index] if block.layer_rope else 0
        return rotation(block.ropes[which], block.head_dim, position)

    def embed(params: DrafterParams, tokens):
        table = params.own if config.own_embedding else params.shared
        table = table["embedding"]
        x = take_rows(table, tokens)
        if block.embedding_scale == 1.0:
            return x
        scale = jnp.asarray(block.embedding_scale, table.dtype)
        return x * scale.astype(jnp.float32)

    def head_table(params: DrafterParams):
        if config.own_head:
            return params.own["head"]
        head = params.shared.get("head")
        return params.shared["embedding"] if head is None else head["weight"]

    def carried(module: MtpModule, x):
        return module.final_norm(x) if config.recycle == "post" else x

    def live(cache, index):
        return jnp.maximum(cache.length - index, 0)

    def init_cache(batch_size, capacity):
        return init_kv_cache(
            batch_size,
            capacity,
            config.num_native_modules,
            heads,
            width,
            jnp.dtype(cache_dtype),
        )

    def init_held(batch_size, num_rows):
        empty = jnp.zeros((batch_size, heads, num_rows, width), jnp.float32)
        return empty, empty

    def combine(params, index, hidden, tokens):
        module = merged(params).modules[index]
        return module.combine(embed(params, tokens), hidden)

    def write(params, index, cache, hidden, tokens):
        module = merged(params).modules[index]
        length = live(cache, index)
        position = length[:, None] + _steps(tokens)
        keys, values = list(cache.keys), list(cache.values)
        x, keys[index], values[index] = module.block(
            module.combine(embed(params, tokens), hidden),
            rotations(index, position),
            keys[index],
            values[index],
            length,
            position,
            None,
        )
        cache = cache.replace(keys=tuple(keys), values=tuple(values))
        return cache, carried(module, x)

    def read(
        params, index, cache, held, start, hidden, tokens, position, held_position, mask
    ):
        module = merged(params).modules[index]
        x, held = module.block.read(
            module.combine(embed(params, tokens), hidden),
            rotations(index, position),
            (cache.keys[index], cache.values[index]),
            live(cache, index),
            position,
            Held(
                keys=held[0],
                values=held[1],
                start=start,
                position=held_position,
                mask=mask,
            ),
        )
        return held, carried(module, x)

    def read_all(params, index, hidden, tokens, position, place, earlier=()):
        module = merged(params).modules[index]
        x, rows = module.block.read_all(
            module.combine(embed(params, tokens), hidden),
            rotations(index, position),
            place,
            earlier,
        )
        return rows, carried(module, x)

    def forward(params, index, hidden, tokens):
        batch, num = tokens.shape
        position = jnp.broadcast_to(_steps(tokens), (batch, num))
        mask = jnp.broadcast_to(jnp.tri(num, dtype=bool)[None], (batch, num, num))
        return read(
            params,
            index,
            init_cache(batch, 1),
            init_held(batch, num),
            jnp.int32(0),
            hidden,
            tokens,
            position,
            position,
            mask,
        )[1]

    def normed(params, index, x):
        if config.recycle == "post":
            return x
        return merged(params).modules[index].final_norm(x)

    def head(params, y):
        logits = matmul(y, head_table(params), out_first=True)
        cap = block.logit_softcap
        return logits if cap is None else jnp.tanh(logits / cap) * cap

    def vocabulary(params):
        return Vocabulary(**params.own["vocabulary"])

    return MtpNetwork(
        config=config,
        init_cache=init_cache,
        init_held=init_held,
        combine=combine,
        write=write,
        read=read,
        read_all=read_all,
        forward=forward,
        normed=normed,
        head=head,
        vocabulary=vocabulary if config.is_reduced else None,
    )


def _steps(tokens: Int[Array, "B T"]) -> Int[Array, "1 T"]:
    return jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
