"""Checks what a request asks of sampling, on the host, before any model call.

`SamplingParams` are plain arrays, so that values can change without recompiling. Here
they are made from Python numbers, and here everything that could not be sampled from is
refused, with what to write instead: on device there is no error, only a wrong token.
"""

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdec.types import SamplingParams

_BUCKET_GROWTH = 8


def make_sampling_params(
    batch_size: int,
    *,
    temperature: Any = 0.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    repetition_penalty: Any = 1.0,
    presence_penalty: Any = 0.0,
    frequency_penalty: Any = 0.0,
    no_repeat_ngram: Any = 0,
    min_new_tokens: Any = 0,
    logit_bias: Mapping | Sequence[Mapping | None] | None = None,
    banned_tokens: Sequence = (),
    num_bias_slots: int = 8,
    vocab_size: int | None = None,
) -> SamplingParams:
    """Sampling parameters for `batch_size` rows; the defaults are plain greedy.

    Every argument but the last two is one value for all rows, or a sequence with one
    value per row. `SamplingParams` says what each means.

    >>> params = make_sampling_params(2, temperature=[0.0, 0.7], banned_tokens=[5])
    >>> print(params.temperature, params.num_bias, params.bias_values[:, 0])
    [0.  0.7] [1 1] [-inf -inf]

    Args:
        batch_size: Number of rows B.
        temperature: 0 is greedy.
        top_k: None and 0 are off; at least V keeps all.
        top_p: Between 0 and 1; 0 keeps only the most likely token (and its equals).
        min_p: Between 0 and 1.
        repetition_penalty: Positive.
        presence_penalty: Finite.
        frequency_penalty: Finite.
        no_repeat_ngram: Length n of the n-grams that must not repeat; None is off.
        min_new_tokens: None is off.
        logit_bias: Added to the logits of token ids; -inf bans a token.
        banned_tokens: Token ids to ban: bias -inf.
        num_bias_slots: Room M for biases; grown by factors of 8 until all fit, so
            that the number of shapes to compile for stays small.
        vocab_size: If given, token ids are checked against it.

    Raises:
        ValueError: If a value is out of its range, or a sequence is not `batch_size`
            long.
    """

    def row_values(name: str, value: Any, dtype: type, *, is_ok, wanted: str):
        return jnp.asarray(_rows(name, value, batch_size, dtype, is_ok, wanted))

    def count(name: str, value: Any):
        return row_values(
            name,
            value,
            np.int32,
            is_ok=lambda x: x >= 0,
            wanted="an integer of at least 0 (0 or None is off)",
        )

    def real(name: str, value: Any, is_ok: Callable[[float], bool], wanted: str):
        return row_values(name, value, np.float32, is_ok=is_ok, wanted=wanted)

    bias_tokens, bias_values, num_bias = _bias_slots(
        _per_row("logit_bias", logit_bias, batch_size, Mapping, {}),
        _banned_rows(banned_tokens, batch_size),
        num_bias_slots,
        vocab_size,
    )
    return SamplingParams(
        temperature=real(
            "temperature",
            temperature,
            lambda x: x >= 0,
            "a finite number of at least 0 (0 is greedy)",
        ),
        top_k=count("top_k", top_k),
        top_p=real(
            "top_p", top_p, lambda x: 0 <= x <= 1, "between 0 and 1 (1 keeps all)"
        ),
        min_p=real(
            "min_p", min_p, lambda x: 0 <= x <= 1, "between 0 and 1 (0 keeps all)"
        ),
        repetition_penalty=real(
            "repetition_penalty",
            repetition_penalty,
            lambda x: x > 0,
            "a finite positive number (1 is off)",
        ),
        presence_penalty=real(
            "presence_penalty",
            presence_penalty,
            lambda x: True,
            "a finite number (0 is off)",
        ),
        frequency_penalty=real(
            "frequency_penalty",
            frequency_penalty,
            lambda x: True,
            "a finite number (0 is off)",
        ),
        no_repeat_ngram=count("no_repeat_ngram", no_repeat_ngram),
        min_new_tokens=count("min_new_tokens", min_new_tokens),
        bias_tokens=jnp.asarray(bias_tokens),
        bias_values=jnp.asarray(bias_values),
        num_bias=jnp.asarray(num_bias),
    )


