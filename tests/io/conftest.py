"""A tiny Llama in both file formats, and a cache folder of its own for every test."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxdec.io.checkpoint import expected_tensors
from jaxdec.io.hf_config import config_from_hf
from jaxdec.io.tokenizer import byte_of_char

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(autouse=True)
def cache(request, tmp_path, monkeypatch):
    """A fresh cache, except for tests that share the real model."""
    if "real" not in request.keywords:
        monkeypatch.setenv("JAXDEC_CACHE", str(tmp_path / "cache"))


def random_tensors(config, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=shape).astype(np.float32)
        for name, shape in expected_tensors(config).items()
    }


@pytest.fixture
def llama():
    """The configuration file, what it means, and weights for it."""
    config = config_from_hf(LLAMA)
    return dict(LLAMA), config, random_tensors(config)


def write_folder(folder: Path, values: dict, tensors: dict, shards: int = 1) -> Path:
    """A Hugging Face folder; several shards come with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {n: t for j, (n, t) in enumerate(tensors.items()) if j % shards == i}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def to_gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in _GGUF_NAMES:
        return f"{_GGUF_NAMES[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[rest]}.{suffix}"


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """What converters do: row 2j is row j, row 2j+1 is row j + D/2, in every head."""
    out = np.empty_like(rows)
    width = rows.shape[0] // heads
    for head in range(heads):
        for j in range(width // 2):
            out[head * width + 2 * j] = rows[head * width + j]
            out[head * width + 2 * j + 1] = rows[head * width + j + width // 2]
    return out


def vocabulary(size: int) -> list[str]:
    """Three special tokens, the 256 bytes, a few merged words, padding."""
    words = ["he", "ll", "Ġt"]
    tokens = [*SPECIAL, *byte_of_char(), *words]
    return tokens + [f"[PAD{i}]" for i in range(len(tokens), size)]


def write_gguf(
    path: Path,
    config,
    tensors: dict,
    *,
    arch="llama",
    kind="F32",
    extra=(),
    metadata=None,
    tokenizer=True,
) -> Path:
    """A GGUF file as llama.cpp's converter writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.ropes[0].theta)
    if arch == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    else:
        writer.add_rope_dimension_count(config.head_dim)
    for key, value in (metadata or {}).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add = writer.add_string if isinstance(value, str) else add
        add(key, value)
    if tokenizer:
        tokens = vocabulary(config.vocab_size)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        kinds = [
            3 if t in SPECIAL else 5 if t.startswith("[PAD") else 1 for t in tokens
        ]
        writer.add_token_types(kinds)
        writer.add_token_merges(["h e", "l l", "Ġ t"])
        writer.add_eos_token_id(2)
        writer.add_bos_token_id(1)
        writer.add_chat_template(CHATML)
    quantised = gguf.GGMLQuantizationType[kind]
    for name, tensor in {**tensors, **dict(extra)}.items():
        if arch == "llama" and ".q_proj." in name:
            tensor = interleave(tensor, config.num_heads)
        if arch == "llama" and ".k_proj." in name:
            tensor = interleave(tensor, config.num_kv_heads)
        target = name if name in dict(extra) else to_gguf_name(name)
        if tensor.ndim == 1:
            writer.add_tensor(target, tensor.astype(np.float32))
        else:
            data = gguf.quantize(tensor, quantised)
            writer.add_tensor(target, data, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
