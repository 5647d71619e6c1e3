"""Every family from its published files, against a slow decoder in NumPy.

The configurations go where the golden cases do not: other spellings, class defaults,
biases, scalings, patterns of windows and of mixtures, heads of their own.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from conftest import write_folder

import jaxdec
from jaxdec.models.decoder import make_model

SHAPE = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 48, "n_embd": 16, "n_head": 4, "n_layer": 2}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 8,
}
NEW_YARN = YARN | {"rope_theta": 5e3, "attention_factor": 1.3, "truncate": False}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
LINEAR = {"type": "linear", "factor": 4.0}
MOE = {
    "model_type": "qwen3_moe",
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "head_dim": 6,
}

CASES = {
    "llama: biases, own head width, yarn with two mscales": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 6,
        "rope_theta": 2e3,
        "rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4},
    },
    "llama: tied, one key/value head, llama3 rope, newer spelling": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
        "rope_parameters": LLAMA3,
    },
    "mistral: a window in every layer, linear rope": {
        "model_type": "mistral",
        "sliding_window": 5,
        "rope_theta": 1e4,
        "rope_scaling": LINEAR,
    },
    "qwen2: a window from the second layer on": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
    },
    "qwen2: layer types, yarn, newer spelling": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": NEW_YARN,
    },
    "qwen3: biases, own head width": {
        "model_type": "qwen3",
        "attention_bias": True,
        "head_dim": 10,
        "rope_theta": 1e6,
    },
    "qwen3_moe: every other layer, sums below one, newer name": MOE
    | {
        "num_local_experts": 5,
        "decoder_sparse_step": 2,
        "norm_topk_prob": False,
        "rope_theta": 1e6,
    },
    "qwen3_moe: a dense layer listed, biases, windows, default names": MOE
    | {
        "num_experts": 4,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 4,
        "rope_theta": 1e6,
    },
    "gemma3: ropes per kind of layer, pattern, softcap, own head": {
        "model_type": "gemma3_text",
        "head_dim": 8,
        "query_pre_attn_scalar": 20,
        "sliding_window": 4,
        "_sliding_window_pattern": 2,
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            "full_attention": LINEAR | {"rope_theta": 3e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
        },
    },
    "gpt2: prefix, own inner width, own head, layers scaled": GPT2
    | {
        "n_positions": 32,
        "n_inner": 24,
        "activation_function": "relu",
        "tie_word_embeddings": False,
        "scale_attn_by_inverse_layer_idx": True,
    },
    "gpt2: scores not scaled": GPT2 | {"n_positions": 32, "scale_attn_weights": False},
    "mimo: own head width": {
        "model_type": "mimo",
        "head_dim": 8,
        "attention_bias": True,
        "rope_theta": 64e4,
        "sliding_window": 32768,
        "use_sliding_window": False,
    },
}


def published(config, rng):
    """Random tensors under the names of the files of a family."""
    tensors = {}

    def add(name, *shape, scale=None):
        scale = shape[-1] ** -0.5 if scale is None else scale
        tensors[name] = (rng.normal(size=shape) * scale).astype(np.float32)

    def linear(name, rows, columns, bias):
        add(f"{name}.weight", rows, columns, scale=columns**-0.5)
        if bias:
            add(f"{name}.bias", rows, scale=0.3)

    if config["model_type"] == "gpt2":
        width, inner = config["n_embd"], config.get("n_inner", 4 * config["n_embd"])
        add("transformer.wte.weight", config["vocab_size"], width, scale=1)
        add("transformer.wpe.weight", config["n_positions"], width, scale=0.5)
        norms = ["ln_f"]
        for i in range(config["n_layer"]):
            norms += [f"h.{i}.ln_1", f"h.{i}.ln_2"]
            for name, num_in, num_out in (
                ("attn.c_attn", width, 3 * width),
                ("attn.c_proj", width, width),
                ("mlp.c_fc", width, inner),
                ("mlp.c_proj", inner, width),
            ):
                name = f"transformer.h.{i}.{name}"
                add(f"{name}.weight", num_in, num_out, scale=num_in**-0.5)
                add(f"{name}.bias", num_out, scale=0.3)
            tensors[f"transformer.h.{i}.attn.bias"] = np.ones((1, 1, 32, 32), bool)
        for name in norms:
            add(f"transformer.{name}.weight", width, scale=1)
            add(f"transformer.{name}.bias", width, scale=0.3)
        if not config.get("tie_word_embeddings", True):
            add("lm_head.weight", config["vocab_size"], width)
        return tensors
    kind, width = config["model_type"], config["hidden_size"]
    is_gemma = kind == "gemma3_text"
    heads = config.get("num_attention_heads", 8)
    groups = config.get("num_key_value_heads", 4)
    default = 256 if is_gemma else width // heads
    head_dim = config.get("head_dim", default)
    bias = config.get("attention_bias", False)
    always = kind in ("qwen2", "mimo")
    add("model.embed_tokens.weight", config["vocab_size"], width, scale=1)
    add("model.norm.weight", width, scale=1)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        names = ["input_layernorm", "post_attention_layernorm"]
        if is_gemma:
            names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for name in names:
            add(f"{layer}.{name}.weight", width, scale=1)
        attn = f"{layer}.self_attn"
        linear(f"{attn}.q_proj", heads * head_dim, width, bias or always)
        linear(f"{attn}.k_proj", groups * head_dim, width, bias or always)
        linear(f"{attn}.v_proj", groups * head_dim, width, bias or always)
        linear(f"{attn}.o_proj", width, heads * head_dim, bias and not always)
        if is_gemma or kind.startswith("qwen3"):
            add(f"{attn}.q_norm.weight", head_dim, scale=1)
            add(f"{attn}.k_norm.weight", head_dim, scale=1)
        experts = config.get("num_experts", config.get("num_local_experts"))
        step = config.get("decoder_sparse_step", 1)
        if experts and i not in config.get("mlp_only_layers", []):
            if (i + 1) % step == 0:
                inner = config["moe_intermediate_size"]
                add(f"{layer}.mlp.gate.weight", experts, width, scale=1)
                fused = f"{layer}.mlp.experts"
                add(f"{fused}.gate_up_proj", experts, 2 * inner, width)
                add(f"{fused}.down_proj", experts, width, inner)
                continue
        inner, mlp_bias = config["intermediate_size"], config.get("mlp_bias", False)
        linear(f"{layer}.mlp.gate_proj", inner, width, mlp_bias)
        linear(f"{layer}.mlp.up_proj", inner, width, mlp_bias)
        linear(f"{layer}.mlp.down_proj", width, inner, mlp_bias)
    if not config.get("tie_word_embeddings", is_gemma):
        add("lm_head.weight", config["vocab_size"], width)
    return tensors


def split_experts(tensors):
    """Every expert's tensors apart, as files on the Hub have them."""
    apart = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        if not stem.endswith("experts"):
            apart[name] = tensor
        for e in range(len(tensor) if stem.endswith("experts") else 0):
            pieces = {"down_proj": tensor[e]}
            if kind == "gate_up_proj":
                gate, up = np.split(tensor[e], 2)
                pieces = {"gate_proj": gate, "up_proj": up}
            for piece, value in pieces.items():
                apart[f"{stem}.{e}.{piece}.weight"] = np.ascontiguousarray(value)
    return apart


