"""Strategies whose drafter was trained for the target, and mixtures of drafters.

Any `LoadedDrafter` is a strategy by `trained`; the methods have names of their own.
A chain or block drafts K tokens in a row; a drafter that goes on from its own tokens
(MTP with one module, EAGLE) can draft a tree; one with a confidence (DSpark) can limit
what is judged. `first_of` takes, per request and step, the first drafter with a draft.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxdec import draft_length
from jaxdec.drafters.first_of import first_of as combine
from jaxdec.io.checkpoint import CheckpointError
from jaxdec.loaded_drafter import LoadedDrafter, Tree, native_drafter
from jaxdec.strategies import (
    Rule,
    StrategyConfig,
    check_length,
    default_widths,
    lookup,
)
from jaxdec.types import DrafterParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedConfig(StrategyConfig):
    """A trained drafter as a strategy; `draft` is a `LoadedDrafter`."""

    tree: Tree | None = None
    """Draft a tree of this shape; None is a chain, or a block."""
    noise: bool = True
    """Whether a tree grows towards what the target will sample."""
    greedy: bool = False
    """Whether a block drafter drafts the likeliest tokens at any temperature."""
    threshold: float | None = None
    """Judge tokens up to the first whose survival is below it; None judges all."""
    threshold_on: str = "survival"
    """"survival", or "slot" for the bare confidence of each token."""
    steps_per_second: tuple[float, ...] = ()
    """Judge what raises tokens per second, given the rate of forwards over 1, 2, ...
    tokens in all (entry 0 is not used); see `draft_length.throughput`."""

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.draft, LoadedDrafter):
            raise ValueError(
                f"{self.name} needs a loaded drafter, got {self.draft!r}; pass "
                "jaxdec.load_drafter(path, lm)"
            )
        if self.tree is not None and self.rule != "match":
            raise ValueError(
                "rejection judges chains that were sampled, and a draft tree is "
                "neither; use rule='match'"
            )
        if self.greedy and self.rule != "match":
            raise ValueError(
                "rejection needs the distribution that drafts are sampled from, and "
                "greedy drafts are not sampled; use rule='match'"
            )
        rates = np.asarray(self.steps_per_second, np.float64)
        if not np.all(np.isfinite(rates) & (rates >= 0)):
            raise ValueError(
                "steps_per_second are rates of forwards over 0, 1, 2, ... tokens, at "
                f"least 0 each, got {self.steps_per_second}"
            )
        is_limited = self.threshold is not None or self.steps_per_second
        if is_limited and not self.draft.has_confidence:
            raise ValueError(
                f"the drafter {self.draft.name!r} ({self.draft.format}) has no "
                "confidence head, so drafts cannot be limited by confidence; leave "
                "threshold and steps_per_second out"
            )
        if self.threshold is not None and self.steps_per_second:
            raise ValueError(
                "give threshold or steps_per_second, not both: each decides how many "
                "draft tokens are judged"
            )
        if self.threshold is not None:
            draft_length.threshold(self.threshold, self.threshold_on)

    def with_length(self, length):
        """The same strategy with another K; of a tree, with other nodes."""
        check_length(length)
        tree = self.tree
        if tree is not None:
            tree = dataclasses.replace(tree, nodes=length)
        widths = default_widths(length) if self.widths else ()
        return dataclasses.replace(self, length=length, tree=tree, widths=widths)

    @property
    def proposal_mode(self) -> str:
        """How drafts are made, in a word."""
        if self.tree is not None:
            return "tree"
        return "block" if self.draft.family == "block" else "chain"

    def check(self, lm):
        """Raises ValueError if the drafter was loaded for another target."""
        self.draft.check_target(lm)

    def build(self, lm, processor, min_rows):
        """The drafter, limited by its confidence where that was asked for."""
        options = dict(processor=processor, cache_dtype=lm.cache_dtype)
        if self.tree is not None:
            drafter = self.draft.tree(self.tree, noise=self.noise, **options)
        else:
            drafter = self.draft.chain(
                self.length,
                coupled=self.rule == "match",
                greedy=self.greedy,
                min_rows=min_rows,
                **options,
            )
        if self.threshold is not None:
            rule = draft_length.threshold(self.threshold, self.threshold_on)
            drafter = draft_length.limited(drafter, rule)
        elif self.steps_per_second:
            rates = jnp.asarray(self.steps_per_second, jnp.float32)
            drafter = draft_length.limited(drafter, draft_length.throughput(rates))
        return drafter, self.draft.params(lm.params)

    def facts(self, lm):
        """What the evidence says of how drafts are made."""
        budget = super().facts(lm)["proposal_budget"]
        if self.threshold is not None:
            budget += f", up to {self.threshold_on} {self.threshold:g}"
        elif self.steps_per_second:
            budget += ", as long as tokens per second rise"
        depth = self.length if self.tree is None else self.tree.depth
        return super().facts(lm) | {
            "proposal_budget": budget,
            "tree_width": 1 if self.tree is None else self.tree.width,
            "tree_depth": depth,
            "num_native_modules": min(self.draft.num_native_modules, self.length),
            "has_confidence": (self.draft.has_confidence,),
            "pairing": {
                "target": lm.content_hash,
                "drafter": self.draft.content_hash,
                "format": self.draft.format,
                "taps": list(getattr(self.draft.config, "taps", ())),
                "own_parameters": self.draft.num_params,
            },
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstOfConfig(StrategyConfig):
    """Several strategies' drafters in order of preference."""

    parts: tuple[StrategyConfig, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        wrong = [p.name for p in self.parts if p.length == 0 or p.rule != "match"]
        if len(self.parts) < 2 or wrong:
            raise ValueError(
                "first_of takes two or more strategies that draft, under the rule "
                f"'match', got {[p.name for p in self.parts]}; give for example "
                "first_of(lookup(6, min_ngram=3), mtp(drafter))"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parts, told apart by a number where they are the same."""
        plain = [part.name for part in self.parts]
        return tuple(
            name if plain.index(name) == i else f"{name} {plain[: i + 1].count(name)}"
            for i, name in enumerate(plain)
        )

    @property
    def members(self):
        """The strategies that this one is made of."""
        return tuple(m for part in self.parts for m in part.members)

    def with_length(self, length):
        """The same strategy with another K for all parts."""
        check_length(length)
        parts = tuple(p.with_length(length) for p in self.parts)
        return dataclasses.replace(
            self, length=length, parts=parts, widths=_joint_widths(parts, length)
        )

    @property
    def proposal_mode(self) -> str:
        """How drafts are made, in a word."""
        return "first of " + ", ".join(p.proposal_mode for p in self.parts)

    def check(self, lm):
        """Raises ValueError if some part cannot draft for this model."""
        for part in self.parts:
            part.check(lm)

    def build(self, lm, processor, min_rows):
        """The combination, and the parts' arrays."""
        built = [p.build(lm, processor, min_rows) for p in self.parts]
        drafters, params = zip(*built, strict=True)
        drafters = [
            d._replace(name=name) for d, name in zip(drafters, self.names, strict=True)
        ]
        return combine(*drafters), DrafterParams(
            own=tuple(p.own for p in params), shared=tuple(p.shared for p in params)
        )

    def facts(self, lm):
        """What the evidence says of how drafts are made."""
        parts = [p.facts(lm) for p in self.parts]
        names = self.names
        return {
            "proposal_mode": self.proposal_mode,
            "proposal_budget": "; ".join(p["proposal_budget"] for p in parts),
            "tree_width": max(p["tree_width"] for p in parts),
            "tree_depth": max(p["tree_depth"] for p in parts),
            "num_native_modules": max(p["num_native_modules"] for p in parts),
            "pairing": dict(zip(names, (p["pairing"] for p in parts), strict=True)),
            "sources": names,
            "has_confidence": tuple(p["has_confidence"][0] for p in parts),
        }


def trained(
    drafter: LoadedDrafter,
    *,
    length: int | None = None,
    rule: Rule = "match",
    tree: Tree | None = None,
    noise: bool = True,
    greedy: bool = False,
    threshold: float | None = None,
    threshold_on: str = "survival",
    steps_per_second: Sequence[float] = (),
    widths: Sequence[int] | None = None,
) -> TrainedConfig:
    """The strategy that drafts with a loaded drafter.

    Args:
        drafter: from `jaxdec.load_drafter`.
        length: K; None is what its authors draft. A tree has its own size.
        rule: ``"match"`` or, for chains and blocks, ``"rejection"``.
        tree: draft a tree of this shape.
        noise: grow trees towards what the target will sample (at temperature 0: no
            difference).
        greedy: block drafters only: draft the likeliest tokens at any temperature.
        threshold: judge tokens up to the first whose survival is below it.
        threshold_on: ``"survival"``, or ``"slot"`` as DeepSpec's files mean it.
        steps_per_second: judge what raises tokens per second, given these rates of
            forwards over 0, 1, 2, ... tokens.
        widths: draft tokens that a target forward may read, increasing up to K; None is
            K alone, or 0, about half, and K where confidence limits drafts.

    Raises:
        ValueError: options that do not fit each other or the drafter.
    """
    if not isinstance(drafter, LoadedDrafter):
        raise ValueError(
            f"a trained strategy needs a loaded drafter, got {drafter!r}; pass "
            "jaxdec.load_drafter(path, lm)"
        )
    if tree is not None:
        if length is not None:
            raise ValueError(
                f"got both length={length} and a tree; a tree's size is its nodes"
            )
        length = tree.nodes
    if length is None:
        length = drafter.draft_length
    if isinstance(steps_per_second, str):
        raise ValueError(
            f"steps_per_second must be numbers, got {steps_per_second!r}; give the "
            "rate of forwards over 0, 1, 2, ... tokens"
        )
    if widths is None:
        is_limited = threshold is not None or len(steps_per_second) > 0
        widths = default_widths(length) if is_limited else ()
    return TrainedConfig(
        name=drafter.kind + ("_tree" if tree is not None else ""),
        length=length,
        rule=rule,
        draft=drafter,
        tree=tree,
        noise=noise,
        greedy=greedy,
        threshold=threshold,
        threshold_on=threshold_on,
        steps_per_second=tuple(steps_per_second),
        widths=tuple(widths),
    )


def mtp(drafter: LoadedDrafter, **options: Any) -> TrainedConfig:
    """Drafts with the target's own multi-token-prediction modules, or published ones.

    DeepSeek-V3, arXiv 2412.19437; MiMo, arXiv 2505.07608.

    Args:
        drafter: of kind ``mtp``.
        **options: of `trained`.

    Raises:
        ValueError: another kind of drafter, or options that do not fit.
    """
    return trained(_of_kind(drafter, "mtp"), **options)


def eagle(drafter: LoadedDrafter, **options: Any) -> TrainedConfig:
    """EAGLE-1, as a chain, or with ``tree=`` EAGLE-2's dynamic tree.

    Li et al., arXiv 2401.15077 and 2406.16858.

    Args:
        drafter: of kind ``eagle``.
        **options: of `trained`.

    Raises:
        ValueError: another kind of drafter, or options that do not fit.
    """
    return trained(_of_kind(drafter, "eagle"), **options)


def eagle3(drafter: LoadedDrafter, **options: Any) -> TrainedConfig:
    """EAGLE-3, as a chain or with ``tree=``; or P-EAGLE, which drafts all at once.

    Li et al., arXiv 2503.01840; P-EAGLE, arXiv 2602.01469.

    Args:
        drafter: of kind ``eagle3`` or ``peagle``.
        **options: of `trained`.

    Raises:
        ValueError: another kind of drafter, or options that do not fit.
    """
    return trained(_of_kind(drafter, "eagle3", "peagle"), **options)


def dflash(drafter: LoadedDrafter, **options: Any) -> TrainedConfig:
    """DFlash: a block of masks filled in one pass (arXiv 2602.06036).

    Args:
        drafter: of kind ``dflash``.
        **options: of `trained`.

    Raises:
        ValueError: another kind of drafter, or options that do not fit.
    """
    return trained(_of_kind(drafter, "dflash"), **options)


def dspark(drafter: LoadedDrafter, **options: Any) -> TrainedConfig:
    """DSpark: a block, a Markov head, and a confidence (arXiv 2607.05147).

    Args:
        drafter: of kind ``dspark``.
        **options: of `trained`; ``threshold=`` and ``steps_per_second=`` let the
            confidence decide how much is judged.

    Raises:
        ValueError: another kind of drafter, or options that do not fit.
    """
    return trained(_of_kind(drafter, "dspark"), **options)


def _of_kind(drafter: LoadedDrafter, *kinds: str) -> LoadedDrafter:
    if isinstance(drafter, LoadedDrafter) and drafter.kind not in kinds:
        raise ValueError(
            f"{drafter.name} is a drafter of kind {drafter.kind!r}, and {kinds[0]} "
            f"takes {' or '.join(kinds)}; use jaxdec.trained, which takes any"
        )
    return drafter


def first_of(*parts: StrategyConfig) -> FirstOfConfig:
    """Per request and step, the first of these strategies that has a draft.

    Raises:
        ValueError: fewer than two, or some that do not draft.
    """
    wrong = [p for p in parts if not isinstance(p, StrategyConfig)]
    if wrong:
        raise ValueError(
            f"first_of takes strategies such as jaxdec.lookup(6), got {wrong[0]!r}"
        )
    length = max((p.length for p in parts), default=0)
    return FirstOfConfig(
        name="first_of",
        length=max(length, 1),
        parts=parts,
        widths=_joint_widths(parts, length),
    )


def _joint_widths(parts: Sequence[StrategyConfig], length: int) -> tuple[int, ...]:
    """All widths of the parts; none where no part has any."""
    widths = {w for p in parts for w in p.widths}
    return tuple(sorted(widths | {0, length})) if widths else ()


def add_drafter(lm: Any, drafter: LoadedDrafter) -> list[str]:
    """Gives a model the strategies of a drafter, by name.

    One of kind ``eagle3`` makes ``eagle3``, ``eagle3_tree``, and ``first_of`` and
    ``first_of_tree`` (lookup, where it has a long match, then the chain or tree).

    Returns:
        The names.

    Raises:
        ValueError: the drafter was loaded for another target.
    """
    drafter.check_target(lm)
    found = strategies_of(drafter)
    for name, config in found.items():
        lm.strategies[name] = config
        lm.notes.pop(name, None)
    return list(found)


def strategies_of(drafter: LoadedDrafter) -> dict[str, StrategyConfig]:
    """What a drafter can be used as, by name; see `add_drafter`."""
    chain = trained(drafter)
    found: list[StrategyConfig] = [chain, first_of(lookup(min_ngram=3), chain)]
    try:
        drafter.tree(Tree())
    except ValueError:
        pass  # It does not go on from its own tokens.
    else:
        found.append(trained(drafter, tree=Tree()))
        mixed = first_of(lookup(min_ngram=3), found[-1])
        found.append(dataclasses.replace(mixed, name="first_of_tree"))
    return {config.name: config for config in found}


def add_native(lm: Any, checkpoint: Any) -> None:
    """Gives a model the strategies of the MTP modules in its own checkpoint.

    Modules that cannot be used do not keep the model from loading; why is remembered,
    and said when the strategy is asked for.
    """
    try:
        drafter = native_drafter(lm, checkpoint)
    except CheckpointError as error:
        lm.notes["mtp"] = str(error)
        return
    if drafter is not None:
        add_drafter(lm, drafter)
        lm.has_native = True
