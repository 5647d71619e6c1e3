"""A model without arrays: shapes in their place, for compiling ahead of time.

It stands where `jaxdec.program.build` wants an `LM`, and its drafters where strategies
want a `LoadedDrafter`. Nothing is allocated, and no file is read.
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdec.loaded_drafter import LoadedDrafter, Tree
from jaxdec.models.block_weights import init_block_params
from jaxdec.models.config import ModelConfig
from jaxdec.models.decoder import abstract_params
from jaxdec.models.eagle import init_eagle_params
from jaxdec.models.mtp import init_mtp_params
from jaxdec.models.sharding import param_shardings
from jaxdec.planning import presets
from jaxdec.rounding import WIDTHS
from jaxdec.strategies import (
    SelfDraftConfig,
    StrategyConfig,
    draft_model,
    resolve,
)
from jaxdec.strategies import lookup as lookup_strategy
from jaxdec.trained import FirstOfConfig, TrainedConfig, first_of, trained
from jaxdec.types import Params

_DRAFTERS = {
    "eagle3": ("eagle", presets.eagle3, init_eagle_params),
    "dflash": ("block", presets.dflash, init_block_params),
    "dspark": ("block", presets.dspark, init_block_params),
    "mtp": ("mtp", presets.mtp, init_mtp_params),
}

STRATEGIES = (
    "greedy",
    "sample",
    "lookup",
    "self_draft",
    "draft_model",
    "mtp",
    "mtp_tree",
    "eagle3",
    "eagle3_tree",
    "dflash",
    "dspark",
    "first_of",
)
"""Names that `strategy_of` knows."""


@dataclasses.dataclass(eq=False, kw_only=True)
class AbstractLM:
    """What building and tracing a strategy asks of a model."""

    config: ModelConfig
    params: Params
    """Shapes, with the shardings that arrays would have."""
    dtype: str
    cache_dtype: str
    name: str
    tokenizer: None = None
    mesh: None = None
    """Where arrays are is written in their shapes."""
    content_hash: str = ""
    row_classes: tuple[tuple[int, ...], ...] = (WIDTHS,)
    """Nothing is padded for rounding's sake: on a device that is not at hand, classes
    are not known."""


def abstract_lm(
    config: ModelConfig, *, name: str, dtype: str, cache_dtype: str, mesh: Mesh
) -> AbstractLM:
    """A model of this configuration, spread over a mesh as `jaxdec.load` would."""
    places = param_shardings(config, dtype, mesh)
    params = jax.tree.map(placed, abstract_params(config, dtype), places)
    return AbstractLM(
        config=config, params=params, dtype=dtype, cache_dtype=cache_dtype, name=name
    )


def placed(leaf: Any, place: NamedSharding) -> jax.ShapeDtypeStruct:
    """The shape of an array that lies so."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def abstract_drafter(kind: str, target: ModelConfig, dtype: str) -> LoadedDrafter:
    """A drafter of published shape for a target."""
    family, make, init = _DRAFTERS[kind]
    config = make(target)
    own = jax.eval_shape(lambda key: init(config, key, dtype), jax.random.key(0))
    return LoadedDrafter(
        family=family,
        config=config,
        own=own,
        name=f"{kind} of published shape",
        format="shapes alone",
        facts={},
        dtype=dtype,
    )


def strategy_of(name: str, lm: AbstractLM, mesh: Mesh) -> StrategyConfig:
    """A strategy by name, its drafter of published shape.

    Raises:
        ValueError: an unknown name, or a draft model that nobody has named.
    """
    kind = name.removesuffix("_tree")
    if kind in _DRAFTERS:
        drafter = abstract_drafter(kind, lm.config, lm.dtype)
        return trained(drafter, tree=Tree() if name.endswith("_tree") else None)
    if name == "first_of":
        part = strategy_of("eagle3", lm, mesh)
        return first_of(lookup_strategy(min_ngram=3), part)
    if name == "draft_model":
        small = presets.DRAFT_MODELS.get(lm.name)
        if small is None:
            raise ValueError(
                f"no draft model is known for {lm.name!r} (only for "
                f"{', '.join(presets.DRAFT_MODELS)}); leave draft_model out"
            )
        options = dict(dtype=lm.dtype, cache_dtype=lm.cache_dtype, mesh=mesh)
        config = presets.TARGETS[small]
        return draft_model(abstract_lm(config, name=small, **options))
    if name not in STRATEGIES:
        raise ValueError(
            f"unknown strategy {name!r}; use some of {', '.join(STRATEGIES)}"
        )
    strategy = resolve(name)
    if isinstance(strategy, SelfDraftConfig):
        num = min(strategy.num_layers, lm.config.num_layers)
        return dataclasses.replace(strategy, num_layers=num)
    return strategy


def least_depth(strategy: StrategyConfig) -> int:
    """The fewest layers of a target that a strategy can do with."""
    if isinstance(strategy, FirstOfConfig):
        return max(map(least_depth, strategy.parts))
    return strategy.num_layers if isinstance(strategy, SelfDraftConfig) else 1


def target_at_depth(config: ModelConfig, depth: int) -> ModelConfig | None:
    """A target with its first layers only; None where layers are not alike."""
    kinds = {*config.layer_windows}, {*config.layer_rope}
    has_parts = config.moe is not None and len(config.moe.layers) != config.num_layers
    if max(map(len, kinds)) > 1 or has_parts:
        return None
    moe = config.moe
    if moe is not None:
        moe = dataclasses.replace(moe, layers=tuple(range(depth)))
    return dataclasses.replace(
        config,
        num_layers=depth,
        layer_windows=config.layer_windows[:depth],
        layer_rope=config.layer_rope[:depth],
        moe=moe,
    )


def strategy_at_depth(strategy: StrategyConfig, depth: int) -> StrategyConfig:
    """The same for a target of fewer layers: taps past the last one are the last."""
    if isinstance(strategy, FirstOfConfig):
        parts = tuple(strategy_at_depth(p, depth) for p in strategy.parts)
        return dataclasses.replace(strategy, parts=parts)
    if not isinstance(strategy, TrainedConfig):
        return strategy
    drafter = strategy.draft
    if drafter.family == "mtp":
        config = dataclasses.replace(drafter.config, num_target_layers=depth)
    else:
        taps = tuple(min(tap, depth) for tap in drafter.config.taps)
        config = dataclasses.replace(drafter.config, taps=taps)
    shallow = dataclasses.replace(drafter, config=config)
    return dataclasses.replace(strategy, draft=shallow)


def on_devices(params: Params, mesh: Mesh) -> Params:
    """Shapes of arrays; those that are not placed yet are whole on every device."""
    everywhere = NamedSharding(mesh, PartitionSpec())

    def place(leaf):
        is_placed = isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None
        return leaf if is_placed else placed(leaf, everywhere)

    return jax.tree.map(place, params)


def model_bytes(params: Params) -> int:
    """Bytes of arrays on one device; what is shared counts once."""
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(params)}
    return sum(device_bytes(leaf) for leaf in leaves.values())


def device_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of the part of an array that one device holds."""
    size = leaf.dtype.itemsize
    for length in leaf.sharding.shard_shape(leaf.shape):
        size *= length
    return size
