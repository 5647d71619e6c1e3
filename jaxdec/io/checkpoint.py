"""A checkpoint in one shape, whatever file it came from.

Files differ in names, layouts and number formats; everything behind this module sees
one thing: a `ModelConfig`, and tensors under the names and ``[out, in]`` shapes of
Hugging Face's Llama. What a configuration needs is computed (`expected_tensors`), so
that a file is compared with it as a whole: an error lists every missing, unexpected and
mis-shaped tensor at once, and a tensor that nothing reads is never ignored in silence.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import ml_dtypes
import numpy as np

from jaxdec.io.tokenizer import Tokenizer
from jaxdec.models.config import ModelConfig, MoeConfig, RopeConfig
from jaxdec.models.weights import block_shapes


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message says why, and what to do."""


class LazyTensors(Mapping[str, np.ndarray]):
    """Tensors that are read when asked for; their shapes are known before.

    Args:
        shapes: The shape of every tensor.
        read: Returns one tensor. Nothing is kept: asking twice reads twice.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        read: Callable[[str], np.ndarray],
    ):
        self.shapes = dict(shapes)
        self._read = read

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.shapes:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def select(
        self,
        names: Mapping[str, Any],
        then: Callable[[str, np.ndarray], np.ndarray] = lambda name, tensor: tensor,
    ) -> "LazyTensors":
        """Only these names, each tensor passed through `then` when it is read."""
        return LazyTensors(
            {name: self.shapes[name] for name in names},
            lambda name: then(name, self._read(name)),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model as it was found on disk."""

    config: ModelConfig
    tensors: Mapping[str, np.ndarray]
    """Exactly `expected_tensors`; may read from disk when a tensor is asked for."""
    tokenizer: Tokenizer | None
    stop_tokens: tuple[int, ...]
    """Ids that end an answer, in the order of the file; may be empty."""
    source: str
    content_hash: str
    """Names the weights: equal hashes mean equal weights."""
    format: Literal["safetensors", "gguf"]
    metadata: dict[str, Any]
    """What the file says about itself (name, licence, number formats); JSON values."""


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor that a model of this configuration reads.

    Raises:
        CheckpointError: The configuration is of a kind whose names are not those of
            Llama (learned positions, an MLP without gate).
    """
    if config.learned_positions or not config.gated_mlp or config.norm != "rms":
        raise CheckpointError(
            f"reading a checkpoint of family {config.family!r}: only decoders with "
            "rotary positions, RMS norms and a gated MLP have canonical tensor names; "
            "build the parameters of this model yourself."
        )
    width = config.hidden_size
    shapes = {"model.embed_tokens.weight": (config.vocab_size, width)}
    for i in range(config.num_layers):
        shapes |= block_shapes(config, i, f"model.layers.{i}")
    shapes["model.norm.weight"] = (width,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, width)
    return shapes


_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("embed_tokens.", "model.embed_tokens."),
    ("layers.", "model.layers."),
    ("norm.", "model.norm."),
)
"""The last three: a decoder saved without its language-model wrapper."""

_IGNORED = re.compile(
    r"(.*\.)?rotary_emb\.inv_freq"
    r"|(model\.)?(vision_tower|vision_model|visual|multi_modal_projector)\..*"
    r"|(model\.)?(mtp|mtp_layers)\..*"
)
"""Tensors that a text decoder never reads: tables that the configuration determines,
the vision half of a multimodal model, multi-token-prediction modules."""

_MTP_LAYER = re.compile(r"model\.layers\.(\d+)\.eh_proj\.weight")


def canonical_names(names) -> dict[str, str]:
    """Maps canonical tensor names to the names in a file.

    Raises:
        CheckpointError: Two names in the file mean the same tensor.
    """
    canonical: dict[str, str] = {}
    for name in names:
        for old, new in _PREFIXES:
            if name.startswith(old):
                target = new + name[len(old) :]
                break
        else:
            target = name
        if target in canonical:
            raise CheckpointError(
                f"tensors {canonical[target]!r} and {name!r} are both {target!r}; "
                "remove one of them from the checkpoint."
            )
        canonical[target] = name
    return canonical


def check_tensors(config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> None:
    """Compares a whole checkpoint with what its configuration needs.

    Tensors that a text decoder never reads may be present: rotary tables, a head equal
    to the embeddings by configuration, vision towers, multi-token-prediction modules.

    Args:
        config: What the model is.
        tensors: Tensors under canonical names.

    Raises:
        CheckpointError: Lists all missing, unexpected and mis-shaped tensors.
    """
    found = shapes_of(tensors)
    if config.num_layers > len(found):
        # Said before listing them, which would take long if the number is damaged.
        raise CheckpointError(
            f"the configuration has {config.num_layers} layers, but there are only "
            f"{len(found)} tensors; take config.json and the weights from the same "
            "release."
        )
    expected = expected_tensors(config)
    mtp = {int(m[1]) for m in map(_MTP_LAYER.fullmatch, found) if m is not None}

    def is_ignored(name: str) -> bool:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        return (
            _IGNORED.fullmatch(name) is not None
            or (config.tie_embeddings and name == "lm_head.weight")
            or (
                layer is not None
                and int(layer[1]) >= config.num_layers
                and int(layer[1]) in mtp
            )
        )

    missing = [name for name in expected if name not in found]
    unexpected = [n for n in found if n not in expected and not is_ignored(n)]
    wrong = [
        f"{name}: has {list(found[name])}, needs {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != shape
    ]
    if not (missing or unexpected or wrong):
        return
    lines = ["the tensors do not fit the configuration:"]
    for title, names in (
        ("missing", missing),
        ("unexpected", unexpected),
        ("wrong shape", wrong),
    ):
        if names:
            lines.append(f"  {title} ({len(names)}):")
            lines += [f"    {name}" for name in names]
    if "lm_head.weight" in missing:
        lines.append(
            "  The configuration says that the output head is not tied to the "
            "embeddings (tie_word_embeddings is false, or absent where that means "
            "false). If the model does share them, set tie_word_embeddings to true."
        )
    lines.append("  Take config.json and the weights from the same release.")
    raise CheckpointError("\n".join(lines))


def shapes_of(tensors: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, without reading tensors that are lazy."""
    if isinstance(tensors, LazyTensors):
        return tensors.shapes
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def is_finite(tensor: np.ndarray) -> bool:
    """Whether a tensor holds neither NaN nor an infinity."""
    if tensor.dtype == ml_dtypes.bfloat16:
        # The exponent bits alone decide, several times faster than converting.
        return not ((tensor.view(np.uint16) & 0x7F80) == 0x7F80).any()
    return bool(np.isfinite(tensor).all())


