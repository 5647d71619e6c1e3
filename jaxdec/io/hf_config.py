"""Reads a Hugging Face ``config.json`` into a `ModelConfig`.

A configuration file is a program in disguise: every key may change the numbers. So
every key has to be accounted for. Each is read here, or listed as one that cannot
change what the model computes at inference, or it is an error that names it. A key that
is absent takes the default of its model class, which differs between families.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxdec.io.checkpoint import CheckpointError
from jaxdec.models.config import ModelConfig, RopeConfig

_HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path architectures
    attention_dropout attn_implementation auto_map begin_suppress_tokens bos_token_id
    cache_implementation chunk_size_feed_forward diversity_penalty do_sample dtype
    early_stopping eos_token_id exponential_decay_length_penalty forced_bos_token_id
    forced_eos_token_id hidden_dropout id2label initializer_range is_decoder
    is_encoder_decoder is_llama_config label2id length_penalty max_length min_length
    mlp_dropout model_type name_or_path no_repeat_ngram_size num_beam_groups num_beams
    num_nextn_predict_layers num_return_sequences output_attentions
    output_hidden_states output_scores pad_token_id prefix pretraining_tp problem_type
    remove_invalid_values repetition_penalty resid_dropout return_dict
    return_dict_in_generate sep_token_id suppress_tokens
    task_specific_params temperature tie_encoder_decoder tokenizer_class top_k top_p
    torch_dtype torchscript transformers.js_config transformers_version typical_p
    unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()
)
"""Keys about training, bookkeeping, or sampling defaults (never applied silently)."""

_NEUTRAL: dict[str, Any] = {"partial_rotary_factor": 1.0, "logit_scale": 1.0}
"""Keys with a value that changes nothing; any other value is an error."""

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}

_REQUIRED = object()


class _Fields:
    """The keys of one mapping, remembering which of them were read."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self._values = values
        self._where = where
        self._read: set[str] = set()

    def get(self, name: str, default: Any = _REQUIRED) -> Any:
        self._read.add(name)
        value = self._values.get(name, default)
        if value is _REQUIRED:
            raise CheckpointError(
                f"{self._where} has no {name!r}; add it, with the value that the model "
                "was trained with."
            )
        return value

    def count(self, name: str, default: Any = _REQUIRED) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"{self._where}: {name!r} must be a whole number of at least 1, got "
                f"{value!r}; correct it."
            )
        return value

    def count_or_none(self, name: str, default: Any) -> int | None:
        return None if self.get(name, default) is None else self.count(name, default)

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CheckpointError(
                f"{self._where}: {name!r} must be a number, got {value!r}; correct it."
            )
        return float(value)

    def finish(self, harmless: frozenset[str] = frozenset()) -> None:
        """Raises for keys that nobody read and that say something."""
        unknown = {
            name: value
            for name, value in self._values.items()
            if name not in self._read
            and name not in harmless
            and value is not None
            and value is not False
            and value not in ([], {}, "")
            and not (name in _NEUTRAL and value == _NEUTRAL[name])
        }
        if unknown:
            pairs = ", ".join(f"{name}={value!r}" for name, value in unknown.items())
            raise CheckpointError(
                f"{self._where} has settings that this library does not know: {pairs}. "
                "They might change what the model computes, so they are not ignored; "
                "remove those that you know to have no effect."
            )


def _rope_from(
    values: Mapping[str, Any], theta: float | None, longest: int
) -> RopeConfig:
    """One rotary embedding, from the dictionary of either spelling."""
    fields = _Fields(values, "the rope settings")
    kind = fields.get("rope_type", None)
    older = fields.get("type", None)
    if kind is not None and older is not None and kind != older:
        raise CheckpointError(
            f"the rope settings say both rope_type={kind!r} and type={older!r}; "
            "keep one of them."
        )
    kind = kind or older or "default"
    own_theta = fields.get("rope_theta", None)
    if own_theta is None:
        own_theta = theta
    elif theta is not None and theta != own_theta:
        raise CheckpointError(
            f"rope_theta is {theta} in config.json and {own_theta} inside its rope "
            "settings; keep one of them."
        )
    found: dict[str, Any] = {"kind": kind}
    if own_theta is not None:
        found["theta"] = float(own_theta)
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
        original = fields.get("original_max_position_embeddings", None) or longest
        factor = fields.get("factor", None)
        found |= {
            "factor": float(factor) if factor is not None else longest / original,
            "original_max_positions": int(original),
            "beta_fast": float(fields.get("beta_fast", None) or 32),
            "beta_slow": float(fields.get("beta_slow", None) or 1),
            "truncate": bool(fields.get("truncate", True)),
        }
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            value = fields.get(name, None)
            found[name] = None if value is None else float(value)
    elif kind != "default":
        raise CheckpointError(
            f"rope type {kind!r} is not supported; only default, linear, llama3 and "
            "yarn are. Use a release of the model without it, or remove the scaling "
            "and stay within the original context length."
        )
    fields.finish()
    return RopeConfig(**found)


