"""What the evidence needs beyond the run itself: costs, perplexity, versions.

Costs are measured after the run, at its real shapes and with the state it ended in:
several rounds inside one program, warm, `block_until_ready`, the median of a few
repeats. A forward that XLA would move out of such a loop is kept in it by feeding each
round's state to the next.
"""

import functools
import importlib.metadata
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdec
from jaxdec import counts, sampling
from jaxdec.decoding import PREFILL_CHUNK
from jaxdec.evidence import Evidence, RunFacts, collect
from jaxdec.models.decoder import make_model
from jaxdec.program import Program, abstract_request, bucket, target_model
from jaxdec.types import Commit, DecodeState, Draft, Model

ROUNDS = 8
REPEATS = 5


def evidence(
    run: Any,
    items: Sequence[Any],
    with_costs: bool = True,
    references: Sequence[Sequence[int]] | None = None,
) -> Evidence:
    """The record of a run; see `jaxdec.evidence` for what its figures mean.

    Args:
        run: from `jaxdec.text.execute`.
        items: the answers.
        with_costs: whether to measure draft and verify cost and the perplexity, which
            takes model calls (and, once per shape, compilations that are not counted).
        references: plain decoding's tokens of each request, for `exact_match`.
    """
    if run is None:
        raise ValueError(
            "no evidence: max_new_tokens was 0 for every request, so no model ran"
        )
    call, program = run.call, run.program
    lm = call.lm
    prompt_length = np.asarray([len(p) for p in call.prompts])
    num_rows = max(program.strategy.max_length + 1, 1)
    read, written = counts.kv_bytes(
        run.info, prompt_length, lm.kv_bytes_per_token, num_rows
    )
    draft_ms, verify_ms = costs(lm, program) if with_costs else (None, None)
    logprobs = None
    if with_costs:
        logprobs = score(lm, call.prompts, [item.tokens for item in items])
    facts = RunFacts(
        e2e_s=run.e2e_s,
        compile_s=run.compile_s,
        num_compilations=run.num_compilations,
        draft_cost_ms=draft_ms,
        verify_cost_ms=verify_ms,
        kv_bytes_read=read,
        kv_bytes_written=written,
        drafter_param_bytes=_num_bytes(program.params.drafter.own),
        drafter_state_bytes=_num_bytes(_abstract_state(lm, program).drafter),
        versions=versions(),
        hashes=hashes(lm, call.config),
        seed=_plain_seeds(call.seeds),
        sampling=_plain(
            {
                **call.sampling,
                "strategy": call.config.name,
                "draft_length": call.config.length,
                "rule": call.config.rule,
                "exact": bool(call.key.exact_width),
                "dtype": lm.dtype,
                "max_new_tokens": max(call.max_new_tokens),
                "stop": list(call.stop_strings),
            }
        ),
    )
    rounds = np.maximum(run.info.is_live.sum(axis=1), 1)
    later = run.e2e_s - run.ttft_s
    # Rows of one batch run in step: one that ran fewer rounds ended that much earlier.
    share = (rounds - 1) / max(run.num_rounds - 1, 1)
    return collect(
        run.info,
        prompt_length=prompt_length,
        finish=run.finish,
        facts=facts,
        ttft_s=[run.ttft_s] * len(items),
        request_e2e_s=[run.ttft_s + later * s for s in share],
        tokens=[item.tokens for item in items],
        logprobs=logprobs,
        references=references,
        texts=None if call.output_format is None else [item.text for item in items],
        output_format=call.output_format,
    )


def versions() -> dict[str, str]:
    """Of the library, what it runs on, and the device."""
    device = jax.devices()[0]
    return {
        "jaxdec": jaxdec.__version__,
        "jax": jax.__version__,
        "flax": importlib.metadata.version("flax"),
        "python": platform.python_version(),
        "device": _device_name(device),
    }


def _device_name(device: Any) -> str:
    platform, kind = device.platform, device.device_kind
    return kind if platform in kind.lower() else f"{platform} {kind}"


def hashes(lm: Any, config: Any) -> dict[str, str]:
    """Of the target's weights, the drafter's, and the tokenizer."""
    drafter = getattr(config, "draft", None)
    found = {"target": lm.content_hash}
    found["drafter"] = lm.content_hash if drafter is None else drafter.content_hash
    if lm.tokenizer is not None:
        found["tokenizer"] = lm.tokenizer.fingerprint()
    return found


def costs(lm: Any, program: Program) -> tuple[float, float]:
    """Milliseconds of a step's drafting (propose and extend) and of its verification.

    Measured once per program; the cache is filled as far as a short request fills it.
    """
    if program.costs is None:
        program.costs = _measure_costs(lm, program)
    return program.costs


def _measure_costs(lm: Any, program: Program) -> tuple[float, float]:
    state = warm_state(lm, program)
    _, forward, propose, extend, judge = step_parts(lm, program)

    def verify(params, state):
        return judge(params, forward(params, state))

    def draft(params, state):
        return extend(params, propose(params, state))

    verify_ms = Rounds(verify, program.params, state).median()
    if program.strategy.max_length == 0:
        return 0.0, verify_ms
    return Rounds(draft, program.params, state).median(), verify_ms


