"""Does it fit, and what does a step cost: from a configuration alone.

    from jaxdec.plan import plan
    plan("qwen3-8b", ["greedy", "eagle3"], topology="v5e:2x2")

Needs no weights and no accelerator. The whole decode loop of every strategy is compiled
ahead of time for the devices of a topology, with arrays split over them as
`jaxdec.load(..., mesh=...)` splits them; the compiler says what it takes of memory.
FLOPs and bytes of one step are counted by walking the traced step, which knows how
often each loop turns (`jaxdec.planning.work`).

The time of a step is a floor: bytes over bandwidth, or FLOPs over peak if that takes
longer. What devices say to one another, and every wait, comes on top, for plain
decoding too. So the ratio of two floors, the *break-even*, is worth more than either:
a strategy pays where it commits more tokens a step than that.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxdec.abstract_lm import DTYPE, STRATEGIES
from jaxdec.ahead import Memory, Setting, build, loop_memory, step_work
from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.hf_config import config_from_hf
from jaxdec.models.config import ModelConfig
from jaxdec.models.decoder import abstract_params
from jaxdec.planning import presets, work
from jaxdec.planning.chips import Topology, find_topology

Progress = Callable[[int, int, str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyPlan:
    """One strategy; all numbers are of one device, and of one step of all requests."""

    strategy: str
    draft_length: int
    """K; of a tree, its nodes."""
    memory: Memory
    fits: bool
    flops: float
    bytes_by_label: Mapping[str, float]
    """Of weights, caches (kv), and other state."""
    num_open_loops: int
    """Loops that were left out because their end depends on data."""
    step_ms: float
    """What bytes or FLOPs take at best."""
    break_even: float
    """Tokens a step at which it is as fast as plain decoding."""

    @property
    def num_bytes(self) -> float:
        """Read and written in a step."""
        return float(sum(self.bytes_by_label.values()))

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


def plan(
    model: str | Path | ModelConfig = "qwen3-8b",
    strategies: Sequence[str] = STRATEGIES,
    *,
    topology: str | Topology = "v5e:2x2",
    batch_size: int = 1,
    capacity: int = 4096,
    cache_dtype: str = "float32",
    progress: Progress | None = None,
) -> Plan:
    """Compiles strategies ahead of time, and counts what a step of each costs.

    Args:
        model: a name (`jaxdec.planning.presets.TARGETS`), a ``config.json`` or the
            folder of one, or a configuration. Weights are bfloat16.
        strategies: names (`jaxdec.abstract_lm.STRATEGIES`); drafters are of published
            shape.
        topology: of a TPU, such as ``"v5e:2x2"``, ``"v6e:1x1"``, ``"v5p:2x2x1"``.
        batch_size: requests at once.
        capacity: slots of the caches, for prompt and output; in the step that is
            counted half of them are live.
        cache_dtype: of keys and values; the default is that of `jaxdec.load`.
        progress: told ``(done, total, what)``.

    Raises:
        ValueError: something that does not exist or fit together, or no compiler for
            the topology.
        jaxdec.io.checkpoint.CheckpointError: the configuration cannot be read.
    """
    if isinstance(strategies, str):
        strategies = [name.strip() for name in strategies.split(",")]
    unknown = [name for name in strategies if name not in STRATEGIES]
    if unknown or not strategies:
        raise ValueError(
            f"cannot plan for strategies {', '.join(unknown) or 'of no name'}; give "
            f"some of {', '.join(STRATEGIES)}"
        )
    for what, value in (("batch_size", batch_size), ("capacity", capacity)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"{what} must be a whole number of at least 1, got {value!r}"
            )
    if cache_dtype not in ("float32", "bfloat16"):
        raise ValueError(
            f"cache_dtype must be float32 or bfloat16, got {cache_dtype!r}; give one"
        )
    config = _config_of(model)
    setting = Setting(
        config=config,
        topology=find_topology(topology) if isinstance(topology, str) else topology,
        batch_size=batch_size,
        capacity=capacity,
        cache_dtype=cache_dtype,
    )
    plain = _floor_ms(step_work(build("greedy", setting), setting), setting)
    plans = []
    for i, strategy in enumerate(strategies):
        if progress is not None:
            progress(i, len(strategies), f"{strategy}: compiling")
        plans.append(_plan_one(strategy, setting, plain))
    name = config.family if isinstance(model, ModelConfig) else str(model)
    return Plan(settings=_settings(name, setting), strategies=tuple(plans))


def _config_of(model: str | Path | ModelConfig) -> ModelConfig:
    if isinstance(model, ModelConfig):
        config = model
    elif str(model) in presets.TARGETS:
        config = presets.TARGETS[str(model)]
    else:
        config = _read_config(Path(model).expanduser())
    if config.moe is not None:
        raise ValueError(
            f"{config.family} is a mixture of experts, and which of them a step reads "
            "depends on its tokens; plan for a dense model"
        )
    return config


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


def _plan_one(name: str, setting: Setting, plain_ms: float) -> StrategyPlan:
    built, room = build(name, setting), setting.topology.device.memory_bytes
    step = step_work(built, setting)
    memory = loop_memory(built, setting)
    floor_ms = _floor_ms(step, setting)
    return StrategyPlan(
        strategy=name,
        draft_length=built.strategy.max_length,
        memory=memory,
        fits=memory.total <= room and not memory.is_refused,
        flops=step.flops,
        bytes_by_label=step.bytes_by_label,
        num_open_loops=step.num_open_loops,
        step_ms=floor_ms,
        break_even=floor_ms / plain_ms,
    )


def _floor_ms(step: work.Work, setting: Setting) -> float:
    device = setting.topology.device
    seconds = step.num_bytes / device.bytes_per_s, step.flops / device.flops_per_s
    return 1e3 * max(seconds)


def _settings(name: str, setting: Setting) -> dict[str, Any]:
    params = jax.tree.leaves(abstract_params(setting.config, DTYPE))
    return {
        "model": name,
        "num_params": sum(leaf.size for leaf in params),
        "dtype": DTYPE,
        "cache_dtype": setting.cache_dtype,
        "topology": setting.topology.name,
        "num_devices": setting.topology.mesh.size,
        "device": dataclasses.asdict(setting.topology.device),
        "batch_size": setting.batch_size,
        "capacity": setting.capacity,
        "jax": jax.__version__,
    }