def _rope(fields: _Fields, longest: int) -> RopeConfig:
    """Reads ``rope_parameters``, or ``rope_scaling`` with ``rope_theta``."""
    theta = fields.get("rope_theta", None)
    found = []
    for key in ("rope_parameters", "rope_scaling"):
        values = fields.get(key, None)
        if values is None:
            continue
        if not isinstance(values, Mapping):
            raise CheckpointError(
                f"{key} must be a dictionary, got {values!r}; correct config.json."
            )
        if any(isinstance(value, Mapping) for value in values.values()):
            raise CheckpointError(
                f"{key} gives settings per kind of layer ({', '.join(values)}), which "
                "this model family does not have; give one dictionary of settings."
            )
        found.append(_rope_from(values, theta, longest))
    if len(found) == 2 and found[0] != found[1]:
        raise CheckpointError(
            f"rope_parameters and rope_scaling disagree: {found[0]} against "
            f"{found[1]}; keep one of them."
        )
    return found[0] if found else _rope_from({}, theta, longest)


def _decoder(fields: _Fields, family: str, **switches: Any) -> ModelConfig:
    """What Llama and its descendants share; `switches` holds the differences."""
    width = fields.count("hidden_size")
    heads = fields.count("num_attention_heads")
    layers = fields.count("num_hidden_layers")
    kv_heads = fields.count_or_none(
        "num_key_value_heads", switches.pop("default_kv_heads")
    )
    kv_heads = heads if kv_heads is None else kv_heads
    head_dim = fields.count_or_none("head_dim", switches.pop("default_head_dim"))
    if head_dim is None:
        if width % heads:
            raise CheckpointError(
                f"hidden_size={width} is not a multiple of num_attention_heads={heads} "
                "and config.json has no head_dim; add it."
            )
        head_dim = width // heads
    if heads % kv_heads or head_dim % 2:
        raise CheckpointError(
            f"num_attention_heads={heads}, num_key_value_heads={kv_heads}, "
            f"head_dim={head_dim}: query heads must be a multiple of key/value heads, "
            "and the head width even; correct config.json."
        )
    activation = fields.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise CheckpointError(
            f"activation {activation!r} is not supported; only "
            f"{', '.join(_ACTIVATIONS)} are."
        )
    longest = fields.count("max_position_embeddings", switches.pop("default_positions"))
    windows = _windows(fields, layers, **switches.pop("windows"))
    return ModelConfig(
        family=family,
        vocab_size=fields.count("vocab_size"),
        hidden_size=width,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=longest,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=_ACTIVATIONS[activation],
        tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
        ropes=(_rope(fields, longest),),
        layer_windows=windows,
        **switches,
    )


def _windows(
    fields: _Fields, layers: int, window: int | None, first: int
) -> tuple[int | None, ...]:
    """The sliding window of every layer: `window` from layer `first` on.

    ``layer_types`` overrides `first`. Empty when no layer has a window.
    """
    kinds = fields.get("layer_types", None)
    if kinds is None and window is None:
        return ()
    if kinds is None:
        slides = [i >= first for i in range(layers)]
    else:
        known = ("full_attention", "sliding_attention")
        if len(kinds) != layers or any(kind not in known for kind in kinds):
            raise CheckpointError(
                f"layer_types must give one of {' and '.join(known)} for each of "
                f"{layers} layers, got {kinds!r}; layers of another kind are not "
                "supported."
            )
        slides = [kind == "sliding_attention" for kind in kinds]
    if window is None or not any(slides):
        return ()
    return tuple(window if slide else None for slide in slides)


