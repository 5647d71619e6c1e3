"""Models by name, and drafters in the shapes that are published for them.

Only shapes: what a program costs depends on nothing else. The sizes of targets are
those of their ``config.json``; drafters have the target's widths, as published ones do:

    eagle3    one layer that reads three taps; says 32,000 tokens, with a head of its
              own (SafeAILab, AngelSlim; arXiv 2503.01840)
    dflash    five layers, five taps, blocks of 16 with the anchor (z-lab; 2602.06036)
    dspark    five layers, five taps, blocks of 7, Markov head of rank 256, confidence
              head (DeepSpec; 2607.05147); its embedding and head are the target's
    mtp       one module with one layer (DeepSeek-V3; 2412.19437)
"""

from jaxdec.models.block import BlockConfig
from jaxdec.models.config import ModelConfig, RopeConfig
from jaxdec.models.eagle_config import EagleConfig
from jaxdec.models.mtp import MtpConfig

EAGLE_VOCABULARY = 32000
EAGLE_LENGTH = 7
BLOCK_LAYERS = 5
NUM_TAPS = 5


def _qwen3(hidden: int, inner: int, layers: int, heads: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        family="qwen3",
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        max_positions=40960,
        qk_norm=True,
        tie_embeddings=tied,
        ropes=(RopeConfig(theta=1e6),),
    )


TARGETS: dict[str, ModelConfig] = {
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "llama-3.1-8b": ModelConfig(
        family="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_positions=131072,
        norm_eps=1e-5,
        ropes=(
            RopeConfig(
                theta=5e5, kind="llama3", factor=8.0, original_max_positions=8192
            ),
        ),
    ),
    "smollm2": ModelConfig(
        family="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_positions=8192,
        norm_eps=1e-5,
        tie_embeddings=True,
        ropes=(RopeConfig(theta=1e5),),
    ),
}
"""Targets by name."""

DRAFT_MODELS = {
    "qwen3-8b": "qwen3-0.6b",
    "qwen3-4b": "qwen3-0.6b",
    "qwen3-1.7b": "qwen3-0.6b",
}
"""A smaller model with the same tokenizer."""


def _layers(target: ModelConfig, num_layers: int, *, qk_norm: bool) -> ModelConfig:
    """Llama-like layers of the target's widths."""
    return ModelConfig(
        family="qwen3" if qk_norm else "llama",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        max_positions=target.max_positions,
        norm_eps=target.norm_eps,
        qk_norm=qk_norm,
        ropes=(RopeConfig(theta=1e6),),
    )


def _spread_taps(num_layers: int) -> tuple[int, ...]:
    """Five taps from the second layer to the last but two, as z-lab chose them.

    >>> _spread_taps(36)
    (2, 10, 18, 26, 34)
    """
    steps = range(NUM_TAPS)
    taps = [2 + round(i * (num_layers - 4) / (NUM_TAPS - 1)) for i in steps]
    return tuple(max(1, min(tap, num_layers)) for tap in taps)


def eagle3(target: ModelConfig) -> EagleConfig:
    """EAGLE-3 as published: a chain of 7, or a tree."""
    num = target.num_layers
    drafted = min(EAGLE_VOCABULARY, target.vocab_size)
    return EagleConfig(
        layers=_layers(target, 1, qk_norm=False),
        taps=(min(2, num), num // 2, max(num - 3, 0)),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=drafted,
        own_embedding=False,
        own_head=True,
        draft_length=EAGLE_LENGTH,
    )


def dflash(target: ModelConfig) -> BlockConfig:
    """DFlash b16: the anchor and 15 masks."""
    return _block(target, block_size=16, sample_from_anchor=False)


def dspark(target: ModelConfig) -> BlockConfig:
    """DSpark block 7: every row says a token, the anchor's too."""
    return _block(
        target,
        block_size=7,
        sample_from_anchor=True,
        markov="vanilla",
        markov_rank=256,
        confidence="hidden_and_previous",
    )


def mtp(target: ModelConfig) -> MtpConfig:
    """One multi-token-prediction module."""
    return MtpConfig(
        block=_layers(target, 1, qk_norm=target.qk_norm),
        num_target_layers=target.num_layers,
        hidden_source="pre",
        recycle="post",
    )


def _block(target: ModelConfig, **layout) -> BlockConfig:
    return BlockConfig(
        layers=_layers(target, BLOCK_LAYERS, qk_norm=True),
        taps=_spread_taps(target.num_layers),
        mask_token=target.vocab_size - 1,
        draft_vocab_size=target.vocab_size,
        own_embedding=False,
        own_head=False,
        windows=(None,) * BLOCK_LAYERS,
        causal=(False,) * BLOCK_LAYERS,
        **layout,
    )
