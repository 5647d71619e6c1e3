"""Quality of outputs, and a distribution test with a guaranteed false-alarm rate.

Quality metrics are functions of token lists and texts; a metric of nothing is None.

The test asks whether emitted tokens follow the plain step's law. Each token x becomes
the randomised probability integral transform ``u = F(x-) + v p(x)``, with F and p of
the plain step's distribution on the same prefix and v uniform and independent. If every
token was drawn from p, the u are independent and uniform on [0, 1], whatever the
prefixes were, so one Kolmogorov-Smirnov test covers all positions. Its threshold comes
from the Dvoretzky-Kiefer-Wolfowitz inequality with Massart's constant (1990),

    P(sup |F_n - F| > t) <= 2 exp(-2 n t^2),

which holds for every n: the stated false-alarm rate is an upper bound, never a hope.
"""

import dataclasses
import json
import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float


def count_repetitions(tokens: Sequence[int], n: int = 4) -> tuple[int, int]:
    """Counts n-grams that occurred before, and all n-grams.

    Args:
        tokens: Output tokens of one request, without its prompt.
        n: Tokens per n-gram, at least 1.

    Returns:
        ``(repeated, total)``; totals of several requests add up.
    """
    if n < 1:
        raise ValueError(f"n-grams need n >= 1, got {n}; pass the default, 4.")
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(grams) - len(set(grams)), len(grams)


def repetition_rate(tokens: Sequence[int], n: int = 4) -> float | None:
    """Fraction of the output's n-grams that occurred in it before.

    Returns:
        In [0, 1); None for outputs shorter than n.

    >>> repetition_rate([1, 2, 1, 2, 1], n=2)
    0.5
    """
    repeated, total = count_repetitions(tokens, n)
    return repeated / total if total else None


REPETITIVE = 0.3
"""An output with a larger fraction of repeated 4-grams goes in circles."""


def is_repetitive(tokens: Sequence[int]) -> bool:
    """Whether an output goes in circles, which makes it easy to draft."""
    return (repetition_rate(tokens) or 0.0) > REPETITIVE


def exact_match(
    outputs: Sequence[Sequence[int]], references: Sequence[Sequence[int]]
) -> float | None:
    """Fraction of outputs that equal their reference token for token.

    Returns:
        In [0, 1]; None without outputs.
    """
    if len(outputs) != len(references):
        raise ValueError(
            f"exact_match compares pairs, got {len(outputs)} outputs and "
            f"{len(references)} references; pass one reference per output."
        )
    equal = [tuple(a) == tuple(b) for a, b in zip(outputs, references, strict=True)]
    return sum(equal) / len(equal) if equal else None


def perplexity(logprobs: Sequence[float] | Float[np.ndarray, "N"]) -> float | None:
    """``exp`` of the mean negative log-probability (nats) of the emitted tokens.

    Returns:
        At least 1, ``inf`` if a token had probability zero; None without tokens.
    """
    values = np.asarray(logprobs, np.float64)
    if values.size == 0:
        return None
    if np.isnan(values).any():
        raise ValueError(
            "perplexity got a NaN log-probability; drop the rows that finished as "
            "'nonfinite' before measuring quality."
        )
    with np.errstate(over="ignore"):
        return float(np.exp(-values.mean()))


def is_json(text: str) -> bool:
    """Whether a text is one JSON value by the standard (NaN and Infinity are not)."""

    def refuse(constant: str):
        raise ValueError(f"{constant} is not JSON")

    try:
        json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True


def is_well_formed(text: str, pattern: str) -> bool:
    """Whether a text is JSON (``"json"``) or matches a regular expression as a whole.

    The whole text must match; write ``(?s).*yes.*`` to look for a part.
    """
    if pattern == "json":
        return is_json(text)
    return re.fullmatch(pattern, text) is not None


def format_success_rate(texts: Sequence[str], pattern: str) -> float | None:
    """Fraction of texts that are in the asked format; see `is_well_formed`.

    Returns:
        In [0, 1]; None without texts.
    """
    passed = [is_well_formed(text, pattern) for text in texts]
    return sum(passed) / len(passed) if passed else None


