"""Text in, text out: `generate` and `stream`.

Input is checked before any model call. A batch of requests with different prompts,
lengths, temperatures, limits and seeds is one call of one compiled program. The host
looks at the tokens only where it must: after the first step (time to first token), and
every few steps where stop strings, a stream or a caller who may cancel ask for it.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxdec import counts, measure
from jaxdec.call import Call, check
from jaxdec.detokenize import TextStream
from jaxdec.evidence import Evidence
from jaxdec.lm import LM
from jaxdec.program import SEGMENT, Program
from jaxdec.types import FinishReason, LogitsProcessor, StepInfo


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
    """One answer."""

    text: str
    """Without stop token, stop string and special tokens."""
    tokens: tuple[int, ...]
    """As emitted: a stop token, or the token that completed a stop string, is last."""
    finish_reason: str
    """A `jaxdec.FinishReason` in lower case: ``stop_token``, ``length``, ..."""
    stop_token: int | None = None
    """The token that stopped it, for ``finish_reason == "stop_token"``."""
    logprobs: tuple[float, ...] | None = None
    """Of each token, if asked for: under the raw logits, or as it was sampled."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    """Of each place, the likeliest tokens and their log-probabilities; tokens that
    cannot be drawn are left out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outputs(Sequence[Generated]):
    """The answers of a call, in order, and the evidence of how they came about."""

    items: tuple[Generated, ...]
    """One answer per prompt."""
    run: "Run | None"
    """None if no tokens were asked for, so that no model ran."""

    def __getitem__(self, index):
        return self.items[index]

    def __len__(self):
        return len(self.items)

    def __repr__(self) -> str:
        shown = [repr(item.text) for item in self.items[:3]]
        more = len(self) - len(shown)
        return f"Outputs({', '.join(shown)}{f', and {more} more' if more else ''})"

    @functools.cached_property
    def evidence(self) -> Evidence:
        """Measured when first asked for: costs and perplexity take model calls."""
        return measure.evidence(self.run, self.items)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a call left behind: raw material of the evidence."""

    call: Call
    program: Program
    info: StepInfo
    """Host arrays ``[B, steps, ...]``, cut where a stop string ended a row."""
    finish: np.ndarray
    compile_s: float
    num_compilations: int
    ttft_s: float
    e2e_s: float
    num_rounds: int


def generate(
    lm: LM,
    prompts: Any,
    *,
    strategy: Any = "greedy",
    draft_length: int | None = None,
    max_new_tokens: Any = 128,
    temperature: Any = None,
    seed: Any = 0,
    stop: str | Sequence[Any] = (),
    stop_tokens: Sequence[Any] | None = None,
    chat: bool | None = None,
    system: str | None = None,
    logprobs: int | None = None,
    processed_logprobs: bool = False,
    processor: LogitsProcessor | None = None,
    exact: bool | int = False,
    output_format: str | None = None,
    cancelled: Callable[[], bool] | None = None,
    **sampling: Any,
) -> Outputs:
    """Decodes every prompt with one strategy.

    Args:
        lm: from `jaxdec.load`.
        prompts: one `Prompt` or several: text, token ids, or role/content messages.
        strategy: a name or a `StrategyConfig` such as ``jaxdec.lookup(length=6)``.
        draft_length: draft tokens a step, instead of the strategy's own.
        max_new_tokens: per request, or one for all; 0 calls no model.
        temperature: 0 is greedy. None is 0.7 for ``"sample"`` and 0 otherwise.
        seed: a whole number or a JAX key, or one per request; the same seed gives the
            same tokens whatever the strategy (with the rule ``match``) and the batch.
        stop: stop strings, or a list of them per request; the text ends before the
            first one found.
        stop_tokens: ids that end an answer, or a list of them per request; None takes
            the model's own.
        chat: whether to apply the chat template to text; None does if there is one.
        system: system message for chat prompts given as text.
        logprobs: None, or how many likeliest tokens to report at each place (0: only
            the emitted token's), under the raw logits.
        processed_logprobs: report `logprobs` of the sampling distribution instead:
            after penalties, temperature and filters, so at temperature 0 the emitted
            token is certain.
        processor: custom pure ``(tokens[L], length, logits[V]) -> logits[V]``; a new
            function object is one compilation.
        exact: pad every forward, plain decoding's too, to the same number of rows, so
            that every strategy equals plain decoding bit for bit: True is 16 rows
            (requests x (draft length + 1) must fit), or give a number. Give all calls
            that are to be compared the same value.
        output_format: ``"json"`` or a regular expression that each text should match;
            the evidence then has a success rate.
        cancelled: asked after the first step and every few steps; once it is true,
            requests that still run end with what they have said so far.
        **sampling: see `jaxdec.sampling_params.make_sampling_params`.

    Raises:
        ValueError: bad input, before any model call.
    """
    call = check(
        lm,
        prompts,
        strategy=strategy,
        draft_length=draft_length,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        stop=stop,
        stop_tokens=stop_tokens,
        chat=chat,
        system=system,
        logprobs=logprobs,
        processed_logprobs=processed_logprobs,
        processor=processor,
        exact=exact,
        output_format=output_format,
        cancelled=cancelled,
        **sampling,
    )
    return execute(call)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """What a stream yields: text that is certain, and the tokens behind it."""

    text: str
    """May be empty while a character or a stop string is incomplete."""
    tokens: tuple[int, ...]
    """What was emitted since the last piece."""
    finish_reason: str | None = None
    """Set on the last piece."""
    origins: tuple[str, ...] = ()
    """Where each of the tokens came from (`jaxdec.counts.origins`); a server's pieces
    do not tell."""


def stream(
    lm: LM, prompt: Any, *, segment: int = 4, **options: Any
) -> Generator[Piece, None, Outputs]:
    """Decodes one prompt and yields text as it becomes certain.

    Pieces are valid UTF-8 and never hold part of a stop string; together they are the
    text that `generate` returns. The value of the generator (what ``yield from`` gives)
    is what `generate` would have returned. It may be closed at any place: nothing that
    was computed is held by the model.

    Args:
        lm: from `jaxdec.load`.
        prompt: as for `generate`.
        segment: steps between two looks at the tokens, 1 to 8.
        **options: as for `generate`.

    Raises:
        ValueError: bad input, when the first piece is asked for.
    """
    if not 1 <= segment <= SEGMENT:
        raise ValueError(f"segment must be 1 to {SEGMENT} steps, got {segment}")
    call = check(lm, prompt, single=True, **options)
    texts = _text_streams(call)
    done = None
    for done in _segments(call, texts, segment):
        if done.pieces[0].text or done.pieces[0].tokens:
            yield done.pieces[0]
        if _is_cancelled(call, done):
            done = _cancelled(done)
            break
    rest = texts[0].finish()
    yield Piece(text=rest, tokens=(), finish_reason=_label(done.finish[0]))
    return _outputs(call, texts, done)


def execute(call: Call) -> Outputs:
    """Runs a checked call to its end."""
    texts = _text_streams(call)
    # Without stop strings nobody needs to look before the end.
    looks = any(call.stop_strings) or call.cancelled is not None
    segment = SEGMENT if looks else call.key.num_slots
    done = None
    for done in _segments(call, texts, segment):
        if _is_cancelled(call, done):
            done = _cancelled(done)
            break
    if call.lm.tokenizer is not None:
        for text in texts:
            text.finish()
    return _outputs(call, texts, done)


def _text_streams(call: Call) -> list[TextStream]:
    return [TextStream(call.lm.tokenizer, strings) for strings in call.stop_strings]


def _outputs(call: Call, texts: list[TextStream], done: "_Segment") -> Outputs:
    items = tuple(
        Generated(
            text=texts[row].text,
            tokens=tuple(done.tokens[row]),
            finish_reason=_label(done.finish[row]),
            stop_token=done.tokens[row][-1]
            if done.finish[row] == FinishReason.STOP_TOKEN
            else None,
            **_logprobs(call, done, row),
        )
        for row in range(len(call.prompts))
    )
    return Outputs(items=items, run=done.run)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Segment:
    """Where a call stands after a segment."""

    pieces: list[Piece]
    tokens: list[list[int]]
    finish: np.ndarray
    run: Run | None


def _segments(call: Call, texts: list[TextStream], segment: int) -> Iterator[_Segment]:
    """Runs a call one segment at a time; the first is one step long."""
    batch = len(call.prompts)
    tokens: list[list[int]] = [[] for _ in range(batch)]
    finish = np.zeros(batch, np.int32)
    if max(call.max_new_tokens) == 0:
        finish[:] = FinishReason.LENGTH
        yield _nothing(call, tokens, finish)
        return
    program, is_new = call.lm.program(call.key)
    compiled = (program.compile_s, program.num_compilations) if is_new else (0.0, 0)
    started = time.perf_counter()
    state = program.prefill(program.params, call.request)
    # Only the model's time counts, not what a reader of a stream does between pieces.
    spent, ttft, num_rounds = 0.0, 0.0, 0
    infos: list[StepInfo] = []
    while np.any(finish == FinishReason.NONE):
        # Copies: the state is about to be donated, and with it what a view would show.
        before = np.array(state.sequences.length)
        state, info, num = program.run(state, segment if infos else 1)
        infos.append(info)
        num_rounds += num
        spent += time.perf_counter() - started
        ttft = ttft or spent
        buffer = np.array(state.sequences.tokens)
        after = np.array(state.sequences.length)
        finish = np.array(state.sequences.finish)
        pieces = []
        for row in range(batch):
            new = buffer[row, before[row] : after[row]].tolist()
            text = ""
            if call.lm.tokenizer is not None:
                reason = FinishReason(int(finish[row]))
                text, num, finish[row] = texts[row].take(new, reason)
                new = new[:num]
            tokens[row].extend(new)
            origins = counts.row_origins(info, row)[: len(new)]
            pieces.append(Piece(text=text, tokens=tuple(new), origins=origins))
        state = state.replace(
            sequences=state.sequences.replace(finish=jax.numpy.asarray(finish))
        )
        yield _Segment(
            pieces=pieces,
            tokens=tokens,
            finish=finish,
            run=Run(
                call=call,
                program=program,
                info=_joined(infos, [len(t) for t in tokens], finish),
                finish=finish,
                compile_s=compiled[0],
                num_compilations=compiled[1],
                ttft_s=ttft,
                e2e_s=spent,
                num_rounds=num_rounds,
            ),
        )
        started = time.perf_counter()


def _is_cancelled(call: Call, done: _Segment) -> bool:
    """Whether the caller gives up what still runs."""
    is_running = bool(np.any(done.finish == FinishReason.NONE))
    return is_running and call.cancelled is not None and bool(call.cancelled())


def _cancelled(done: _Segment) -> _Segment:
    """Where a call stands when nothing more is run."""
    is_running = done.finish == FinishReason.NONE
    finish = np.where(is_running, np.int32(FinishReason.CANCELLED), done.finish)
    return dataclasses.replace(
        done, finish=finish, run=dataclasses.replace(done.run, finish=finish)
    )


def _joined(
    infos: list[StepInfo], num_tokens: list[int], finish: np.ndarray
) -> StepInfo:
    joined = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *infos)
    return counts.cut(
        joined, np.asarray(num_tokens), finish == FinishReason.STOP_STRING
    )


def _nothing(call: Call, tokens, finish) -> _Segment:
    """A call that asks for no tokens: no model runs, and there are no steps."""
    return _Segment(
        pieces=[Piece(text="", tokens=())] * len(tokens),
        tokens=tokens,
        finish=finish,
        run=None,
    )


def _logprobs(call: Call, done: _Segment, row: int) -> dict:
    num = call.key.num_logprobs
    if num is None or done.run is None:
        return {}
    info = done.run.info
    own: list[float] = []
    top: list[tuple] = []
    for step in np.flatnonzero(info.is_live[row]):
        for place in range(info.num_emitted[row, step]):
            own.append(float(info.logprobs[row, step, place]))
            ids = info.top_tokens[row, step, place].tolist()
            values = info.top_logprobs[row, step, place].tolist()
            pairs = zip(ids, values, strict=True)
            top.append(tuple(pair for pair in pairs if pair[1] > -np.inf))
    return {"logprobs": tuple(own), "top_logprobs": tuple(top)}


def _label(finish) -> str:
    return FinishReason(int(finish)).label
