"""A checkpoint in one shape, whatever file it came from.

Files differ in names, layouts and number formats; everything behind this module sees
one thing: a `ModelConfig`, and tensors under canonical names (see `jaxdec.io.names`),
matrices as ``[out, in]``, gains of norms as they multiply (1 + w for Gemma). What a
configuration needs is computed (`expected_tensors`), so that a file is compared with it
as a whole: an error lists every missing, unexpected and mis-shaped tensor at once, and
a tensor that nothing reads is never ignored in silence.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import ml_dtypes
import numpy as np

from jaxdec.io.tokenizer import Tokenizer
from jaxdec.models.config import ModelConfig, MoeConfig, RopeConfig
from jaxdec.models.weights import block_shapes


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message says why, and what to do."""


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """What stumbles over a value of the wrong type in a file is a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        raise CheckpointError(
            f"{what} has a value that makes no sense ({type(e).__name__}: {e}); "
            "compare it with the original, or fetch it again"
        ) from e


class LazyTensors(Mapping):
    """Tensors that are read when asked for; their shapes are known before.

    A plain `Mapping`: to check the type of its values would be to read them.

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
        names: Iterable[str],
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
    extra: LazyTensors
    """Native multi-token-prediction modules in the same files, by canonical name and as
    stored (their norms are no effective gains); empty if there are none."""
    settings: Mapping[str, Any]
    """``config.json`` as it is, or the metadata of the GGUF file's architecture."""
    metadata: dict[str, Any]
    """What the file says about itself (name, licence, number formats); JSON values."""


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor that a model of this configuration reads.

    Raises:
        CheckpointError: The configuration mixes what only Llama's descendants have with
            what only GPT-2 has, so that no published names fit it.
    """
    like_gpt2 = (config.learned_positions, not config.gated_mlp, config.norm != "rms")
    if any(like_gpt2) and not all(like_gpt2):
        raise CheckpointError(
            f"reading a checkpoint of family {config.family!r}: learned positions, an "
            "MLP without gate and layer norms have published tensor names only all "
            "together (GPT-2); build the parameters of this model yourself."
        )
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name, rows, columns, bias=False):
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    if config.learned_positions:
        _gpt2(config, linear, shapes)
    else:
        _llama(config, linear, shapes)
    if not config.tie_embeddings:
        linear("lm_head", config.vocab_size, config.hidden_size)
    return shapes


def _llama(config: ModelConfig, linear: Callable, shapes: dict) -> None:
    """Llama and its descendants."""
    linear("model.embed_tokens", config.vocab_size, config.hidden_size)
    for i in range(config.num_layers):
        shapes |= block_shapes(config, i, f"model.layers.{i}")
    shapes["model.norm.weight"] = (config.hidden_size,)


def _gpt2(config: ModelConfig, linear: Callable, shapes: dict) -> None:
    """GPT-2; query, key and value are one tensor there too."""
    width, inner = config.hidden_size, config.intermediate_size
    heads = config.num_heads * config.head_dim
    groups = config.num_kv_heads * config.head_dim
    linear("wte", config.vocab_size, width)
    linear("wpe", config.max_positions, width)
    for i in range(config.num_layers):
        for norm in (f"h.{i}.ln_1", f"h.{i}.ln_2"):
            shapes |= {f"{norm}.weight": (width,), f"{norm}.bias": (width,)}
        linear(f"h.{i}.attn.c_attn", heads + 2 * groups, width, config.qkv_bias)
        linear(f"h.{i}.attn.c_proj", width, heads, config.output_bias)
        linear(f"h.{i}.mlp.c_fc", inner, width, config.mlp_bias)
        linear(f"h.{i}.mlp.c_proj", width, inner, config.mlp_bias)
    shapes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}


def shapes_of(tensors: Mapping) -> dict[str, tuple[int, ...]]:
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


def check_floating(tensors: Mapping[str, np.ndarray]) -> None:
    """Raises CheckpointError that names all tensors of whole numbers."""
    wrong = [
        f"{name} ({tensor.dtype})"
        for name, tensor in tensors.items()
        # bfloat16 is of kind "V": NumPy does not know it.
        if tensor.dtype.kind in "iub"
    ]
    if wrong:
        raise CheckpointError(
            f"weights must be floating-point numbers, and these are not: "
            f"{', '.join(wrong)}; convert the checkpoint from its original"
        )


def as_dtype(name: str, tensor: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The tensor in this number format, after a look for NaN and infinities.

    Vectors (gains of norms, biases) stay float32: they are no factor of a matmul.
    """
    if tensor.ndim == 1:
        dtype = np.dtype(np.float32)
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
