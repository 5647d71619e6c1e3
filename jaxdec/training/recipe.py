"""How a drafter is trained: a few numbers, kept with what comes out."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What all kinds share."""

    kind: ClassVar[str] = ""
    steps: int = 2000
    batch_size: int = 16
    """Sequences of a step."""
    seed: int = 0
    optimiser: Literal["muon", "adamw"] = "muon"
    learning_rate: float = 4e-3
    weight_decay: float = 0.01
    warmup: int = 30
    """Steps until the learning rate is reached."""
    hold: float = 0.4
    """Part of the steps after which it begins to fall."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    clip: float = 1.0
    """The largest norm of a gradient."""
    vocabulary: int = 8192
    """Tokens that the drafter is trained to say, the most frequent ones of the data."""
    with_prompts: bool = False
    """Learn what the target expects within prompts, too, past what all begin with.
    They cost no decoding, but teach less than answers: for where those are few."""
    validate_every: int = 200
    num_validation: int = 48
    """Records that validation reads."""
    save_every: int = 100
    num_buckets: int = 6
    """Lengths that sequences are padded to."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, example = getattr(self, field.name), field.default
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if isinstance(example, int | float) and not isinstance(example, bool):
                whole = isinstance(example, int)
                if not is_number or (whole and value != int(value)) or value < 0:
                    raise ValueError(
                        f"{field.name} must be a {'whole ' if whole else ''}number of "
                        f"at least 0, got {value!r}"
                    )
        sizes = ("batch_size", "vocabulary", "num_buckets")
        least_one = ("steps", "save_every", "validate_every", *sizes)
        for name in (*least_one, "num_places"):
            if getattr(self, name, 1) < 1:
                raise ValueError(f"{name} must be at least 1, got 0")
        for name, allowed in (
            ("optimiser", ("muon", "adamw")),
            ("schedule", ("linear", "cosine", "constant")),
            ("confidence_label", ("law", "token")),
        ):
            if getattr(self, name, allowed[0]) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(allowed)}, got "
                    f"{getattr(self, name)!r}"
                )

    def to_dict(self) -> dict[str, Any]:
        """JSON values, the kind among them."""
        return {"kind": self.kind, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacesRecipe(Recipe):
    """What those share that learn at neighbouring places of an answer."""

    num_places: int = 192
    """Of a sequence and a step, so many: where the answer is longer, any part of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Recipe(PlacesRecipe):
    """EAGLE-3, in the format of speculators."""

    kind: ClassVar[str] = "eagle3"
    taps: tuple[int, ...] | None = None
    """None is EAGLE-3's: 2, N // 2, N - 3 of N layers."""
    num_layers: int = 1
    draft_length: int = 4
    """Tokens that it will draft; also the depth of validation."""
    passes: int = 5
    """Unrolled in training; acceptance falls past them."""
    decay: float = 0.9
    """Weight of a pass against the one before."""
    norm_each_tap: bool = True
    norm_before_residual: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class MtpRecipe(PlacesRecipe):
    """One multi-token-prediction module, a layer like the target's."""

    kind: ClassVar[str] = "mtp"
    draft_length: int = 4
    passes: int = 4
    decay: float = 0.8


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockRecipe(Recipe):
    """What DFlash and DSpark share."""

    taps: tuple[int, ...] | None = None
    """None is 2, N // 2, N - 3 of N layers."""
    num_layers: int = 2
    num_kv_heads: int | None = None
    """Of each layer; None is as many as heads. Blocks see the target's features by
    attention alone, so its values are to be as wide as those are."""
    block_size: int = 8
    num_anchors: int = 20
    """Blocks of a sequence."""
    gamma: float = 4.0
    """Slot k of a block counts exp(-k / gamma)."""
    soft: float = 0.0
    """Weight of the cross-entropy with the target's law."""
    hard: float = 0.0
    """Weight of the cross-entropy with the true token."""
    mask_token: int | None = None
    """None is a token that the data never has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DflashRecipe(BlockRecipe):
    """DFlash: masks are filled in place, K is block_size - 1.

    In z-lab's format if it says all of the target's tokens, else in speculators'.
    """

    kind: ClassVar[str] = "dflash"
    soft: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DsparkRecipe(BlockRecipe):
    """DSpark in the format of speculators: anchor first, K is block_size."""

    kind: ClassVar[str] = "dspark"
    hard: float = 0.1
    block_size: int = 7
    distance: float = 0.9
    """Weight of the L1 distance of the laws."""
    confidence: float = 1.0
    confidence_label: Literal["law", "token"] = "law"
    """What confidence learns to foretell. Of a law, as in the paper: that rejection
    accepts. Of a token: that the likeliest draft is the answer's token, all before it
    being so; for the rule ``match``, at the temperatures of the answers."""
    markov: Literal["vanilla", "gated", "rnn"] = "vanilla"
    markov_rank: int = 64
    sees_previous: bool = True
    """Whether the confidence head reads the token before, beside the hidden state."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftRecipe(PlacesRecipe):
    """A small language model made of some of the target's layers."""

    kind: ClassVar[str] = "draft"
    from_layers: tuple[int, ...] = (0, 1, 2)
    """The target's layers that it begins with, in order."""
    draft_length: int = 4


RECIPES: dict[str, type[Recipe]] = {
    recipe.kind: recipe
    for recipe in (DraftRecipe, MtpRecipe, Eagle3Recipe, DflashRecipe, DsparkRecipe)
}


def recipe_from(values: Mapping[str, Any]) -> Recipe:
    """A recipe from JSON values; what is left out has its default.

    Raises:
        ValueError: an unknown kind, an unknown field, or a value of the wrong type.
    """
    values = dict(values)
    kind = values.pop("kind", None)
    if kind not in RECIPES:
        raise ValueError(
            f"a recipe's kind must be one of {', '.join(RECIPES)}, got {kind!r}"
        )
    known = {field.name for field in dataclasses.fields(RECIPES[kind])}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(
            f"a recipe for {kind} has no {', '.join(unknown)}; it has "
            f"{', '.join(sorted(known))}"
        )
    for field in dataclasses.fields(RECIPES[kind]):
        value = values.get(field.name)
        if isinstance(value, list):
            values[field.name] = tuple(value)
        elif type(value) is int and isinstance(field.default, float):
            values[field.name] = float(value)  # JSON need not say 1.0.
    return RECIPES[kind](**values)
