"""A drafter as it was found on disk, in one shape whatever its format."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterCheckpoint:
    """A drafter's configuration, its own tensors, and what a person wants to know."""

    family: Literal["eagle", "block", "mtp", "draft"]
    config: Any
    """The family's normalised record."""
    tensors: Mapping[str, np.ndarray]
    """Exactly the family's expected tensors, under canonical names."""
    format: str
    """Who writes such files, for example "speculators EAGLE-3"."""
    facts: dict[str, Any]
    """Layout, taps, vocabulary, heads, and every choice made where a field was missing;
    JSON values, shown by ``jaxdec inspect``."""
