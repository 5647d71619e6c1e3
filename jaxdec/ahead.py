"""A strategy's programs over shapes: built, lowered, compiled and counted.

What `jaxdec.program` does with a loaded model is done here with shapes that say where
arrays would be (`jaxdec.abstract_lm`), for devices that need not be at hand.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from jaxdec import decoding, program
from jaxdec.abstract_lm import (
    AbstractLM,
    abstract_lm,
    on_devices,
    strategy_at_depth,
    target_at_depth,
)
from jaxdec.cache import KVCache
from jaxdec.models import sharding
from jaxdec.models.config import ModelConfig
from jaxdec.planning import work
from jaxdec.planning.chips import Topology
from jaxdec.planning.memory import bytes_wanted
from jaxdec.sampling_params import make_sampling_params
from jaxdec.strategies import StrategyConfig
from jaxdec.types import Strategy, StrategyParams

NUM_SLOTS, NUM_STOP_SLOTS, NUM_BIAS_SLOTS = 64, 4, 8
"""Room of the programs for records of steps, stop tokens and biases."""

TARGET, DRAFTER = "target weights", "drafter weights"
KV, OTHER = "KV state", "other state"
"""Labels under which bytes are counted."""


_NOTHING_PENDING = (
    (jax.tree_util.GetAttrKey("num_unread"),),
    (jax.tree_util.GetAttrKey("tail_length"),),
)
"""Counts in a draft model's state that are taken to be 0: a draft was refused."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What all strategies share."""

    lm: AbstractLM
    mesh: Mesh
    topology: Topology
    batch_size: int
    capacity: int
    context: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Built:
    """A strategy's programs and their shapes."""

    strategy: Strategy
    params: StrategyParams
    request: Any
    state: Any
    config: StrategyConfig


def build(setting: Setting, config: StrategyConfig, depth: int = 0) -> Built:
    """A strategy as the library builds it, over shapes.

    Args:
        setting: what all strategies share.
        config: the strategy.
        depth: layers of the target; 0 is all.
    """
    lm = setting.lm
    if depth:
        lm = abstract_lm(
            target_at_depth(lm.config, depth),
            name=lm.name,
            dtype=lm.dtype,
            cache_dtype=lm.cache_dtype,
            mesh=setting.mesh,
        )
        config = strategy_at_depth(config, depth)
    key = program.ProgramKey(
        config=config,
        batch_size=setting.batch_size,
        capacity=setting.capacity,
        num_slots=NUM_SLOTS,
        num_stop_slots=NUM_STOP_SLOTS,
        num_bias_slots=NUM_BIAS_SLOTS,
    )
    strategy, params = program.build(lm, key)
    strategy = sharding.on_mesh(strategy, setting.mesh)
    params = on_devices(params, setting.mesh)
    request = sharding.abstract(program.abstract_request(lm, key), setting.mesh)
    state = jax.eval_shape(strategy.prefill, params, request)
    return Built(
        strategy=strategy,
        params=params,
        request=request,
        state=sharding.abstract(state, setting.mesh),
        config=config,
    )


def lowered(built: Built, platform: str) -> dict[str, Any]:
    """Both programs, ready to compile.

    A drafter holds some of the target's arrays; each array goes in once, as the one
    buffer that it is.
    """
    leaves, tree = jax.tree.flatten(built.params)
    unique = {id(leaf): leaf for leaf in leaves}
    places = {key: i for i, key in enumerate(unique)}
    index = [places[id(leaf)] for leaf in leaves]

    def params_of(arrays):
        return jax.tree.unflatten(tree, [arrays[i] for i in index])

    def prefill(arrays, request):
        return built.strategy.prefill(params_of(arrays), request)

    def step(arrays, state):
        return built.strategy.step(params_of(arrays), state)

    strategy = built.strategy._replace(prefill=prefill, step=step)
    programs = decoding.jit_programs(strategy, NUM_SLOTS)
    arrays = list(unique.values())
    steps = jax.ShapeDtypeStruct((), jnp.int32)
    traced = {
        "prefill": programs.prefill.trace(arrays, built.request),
        "loop": programs.generate.trace(arrays, built.state, steps),
    }
    return {
        name: item.lower(lowering_platforms=(platform,))
        for name, item in traced.items()
    }


