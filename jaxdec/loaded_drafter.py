"""A trained drafter, loaded for one target.

drafter = jaxdec.load_drafter("path/to/drafter", lm)
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jaxdec.drafters.draft_model import draft_model
from jaxdec.drafters.dspark import block_drafter
from jaxdec.drafters.eagle import eagle, recurrent_net
from jaxdec.drafters.mtp import mtp
from jaxdec.drafters.mtp import recurrent_net as mtp_recurrent_net
from jaxdec.drafters.recurrent_tree import recurrent_tree
from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.drafters.calibration import read_calibration
from jaxdec.io.drafters.checkpoint import DrafterCheckpoint
from jaxdec.io.drafters.mtp import read_native
from jaxdec.io.drafters.own import is_own, read_own, write_own
from jaxdec.io.drafters.read import open_drafter, read_drafter
from jaxdec.io.drafters.sharing import HEADS, share_with_target
from jaxdec.io.tokenizer import Tokenizer
from jaxdec.models.block import make_block_net
from jaxdec.models.block_weights import (
    block_params_from_tensors,
    block_tensors_from_params,
)
from jaxdec.models.config import ModelConfig
from jaxdec.models.decoder import make_model
from jaxdec.models.eagle_weights import (
    eagle_params_from_tensors,
    eagle_tensors_from_params,
)
from jaxdec.models.mtp import (
    make_mtp,
    mtp_params_from_tensors,
    mtp_tensors_from_params,
)
from jaxdec.models.sharding import replicated
from jaxdec.models.weights import layer_params, layer_tensors
from jaxdec.types import Drafter, DrafterParams, LogitsProcessor, Params

_PARAMS = {
    "eagle": eagle_params_from_tensors,
    "block": block_params_from_tensors,
    "mtp": mtp_params_from_tensors,
    "draft": layer_params,
}
_TENSORS = {
    "eagle": eagle_tensors_from_params,
    "block": block_tensors_from_params,
    "mtp": mtp_tensors_from_params,
    "draft": layer_tensors,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree:
    """The shape of a draft tree."""

    width: int = 4
    """Nodes read together, and continuations looked at of each (EAGLE's top_k)."""
    depth: int = 4
    """Tokens on the longest path."""
    nodes: int = 12
    """Draft tokens that the target judges, the anchor not counted."""

    def __post_init__(self):
        for name in ("width", "depth", "nodes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"a draft tree's {name} must be a whole number of at least 1, got "
                    f"{value!r}"
                )


@dataclasses.dataclass(eq=False, kw_only=True)
class LoadedDrafter:
    """A drafter that is ready for its target; compared by identity."""

    family: Literal["eagle", "block", "mtp", "draft"]
    """The network: EAGLE's, a block, MTP modules, or a small language model."""
    config: Any
    """Its normalised record: `EagleConfig`, `BlockConfig`, `MtpConfig`; or, of a small
    language model with the target's tables, `ModelConfig`."""
    own: Params = dataclasses.field(repr=False)
    """Its arrays; what it shares with the target is not among them."""
    name: str
    """Where it was loaded from."""
    format: str
    """Who writes such files, in words."""
    facts: Mapping[str, Any] = dataclasses.field(repr=False)
    """Layout, taps, vocabulary, heads, choices: what ``jaxdec inspect`` shows."""
    dtype: str = "float32"
    """Of its weights: the target's."""
    content_hash: str = ""
    """Names its file."""
    card: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    """How it came to be, where that is known."""
    target: ModelConfig | None = dataclasses.field(default=None, repr=False)
    """Of the target that it was loaded and checked for."""

    def check_target(self, lm: Any) -> None:
        """Raises ValueError if it was loaded for a target of another shape."""
        own = self.target
        if own is None or own == lm.config:
            return
        different = [
            f"{field.name} {getattr(own, field.name)!r} against "
            f"{getattr(lm.config, field.name)!r}"
            for field in dataclasses.fields(own)
            if getattr(own, field.name) != getattr(lm.config, field.name)
        ]
        raise ValueError(
            f"the drafter {self.name!r} was loaded for another target than "
            f"{lm.name!r} ({', '.join(different[:3])}); load it for this one: "
            "jaxdec.load_drafter(path, lm)"
        )

    @property
    def drafts_at_once(self) -> bool:
        """Whether one pass makes the whole draft, however much of it is wanted."""
        return self.family == "block" or self.kind == "peagle"

    @property
    def kind(self) -> str:
        """The strategy that it serves: the name of a method."""
        if self.family == "mtp":
            return "mtp"
        if self.family == "draft":
            return "draft_model"
        if self.family == "block":
            has_heads = (self.config.markov, self.config.confidence) != ("none", "none")
            return "dspark" if has_heads else "dflash"
        return recurrent_net(self.config).name

    @property
    def has_confidence(self) -> bool:
        """Whether it estimates how likely its tokens are accepted."""
        return self.family == "block" and self.config.confidence != "none"

    @property
    def draft_length(self) -> int:
        """K unless a strategy says otherwise: what its authors draft."""
        if self.family == "block":
            return self.config.max_length
        if self.family == "eagle":
            return self.config.draft_length
        if self.family == "draft":
            return self.facts.get("draft_length") or 4
        # As many as in training, or three; several modules draft in turn.
        num = self.config.num_native_modules
        return -(-(self.facts.get("draft_length") or 3) // num) * num

    @property
    def num_native_modules(self) -> int:
        """Multi-token-prediction modules; 0 for other drafters."""
        return self.config.num_native_modules if self.family == "mtp" else 0

    @property
    def num_params(self) -> int:
        """How many weights of its own it has."""
        return sum(x.size for x in jax.tree.leaves(self.own))

    def params(self, target: Params) -> DrafterParams:
        """Its arrays, and the target's that it shares."""
        if self.family == "draft":
            tables = {k: target[k] for k in ("embedding", "head") if k in target}
            return DrafterParams(own=self.own | tables, shared=())
        return DrafterParams(own=self.own, shared=target)

    @property
    def checkpoint(self) -> DrafterCheckpoint:
        """Its tensors by canonical name, and what they are of."""
        return DrafterCheckpoint(
            family=self.family,
            config=self.config,
            tensors=_TENSORS[self.family](self.config, self.own, self.dtype),
            format=self.format,
            facts=dict(self.facts),
        )

    def chain(
        self,
        length: int,
        *,
        coupled: bool = True,
        greedy: bool = False,
        processor: LogitsProcessor | None = None,
        cache_dtype: str = "float32",
        min_rows: int = 2,
    ) -> Drafter:
        """A drafter of `length` tokens in a row.

        Args:
            length: K.
            coupled: True for the rule `match`, False for `rejection`.
            greedy: of block drafters: draft the likeliest tokens at any temperature.
            processor: the request's custom processor.
            cache_dtype: of keys and values.
            min_rows: of a small language model: rows that its forwards are padded to.

        Raises:
            ValueError: a length that it cannot draft, or `greedy` where it means
                nothing.
        """
        if greedy and self.family != "block":
            raise ValueError(
                f"greedy drafts are an option of block drafters, and {self.kind!r} is "
                "none; leave it out"
            )
        options = dict(coupled=coupled, processor=processor)
        if self.family == "eagle":
            dtypes = dict(dtype=self.dtype, cache_dtype=cache_dtype)
            return eagle(self.config, length=length, **options, **dtypes)
        if self.family == "mtp":
            return mtp(self._mtp(cache_dtype), length, **options)
        if self.family == "draft":
            dtypes = dict(dtype=self.dtype, cache_dtype=cache_dtype)
            model = make_model(self.config, min_rows=min_rows, **dtypes)
            return draft_model(model, length, **options)
        net = make_block_net(self.config, dtype=self.dtype, cache_dtype=cache_dtype)
        return block_drafter(net, length, greedy=greedy, **options)

    def tree(
        self,
        shape: Tree,
        *,
        noise: bool = True,
        processor: LogitsProcessor | None = None,
        cache_dtype: str = "float32",
    ) -> Drafter:
        """A drafter of trees, for the rule `match`.

        Args:
            shape: of the tree.
            noise: whether it grows towards what the target will sample.
            processor: the request's custom processor.
            cache_dtype: of keys and values.

        Raises:
            ValueError: it is none that drafts token by token.
        """
        is_parallel = self.family == "eagle" and self.config.is_parallel
        is_other = self.family in ("block", "draft")
        if is_other or is_parallel or self.num_native_modules > 1:
            raise ValueError(
                f"a draft tree needs a drafter that goes on from its own tokens, and "
                f"{self.kind!r} of {self.format} does not; use it without a tree"
            )
        if self.family == "mtp":
            net = mtp_recurrent_net(self._mtp(cache_dtype))
        else:
            net = recurrent_net(self.config, dtype=self.dtype, cache_dtype=cache_dtype)
        return recurrent_tree(
            net,
            nodes=shape.nodes,
            depth=shape.depth,
            width=shape.width,
            noise=noise,
            processor=processor,
        )

    def _mtp(self, cache_dtype):
        return make_mtp(self.config, dtype=self.dtype, cache_dtype=cache_dtype)


def load_drafter(
    name: str | Path,
    lm: Any,
    *,
    progress: Callable[[str], None] | None = None,
    **overrides: Any,
) -> LoadedDrafter:
    """Loads a published drafter for a target.

    Args:
        name: a folder with ``config.json`` and weights, or a Hub id. EAGLE-1/2/3,
            P-EAGLE, DFlash, DSpark and MTP are read as SafeAILab, z-lab, DeepSpec and
            speculators write them; and what `save_drafter` wrote.
        lm: the target, from `jaxdec.load`. The drafter gets its dtype, and shares its
            embedding and head where the file brings none, or the very same.
        progress: told in words when something slow begins.
        **overrides: settings to use in place of what the file says or leaves open, for
            example ``sample_from_anchor=False``; an error names what applies.

    Raises:
        jaxdec.io.checkpoint.CheckpointError: it cannot be found or read, is not whole,
            or does not fit the target.
        ValueError: `lm` is no loaded model.
    """
    if not isinstance(getattr(lm, "config", None), ModelConfig):
        raise ValueError(
            f"a drafter is loaded for a loaded target, got {lm!r}; pass "
            "jaxdec.load(...)"
        )
    if is_own(Path(name)):
        if overrides:
            raise CheckpointError(
                f"{name} leaves nothing open, so {', '.join(overrides)} cannot be "
                "overridden; leave that out"
            )
        checkpoint, card = read_own(Path(name), lm.config, lm.content_hash)
        drafter = from_checkpoint(checkpoint, lm, str(name), card.get("hash", ""))
        drafter.card = card
        return drafter
    stored = open_drafter(name, progress)
    check_tokenizer(stored.folder, lm)
    checkpoint = read_drafter(stored, lm.config, overrides)
    checkpoint = read_calibration(stored.folder, checkpoint)
    return from_checkpoint(checkpoint, lm, str(name), stored.content_hash)


def check_tokenizer(folder: Path, lm: Any) -> None:
    """Raises CheckpointError if a drafter was trained on other tokens.

    Args:
        folder: of the drafter, where its tokenizer may be.
        lm: the target, or its `Checkpoint`.
    """
    if lm.tokenizer is None or not (folder / "tokenizer.json").exists():
        return
    difference = lm.tokenizer.compatible(Tokenizer.from_folder(folder))
    if difference is not None:
        raise CheckpointError(
            f"drafter and target have different tokenizers: {difference}; load the "
            "target that the drafter was trained for"
        )


def save_drafter(
    folder: str | Path,
    drafter: LoadedDrafter,
    lm: Any,
    *,
    card: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a drafter's own tensors, for `load_drafter` to read with the same target.

    Args:
        folder: a new one.
        drafter: the drafter.
        lm: its target; rows of its head are not written again.
        card: JSON values about how it came to be.
        overwrite: whether to replace what is there.

    Raises:
        jaxdec.io.checkpoint.CheckpointError: the folder exists.
    """
    checkpoint = drafter.checkpoint
    digest = hashlib.sha256()
    for name, tensor in sorted(checkpoint.tensors.items()):
        digest.update(name.encode() + np.ascontiguousarray(tensor).tobytes())
    write_own(
        folder,
        checkpoint,
        shares_head=has_rows_of(lm, checkpoint),
        target=lm.content_hash,
        card=dict(card or {}) | {"hash": digest.hexdigest()},
        overwrite=overwrite,
    )


def has_rows_of(lm: Any, checkpoint: DrafterCheckpoint) -> bool:
    """Whether a drafter's head is made of rows of the target's."""
    offsets = checkpoint.tensors.get("d2t")
    heads = [checkpoint.tensors[x] for x in HEADS if x in checkpoint.tensors]
    if not heads or offsets is None:
        return False
    head = heads[0]
    table = (
        lm.params["head"]["weight"] if "head" in lm.params else lm.params["embedding"]
    )
    rows = np.asarray(table)[np.arange(len(offsets)) + offsets]
    return bool(np.array_equal(rows.astype(head.dtype), head))


def native_drafter(lm: Any, found: Any, **overrides: Any) -> LoadedDrafter | None:
    """The MTP modules that a target's own checkpoint holds; None if it has none.

    Args:
        lm: the target.
        found: its `Checkpoint`.
        **overrides: as for `load_drafter`.

    Raises:
        jaxdec.io.checkpoint.CheckpointError: there are modules that cannot be used.
    """
    checkpoint = read_native(found.settings, found.extra, lm.config, overrides)
    if checkpoint is None:
        return None
    return from_checkpoint(checkpoint, lm, f"{lm.name} (native)", lm.content_hash)


def from_checkpoint(
    checkpoint: DrafterCheckpoint, lm: Any, name: str, content_hash: str
) -> LoadedDrafter:
    """Puts a drafter's own tensors where the target is, in its dtype."""
    checkpoint = share_with_target(checkpoint, lm.params)
    own = _PARAMS[checkpoint.family](checkpoint.config, checkpoint.tensors, lm.dtype)
    return LoadedDrafter(
        family=checkpoint.family,
        config=checkpoint.config,
        own=own if lm.mesh is None else replicated(own, lm.mesh),
        name=name,
        format=checkpoint.format,
        facts=checkpoint.facts,
        dtype=lm.dtype,
        content_hash=content_hash,
        target=lm.config,
    )
