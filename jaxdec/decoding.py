"""The engine: propose, score once, accept, commit; a whole generation as one program.

Every strategy is the same step. A drafter proposes; the anchor (the last committed
token, said but not yet read) goes in front of the draft; the target reads both in one
forward; the one definition of the sampling distribution (`jaxdec.sampling`) turns its
logits into a judgement; an acceptance rule keeps a path; stop tokens and budget cut
it; and what is left is committed to tokens, cache and drafter. Autoregressive decoding
is the step whose draft is empty, so there is no separate path for it, nor for greedy.

Invariants: the cache is one behind (``cache.length == sequences.length - 1``); length
is the only truth; drafts are suggestions; rows are strangers; nothing is spent; one
shape in and out.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxdec import acceptance, sampling
from jaxdec.cache import headroom
from jaxdec.drafters.none import none
from jaxdec.types import (
    AcceptFn,
    Commit,
    DecodeState,
    Draft,
    Drafter,
    FinishReason,
    LogitsProcessor,
    Model,
    Request,
    Sequences,
    StepInfo,
    Strategy,
    StrategyParams,
)
from jaxdec.verification import exact_width, scorer

PREFILL_CHUNK = 96
"""Prompt tokens read per forward: enough rows to be bound by compute. On CPU in bf16,
96 cost what 64 do, and are the most that round as 8 rows do."""


def speculative(
    model: Model,
    drafter: Drafter,
    accept: AcceptFn = acceptance.match,
    *,
    capacity: int,
    processor: LogitsProcessor | None = None,
    num_logprobs: int | None = None,
    processed_logprobs: bool = False,
    prefill_chunk: int = PREFILL_CHUNK,
    observe: Callable[..., Any] | None = None,
    widths: tuple[int, ...] = (),
) -> Strategy:
    """Builds the strategy that drafts with `drafter` and judges with `accept`.

    Args:
        model: the target, whose law is preserved.
        drafter: what proposes, at most ``drafter.max_length`` tokens a step.
        accept: the acceptance rule.
        capacity: slots a row, for prompt, output and ``Strategy.headroom``.
        processor: custom pure ``(tokens, length, logits) -> logits``.
        num_logprobs: None for no log-probabilities; n for those of the emitted tokens
            and of the n likeliest at each place.
        processed_logprobs: whether these are of the sampling distribution (after
            penalties, temperature and filters) instead of the raw logits.
        prefill_chunk: prompt tokens read per forward.
        observe: pure ``(sequences, nodes, output, judgement, acceptance) -> pytree``
            whose leaves lead with B; its results come back in ``StepInfo.observed``.
        widths: draft tokens that a target forward may read, increasing up to K; a step
            takes the smallest that holds its longest draft, so that judging fewer
            tokens costs less. Empty: always K. Needs ``model.read``.

    Returns:
        `Strategy`: its `prefill` leaves the last prompt token to the first step, so it
        samples nothing; its `step` is pure, and the state it was given stays valid.

    Raises:
        ValueError: no room for a prompt in `capacity`, or widths that make no sense.
    """
    reports_law = processed_logprobs and num_logprobs is not None
    score = scorer(
        model,
        drafter.max_length,
        widths=widths,
        processor=processor,
        with_log_probs=accept.needs_log_probs or reports_law,
        keep_logits=num_logprobs is not None or observe is not None,
    )
    max_length = drafter.max_length
    max_depth = max_length if drafter.max_depth is None else drafter.max_depth
    num_nodes = max_length + 1
    spare = headroom(prefill_chunk, num_nodes, model.min_rows)
    if capacity <= spare:
        raise ValueError(
            f"capacity {capacity} leaves no room beside the {spare} slots that a "
            "step may write past the limit; give a larger capacity"
        )

    def begin(request: Request) -> DecodeState:
        """What has been said, with nothing read yet."""
        room = min(capacity - spare, model.max_positions)
        batch = request.prompt.shape[0]
        return DecodeState(
            sequences=_begin(request, capacity, room),
            cache=model.init_cache(batch, capacity),
            drafter=drafter.init(batch, capacity),
        )

    def read(params: StrategyParams, state: DecodeState) -> DecodeState:
        """Reads the next chunk of what is said and unread, and tells the drafter."""
        sequences, start = state.sequences, state.cache.length
        live = jnp.clip(sequences.length - 1 - start, 0, prefill_chunk)
        tokens = window(sequences.tokens, start, prefill_chunk + 1)
        place = start[:, None] + jnp.arange(prefill_chunk, dtype=jnp.int32)[None]
        cache, output = model.forward(
            params.target, state.cache, tokens[:, :-1], place, None
        )
        commit = Commit(tokens=tokens, features=output.features, length=live)
        return DecodeState(
            sequences=sequences,
            cache=cache.commit(None, live),
            drafter=drafter.extend(params.drafter, state.drafter, commit),
        )

    def prefill(params: StrategyParams, request: Request) -> DecodeState:
        """Reads all but the last prompt token, in chunks."""

        def is_unread(state):
            return jnp.any(state.cache.length < state.sequences.length - 1)

        return jax.lax.while_loop(
            is_unread, lambda state: read(params, state), begin(request)
        )

    def step(
        params: StrategyParams, state: DecodeState
    ) -> tuple[DecodeState, StepInfo]:
        """One round: at least one token and at most K + 1 for every running row."""
        sequences = state.sequences
        drafter_state, draft = drafter.propose(params.drafter, state.drafter, sequences)
        draft = draft.replace(length=_allowed(sequences, draft))
        nodes = sampling.draft_nodes(sequences.anchor, draft)
        tokens = nodes.tokens
        cache, output, judgement = score(
            params.target, state, nodes, draft.length, draft.parents is None
        )
        accepted = jax.vmap(accept.accept)(sequences, draft, judgement)
        # No path is longer than the tree is deep; wide trees commit few entries.
        accepted = accepted.replace(path=accepted.path[:, : max_depth + 1])
        emitted = _emitted(draft, tokens, accepted)
        count, finish, stop_count = _cut(sequences, judgement, accepted, emitted)
        path = None if draft.parents is None else accepted.path
        commit = Commit(
            tokens=jnp.concatenate([tokens[:, :1], emitted], axis=1),
            features=_along(output.features, path),
            length=count,
        )
        info = StepInfo(
            is_live=sequences.finish == FinishReason.NONE,
            **_draft_info(draft),
            **_counts(sequences, draft, nodes, accepted, count, stop_count),
            path=accepted.path,
            **_logprobs(
                judgement.log_probs if reports_law else output.logits,
                path,
                emitted,
                num_logprobs,
                exact_width(model, tokens.shape[0]) if model.is_exact else 0,
            ),
            observed=()
            if observe is None
            else observe(sequences, nodes, output, judgement, accepted),
        )
        state = DecodeState(
            sequences=_append(sequences, emitted, count, finish),
            cache=cache.commit(path, count),
            drafter=drafter.extend(params.drafter, drafter_state, commit),
        )
        return state, info

    return Strategy(
        begin=begin,
        read=read,
        prefill=prefill,
        step=step,
        capacity=capacity,
        headroom=spare,
        max_length=max_length,
    )


def autoregressive(model: Model, **kwargs) -> Strategy:
    """Plain decoding: `speculative` with no drafter, so the step's draft is empty."""
    return speculative(model, none(), **kwargs)


