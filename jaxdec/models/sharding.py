"""Where arrays live on a mesh of devices; the compiler's partitioner does the rest.

Weights are split over the axis ``"model"`` as Megatron-LM does it (arXiv 1909.08053):
the matrices into a layer by their outputs, those out of it by their inputs, embeddings
and head by the vocabulary. Requests, and all state, are split over ``"data"`` by row.
What does not divide is whole on every device. A sharding says where numbers are, never
which: an array that is split in an odd place costs communication, not correctness.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdec.cache import KVCache
from jaxdec.models.config import ModelConfig
from jaxdec.models.decoder import abstract_params, prefers_out_first
from jaxdec.types import Params, Strategy

DATA, MODEL = "data", "model"


def check_mesh(mesh: Mesh) -> Mesh:
    """The mesh, with axes that the partitioner may use as it likes.

    Raises:
        ValueError: an axis of another name than ``"data"`` and ``"model"``.
    """
    if set(mesh.axis_names) - {DATA, MODEL}:
        raise ValueError(
            f"a mesh has the axes {DATA!r} and {MODEL!r}, or one of them, got "
            f"{mesh.axis_names}; make it with jax.make_mesh((2, 2), ('data', 'model'))"
        )
    # jax.make_mesh gives axes for programs that say the sharding of every result.
    return Mesh(mesh.devices, mesh.axis_names)


def _split(mesh: Mesh, name: str, size: int) -> str | None:
    """The axis, where the mesh has it and `size` divides by it."""
    parts = mesh.shape.get(name, 1)
    return name if parts > 1 and size % parts == 0 else None


def _has_split_heads(config: ModelConfig, mesh: Mesh) -> bool:
    """Whether every device has whole heads, of queries and of keys."""
    both = (config.num_heads, config.num_kv_heads)
    return all(_split(mesh, MODEL, num) is not None for num in both)


def param_shardings(config: ModelConfig, dtype: str, mesh: Mesh) -> Params:
    """The sharding of every array of a decoder, as a tree like its params."""
    is_out_first = prefers_out_first(dtype)
    has_split_heads = _has_split_heads(config, mesh)

    def spec(path, leaf) -> PartitionSpec:
        names = [str(entry.key) for entry in path]
        if names[0] in ("embedding", "head"):
            return _along(mesh, leaf.shape, 0)
        if names[0] != "layers" or len(names) < 4:
            return PartitionSpec()
        part, matrix = names[2], names[3]
        if part == "attention" and not has_split_heads:
            return PartitionSpec()
        if names[-1] == "bias":
            is_split = matrix in ("qkv", "up")
            return _along(mesh, leaf.shape, 0) if is_split else PartitionSpec()
        # The experts of a mixture are in front; each is split.
        rows, columns = leaf.ndim - 2, leaf.ndim - 1
        if matrix in ("qkv", "up"):
            return _along(mesh, leaf.shape, rows if is_out_first else columns)
        if matrix in ("out", "down"):
            return _along(mesh, leaf.shape, columns if is_out_first else rows)
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, spec(path, leaf)),
        abstract_params(config, dtype),
    )


def _along(mesh: Mesh, shape: tuple[int, ...], axis: int) -> PartitionSpec:
    axes: list[str | None] = [None] * len(shape)
    axes[axis] = _split(mesh, MODEL, shape[axis])
    return PartitionSpec(*axes)


def row_shardings(tree: Any, mesh: Mesh) -> Any:
    """The sharding of every leaf of a request or a state; all lead with the rows.

    Caches are split by key/value head too.
    """

    def rows(leaf) -> NamedSharding:
        size = leaf.shape[0] if leaf.ndim else 1
        return NamedSharding(mesh, PartitionSpec(_split(mesh, DATA, size)))

    def shard(node):
        if not isinstance(node, KVCache):
            return rows(node)

        def heads(leaf) -> NamedSharding:
            spec = PartitionSpec(
                _split(mesh, DATA, leaf.shape[0]), _split(mesh, MODEL, leaf.shape[1])
            )
            return NamedSharding(mesh, spec)

        return KVCache(
            keys=tuple(map(heads, node.keys)),
            values=tuple(map(heads, node.values)),
            length=rows(node.length),
        )

    return jax.tree.map(shard, tree, is_leaf=lambda node: isinstance(node, KVCache))


def abstract(tree: Any, mesh: Mesh) -> Any:
    """Shapes of a request or a state, with the shardings that they have on a mesh."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        tree,
        row_shardings(tree, mesh),
    )


def on_mesh(strategy: Strategy, mesh: Mesh) -> Strategy:
    """The strategy with its state held in place, from step to step."""

    def held(state):
        return jax.lax.with_sharding_constraint(state, row_shardings(state, mesh))

    def begin(request):
        return held(strategy.begin(request))

    def read(params, state):
        return held(strategy.read(params, state))

    def prefill(params, request):
        return held(strategy.prefill(params, request))

    def step(params, state):
        state, info = strategy.step(params, state)
        return held(state), info

    return strategy._replace(begin=begin, read=read, prefill=prefill, step=step)


def replicated(params: Params, mesh: Mesh) -> Params:
    """Arrays that are not on the mesh yet, whole on every device of it."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    devices = set(np.ravel(mesh.devices))

    def place(leaf):
        is_there = leaf.sharding.device_set == devices
        return leaf if is_there else jax.device_put(leaf, everywhere)

    return jax.tree.map(place, params)
