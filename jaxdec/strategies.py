"""How to decode, as a value: a name and a few numbers, hashable, without arrays.

A configuration builds its drafter for a loaded model. Because it is hashable, a model
keeps the compiled programs of every configuration it has run, and a second call with
the same configuration compiles nothing.

    greedy        plain decoding at temperature 0, the baseline
    sample        plain decoding at the request's temperature (0.7 if none is given)
    lookup        drafts from earlier occurrences of the last tokens
    self_draft    drafts with the target's own first layers
    draft_model   drafts with another, smaller model
"""

import dataclasses
from typing import Any, Literal

from jaxdec import acceptance
from jaxdec.drafters import draft_model as drafting
from jaxdec.drafters import lookup as ngram
from jaxdec.drafters.none import none
from jaxdec.models.decoder import make_model
from jaxdec.types import AcceptFn, Drafter, DrafterParams, LogitsProcessor

Rule = Literal["match", "rejection"]

_RULES = {"match": acceptance.match, "rejection": acceptance.rejection}


def check_length(length: Any, least: int = 1) -> None:
    """Raises ValueError for what is no draft length."""
    is_whole = isinstance(length, int) and not isinstance(length, bool)
    if not is_whole or length < least:
        raise ValueError(
            f"draft length must be a whole number of at least 1, got {length!r}; for "
            "plain decoding use 'greedy' or 'sample'"
        )


