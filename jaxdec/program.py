"""Compiled programs of one strategy on one model, at one shape.

A program is two executables, prefill and the whole loop, compiled ahead of time, so
that compiling is counted and timed apart from running, and can never happen unnoticed
in the middle of a measurement. What is a value (sampling parameters, stop tokens,
seeds, limits, the number of steps) is an argument; a shape or code is in the key.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdec import batching, decoding, draft_length, rounding
from jaxdec.models import sharding
from jaxdec.models.decoder import make_model
from jaxdec.sampling import make_sampling_params
from jaxdec.strategies import StrategyConfig
from jaxdec.types import (
    DecodeState,
    LogitsProcessor,
    Model,
    Request,
    StepInfo,
    Strategy,
    StrategyParams,
)

COMPILER_OPTIONS: dict[str, Any] = {}
"""Passed on to XLA for every program."""

SEGMENT = 8
"""Steps between looks at the text, where stop strings or a stream need them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramKey:
    """All that a program is compiled for."""

    config: StrategyConfig
    batch_size: int
    capacity: int
    num_slots: int
    num_stop_slots: int
    num_bias_slots: int
    num_logprobs: int | None = None
    processed_logprobs: bool = False
    processor: LogitsProcessor | None = None
    exact_width: int = 0
    """Rows that every forward of the target is padded to; 0: no exact mode."""
    observe: Callable[..., Any] | None = None
    prefill_chunk: int = decoding.PREFILL_CHUNK
    accept: Any = None
    """Overrides the configuration's acceptance rule (the certificate's replay)."""


@dataclasses.dataclass(kw_only=True)
class Program:
    """A strategy, its arrays, and its two executables."""

    key: ProgramKey
    strategy: Strategy
    params: StrategyParams
    prefill: Any
    loop: Any
    compile_s: float
    num_compilations: int
    costs: dict[Any, tuple[float, float]] = dataclasses.field(default_factory=dict)
    """Draft and verify cost in ms by kind of sampling (`jaxdec.measure`)."""

    def run(
        self, state: DecodeState, max_steps: int
    ) -> tuple[DecodeState, StepInfo, int]:
        """Runs up to `max_steps` steps; returns host records of the steps run.

        The state is given up: use the one that comes back.
        """
        state, info, num = self.loop(self.params, state, jnp.int32(max_steps))
        num = int(num)
        # Cut on the host: on the device, every new number would be a compilation.
        return state, jax.tree.map(lambda x: np.asarray(x)[:, :num], info), num


def bucket(value: int, smallest: int) -> int:
    """`smallest` doubled until it holds `value`.

    >>> bucket(3, 4), bucket(5, 4), bucket(64, 64)
    (4, 8, 64)
    """
    size = smallest
    while size < value:
        size *= 2
    return size


def min_rows(lm: Any, key: ProgramKey) -> int:
    """Rows that forwards are padded to, so that they round alike."""
    return key.exact_width or rounding.plain_rows(lm)


def target_model(lm: Any, key: ProgramKey, taps: tuple[int, ...] = ()) -> Model:
    """The target as pure functions, padded to the row class of a key."""
    return make_model(
        lm.config,
        dtype=lm.dtype,
        taps=taps,
        cache_dtype=lm.cache_dtype,
        min_rows=min_rows(lm, key),
        is_exact=key.exact_width > 0,
    )


def build(
    lm: Any, key: ProgramKey, *, is_optional: bool = False
) -> tuple[Strategy, StrategyParams]:
    """The strategy of a key on a loaded model, and its arrays; compiles nothing.

    Args:
        lm: the model.
        key: what for.
        is_optional: whether steps in which no row may draft are to cost less.
    """
    rows = rounding.plain_rows(lm)
    drafter, drafter_params = key.config.build(lm, key.processor, rows)
    if is_optional and drafter.max_length:
        drafter = draft_length.when_wanted(drafter)
    strategy = decoding.speculative(
        target_model(lm, key, drafter.taps),
        drafter,
        key.config.accept if key.accept is None else key.accept,
        capacity=key.capacity,
        processor=key.processor,
        num_logprobs=key.num_logprobs,
        processed_logprobs=key.processed_logprobs,
        prefill_chunk=key.prefill_chunk,
        observe=key.observe,
        widths=_widths(key),
    )
    if lm.mesh is not None:
        strategy = sharding.on_mesh(strategy, lm.mesh)
        drafter_params = sharding.replicated(drafter_params, lm.mesh)
    return strategy, StrategyParams(target=lm.params, drafter=drafter_params)