Body = Callable[[Any, DecodeState], DecodeState]


def step_parts(lm: Any, program: Program) -> tuple[Body, Body, Body, Body, Body]:
    """A whole step, and its parts one by one, each as ``(params, state) -> state``.

    Returns:
        The step; the target's forward over anchor and draft; propose; extend; and the
        judging of logits that are already there.
    """
    key = program.key
    drafter, _ = key.config.build(lm, key.processor, target_model(lm, key).min_rows)
    model = target_model(lm, key, drafter.taps)
    num = program.strategy.max_length
    shape = (key.batch_size, num + 1)

    def step(params, state):
        # A row that stays as long as it is can be stepped as often as one likes.
        after, _ = program.strategy.step(params, state)
        length = state.sequences.length
        back = after.cache.commit(None, state.cache.length - after.cache.length)
        sequences = after.sequences.replace(
            length=length, finish=jnp.zeros_like(length)
        )
        return state.replace(
            sequences=sequences, cache=back, drafter=_rewound(after, state)
        )

    def forward(params, state):
        sequences = state.sequences
        tokens = jax.lax.dynamic_slice_in_dim(sequences.tokens, 0, num + 1, axis=1)
        offset = jnp.arange(num + 1, dtype=jnp.int32)[None]
        position = (sequences.length - 1)[:, None] + offset
        cache, output = model.forward(
            params.target, state.cache, tokens, position, None
        )
        # The engine reads logits by their maximum, at least; so the head counts.
        found = jnp.sum(sampling.first_max(output.logits)[0])
        return state.replace(sequences=_touched(sequences, found), cache=cache)

    def propose(params, state):
        drafter_state, draft = drafter.propose(
            params.drafter, state.drafter, state.sequences
        )
        sequences = _touched(state.sequences, jnp.sum(draft.tokens))
        return state.replace(sequences=sequences, drafter=drafter_state)

    def extend(params, state):
        commit = Commit(
            tokens=jnp.zeros((shape[0], shape[1] + 1), jnp.int32)
            + state.sequences.tokens[:, :1],
            features=jnp.zeros((*shape, model.num_features), jnp.float32),
            length=jnp.zeros((shape[0],), jnp.int32),
        )
        drafter_state = drafter.extend(params.drafter, state.drafter, commit)
        return state.replace(drafter=drafter_state)

    def judge(params, state):
        del params
        sequences = state.sequences
        draft = Draft(
            tokens=jax.lax.dynamic_slice_in_dim(sequences.tokens, 1, num, axis=1),
            length=jnp.full((shape[0],), num, jnp.int32),
        )
        nodes = sampling.draft_nodes(sequences.tokens[:, 0], draft)
        logits = jnp.zeros((*shape, model.vocab_size), jnp.float32)
        logits = logits + sequences.tokens[:, :1, None].astype(jnp.float32)
        judgement = sampling.judge(sequences, nodes, logits, processor=key.processor)
        found = jnp.sum(judgement.tokens)
        return state.replace(sequences=_touched(sequences, found))

    return step, forward, propose, extend, judge


def _rewound(after: DecodeState, before: DecodeState) -> Any:
    """The drafter's state after a step, with the counters of the state before it."""

    def pick(new, old):
        return old if jnp.issubdtype(new.dtype, jnp.integer) else new

    return jax.tree.map(pick, after.drafter, before.drafter)


def _touched(sequences, value):
    """Makes the next round depend on this one, without changing any token.

    `value` is a sum of token ids, so it is never negative; XLA cannot know that.
    """
    zero = (value < -1).astype(sequences.tokens.dtype)
    return sequences.replace(tokens=sequences.tokens + zero)


class Rounds:
    """Times one round of a body, many rounds in one program.

    Starting the program and copying its state are no part of a round: a sample is the
    difference between many rounds and one.
    """

    def __init__(self, body: Body, params: Any, state: DecodeState):
        def loop(params, state, num):
            return jax.lax.fori_loop(0, num, lambda _, s: body(params, s), state)

        self._run = jax.jit(loop).lower(params, state, jnp.int32(0)).compile()
        self._arguments = (params, state)
        self._spent(1)

    def _spent(self, num: int) -> float:
        started = time.perf_counter()
        jax.block_until_ready(self._run(*self._arguments, jnp.int32(num)))
        return time.perf_counter() - started

    def sample(self, rounds: int = ROUNDS) -> float:
        """Milliseconds of one round, once."""
        once = self._spent(1)
        return (self._spent(rounds + 1) - once) / rounds * 1e3

    def median(self, repeats: int = REPEATS) -> float:
        """Median of several samples, never below 0."""
        return max(statistics.median(self.sample() for _ in range(repeats)), 0.0)


