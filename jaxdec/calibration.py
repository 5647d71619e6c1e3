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

    Every prompt is answered with all drafts judged, and both are fitted to what became
    of them. The report is of the same rounds, each told by what was fitted to seven
    eighths of the prompts, its own not among them.

    Args:
        lm: the target.
        drafter: with a confidence head.
        prompts: at least 8, of the kind that will be served.
        max_new_tokens: of each answer.
        temperature: of the answers.
        batch_size: prompts answered together.
        fits_head: False leaves the head as it is, and finds temperatures alone.
        progress: told ``(prompts done, prompts, text)``.

    Returns:
        The drafter with its head and temperatures; and a report: ``temperatures``,
        ``fits_head``, how many ``rounds`` of how many ``prompts``, by depth the quality
        ``before`` (at temperature 1) and ``after``, and the bins of a calibration plot,
        ``plot``.

    Raises:
        ValueError: no confidence head, or too few prompts.
    """
    if not drafter.has_confidence:
        raise ValueError(
            f"the drafter {drafter.name!r} has no confidence head to calibrate; use a "
            "DSpark drafter that has one"
        )
    if len(prompts) < confidence.NUM_FOLDS:
        raise ValueError(
            f"got {len(prompts)} prompts; give at least {confidence.NUM_FOLDS}, each "
            "of which can be told by what was fitted to others"
        )
    plain = dataclasses.replace(
        drafter, config=dataclasses.replace(drafter.config, temperatures=())
    )
    strategy = trained(plain)
    inputs = confidence.HeadInputs(plain.config, plain.own, lm)
    parts: list[confidence.HeadRounds] = []
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
        chosen = request < len(some)
        read = np.zeros((len(request), rounds.odds.shape[1], 0))
        if fits_head:
            read = inputs(*rounds_in(outputs))
        parts.append(
            confidence.HeadRounds(
                inputs=read[chosen],
                rounds=rounds.part(chosen),
                request=request[chosen] + begin,
            )
        )
        if progress is not None:
            progress(begin + len(some), len(prompts), "calibrating")
    found = confidence.joined(parts)
    own, before, apart = plain.own, found.rounds, found.rounds
    if fits_head:
        own, said = _with_head(own, found)
        apart = dataclasses.replace(apart, odds=said)
    temperatures = scaling.fit(apart)
    config = dataclasses.replace(
        drafter.config, temperatures=tuple(temperatures.tolist())
    )
    # What it was read from is not what it is now.
    calibrated = dataclasses.replace(drafter, own=own, config=config, content_hash="")
    after = _scaled_apart(apart, confidence.folds(found.request))
    return calibrated, {
        "temperatures": temperatures.tolist(),
        "fits_head": fits_head,
        "rounds": len(before.odds),
        "prompts": len(prompts),
        "before": [dataclasses.asdict(x) for x in scaling.quality(before)],
        "after": [dataclasses.asdict(x) for x in scaling.quality(after)],
        "plot": scaling.reliability(after),
    }


def _scaled_apart(rounds: scaling.Rounds, part: np.ndarray) -> scaling.Rounds:
    """The rounds of each part, scaled by temperatures that the others gave."""
    odds = np.array(rounds.odds)
    for i in np.unique(part):
        odds[part == i] /= scaling.fit(rounds.part(part != i))
    return dataclasses.replace(rounds, odds=odds)


def rounds_in(outputs: Any) -> tuple[list[list[int]], list[list[int]], np.ndarray]:
    """What `jaxdec.training.confidence.HeadInputs` takes, of a call's rounds.

    Args:
        outputs: of `jaxdec.generate`, with a drafter.

    Returns:
        Sequences, the places of their rounds' anchors, and ``[rounds, K]``, the drafts;
        of all rounds that drafted, in the order of
        `jaxdec.training.calibrate.rounds_of`.
    """
    info = outputs.run.info
    prompts = outputs.run.call.prompts
    is_live, emitted = np.asarray(info.is_live), np.asarray(info.num_emitted)
    drafted = is_live & (np.asarray(info.num_judged) > 0)
    said = np.cumsum(np.where(is_live, emitted, 0), axis=1) - emitted
    sequences, anchors = [], []
    for row, output in enumerate(outputs):
        sequences.append([*prompts[row], *output.tokens])
        anchors.append((len(prompts[row]) - 1 + said[row][drafted[row]]).tolist())
    return sequences, anchors, np.asarray(info.draft_tokens)[drafted]


def _with_head(own: Any, found: confidence.HeadRounds) -> tuple[Any, np.ndarray]:
    """A drafter's arrays with a head for the rounds; what heads said of the others'."""
    head = own["confidence"]["proj"]
    weight = np.asarray(head["weight"], np.float64)[0]
    bias = float(np.asarray(head["bias"])[0])
    weight, bias, apart = confidence.fit(found, weight, bias)
    proj = {
        "weight": jnp.asarray(weight[None], head["weight"].dtype),
        "bias": jnp.asarray([bias], head["bias"].dtype),
    }
    return own | {"confidence": own["confidence"] | {"proj": proj}}, apart
