"""A strategy over shapes: built, compiled for devices that are not here, and counted.

The strategy is the one that `jaxdec.program` builds, and the loop the one that it runs;
only arrays are missing (`jaxdec.abstract_lm`).
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from jaxdec import decoding, program
from jaxdec.abstract_lm import abstract_lm, device_bytes, strategy_of
from jaxdec.cache import KVCache
from jaxdec.models import sharding
from jaxdec.models.config import ModelConfig
from jaxdec.planning import work
from jaxdec.planning.chips import Topology
from jaxdec.sampling_params import make_sampling_params
from jaxdec.types import Strategy, StrategyParams

NUM_SLOTS, NUM_STOP_SLOTS, NUM_BIAS_SLOTS = 64, 4, 8
"""Room of the programs for records of steps, stop tokens and biases."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What all strategies share."""

    config: ModelConfig
    topology: Topology
    batch_size: int
    capacity: int
    cache_dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Built:
    """A strategy, and the shapes of its arrays and its state."""

    strategy: Strategy
    params: StrategyParams
    state: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device while the loop runs."""

    weights: int
    """Of target and drafter."""
    state: int
    """Of caches, tokens and all else that passes from step to step."""
    other: int
    """What the compiler adds: temporaries, padding, records of steps, code."""
    is_refused: bool
    """Whether the compiler found no room, and only said what it would take."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.state + self.other


def build(name: str, setting: Setting) -> Built:
    """A strategy as the library builds it, over shapes."""
    mesh = setting.topology.mesh
    lm = abstract_lm(setting.config, mesh, setting.cache_dtype)
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
    state = sharding.abstract(state, mesh)
    return Built(strategy=strategy, params=params, state=state)


def loop_memory(built: Built, setting: Setting) -> Memory:
    """What the compiled decode loop takes.

    A drafter holds some of the target's arrays: each goes in once, as the one buffer
    that it is.
    """
    leaves, tree = jax.tree.flatten(built.params)
    unique = {id(leaf): leaf for leaf in leaves}
    order = list(unique)
    index = [order.index(id(leaf)) for leaf in leaves]
    held = sharding.on_mesh(built.strategy, setting.topology.mesh)

    def step(given, state):
        params = jax.tree.unflatten(tree, [given.target[i] for i in index])
        return held.step(params, state)

    loop = decoding.jit_programs(held._replace(step=step), NUM_SLOTS).generate
    steps = jax.ShapeDtypeStruct((), jnp.int32)
    once = StrategyParams(target=list(unique.values()), drafter=())
    traced = loop.trace(once, built.state, steps)
    total, is_refused = _compiled_bytes(traced.lower(lowering_platforms=("tpu",)))
    weights = sum(map(device_bytes, unique.values()))
    state = sum(map(device_bytes, jax.tree.leaves(built.state)))
    other = max(total - weights - state, 0)
    return Memory(weights=weights, state=state, other=other, is_refused=is_refused)


def _compiled_bytes(lowered: Any) -> tuple[int, bool]:
    """What a program takes, and whether the compiler refused it for that."""
    try:
        with _no_compilation_cache():
            found = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        wanted = re.search(r"required [\w ]*\(([\d.]+)([MG])\) exceeds", str(error))
        if wanted is None:
            raise
        return int(float(wanted[1]) * {"M": 2**20, "G": 2**30}[wanted[2]]), True
    new = found.output_size_in_bytes - found.alias_size_in_bytes
    code = found.generated_code_size_in_bytes
    total = found.argument_size_in_bytes + found.temp_size_in_bytes + new + code
    return total, False


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


def step_work(built: Built, setting: Setting) -> work.Work:
    """What one step does in mid-generation, greedy: half of the capacity is live."""
    room = setting.capacity - built.strategy.headroom
    live = min(setting.capacity // 2, room - 1)
    return work.count(
        built.strategy.step,
        (built.params, built.state),
        (
            jax.tree.map(lambda leaf: _operand(leaf, "weights"), built.params),
            _state_operands(built.state, setting.batch_size, live, room),
        ),
    )


def _operand(leaf: jax.ShapeDtypeStruct, label: str) -> work.Operand:
    whole = max(leaf.size * leaf.dtype.itemsize, 1)
    return work.Operand(label=label, share=device_bytes(leaf) / whole)


def _state_operands(state: Any, batch_size: int, live: int, limit: int) -> Any:
    """What is known of a state of `live` tokens."""

    def given(leaf, value):
        return work.Operand(value=np.broadcast_to(value, leaf.shape).astype(leaf.dtype))

    def part(path, node):
        if isinstance(node, KVCache):
            caches = jax.tree.map(lambda leaf: _operand(leaf, "kv"), node)
            return caches.replace(length=given(node.length, live - 1))
        # Of a draft model: nothing is left from the step before, whose draft failed.
        is_left = getattr(path[-1], "name", "") in ("num_unread", "tail_length")
        return given(node, 0) if is_left else _operand(node, "other")

    known = jax.tree_util.tree_map_with_path(
        part, state, is_leaf=lambda node: isinstance(node, KVCache)
    )
    sequences = state.sequences
    sampling = make_sampling_params(batch_size, num_bias_slots=NUM_BIAS_SLOTS)
    numbers = dict(
        length=live,
        prompt_length=1,
        limit=limit,
        finish=0,
        max_draft_length=limit,
        num_stop_tokens=0,
    )
    fields = {key: given(getattr(sequences, key), v) for key, v in numbers.items()}
    fields["sampling"] = jax.tree.map(given, sequences.sampling, sampling)
    return known.replace(sequences=known.sequences.replace(**fields))