def distinct_outputs(outputs: Sequence[Sequence[int]]) -> int:
    """How many different token sequences there are among the outputs."""
    return len({tuple(output) for output in outputs})


def pit_values(
    cdf_below: Float[np.ndarray, "N"],
    prob: Float[np.ndarray, "N"],
    uniform: Float[np.ndarray, "N"],
) -> Float[np.ndarray, "N"]:
    """Randomised probability integral transform of emitted tokens.

    Args:
        cdf_below: Probability, under the plain step, of all tokens with a smaller id
            than the emitted one.
        prob: Probability of the emitted token under the plain step. Zero means that
            the token could not be said: `certify` counts those apart.
        uniform: Independent draws from [0, 1), not those that chose the tokens.

    Returns:
        Independent and uniform on [0, 1] if the tokens follow the plain step's law.
    """
    if not (np.isfinite(cdf_below).all() and np.isfinite(prob).all()):
        raise ValueError(
            "pit_values got a probability that is NaN or infinite; replay only "
            "positions whose logits were finite."
        )
    values = np.asarray(cdf_below, np.float64) + np.asarray(uniform) * prob
    # Rounded sums of probabilities may pass 1 by some ulp.
    return np.clip(values, 0.0, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KSResult:
    """Outcome of a Kolmogorov-Smirnov test of uniformity."""

    statistic: float
    """Largest distance between empirical and uniform distribution function."""
    threshold: float
    """The distance that a uniform sample passes with at most `false_alarm_rate`."""
    false_alarm_rate: float
    passed: bool
    n: int


def kolmogorov_smirnov(
    u: Float[np.ndarray, "N"], false_alarm_rate: float = 1e-4
) -> KSResult:
    """Tests whether values are uniform on [0, 1], with a guaranteed false-alarm rate.

    Args:
        u: Values of `pit_values`, independent under the null hypothesis.
        false_alarm_rate: Bound on the probability that a right sample fails.
    """
    if u.size == 0:
        raise ValueError(
            "a distribution test needs at least one token, got none; generate first."
        )
    if not 0 < false_alarm_rate < 1:
        raise ValueError(
            f"false_alarm_rate is a probability, got {false_alarm_rate}; "
            "pass a small one such as 1e-4."
        )
    n = u.size
    ordered = np.sort(np.asarray(u, np.float64))
    above = np.arange(1, n + 1) / n - ordered
    below = ordered - np.arange(n) / n
    statistic = float(max(above.max(), below.max()))
    threshold = float(np.sqrt(np.log(2 / false_alarm_rate) / (2 * n)))
    return KSResult(
        statistic=statistic,
        threshold=threshold,
        false_alarm_rate=false_alarm_rate,
        passed=statistic <= threshold,
        n=n,
    )


def calibration_error(
    confidence: Sequence[Sequence[float]],
    num_judged: Sequence[int],
    num_accepted: Sequence[int],
    num_bins: int = 20,
) -> float | None:
    """Expected calibration error of a drafter's survival estimates.

    The running product of a step's confidences says how likely its first k drafts are
    all accepted. Over all judged places, in bins of equal width: the mean distance
    between what was said and what happened, weighted by places (DeepSpec's measure).

    >>> calibration_error([[0.9, 0.5], [0.9, 0.5]], [2, 1], [1, 0])
    0.4166666666666667

    Args:
        confidence: Of each draft token of each step.
        num_judged: Places of each step that count.
        num_accepted: Drafts that each step accepted.
        num_bins: On [0, 1].

    Returns:
        In [0, 1]; None if nothing was judged.
    """
    said, happened = [], []
    for row, judged, accepted in zip(confidence, num_judged, num_accepted, strict=True):
        said.append(np.cumprod(np.asarray(row, np.float64)[:judged]))
        happened.append(np.arange(judged) < accepted)
    said, happened = np.concatenate(said), np.concatenate(happened)
    # A broken drafter's NaN says nothing, and must not hide what others said.
    happened, said = happened[np.isfinite(said)], said[np.isfinite(said)]
    if not said.size:
        return None
    which = np.minimum((said * num_bins).astype(int), num_bins - 1)
    gaps = [abs(np.sum(said[which == b] - happened[which == b])) for b in set(which)]
    return float(np.sum(gaps) / said.size)
