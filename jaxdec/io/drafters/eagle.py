"""Reads EAGLE drafters: EAGLE-1/2, EAGLE-3 and its variants, P-EAGLE.

A drafter fits one target, and almost every way of pairing them wrongly still runs and
only drafts badly. So whatever can be compared is compared here: widths, taps, ids, the
map between the vocabularies. Tensors are compared as a whole with what the
configuration needs.
"""

import re
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxdec.io.checkpoint import CheckpointError, check_finite, shapes_of
from jaxdec.io.drafters.checkpoint import DrafterCheckpoint
from jaxdec.io.drafters.eagle_formats import find_format
from jaxdec.io.drafters.eagle_settings import File
from jaxdec.io.drafters.words import attention, owner
from jaxdec.models.config import ModelConfig
from jaxdec.models.eagle_config import EagleConfig
from jaxdec.models.eagle_weights import expected_eagle_tensors
from jaxdec.models.vocabulary import target_ids_of

_IGNORED = re.compile(r"verifier_.*|(.*\.)?rotary_emb\.inv_freq")
"""Copies of the target's that only training needs; tables that the settings determine.
"""

_FLOATS = (np.float16, np.float32, np.float64, ml_dtypes.bfloat16)


def recognise(
    values: Mapping[str, Any], names_and_shapes: Mapping[str, tuple[int, ...]]
) -> str | None:
    """The format of a checkpoint, in words; None if it is no EAGLE drafter.

    Args:
        values: the contents of config.json.
        names_and_shapes: of the tensors, as they are called in the file.
    """
    names = _canonical_names(names_and_shapes)
    shapes = {new: tuple(names_and_shapes[old]) for new, old in names.items()}
    found = find_format(values, shapes)
    return None if found is None else found.name


def read_eagle(
    values: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    target: ModelConfig,
    overrides: Mapping[str, Any] | None = None,
) -> DrafterCheckpoint:
    """Reads a drafter for a target.

    Args:
        values: the contents of config.json.
        tensors: by the names in the file.
        target: what it is to draft for.
        overrides: settings to use in place of what the file says, or leaves out.

    Raises:
        CheckpointError: it is no EAGLE drafter, has a setting that is not supported,
            does not fit the target, or its tensors are not what its settings need.
    """
    overrides = dict(overrides or {})
    stored = shapes_of(tensors)
    names = _canonical_names(stored)
    shapes = {new: stored[old] for new, old in names.items()}
    found = find_format(values, shapes)
    if found is None:
        raise CheckpointError(
            "this is no EAGLE drafter: neither its config.json nor its tensors are of "
            "a known format; load it as what it is."
        )
    unknown = [name for name in overrides if name not in found.overrides]
    if unknown:
        raise CheckpointError(
            f"a drafter of format {found.name} has no settings {', '.join(unknown)} to "
            f"override; it has {', '.join(found.overrides)}."
        )
    file = File(values, shapes, target, overrides)
    config = found.read(file)
    _check_pairing(config, target)
    tensors = {new: np.asarray(tensors[old]) for new, old in names.items()}
    check_finite({names[k]: x for k, x in tensors.items() if x.dtype in _FLOATS})
    t2d = tensors.pop("t2d", None)
    if not config.is_reduced:
        _check_whole(tensors.pop("d2t", None))
    if "mask_hidden" in tensors:
        tensors["mask_hidden"] = tensors["mask_hidden"].reshape(-1)
    _check_tensors(config, tensors, names)
    if config.is_reduced:
        _check_map(tensors["d2t"], t2d, config.layers.vocab_size)
    return DrafterCheckpoint(
        family="eagle",
        config=config,
        tensors=tensors,
        format=found.name,
        facts=_facts(config, file.choices),
    )


def _canonical_names(names) -> dict[str, str]:
    """Maps canonical names to those in the file; what nothing reads is left out."""
    canonical: dict[str, str] = {}
    for name in names:
        new = name.removeprefix("model.")
        if new.startswith("midlayer."):
            new = "layers.0." + new.removeprefix("midlayer.")
        if _IGNORED.fullmatch(new):
            continue
        if new in canonical:
            raise CheckpointError(
                f"tensors {canonical[new]!r} and {name!r} are both {new!r}; remove one "
                "of them from the drafter's file."
            )
        canonical[new] = name
    return canonical


def _check_pairing(config: EagleConfig, target: ModelConfig) -> None:
    """What settings alone can say about whether drafter and target fit."""
    layers = config.layers
    if layers.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"the drafter is for a vocabulary of {layers.vocab_size} tokens and the "
            f"target has {target.vocab_size}; load the target that it was trained for."
        )
    if config.target_hidden_size != target.hidden_size:
        raise CheckpointError(
            f"the drafter reads hidden states of width {config.target_hidden_size} and "
            f"the target's are {target.hidden_size} wide; load the target that it was "
            "trained for."
        )
    last = target.num_layers + (1 if config.fusion == "embedding" else 0)
    bad = [tap for tap in config.taps if not 0 <= tap <= last]
    if bad:
        raise CheckpointError(
            f"the drafter reads taps {list(config.taps)} and the target has taps 0 to "
            f"{target.num_layers}, so {bad} are out of range (tap t enters layer t; an "
            "id that names the output of layer k is tap k + 1); load the target that "
            "it was trained for, or pass taps=[...]."
        )
    if not 1 <= config.draft_vocab_size <= layers.vocab_size:
        raise CheckpointError(
            f"draft_vocab_size is {config.draft_vocab_size} and the target has "
            f"{layers.vocab_size} tokens; correct the drafter's config.json."
        )
    if config.is_parallel and config.mask_token >= layers.vocab_size:
        raise CheckpointError(
            f"the mask token {config.mask_token} is outside the embedding's "
            f"{layers.vocab_size} rows; pass mask_token=... with the right id."
        )
    has_target_width = layers.hidden_size == target.hidden_size
    lacks = [
        name
        for name, own in (
            ("embedding", config.own_embedding),
            ("head", config.own_head),
        )
        if not own and not has_target_width
    ]
    if lacks:
        raise CheckpointError(
            f"the drafter has no {' and no '.join(lacks)} of its own, and is "
            f"{layers.hidden_size} wide where the target is {target.hidden_size}; "
            "fetch the whole release of the drafter."
        )


