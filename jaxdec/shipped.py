"""Drafters that come with jaxdec, found by the target that they were trained for.

Each is a folder that `save_drafter` wrote, ``TARGET/STRATEGY``, with the hash of its
target in it. A target that has some gets their strategies by name; weights are read
when one is asked for.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxdec.io.drafters.own import is_own
from jaxdec.io.orbax import load_metadata
from jaxdec.loaded_drafter import load_drafter
from jaxdec.strategies import StrategyConfig
from jaxdec.trained import strategies_of

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
    """Where the drafters are: in the package, or beside it in the repository."""
    package = Path(__file__).resolve().parent
    places = [package / "checkpoints"]
    if (package.parent / "pyproject.toml").is_file():
        places.append(package.parent / "checkpoints")
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
    most tokens a step; ``first_of_tree`` goes on with the best that grows trees.

    Args:
        lm: the target.
        place: a folder of drafters; None is that of the package.
    """
    place = checkpoints() if place is None else place
    ours = [found for found in shipped(place) if found.target == lm.content_hash]
    # The best last: first_of is made with it.
    for found in sorted(ours, key=lambda found: found.tokens_per_step):
        made = functools.cache(functools.partial(_strategies, lm, found.folder))
        for name in (found.strategy, "first_of"):
            lm.strategies[name] = functools.partial(_pick, made, name)
            if found.strategy in _TREES:
                tree = f"{name}_tree"
                lm.strategies[tree] = functools.partial(_pick, made, tree)


def _strategies(lm: Any, folder: Path) -> dict[str, StrategyConfig]:
    return strategies_of(load_drafter(folder, lm))


def _pick(made: Callable[[], dict[str, StrategyConfig]], name: str) -> StrategyConfig:
    return made()[name]
