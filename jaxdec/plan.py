"""Does it fit, and what does a step cost: from a configuration alone.

    from jaxdec.plan import plan
    plan("qwen3-8b", ["greedy", "eagle3"], topology="v5e:2x2")

Needs no weights and no accelerator. The whole decode loop of every strategy, built as
the library builds it, is compiled ahead of time for the devices of a topology, with
arrays split over them as `jaxdec.load(..., mesh=...)` splits them; the compiler says
what it takes of memory. FLOPs and bytes of one step are counted by walking the traced
step (`jaxdec.planning.work`), which knows how often each loop turns.

Compiling tens of layers takes minutes, and layers are alike. So two small depths are
compiled and a line through them is drawn to the model's own; `full=True` compiles all.

The time of a step is a floor: bytes over bandwidth, or FLOPs over peak if that takes
longer. What devices say to one another, and every wait, comes on top, for plain
decoding too. So the ratio of two floors, the *break-even*, is worth more than either:
a strategy pays where it commits more tokens a step than that.
"""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from jaxdec import decoding, program
from jaxdec.abstract_lm import (
    STRATEGIES,
    abstract_lm,
    check_strategy,
    shallow,
    strategy_of,
)
from jaxdec.cache import KVCache
from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.hf_config import config_from_hf
from jaxdec.lm import LM
from jaxdec.models import sharding
from jaxdec.models.config import ModelConfig
from jaxdec.planning import presets, work
from jaxdec.planning.chips import Topology, find_topology
from jaxdec.sampling_params import make_sampling_params
from jaxdec.types import Strategy, StrategyParams

DEPTHS = (6, 8)
"""Layers that are compiled; enough for `self_draft`, whose drafter is six of them."""
NUM_SLOTS, NUM_STOP_SLOTS, NUM_BIAS_SLOTS = 64, 4, 8
"""Room of the programs for records of steps, stop tokens and biases."""

WEIGHTS, KV, OTHER = "weights", "kv", "other"
"""Labels under which bytes are counted."""