def default_widths(length: int) -> tuple[int, ...]:
    """Draft tokens that forwards read where not all K need be judged."""
    return tuple(sorted({0, length // 2, length}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """What all strategies share. `length` is K, the draft tokens a step at most."""

    name: str
    """What reports and `LM.strategies` call it."""
    length: int = 0
    rule: Rule = "match"
    """How drafts are judged; see `jaxdec.acceptance`."""
    draft: Any = None
    """The draft model, a loaded `LM`, or the `LoadedDrafter`, where there is one;
    compared by identity."""
    widths: tuple[int, ...] = ()
    """Draft tokens that a target forward may read; see `decoding.speculative`."""

    def __post_init__(self):
        if self.rule not in _RULES:
            raise ValueError(
                f"acceptance rule {self.rule!r} is unknown; use 'match' (any draft, "
                "the default) or 'rejection' (drafts sampled from a draft model)"
            )
        check_length(self.length, 1 if type(self) is not StrategyConfig else 0)

    @property
    def members(self) -> tuple["StrategyConfig", ...]:
        """The strategies that this one is made of: itself, unless it mixes several."""
        return (self,)

    def with_length(self, length: int) -> "StrategyConfig":
        """The same strategy with another K."""
        widths = default_widths(length) if self.widths else ()
        return dataclasses.replace(self, length=length, widths=widths)

    @property
    def accept(self) -> AcceptFn:
        """The acceptance rule."""
        return _RULES[self.rule]

    @property
    def drafts_at_once(self) -> bool:
        """Whether a shorter draft takes as long to make as a whole one."""
        if len(self.members) > 1:
            return all(member.drafts_at_once for member in self.members)
        return getattr(self.draft, "drafts_at_once", False)

    @property
    def is_tree(self) -> bool:
        """Whether drafts branch, or those of a member do."""
        return any(part.proposal_mode == "tree" for part in self.members)

    @property
    def default_temperature(self) -> float:
        """What applies when a call names no temperature."""
        return 0.7 if self.name == "sample" else 0.0

    def with_widths(self) -> "StrategyConfig":
        """The same strategy, where judging fewer draft tokens costs less.

        Its forwards read none, half, or all of K; what is shorter is padded. One that
        has widths keeps them.
        """
        if self.widths or self.length == 0:
            return self
        return dataclasses.replace(self, widths=default_widths(self.length))

    def check(self, lm: Any) -> None:
        """Raises ValueError if it cannot draft for this model."""
        del lm

    def build(
        self, lm: Any, processor: LogitsProcessor | None, min_rows: int
    ) -> tuple[Drafter, DrafterParams]:
        """The drafter for a loaded model, and its arrays.

        Args:
            lm: the target.
            processor: the request's custom processor, so that drafts follow it too.
            min_rows: rows that a draft model's forwards are padded to; see
                `jaxdec.types.Model.min_rows`.
        """
        del lm, processor, min_rows
        return none(), DrafterParams(own=(), shared=())

    def facts(self, lm: Any) -> dict[str, Any]:
        """What the evidence says of how drafts are made; `RunFacts` of that name."""
        has_draft = self.length > 0
        own = self.draft is not None
        return {
            "proposal_mode": self.proposal_mode,
            "proposal_budget": f"{self.length} draft tokens a step"
            if has_draft
            else "no draft tokens",
            "tree_width": int(has_draft),
            "tree_depth": self.length,
            "num_native_modules": 0,
            "pairing": {
                "target": lm.content_hash,
                "drafter": self.draft.content_hash if own else self.name,
            },
            "sources": (self.name,),
            "has_confidence": (False,),
        }

    @property
    def proposal_mode(self) -> str:
        """How drafts are made, in a word."""
        return "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookupConfig(StrategyConfig):
    """Prompt lookup; see `jaxdec.drafters.lookup`."""

    min_ngram: int = 1
    max_ngram: int = 4

    @property
    def proposal_mode(self) -> str:
        """How drafts are made, in a word."""
        return "lookup"

    @property
    def drafts_at_once(self) -> bool:
        """It finds one token or many in the same time."""
        return True

    def __post_init__(self):
        super().__post_init__()
        if self.rule != "match":
            raise ValueError(
                "rejection needs draft.log_probs, but the drafter 'lookup' proposes a "
                "point mass; use rule='match'"
            )
        ngram.lookup(self.length, min_ngram=self.min_ngram, max_ngram=self.max_ngram)

    def build(self, lm, processor, min_rows):
        """The n-gram drafter; it has no arrays."""
        del lm, processor, min_rows
        drafter = ngram.lookup(
            self.length, min_ngram=self.min_ngram, max_ngram=self.max_ngram
        )
        return drafter, DrafterParams(own=(), shared=())


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfDraftConfig(StrategyConfig):
    """The target's own first layers as draft model, sharing its arrays."""

    num_layers: int = 6

    @property
    def proposal_mode(self) -> str:
        """How drafts are made, in a word."""
        return "chain"

    def check(self, lm):
        """Raises ValueError if the model has fewer layers."""
        if not 1 <= self.num_layers <= lm.config.num_layers:
            raise ValueError(
                f"self_draft asks for {self.num_layers} layers, but the model has "
                f"{lm.config.num_layers}; give 1 to {lm.config.num_layers}"
            )

    def build(self, lm, processor, min_rows):
        """A draft model of the first layers; nothing is copied."""
        drafter = _drafter_of(self, lm, processor, min_rows, self.num_layers)
        drafter = drafter._replace(name="self_draft")
        return drafter, DrafterParams(own=None, shared=lm.params)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModelConfig(StrategyConfig):
    """Another causal LM with the same tokenizer as draft model."""

    @property
    def proposal_mode(self) -> str:
        """How drafts are made, in a word."""
        return "chain"

    def __post_init__(self):
        super().__post_init__()
        if self.draft is None or isinstance(self.draft, str):
            raise ValueError(
                f"draft_model needs a loaded model, got {self.draft!r}; pass "
                "draft_model(jaxdec.load(...))"
            )

    def check(self, lm):
        """Raises ValueError if the draft model does not speak the target's tokens."""
        draft = self.draft
        if lm.tokenizer is not None and draft.tokenizer is not None:
            difference = lm.tokenizer.compatible(draft.tokenizer)
            if difference is not None:
                raise ValueError(
                    f"draft model and target have different tokenizers: {difference}; "
                    "use a draft model with the target's tokenizer"
                )
        if draft.config.vocab_size != lm.config.vocab_size:
            raise ValueError(
                f"the draft model has {draft.config.vocab_size} tokens and the target "
                f"{lm.config.vocab_size}; use a draft model with the same vocabulary"
            )

    def build(self, lm, processor, min_rows):
        """The draft model."""
        del lm
        drafter = _drafter_of(self, self.draft, processor, min_rows)
        return drafter, DrafterParams(own=self.draft.params, shared=())


def _drafter_of(
    config: StrategyConfig,
    lm: Any,
    processor: LogitsProcessor | None,
    min_rows: int,
    num_layers: int | None = None,
) -> Drafter:
    """A loaded model, or its first layers, as drafter under the rule of `config`."""
    model = make_model(
        lm.config,
        dtype=lm.dtype,
        cache_dtype=lm.cache_dtype,
        min_rows=min_rows,
        num_layers=num_layers,
    )
    return drafting.draft_model(
        model, config.length, coupled=config.rule == "match", processor=processor
    )


def greedy() -> StrategyConfig:
    """Plain decoding at temperature 0."""
    return StrategyConfig(name="greedy")


def sample() -> StrategyConfig:
    """Plain decoding at the request's temperature."""
    return StrategyConfig(name="sample")


def lookup(length: int = 6, *, min_ngram: int = 1, max_ngram: int = 4) -> LookupConfig:
    """Drafts what followed the last tokens earlier on; `jaxdec.drafters.lookup`.

    Args:
        length: K, draft tokens a step.
        min_ngram: tokens that must stand again before anything is drafted.
        max_ngram: tokens that are compared; the longest match wins.

    Raises:
        ValueError: a length below 1, or no ``1 <= min_ngram <= max_ngram``.
    """
    return LookupConfig(
        name="lookup", length=length, min_ngram=min_ngram, max_ngram=max_ngram
    )


def self_draft(
    num_layers: int = 6, *, length: int = 4, rule: Rule = "match"
) -> SelfDraftConfig:
    """Drafts with the target's first `num_layers` layers, its norm and its head.

    Args:
        num_layers: at most as many as the target has; checked when it is loaded.
        length: K, draft tokens a step.
        rule: ``"match"``, or ``"rejection"``, which accepts more at a temperature.

    Raises:
        ValueError: a length below 1, or an unknown rule.
    """
    return SelfDraftConfig(
        name="self_draft", length=length, rule=rule, num_layers=num_layers
    )


def draft_model(
    draft: Any, *, length: int = 4, rule: Rule = "match"
) -> DraftModelConfig:
    """Drafts with another loaded model of the same tokenizer.

    Speculative decoding as in Leviathan et al., arXiv 2211.17192, and Chen et al.,
    arXiv 2302.01318.

    Args:
        draft: from `jaxdec.load`; smaller than the target.
        length: K, draft tokens a step.
        rule: ``"match"``, or ``"rejection"``, which accepts more at a temperature.

    Raises:
        ValueError: no loaded model, a length below 1, or an unknown rule. That the
            tokenizers agree is checked when the strategy is used.
    """
    return DraftModelConfig(name="draft_model", length=length, rule=rule, draft=draft)


BY_NAME = {
    "greedy": greedy,
    "sample": sample,
    "lookup": lookup,
    "self_draft": self_draft,
}
"""Strategies that need no further model, by name."""


TRAINED = ("mtp", "eagle", "eagle3", "peagle", "dflash", "dspark")
"""Strategies whose drafter is trained for a target; see `jaxdec.trained`."""


def check_name(strategy: str, lm: Any = None) -> None:
    """Raises ValueError for a name that stands for nothing.

    Without a model, names that one might have are let pass.
    """
    own = () if lm is None else lm.strategies
    if strategy in BY_NAME or strategy in own:
        return
    wants_drafter = strategy.removesuffix("_tree") in (*TRAINED, "first_of")
    if lm is None and (wants_drafter or strategy == "draft_model"):
        return
    if strategy == "draft_model":
        raise ValueError(
            "strategy 'draft_model' needs a model, and its name gives none; pass "
            "jaxdec.draft_model(other_lm), or --draft-model MODEL"
        )
    if wants_drafter:
        # What keeps the modules from drafting keeps whatever is made of them.
        own = lm.notes.get(strategy.removesuffix("_tree"))
        reason = lm.notes.get("mtp") if strategy.startswith("first_of") else own
        raise ValueError(
            f"strategy {strategy!r} needs a drafter, and {lm.name} has none for it"
            + ("" if reason is None else f" ({reason})")
            + "; pass jaxdec.trained(jaxdec.load_drafter(path, lm)), or --drafter PATH"
        )
    more = ("mtp_tree", "eagle_tree", "eagle3_tree", "first_of", "first_of_tree")
    others = [n for n in (*TRAINED, *more) if n not in own]
    raise ValueError(
        f"unknown strategy {strategy!r}; use one of {', '.join([*BY_NAME, *own])}"
        + (f"; with --drafter PATH, {', '.join(others)}" if others else "")
        + ("" if "draft_model" in own else "; with --draft-model MODEL, draft_model")
    )


def resolve(
    strategy: str | StrategyConfig, draft_length: int | None = None, lm: Any = None
) -> StrategyConfig:
    """The configuration that a name stands for.

    Args:
        strategy: a name, or a configuration (returned as it is).
        draft_length: K instead of the default.
        lm: the target, whose own strategies have names too (`LM.strategies`).

    Raises:
        ValueError: an unknown name, a drafter for another target, or a draft length
            for a strategy without drafts.
    """
    if isinstance(strategy, str):
        check_name(strategy, lm)
        found = BY_NAME.get(strategy)
        strategy = _of_model(lm, strategy) if found is None else found()
    elif not isinstance(strategy, StrategyConfig):
        raise ValueError(
            f"a strategy is a name or a configuration such as jaxdec.lookup(length=6), "
            f"got {strategy!r}"
        )
    if lm is not None:
        strategy.check(lm)
    if draft_length is None:
        return strategy
    if strategy.length == 0:
        raise ValueError(
            f"strategy {strategy.name!r} drafts nothing, so draft_length "
            f"{draft_length} has no meaning; leave it out"
        )
    return strategy.with_length(draft_length)


def _of_model(lm: Any, name: str) -> StrategyConfig:
    """A strategy of the model's own, made now if it was not asked for before."""
    found = lm.strategies[name]
    if not isinstance(found, StrategyConfig):
        found = lm.strategies[name] = found()
    return found
