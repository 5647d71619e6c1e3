"""Reads GGUF files: one file with metadata, quantised weights and a vocabulary.

Parsing and dequantising are the ``gguf`` library's. What is left is to undo what the
converters did: rename tensors and settings, restore the row order of query and key
projections where a converter changed it, and read the tied head from its absence.

**The row order.** llama.cpp rotates adjacent pairs of a head's dimensions, where this
library pairs dimension i with i + D/2. Converters of the Llama class therefore
interleave the two halves of each head's rows; all others leave them as they are. A
model loaded without undoing this still writes fluent text, with other logits.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxdec.io import gguf_tokenizer
from jaxdec.io.checkpoint import (
    Checkpoint,
    CheckpointError,
    LazyTensors,
    as_dtype,
    check_tensors,
    expected_tensors,
)
from jaxdec.io.hf_config import config_from_hf
from jaxdec.io.tokenizer import Tokenizer
from jaxdec.models.config import ModelConfig, RopeConfig

_HAS_PERMUTED_ROWS = {"llama": True, "qwen2": False, "qwen3": False}
"""Supported architectures."""

_SETTINGS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
}

_READ_ELSEWHERE = frozenset(
    """
    vocab_size attention.key_length attention.value_length rope.dimension_count
    rope.freq_base rope.scaling.type rope.scaling.factor
    rope.scaling.original_context_length rope.scaling.attn_factor
    rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.finetuned
    rope.scale_linear
    """.split()
)

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _open(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata as Python values, and tensors by name."""
    import gguf

    class Reader(gguf.GGUFReader):
        """Stops at the end of the file; its base goes on with empty arrays there."""

        def _get(self, offset, dtype, count=1, *arguments, **options):
            found = super()._get(offset, dtype, count, *arguments, **options)
            if found.size != int(count):
                raise EOFError(f"the file ends at byte {len(self.data)}")
            return found

    try:
        reader = Reader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; check the path.") from None
    except Exception as error:
        # Damage shows wherever the reader happens to stumble over it.
        raise CheckpointError(
            f"{path} cannot be read as GGUF ({type(error).__name__}: {error}). It is "
            "damaged, incomplete, or of a format that the installed gguf package does "
            "not know: fetch it again, or update that package."
        ) from error
    if reader.byte_order != "I":
        raise CheckpointError(
            f"{path} has the byte order of another kind of machine; convert it with "
            "gguf-convert-endian."
        )
    if fields.get("split.count", 0) > 1:
        raise CheckpointError(
            f"{path} is one of {fields['split.count']} parts; join them first with "
            "llama-gguf-split --merge."
        )
    return fields, tensors


def config_from_gguf(
    fields: Mapping[str, Any],
    *,
    is_tied: bool,
    vocab_size: int,
    rope_factors: tuple[float, ...] = (),
) -> ModelConfig:
    """Translates GGUF metadata into the settings of ``config.json``, and reads those.

    Args:
        fields: Metadata as Python values.
        is_tied: Whether the file has no output head.
        vocab_size: Rows of the embedding matrix.
        rope_factors: Values of the tensor ``rope_freqs.weight``, if there is one: how
            GGUF stores the rotary scaling of Llama 3.
    """
    arch = fields.get("general.architecture")
    if arch not in _HAS_PERMUTED_ROWS:
        raise CheckpointError(
            f"GGUF architecture {arch!r} is not supported; supported are "
            f"{', '.join(_HAS_PERMUTED_ROWS)}."
        )
    settings = {
        key[len(arch) + 1 :]: value
        for key, value in fields.items()
        if key.startswith(f"{arch}.")
    }
    unknown = {
        key: value
        for key, value in settings.items()
        if key not in _SETTINGS and key not in _READ_ELSEWHERE
        # Converters write 0 and False for what a model does not have.
        if value not in (None, False, "", [])
    }
    if unknown:
        pairs = ", ".join(f"{arch}.{key}={value!r}" for key, value in unknown.items())
        raise CheckpointError(
            f"the GGUF file has settings that this library does not know: {pairs}. "
            "They might change what the model computes, so they are not ignored; use "
            "the safetensors release of the model."
        )
    values: dict[str, Any] = {"model_type": arch, "tie_word_embeddings": is_tied}
    values |= {new: settings[old] for old, new in _SETTINGS.items() if old in settings}
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        value = values.get(name)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise CheckpointError(
                    f"{name} differs between layers ({value}), which is not supported."
                )
            values[name] = value[0]
    values.setdefault("num_key_value_heads", values.get("num_attention_heads"))
    values["rms_norm_eps"] = _shortest(values.get("rms_norm_eps", 1e-6))
    values["vocab_size"] = vocab_size
    rotary = settings.get("rope.dimension_count")
    head_dim = settings.get("attention.key_length") or rotary
    if head_dim is None:
        head_dim = values["hidden_size"] // values["num_attention_heads"]
    if settings.get("attention.value_length", head_dim) != head_dim or (
        rotary is not None and rotary != head_dim
    ):
        raise CheckpointError(
            f"keys are {head_dim} wide, values "
            f"{settings.get('attention.value_length', head_dim)}, and {rotary} "
            "dimensions are rotated; only models where all three agree are supported."
        )
    values["head_dim"] = head_dim
    values["rope_theta"] = _shortest(settings.get("rope.freq_base", 10000.0))
    values["rope_scaling"] = _rope_scaling(settings)
    config = config_from_hf(values)
    if not rope_factors:
        return config
    (rope,) = config.ropes
    if rope.kind != "default" or len(rope_factors) != head_dim // 2:
        raise CheckpointError(
            f"{_ROPE_FACTORS} has {len(rope_factors)} values beside rope scaling "
            f"{rope.kind!r}; only {head_dim // 2} values without other scaling are "
            "supported."
        )
    rope = RopeConfig(theta=rope.theta, kind="factors", factors=rope_factors)
    return ModelConfig(**{**vars(config), "ropes": (rope,)})