def _check_whole(d2t: np.ndarray | None) -> None:
    """A map between equal vocabularies may be there, if it changes nothing."""
    if d2t is not None and np.any(d2t):
        raise CheckpointError(
            "d2t maps tokens to others, though the drafter's vocabulary is as large as "
            "the target's; correct draft_vocab_size, or remove d2t."
        )


def _check_map(d2t: np.ndarray, t2d: np.ndarray | None, vocab_size: int) -> None:
    """The map of a reduced vocabulary: offsets that agree with the mask."""
    if d2t.dtype.kind not in "iu":
        raise CheckpointError(
            f"d2t holds {d2t.dtype}, and must hold whole numbers; fetch it again."
        )
    size = len(d2t)
    ids = target_ids_of(d2t)
    if np.any(np.diff(ids) <= 0) or ids[0] < 0 or ids[-1] >= vocab_size:
        hint = ""
        if np.all(np.diff(d2t) > 0) and 0 <= d2t[0] and d2t[-1] < vocab_size:
            hint = " These look like the ids themselves: subtract 0, 1, 2, ..."
        raise CheckpointError(
            "d2t must hold offsets, so that token j of the drafter is the target's "
            f"token j + d2t[j], increasing and below {vocab_size}; it does not.{hint}"
        )
    if t2d is not None:
        kept = np.flatnonzero(np.asarray(t2d).reshape(-1))
        if t2d.size != vocab_size or not np.array_equal(kept, ids):
            raise CheckpointError(
                f"t2d marks {len(kept)} of {t2d.size} tokens, and d2t (read as "
                f"offsets) leads to {size} of {vocab_size}, which are not the same; if "
                "d2t holds the ids themselves, subtract 0, 1, 2, ... from them."
            )
    elif size > 1 and (np.all(np.diff(d2t) > 0) or not np.any(d2t)):
        # No run of neighbouring ids, or nothing but one: as offsets hardly possible.
        what = "increases at every step, as the ids themselves would"
        raise CheckpointError(
            f"d2t {what if np.any(d2t) else 'is all zero'}, and t2d, which would "
            "confirm that it holds offsets, is absent; fetch the whole release of the "
            "drafter."
        )


def _check_tensors(
    config: EagleConfig,
    tensors: Mapping[str, np.ndarray],
    names: Mapping[str, str],
) -> None:
    """Lists all missing, unexpected and mis-shaped tensors, by their names in the file.

    Args:
        config: what the drafter is.
        tensors: under canonical names.
        names: of the file, by canonical name.
    """
    expected = expected_eagle_tensors(config)
    is_midlayer = any(old.endswith("midlayer." + new[9:]) for new, old in names.items())

    def stored(name):
        if name in names or not is_midlayer:
            return names.get(name, name)
        return re.sub(r"^layers\.0\.", "midlayer.", name)

    lists = {
        "missing": [stored(name) for name in expected if name not in tensors],
        "unexpected": [stored(name) for name in tensors if name not in expected],
        "wrong shape": [
            f"{stored(name)}: has {list(tensors[name].shape)}, needs {list(shape)}"
            for name, shape in expected.items()
            if name in tensors and tensors[name].shape != shape
        ],
        "no floating-point numbers": [
            f"{stored(name)}: {x.dtype}"
            for name, x in tensors.items()
            if name != "d2t" and x.dtype not in _FLOATS
        ],
    }
    if not any(lists.values()):
        return
    lines = ["the drafter's tensors do not fit its configuration and the target:"]
    for title, names in lists.items():
        if names:
            lines.append(f"  {title} ({len(names)}):")
            lines += [f"    {name}" for name in names]
    lines.append("  Take config.json and the weights from the same release.")
    raise CheckpointError("\n".join(lines))


def _facts(config: EagleConfig, choices: dict[str, str]) -> dict[str, Any]:
    layers = config.layers
    return {
        "layers": layers.num_layers,
        "width": layers.hidden_size,
        "layout": "all draft tokens in one pass"
        if config.is_parallel
        else "one draft token after another",
        "draft_length": config.draft_length,
        "taps": list(config.taps),
        "vocabulary": layers.vocab_size,
        "draft_vocabulary": config.draft_vocab_size,
        "embedding": owner(config.own_embedding),
        "head": owner(config.own_head),
        "attention": attention(layers.layer_windows),
        "context": layers.max_positions,
        "mask_token": config.mask_token,
        "choices": choices,
    }
