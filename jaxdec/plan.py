"""Does it fit, and what does a step cost: from a configuration alone.

    from jaxdec.plan import plan
    plan("qwen3-8b", ["greedy", "eagle3"], topology="v5e:2x2")

Needs no weights and no accelerator. The whole decode loop of every strategy, built as
the library builds it, is compiled ahead of time for the devices of a topology, with
arrays split over them as `jaxdec.load(..., mesh=...)` splits them; the compiler says
what it takes of memory. FLOPs and bytes of one step are counted by walking the traced
step (`jaxdec.planning.work`), which knows how often each loop turns.

The time of a step is a floor: bytes over bandwidth, or FLOPs over peak if that takes
longer. What devices say to one another, and every wait, comes on top, for plain
decoding too. So the ratio of two floors, the *break-even*, is worth more than either:
a strategy pays where it commits more tokens a step than that.
"""

import contextlib
import dataclasses
import json
import re
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
    device_bytes,
    strategy_of,
)
from jaxdec.cache import KVCache
from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.hf_config import config_from_hf
from jaxdec.models import sharding
from jaxdec.models.config import ModelConfig
from jaxdec.models.decoder import abstract_params
from jaxdec.planning import presets, work
from jaxdec.planning.chips import Topology, find_topology
from jaxdec.sampling_params import make_sampling_params
from jaxdec.types import Strategy, StrategyParams

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
    other: int
    """What the compiler adds: temporaries, records of steps, code."""
    is_refused: bool = False
    """Whether the compiler found no room, and only said what it would take."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.state + self.other


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyPlan:
    """One strategy; all numbers are of one device, and of one step of all requests."""

    strategy: str
    draft_length: int
    """K; of a tree, its nodes."""
    max_tokens_per_step: int
    memory: Memory
    fits: bool
    flops: float
    bytes_by_label: Mapping[str, float]
    num_open_loops: int
    """Loops that were left out because their end depends on data."""
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
    plain_ms, _ = _floor(step_work(build("greedy", setting), setting), setting)
    plans = []
    with _no_compilation_cache():
        for i, strategy in enumerate(strategies):
            if progress is not None:
                progress(i, len(strategies), f"{strategy}: compiling")
            plans.append(_plan_one(strategy, setting, plain_ms))
    return Plan(settings=_settings(name, setting), strategies=tuple(plans))


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


def build(name: str, setting: Setting) -> Built:
    """A strategy as the library builds it, over shapes."""
    mesh = setting.topology.mesh
    dtypes = dict(dtype=setting.dtype, cache_dtype=setting.cache_dtype)
    lm = abstract_lm(setting.config, mesh, **dtypes)
    key = program.ProgramKey(
        config=strategy_of(name, lm, mesh),
        batch_size=setting.batch_size,
        capacity=setting.capacity,
        num_slots=NUM_SLOTS,
        num_stop_slots=NUM_STOP_SLOTS,
        num_bias_slots=NUM_BIAS_SLOTS,
    )
    strategy, params = program.build(lm, key)
    request = program.abstract_request(lm, key)
    state = jax.eval_shape(strategy.prefill, params, request)
    return Built(strategy=strategy, params=params, state=sharding.abstract(state, mesh))


def _plan_one(name: str, setting: Setting, plain_ms: float) -> StrategyPlan:
    built, device = build(name, setting), setting.topology.device
    step = step_work(built, setting)
    step_ms, bound_by = _floor(step, setting)
    started = time.perf_counter()
    memory = loop_memory(built, setting)
    _, info = jax.eval_shape(built.strategy.step, built.params, built.state)
    return StrategyPlan(
        strategy=name,
        draft_length=built.strategy.max_length,
        max_tokens_per_step=info.path.shape[1],
        memory=memory,
        fits=not memory.is_refused and memory.total <= device.memory_bytes,
        flops=step.flops,
        bytes_by_label=step.bytes_by_label,
        num_open_loops=step.num_open_loops,
        step_ms=step_ms,
        bound_by=bound_by,
        break_even=step_ms / plain_ms,
        compile_s=time.perf_counter() - started,
    )


def loop_memory(built: Built, setting: Setting) -> Memory:
    """What the compiled decode loop takes.

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
    is_refused = False
    try:
        found = lowered.compile().memory_analysis()
        total = found.argument_size_in_bytes + found.temp_size_in_bytes
        total += found.output_size_in_bytes - found.alias_size_in_bytes
        total += found.generated_code_size_in_bytes
    except jax.errors.JaxRuntimeError as error:
        wanted = re.search(r"required [\w ]*\(([\d.]+)([MG])\) exceeds", str(error))
        if wanted is None:
            raise
        is_refused = True
        total = int(float(wanted[1]) * {"M": 2**20, "G": 2**30}[wanted[2]])
    weights = sum(map(device_bytes, unique.values()))
    state = sum(map(device_bytes, jax.tree.leaves(built.state)))
    return Memory(
        weights=weights,
        state=state,
        other=max(total - weights - state, 0),
        is_refused=is_refused,
    )


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
    part = device_bytes(leaf) / max(leaf.size * leaf.dtype.itemsize, 1)
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
        is_left = getattr(path[-1], "name", "") in ("num_unread", "tail_length")
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


def _floor(step: work.Work, setting: Setting) -> tuple[float, str]:
    """Milliseconds that a step takes at best, and of what."""
    device = setting.topology.device
    memory = 1e3 * step.num_bytes / device.bytes_per_s
    compute = 1e3 * step.flops / device.flops_per_s
    return (memory, "memory") if memory >= compute else (compute, "compute")


def _settings(name: str, setting: Setting) -> dict[str, Any]:
    device, mesh = setting.topology.device, setting.topology.mesh
    params = abstract_params(setting.config, setting.dtype)
    return {
        "model": name,
        "num_params": sum(x.size for x in jax.tree.leaves(params)),
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