def generate(
    strategy: Strategy,
    params: StrategyParams,
    state: DecodeState,
    max_steps: Int[Array, ""],
    *,
    num_slots: int,
) -> tuple[DecodeState, StepInfo, Int[Array, ""]]:
    """Steps until every row has finished, or `max_steps` times.

    Args:
        strategy: what to run.
        params: its arrays.
        state: from `prefill`, or from an earlier call (a segment).
        max_steps: how many steps at most; a value, so changing it compiles nothing.
        num_slots: room for records of steps; `max_steps` must not exceed it.

    Returns:
        The state, `StepInfo` with a step axis of `num_slots` after B, and the number of
        steps run.
    """
    _, info = jax.eval_shape(strategy.step, params, state)
    records = jax.tree.map(
        lambda x: jnp.zeros((x.shape[0], num_slots, *x.shape[1:]), x.dtype), info
    )
    last = jnp.minimum(jnp.asarray(max_steps, jnp.int32), jnp.int32(num_slots))

    def unfinished(carry):
        state, _, index = carry
        running = jnp.any(state.sequences.finish == FinishReason.NONE)
        return running & (index < last)

    def body(carry):
        state, records, index = carry
        state, info = strategy.step(params, state)
        records = jax.tree.map(
            lambda buffer, x: jax.lax.dynamic_update_slice_in_dim(
                buffer, x[:, None], index, axis=1
            ),
            records,
            info,
        )
        return state, records, index + 1

    return jax.lax.while_loop(unfinished, body, (state, records, jnp.int32(0)))


