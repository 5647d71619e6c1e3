"""Settings that the configuration files of EAGLE drafters share, one by one.

What a file leaves open is decided by a rule that is written down in the facts, and can
be overridden by name.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.drafters.words import not_given
from jaxdec.io.hf_config import config_from_hf
from jaxdec.models.config import ModelConfig

DEFAULT_LENGTH = 5
"""Tokens in a row, where nobody says how many."""

IDS = "eagle_aux_hidden_state_layer_ids"
"""Names taps at the top of a file, and outputs of layers inside its eagle_config."""

_EAGLE_CONFIG = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
"""The switches of eagle_config, at the only values that are supported."""


@dataclasses.dataclass(frozen=True)
class File:
    """What there is to read from, tensors apart."""

    values: Mapping[str, Any]
    """The contents of config.json."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of the tensors, under canonical names."""
    target: ModelConfig
    overrides: Mapping[str, Any]
    choices: dict[str, str] = dataclasses.field(default_factory=dict)
    """What was taken where the file leaves something open, in words."""

    def flag(self, name: str, default: bool, *, is_open: bool = False) -> bool:
        """A switch, from the caller or the file; noted where `is_open` and absent."""
        value = self.overrides.get(name, self.values.get(name))
        if value is None:
            if is_open:
                self.choices[name] = not_given(default, override=name)
            return default
        if not isinstance(value, bool):
            raise CheckpointError(
                f"{name!r} must be true or false, got {value!r}; correct it."
            )
        return value

    def count(self, name: str, default: int) -> int:
        """A whole number of at least 1, from the caller or the file."""
        value = self.overrides.get(name, self.values.get(name))
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"{name!r} must be a whole number of at least 1, got {value!r}; "
                "correct it."
            )
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """A dictionary within the file; empty where there is none."""
        value = self.values.get(name)
        value = {} if value is None else value
        if not isinstance(value, Mapping):
            raise CheckpointError(
                f"{name!r} must be a dictionary, got {value!r}; fetch the drafter's "
                "config.json again."
            )
        return value

    def refuse_unknown(self, known: Collection[str]) -> None:
        """Raises for keys that say something and that nobody reads."""
        unknown = {
            name: value
            for name, value in self.values.items()
            if name not in known and not _says_nothing(value)
        }
        if unknown:
            pairs = ", ".join(f"{name}={value!r}" for name, value in unknown.items())
            raise CheckpointError(
                f"the drafter's config.json has settings that this library does not "
                f"know: {pairs}. They might change what the drafter computes, so they "
                "are not ignored; remove those that you know to have no effect."
            )

    def layers(self, values: Mapping[str, Any]) -> ModelConfig:
        """The decoder layers that a Hugging Face configuration describes."""
        try:
            layers = config_from_hf(without(values, ("architectures",)))
        except CheckpointError as error:
            raise CheckpointError(f"the drafter: {error}") from None
        return dataclasses.replace(
            layers,
            family="eagle",
            tie_embeddings=False,
            max_positions=self.count("max_positions", layers.max_positions),
        )

    def taps(self, ids: Any, *, shift: int = 0) -> tuple[int, ...]:
        """The taps that stored ids mean; `shift` is 1 where they name outputs.

        Without ids they are low, middle and high, as EAGLE-3 chose them.
        """
        if "taps" in self.overrides:
            ids, shift = self.overrides["taps"], 0
        if ids is None or ids == []:
            num = self.target.num_layers
            taps = (2, num // 2, num - 3)
            self.choices["taps"] = not_given(
                taps, because="low, middle and high", override="taps"
            )
            return taps
        is_list = isinstance(ids, list | tuple)
        if not is_list or any(type(i) is not int for i in ids):
            raise CheckpointError(
                f"the ids of the target's layers must be a list of whole numbers, got "
                f"{ids!r}; correct the drafter's config.json, or pass taps=[...]."
            )
        return tuple(i + shift for i in ids)

    def specforge_taps(self) -> tuple[int, ...]:
        """Taps from ids inside or outside eagle_config: one name, two meanings."""
        nested = self.mapping("eagle_config")
        strange = {
            name: value
            for name, value in nested.items()
            if name != IDS
            and value is not _EAGLE_CONFIG.get(name)
            and not (name not in _EAGLE_CONFIG and _says_nothing(value))
        }
        if strange:
            pairs = ", ".join(f"{name}={value!r}" for name, value in strange.items())
            raise CheckpointError(
                f"eagle_config has settings that are not supported: {pairs}. They "
                "might change what the drafter computes; use a release without them."
            )
        outside, inside = self.values.get(IDS), nested.get(IDS)
        if outside and inside:
            raise CheckpointError(
                f"{IDS} stands both in config.json ({outside}) and in its eagle_config "
                f"({inside}), where it means something else; keep one of them."
            )
        return self.taps(inside, shift=1) if inside else self.taps(outside)

    def norms(self) -> dict[str, Any]:
        """The switches that EAGLE-3's descendants added."""
        is_whole = self.flag("norm_before_fc", False)
        is_each = self.flag("fc_norm", False)
        if is_whole and is_each:
            raise CheckpointError(
                "norm_before_fc and fc_norm are both true, and exclude one another; "
                "correct the drafter's config.json."
            )
        is_recurrent = self.flag("norm_output", False)
        return {
            "fusion_norm": "all" if is_whole else "each" if is_each else "none",
            "norm_before_residual": self.flag(
                "norm_before_residual", False, is_open=True
            ),
            "output_norm": "recurrent" if is_recurrent else "head",
        }

    def draft_vocab_size(self, layers: ModelConfig) -> int:
        """How many tokens the drafter can say."""
        found = self.shapes.get("lm_head.weight", (layers.vocab_size,))[0]
        if self.values.get("draft_vocab_size") is None:
            self.choices["draft vocabulary"] = not_given(
                found, because="as its head has rows"
            )
        return self.count("draft_vocab_size", found)

    def mask_token(self) -> int:
        """The id that stands for tokens not yet known, under any of its names."""
        candidates = (
            self.overrides.get("mask_token"),
            self.values.get("mask_token_id"),
            self.mapping("dflash_config").get("mask_token_id"),
            self.values.get("pard_token"),
            self.values.get("ptd_token_id"),
        )
        found = next((x for x in candidates if x is not None), None)
        if type(found) is not int or found < 0:
            raise CheckpointError(
                f"a P-EAGLE drafter needs the id of its mask token, got {found!r}; "
                "pass mask_token=..."
            )
        return found

    def draft_length(self, stored: Any, default: int) -> int:
        """How many tokens the authors draft."""
        if type(stored) is int and stored > 0:
            return stored
        self.choices["draft length"] = not_given(default)
        return default


def without(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """A copy that lacks some keys."""
    return {name: value for name, value in values.items() if name not in names}


def _says_nothing(value: Any) -> bool:
    return value is None or value is False or value in ([], {}, "")
