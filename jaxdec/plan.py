"""Does it fit, and what does a step cost: from a configuration alone.

    plan = jaxdec.plan("qwen3-8b", ["greedy", "eagle3"], topology="v5e:2x2")

Needs no weights and no accelerator. Every strategy's two programs, prefill and the
whole decode loop, are compiled ahead of time for the devices of a topology, with arrays
split over them as `jaxdec.load(..., mesh=...)` splits them; the compiler says what they
take of memory. FLOPs and bytes of one step are counted by walking the traced program
with lengths given, loop bodies times their trips (`jaxdec.planning.work`), at full
depth. XLA's own count of FLOPs, which has each body once, is compared with the same
walk counted that way (`StrategyPlan.flops_against_xla`).

The time of a step is a floor: bytes over bandwidth, or FLOPs over peak if that takes
longer. What devices say to one another, and every wait, comes on top, for plain
decoding too. So the ratio of two floors, the *break-even tokens per step*, is worth
more than either: a strategy pays if it commits more tokens a step than that.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxdec.abstract_lm import (
    abstract_lm,
    least_depth,
    model_bytes,
    strategy_of,
    target_at_depth,
)
from jaxdec.ahead import (
    Setting,
    build,
    compiled,
    lowered,
    no_compilation_cache,
    step_work,
)
from jaxdec.io.cache import open_checkpoint
from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.hf_config import config_from_hf
from jaxdec.models.config import ModelConfig
from jaxdec.planning import presets, work
from jaxdec.planning.chips import find_topology
from jaxdec.planning.memory import ProgramMemory, at_depth, memory_of
from jaxdec.strategies import StrategyConfig, greedy

DEFAULT_STRATEGIES = (
    "greedy",
    "lookup",
    "self_draft",
    "eagle3",
    "eagle3_tree",
    "dflash",
    "dspark",
)
SPACING = 2
"""Layers between the two depths that memory is extrapolated from."""

Progress = Callable[[int, int, str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyPlan:
    """One strategy; all numbers are of one device, and of one step of all requests."""

    strategy: str
    draft_length: int
    max_tokens_per_step: int
    weight_bytes: int
    """Of target and drafter."""
    state_bytes: int
    """Of KV state, tokens and all that passes from step to step."""
    memory: Mapping[str, ProgramMemory | None]
    """Of ``prefill`` and ``loop``; None where the compiler refused."""
    peak_bytes: int
    """The larger of the two, and the other's code."""
    fits: bool
    flops: float
    matmul_flops: float
    bytes_by_label: Mapping[str, float]
    memory_ms: float
    """What reading and writing the bytes takes at best."""
    compute_ms: float | None
    """What the FLOPs take at best."""
    break_even_tokens_per_step: float
    """Tokens per step at which it is as fast as plain decoding."""
    tokens_per_step: float
    """What `tokens_per_second` is told for."""
    tokens_per_second: float
    """Of all requests, at best."""
    flops_against_xla: float | None
    """The walk's FLOPs over XLA's, each body once; None where nothing was compiled."""
    num_open_loops: int
    compiled_layers: tuple[int, ...]
    compile_s: float

    @property
    def num_bytes(self) -> float:
        """Read and written in a step."""
        return sum(self.bytes_by_label.values())

    @property
    def step_ms(self) -> float:
        """The floor."""
        return max(self.memory_ms, self.compute_ms or 0.0)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "memory"
        }
        return values | {
            "bytes_by_label": dict(self.bytes_by_label),
            "compiled_layers": list(self.compiled_layers),
            "num_bytes": self.num_bytes,
            "step_ms": self.step_ms,
            "bound_by": "memory" if self.step_ms == self.memory_ms else "compute",
            "memory": {
                name: None if found is None else found.to_dict()
                for name, found in self.memory.items()
            },
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Every strategy on one topology."""

    settings: Mapping[str, Any]
    strategies: tuple[StrategyPlan, ...]
    notes: tuple[str, ...]

    def __getitem__(self, strategy: str) -> StrategyPlan:
        return {s.strategy: s for s in self.strategies}[strategy]

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "settings": dict(self.settings),
            "strategies": [s.to_dict() for s in self.strategies],
            "notes": list(self.notes),
        }


def plan(
    model: str | Path | ModelConfig = "qwen3-8b",
    strategies: Sequence[str | StrategyConfig] = DEFAULT_STRATEGIES,
    *,
    topology: str = "v5e:2x2",
    batch_size: int = 1,
    capacity: int = 4096,
    context: int | None = None,
    dtype: str = "bfloat16",
    cache_dtype: str = "float32",
    tokens_per_step: float = 3.0,
    data: int = 1,
    full: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """Compiles strategies ahead of time, and counts what a step of each costs.

    Args:
        model: a name (`jaxdec.planning.presets.TARGETS`), a ``config.json`` or the
            folder of one, a GGUF file, or a configuration.
        strategies: names (`jaxdec.abstract_lm.STRATEGIES`; drafters are of published
            shape) or configurations. Plain decoding is always counted.
        topology: of a TPU, such as ``"v5e:2x2"``, ``"v6e:1x1"``, ``"v5p:2x2x1"``; or
            ``"cpu"`` for this machine.
        batch_size: requests at once.
        capacity: slots of the caches, for prompt and output.
        context: tokens that are live when the step is counted; None is half of the
            capacity.
        dtype: of the weights.
        cache_dtype: of keys and values; the default is that of `jaxdec.load`.
        tokens_per_step: committed a step, for which tokens per second are told (plain
            decoding has 1, and no strategy more than it can commit).
        data: groups that share the requests; the devices of each share the weights.
        full: compile all layers; else two small depths, and a line through them.
        progress: told ``(done, total, what)``.

    Raises:
        ValueError: something that does not exist or fit together, or no compiler for
            the topology.
        jaxdec.io.checkpoint.CheckpointError: the configuration cannot be read.
    """
    _check(batch_size, capacity, tokens_per_step, dtype, cache_dtype)
    name, config = _target(model)
    found = find_topology(topology)
    mesh = found.mesh(data)
    lm = abstract_lm(config, name=name, dtype=dtype, cache_dtype=cache_dtype, mesh=mesh)
    chosen = [
        s if isinstance(s, StrategyConfig) else strategy_of(s, lm, mesh)
        for s in strategies
    ]
    if not chosen:
        raise ValueError("no strategy to plan for; give a name such as 'greedy'")
    setting = Setting(
        lm=lm,
        mesh=mesh,
        topology=found,
        batch_size=batch_size,
        capacity=capacity,
        context=capacity // 2 if context is None else context,
    )
    tell = progress or (lambda done, total, text: None)
    plain = step_work(build(setting, greedy()), setting)
    plans = []
    with no_compilation_cache(found.platform):
        for i, strategy in enumerate(chosen):
            tell(i, len(chosen), f"{strategy.name}: compiling for {topology}")
            plans.append(_plan_one(strategy, setting, plain, tokens_per_step, full))
    return Plan(
        settings=_settings(setting, data),
        strategies=tuple(plans),
        notes=_notes(plans, setting),
    )


def _check(batch_size, capacity, tokens_per_step, dtype, cache_dtype) -> None:
    for name, value in (("batch_size", batch_size), ("capacity", capacity)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"{name} must be a whole number of at least 1, got {value!r}"
            )
    if not tokens_per_step >= 1:
        raise ValueError(
            f"a step commits at least one token, got tokens_per_step={tokens_per_step}"
        )
    for name, value in (("dtype", dtype), ("cache_dtype", cache_dtype)):
        if value not in ("float32", "bfloat16"):
            raise ValueError(f"{name} must be 'float32' or 'bfloat16', got {value!r}")


def _target(model: str | Path | ModelConfig) -> tuple[str, ModelConfig]:
    """A name for a model, and its configuration."""
    if isinstance(model, ModelConfig):
        return model.family, model
    if str(model) in presets.TARGETS:
        return str(model), presets.TARGETS[str(model)]
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return path.stem, open_checkpoint(path).config
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file() or file.suffix != ".json":
        raise CheckpointError(
            f"no model {str(model)!r} to plan for; give a config.json, the folder of "
            f"one, a .gguf file, or one of {', '.join(presets.TARGETS)}"
        )
    try:
        values = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(f"{file} is no JSON: {error}; fetch it again") from None
    return str(model), config_from_hf(values)


def _plan_one(
    config: StrategyConfig,
    setting: Setting,
    plain: work.Work,
    tokens_per_step: float,
    full: bool,
) -> StrategyPlan:
    started = time.perf_counter()
    whole = build(setting, config)
    step = step_work(whole, setting)
    depths = _depths(config, setting.lm.config, full)
    memory, wanted, against = _memory(config, setting, depths)
    device = setting.topology.device
    peak = max(
        wanted or 0,
        *(m.total for m in memory.values() if m is not None),
        0,
    )
    if all(memory.values()):
        # Both executables are loaded while one of them runs.
        peak = max(
            memory["prefill"].total + memory["loop"].code,
            memory["loop"].total + memory["prefill"].code,
        )
    depth = whole.strategy.max_length
    if config.length and getattr(config, "tree", None) is not None:
        depth = config.tree.depth
    most = depth + 1
    tokens = min(tokens_per_step, most)
    times = _times(step, device)
    floor, plain_floor = max(times), max(_times(plain, device))
    return StrategyPlan(
        strategy=config.name,
        draft_length=config.length,
        max_tokens_per_step=most,
        weight_bytes=model_bytes(whole.params),
        state_bytes=model_bytes(whole.state),
        memory=memory,
        peak_bytes=peak,
        fits=peak <= device.memory_bytes,
        flops=step.flops,
        matmul_flops=step.matmul_flops,
        bytes_by_label=step.bytes_by_label,
        memory_ms=1e3 * times[0],
        compute_ms=1e3 * times[1] if device.flops_per_s else None,
        break_even_tokens_per_step=floor / plain_floor,
        tokens_per_step=tokens,
        tokens_per_second=setting.batch_size * tokens / floor,
        flops_against_xla=against,
        num_open_loops=step.num_open_loops,
        compiled_layers=depths,
        compile_s=time.perf_counter() - started,
    )


def _times(step: work.Work, device: Any) -> tuple[float, float]:
    """Seconds for the bytes and for the FLOPs, at best."""
    compute = step.flops / device.flops_per_s if device.flops_per_s else 0.0
    return step.num_bytes / device.bytes_per_s, compute


def _depths(config: StrategyConfig, target: ModelConfig, full: bool) -> tuple[int, ...]:
    """How many layers of the target to compile: all, or two numbers of them."""
    first = max(SPACING, least_depth(config))
    is_small = first + SPACING >= target.num_layers
    if full or is_small or target_at_depth(target, first) is None:
        return (target.num_layers,)
    return (first, first + SPACING)


def _memory(
    config: StrategyConfig, setting: Setting, depths: tuple[int, ...]
) -> tuple[dict[str, ProgramMemory | None], int | None, float | None]:
    """Memory of both programs; what the compiler said it wants; FLOPs against XLA's."""
    depth = setting.lm.config.num_layers
    found: dict[str, list[ProgramMemory | None]] = {"prefill": [], "loop": []}
    wanted, against = None, None
    for layers in depths:
        built = build(setting, config, 0 if layers == depth else layers)
        for name, item in lowered(built, setting.topology.platform).items():
            executable, needs = compiled(item, setting.topology.platform)
            wanted = max(wanted or 0, needs or 0) or None
            found[name].append(None if executable is None else memory_of(executable))
            if name == "loop" and executable is not None:
                ours = step_work(built, setting, as_written=True)
                against = ours.flops / executable.cost_analysis()["flops"]
    if len(depths) == 1:
        return {name: items[0] for name, items in found.items()}, wanted, against
    return (
        {
            name: None if None in items else at_depth(*items, depths, depth)
            for name, items in found.items()
        },
        wanted,
        against,
    )


def _settings(setting: Setting, data: int) -> dict[str, Any]:
    lm, device = setting.lm, setting.topology.device
    return {
        "model": lm.name,
        "family": lm.config.family,
        "num_layers": lm.config.num_layers,
        "num_params": sum(x.size for x in jax.tree.leaves(lm.params)),
        "dtype": lm.dtype,
        "cache_dtype": lm.cache_dtype,
        "topology": setting.topology.name,
        "platform": setting.topology.platform,
        "num_devices": len(setting.topology.devices),
        "data": data,
        "device": device.kind,
        "device_memory_bytes": device.memory_bytes,
        "device_bytes_per_s": device.bytes_per_s,
        "device_flops_per_s": device.flops_per_s,
        "batch_size": setting.batch_size,
        "capacity": setting.capacity,
        "context": setting.context,
        "jax": jax.__version__,
    }


def _notes(plans: Sequence[StrategyPlan], setting: Setting) -> tuple[str, ...]:
    notes = []
    depth = setting.lm.config.num_layers
    if any(p.compiled_layers != (depth,) for p in plans):
        layers = sorted({n for p in plans for n in p.compiled_layers})
        notes.append(
            f"memory is a line through {', '.join(map(str, layers))} layers, drawn to "
            f"{depth} (--full compiles them all); FLOPs and bytes are of all {depth}"
        )
    if any(None in p.memory.values() for p in plans):
        notes.append(
            "the compiler refused what does not fit; peak is what it asked for"
        )
    if any(p.num_open_loops for p in plans) and setting.lm.config.moe is not None:
        notes.append("every token of a draft is taken to call on experts of its own")
    notes.append(
        "times are floors, without communication between devices; break-even is the "
        "ratio of two of them"
    )
    return tuple(notes)
