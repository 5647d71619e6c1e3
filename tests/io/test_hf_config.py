"""Configurations: defaults of each family, both spellings, and nothing ignored."""

import pytest
from conftest import LLAMA

from jaxdec.io.checkpoint import CheckpointError, config_from_json, config_to_json
from jaxdec.io.hf_config import config_from_hf, stop_tokens_from_hf
from jaxdec.models.config import MoeConfig, RopeConfig

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def with_rope(rope, spelling, theta=5e5):
    values = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    if spelling == "new":
        return values | {"rope_parameters": rope | {"rope_theta": theta}}
    if spelling == "type":
        rope = {"type" if k == "rope_type" else k: v for k, v in rope.items()}
    return values | {"rope_scaling": rope, "rope_theta": theta}


@pytest.mark.parametrize("spelling", ["old", "type", "new"])
@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default"}, RopeConfig(theta=5e5)),
        (
            {"rope_type": "linear", "factor": 8.0},
            RopeConfig(theta=5e5, kind="linear", factor=8.0),
        ),
        (
            LLAMA3,
            RopeConfig(
                theta=5e5,
                kind="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_positions=64,
            ),
        ),
        (
            YARN | {"mscale": 0.7, "truncate": False, "beta_fast": 16},
            RopeConfig(
                theta=5e5,
                kind="yarn",
                factor=4.0,
                original_max_positions=32,
                mscale=0.7,
                truncate=False,
                beta_fast=16.0,
            ),
        ),
    ],
)
def test_rope_in_every_spelling(rope, expected, spelling):
    assert config_from_hf(with_rope(rope, spelling)).ropes == (expected,)


@pytest.mark.parametrize("spelling", ["old", "type", "new"])
@pytest.mark.parametrize("kind", ["dynamic", "longrope", "foo"])
def test_an_unknown_rope_is_an_error(kind, spelling):
    with pytest.raises(CheckpointError, match=f"'{kind}' is not supported"):
        config_from_hf(with_rope({"rope_type": kind, "factor": 2.0}, spelling))


def test_a_rope_setting_is_neither_ignored_nor_guessed():
    with pytest.raises(CheckpointError, match="mrope_section"):
        config_from_hf(with_rope({"rope_type": "default", "mrope_section": [1]}, "new"))
    with pytest.raises(CheckpointError, match="partial_rotary_factor=0.5"):
        rope = {"rope_type": "default", "partial_rotary_factor": 0.5}
        config_from_hf(with_rope(rope, "new"))
    with pytest.raises(CheckpointError, match="low_freq_factor"):
        config_from_hf(with_rope({"rope_type": "llama3", "factor": 8.0}, "old"))
    with pytest.raises(CheckpointError, match="disagree"):
        values = with_rope({"rope_type": "linear", "factor": 2.0}, "old")
        values["rope_parameters"] = {"rope_type": "linear", "factor": 4.0}
        config_from_hf(values)
    with pytest.raises(CheckpointError, match="rope_theta is"):
        config_from_hf(with_rope(YARN, "new") | {"rope_theta": 1e4})


def test_class_defaults():
    minimal = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    llama = config_from_hf(minimal | {"model_type": "llama"})
    assert (llama.num_kv_heads, llama.head_dim, llama.max_positions) == (4, 8, 2048)
    assert llama.norm_eps == 1e-6 and llama.ropes == (RopeConfig(theta=1e4),)
    assert not llama.tie_embeddings and not llama.qkv_bias and not llama.layer_windows

    one = {"num_key_value_heads": 2}
    mistral = config_from_hf(minimal | one | {"model_type": "mistral"})
    assert mistral.layer_windows == (4096,) * 3
    null = minimal | one | {"model_type": "mistral", "sliding_window": None}
    assert config_from_hf(null).layer_windows == ()

    qwen2 = config_from_hf(minimal | one | {"model_type": "qwen2"})
    assert qwen2.qkv_bias and not qwen2.output_bias and qwen2.head_dim == 8
    qwen3 = config_from_hf(minimal | one | {"model_type": "qwen3"})
    assert qwen3.qk_norm and not qwen3.qkv_bias and qwen3.head_dim == 128


def test_windows_of_qwen():
    values = LLAMA | {
        "model_type": "qwen2",
        "architectures": None,
        "num_hidden_layers": 3,
        "sliding_window": 8,
        "max_window_layers": 1,
    }
    assert config_from_hf(values).layer_windows == ()
    values["use_sliding_window"] = True
    assert config_from_hf(values).layer_windows == (None, 8, 8)
    values["layer_types"] = ["sliding_attention", "full_attention", "full_attention"]
    assert config_from_hf(values).layer_windows == (8, None, None)
    values["layer_types"] = ["linear_attention"] * 3
    with pytest.raises(CheckpointError, match="linear_attention"):
        config_from_hf(values)