def _widths(key: ProgramKey) -> tuple[int, ...]:
    """Of a strategy's forwards; one where they must round alike, or are observed."""
    is_single = key.exact_width or key.observe is not None or key.accept is not None
    return () if is_single else key.config.widths


def compile_program(lm: Any, key: ProgramKey) -> Program:
    """Builds and compiles the strategy of a key for a loaded model."""
    started = time.perf_counter()
    strategy, params = build(lm, key)
    programs = decoding.jit_programs(strategy, key.num_slots)
    request = abstract_request(lm, key)
    prefill = programs.prefill.lower(params, request).compile(COMPILER_OPTIONS)
    state = jax.eval_shape(strategy.prefill, params, request)
    if lm.mesh is not None:
        state = sharding.abstract(state, lm.mesh)
    loop = programs.generate.lower(params, state, jnp.int32(0)).compile(
        COMPILER_OPTIONS
    )
    return Program(
        key=key,
        strategy=strategy,
        params=params,
        prefill=prefill,
        loop=loop,
        compile_s=time.perf_counter() - started,
        num_compilations=2,
    )


def compile_slots(lm: Any, key: ProgramKey) -> tuple[batching.Batching, StrategyParams]:
    """The strategy of a key over slots, one for each row; compiled when first called.

    A model keeps them, so a second server of the same shape compiles nothing.
    """
    if key not in lm.batchings:
        strategy, params = build(lm, key, is_optional=True)
        functions = batching.slots(
            strategy,
            key.batch_size,
            num_stop_slots=key.num_stop_slots,
            num_bias_slots=key.num_bias_slots,
        )
        jitted = batching.jit_slots(functions, COMPILER_OPTIONS)
        lm.batchings[key] = (jitted, params)
    return lm.batchings[key]


def request_key(seed: Any) -> jax.Array:
    """The key of a request: ``jax.random.key(seed)``, or a key as it is.

    Raises:
        ValueError: neither a whole number nor a key.
    """
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        if seed.ndim or seed.dtype != jax.random.key(0).dtype:
            raise ValueError(
                f"a key must be one key of {jax.random.key(0).dtype}, got "
                f"{seed.dtype} of shape {seed.shape}"
            )
        return seed
    is_whole = isinstance(seed, int | np.integer) and not isinstance(seed, bool)
    if not is_whole or not 0 <= seed < 2**32:
        raise ValueError(
            f"a seed is a whole number from 0 to 2**32 - 1 or a JAX key, got {seed!r}"
        )
    return jax.random.key(int(seed))


def abstract_request(lm: Any, key: ProgramKey) -> Request:
    """Shapes of a request of this key."""
    batch = key.batch_size

    def make():
        return make_request(
            prompts=[[0]] * batch,
            max_new_tokens=[1] * batch,
            stop_tokens=[[]] * batch,
            seeds=[0] * batch,
            max_draft_length=key.config.length,
            sampling=make_sampling_params(batch, num_bias_slots=key.num_bias_slots),
            capacity=key.capacity,
            num_stop_slots=key.num_stop_slots,
        )

    request = jax.eval_shape(make)
    return request if lm.mesh is None else sharding.abstract(request, lm.mesh)


def make_request(
    *,
    prompts: list[list[int]],
    max_new_tokens: list[int],
    stop_tokens: list[list[int]],
    seeds: list[Any],
    max_draft_length: int,
    sampling: Any,
    capacity: int,
    num_stop_slots: int,
) -> Request:
    """Requests as arrays, padded to the shapes of a program."""
    batch = len(prompts)
    tokens = np.zeros((batch, capacity), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    stops = np.zeros((batch, num_stop_slots), np.int32)
    for row, ids in enumerate(stop_tokens):
        stops[row, : len(ids)] = ids
    return Request(
        prompt=jnp.asarray(tokens),
        prompt_length=jnp.asarray([len(p) for p in prompts], jnp.int32),
        max_new_tokens=jnp.asarray(max_new_tokens, jnp.int32),
        max_draft_length=jnp.full((batch,), max_draft_length, jnp.int32),
        stop_tokens=jnp.asarray(stops),
        num_stop_tokens=jnp.asarray([len(ids) for ids in stop_tokens], jnp.int32),
        key=jnp.stack([request_key(seed) for seed in seeds]),
        sampling=sampling,
    )
