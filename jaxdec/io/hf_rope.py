"""Reads rotary position embeddings, in both spellings that are in circulation.

Older files have ``rope_theta`` beside ``rope_scaling``; newer ones have it all in
``rope_parameters``, for models with several kinds of layers once per kind. A rope type
that is not known is an error: every type is the same at short contexts, so a wrong one
would show only at long ones, as worse text.
"""

from collections.abc import Mapping
from typing import Any

from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.hf_fields import Fields
from jaxdec.models.config import RopeConfig

_SPELLINGS = ("rope_parameters", "rope_scaling")


def read_rope(fields: Fields, longest: int, *, theta: float = 10000.0) -> RopeConfig:
    """The one rotary embedding of a model.

    Args:
        fields: The settings of the model.
        longest: Its longest sequence.
        theta: The default of its class.

    Raises:
        CheckpointError: A type or a setting that is not supported; two that disagree.
    """
    outer = fields.number_or_none("rope_theta")
    found = []
    for key in _SPELLINGS:
        values = _dictionary(fields, key)
        if values is None:
            continue
        if _is_nested(values):
            raise CheckpointError(
                f"{key} gives settings per kind of layer ({', '.join(values)}), which "
                "this model family does not have; give one dictionary of settings."
            )
        found.append(_rope_from(values, outer, longest, theta))
    return _agreed(found) or _rope_from({}, outer, longest, theta)


def read_two_ropes(
    fields: Fields, longest: int, *, theta: float, local_theta: float
) -> tuple[RopeConfig, RopeConfig]:
    """The rotary embeddings of layers with full, and with sliding, attention.

    Args:
        fields: The settings of the model.
        longest: Its longest sequence.
        theta: The default of its class, for full attention.
        local_theta: That for sliding attention.
    """
    outer = fields.number_or_none("rope_theta")
    local = fields.number_or_none("rope_local_base_freq")
    full, sliding = [], []
    for key in _SPELLINGS:
        values = _dictionary(fields, key)
        if values is None:
            continue
        if not _is_nested(values):
            # The older form: scaling is for the layers with full attention.
            full.append(_rope_from(values, outer, longest, theta))
            continue
        kinds = Fields(values, key)
        for kind, own, found, default in (
            ("full_attention", outer, full, theta),
            ("sliding_attention", local, sliding, local_theta),
        ):
            inner = kinds.get(kind, None) or {}
            found.append(_rope_from(inner, own, longest, default))
        kinds.finish()
    return (
        _agreed(full) or _rope_from({}, outer, longest, theta),
        _agreed(sliding) or _rope_from({}, local, longest, local_theta),
    )


def _dictionary(fields: Fields, key: str) -> Mapping[str, Any] | None:
    values = fields.get(key, None)
    if values is not None and not isinstance(values, Mapping):
        raise CheckpointError(
            f"{key} must be a dictionary, got {values!r}; correct config.json."
        )
    return values


def _is_nested(values: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) for value in values.values())


def _agreed(found: list[RopeConfig]) -> RopeConfig | None:
    if len(found) == 2 and found[0] != found[1]:
        raise CheckpointError(
            f"rope_parameters and rope_scaling disagree: {found[0]} against "
            f"{found[1]}; keep one of them."
        )
    return found[0] if found else None


def _rope_from(
    values: Mapping[str, Any], outer: float | None, longest: int, theta: float
) -> RopeConfig:
    """One rotary embedding, from the dictionary of either spelling.

    `outer` is what the file says of theta beside the dictionary.
    """
    fields = Fields(values, "the rope settings")
    kind = fields.get(fields.name_of(("rope_type", "type")), None) or "default"
    inner = fields.number_or_none("rope_theta")
    if inner is not None and outer is not None and inner != outer:
        raise CheckpointError(
            f"rope_theta is {outer} in config.json and {inner} inside its rope "
            "settings; keep one of them."
        )
    found: dict[str, Any] = {"kind": kind}
    found["theta"] = next(x for x in (inner, outer, theta) if x is not None)
    if kind == "linear":
        found["factor"] = fields.number("factor")
    elif kind == "llama3":
        found["factor"] = fields.number("factor")
        found["low_freq_factor"] = fields.number("low_freq_factor")
        found["high_freq_factor"] = fields.number("high_freq_factor")
        found["original_max_positions"] = fields.count(
            "original_max_position_embeddings"
        )
    elif kind == "yarn":
        original = fields.count_or_none(
            "original_max_position_embeddings", default=None
        )
        original = original or longest
        factor = fields.number_or_none("factor")
        found |= {
            "factor": longest / original if factor is None else factor,
            "original_max_positions": original,
            "beta_fast": fields.number_or_none("beta_fast") or 32.0,
            "beta_slow": fields.number_or_none("beta_slow") or 1.0,
            "truncate": fields.flag("truncate", True),
        }
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            found[name] = fields.number_or_none(name)
    elif kind != "default":
        raise CheckpointError(
            f"rope type {kind!r} is not supported; only default, linear, llama3 and "
            "yarn are. Use a release of the model without it, or remove the scaling "
            "and stay within the original context length."
        )
    fields.finish()
    return RopeConfig(**found)