def test_nothing_is_ignored_in_silence():
    harmless = {"attention_dropout": 0.1, "use_cache": True, "pretraining_tp": 2}
    neutral = {"new_feature": None, "other": False, "list": [], "logit_scale": 1.0}
    assert config_from_hf(LLAMA | harmless | neutral) == config_from_hf(LLAMA)
    with pytest.raises(CheckpointError, match="residual_multiplier=0.5.*logit_scale=2"):
        config_from_hf(LLAMA | {"residual_multiplier": 0.5, "logit_scale": 2.0})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported; supported are llama"),
        ({"hidden_act": "quick_gelu"}, "'quick_gelu' is not supported"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "load it as one"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"hidden_size": 66}, "not a multiple"),
        ({"num_key_value_heads": 3}, "must be a multiple"),
        ({"vocab_size": "many"}, "'vocab_size' must be a whole number"),
        ({"num_hidden_layers": 2**31}, "'num_hidden_layers' must be .* at most 65536"),
    ],
)
def test_errors_say_what_is_wrong(change, message):
    with pytest.raises(CheckpointError, match=message):
        config_from_hf(LLAMA | change)
    with pytest.raises(CheckpointError, match="has no 'hidden_size'"):
        config_from_hf({k: v for k, v in LLAMA.items() if k != "hidden_size"})


def test_multimodal_wrapper():
    values = {"model_type": "llava", "text_config": LLAMA, "vision_config": {"a": 1}}
    assert config_from_hf(values) == config_from_hf(LLAMA)
    with pytest.raises(CheckpointError, match="quantised"):
        config_from_hf(values | {"quantization_config": {"bits": 4}})


GEMMA3 = {
    "model_type": "gemma3_text",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
}


def test_defaults_of_gemma3():
    config = config_from_hf(GEMMA3)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert config.tie_embeddings and config.qk_norm and config.sandwich_norms
    assert config.attention_scale == 256**-0.5 and config.embedding_scale == 32**0.5
    assert config.activation == "gelu_tanh" and config.max_positions == 131072
    assert [rope.theta for rope in config.ropes] == [1e6, 1e4]
    assert config.layer_rope == (1, 1, 1, 1, 1, 0, 1, 1)
    assert config.layer_windows == (*[4096] * 5, None, 4096, 4096)
    # Without a window the layers keep their own ropes.
    none = config_from_hf(GEMMA3 | {"sliding_window": None})
    assert none.layer_windows == () and none.layer_rope == config.layer_rope


