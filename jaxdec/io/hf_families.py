"""What the keys of ``config.json`` mean in each family of models.

A key that is absent takes the default of its model class, which differs between
families: tied embeddings are the rule for Gemma and GPT-2, the exception for Llama.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.hf_fields import Fields
from jaxdec.io.hf_rope import read_rope, read_two_ropes
from jaxdec.models.config import ModelConfig, MoeConfig, RopeConfig

_FULL, _SLIDING = "full_attention", "sliding_attention"


def _shape(
    fields: Fields, *, kv_heads: int | None, head_dim: int | None, heads: Any = None
) -> dict[str, Any]:
    """Layers and heads, given the defaults of a class."""
    default = {} if heads is None else {"default": heads}
    width = fields.count("hidden_size")
    heads = fields.count("num_attention_heads", **default)
    groups = fields.count_or_none("num_key_value_heads", default=kv_heads)
    groups = heads if groups is None else groups
    own = fields.count_or_none("head_dim", default=head_dim)
    if own is None:
        if width % heads:
            raise CheckpointError(
                f"hidden_size={width} is not a multiple of num_attention_heads={heads} "
                "and config.json has no head_dim; add it."
            )
        own = width // heads
    if heads % groups or own % 2:
        raise CheckpointError(
            f"num_attention_heads={heads}, num_key_value_heads={groups}, "
            f"head_dim={own}: query heads must be a multiple of key/value heads, "
            "and the head width even; correct config.json."
        )
    return {
        "hidden_size": width,
        "num_heads": heads,
        "num_kv_heads": groups,
        "head_dim": own,
    }


def _decoder(
    fields: Fields,
    family: str,
    *,
    default_kv_heads: int | None,
    default_head_dim: int | None,
    default_positions: int,
    windows: Callable[[int], tuple[int | None, ...]],
    **switches: Any,
) -> ModelConfig:
    """What Llama and its descendants share; `switches` holds the differences."""
    layers = fields.parts("num_hidden_layers")
    longest = fields.count("max_position_embeddings", default=default_positions)
    return ModelConfig(
        family=family,
        vocab_size=fields.count("vocab_size"),
        intermediate_size=fields.count("intermediate_size"),
        num_layers=layers,
        max_positions=longest,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=fields.activation("hidden_act", default="silu"),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        ropes=(read_rope(fields, longest),),
        layer_windows=windows(layers),
        **_shape(fields, kv_heads=default_kv_heads, head_dim=default_head_dim),
        **switches,
    )


def _kinds(fields: Fields, layers: int, default: list[str]) -> list[str]:
    """The kind of attention of every layer."""
    kinds = fields.get("layer_types", None)
    kinds = default if kinds is None else kinds
    known = (_FULL, _SLIDING)
    if len(kinds) != layers or any(kind not in known for kind in kinds):
        raise CheckpointError(
            f"layer_types must give one of {' and '.join(known)} for each of "
            f"{layers} layers, got {kinds!r}; layers of another kind (such as linear "
            "attention) are not supported."
        )
    return list(kinds)


def _windows(
    fields: Fields, window: int | None, first: int
) -> Callable[[int], tuple[int | None, ...]]:
    """The sliding window of every layer: `window` from layer `first` on.

    ``layer_types`` overrides `first`. Empty when no layer has a window.
    """

    def read(layers: int) -> tuple[int | None, ...]:
        slides = [window is not None and i >= first for i in range(layers)]
        kinds = _kinds(fields, layers, [_SLIDING if s else _FULL for s in slides])
        if _SLIDING not in kinds:
            return ()
        if window is None:
            raise CheckpointError(
                "layer_types lists sliding_attention, but no sliding window is set "
                "(sliding_window, and use_sliding_window where the family has it); "
                "correct one of them."
            )
        return tuple(window if kind == _SLIDING else None for kind in kinds)

    return read


def _llama(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    return _decoder(
        fields,
        "llama",
        default_kv_heads=None,
        default_head_dim=None,
        default_positions=2048,
        windows=_windows(fields, None, 0),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _mistral(fields: Fields) -> ModelConfig:
    # The class default is a window, so only an explicit null means none.
    window = fields.count_or_none("sliding_window", default=4096)
    return _decoder(
        fields,
        "mistral",
        default_kv_heads=8,
        default_head_dim=None,
        default_positions=4096 * 32,
        windows=_windows(fields, window, 0),
    )


def _qwen_window(fields: Fields) -> int | None:
    window = fields.count_or_none("sliding_window", default=4096)
    return window if fields.flag("use_sliding_window", False) else None


def _qwen(fields: Fields, family: str, **switches: Any) -> ModelConfig:
    first = int(fields.number("max_window_layers", 28))
    return _decoder(
        fields,
        family,
        default_kv_heads=32,
        default_positions=32768,
        windows=_windows(fields, _qwen_window(fields), first),
        **switches,
    )


def _qwen2(fields: Fields) -> ModelConfig:
    # The class has no such option: query, key and value always have a bias.
    return _qwen(fields, "qwen2", default_head_dim=None, qkv_bias=True)


def _mimo(fields: Fields) -> ModelConfig:
    """Qwen2 with a head width of its own; its MTP module lies beside it."""
    if not fields.flag("attention_bias", True):
        raise CheckpointError(
            "attention_bias is false, but query, key and value of a MiMo always have a "
            "bias; correct config.json."
        )
    return _qwen(fields, "mimo", default_head_dim=None, qkv_bias=True)


def _qwen3(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    return _qwen(
        fields,
        "qwen3",
        default_head_dim=128,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )


def _qwen3_moe(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    window = _qwen_window(fields)
    first = fields.get("max_window_layers", None)
    if window is not None and first:
        raise CheckpointError(
            f"use_sliding_window is true and max_window_layers={first}: some releases "
            "of the reference give every layer the window, others those from layer "
            f"{first} on. Set max_window_layers to null for the first, or list "
            "layer_types for the second."
        )
    experts = MoeConfig(
        num_experts=fields.parts("num_experts", "num_local_experts", default=128),
        num_experts_per_token=fields.count("num_experts_per_tok", default=8),
        intermediate_size=fields.count("moe_intermediate_size", default=768),
        norm_topk_prob=fields.flag("norm_topk_prob", False),
        layers=_mixtures(fields),
    )
    if experts.num_experts_per_token > experts.num_experts:
        raise CheckpointError(
            f"num_experts_per_tok={experts.num_experts_per_token} of num_experts="
            f"{experts.num_experts}; correct config.json."
        )
    return _decoder(
        fields,
        "qwen3_moe",
        default_kv_heads=4,
        default_head_dim=None,
        default_positions=32768,
        windows=_windows(fields, window, 0),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        moe=experts if experts.layers else None,
    )


def _mixtures(fields: Fields) -> tuple[int, ...]:
    """Which layers are mixtures of experts; the others have a dense MLP."""
    step = fields.count("decoder_sparse_step", default=1)
    dense = fields.get("mlp_only_layers", None) or ()
    layers = range(fields.parts("num_hidden_layers"))
    return tuple(i for i in layers if i not in dense and (i + 1) % step == 0)


def _gemma3(fields: Fields) -> ModelConfig:
    layers = fields.parts("num_hidden_layers", default=26)
    longest = fields.count("max_position_embeddings", default=131072)
    pattern = fields.count(
        "sliding_window_pattern", "_sliding_window_pattern", default=6
    )
    kinds = _kinds(
        fields,
        layers,
        [_SLIDING if (i + 1) % pattern else _FULL for i in range(layers)],
    )
    window = fields.count_or_none("sliding_window", default=4096)
    ropes = read_two_ropes(fields, longest, theta=1e6, local_theta=1e4)
    shape = _shape(fields, kv_heads=4, head_dim=256, heads=8)
    bias = fields.flag("attention_bias", False)
    return ModelConfig(
        family="gemma3",
        vocab_size=fields.count("vocab_size", default=262208),
        intermediate_size=fields.count("intermediate_size", default=9216),
        num_layers=layers,
        max_positions=longest,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=fields.activation(
            "hidden_activation", "hidden_act", default="gelu_pytorch_tanh"
        ),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        sandwich_norms=True,
        embedding_scale=shape["hidden_size"] ** 0.5,
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        ropes=ropes,
        layer_rope=tuple(int(kind == _SLIDING) for kind in kinds),
        layer_windows=()
        if window is None or _SLIDING not in kinds
        else tuple(window if kind == _SLIDING else None for kind in kinds),
        logit_softcap=fields.number_or_none("final_logit_softcapping"),
        **shape,
    )


def _gpt2(fields: Fields) -> ModelConfig:
    width = fields.count("n_embd", "hidden_size", default=768)
    heads = fields.count("n_head", "num_attention_heads", default=12)
    if width % heads:
        raise CheckpointError(
            f"n_embd={width} is not a multiple of n_head={heads}; correct config.json."
        )
    inner = fields.count_or_none("n_inner", "intermediate_size", default=None)
    is_scaled = fields.flag("scale_attn_weights", True)
    return ModelConfig(
        family="gpt2",
        vocab_size=fields.count("vocab_size", default=50257),
        hidden_size=width,
        intermediate_size=4 * width if inner is None else inner,
        num_layers=fields.parts("n_layer", "num_hidden_layers", default=12),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        max_positions=fields.count(
            "n_positions", "max_position_embeddings", "n_ctx", default=1024
        ),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        norm="layer",
        activation=fields.activation("activation_function", default="gelu_new"),
        gated_mlp=False,
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        learned_positions=True,
        attention_scale=None if is_scaled else 1.0,
        is_scaled_by_layer=fields.flag("scale_attn_by_inverse_layer_idx", False),
        ropes=(RopeConfig(),),
    )


@dataclasses.dataclass(frozen=True)
class Family:
    """A kind of model that can be read."""

    read: Callable[[Fields], ModelConfig]
    architecture: str
    """What a plain language model of this kind is called."""


FAMILIES = {
    "llama": Family(_llama, "LlamaForCausalLM"),
    "mistral": Family(_mistral, "MistralForCausalLM"),
    "qwen2": Family(_qwen2, "Qwen2ForCausalLM"),
    "qwen3": Family(_qwen3, "Qwen3ForCausalLM"),
    "qwen3_moe": Family(_qwen3_moe, "Qwen3MoeForCausalLM"),
    "gemma3_text": Family(_gemma3, "Gemma3ForCausalLM"),
    "gpt2": Family(_gpt2, "GPT2LMHeadModel"),
    "mimo": Family(_mimo, "MiMoForCausalLM"),
}
"""By ``model_type``."""

REFUSED = {
    "deepseek_v2": "its attention keeps a compressed latent (MLA)",
    "deepseek_v3": "its attention keeps a compressed latent (MLA)",
    "deepseek_v32": "its attention keeps a compressed latent (MLA)",
    "kimi_k2": "its attention keeps a compressed latent (MLA)",
    "glm_moe_dsa": "its attention keeps a compressed latent (MLA)",
    "longcat_flash": "its attention keeps a compressed latent (MLA)",
    "qwen3_next": "most of its layers have linear attention, whose state cannot be "
    "taken back when a draft is rejected",
    "qwen3_5_text": "most of its layers have linear attention, whose state cannot be "
    "taken back when a draft is rejected",
    "qwen3_5_moe_text": "most of its layers have linear attention, whose state cannot "
    "be taken back when a draft is rejected",
}
"""Kinds that people ask for, and why they cannot be read yet."""
