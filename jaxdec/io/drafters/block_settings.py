"""Fields of a block drafter's configuration, and its layers, whoever wrote it.

A reader takes the fields of its own format out of ``config.json``. What is left
describes the layers, and is read like the configuration of a Qwen3 decoder; a key that
nobody knows is an error there.
"""

from collections.abc import Mapping
from typing import Any

from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.hf_config import config_from_hf
from jaxdec.models.config import ModelConfig

_REQUIRED = object()


class Settings:
    """The fields of a configuration, taken out one by one."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.left = dict(values)
        self.where = where

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """Takes a field out; None counts as absent."""
        value = self.left.pop(name, None)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise CheckpointError(
                f"{self.where} has no {name!r}, without which a block drafter cannot "
                "run; add it, with the value that it was trained with"
            )
        return default

    def count(self, name: str, default: Any = _REQUIRED, least: int = 1) -> int:
        """Takes out a whole number."""
        value = self.take(name, default)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or value < least:
            raise CheckpointError(
                f"{self.where}: {name!r} must be a whole number of at least {least}, "
                f"got {value!r}; correct it"
            )
        return value

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        """Takes out a truth value."""
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(
                f"{self.where}: {name!r} must be true or false, got {value!r}; correct "
                "it"
            )
        return value

    def ids(self, name: str, default: Any = _REQUIRED) -> tuple[int, ...]:
        """Takes out a list of whole numbers."""
        value = self.take(name, default)
        is_list = isinstance(value, list | tuple) and len(value) > 0
        if not is_list or any(type(x) is not int for x in value):
            raise CheckpointError(
                f"{self.where}: {name!r} must be a list of layer numbers, got "
                f"{value!r}; correct it"
            )
        return tuple(value)

    def drop(self, *names: str) -> None:
        """Takes out fields that say nothing about the network."""
        for name in names:
            self.left.pop(name, None)

    def must_be(self, name: str, *allowed: Any) -> None:
        """Takes out a field that has to have one of these values, or be absent."""
        value = self.take(name, None)
        if value is not None and value not in allowed:
            raise CheckpointError(
                f"{self.where} has {name}={value!r}, a variant that is not supported "
                f"(only {', '.join(map(repr, allowed))}); use another drafter"
            )


def read_layers(
    fields: Settings, choices: dict[str, str]
) -> tuple[ModelConfig, tuple[int | None, ...]]:
    """The drafter's layers, read as a Qwen3 decoder, and their windows."""
    kinds = fields.take("layer_types", None)
    window = fields.take("sliding_window", None)
    is_on = fields.take("use_sliding_window", fields.left.get("model_type") == "llama")
    first = fields.take("max_window_layers", 28)
    num = fields.left.get("num_hidden_layers")
    for name in ("rope_parameters", "rope_scaling"):
        settings = fields.left.get(name)
        if isinstance(settings, Mapping):
            fields.left[name] = _one_rope(settings, choices)
    plain = {"model_type": "qwen3", "tie_word_embeddings": False}
    fields.drop("architectures")
    layers = config_from_hf(fields.left | plain)
    known = ("full_attention", "sliding_attention")
    if kinds is None:
        slides = [bool(is_on) and window is not None and i >= first for i in range(num)]
    elif len(kinds) != num or any(kind not in known for kind in kinds):
        raise CheckpointError(
            f"layer_types must give one of {' and '.join(known)} for each of {num} "
            f"layers, got {kinds!r}; correct it"
        )
    else:
        slides = [kind == "sliding_attention" for kind in kinds]
    if any(slides) and (window is None or not is_on):
        raise CheckpointError(
            f"layer_types name sliding layers, but sliding_window is {window!r} and "
            f"use_sliding_window {is_on!r}; set both, or make the layers full_attention"
        )
    return layers, tuple(window if slide else None for slide in slides)


def _one_rope(settings: Mapping[str, Any], choices: dict[str, str]) -> Any:
    """One rotation, where settings are given per kind of layer."""
    nested = [k for k, v in settings.items() if isinstance(v, Mapping)]
    if not nested:
        return settings
    kind = "sliding_attention" if "sliding_attention" in nested else nested[0]
    choices["rope"] = f"given for each kind of layer; that of {kind} is taken for all"
    return settings[kind]


def nothing_left(fields: Settings) -> None:
    """Raises for fields that nobody took and that say something."""
    unknown = {
        name: value
        for name, value in fields.left.items()
        if value is not None and value is not False and value not in ([], {}, "")
    }
    if unknown:
        pairs = ", ".join(f"{name}={value!r}" for name, value in unknown.items())
        raise CheckpointError(
            f"{fields.where} has settings that this library does not know: {pairs}. "
            "They might change what the drafter computes, so they are not ignored; "
            "remove those that you know to have no effect"
        )