def check_finite(tensors: Mapping[str, np.ndarray]) -> None:
    """Reads every tensor and looks for NaN and infinities.

    Raises:
        CheckpointError: Names all tensors that hold one.
    """
    broken = [name for name, tensor in tensors.items() if not is_finite(tensor)]
    if broken:
        raise CheckpointError(
            f"{len(broken)} of {len(tensors)} tensors hold NaN or an infinity: "
            f"{', '.join(broken)}. The file is damaged or was saved from a diverged "
            "run, or its values do not fit the number format that was asked for; "
            "fetch it again, or load it as float32."
        )


def as_dtype(name: str, tensor: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The tensor in this number format, after a look for NaN and infinities."""
    converted = np.ascontiguousarray(tensor).astype(dtype, copy=False)
    check_finite({name: converted})
    return converted


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """A configuration as JSON values."""
    return dataclasses.asdict(config)


def config_from_json(values: Mapping[str, Any]) -> ModelConfig:
    """The inverse of `config_to_json`."""

    def tuples(record):
        return {k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}

    moe = values["moe"]
    return ModelConfig(
        **tuples(values)
        | {
            "ropes": tuple(RopeConfig(**tuples(rope)) for rope in values["ropes"]),
            "moe": None if moe is None else MoeConfig(**tuples(moe)),
        }
    )