def _rope_scaling(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = settings.get("rope.scaling.type", "none")
    if settings.get("rope.scale_linear", 1.0) not in (0.0, 1.0):
        kind, factor = "linear", settings["rope.scale_linear"]
    else:
        factor = settings.get("rope.scaling.factor")
    if settings.get("rope.scaling.attn_factor", 1.0) != 1.0:
        raise CheckpointError(
            "rope.scaling.attn_factor is set in the GGUF file, which is not supported; "
            "use the safetensors release of the model."
        )
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        for old, new in (
            ("original_context_length", "original_max_position_embeddings"),
            ("yarn_beta_fast", "beta_fast"),
            ("yarn_beta_slow", "beta_slow"),
        ):
            scaling[new] = settings.get(f"rope.scaling.{old}")
    return scaling


def _canonical(name: str) -> str:
    """The canonical name of a tensor; a name without translation stays as it is."""
    stem, _, suffix = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{suffix}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{suffix}"
    return name


def restore_rows(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes the interleaving of a projection's rows (or of its bias).

    Example:
        >>> restore_rows(np.array([0, 2, 1, 3]), num_heads=1)
        array([0, 1, 2, 3])
    """
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def _dequantize(path: Path, tensor: Any) -> np.ndarray:
    import gguf

    try:
        return gguf.dequantize(tensor.data, tensor.tensor_type)
    except Exception as error:
        raise CheckpointError(
            f"tensor {tensor.name!r} of {path} has number format "
            f"{tensor.tensor_type.name}, which cannot be dequantised ({error}); use a "
            "file quantised in another way, or update the gguf package."
        ) from error


def _tokenizer(path: Path, fields: Mapping[str, Any]) -> Tokenizer | None:
    if fields.get("tokenizer.ggml.model") in (None, "none", "no_vocab"):
        return None
    if (path.parent / "tokenizer.json").exists():
        beside = Tokenizer.from_folder(path.parent)
        tokens = fields["tokenizer.ggml.tokens"]
        # A folder may hold several models, so the file beside has to be the right one.
        if all(
            beside.token_id(token) == index
            for index, token in enumerate(tokens)
            if token != f"[PAD{index}]"
        ):
            inside = fields.get("tokenizer.chat_template")
            beside.chat_template = beside.chat_template or inside
            return beside
    try:
        return Tokenizer.from_gguf(fields)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"the tokenizer of {path}: {error}") from error


def file_hash(path: Path) -> str:
    """The SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_gguf(path: str | Path, dtype: np.dtype) -> Checkpoint:
    """Opens a GGUF file; tensors are dequantised to `dtype` when read.

    Raises:
        CheckpointError: The file is damaged, or not of a supported kind.
    """
    path = Path(path)
    fields, found = _open(path)
    embeddings = found.get("token_embd.weight")
    if embeddings is None:
        raise CheckpointError(
            f"{path} has no token_embd.weight; it is no text decoder."
        )
    factors: tuple[float, ...] = ()
    if _ROPE_FACTORS in found:
        values = _dequantize(path, found[_ROPE_FACTORS])
        factors = tuple(float(factor) for factor in values.reshape(-1))
    try:
        config = config_from_gguf(
            fields,
            is_tied="output.weight" not in found,
            vocab_size=int(embeddings.shape[-1]),
            rope_factors=factors,
        )
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} has metadata that make no sense ({type(error).__name__}: "
            f"{error}); it is damaged, so fetch it again."
        ) from error
    by_name = {_canonical(n): t for n, t in found.items() if n != _ROPE_FACTORS}
    heads = {}
    if _HAS_PERMUTED_ROWS[fields["general.architecture"]]:
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}

    def read(name: str) -> np.ndarray:
        tensor = _dequantize(path, by_name[name])
        rows = heads.get(name.split(".")[-2])
        return tensor if rows is None else restore_rows(tensor, rows)

    tensors = LazyTensors(
        {n: tuple(int(d) for d in reversed(t.shape)) for n, t in by_name.items()}, read
    )
    try:
        check_tensors(config, tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    formats = Counter(tensor.tensor_type.name for tensor in found.values())
    return Checkpoint(
        config=config,
        tensors=tensors.select(
            expected_tensors(config), lambda name, x: as_dtype(name, x, dtype)
        ),
        tokenizer=_tokenizer(path, fields),
        stop_tokens=gguf_tokenizer.stop_tokens(fields),
        source=str(path),
        content_hash=file_hash(path),
        format="gguf",
        metadata={
            key: value
            for key, value in fields.items()
            if key.startswith("general.") and isinstance(value, (str, int, float))
        }
        | {"number_formats": dict(formats)},
    )
