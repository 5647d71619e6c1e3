"""Names of tensors in GGUF files, by architecture.

GGUF has one vocabulary of names for all models, but not one meaning: ``ffn_norm`` is
the norm before the MLP, which files of Gemma 3 call by another name than Llama's.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping

from jaxdec.io.names import Part, unique_parts
from jaxdec.models.config import ModelConfig

_GLOBAL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
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
    "ffn_gate_inp": "mlp.gate",
    # Multi-token-prediction modules, as layers past the last.
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
_GEMMA3_LAYER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT2_GLOBAL = {
    "token_embd": "wte",
    "position_embd": "wpe",
    "output_norm": "ln_f",
    "output": "lm_head",
}
_GPT2_LAYER = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How files of one architecture name things."""

    model_type: str
    """The same architecture in ``config.json``."""
    has_permuted_rows: bool = False
    """Whether the rows of query and key projections are interleaved."""
    names: Mapping[str, str] = dataclasses.field(default_factory=lambda: _GLOBAL)
    layer_names: Mapping[str, str] = dataclasses.field(default_factory=lambda: _LAYER)
    layer_prefix: str = "model.layers"


ARCHITECTURES = {
    "llama": Architecture("llama", has_permuted_rows=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe"),
    "gemma3": Architecture("gemma3_text", layer_names=_GEMMA3_LAYER),
    "gpt2": Architecture(
        "gpt2", names=_GPT2_GLOBAL, layer_names=_GPT2_LAYER, layer_prefix="h"
    ),
}

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_EXPERTS = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_down_exps": ("down_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
}


def gguf_parts(
    arch: str, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Part]:
    """Maps canonical names to what a GGUF file stores.

    A name without translation stays as it is, for the check to report.

    Args:
        arch: Which architecture.
        config: What the model is.
        shapes: Of the tensors in the file, by their names there, in row order.

    Raises:
        CheckpointError: Two tensors in the file mean the same one.
    """
    return unique_parts(
        (target, Part(name, index))
        for name, shape in shapes.items()
        for target, index in _translated(ARCHITECTURES[arch], config, name, shape)
    )


def _translated(
    arch: Architecture, config: ModelConfig, name: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int | slice, ...]]]:
    stem, _, suffix = name.rpartition(".")
    block = _BLOCK.fullmatch(stem)
    if block is None:
        yield f"{arch.names[stem]}.{suffix}" if stem in arch.names else name, ()
        return
    prefix, kind = f"{arch.layer_prefix}.{block[1]}", block[2]
    if kind in arch.layer_names:
        yield f"{prefix}.{arch.layer_names[kind]}.{suffix}", ()
    elif kind == "attn_qkv" and shape[0] == _fused_rows(config):
        start = 0
        for letter, num in zip("qkv", _fused_heads(config), strict=True):
            rows = slice(start, start + num * config.head_dim)
            yield f"{prefix}.self_attn.{letter}_proj.{suffix}", (rows,)
            start = rows.stop
    elif kind in _EXPERTS and len(shape) == 3:
        projections = _EXPERTS[kind]
        size = shape[1] // len(projections)
        for expert in range(shape[0]):
            for i, projection in enumerate(projections):
                is_last = i == len(projections) - 1
                rows = slice(i * size, shape[1] if is_last else (i + 1) * size)
                target = f"{prefix}.mlp.experts.{expert}.{projection}.{suffix}"
                yield target, (expert, rows)
    else:
        yield name, ()


def _fused_heads(config: ModelConfig) -> tuple[int, int, int]:
    return config.num_heads, config.num_kv_heads, config.num_kv_heads


def _fused_rows(config: ModelConfig) -> int:
    return sum(_fused_heads(config)) * config.head_dim