def warm_state(lm: Any, program: Program) -> DecodeState:
    """A state of the program's shapes with a short prompt read."""
    abstract = abstract_request(lm, program.key)
    request = jax.tree.map(
        lambda x: (
            jnp.zeros(x.shape, x.dtype)
            if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            else jnp.broadcast_to(jax.random.key(0), x.shape)
        ),
        abstract,
    )
    batch = program.key.batch_size
    request = request.replace(
        prompt_length=jnp.full((batch,), PREFILL_CHUNK, jnp.int32),
        max_new_tokens=jnp.full((batch,), PREFILL_CHUNK, jnp.int32),
        max_draft_length=jnp.full((batch,), program.key.config.length, jnp.int32),
        sampling=sampling.make_sampling_params(
            batch, num_bias_slots=program.key.num_bias_slots
        ),
    )
    return program.prefill(program.params, request)


def _abstract_state(lm: Any, program: Program) -> DecodeState:
    return jax.eval_shape(
        program.strategy.prefill, program.params, abstract_request(lm, program.key)
    )


@functools.partial(jax.jit, static_argnames=("model", "chunk", "reduce_fn"))
def _teacher_forced(params, tokens, length, *, model: Model, chunk: int, reduce_fn):
    """``reduce_fn(logits, next tokens)`` at every place, `chunk` rows a forward."""
    batch, size = tokens.shape
    offset = jnp.arange(chunk, dtype=jnp.int32)
    padded = jnp.pad(tokens, ((0, 0), (0, chunk + 1)))

    def read(i, carry):
        cache, found = carry
        start = i.astype(jnp.int32) * chunk
        window = jax.lax.dynamic_slice_in_dim(padded, start, chunk + 1, axis=1)
        position = jnp.broadcast_to(start + offset, (batch, chunk))
        cache, output = model.forward(params, cache, window[:, :-1], position, None)
        cache = cache.commit(None, jnp.full((batch,), chunk, jnp.int32))
        own = reduce_fn(output.logits, window[:, 1:])
        found = jax.lax.dynamic_update_slice_in_dim(found, own, start, axis=1)
        return cache, found

    num = (jnp.max(length) + chunk - 1) // chunk
    empty = jnp.zeros((batch, size + chunk), jnp.float32)
    cache = model.init_cache(batch, size + chunk)
    _, found = jax.lax.fori_loop(0, num, read, (cache, empty))
    return found


def _own_logprob(logits, tokens):
    return sampling.token_logprobs(logits, tokens, 0)[0]


def _top_gap(logits, tokens):
    del tokens
    first, best = sampling.first_max(logits)
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    _, second = sampling.first_max(
        jnp.where(index == first[..., None], -jnp.inf, logits)
    )
    return best - second


@functools.cache
def _scoring_model(config, dtype, cache_dtype):
    return make_model(config, dtype=dtype, cache_dtype=cache_dtype)


def _read(lm: Any, tokens: Sequence[int], chunk: int, reduce_fn) -> np.ndarray:
    """`reduce_fn` at every place of one sequence; one program per bucket of lengths."""
    buffer = np.zeros((1, bucket(len(tokens) + 1, 256)), np.int32)
    buffer[0, : len(tokens)] = tokens
    found = _teacher_forced(
        lm.params,
        jnp.asarray(buffer),
        jnp.asarray([len(tokens)], jnp.int32),
        model=_scoring_model(lm.config, lm.dtype, lm.cache_dtype),
        chunk=chunk,
        reduce_fn=reduce_fn,
    )
    return np.asarray(found)[0, : len(tokens)]


def score(
    lm: Any, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Log-probability of every output token under the target, teacher-forced.

    Raw logits, as sampling parameters leave them alone; one request at a time, so that
    one compiled program serves any number of them.
    """
    scores = []
    for prompt, output in zip(prompts, outputs, strict=True):
        found = _read(lm, [*prompt, *output], PREFILL_CHUNK, _own_logprob)
        first = len(prompt) - 1
        scores.append(found[first : first + len(output)].tolist())
    return scores


def row_gaps(lm: Any, tokens: Sequence[int], num_rows: int) -> np.ndarray:
    """Gap between the two largest logits at every place, read `num_rows` at a time.

    The difference between two widths is what rounding does to the gap.
    """
    return _read(lm, tokens, num_rows, _top_gap)


def _num_bytes(tree: Any) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(x.size * jnp.dtype(x.dtype).itemsize for x in leaves)


def _plain_seeds(seeds: Sequence[Any]) -> Any:
    plain = [
        int(s)
        if isinstance(s, int | np.integer)
        else int(np.asarray(jax.random.key_data(s)).ravel()[-1])
        for s in seeds
    ]
    return plain[0] if len(set(plain)) == 1 else tuple(plain)


def _plain(values: dict) -> dict:
    """JSON-friendly copies of call options."""
    return {
        k: v
        if isinstance(v, str | int | float | bool | type(None))
        else str(v)
        if callable(v)
        else v
        for k, v in values.items()
    }