Progress = Callable[[int, int, str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device while the loop runs."""

    weights: int
    """Of target and drafter."""
    state: int
    """Of caches, tokens and all else that passes from step to step."""
    temporary: int
    """Results, records of steps, and code."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.state + self.temporary


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyPlan:
    """One strategy; all numbers are of one device, and of one step of all requests."""

    strategy: str
    draft_length: int
    """K; of a tree, its nodes."""
    max_tokens_per_step: int
    memory: Memory | None
    """None where the compiler refused, even with few layers."""
    fits: bool
    flops: float
    bytes_by_label: Mapping[str, float]
    num_open_loops: int
    """Loops that were counted once because their end depends on data."""
    step_ms: float
    """What bytes or FLOPs take at best."""
    bound_by: str
    """"memory" or "compute"."""
    break_even: float
    """Tokens a step at which it is as fast as plain decoding."""
    compile_s: float

    @property
    def num_bytes(self) -> float:
        """Read and written in a step."""
        return sum(self.bytes_by_label.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        found = dataclasses.asdict(self) | {"num_bytes": self.num_bytes}
        if self.memory is not None:
            found["memory"]["total"] = self.memory.total
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Every strategy on one topology."""

    settings: Mapping[str, Any]
    strategies: tuple[StrategyPlan, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        strategies = [item.to_dict() for item in self.strategies]
        return {"settings": dict(self.settings), "strategies": strategies}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What all strategies share."""

    config: ModelConfig
    topology: Topology
    batch_size: int
    capacity: int
    dtype: str
    cache_dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Built:
    """A strategy, and the shapes of its arrays and its state."""

    strategy: Strategy
    params: StrategyParams
    state: Any


def plan(
    model: str | Path | ModelConfig = "qwen3-8b",
    strategies: Sequence[str] = STRATEGIES,
    *,
    topology: str | Topology = "v5e:2x2",
    batch_size: int = 1,
    capacity: int = 4096,
    dtype: str = "bfloat16",
    cache_dtype: str = "float32",
    full: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """Compiles strategies ahead of time, and counts what a step of each costs.

    Args:
        model: a name (`jaxdec.planning.presets.TARGETS`), a ``config.json`` or the
            folder of one, or a configuration.
        strategies: names (`jaxdec.abstract_lm.STRATEGIES`); drafters are of published
            shape.
        topology: of a TPU, such as ``"v5e:2x2"``, ``"v6e:1x1"``, ``"v5p:2x2x1"``.
        batch_size: requests at once.
        capacity: slots of the caches, for prompt and output; in the step that is
            counted half of them are live.
        dtype: of the weights.
        cache_dtype: of keys and values; the default is that of `jaxdec.load`.
        full: compile all layers.
        progress: told ``(done, total, what)``.

    Raises:
        ValueError: something that does not exist or fit together, or no compiler for
            the topology.
        jaxdec.io.checkpoint.CheckpointError: the configuration cannot be read.
    """
    name, config = _target(model)
    _check(strategies, batch_size, dtype, cache_dtype)
    setting = Setting(
        config=config,
        topology=find_topology(topology) if isinstance(topology, str) else topology,
        batch_size=batch_size,
        capacity=capacity,
        dtype=dtype,
        cache_dtype=cache_dtype,
    )
    depths = DEPTHS if config.num_layers > DEPTHS[1] and not full else ()
    plain_ms, _ = _floor(step_work(build("greedy", setting), setting), setting)
    plans = []
    with _no_compilation_cache():
        for i, strategy in enumerate(strategies):
            if progress is not None:
                progress(i, len(strategies), f"{strategy}: compiling")
            plans.append(_plan_one(strategy, setting, plain_ms, depths))
    settings = _settings(name, setting, depths or (config.num_layers,))
    return Plan(settings=settings, strategies=tuple(plans))


def _check(strategies, batch_size, dtype, cache_dtype) -> None:
    if not strategies:
        raise ValueError("no strategy to plan for; give a name such as 'greedy'")
    for strategy in strategies:
        check_strategy(strategy)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    for name, value in (("dtype", dtype), ("cache_dtype", cache_dtype)):
        if value not in ("float32", "bfloat16"):
            raise ValueError(f"{name} must be 'float32' or 'bfloat16', got {value!r}")


def _target(model: str | Path | ModelConfig) -> tuple[str, ModelConfig]:
    """A name for a model, and its configuration."""
    if isinstance(model, ModelConfig):
        name, config = model.family, model
    elif str(model) in presets.TARGETS:
        name, config = str(model), presets.TARGETS[str(model)]
    else:
        name, config = str(model), _read_config(Path(model).expanduser())
    if config.moe is not None:
        raise ValueError(
            f"{name} is a mixture of experts, and which of them a step reads depends "
            "on its tokens; plan for a dense model"
        )
    return name, config


def _read_config(path: Path) -> ModelConfig:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(
            f"no model {str(path)!r} to plan for; give a config.json, the folder of "
            f"one, or one of {', '.join(presets.TARGETS)}"
        )
    try:
        values = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(f"{file} is no JSON: {error}; fetch it again") from None
    return config_from_hf(values)


def build(name: str, setting: Setting, depth: int | None = None) -> Built:
    """A strategy as the library builds it, over shapes.

    Args:
        name: of the strategy.
        setting: what all strategies share.
        depth: the first so many layers of the target; None is all.
    """
    mesh, config = setting.topology.mesh, setting.config
    config = config if depth is None else shallow(config, depth)
    dtypes = dict(dtype=setting.dtype, cache_dtype=setting.cache_dtype)
    lm = abstract_lm(config, mesh, **dtypes)
    strategy, params, request = _program(strategy_of(name, lm, mesh), lm, setting)
    state = jax.eval_shape(strategy.prefill, params, request)
    return Built(
        strategy=strategy, params=params, state=sharding.abstract(state, mesh)
    )


def _program(config: Any, lm: LM, setting: Setting) -> tuple[Any, Any, Any]:
    key = program.ProgramKey(
        config=config,
        batch_size=setting.batch_size,
        capacity=setting.capacity,
        num_slots=NUM_SLOTS,
        num_stop_slots=NUM_STOP_SLOTS,
        num_bias_slots=NUM_BIAS_SLOTS,
    )
    return *program.build(lm, key), program.abstract_request(lm, key)


def _plan_one(
    name: str, setting: Setting, plain_ms: float, depths: tuple[int, ...]
) -> StrategyPlan:
    whole, device = build(name, setting), setting.topology.device
    step = step_work(whole, setting)
    started = time.perf_counter()
    shapes = [build(name, setting, depth) for depth in depths] or [whole]
    found = [loop_memory(built, setting) for built in shapes]
    compile_s = time.perf_counter() - started
    memory = found[0]
    if None in found:
        memory = None
    elif depths:
        memory = at_depth(*found, depths, setting.config.num_layers)
    step_ms, bound_by = _floor(step, setting)
    max_depth = jax.eval_shape(whole.strategy.step, whole.params, whole.state)[1].path
    return StrategyPlan(
        strategy=name,
        draft_length=whole.strategy.max_length,
        max_tokens_per_step=max_depth.shape[1],
        memory=memory,
        fits=memory is not None and memory.total <= device.memory_bytes,
        flops=step.flops,
        bytes_by_label=step.bytes_by_label,
        num_open_loops=step.num_open_loops,
        step_ms=step_ms,
        bound_by=bound_by,
        break_even=step_ms / plain_ms,
        compile_s=compile_s,
    )


def loop_memory(built: Built, setting: Setting) -> Memory | None:
    """What the compiled decode loop takes; None where the compiler refuses.

    A drafter holds some of the target's arrays: each goes in once, as the one buffer
    that it is.
    """
    leaves, tree = jax.tree.flatten(built.params)
    unique = {id(leaf): leaf for leaf in leaves}
    places = {key: i for i, key in enumerate(unique)}
    index = [places[id(leaf)] for leaf in leaves]
    held = sharding.on_mesh(built.strategy, setting.topology.mesh)

    def step(arrays, state):
        return held.step(jax.tree.unflatten(tree, [arrays[i] for i in index]), state)

    loop = decoding.jit_programs(held._replace(step=step), NUM_SLOTS).generate
    steps = jax.ShapeDtypeStruct((), jnp.int32)
    lowered = loop.trace(list(unique.values()), built.state, steps).lower(
        lowering_platforms=("tpu",)
    )
    try:
        found = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "Ran out of memory" in str(error):
            return None
        raise
    new = found.output_size_in_bytes - found.alias_size_in_bytes
    weights = sum(_device_bytes(leaf) for leaf in unique.values())
    return Memory(
        weights=weights,
        state=found.argument_size_in_bytes - weights,
        temporary=found.temp_size_in_bytes + new + found.generated_code_size_in_bytes,
    )


def at_depth(
    first: Memory, second: Memory, depths: tuple[int, int], depth: int
) -> Memory:
    """The line through two depths, at a third.

    >>> two = Memory(weights=30, state=4, temporary=1)
    >>> four = Memory(weights=50, state=8, temporary=1)
    >>> at_depth(two, four, (2, 4), 36)
    Memory(weights=370, state=72, temporary=1)
    """
    turns = (depth - depths[1]) / (depths[1] - depths[0])
    low, high = dataclasses.asdict(first), dataclasses.asdict(second)
    return Memory(**{k: round(high[k] + (high[k] - low[k]) * turns) for k in low})


def step_work(built: Built, setting: Setting) -> work.Work:
    """What one step does in mid-generation, greedy: half of the capacity is live."""
    live, room = setting.capacity // 2, setting.capacity - built.strategy.headroom
    return work.count(
        built.strategy.step,
        (built.params, built.state),
        (
            jax.tree.map(lambda x: _operand(x, WEIGHTS), built.params),
            _state_operands(built.state, setting.batch_size, min(live, room - 1), room),
        ),
    )


def _operand(leaf: jax.ShapeDtypeStruct, label: str) -> work.Operand:
    part = _device_bytes(leaf) / max(leaf.size * leaf.dtype.itemsize, 1)
    return work.Operand(label=label, share=part)


def _state_operands(state: Any, batch_size: int, live: int, limit: int) -> Any:
    """What is known of a state of `live` tokens."""

    def given(leaf, value):
        return work.Operand(value=np.broadcast_to(value, leaf.shape).astype(leaf.dtype))

    def part(path, node):
        if isinstance(node, KVCache):
            caches = jax.tree.map(lambda leaf: _operand(leaf, KV), node)
            return caches.replace(length=given(node.length, live - 1))
        # Of a draft model: nothing is left from the step before, whose draft failed.
        is_left = path[-1:] in _LEFT
        return given(node, 0) if is_left else _operand(node, OTHER)

    tree_map = jax.tree_util.tree_map_with_path
    known = tree_map(part, state, is_leaf=lambda node: isinstance(node, KVCache))
    sequences = state.sequences
    sampling = make_sampling_params(batch_size, num_bias_slots=NUM_BIAS_SLOTS)
    values = dict(
        length=live,
        prompt_length=1,
        limit=limit,
        finish=0,
        max_draft_length=limit,
        num_stop_tokens=0,
    )
    fields = {key: given(getattr(sequences, key), v) for key, v in values.items()}
    asked = jax.tree.map(given, sequences.sampling, sampling)
    return known.replace(sequences=known.sequences.replace(sampling=asked, **fields))


_LEFT = tuple(
    (jax.tree_util.GetAttrKey(name),) for name in ("num_unread", "tail_length")
)


def _device_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of the part of an array that one device holds."""
    shape = leaf.sharding.shard_shape(leaf.shape)
    return int(np.prod(shape, dtype=np.int64)) * leaf.dtype.itemsize


def _floor(step: work.Work, setting: Setting) -> tuple[float, str]:
    """Milliseconds that a step takes at best, and of what."""
    device = setting.topology.device
    memory = 1e3 * step.num_bytes / device.bytes_per_s
    compute = 1e3 * step.flops / device.flops_per_s
    return (memory, "memory") if memory >= compute else (compute, "compute")


def _settings(name: str, setting: Setting, depths: Sequence[int]) -> dict[str, Any]:
    device = setting.topology.device
    mesh = setting.topology.mesh
    lm = abstract_lm(setting.config, mesh, dtype=setting.dtype, cache_dtype="float32")
    return {
        "model": name,
        "num_layers": setting.config.num_layers,
        "compiled_layers": list(depths),
        "num_params": lm.num_params,
        "dtype": setting.dtype,
        "cache_dtype": setting.cache_dtype,
        "topology": setting.topology.name,
        "num_devices": mesh.size,
        "device": dataclasses.asdict(device),
        "batch_size": setting.batch_size,
        "capacity": setting.capacity,
        "jax": jax.__version__,
    }


@contextlib.contextmanager
def _no_compilation_cache() -> Iterator[None]:
    """An executable for a device that is not here could not be read back."""
    was = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", was)
        compilation_cache.reset_cache()
