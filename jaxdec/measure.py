"""What the evidence needs beyond the run itself: costs, perplexity, versions.

Costs are measured after the run, at its real shapes, with its sampling parameters and
in the middle of its answers: several rounds inside one program, warm,
`block_until_ready`, the median of a few repeats. A forward that XLA would move out of
such a loop is kept in it by feeding each round's state to the next.
"""

import dataclasses
import importlib.metadata
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdec
from jaxdec import counts, sampling, scoring
from jaxdec.evidence import Evidence, RunFacts, collect
from jaxdec.program import Program, abstract_request, target_model
from jaxdec.rounding import plain_rows
from jaxdec.types import Commit, DecodeState, Draft

ROUNDS = 8
REPEATS = 5


def evidence(
    run: Any,
    items: Sequence[Any],
    with_costs: bool = True,
    references: Sequence[Sequence[int]] | None = None,
    scores: scoring.Scores | None = None,
) -> Evidence:
    """The record of a run; see `jaxdec.evidence` for what its figures mean.

    Args:
        run: from `jaxdec.text.execute`.
        items: the answers.
        with_costs: whether to measure draft and verify cost and the perplexity, which
            takes model calls (and, once per shape, compilations that are not counted).
        references: plain decoding's tokens of each request, for `exact_match`.
        scores: known ones, for the perplexity; see `jaxdec.scoring.score`.
    """
    if run is None:
        raise ValueError(
            "no evidence: max_new_tokens was 0 for every request, so no model ran"
        )
    call, program = run.call, run.program
    lm = call.lm
    prompt_length = np.asarray([len(p) for p in call.prompts])
    # Forwards are padded to a class of rows, and write what they are padded to.
    padded = -(-target_model(lm, program.key).min_rows // len(call.prompts))
    num_rows = max(program.strategy.max_length + 1, padded)
    read, written = counts.kv_bytes(
        run.info, prompt_length, lm.kv_bytes_per_token, num_rows
    )
    tokens = [item.tokens for item in items]
    draft_ms, verify_ms, logprobs = None, None, None
    if with_costs:
        draft_ms, verify_ms = costs(program, call, tokens)
        logprobs = scoring.score(lm, call.prompts, tokens, scores)
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
        sampling=_options(call),
        **call.config.facts(lm),
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
        tokens=tokens,
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
    own = [c.draft.content_hash for c in config.members if c.draft is not None]
    found = {"target": lm.content_hash}
    found["drafter"] = ", ".join(own) or "no weights of its own"
    if lm.tokenizer is not None:
        found["tokenizer"] = lm.tokenizer.fingerprint()
    return found


def costs(program: Program, call: Any, outputs: Sequence[Sequence[int]]):
    """Milliseconds of a step's drafting (propose, extend), and of the rest of the step.

    The rest is the target's forward over anchor and draft, the judging of its logits
    with the request's own sampling parameters, acceptance and commit. A step and its
    drafting are timed in turns, in the middle of the answers that the call gave, and
    the rest is their difference. A program that has been timed with the same kind of
    sampling is not timed again.
    """
    kind = _kind(call.request.sampling)
    if kind not in program.costs:
        program.costs[kind] = _measure_costs(program, call, outputs)
    return program.costs[kind]


def _kind(params: Any) -> tuple[bool, ...]:
    """Which vocabulary-wide work the sampling parameters ask for."""
    return tuple(
        bool(np.any(np.asarray(value)))
        for value in (
            params.temperature > 0,
            params.top_k > 0,
            params.top_p < 1,
            sampling.needs_adjustment(params),
        )
    )


def _measure_costs(
    program: Program, call: Any, outputs: Sequence[Sequence[int]]
) -> tuple[float, float]:
    state = mid_state(program, call, outputs)
    step, _, propose, extend, _ = step_parts(call.lm, program)

    def draft(params, state):
        return extend(params, propose(params, state))

    steps = Rounds(step, program.params, state)
    if program.strategy.max_length == 0:
        return 0.0, steps.median()
    drafts = Rounds(draft, program.params, state)
    pairs = [(steps.sample(), drafts.sample()) for _ in range(REPEATS)]
    draft_ms = max(statistics.median(d for _, d in pairs), 0.0)
    return draft_ms, max(statistics.median(s - d for s, d in pairs), 0.0)


Body = Callable[[Any, DecodeState], DecodeState]


def step_parts(lm: Any, program: Program) -> tuple[Body, Body, Body, Body, Body]:
    """A whole step, and its parts one by one, each as ``(params, state) -> state``.

    Returns:
        The step; the target's forward over anchor and draft; propose; extend; and the
        judging of logits that are already there.
    """
    key = program.key
    drafter, _ = key.config.build(lm, key.processor, plain_rows(lm))
    model = target_model(lm, key, drafter.taps)
    num = program.strategy.max_length
    shape = (key.batch_size, num + 1)
    depth = num if drafter.max_depth is None else drafter.max_depth
    parents = None
    if drafter.max_depth is not None:
        # A tree of that depth, all levels alike.
        level = -(-num // depth)
        parents = jnp.maximum(jnp.arange(1 - level, num + 1 - level), 0)
        parents = jnp.broadcast_to(parents.astype(jnp.int32), (shape[0], num))

    def nodes_of(sequences):
        draft = Draft(
            tokens=jax.lax.dynamic_slice_in_dim(sequences.tokens, 1, num, axis=1),
            parents=parents,
            length=jnp.full((shape[0],), num, jnp.int32),
        )
        return sampling.draft_nodes(sequences.tokens[:, 0], draft)

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
        nodes = nodes_of(sequences)
        position = (sequences.length - 1)[:, None] + nodes.depth
        mask = None if parents is None else nodes.ancestors
        cache, output = model.forward(
            params.target, state.cache, nodes.tokens, position, mask
        )
        # The engine reads logits by their maximum, at least; so the head counts.
        found = jnp.sum(sampling.first_max(output.logits)[0])
        return state.replace(sequences=_touched(sequences, found), cache=cache)

    def propose(params, state):
        drafter_state, draft = drafter.propose(
            params.drafter, state.drafter, state.sequences
        )
        found = jnp.sum(draft.tokens)
        # The drafter's counters too: a block of masks is read without the anchor, and
        # XLA would do it once, before the loop.
        drafter_state = jax.tree.map(
            lambda x: (
                x + _zero(found, x.dtype) if jnp.issubdtype(x.dtype, jnp.integer) else x
            ),
            drafter_state,
        )
        sequences = _touched(state.sequences, found)
        return state.replace(sequences=sequences, drafter=drafter_state)

    def extend(params, state):
        # Nothing is committed, so that the next round finds the same state; but XLA
        # must not know, nor that every round does the same.
        sequences = state.sequences
        zero = jnp.minimum(sequences.tokens[:, 0], 0)
        rows = (shape[0], depth + 1)
        commit = Commit(
            tokens=jnp.broadcast_to(zero[:, None], (rows[0], rows[1] + 1)),
            features=jnp.zeros((*rows, model.num_features), jnp.float32)
            + zero[:, None, None].astype(jnp.float32),
            length=zero,
        )
        drafter_state = drafter.extend(params.drafter, state.drafter, commit)
        return state.replace(
            sequences=_touched(sequences, _broken(drafter_state)), drafter=drafter_state
        )

    def judge(params, state):
        del params
        sequences = state.sequences
        nodes = nodes_of(sequences)
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


def _broken(tree: Any) -> Any:
    """-2 if the first entry of some array is NaN, which it is not; XLA cannot know."""
    found = jnp.bool_(False)
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            found = found | jnp.isnan(leaf[(0,) * leaf.ndim])
    return jnp.where(found, jnp.int32(-2), jnp.int32(0))


def _touched(sequences, value):
    """Makes the next round depend on this one, without changing any token.

    `value` is a sum of token ids, so it is never negative; XLA cannot know that.
    """
    tokens = sequences.tokens
    return sequences.replace(tokens=tokens + _zero(value, tokens.dtype))


def _zero(value, dtype):
    """0, from a value that is not below -1; XLA cannot know."""
    return (value < -1).astype(dtype)


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


def mid_state(
    program: Program, call: Any, outputs: Sequence[Sequence[int]]
) -> DecodeState:
    """The state of a call when half of each answer was out."""
    request = call.request
    prompt = np.array(request.prompt)
    lengths = []
    for row, (said, output) in enumerate(zip(call.prompts, outputs, strict=True)):
        half = output[: len(output) // 2]
        prompt[row, len(said) : len(said) + len(half)] = half
        lengths.append(len(said) + len(half))
    left = [
        len(said) + limit - length
        for said, limit, length in zip(
            call.prompts, call.max_new_tokens, lengths, strict=True
        )
    ]
    return program.prefill(
        program.params,
        request.replace(
            prompt=jnp.asarray(prompt),
            prompt_length=jnp.asarray(lengths, jnp.int32),
            max_new_tokens=jnp.asarray(left, jnp.int32),
        ),
    )


def _abstract_state(lm: Any, program: Program) -> DecodeState:
    return jax.eval_shape(
        program.strategy.prefill, program.params, abstract_request(lm, program.key)
    )


def _num_bytes(tree: Any) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(x.size * jnp.dtype(x.dtype).itemsize for x in leaves)


def _plain_seeds(seeds: Sequence[Any]) -> Any:
    """Numbers as they are; of a JAX key, its data in hexadecimal."""
    return _one_or_all(
        tuple(
            int(s)
            if isinstance(s, int | np.integer)
            else "key:" + np.asarray(jax.random.key_data(s)).tobytes().hex()
            for s in seeds
        )
    )


def _options(call: Any) -> dict[str, Any]:
    """Everything that a call was asked for, as JSON values."""
    config = {
        field.name: getattr(call.config, field.name)
        for field in dataclasses.fields(call.config)
        if field.name not in ("name", "draft", "length", "parts")
    }
    return {
        **{name: _plain(value) for name, value in call.sampling.items()},
        **{name: _plain(value) for name, value in config.items()},
        **_parts(call.config),
        "strategy": call.config.name,
        "draft_length": call.config.length,
        "exact_width": call.key.exact_width,
        "dtype": call.lm.dtype,
        "cache_dtype": call.lm.cache_dtype,
        "max_new_tokens": _one_or_all(call.max_new_tokens),
        "stop": _plain(_one_or_all(call.stop_strings)),
        "stop_tokens": _plain(_one_or_all(call.stop_tokens)),
        "processor": call.key.processor is not None,
    }


def _one_or_all(values: Sequence[Any]) -> Any:
    """The value that all requests share, or the value of each."""
    return values[0] if len(set(values)) == 1 else values


def _parts(config: Any) -> dict[str, Any]:
    """Name and draft length of each of several strategies in one."""
    if config.members == (config,):
        return {}
    return {"parts": [[part.name, part.length] for part in config.members]}


def _plain(value: Any) -> Any:
    """A sampling option as a JSON value; a bias of -inf is a ban."""
    if dataclasses.is_dataclass(value):
        return dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(k): "ban" if v == -np.inf else float(v) for k, v in value.items()}
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return np.asarray(value).tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(v) for v in value]
    return value
