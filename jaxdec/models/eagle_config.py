"""What an EAGLE drafter is: the static facts, every published variant resolved.

EAGLE-1, EAGLE-2   arXiv 2401.15077, 2406.16858: one feature, joined with the
                   embedding before the first layer, which predicts the next feature
EAGLE-3            arXiv 2503.01840: features of several layers, fused; the first
                   layer (or each) attends with the embedding beside the hidden
                   state
P-EAGLE            arXiv 2602.01469: EAGLE-3 that drafts all its tokens in one pass
"""

import dataclasses
from typing import Literal

from jaxdec.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """An EAGLE drafter. Hashable, so it can be closed over by a compiled program."""

    layers: ModelConfig
    """The drafter's own decoder layers; `vocab_size` is the target's."""
    taps: tuple[int, ...]
    """What the target must return; see `jaxdec.models.decoder.make_model`."""
    target_hidden_size: int
    """The width of each tap."""
    fusion: Literal["taps", "embedding"] = "taps"
    """What the first matrix joins: the taps with one another (EAGLE-3), once; or what
    passes from row to row with the embedding (EAGLE-1), at every row."""
    fusion_norm: Literal["none", "all", "each"] = "none"
    """What is normed before fusing: nothing, all taps as one vector, or each tap."""
    fusion_bias: bool = False
    wide_layers: int = 1
    """How many layers, from the first, read the embedding beside the hidden state."""
    norm_before_residual: bool = False
    """Whether a wide layer adds to the normed hidden state, or to the hidden state."""
    output_norm: Literal["head", "recurrent", "none"] = "head"
    """Whether the last norm is only before the head, part of what passes on, or absent.
    """
    draft_vocab_size: int
    """The tokens it can say; `layers.vocab_size` where that is all of them."""
    own_embedding: bool
    """Whether it has an embedding of its own, or reads the target's."""
    own_head: bool
    """Whether it has a head of its own, or reads the target's."""
    mask_token: int | None = None
    """Stands for tokens not yet known where all are drafted in one pass (P-EAGLE); None
    where they are drafted one after another."""
    draft_length: int
    """How many tokens its authors draft."""

    @property
    def is_reduced(self) -> bool:
        """Whether there are tokens that it cannot say."""
        return self.draft_vocab_size != self.layers.vocab_size

    @property
    def is_parallel(self) -> bool:
        """Whether it drafts all its tokens in one pass."""
        return self.mask_token is not None

    def kind_of_layer(self, layer: int) -> Literal["wide", "bare", "plain"]:
        """Reads the embedding too; or has no norm of its input; or is as usual."""
        if layer < self.wide_layers:
            return "wide"
        return "bare" if layer == 0 and self.fusion == "embedding" else "plain"
