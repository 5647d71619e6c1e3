"""A call, checked: what `generate` was asked for, as arrays, before any model runs.

Every fault of the input is found here and said in one sentence: what was wrong, what
was given, what to do. Shapes are rounded up to a few buckets, so that calls of similar
size share one compiled program.
"""

import dataclasses
import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdec.cache import BLOCK, headroom, round_capacity
from jaxdec.decoding import PREFILL_CHUNK
from jaxdec.lm import LM
from jaxdec.program import ProgramKey, bucket, make_request
from jaxdec.rounding import COMMON, EXACT_WIDTH
from jaxdec.sampling import make_sampling_params
from jaxdec.strategies import StrategyConfig, resolve
from jaxdec.types import LogitsProcessor, Request

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or a conversation of role/content messages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A checked call: all that is needed to run it."""

    lm: LM
    config: StrategyConfig
    key: ProgramKey
    request: Request
    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: tuple[int, ...]
    stop_strings: tuple[tuple[str, ...], ...]
    """Of each request."""
    stop_tokens: tuple[tuple[int, ...], ...]
    """Of each request."""
    seeds: tuple[Any, ...]
    sampling: Mapping[str, Any]
    output_format: str | None = None
    cancelled: Callable[[], bool] | None = None


def check(
    lm: LM,
    prompts: Any,
    *,
    strategy: Any = "greedy",
    draft_length: int | None = None,
    max_new_tokens: Any = 128,
    temperature: Any = None,
    seed: Any = 0,
    stop: Any = (),
    stop_tokens: Any = None,
    chat: bool | None = None,
    system: str | None = None,
    logprobs: int | None = None,
    processed_logprobs: bool = False,
    processor: LogitsProcessor | None = None,
    exact: bool | int = False,
    output_format: str | None = None,
    cancelled: Any = None,
    single: bool = False,
    observe: Any = None,
    accept: Any = None,
    capacity: int | None = None,
    num_slots: int | None = None,
    **sampling: Any,
) -> Call:
    """Checks a call of `generate` and turns it into arrays; no model runs.

    `observe` and `accept` go to `jaxdec.decoding.speculative`; `single` takes
    `prompts` as one prompt; `capacity` and `num_slots` ask for larger buffers than the
    call needs, so that calls of different sizes share one program.
    """
    if jax.config.jax_enable_x64:
        raise ValueError(
            "jaxdec decodes in 32 bits, but jax_enable_x64 is on; switch it off"
        )
    _check_options(sampling)
    config = resolve(strategy, draft_length, lm)
    prompts = _host(prompts)
    if not isinstance(prompts, str | list):
        raise ValueError(
            f"no prompts: got {prompts!r}; give text, token ids or messages"
        )
    sampling = {name: _host(value) for name, value in sampling.items()}
    temperature, seed = _host(temperature), _host(seed)
    if output_format not in (None, "json"):
        try:
            re.compile(output_format)
        except (re.error, TypeError) as error:
            raise ValueError(
                f"output_format must be 'json' or a regular expression, got "
                f"{output_format!r} ({error})"
            ) from error
    is_count = isinstance(logprobs, int) and not isinstance(logprobs, bool)
    if logprobs is not None and (not is_count or logprobs < 0):
        raise ValueError(
            f"logprobs must be None or how many likeliest tokens to report, got "
            f"{logprobs!r}"
        )
    if processed_logprobs and logprobs is None:
        raise ValueError(
            "processed_logprobs says which log-probabilities to report, but logprobs "
            "is None; pass logprobs=0 or more"
        )
    if cancelled is not None and not callable(cancelled):
        raise ValueError(
            f"cancelled is asked again and again, so it must be a function, got "
            f"{cancelled!r}; pass for example threading.Event().is_set"
        )
    if exact is not True and (not isinstance(exact, int) or exact < 0):
        raise ValueError(
            f"exact must be True, False or a number of rows, got {exact!r}"
        )
    if single or is_single(prompts):
        prompts = [prompts]
    if len(prompts) == 0:
        raise ValueError("no prompts: got an empty list; give at least one")
    ids = [encode(lm, p, chat, system, row) for row, p in enumerate(prompts)]
    batch = len(ids)
    limits = _per_request("max_new_tokens", max_new_tokens, batch)
    for row, limit in enumerate(limits):
        if not isinstance(limit, int | np.integer) or limit < 0:
            raise ValueError(
                f"max_new_tokens must be a whole number of at least 0, got {limit!r} "
                f"for request {row}"
            )
    longest = max(len(p) + n for p, n in zip(ids, limits, strict=True))
    if longest > lm.config.max_positions:
        row = max(range(batch), key=lambda r: len(ids[r]) + limits[r])
        raise ValueError(
            f"request {row} needs {longest} positions ({len(ids[row])} prompt tokens + "
            f"{limits[row]} new), but the model has {lm.config.max_positions}; shorten "
            "the prompt or lower max_new_tokens"
        )
    stops = [
        _checked_stop_tokens(lm, lm.stop_tokens if row is None else row)
        for row in _lists("stop_tokens", _host(stop_tokens), batch)
    ]
    strings = [
        _checked_stop_strings(lm, row or ()) for row in _lists("stop", stop, batch)
    ]
    if temperature is None:
        temperature = config.default_temperature
    params = make_sampling_params(
        batch,
        temperature=temperature,
        vocab_size=lm.config.vocab_size,
        **sampling,
    )
    _check_greedy(config, temperature)
    exact_width = 0
    if exact:
        exact_width = EXACT_WIDTH if exact is True else int(exact)
        needed = batch * (config.length + 1)
        if needed > exact_width:
            raise ValueError(
                f"exact={exact} covers {exact_width} rows, but {batch} requests x "
                f"{config.length + 1} nodes are {needed}; pass exact={needed} to every "
                "call that is to be compared"
            )
    spare = headroom(PREFILL_CHUNK, config.length + 1, max(exact_width, COMMON))
    most = round_capacity(lm.config.max_positions + spare)
    key = ProgramKey(
        config=config,
        batch_size=batch,
        capacity=max(min(bucket(longest + spare, BLOCK), most), capacity or 0),
        num_slots=max(bucket(max(*limits, 1), 64), num_slots or 0),
        num_stop_slots=bucket(max(map(len, stops)), 4),
        num_bias_slots=params.bias_tokens.shape[1],
        num_logprobs=logprobs,
        processed_logprobs=bool(processed_logprobs),
        processor=processor,
        exact_width=exact_width,
        observe=observe,
        accept=accept,
    )
    seeds = _per_request("seed", seed, batch)
    request = make_request(
        prompts=ids,
        max_new_tokens=[int(n) for n in limits],
        stop_tokens=stops,
        seeds=seeds,
        max_draft_length=config.length,
        sampling=params,
        capacity=key.capacity,
        num_stop_slots=key.num_stop_slots,
    )
    return Call(
        lm=lm,
        config=config,
        key=key,
        request=request,
        prompts=tuple(tuple(p) for p in ids),
        max_new_tokens=tuple(int(n) for n in limits),
        stop_strings=tuple(strings),
        seeds=tuple(seeds),
        stop_tokens=tuple(tuple(row) for row in stops),
        sampling={"temperature": temperature, **sampling},
        output_format=output_format,
        cancelled=cancelled,
    )


def encode(
    lm: LM, prompt: Any, chat: bool | None, system: str | None, row: int
) -> list[int]:
    """Token ids of a prompt.

    Raises:
        ValueError: nothing in it, ids that are no tokens, or text without a tokenizer.
    """
    where = f"request {row}"
    is_messages = (
        isinstance(prompt, Sequence)
        and len(prompt) > 0
        and isinstance(prompt[0], Mapping)
    )
    if not isinstance(prompt, str) and not is_messages:
        ids = _host(prompt)
        ids = list(ids) if isinstance(ids, Sequence) else [ids]
        bad = [t for t in ids if not isinstance(t, int | np.integer)]
        if bad:
            raise ValueError(
                f"{where}: token ids must be whole numbers, got {bad[0]!r}; pass text "
                "as a string"
            )
    elif lm.tokenizer is None:
        raise ValueError(
            f"{where}: the prompt is text, but this model has no tokenizer; pass ids"
        )
    else:
        ids = _encode_text(lm, prompt, chat, system, where)
    if not ids:
        raise ValueError(
            f"{where}: the prompt is empty (no tokens); give at least one token"
        )
    bad = [t for t in ids if not 0 <= int(t) < lm.config.vocab_size]
    if bad:
        raise ValueError(
            f"{where}: token id {bad[0]} is outside the vocabulary of "
            f"{lm.config.vocab_size} tokens (0 to {lm.config.vocab_size - 1})"
        )
    return [int(t) for t in ids]


def _encode_text(lm, prompt, chat, system, where) -> list[int]:
    messages = prompt
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{where}: the prompt is not valid Unicode ({error}); decode it "
                "as UTF-8"
            ) from error
        if not prompt.strip():
            raise ValueError(
                f"{where}: the prompt is empty, got {prompt!r}; give some text"
            )
        use_chat = lm.tokenizer.is_chat if chat is None else chat
        if not use_chat:
            if system is not None:
                raise ValueError(
                    f"{where}: a system message needs a chat model; leave it out, or "
                    "put it into the prompt"
                )
            return lm.tokenizer.encode(prompt)
        messages = [{"role": "user", "content": prompt}]
        if system is not None:
            messages = [{"role": "system", "content": system}, *messages]
    text = lm.tokenizer.apply_chat(messages)
    return lm.tokenizer.encode(text, add_special_tokens=False)


def is_single(prompts: Any) -> bool:
    """Whether a call names one prompt: text, ids, or messages."""
    if isinstance(prompts, str):
        return True
    return len(prompts) > 0 and isinstance(prompts[0], int | np.integer | Mapping)


def _host(value: Any) -> Any:
    """An option in plain Python: arrays, ranges and iterators become lists."""
    if isinstance(value, jax.Array) and jnp.issubdtype(
        value.dtype, jax.dtypes.prng_key
    ):
        return list(value) if value.ndim else value
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return np.asarray(value).tolist()
    if isinstance(value, Mapping | str) or not isinstance(value, Iterable):
        return value
    return [_host(item) for item in value]


def _per_request(name: str, value: Any, batch: int) -> list:
    if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray):
        return [value] * batch
    if len(value) != batch:
        raise ValueError(
            f"{name} has {len(value)} values for {batch} prompts; give one value, or "
            "one per prompt"
        )
    return list(value)


def _lists(name: str, value: Any, batch: int) -> list:
    """One list per request, from one for all of them or one (or None) for each."""
    if value is None or isinstance(value, str) or not isinstance(value, Iterable):
        return [value] * batch
    value = list(value)
    if all(item is not None and _is_scalar(item) for item in value):
        return [value] * batch
    return _per_request(name, value, batch)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str) or not isinstance(value, Iterable)


def _checked_stop_tokens(lm: LM, tokens: Any) -> list[int]:
    tokens = [tokens] if _is_scalar(tokens) else list(tokens)
    for token in tokens:
        if not isinstance(token, int | np.integer):
            raise ValueError(f"stop tokens must be whole numbers, got {token!r}")
        if not 0 <= int(token) < lm.config.vocab_size:
            raise ValueError(
                f"stop token {token} is outside the vocabulary of "
                f"{lm.config.vocab_size} tokens"
            )
    return [int(token) for token in tokens]


def _checked_stop_strings(lm: LM, strings: Any) -> tuple[str, ...]:
    strings = (strings,) if _is_scalar(strings) else tuple(strings)
    if any(not isinstance(s, str) or not s for s in strings):
        raise ValueError(f"stop strings must be non-empty text, got {strings!r}")
    if strings and lm.tokenizer is None:
        raise ValueError("stop strings need a tokenizer, and this model has none")
    return strings


def _check_greedy(config: StrategyConfig, temperature: Any) -> None:
    """Raises ValueError if 'greedy' is to sample; the temperature is a number."""
    if config.name == "greedy" and np.any(np.asarray(temperature) != 0):
        raise ValueError(
            f"strategy 'greedy' is temperature 0, got temperature {temperature!r}; use "
            "strategy 'sample'"
        )


_OF_GENERATE = frozenset(
    """
    strategy draft_length max_new_tokens temperature seed stop stop_tokens chat system
    logprobs processed_logprobs processor exact output_format cancelled
    """.split()
)
"""Options that are no sampling parameters."""
_OF_SAMPLING = frozenset(inspect.signature(make_sampling_params).parameters) - {
    "batch_size",
    "vocab_size",
}


def _check_options(given: Mapping[str, Any]) -> None:
    """Raises ValueError for options that do not exist, and names the likeliest."""
    unknown = [name for name in given if name not in _OF_SAMPLING]
    if not unknown:
        return
    known = sorted(_OF_GENERATE | _OF_SAMPLING)
    near = difflib.get_close_matches(unknown[0], known, n=1)
    raise ValueError(
        f"there is no option {', '.join(map(repr, unknown))}; "
        + (f"did you mean {near[0]!r}? " if near else "")
        + f"There are {', '.join(known)}"
    )
