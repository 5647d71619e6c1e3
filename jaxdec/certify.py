"""Certifying a strategy: its tokens, replayed through the plain step.

The replay *is* the plain step: the same program as plain decoding, with an acceptance
rule that takes the next token from a script instead of sampling it. So every position
is judged on the prefix that the strategy really emitted, and not only those before the
first tie. What an observer records there (the plain choice, the gap between the two
tokens, how near a filter's cut-off is, the emitted token's probability) becomes a
`Certificate`; the rules are in `jaxdec.certificate` and `jaxdec.statistics`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdec import sampling as dist
from jaxdec import text
from jaxdec.call import Call, check, is_single
from jaxdec.certificate import (
    Certificate,
    Mismatch,
    classify_position,
    rounding_tolerance,
)
from jaxdec.certificate import certify as conclude
from jaxdec.lm import LM
from jaxdec.rounding import EXACT_WIDTH, describe, plain_rows, rows_for
from jaxdec.scoring import row_gaps
from jaxdec.statistics import kolmogorov_smirnov, pit_values
from jaxdec.strategies import StrategyConfig, resolve, sample
from jaxdec.types import Acceptance, AcceptFn, Draft, Judgement, Sequences

_PIT_SEED = 20_23

MAX_REPLAYS = 512
"""Judged answers that a model keeps."""


def _take_script(sequences: Sequences, draft: Draft, judgement: Judgement):
    del judgement
    num = draft.tokens.shape[0]
    return Acceptance(
        path=jnp.arange(num + 1, dtype=jnp.int32),
        num_accepted=jnp.zeros((), jnp.int32),
        next_token=sequences.tokens[sequences.length],
    )


scripted = AcceptFn(name="scripted", needs_log_probs=False, accept=_take_script)
"""Takes the next token from the buffer past `length`, where a script was put."""


def observe_replay(sequences, nodes, output, judgement, accepted) -> dict[str, Any]:
    """What the plain step says of the scripted token; leaves ``[B]``."""
    adjusted = dist.adjust(sequences, nodes, output.logits)
    return _observation(sequences, nodes, adjusted, judgement, accepted)


def _observation(sequences, nodes, adjusted, judgement, accepted) -> dict[str, Any]:
    params = sequences.sampling
    vocab = adjusted.shape[-1]
    emitted, choice = accepted.next_token, judgement.tokens[:, 0]
    law = dist.log_probs(params, adjusted)[:, 0]
    is_sampled = params.temperature > 0
    temperature = jnp.where(is_sampled, params.temperature, 1.0)[:, None]
    distance = (jnp.max(adjusted[:, 0], axis=-1, keepdims=True) - adjusted[:, 0]) / (
        temperature
    )
    position = sequences.length[:, None] + nodes.depth
    noise = dist.gumbel(sequences.key, position, vocab)[:, 0]
    score = jnp.where(is_sampled[:, None], law + noise, -distance)

    def at(values, token):
        return jnp.take_along_axis(values, token[:, None], axis=-1)[:, 0]

    gap = at(score, choice) - at(score, emitted)
    # The choice was the largest before normalising; after it, the last bit may differ.
    gap = jnp.where(gap < 0, 0.0, gap)
    edges = _edges(params, adjusted, law, distance)
    near = jnp.minimum(
        _to_edge(*edges, at(distance, choice)), _to_edge(*edges, at(distance, emitted))
    )
    # In order of falling probability, which the prefix determines, so the transform is
    # uniform as in any fixed order; but what a wrong rule does to likely tokens adds up
    # over positions instead of averaging out.
    own = at(law, emitted)[:, None]
    is_earlier = jnp.arange(vocab, dtype=jnp.int32)[None] < emitted[:, None]
    below = (law > own) | ((law == own) & is_earlier)
    return {
        "choice": choice,
        "gap": gap,
        "boundary": jnp.where(is_sampled, near, jnp.inf),
        "prob": jnp.exp(at(law, emitted)),
        "cdf_below": jnp.sum(jnp.where(below, jnp.exp(law), 0.0), axis=-1),
    }


def _edges(params, adjusted, law, distance):
    """Where the filters cut.

    Distances in nats of the last kept and of the first removed token; how far in
    log-mass top-p is from keeping one fewer or one more; and the cut of min-p.
    """
    kept = law > -jnp.inf
    last = jnp.max(jnp.where(kept, distance, -jnp.inf), axis=-1)
    first = jnp.min(jnp.where(kept, jnp.inf, distance), axis=-1)
    unfiltered = params.replace(
        top_p=jnp.ones_like(params.top_p), min_p=jnp.zeros_like(params.min_p)
    )
    mass = jnp.exp(dist.log_probs(unfiltered, adjusted)[:, 0])
    inside = jnp.sum(jnp.where(kept, mass, 0.0), axis=-1)
    before = jnp.sum(jnp.where(kept & (distance < last[:, None]), mass, 0.0), axis=-1)
    uses_top_p = params.top_p < 1
    fewer = jnp.where(uses_top_p, jnp.log(params.top_p / before), jnp.inf)
    more = jnp.where(uses_top_p, jnp.log(inside / params.top_p), jnp.inf)
    floor = jnp.where(params.min_p > 0, -jnp.log(params.min_p), jnp.inf)
    return last, first, fewer, more, floor


def _to_edge(last, first, fewer, more, floor, distance):
    """How far a token is from being on the other side of a cut-off; inf without."""
    kept = distance <= last
    across = jnp.where(kept, first - distance, distance - last)
    by_mass = jnp.where(kept, fewer, more)
    at_edge = jnp.where(kept, distance == last, distance == first)
    across = jnp.where(at_edge, jnp.minimum(across, by_mass), across)
    across = jnp.where(jnp.isfinite(first), across, jnp.inf)
    return jnp.minimum(jnp.abs(across), jnp.abs(floor - distance))


def certify(
    lm: LM,
    prompts: Any,
    strategy: str | StrategyConfig,
    *,
    draft_length: int | None = None,
    max_new_tokens: int = 96,
    temperature: float | None = None,
    seed: Any = 0,
    exact: bool | int = False,
    outputs: text.Outputs | Sequence[text.Outputs] | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Certificate:
    """Checks that a strategy says what plain decoding says.

    With the rule ``match`` every token is compared, at any temperature; a tie within
    the rounding that this run measured is named, anything else is a failure. At
    temperature > 0 the tokens' distribution is tested too, and with the rule
    ``rejection``, whose tokens may differ, that test decides.

    Args:
        lm: the target.
        prompts: as for `jaxdec.generate`; each is decoded alone.
        strategy: what to certify.
        draft_length: draft tokens a step, instead of the strategy's own.
        max_new_tokens: per prompt.
        temperature: as for `jaxdec.generate`.
        seed: of every request; request i of a law test is decoded with ``seed + i``.
        exact: one row class for all forwards; then no tie is allowed.
        outputs: answers of `jaxdec.generate` to these prompts with this strategy, so
            that nothing is generated again.
        progress: told in words how far it is.
        **options: as for `jaxdec.generate`.

    Raises:
        ValueError: bad input, as for `jaxdec.generate`.
    """
    config = resolve(strategy, draft_length, lm)
    if is_single(prompts):
        prompts = [prompts]
    if isinstance(outputs, text.Outputs):
        outputs = [outputs]
    if outputs is None:
        outputs = []
        for i, prompt in enumerate(prompts):
            if progress:
                progress(f"{config.name}: decoding prompt {i + 1} of {len(prompts)}")
            outputs.append(
                text.generate(
                    lm,
                    [prompt],
                    strategy=config,
                    max_new_tokens=max_new_tokens,
                    temperature=temperature,
                    seed=_seed(seed, i),
                    exact=exact,
                    **options,
                )
            )
    else:
        _check_outputs(outputs, config, len(prompts))
    calls = [
        (o.run.call, [item.tokens for item in o]) for o in outputs if o.run is not None
    ]
    errors = [
        error
        for o in outputs
        if o.run is not None
        for row, item in enumerate(o)
        for error in _ending_errors(o.run.call, row, item)
    ]
    if errors:
        # Past a wrong end there is nothing to compare with.
        calls = []
    return _certificate(lm, config, exact, calls, progress, errors)


def _check_outputs(outputs, config: StrategyConfig, num_prompts: int) -> None:
    """Raises where `outputs` are not what is to be certified."""
    for o in outputs:
        if o.run is not None and o.run.call.config != config:
            raise ValueError(
                f"the outputs are of {o.run.call.config}, but {config} is to be "
                "certified; pass outputs of that strategy"
            )
    found = sum(len(o) for o in outputs)
    if found != num_prompts:
        raise ValueError(
            f"there are {found} outputs for {num_prompts} prompts; pass one of each"
        )


def _ending_errors(call: Call, row: int, item: text.Generated) -> list[str]:
    """Where an answer ends at a place that plain decoding would not end at."""
    tokens, limit = item.tokens, call.max_new_tokens[row]
    stops = set(call.stop_tokens[row])
    errors = []
    if any(token in stops for token in tokens[:-1]):
        errors.append(f"answer {row} goes on after a stop token")
    ends_in_stop = bool(tokens) and tokens[-1] in stops
    if (item.finish_reason == "stop_token") != ends_in_stop:
        errors.append(
            f"answer {row} ends with token {tokens[-1:]} for {item.finish_reason}"
        )
    if len(tokens) > limit or (item.finish_reason == "length" and len(tokens) < limit):
        errors.append(f"answer {row} has {len(tokens)} tokens, its limit is {limit}")
    return errors


def _certificate(lm, config, exact, calls, progress, errors) -> Certificate:
    is_law = config.rule == "rejection"
    is_sampled = False
    found: list[dict[str, np.ndarray]] = []
    ties: list[Mismatch] = []
    divergences: list[Mismatch] = []
    num_impossible = 0
    tolerance, rows = 0.0, _row_class(lm, config, exact)
    answers = [
        (call, row, tokens) for call, many in calls for row, tokens in enumerate(many)
    ]
    if not exact and answers:
        call, row, tokens = max(answers, key=lambda a: len(a[2]))
        tolerance = _tolerance(lm, config, [*call.prompts[row], *tokens])
    replayed = []
    for call, many in calls:
        if progress:
            done = f"{len(replayed)} of {len(answers)}"
            progress(f"{config.name}: {done} answers replayed")
        replayed.extend(replay(lm, call, many))
    for i, ((call, row, tokens), seen) in enumerate(
        zip(answers, replayed, strict=True)
    ):
        heat = _temperature_of(call, row)
        is_sampled = is_sampled or heat > 0
        # Logits are divided by the temperature, and with them what rounding moves.
        allowed = tolerance / min(heat, 1.0) if heat > 0 else tolerance
        if not is_law or heat == 0:
            verdict = classify_position(
                seen["choice"],
                np.asarray(tokens, np.int32),
                seen["gap"],
                allowed,
                seen["boundary"],
                request=i,
            )
            ties.extend(verdict.ties)
            divergences.extend(verdict.divergences)
        if heat > 0:
            never = (seen["prob"] == 0) & ~(np.abs(seen["boundary"]) < allowed)
            num_impossible += int(never.sum())
            found.append(seen)
    ks = None
    if found:
        joined = {k: np.concatenate([f[k] for f in found]) for k in found[0]}
        uniform = np.random.default_rng(_PIT_SEED).random(joined["prob"].size)
    if found and uniform.size:
        ks = kolmogorov_smirnov(
            pit_values(
                np.clip(joined["cdf_below"].astype(np.float64), 0, 1),
                np.clip(joined["prob"].astype(np.float64), 0, 1),
                uniform,
            )
        )
    mode = "greedy"
    if is_sampled:
        mode = "law" if is_law else "sampled"
    return conclude(
        strategy=config.name,
        mode=mode,
        dtype=lm.dtype,
        row_class=rows,
        tolerance=tolerance,
        num_positions=sum(len(tokens) for _, _, tokens in answers),
        ties=ties,
        divergences=divergences,
        ks=ks,
        num_impossible=num_impossible,
        errors=errors,
    )


def replay(
    lm: LM, call: Call, tokens: Sequence[Sequence[int]]
) -> list[dict[str, np.ndarray]]:
    """What the plain step says of every token of a call's answers.

    The same batch with the same options, so the plain step is the one that the call
    would have run without drafts. Equal answers are replayed once per model.

    Returns:
        For each request, arrays over its tokens: ``choice`` (the plain step's token),
        ``gap`` (its score minus the emitted token's: logits, at temperature > 0
        log-probability plus noise), ``boundary`` (nats to a filter's cut-off), ``prob``
        and ``cdf_below``.
    """
    tokens = [tuple(int(t) for t in row) for row in tokens]
    if not any(tokens):
        names = ("gap", "boundary", "prob", "cdf_below")
        empty = {name: np.zeros(0, np.float32) for name in names}
        return [{"choice": np.zeros(0, np.int32), **empty} for _ in tokens]
    options = {k: v for k, v in call.sampling.items() if k != "temperature"}
    plain = check(
        lm,
        [list(prompt) for prompt in call.prompts],
        strategy=sample(),
        max_new_tokens=[len(row) for row in tokens],
        temperature=call.sampling["temperature"],
        seed=list(call.seeds),
        stop_tokens=call.stop_tokens,
        processor=call.key.processor,
        exact=call.key.exact_width,
        observe=_observer(call.key.processor),
        accept=scripted,
        capacity=call.key.capacity,
        num_slots=call.key.num_slots,
        **options,
    )
    seen = (plain.key, call.prompts, tuple(tokens), _bytes(plain.request))
    if seen in lm.replays:
        return lm.replays[seen]
    program, _ = lm.program(plain.key)
    script = np.array(plain.request.prompt)
    for row, (prompt, said) in enumerate(zip(call.prompts, tokens, strict=True)):
        script[row, len(prompt) : len(prompt) + len(said)] = said
    # A stop token ends the answer, so it ends the replay at the same place.
    request = plain.request.replace(prompt=jnp.asarray(script))
    state = program.prefill(program.params, request)
    _, info, num = program.run(state, plain.key.num_slots)
    longest = max(len(row) for row in tokens)
    if num != longest:
        raise ValueError(
            f"the replay ended after {num} of {longest} tokens; pass the options that "
            "the answers were generated with"
        )
    while len(lm.replays) >= MAX_REPLAYS:
        lm.replays.pop(next(iter(lm.replays)))
    lm.replays[seen] = [
        {name: leaf[row, : len(said)] for name, leaf in info.observed.items()}
        for row, said in enumerate(tokens)
    ]
    return lm.replays[seen]


def _bytes(request) -> bytes:
    """All values of a request but its prompt."""
    values = request.replace(
        prompt=request.prompt_length, key=jax.random.key_data(request.key)
    )
    return b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(values))


_OBSERVERS: dict[Any, Callable] = {}


def _observer(processor) -> Callable:
    """One observer per processor, so that a program is found again by its key."""
    if processor is None:
        return observe_replay
    if processor not in _OBSERVERS:

        def observe(sequences, nodes, output, judgement, accepted):
            adjusted = dist.adjust(sequences, nodes, output.logits, processor)
            return _observation(sequences, nodes, adjusted, judgement, accepted)

        _OBSERVERS[processor] = observe
    return _OBSERVERS[processor]


def _temperature_of(call: Call, row: int) -> float:
    value = call.sampling["temperature"]
    return float(value[row] if isinstance(value, Sequence | np.ndarray) else value)


def _tolerance(lm: LM, config: StrategyConfig, tokens: Sequence[int]) -> float:
    """Measured in this run, on one prefix, between plain rows and wider forwards."""
    narrow, wide = plain_rows(lm), max(config.length + 1, 8)
    plain, other = row_gaps(lm, tokens, narrow), row_gaps(lm, tokens, wide)
    return rounding_tolerance(plain - other, lm.dtype)


def _seed(seed: Any, number: int) -> Any:
    """The seed of a request: counted on from the first, or from a list."""
    if isinstance(seed, Sequence):
        return seed[number]
    is_whole = isinstance(seed, int | np.integer)
    return (int(seed) + number) % 2**32 if is_whole else seed


def _row_class(lm: LM, config: StrategyConfig, exact: bool) -> str:
    """Which rows ran, and whether they are of one class."""
    device = jax.devices()[0].platform
    if exact:
        rows = EXACT_WIDTH if exact is True else int(exact)
        return f"{rows} in every forward on {device}"
    width, rows = config.length + 1, plain_rows(lm)
    is_one = rows_for(lm.row_classes, max(width, rows)) in range(rows + 1)
    return (
        f"{rows} plain, {max(width, rows)} drafting, "
        f"{'one class' if is_one else 'two classes'} of {describe(lm.row_classes)} on "
        f"{device}"
    )
