"""GGUF files of every architecture hold the model that the Hugging Face files hold.

Files are written with the ``gguf`` package and with its names for tensors, after doing
to the tensors what llama.cpp's converters do.
"""

import dataclasses

import gguf
import numpy as np
import pytest
from conftest import interleave, write_folder
from test_families import CASES, GPT2, MOE, SHAPE, published

from jaxdec.io.cache import load_checkpoint
from jaxdec.io.checkpoint import CheckpointError

GEMMA3 = {
    "model_type": "gemma3_text",
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 4,
    "rope_theta": 1e6,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
MODELS = {
    "llama": SHAPE | {"model_type": "llama", "attention_bias": True},
    "qwen2": SHAPE | CASES["qwen2: a window from the second layer on"],
    "qwen3moe": SHAPE | MOE | {"num_experts": 4, "norm_topk_prob": True},
    "gemma3": SHAPE | GEMMA3 | {"num_hidden_layers": 7},
    "gpt2": GPT2 | {"n_positions": 32, "n_inner": 24},
}
MODELS["qwen2"]["use_sliding_window"] = False
ENUMS = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "gpt2": gguf.MODEL_ARCH.GPT2,
}


def converted(arch, config, tensors):
    """Tensors as a converter writes them, by their names in the file."""
    num_layers = config.get("num_hidden_layers", config.get("n_layer"))
    names = gguf.get_tensor_name_map(ENUMS[arch], num_layers)
    out = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("transformer.")
        if name.endswith(".attn.bias"):
            continue  # The causal mask of GPT-2.
        if arch == "gpt2" and tensor.ndim == 2 and name.startswith("h."):
            tensor = np.ascontiguousarray(tensor.T)
        if arch == "gemma3" and name.endswith("norm.weight"):
            tensor = tensor + 1
        for letter, heads in (
            ("q", "num_attention_heads"),
            ("k", "num_key_value_heads"),
        ):
            if arch == "llama" and f".{letter}_proj." in name:
                tensor = interleave(tensor, config[heads])
        if name.endswith("gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            gate, up = np.split(tensor, 2, axis=1)
            pieces = {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
        else:
            pieces = {name if "." in name[-7:] else f"{name}.weight": tensor}
        for piece, value in pieces.items():
            new = names.get_name(piece, (".weight", ".bias"))
            assert new is not None, piece
            out[new] = np.ascontiguousarray(value)
    return out


def write(path, arch, config, tensors, kind=None, **more):
    """A file with the metadata that converters of this architecture write."""
    writer = gguf.GGUFWriter(path, arch)
    if arch == "gpt2":
        writer.add_block_count(config["n_layer"])
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(config["n_embd"])
        writer.add_feed_forward_length(config["n_inner"])
        writer.add_head_count(config["n_head"])
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_freq_base(config.get("rope_theta", 1e4))
        if "head_dim" in config:
            writer.add_key_length(config["head_dim"])
            writer.add_value_length(config["head_dim"])
        if "num_experts" in config:
            writer.add_expert_count(config["num_experts"])
            writer.add_expert_used_count(config["num_experts_per_tok"])
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        if arch == "gemma3":
            writer.add_sliding_window(config["sliding_window"])
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(8.0)
    for key, value in more.items():
        add = writer.add_array if isinstance(value, list) else writer.add_uint32
        add = writer.add_float32 if isinstance(value, float) else add
        add(f"{arch}.{key.replace('__', '.')}", value)
    for name, tensor in tensors.items():
        if kind is None or tensor.ndim == 1 or tensor.shape[-1] % 32:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def both(tmp_path, arch, change=lambda tensors: tensors, **more):
    """The same random model from a folder and from a GGUF file."""
    config = MODELS[arch]
    tensors = published(config, np.random.default_rng(5))
    folder = load_checkpoint(write_folder(tmp_path / "folder", config, tensors))
    stored = change(converted(arch, config, tensors))
    return folder, load_checkpoint(
        write(tmp_path / "model.gguf", arch, config, stored, **more)
    )


def assert_equal(found, original):
    assert set(found.tensors) == set(original.tensors)
    for name, tensor in original.tensors.items():
        np.testing.assert_array_equal(found.tensors[name], tensor, name)


@pytest.mark.parametrize("arch", MODELS)
def test_the_same_model(tmp_path, arch):
    original, found = both(tmp_path, arch)
    assert found.config == original.config
    assert_equal(found, original)


def test_quantised_experts(tmp_path):
    """Every expert is a piece of a tensor whose blocks run along its last axis."""
    config = MODELS["qwen3moe"] | {
        "hidden_size": 32,
        "intermediate_size": 32,
        "moe_intermediate_size": 32,
    }
    tensors = published(config, np.random.default_rng(5))
    kind = gguf.GGMLQuantizationType.Q8_0
    stored = converted("qwen3moe", config, tensors)
    path = write(tmp_path / "m.gguf", "qwen3moe", config, fuse(stored), kind=kind)
    found = load_checkpoint(path).tensors
    gates = stored["blk.1.ffn_gate_exps.weight"]
    gates = gguf.dequantize(gguf.quantize(gates, kind), kind)
    for expert in range(4):
        name = f"model.layers.1.mlp.experts.{expert}.gate_proj.weight"
        np.testing.assert_array_equal(found[name], gates[expert])
    assert not np.array_equal(gates, stored["blk.1.ffn_gate_exps.weight"])


def fuse(tensors):
    """Query, key and value as one, and the halves of the experts too."""
    fused = {}
    for name, tensor in tensors.items():
        if ".attn_q." in name or ".ffn_gate_exps." in name:
            parts = [tensor]
            for other in (
                ("attn_k.", "attn_v.") if ".attn_q." in name else ("ffn_up_exps.",)
            ):
                stem = "attn_q." if ".attn_q." in name else "ffn_gate_exps."
                parts.append(tensors[name.replace(stem, other)])
            new = "attn_qkv." if ".attn_q." in name else "ffn_gate_up_exps."
            axis = 0 if ".attn_q." in name else 1
            fused[name.replace(stem, new)] = np.concatenate(parts, axis)
        elif not any(f".{k}." in name for k in ("attn_k", "attn_v", "ffn_up_exps")):
            fused[name] = tensor
    return fused


@pytest.mark.parametrize("arch", ["qwen2", "qwen3moe"])
def test_fused_tensors(tmp_path, arch):
    original, found = both(tmp_path, arch, fuse)
    assert found.config == original.config
    assert_equal(found, original)


def test_gemma_settings_that_files_may_have(tmp_path):
    original, found = both(
        tmp_path,
        "gemma3",
        rope__freq_base_swa=2e3,
        final_logit_softcapping=30.0,
        attention__sliding_window_pattern=[True, False] * 3 + [True],
    )
    ropes = (original.config.ropes[0], dataclasses.replace(original.config.ropes[1]))
    assert found.config == dataclasses.replace(
        original.config,
        ropes=(ropes[0], dataclasses.replace(ropes[1], theta=2e3)),
        logit_softcap=30.0,
        layer_rope=(1, 0, 1, 0, 1, 0, 1),
        layer_windows=(4, None, 4, None, 4, None, 4),
    )
    with pytest.raises(CheckpointError, match="attn_logit_softcapping=5"):
        both(tmp_path / "other", "gemma3", attn_logit_softcapping=5.0)


def test_layers_without_experts_are_dense(tmp_path):
    """Only the tensors say so, and an MLP may be missing nowhere."""

    def dense(tensors):
        kept = {n: x for n, x in tensors.items() if not n.startswith("blk.0.ffn_")}
        rng = np.random.default_rng(0)
        for name, shape in (("gate", (20, 16)), ("up", (20, 16)), ("down", (16, 20))):
            mlp = rng.normal(size=shape).astype(np.float32)
            kept[f"blk.0.ffn_{name}.weight"] = mlp
        norm = "blk.0.ffn_norm.weight"
        return kept | {norm: tensors[norm]}

    _, found = both(tmp_path, "qwen3moe", dense)
    assert found.config.moe.layers == (1,)
    assert "model.layers.0.mlp.gate_proj.weight" in found.tensors


def test_mtp_blocks(tmp_path):
    """They are counted with the layers, and are handed on under their own names."""
    rng = np.random.default_rng(1)
    module = {
        "nextn.eh_proj": (16, 32),
        "nextn.enorm": (16,),
        "nextn.shared_head_norm": (16,),
        "attn_q": (24, 16),
        "ffn_norm": (16,),
        "ffn_gate_exps": (4, 12, 16),
    }
    added = {
        f"blk.2.{name}.weight": rng.normal(size=shape).astype(np.float32)
        for name, shape in module.items()
    }
    config = MODELS["qwen3moe"] | {"num_hidden_layers": 3}
    tensors = published(MODELS["qwen3moe"], np.random.default_rng(5))
    stored = converted("qwen3moe", MODELS["qwen3moe"], tensors) | added
    path = tmp_path / "m.gguf"
    write(path, "qwen3moe", config, stored, nextn_predict_layers=1)
    for found in (load_checkpoint(path), load_checkpoint(path)):  # The second, kept.
        assert found.config.num_layers == 2 and found.config.moe.layers == (0, 1)
        assert found.settings["nextn_predict_layers"] == 1
        prefix = "model.layers.2"
        experts = {f"{prefix}.mlp.experts.{e}.gate_proj.weight" for e in range(4)}
        assert set(found.extra) == experts | {
            f"{prefix}.{name}.weight"
            for name in (
                "eh_proj",
                "enorm",
                "shared_head.norm",
                "self_attn.q_proj",
                "post_attention_layernorm",
            )
        }
        np.testing.assert_array_equal(
            found.extra[f"{prefix}.eh_proj.weight"], added["blk.2.nextn.eh_proj.weight"]
        )