def _rows(name, value, batch_size: int, dtype: type, is_ok, wanted: str) -> np.ndarray:
    """One checked number per row."""
    if value is None or isinstance(value, str) or np.ndim(value) == 0:
        return np.full(batch_size, _number(name, value, dtype, is_ok, wanted), dtype)
    values = list(value)
    if len(values) != batch_size:
        raise ValueError(
            f"{name} must be one value or {batch_size} values (one per row), got "
            f"{len(values)}; pass a single number to use it for all rows."
        )
    return np.array([_number(name, x, dtype, is_ok, wanted) for x in values], dtype)


def _number(name: str, value: Any, dtype: type, is_ok, wanted: str):
    """`value` as `dtype`, or an error that says what to write instead."""
    error = ValueError(f"{name} must be {wanted}, got {value!r}; pass such a number.")
    is_integer = np.issubdtype(dtype, np.integer)
    if value is None and is_integer:
        return 0
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        value = value.item()
    kind = numbers.Integral if is_integer else numbers.Real
    if not isinstance(value, kind) or isinstance(value, bool):
        raise error
    if is_integer:
        if not is_ok(value):
            raise error
        # Beyond int32 "keep the k largest" and its like mean the same as at its end.
        return min(int(value), np.iinfo(dtype).max)
    with np.errstate(over="ignore"):
        number = float(dtype(value))
    if not math.isfinite(number) or not is_ok(number):
        raise error
    return number


def _per_row(name: str, value: Any, batch_size: int, single: type, empty: Any) -> list:
    """One entry per row, from one entry for all of them or a sequence of entries."""
    if value is None or isinstance(value, single):
        return [value or empty] * batch_size
    rows = [row or empty for row in value]
    if len(rows) != batch_size:
        raise ValueError(
            f"{name} must be one entry or {batch_size} entries (one per row), got "
            f"{len(rows)}; pass a single entry to use it for all rows."
        )
    return rows


def _banned_rows(banned_tokens: Any, batch_size: int) -> list:
    """Banned ids of each row, from one list of ids or one list per row."""
    is_one_list = all(np.ndim(token) == 0 for token in banned_tokens)
    if is_one_list:
        return [list(banned_tokens)] * batch_size
    return _per_row("banned_tokens", banned_tokens, batch_size, str, ())


def _bias_slots(
    bias_rows: list, banned_rows: list, num_slots: int, vocab_size: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packs biases and bans of every row into M slots."""
    if num_slots < 1:
        raise ValueError(
            f"num_bias_slots must be at least 1, got {num_slots}; leave it at 8."
        )
    rows = []
    for bias, banned in zip(bias_rows, banned_rows, strict=True):
        merged = {_token(t, vocab_size): _bias(t, v) for t, v in bias.items()}
        merged.update({_token(t, vocab_size): -math.inf for t in banned})
        rows.append(merged)
    while num_slots < max(map(len, rows), default=0):
        num_slots *= _BUCKET_GROWTH
    tokens = np.zeros((len(rows), num_slots), np.int32)
    values = np.zeros((len(rows), num_slots), np.float32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = list(row.keys())
        values[i, : len(row)] = list(row.values())
    return tokens, values, np.array([len(row) for row in rows], np.int32)


def _token(token: Any, vocab_size: int | None) -> int:
    """A checked token id."""
    end = np.iinfo(np.int32).max if vocab_size is None else vocab_size
    if not isinstance(token, numbers.Integral) or not 0 <= token < end:
        raise ValueError(
            f"logit_bias and banned_tokens take token ids in [0, {end}), got "
            f"{token!r}; encode the text with the model's own tokenizer."
        )
    return int(token)


def _bias(token: Any, value: Any) -> float:
    """A checked bias: finite, or -inf for a ban."""
    if isinstance(value, numbers.Real) and value == -math.inf:
        return -math.inf
    return _number(
        f"logit_bias of token {token!r}",
        value,
        np.float32,
        lambda x: True,
        "a finite number, or -inf to ban the token",
    )