def _llama(fields: _Fields) -> ModelConfig:
    bias = bool(fields.get("attention_bias", False))
    return _decoder(
        fields,
        "llama",
        default_kv_heads=None,
        default_head_dim=None,
        default_positions=2048,
        windows={"window": None, "first": 0},
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(fields.get("mlp_bias", False)),
    )


def _mistral(fields: _Fields) -> ModelConfig:
    return _decoder(
        fields,
        "mistral",
        default_kv_heads=8,
        default_head_dim=None,
        default_positions=4096 * 32,
        # The class default is a window, so only an explicit null means none.
        windows={"window": fields.count_or_none("sliding_window", 4096), "first": 0},
    )


def _qwen(fields: _Fields, family: str, **switches: Any) -> ModelConfig:
    uses_window = bool(fields.get("use_sliding_window", False))
    window = fields.count_or_none("sliding_window", 4096)
    first = fields.get("max_window_layers", 28)
    return _decoder(
        fields,
        family,
        default_kv_heads=32,
        default_positions=32768,
        windows={"window": window if uses_window else None, "first": first},
        **switches,
    )


def _qwen2(fields: _Fields) -> ModelConfig:
    # The class has no such option: query, key and value always have a bias.
    return _qwen(fields, "qwen2", default_head_dim=None, qkv_bias=True)


def _mimo(fields: _Fields) -> ModelConfig:
    # A Qwen2 decoder, with the head width as a setting.
    bias = bool(fields.get("attention_bias", True))
    return _qwen(fields, "mimo", default_head_dim=None, qkv_bias=bias)


def _qwen3(fields: _Fields) -> ModelConfig:
    bias = bool(fields.get("attention_bias", False))
    return _qwen(
        fields,
        "qwen3",
        default_head_dim=128,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )


@dataclasses.dataclass(frozen=True)
class _Family:
    read: Callable[[_Fields], ModelConfig]
    architecture: str


_FAMILIES = {
    "llama": _Family(_llama, "LlamaForCausalLM"),
    "mistral": _Family(_mistral, "MistralForCausalLM"),
    "qwen2": _Family(_qwen2, "Qwen2ForCausalLM"),
    "mimo": _Family(_mimo, "MiMoForCausalLM"),
    "qwen3": _Family(_qwen3, "Qwen3ForCausalLM"),
}


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Reads the contents of a ``config.json``.

    Args:
        values: The parsed file. A multimodal wrapper is read for its text model.

    Raises:
        CheckpointError: The model family, an activation, a kind of rotary embedding or
            a setting is not supported, or a needed setting is absent.
    """
    if isinstance(values.get("text_config"), Mapping):
        inner = dict(values["text_config"])
        if "tie_word_embeddings" in values:
            inner.setdefault("tie_word_embeddings", values["tie_word_embeddings"])
        return config_from_hf(inner)
    if values.get("quantization_config") is not None:
        raise CheckpointError(
            "the weights are quantised (quantization_config in config.json), which is "
            "not supported for safetensors; use the unquantised release, or a GGUF "
            "file."
        )
    kind = values.get("model_type")
    if kind not in _FAMILIES:
        raise CheckpointError(
            f"model_type {kind!r} is not supported; supported are "
            f"{', '.join(_FAMILIES)}."
        )
    family = _FAMILIES[kind]
    architectures = values.get("architectures") or [family.architecture]
    if list(architectures) != [family.architecture]:
        raise CheckpointError(
            f"architecture {', '.join(architectures)} is not a plain {kind} language "
            f"model ({family.architecture}); if it is a drafter, load it as one."
        )
    fields = _Fields(values, "config.json")
    config = family.read(fields)
    fields.finish(_HARMLESS)
    return config


def stop_tokens_from_hf(
    generation: Mapping[str, Any] | None, config: Mapping[str, Any]
) -> tuple[int, ...]:
    """The ids that end an answer: an int, a list, or nothing.

    ``generation_config.json`` is preferred: instruction-tuned releases list the end of
    a turn only there.
    """
    text = config.get("text_config")
    sources = (generation or {}, config, text if isinstance(text, Mapping) else {})
    for source in sources:
        ids = source.get("eos_token_id")
        if ids is not None:
            ids = [ids] if isinstance(ids, int) else ids
            return tuple(dict.fromkeys(int(i) for i in ids))
    return ()
