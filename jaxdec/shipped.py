"""Drafters that come with jaxdec, found by the target that they were trained for.

Each is a folder that `save_drafter` wrote, ``TARGET/STRATEGY``, with the hash of its
target in it. A target that has some gets their strategies by name; weights are read
when one is asked for.
"""

import functools
from pathlib import Path
from typing import Any, NamedTuple

from jaxdec.io.drafters.own import is_own
from jaxdec.io.orbax import load_metadata
from jaxdec.loaded_drafter import LoadedDrafter, Tree, load_drafter
from jaxdec.strategies import StrategyConfig, lookup, resolve
from jaxdec.trained import first_of, trained

_PLACES = ("checkpoints", "../checkpoints")
"""In an installed package, and in the repository."""
_TREES = ("mtp", "eagle3")
"""Strategies whose drafters can draft trees, too."""


class Shipped(NamedTuple):
    """A drafter in a folder."""

    folder: Path
    target: str
    """The content hash of the target that it was trained for."""
    strategy: str
    tokens_per_step: float
    """Of its chain, as its card says."""


def checkpoints() -> Path | None:
    """Where the drafters are; None if there are none."""
    here = Path(__file__).resolve().parent
    places = [(here / place).resolve() for place in _PLACES]
    return next((place for place in places if place.is_dir()), None)


@functools.cache
def shipped(place: Path | None) -> tuple[Shipped, ...]:
    """Every drafter in a folder of them, in order of their names."""
    folders = [] if place is None else sorted(place.glob("*/*"))
    records = [(path, load_metadata(path)) for path in folders if is_own(path)]
    return tuple(
        Shipped(
            folder=path,
            target=record["target"],
            strategy=path.name,
            tokens_per_step=record["card"]["validation"]["tokens_per_step"],
        )
        for path, record in records
    )


def add_shipped(lm: Any, place: Path | None = None) -> None:
    """Makes the strategies of the drafters that fit a model known by name.

    ``first_of`` is lookup, where it has a long match, and else the chain that commits
    most tokens a step.

    Args:
        lm: the target.
        place: a folder of drafters; None is that of the package.
    """
    place = checkpoints() if place is None else place
    ours = [found for found in shipped(place) if found.target == lm.content_hash]
    for found in ours:

        @functools.cache
        def drafter(folder: Path = found.folder) -> LoadedDrafter:
            return load_drafter(folder, lm)

        def chain(drafter=drafter) -> StrategyConfig:
            return trained(drafter())

        def tree(drafter=drafter) -> StrategyConfig:
            return trained(drafter(), tree=Tree())

        lm.strategies[found.strategy] = chain
        if found.strategy in _TREES:
            lm.strategies[f"{found.strategy}_tree"] = tree
    if ours:
        best = max(ours, key=lambda found: found.tokens_per_step)

        def mixture() -> StrategyConfig:
            return first_of(lookup(min_ngram=3), resolve(best.strategy, lm=lm))

        lm.strategies["first_of"] = mixture
