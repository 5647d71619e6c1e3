"""From a recipe, a target and a token store to a drafter in a folder.

A folder holds all of a run: checkpoints, ``log.jsonl``, and, once it is finished, the
drafter in ``drafter``, which `jaxdec.load_drafter` reads.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxdec.io.drafters.sharing import owner
from jaxdec.loaded_drafter import (
    LoadedDrafter,
    has_rows_of,
    load_drafter,
    save_drafter,
)
from jaxdec.models.sharding import DATA
from jaxdec.training.features import keep_features
from jaxdec.training.kinds import make_objective
from jaxdec.training.objective import Objective
from jaxdec.training.recipe import Recipe
from jaxdec.training.speed import measure_step
from jaxdec.training.store import TokenStore
from jaxdec.training.trainer import Run, Trained

Progress = Callable[[int, int, str], None]


def train(
    recipe: Recipe,
    lm: Any,
    store: TokenStore,
    folder: str | Path,
    *,
    features: str | Path | None = None,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
    until: int | None = None,
    with_speed: bool = False,
    start: str | Path | None = None,
) -> tuple[LoadedDrafter, Trained]:
    """Trains a drafter, or goes on where an interrupted run ended.

    Args:
        recipe: what and how; `jaxdec.training.recipe`.
        lm: the target.
        store: what it answered.
        folder: of the run.
        features: a folder to keep the target's features in, which are then computed
            once and not at every step; several runs with the same taps share it.
        mesh: devices to split batches over.
        progress: told ``(steps done, steps, text)``.
        until: stop after this many steps, as if interrupted, but with a drafter.
        with_speed: measure the step, for the card.
        start: a drafter to begin with, instead of random weights; of the same network.
            Its vocabulary and the length of its blocks may be others, and a DFlash may
            begin with a DSpark's layers, or a DSpark with a DFlash's.

    Returns:
        The drafter, and what the run came to.

    Raises:
        jaxdec.io.checkpoint.CheckpointError: a folder holds something else.
        ValueError: a recipe that cannot be followed with this target.
    """
    if lm.mesh is not None:
        raise ValueError(
            f"the target {lm.name} is spread over a mesh; load it on one device, and "
            "pass mesh=... here to split batches over devices"
        )
    folder = Path(folder)
    objective = make_objective(recipe, lm, store)
    kept = None
    if features is not None:
        taps = objective.features.kept
        kept = keep_features(features, lm, store, taps, progress=progress)
    begin, earlier = None, []
    if start is not None:
        begin, earlier = _begin(start, objective, lm)
    run = Run(
        objective,
        recipe,
        store,
        folder,
        dtype=lm.dtype,
        target=lm.content_hash,
        features=kept,
        mesh=mesh,
        begin=begin,
    )
    found = run.train(progress, until)
    drafter = as_drafter(objective, found.own, lm, str(folder / "drafter"))
    steps = [line for line in found.log if "loss" in line]
    card = {
        "target": {"name": lm.name, "hash": lm.content_hash},
        "earlier": earlier,
        "recipe": recipe.to_dict(),
        "steps": found.step,
        "minutes": round(sum(line["seconds"] for line in steps) / 60, 2),
        "tokens_read": sum(line["tokens"] for line in steps),
        "answer_tokens": store.num_answer_tokens,
        "sources": np.unique(store.source).tolist(),
        "devices": 1 if mesh is None else mesh.shape.get(DATA, 1),
        "validation": found.validation,
    }
    if with_speed:
        card["speed"] = measure_step(run)
    save_drafter(folder / "drafter", drafter, lm, card=card, overwrite=True)
    drafter.card = card
    return drafter, found


_RUN = ("recipe", "steps", "minutes", "tokens_read")
"""What a card says of one run."""


def _begin(start: str | Path, objective: Objective, lm: Any) -> tuple[Any, list]:
    """The arrays of a drafter that is to be trained on, and the runs that made it.

    Raises:
        ValueError: it is another kind of network than the recipe's.
    """
    drafter = load_drafter(start, lm)
    config, wanted = drafter.config, objective.config
    if drafter.family == "block":
        config = dataclasses.replace(config, temperatures=())
    if drafter.family == objective.family == "block":
        # No array depends on the length of a block, and the layers of a DSpark are a
        # beginning for a DFlash, and the other way round.
        free = ["block_size"]
        if "none" in (wanted.markov, config.markov):
            free += ["sample_from_anchor", "markov", "markov_rank", "confidence"]
        config = dataclasses.replace(config, **{x: getattr(wanted, x) for x in free})
    if "head" in drafter.own and not has_rows_of(lm, drafter.checkpoint):
        raise ValueError(
            f"{start} has an output head of its own, and drafters are trained with the "
            "target's here; train one from nothing"
        )
    # Those rows are not trained, so they may be others.
    is_free = objective.family in ("eagle", "mtp", "block")
    if is_free and drafter.family == objective.family:
        heads = dict(own_head=False, draft_vocab_size=0)
        config, wanted = (dataclasses.replace(c, **heads) for c in (config, wanted))
    if (drafter.family, config) != (objective.family, wanted):
        raise ValueError(
            f"{start} is not the network of this recipe ({drafter.config} against "
            f"{objective.config}); begin with a drafter of the same recipe"
        )
    card = drafter.card
    runs = list(card.get("earlier", ()))
    if "recipe" in card:
        runs.append({key: card[key] for key in _RUN})
    else:  # A published drafter does not say how it was made.
        runs.append({"format": drafter.format, "hash": drafter.content_hash})
    return _with_vocabulary(drafter.own, objective), runs


def _with_vocabulary(own: Any, objective: Objective) -> Any:
    """The arrays of a drafter that is to say the objective's tokens.

    A Markov head has a column for each; of tokens that are new, it says nothing yet.
    """
    if "markov" not in own:
        return own
    out = np.asarray(own["markov"]["out"]["weight"])
    index = np.asarray(objective.frozen["draft_index"])
    # Of the target's tokens, those that it is to say, in order.
    ids = np.flatnonzero(index < len(objective.frozen["teacher"]))
    column = np.arange(len(index))
    if "vocabulary" in own:
        column = np.asarray(own["vocabulary"]["draft_index"])
    column = column[ids]
    is_old = column < out.shape[1]
    wider = np.where(is_old[None], out[:, np.where(is_old, column, 0)], 0)
    return own | {"markov": own["markov"] | {"out": {"weight": jnp.asarray(wider)}}}


def as_drafter(
    objective: Objective, own: Any, lm: Any, name: str = "trained"
) -> LoadedDrafter:
    """What is trained as a drafter that is ready for its target."""
    config = objective.config
    facts = {
        "draft_length": objective.draft_length,
        "head": owner(getattr(config, "own_head", False)),
        "embedding": owner(getattr(config, "own_embedding", False)),
        "taps": list(getattr(config, "taps", ())),
    }
    return LoadedDrafter(
        family=objective.family,
        config=config,
        own=own,
        name=name,
        format="jaxdec",
        facts=facts,
        dtype=lm.dtype,
    )
