"""What a decoder is: the static facts of a model, one frozen record for every family.

The switches are those of section 1 of the Hugging Face modelling files of the Llama,
Qwen, Gemma and GPT-2 families; a loader fills them from ``config.json`` or from GGUF
metadata, and an option it does not understand is an error, never a default.
"""

import dataclasses
import math
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of one group of layers.

    Half-rotation (NeoX) order throughout: dimension i pairs with i + D/2.
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "yarn", "factors"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    rotated: float = 1.0
    """Which part of a head's dimensions is rotated, from the first on."""
    factors: tuple[float, ...] = ()
    """Per-frequency divisors (GGUF's ``rope_freqs``), for ``kind="factors"``."""

    def __post_init__(self):
        if not 0 < self.theta < math.inf:
            raise ValueError(f"rope theta must be above 0, got {self.theta}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Mixture of experts in place of the dense MLP (Qwen3-MoE style routing)."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    norm_topk_prob: bool
    layers: tuple[int, ...]
    """Indices of the layers that are mixtures."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A causal decoder. Hashable, so it can be closed over by a compiled program."""

    family: str
    """Which published family it is of: ``llama``, ``qwen3``, ``gemma3``, ..."""
    vocab_size: int
    """V: rows of the embedding."""
    hidden_size: int
    """E: width of the residual stream."""
    intermediate_size: int
    """Width of the MLP."""
    num_layers: int
    num_heads: int
    """H: query heads."""
    num_kv_heads: int
    """G: key/value heads; H is a multiple."""
    head_dim: int
    """D: width of a head."""
    max_positions: int
    """Longest sequence, prompt and output, in tokens."""
    norm_eps: float = 1e-6
    norm: Literal["rms", "layer"] = "rms"
    activation: Literal["silu", "gelu_tanh", "gelu", "relu"] = "silu"
    gated_mlp: bool = True
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys have an RMS norm each, per head (Qwen3, Gemma 3)."""
    attention_gate: bool = False
    """What attention returns is multiplied by the sigmoid of a projection (Qwen3.5)."""
    sandwich_norms: bool = False
    """Whether attention and MLP have a norm behind them, too (Gemma 3)."""
    embedding_scale: float = 1.0
    """What embeddings are multiplied by (Gemma: ``hidden_size ** 0.5``)."""
    attention_scale: float | None = None
    """None is head_dim ** -0.5."""
    is_scaled_by_layer: bool = False
    """Whether layer i divides its attention scale by i + 1 (GPT-2)."""
    learned_positions: bool = False
    """Added to the embeddings, in place of rotation (GPT-2)."""
    ropes: tuple[RopeConfig, ...] = (RopeConfig(),)
    layer_rope: tuple[int, ...] = ()
    """Per layer, an index into `ropes`; empty is 0 for all."""
    layer_windows: tuple[int | None, ...] = ()
    """Per layer, the sliding window (keys, own token counted); empty: none."""
    logit_softcap: float | None = None
    """Logits become ``tanh(logits / cap) * cap``; None is no cap."""
    moe: MoeConfig | None = None

    def __post_init__(self):
        if not 0 <= self.norm_eps < 1:
            raise ValueError(
                f"a norm's epsilon must be small and not below 0, got {self.norm_eps}"
            )
