"""A drafter's confidence made honest: it is fitted to rounds, and told of others."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxdec.loaded_drafter import LoadedDrafter
from jaxdec.text import generate
from jaxdec.trained import trained
from jaxdec.training import calibrate as scaling
from jaxdec.training import confidence

Progress = Callable[[int, int, str], None]


def calibrate(
    lm: Any,
    drafter: LoadedDrafter,
    prompts: Sequence[Any],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    batch_size: int = 8,
    fits_head: bool = True,
    progress: Progress | None = None,
) -> tuple[LoadedDrafter, dict[str, Any]]:
    """Fits a drafter's confidence head, and a temperature for each draft token.

    Every prompt is answered with all drafts judged. Both are found on the rounds of
    every other prompt; the report is of the rounds of the rest.

    Args:
        lm: the target.
        drafter: with a confidence head.
        prompts: at least two, of the kind that will be served.
        max_new_tokens: of each answer.
        temperature: of the answers.
        batch_size: prompts answered together.
        fits_head: False leaves the head as it is, and finds temperatures alone.
        progress: told ``(prompts done, prompts, text)``.

    Returns:
        The drafter with its head and temperatures; and ``temperatures``, and by depth
        the quality ``before`` and ``after``, and the bins of a calibration plot,
        ``plot``.

    Raises:
        ValueError: no confidence head, or too few prompts.
    """
    if not drafter.has_confidence:
        raise ValueError(
            f"the drafter {drafter.name!r} has no confidence head to calibrate; use a "
            "DSpark drafter that has one"
        )
    if len(prompts) < 2:
        raise ValueError(
            f"got {len(prompts)} prompts; give at least two, some to fit and some to "
            "check"
        )
    plain = dataclasses.replace(
        drafter, config=dataclasses.replace(drafter.config, temperatures=())
    )
    strategy = trained(plain)
    inputs = confidence.HeadInputs(plain.config, plain.own, lm)
    parts: dict[bool, list[confidence.HeadRounds]] = {True: [], False: []}
    for begin in range(0, len(prompts), batch_size):
        # One program: the last batch is filled up, and what is twice is left out.
        some = list(prompts[begin : begin + batch_size])
        outputs = generate(
            lm,
            [some[i % len(some)] for i in range(batch_size)],
            strategy=strategy,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=list(range(begin, begin + batch_size)),
        )
        rounds, request = scaling.rounds_of(outputs)
        read = inputs(*places(outputs))
        for is_fitted in parts:
            is_mine = (request + begin) % 2 == (0 if is_fitted else 1)
            chosen = is_mine & (request < len(some))
            parts[is_fitted].append(
                confidence.HeadRounds(
                    inputs=read[chosen],
                    rounds=rounds.part(chosen),
                    request=(request[chosen] + begin) // 2,
                )
            )
        if progress is not None:
            progress(begin + len(some), len(prompts), "calibrating")
    fitted, held = (confidence.joined(parts[x]) for x in (True, False))
    own, before, after = plain.own, held.rounds, held.rounds
    known = fitted.rounds
    if fits_head:
        own, said, apart = _with_head(own, fitted, held)
        after = dataclasses.replace(after, odds=said)
        known = dataclasses.replace(known, odds=apart)
    temperatures = scaling.fit(known)
    calibrated = dataclasses.replace(
        drafter,
        own=own,
        config=dataclasses.replace(
            drafter.config, temperatures=tuple(temperatures.tolist())
        ),
    )

    def told(rounds: scaling.Rounds, values: np.ndarray | None) -> list[dict[str, Any]]:
        return [dataclasses.asdict(x) for x in scaling.quality(rounds, values)]

    return calibrated, {
        "temperatures": temperatures.tolist(),
        "fits_head": fits_head,
        "rounds_fitted": len(known.odds),
        "rounds_held_out": len(before.odds),
        "before": told(before, None),
        "after": told(after, temperatures),
        "plot": scaling.reliability(after, temperatures),
    }


def places(outputs: Any) -> tuple[list[list[int]], list[list[int]]]:
    """The sequences of a call, and where their rounds with drafts begin.

    Both in the order of `jaxdec.training.calibrate.rounds_of`.
    """
    info = outputs.run.info
    prompts = outputs.run.call.prompts
    is_live, emitted = np.asarray(info.is_live), np.asarray(info.num_emitted)
    drafted = is_live & (np.asarray(info.num_judged) > 0)
    said = np.cumsum(np.where(is_live, emitted, 0), axis=1) - emitted
    sequences, begins = [], []
    for row, output in enumerate(outputs):
        sequences.append([*prompts[row], *output.tokens])
        begins.append((len(prompts[row]) - 1 + said[row][drafted[row]]).tolist())
    return sequences, begins


def _with_head(
    own: Any, fitted: confidence.HeadRounds, held: confidence.HeadRounds
) -> tuple[Any, np.ndarray, np.ndarray]:
    """A drafter's arrays with a head for the rounds, and its log-odds.

    Of the rounds held out, and, each fitted without it, of those that it was fitted to.
    """
    head = own["confidence"]["proj"]
    weight = np.asarray(head["weight"], np.float64)[0]
    bias = float(np.asarray(head["bias"])[0])
    weight, bias, apart = confidence.fit(fitted, weight, bias)
    proj = {
        "weight": jnp.asarray(weight[None], head["weight"].dtype),
        "bias": jnp.asarray([bias], head["bias"].dtype),
    }
    own = own | {"confidence": own["confidence"] | {"proj": proj}}
    return own, confidence.odds(held.inputs, weight, bias), apart
