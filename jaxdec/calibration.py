"""A drafter's confidence made honest: rounds are run, temperatures fitted, told."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxdec.loaded_drafter import LoadedDrafter
from jaxdec.text import generate
from jaxdec.trained import trained
from jaxdec.training import calibrate as scaling

Progress = Callable[[int, int, str], None]


def calibrate(
    lm: Any,
    drafter: LoadedDrafter,
    prompts: Sequence[Any],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> tuple[LoadedDrafter, dict[str, Any]]:
    """Fits temperatures to a drafter's confidence head.

    Every prompt is answered with all drafts judged. Temperatures are found on the
    rounds of every other prompt; the report is of the rounds of the rest.

    Args:
        lm: the target.
        drafter: with a confidence head.
        prompts: at least two, of the kind that will be served.
        max_new_tokens: of each answer.
        temperature: of the answers.
        batch_size: prompts answered together.
        progress: told ``(prompts done, prompts, text)``.

    Returns:
        The drafter with its temperatures; and ``temperatures``, and by depth the
        quality ``before`` and ``after``, and the bins of a calibration plot, ``plot``.

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
    parts: dict[bool, list[scaling.Rounds]] = {True: [], False: []}
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
        for is_fitted in parts:
            chosen = (request + begin) % 2 == (0 if is_fitted else 1)
            parts[is_fitted].append(rounds.part(chosen & (request < len(some))))
        if progress is not None:
            progress(begin + len(some), len(prompts), "calibrating")
    fitted, held = (scaling.joined(parts[x]) for x in (True, False))
    temperatures = scaling.fit(fitted)
    calibrated = dataclasses.replace(
        drafter,
        config=dataclasses.replace(
            drafter.config, temperatures=tuple(temperatures.tolist())
        ),
    )

    def told(values: np.ndarray | None) -> list[dict[str, Any]]:
        return [dataclasses.asdict(x) for x in scaling.quality(held, values)]

    return calibrated, {
        "temperatures": temperatures.tolist(),
        "rounds_fitted": len(fitted.odds),
        "rounds_held_out": len(held.odds),
        "before": told(None),
        "after": told(temperatures),
        "plot": scaling.reliability(held, temperatures),
    }
