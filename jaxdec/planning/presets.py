"""Models by name, and drafters in the shapes that are published for them.

Only shapes: what a program costs depends on nothing else. Targets have the sizes of
their ``config.json``; drafters have the target's widths, as published ones do:

    eagle3    one layer that reads three taps; says 32,000 tokens, with a head of its
              own (arXiv 2503.01840); drafts 7
    dflash    five layers, five taps, blocks of 16 with the anchor (z-lab; 2602.06036)
    dspark    five layers, five taps, blocks of 7, Markov head of rank 256, confidence
              head (DeepSpec; 2607.05147); its embedding and head are the target's
"""

from jaxdec.models.block import BlockConfig
from jaxdec.models.config import ModelConfig, RopeConfig
from jaxdec.models.eagle_config import EagleConfig

EAGLE_VOCABULARY = 32000
NUM_BLOCK_LAYERS = 5
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
}
"""Targets by name."""


def _layers(target: ModelConfig, num_layers: int, *, qk_norm: bool) -> ModelConfig:
    """Layers of the target's widths."""
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


def eagle3(target: ModelConfig) -> EagleConfig:
    """EAGLE-3 as published: a chain of 7, or a tree."""
    num = target.num_layers
    return EagleConfig(
        layers=_layers(target, 1, qk_norm=False),
        taps=(min(2, num), num // 2, max(num - 3, 0)),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=min(EAGLE_VOCABULARY, target.vocab_size),
        own_embedding=False,
        own_head=True,
        draft_length=7,
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


def _block(target: ModelConfig, **layout) -> BlockConfig:
    num, steps = target.num_layers, range(NUM_TAPS)
    # From the second layer to the last but two, as z-lab chose them.
    taps = [2 + round(i * (num - 4) / (NUM_TAPS - 1)) for i in steps]
    return BlockConfig(
        layers=_layers(target, NUM_BLOCK_LAYERS, qk_norm=True),
        taps=tuple(max(1, min(tap, num)) for tap in taps),
        mask_token=target.vocab_size - 1,
        draft_vocab_size=target.vocab_size,
        own_embedding=False,
        own_head=False,
        windows=(None,) * NUM_BLOCK_LAYERS,
        causal=(False,) * NUM_BLOCK_LAYERS,
        **layout,
    )