class Programs(NamedTuple):
    """The two jitted programs of a strategy; `generate` donates the state it is given.

    ``prefill(params, request)`` and ``generate(params, state, max_steps)``.
    """

    prefill: Any
    generate: Any


def jit_programs(strategy: Strategy, num_slots: int) -> Programs:
    """Jits prefill and the whole loop. Only the engine's own state is donated.

    Args:
        strategy: what to run.
        num_slots: room for records of steps, so the most steps of one call.
    """

    def loop(params, state, max_steps):
        return generate(strategy, params, state, max_steps, num_slots=num_slots)

    return Programs(
        prefill=jax.jit(strategy.prefill),
        generate=jax.jit(loop, donate_argnums=(1,)),
    )


def _begin(request: Request, capacity: int, longest: int) -> Sequences:
    """Sequences that hold the prompts; a row with nothing to generate is finished.

    No row grows past `longest`: a write past the end of a buffer would be clamped, and
    so land on what is already there.
    """
    length = request.prompt_length
    budget = jnp.minimum(request.max_new_tokens, longest - length)
    limit = length + jnp.maximum(budget, 0)
    room = capacity - request.prompt.shape[1]
    finish = jnp.where(limit > length, FinishReason.NONE, FinishReason.LENGTH)
    return Sequences(
        tokens=jnp.pad(request.prompt, ((0, 0), (0, room))),
        length=length,
        prompt_length=length,
        limit=limit,
        finish=finish.astype(jnp.int32),
        max_draft_length=request.max_draft_length,
        stop_tokens=request.stop_tokens,
        num_stop_tokens=request.num_stop_tokens,
        key=request.key,
        sampling=request.sampling,
    )


def window(
    tokens: Int[Array, "B L"], start: Int[Array, "B"], size: int
) -> Int[Array, "B size"]:
    """The `size` tokens of each row from `start`; past the end are zeros."""
    padded = jnp.pad(tokens, ((0, 0), (0, size)))

    def cut(row, start):
        return jax.lax.dynamic_slice(row, (start,), (size,))

    return jax.vmap(cut)(padded, start)


def _allowed(sequences: Sequences, draft: Draft) -> Int[Array, "B"]:
    """Draft tokens to judge: none for finished rows, and never past the limit.

    A step always ends with a token of the target's own, so a row with r tokens left
    takes at most r - 1 drafts of a chain. A tree is not cut by its number of nodes: how
    deep its accepted path may go is cut afterwards.
    """
    room = sequences.limit - sequences.length - 1
    most = sequences.max_draft_length
    if draft.parents is None:
        most = jnp.minimum(most, room)
    most = jnp.where(room > 0, most, 0)
    most = jnp.minimum(most, draft.tokens.shape[1])
    length = jnp.clip(draft.length, 0, most)
    return jnp.where(sequences.finish == FinishReason.NONE, length, 0)


def _emitted(draft, tokens, accepted) -> Int[Array, "B T"]:
    """Accepted draft tokens, then the target's own; entries past that are scratch."""
    index = jnp.arange(accepted.path.shape[1], dtype=jnp.int32)[None]
    kept = tokens if draft.parents is None else _along(tokens, accepted.path)
    shifted = jnp.concatenate([kept[:, 1:], kept[:, -1:]], axis=1)
    own = accepted.next_token[:, None]
    return jnp.where(index < accepted.num_accepted[:, None], shifted, own)