def test_two_ropes_in_both_spellings():
    old = {
        "rope_theta": 5e5,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    full = old["rope_scaling"] | {"rope_theta": 5e5}
    nested = {
        "full_attention": full,
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    config = config_from_hf(GEMMA3 | old)
    assert config == config_from_hf(GEMMA3 | {"rope_parameters": nested})
    assert config.ropes == (
        RopeConfig(theta=5e5, kind="linear", factor=8.0),
        RopeConfig(theta=2e4),
    )
    for wrong, message in (
        ({"rope_parameters": nested, "rope_local_base_freq": 1e4}, "rope_theta is"),
        ({"rope_parameters": nested | {"linear_attention": {"a": 1}}}, "linear_att"),
        (old | {"rope_parameters": nested | {"full_attention": {}}}, "disagree"),
    ):
        with pytest.raises(CheckpointError, match=message):
            config_from_hf(GEMMA3 | wrong)
    with pytest.raises(CheckpointError, match="per kind of layer"):
        values = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
        config_from_hf(values | {"rope_parameters": nested})


def test_patterns_of_windows():
    kinds = ["sliding_attention", "full_attention"] * 4
    by_name = config_from_hf(GEMMA3 | {"layer_types": kinds, "sliding_window": 9})
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        pattern = GEMMA3 | {name: 2, "sliding_window": 9}
        assert config_from_hf(pattern) == by_name
    both = {"sliding_window_pattern": 2, "_sliding_window_pattern": 3}
    with pytest.raises(CheckpointError, match="keep one"):
        config_from_hf(GEMMA3 | both)
    with pytest.raises(CheckpointError, match="attn_logit_softcapping=50"):
        config_from_hf(GEMMA3 | {"attn_logit_softcapping": 50.0})
    with pytest.raises(CheckpointError, match="use_bidirectional_attention"):
        config_from_hf(GEMMA3 | {"use_bidirectional_attention": True})
    with pytest.raises(CheckpointError, match="no sliding window is set"):
        config_from_hf(LLAMA | {"layer_types": ["sliding_attention"] * 2})


def test_gpt2():
    config = config_from_hf({"model_type": "gpt2"})
    assert (config.hidden_size, config.num_layers, config.num_heads) == (768, 12, 12)
    assert (config.intermediate_size, config.max_positions) == (3072, 1024)
    assert config.vocab_size == 50257 and config.tie_embeddings
    assert config.norm == "layer" and config.norm_eps == 1e-5
    assert not config.is_scaled_by_layer and config.attention_scale is None
    older = {"model_type": "gpt2", "n_positions": 64, "n_ctx": 64, "n_inner": None}
    assert config_from_hf(older).max_positions == 64
    for wrong, message in (
        ({"n_positions": 64, "n_ctx": 32}, "n_positions=64 and n_ctx=32"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"activation_function": "tanh"}, "'tanh' is not supported"),
        ({"n_head": 7}, "not a multiple"),
    ):
        with pytest.raises(CheckpointError, match=message):
            config_from_hf({"model_type": "gpt2"} | wrong)


QWEN3_MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "architectures": None,
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


def test_mixtures():
    config = config_from_hf(QWEN3_MOE)
    assert config.moe == MoeConfig(
        num_experts=8,
        num_experts_per_token=2,
        intermediate_size=24,
        norm_topk_prob=False,
        layers=(0, 1, 2, 3),
    )
    assert config.head_dim == 16 and config.qk_norm and not config.qkv_bias
    newer = {k: v for k, v in QWEN3_MOE.items() if k != "num_experts"}
    assert config_from_hf(newer | {"num_local_experts": 8}) == config
    some = QWEN3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert config_from_hf(some).moe.layers == (1,)
    none = QWEN3_MOE | {"decoder_sparse_step": 9}
    assert config_from_hf(none).moe is None
    window = QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 8}
    assert config_from_hf(window).layer_windows == (8,) * 4
    for wrong, message in (
        ({"num_local_experts": 9}, "num_experts=8 and num_local_experts=9"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 of num_experts=8"),
        ({"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
        (
            {"use_sliding_window": True, "max_window_layers": 2},
            "max_window_layers to null",
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            config_from_hf(QWEN3_MOE | wrong)


def test_mimo_is_a_qwen2_with_a_head_width():
    values = LLAMA | {"architectures": None, "head_dim": 24}
    mimo = {"model_type": "mimo", "attention_bias": True, "num_nextn_predict_layers": 1}
    config = config_from_hf(values | mimo)
    assert config.qkv_bias and not config.output_bias and config.head_dim == 24
    with pytest.raises(CheckpointError, match="always have a bias"):
        config_from_hf(values | mimo | {"attention_bias": False})


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("deepseek_v3", "latent"),
        ("qwen3_next", "linear attention"),
        ("qwen3_5_text", "linear attention"),
    ],
)
def test_families_that_must_wait_are_refused_by_name(kind, why):
    with pytest.raises(CheckpointError, match=f"'{kind}' is not supported: .*{why}"):
        config_from_hf({"model_type": "wrapper", "text_config": {"model_type": kind}})


def test_stop_tokens():
    assert stop_tokens_from_hf(None, {"eos_token_id": 2}) == (2,)
    assert stop_tokens_from_hf({"eos_token_id": [5, 3, 5]}, {"eos_token_id": 2}) == (
        5,
        3,
    )
    assert stop_tokens_from_hf({"eos_token_id": None}, {"eos_token_id": 2}) == (2,)
    assert stop_tokens_from_hf({}, {"text_config": {"eos_token_id": 0}}) == (0,)
    assert stop_tokens_from_hf(None, {"eos_token_id": None}) == ()


def test_configurations_survive_json():
    import dataclasses
    import json

    config = dataclasses.replace(
        config_from_hf(with_rope(LLAMA3, "new")),
        layer_windows=(None, 8),
        layer_rope=(0, 1),
        ropes=(RopeConfig(kind="factors", factors=(1.0, 0.1 + 0.2)), RopeConfig()),
        moe=MoeConfig(
            num_experts=4,
            num_experts_per_token=2,
            intermediate_size=8,
            norm_topk_prob=True,
            layers=(1,),
        ),
    )
    again = config_from_json(json.loads(json.dumps(config_to_json(config))))
    assert again == config and hash(again) == hash(config)