def library_logits(folder, tokens):
    lm = jaxdec.load(folder, dtype="float32")
    model = make_model(lm.config)
    position = jnp.arange(len(tokens), dtype=jnp.int32)[None]
    options = {"xla_backend_optimization_level": 0}
    _, output = jax.jit(model.forward, compiler_options=options)(
        lm.params, model.init_cache(1, 64), jnp.asarray([tokens]), position, None
    )
    return np.asarray(output.logits[0])


@pytest.mark.parametrize("name", CASES)
def test_logits(tmp_path, name):
    config = CASES[name]
    if config["model_type"] != "gpt2":
        config = SHAPE | config
    rng = np.random.default_rng(3)
    tensors = published(config, rng)
    tokens = rng.integers(0, 48, 14).astype(np.int32)
    expected = reference.logits(config, tensors, tokens)
    stored = split_experts(tensors) if "default names" in name else tensors
    found = library_logits(write_folder(tmp_path, config, stored), tokens)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_a_multimodal_wrapper_with_class_defaults(tmp_path):
    """As Gemma 3 4B is published: what equals the class default is not in the file."""
    inner = {
        "model_type": "gemma3_text",
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 6,
        "vocab_size": 48,
        "sliding_window": 4,
        "max_position_embeddings": 64,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    wrapper = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": inner,
        "vision_config": {"hidden_size": 8},
        "mm_tokens_per_image": 256,
    }
    rng = np.random.default_rng(3)
    tensors = published(inner, rng)
    tokens = rng.integers(0, 48, 14).astype(np.int32)
    stored = {f"language_model.{name}": x for name, x in tensors.items()}
    stored["vision_tower.patch.weight"] = np.ones((2, 2), np.float32)
    found = library_logits(write_folder(tmp_path, wrapper, stored), tokens)
    expected = reference.logits(inner, tensors, tokens)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