def compiled(lowered: Any, platform: str) -> tuple[Any, int | None]:
    """The executable; or None, and the bytes that it wants."""
    options = program.COMPILER_OPTIONS if platform == "cpu" else {}
    try:
        return lowered.compile(options), None
    except Exception as error:
        wanted = bytes_wanted(error)
        if wanted is None:
            raise
        return None, wanted


def step_work(built: Built, setting: Setting, *, as_written: bool = False) -> work.Work:
    """What one step does when `context` tokens of every request are live."""
    headroom, context = built.strategy.headroom, setting.context
    if not 1 < context <= setting.capacity - headroom - 1:
        raise ValueError(
            f"a context of {context} does not fit a capacity of {setting.capacity} of "
            f"which {headroom} slots are kept for drafts; give 2 to "
            f"{setting.capacity - headroom - 1}, or a larger capacity"
        )
    return work.count(
        built.strategy.step,
        (built.params, built.state),
        (_param_operands(built.params), _state_operands(built, setting)),
        as_written=as_written,
        open_trips=_expert_blocks(setting.lm.config, setting.batch_size, built),
    )


def _share(leaf: jax.ShapeDtypeStruct) -> float:
    part = np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=float)
    return float(part / max(np.prod(leaf.shape, dtype=float), 1.0))


def _param_operands(params: StrategyParams) -> StrategyParams:
    def of(label):
        return lambda leaf: work.Operand(label=label, share=_share(leaf))

    return StrategyParams(
        target=jax.tree.map(of(TARGET), params.target),
        drafter=jax.tree.map(of(DRAFTER), params.drafter),
    )


def _state_operands(built: Built, setting: Setting) -> Any:
    """What is known of a state in mid-generation, greedy and without penalties."""
    batch, context = setting.batch_size, setting.context
    known = {
        "length": context,
        "prompt_length": 1,
        "limit": setting.capacity - built.strategy.headroom,
        "finish": 0,
        "max_draft_length": built.config.length,
        "num_stop_tokens": 0,
    }
    sampling = make_sampling_params(batch, num_bias_slots=NUM_BIAS_SLOTS)
    state = built.state

    def other(leaf):
        return work.Operand(label=OTHER, share=_share(leaf))

    def given(leaf, value):
        return work.Operand(value=np.broadcast_to(value, leaf.shape).astype(leaf.dtype))

    def remembered(path, node):
        if isinstance(node, KVCache):
            kv = jax.tree.map(lambda x: work.Operand(label=KV, share=_share(x)), node)
            return kv.replace(length=given(node.length, context - 1))
        return given(node, 0) if path[-1:] in _NOTHING_PENDING else other(node)

    def memory(tree):
        return jax.tree_util.tree_map_with_path(
            remembered, tree, is_leaf=lambda node: isinstance(node, KVCache)
        )

    sequences = jax.tree.map(other, state.sequences).replace(
        sampling=jax.tree.map(
            lambda x, v: given(x, v), state.sequences.sampling, sampling
        ),
        **{name: given(getattr(state.sequences, name), v) for name, v in known.items()},
    )
    return state.replace(
        sequences=sequences,
        cache=memory(state.cache),
        drafter=memory(state.drafter),
    )


def _expert_blocks(config: ModelConfig, batch_size: int, built: Built) -> int:
    """The most experts that a forward over drafts can call on in a layer."""
    if config.moe is None:
        return 1
    rows = batch_size * (built.strategy.max_length + 1)
    return min(config.moe.num_experts, rows * config.moe.num_experts_per_token)


@contextlib.contextmanager
def no_compilation_cache(platform: str) -> Iterator[None]:
    """An executable for a device that is not here could not be read back."""
    if platform == "cpu":
        yield
        return
    was = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", was)
        compilation_cache.reset_cache()
