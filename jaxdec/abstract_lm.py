"""Models and drafters without arrays: shapes in their place, to compile ahead of time.

A shape says where its array would be, as `jaxdec.load(..., mesh=...)` would put it: a
target's arrays are split, a drafter's own are whole on every device. Nothing is
allocated and no file is read; `jaxdec.program.build` takes them as it takes arrays.
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdec.lm import LM
from jaxdec.loaded_drafter import LoadedDrafter, Tree
from jaxdec.models.block_weights import init_block_params
from jaxdec.models.config import ModelConfig
from jaxdec.models.decoder import abstract_params
from jaxdec.models.eagle import init_eagle_params
from jaxdec.models.sharding import param_shardings
from jaxdec.planning import presets
from jaxdec.rounding import WIDTHS
from jaxdec.strategies import SelfDraftConfig, StrategyConfig, resolve
from jaxdec.trained import trained

DTYPE = "bfloat16"
"""Of weights."""

_DRAFTERS = {
    "eagle3": ("eagle", presets.eagle3, init_eagle_params),
    "dflash": ("block", presets.dflash, init_block_params),
    "dspark": ("block", presets.dspark, init_block_params),
}

STRATEGIES = (
    "greedy",
    "lookup",
    "self_draft",
    "eagle3",
    "eagle3_tree",
    "dflash",
    "dspark",
)
"""All that can be planned for."""


def abstract_lm(config: ModelConfig, mesh: Mesh, cache_dtype: str) -> LM:
    """A model of this configuration, in bfloat16, split over a mesh."""
    places = param_shardings(config, DTYPE, mesh)
    lm = LM(
        config=config,
        params=jax.tree.map(_placed, abstract_params(config, DTYPE), places),
        dtype=DTYPE,
        cache_dtype=cache_dtype,
    )
    # How a device that is not here rounds is not known, so nothing is padded for it.
    lm.row_classes = (WIDTHS,)
    return lm


def _abstract_drafter(kind: str, lm: LM, mesh: Mesh) -> LoadedDrafter:
    family, config_of, init = _DRAFTERS[kind]
    config = config_of(lm.config)
    own = jax.eval_shape(lambda key: init(config, key, DTYPE), jax.random.key(0))
    everywhere = NamedSharding(mesh, PartitionSpec())
    return LoadedDrafter(
        family=family,
        config=config,
        own=jax.tree.map(lambda leaf: _placed(leaf, everywhere), own),
        name=kind,
        format="shapes alone",
        facts={},
        dtype=DTYPE,
    )


def strategy_of(name: str, lm: LM, mesh: Mesh) -> StrategyConfig:
    """One of `STRATEGIES`; its drafter, if it has one, of published shape."""
    kind = name.removesuffix("_tree")
    if kind in _DRAFTERS:
        drafter = _abstract_drafter(kind, lm, mesh)
        return trained(drafter, tree=Tree() if name.endswith("_tree") else None)
    strategy = resolve(name)
    if isinstance(strategy, SelfDraftConfig):
        num = min(strategy.num_layers, lm.config.num_layers)
        return dataclasses.replace(strategy, num_layers=num)
    return strategy


def _placed(leaf: Any, place: NamedSharding) -> jax.ShapeDtypeStruct:
    """The shape of an array that lies so."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def device_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of the part of an array that one device holds."""
    size = leaf.dtype.itemsize
    for length in leaf.sharding.shard_shape(leaf.shape):
        size *= length
    return size