def _cut(sequences, judgement, accepted, emitted):
    """How many emitted tokens stay, why the row ends, and up to where a stop cut it.

    The first of: a stop token (kept), logits that cannot be sampled from (their token
    is not kept), the limit.
    """
    num = emitted.shape[1]
    index = jnp.arange(num, dtype=jnp.int32)[None]
    running = sequences.finish == FinishReason.NONE
    offered = accepted.num_accepted + 1

    listed = jnp.arange(sequences.stop_tokens.shape[1], dtype=jnp.int32)[None]
    is_listed = listed < sequences.num_stop_tokens[:, None]
    hit = emitted[:, :, None] == sequences.stop_tokens[:, None, :]
    is_stop = jnp.any(hit & is_listed[:, None, :], axis=2)
    stop_count = jnp.min(jnp.where(is_stop, index + 1, num + 1), axis=1)

    finite = _along(judgement.is_finite, accepted.path)
    finite_count = jnp.min(jnp.where(finite, num, index), axis=1)

    room = sequences.limit - sequences.length
    count = jnp.minimum(jnp.minimum(offered, stop_count), finite_count)
    count = jnp.minimum(count, room)
    count = jnp.where(running, count, 0)
    stopped = running & (stop_count <= count)
    broken = running & (finite_count < jnp.minimum(offered, room)) & ~stopped
    full = running & (sequences.length + count >= sequences.limit)
    finish = jnp.where(full, jnp.int32(FinishReason.LENGTH), sequences.finish)
    finish = jnp.where(broken, jnp.int32(FinishReason.NONFINITE), finish)
    finish = jnp.where(stopped, jnp.int32(FinishReason.STOP_TOKEN), finish)
    return count, finish, jnp.where(stopped, stop_count, num + 1)


def _append(sequences, emitted, count, finish) -> Sequences:
    """Writes the emitted tokens; what lies past `count` is scratch."""

    def write(buffer, row, start):
        return jax.lax.dynamic_update_slice(buffer, row, (start,))

    return sequences.replace(
        tokens=jax.vmap(write)(sequences.tokens, emitted, sequences.length),
        length=sequences.length + count,
        finish=finish,
    )


def _along(x, path):
    """Entries of x along a path of nodes (None: as they are)."""
    if path is None:
        return x
    index = path.reshape(path.shape + (1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1)


def _draft_info(draft: Draft) -> dict:
    batch, num = draft.tokens.shape
    chain = jnp.broadcast_to(jnp.arange(num, dtype=jnp.int32), (batch, num))
    nothing = jnp.zeros((batch, num), jnp.float32)
    return {
        "draft_tokens": draft.tokens,
        "draft_parents": chain if draft.parents is None else draft.parents,
        "draft_confidence": nothing if draft.confidence is None else draft.confidence,
        "draft_source": jnp.zeros((batch,), jnp.int32)
        if draft.source is None
        else draft.source,
    }


def _counts(sequences, draft, nodes, accepted, count, stop_count) -> dict:
    """Accounting of one step, once, for everything that reports it."""
    index = jnp.arange(nodes.depth.shape[1], dtype=jnp.int32)[None]
    judged = jnp.where(index <= draft.length[:, None], nodes.depth, 0)
    return {
        "num_drafted": draft.length,
        # A tree is judged along one path: what counts is how deep it went.
        "num_judged": jnp.clip(
            jnp.max(judged, axis=1),
            0,
            jnp.minimum(stop_count, sequences.limit - sequences.length),
        ),
        "num_accepted": jnp.minimum(accepted.num_accepted, count),
        "num_emitted": count,
    }


def _logprobs(logits, path, emitted, num: int | None, width: int) -> dict:
    """What is reported of each emitted token; log-probabilities count as logits.

    The sums run over `width` rows at least, so that they round alike.
    """
    if num is None:
        batch, nodes = emitted.shape
        return {
            "logprobs": jnp.zeros((batch, nodes), jnp.float32),
            "top_logprobs": jnp.zeros((batch, nodes, 0), jnp.float32),
            "top_tokens": jnp.zeros((batch, nodes, 0), jnp.int32),
        }
    rows = emitted.shape[1]
    logits = _along(logits, path)
    if width > rows:
        missing = ((0, 0), (0, width - rows))
        logits = jnp.pad(logits, (*missing, (0, 0)))
        emitted = jnp.pad(emitted, missing)
    if width:
        # Sums are not to be fused with how their rows were picked.
        logits = jax.lax.optimization_barrier(logits)
    own, top, ids = sampling.token_logprobs(logits, emitted, num)
    found = {"logprobs": own, "top_logprobs": top, "top_tokens": ids}
    return {name: x[:, :rows] for name, x in found.items()}
