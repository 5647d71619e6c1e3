"""From the tensors of MTP modules as files have them to canonical ones.

All are compared with what the configuration needs before any is read; then columns are
brought into one order, gains made what norms multiply by, and queries parted from their
gates. A file's own copy of the target's embedding or head is dropped.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxdec.io.checkpoint import CheckpointError, LazyTensors, check_finite
from jaxdec.io.drafters.checkpoint import DrafterCheckpoint
from jaxdec.io.drafters.mtp_layouts import Found, Layout
from jaxdec.io.drafters.words import attention, owner
from jaxdec.io.names import listed
from jaxdec.models.config import ModelConfig
from jaxdec.models.mtp import MtpConfig, expected_mtp_tensors

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"

OVERRIDES = {
    "hidden_source": ("pre", "post"),
    "recycle": ("pre", "post"),
    "concat": ("embedding_first", "hidden_first"),
    "gains": ("w", "1+w"),
}
"""What may be decided otherwise than by default, and how."""


class Choices:
    """What files do not say: by default of a layout or family, or overridden."""

    def __init__(
        self,
        layout: Layout,
        overrides: Mapping[str, Any] | None,
        notes: Mapping[str, str] | None = None,
    ):
        self._notes = dict(notes or {})
        self._given = dict(overrides or {})
        for name, value in self._given.items():
            if value not in OVERRIDES.get(name, ()):
                known = "; ".join(
                    f"{k}: {' or '.join(v)}" for k, v in OVERRIDES.items()
                )
                raise CheckpointError(
                    f"unknown override {name}={value!r} for MTP modules; there are "
                    f"{known}."
                )
        self._defaults = {
            "hidden_source": (layout.hidden_source, layout.name),
            "recycle": (layout.recycle, layout.name),
            "concat": (
                "hidden_first" if layout.hidden_first else "embedding_first",
                layout.name,
            ),
            "gains": ("w", layout.name),
        }

    def default(self, name: str, value: str, reason: str) -> None:
        """Replaces the layout's default."""
        self._defaults[name] = (value, reason)

    def __getitem__(self, name: str) -> str:
        return self._given.get(name, self._defaults[name][0])

    def explained(self) -> dict[str, str]:
        """Every choice in words, with its reason."""
        words = {}
        for name, (value, reason) in self._defaults.items():
            (other,) = (v for v in OVERRIDES[name] if v != value)
            words[name] = (
                f"{self[name]}, overridden (the default is {value})"
                if name in self._given
                else f"{value}, the default of {reason}; override with {name}={other!r}"
            )
        return self._notes | words


@dataclasses.dataclass(kw_only=True)
class ModuleReader:
    """Turns found modules into a checkpoint."""

    found: Found
    block: ModelConfig
    """A model with such layers."""
    num_target_layers: int
    tensors: Mapping[str, np.ndarray]
    choices: Choices
    takes_tables: bool
    """Whether embedding and head beside the modules are theirs, not the target's."""
    needs_tables: bool
    """Whether there is no target to take them from."""
    has_own_table: bool = False
    """Whether the configuration promises an embedding in the modules."""
    spare_norm: str | None = None
    """What a final norm that is left out is."""
    is_whole: bool = False
    """Whether the files hold nothing but the drafter."""

    @property
    def first(self) -> int:
        """The number of module 0 in the file."""
        return self.num_target_layers if self.found.layout.counts_trunk else 0

    def read(self, count: int | None, facts: dict[str, Any]) -> DrafterCheckpoint:
        """The checkpoint; `count` is how many modules the configuration speaks of."""
        layout, numbers = self.found.layout, self.found.numbers
        num = len(numbers) if count is None else count
        if numbers != tuple(range(self.first, self.first + num)):
            raise CheckpointError(
                f"the configuration speaks of {num} MTP modules, numbered from "
                f"{self.first}, but the files hold {list(numbers)}; take both from "
                "one whole release."
            )
        config = MtpConfig(
            block=self._block_config(num),
            num_target_layers=self.num_target_layers,
            hidden_source=self.choices["hidden_source"],
            recycle=self.choices["recycle"],
        )
        sources = self._sources(config)
        self._check_shapes(config, sources)
        read = {name: self._read(config, name, sources[name]) for name in sources}
        tables, origins = self._tables(config)
        # Under the names that a reader finds in the file; two parts may share one.
        found = {"embedding.weight": EMBEDDING, "head.weight": HEAD} | sources
        for name, tensor in (read | tables).items():
            check_finite({found[name]: tensor})
        config = dataclasses.replace(
            config,
            own_embedding="embedding.weight" in tables,
            own_head="head.weight" in tables,
        )
        facts = {
            "num_native_modules": num,
            "width": config.block.hidden_size,
            "layout": "one draft token after another",
            "taps": list(config.taps),
            "vocabulary": config.block.vocab_size,
            "draft_vocabulary": config.block.vocab_size,
            **origins,
            "attention": attention(()),
            "context": config.block.max_positions,
            **facts,
            "choices": self.choices.explained(),
        }
        return DrafterCheckpoint(
            family="mtp",
            config=config,
            tensors=read | tables,
            format=layout.name,
            facts=facts,
        )

    def _block_config(self, num: int) -> ModelConfig:
        """Layer k is the block of module k: full attention, a mixture or not."""
        block = self.block
        kinds = set()
        for i in range(num):
            prefix = self.found.layout.prefix.format(i + self.first) + "mlp.gate."
            kinds.add(any(name.startswith(prefix) for name in self.found.names))
        is_mixture = kinds == {True}
        if len(kinds) > 1 or (is_mixture and block.moe is None):
            raise CheckpointError(
                "some MTP modules are mixtures of experts, but not all are, or the "
                "configuration speaks of no experts; take config.json and the weights "
                "from the same release."
            )
        moe = block.moe
        if moe is not None:
            layers = tuple(range(num)) if is_mixture else ()
            moe = dataclasses.replace(moe, layers=layers) if layers else None
        windows = block.layer_windows or (None,) * block.num_layers
        ropes = block.layer_rope or (0,) * block.num_layers
        full = [r for r, w in zip(ropes, windows, strict=True) if w is None]
        return dataclasses.replace(
            block,
            num_layers=num,
            moe=moe,
            layer_windows=(),
            ropes=(block.ropes[full[-1] if full else ropes[-1]],),
            layer_rope=(),
        )

    def _sources(self, config: MtpConfig) -> dict[str, str]:
        """Where every canonical tensor is in the files."""
        sources = {}
        for name in expected_mtp_tensors(config):
            stored = name.replace(".self_attn.gate.", ".self_attn.q_proj.")
            source = self.found.layout.file_name(stored, self.first)
            if name.endswith("final_norm.weight") and source not in self.tensors:
                source = self.spare_norm or source
            sources[name] = source
        return sources

    def _check_shapes(self, config: MtpConfig, sources: Mapping[str, str]) -> None:
        needed = {sources[n]: s for n, s in expected_mtp_tensors(config).items()}
        if config.block.attention_gate:
            for name, (rows, *rest) in needed.items():
                if ".self_attn.q_proj." in name:
                    needed[name] = (2 * rows, *rest)
        table = (config.block.vocab_size, config.block.hidden_size)
        known = set(needed)
        for source in self._table_names():
            known.add(source)
            if source in self.tensors:
                needed[source] = table
        shapes = _shapes(self.tensors, needed)
        ours = self.tensors if self.is_whole else self.found.names
        strange = [
            name
            for name in ours
            if name not in known
            and not name.endswith("rotary_emb.inv_freq")
            and not name.startswith("verifier_")
        ]
        missing = [name for name in needed if name not in shapes]
        wrong = [
            f"{name}: has {list(shapes[name])}, needs {list(shape)}"
            for name, shape in needed.items()
            if name in shapes and tuple(shapes[name]) != tuple(shape)
        ]
        if missing or strange or wrong:
            raise CheckpointError(_report(missing, strange, wrong))

    def _read(self, config: MtpConfig, name: str, source: str) -> np.ndarray:
        """One canonical tensor."""
        tensor = np.asarray(self.tensors[source])
        if name.endswith("project.weight"):
            if self.choices["concat"] == "hidden_first":
                hidden, embedding = np.split(tensor, 2, axis=1)
                tensor = np.concatenate([embedding, hidden], axis=1)
        elif name.endswith("norm.weight"):
            if self.choices["gains"] == "1+w" and source != self.spare_norm:
                tensor = tensor.astype(np.float32) + 1
        elif config.block.attention_gate and ".self_attn.q_proj." in source:
            # Per head: the rows of the query, then those of the gate.
            which = int(".gate." in name)
            shape = (config.block.num_heads, 2, config.block.head_dim)
            tensor = tensor.reshape(*shape, *tensor.shape[1:])[:, which]
            tensor = tensor.reshape(-1, *tensor.shape[2:])
        return tensor

    def _table_names(self) -> Iterable[str]:
        """Where an embedding and a head of the drafter's own may be."""
        for part in ("embedding", "head"):
            yield from self._copies(part)
        if self.takes_tables:
            yield from (EMBEDDING, HEAD)

    def _copies(self, part: str) -> list[str]:
        """Names of a module's own embedding or head, for every module."""
        layout = self.found.layout
        if part not in layout.parts.values():
            return []
        names = [layout.file_name(f"{part}.weight", n) for n in self.found.numbers]
        return list(dict.fromkeys(names))

    def _tables(
        self, config: MtpConfig
    ) -> tuple[dict[str, np.ndarray], dict[str, str]]:
        """The embedding and head that are not the target's, and where each is from."""
        tables, origins = {}, {}
        for part, name in (("embedding", EMBEDDING), ("head", HEAD)):
            table, origins[part] = self._table(part, name, config.block.tie_embeddings)
            if table is not None:
                tables[f"{part}.weight"] = table
            elif self.needs_tables:
                raise CheckpointError(
                    f"the files have no {name!r}, and there is no target to take it "
                    "from; give the target."
                )
        return tables, origins

    def _table(self, part: str, name: str, is_tied: bool):
        """A module's own, or the one beside the modules if it is theirs, or none."""
        beside = name
        if is_tied and name not in self.tensors:
            beside = EMBEDDING
        present = [copy for copy in self._copies(part) if copy in self.tensors]
        copies = [np.asarray(self.tensors[copy]) for copy in present]
        if any(not _equal(copies[0], copy) for copy in copies[1:]):
            raise CheckpointError(
                f"the MTP modules have a different {part} each, which is not "
                "supported; use a release whose modules share it."
            )
        if copies and not self.takes_tables and beside in self.tensors:
            # Modules share the target's in training; then a copy is only storage.
            if _equal(copies[0], np.asarray(self.tensors[beside])):
                return None, "the target's (the copy in the file is equal)"
        if copies:
            return copies[0], owner(True)
        if part == "embedding" and self.has_own_table:
            raise CheckpointError(
                "mtp_use_dedicated_embeddings is true, but the files have no "
                "embedding among the MTP modules; fetch the whole release."
            )
        is_theirs = self.takes_tables and (beside == name or self.needs_tables)
        if is_theirs and beside in self.tensors:
            return np.asarray(self.tensors[beside]), owner(True)
        return None, owner(False)


def _shapes(tensors, names) -> dict[str, tuple[int, ...]]:
    """The shapes of those that exist; of lazy tensors, none is read for it."""
    if isinstance(tensors, LazyTensors):
        return {name: tensors.shapes[name] for name in names if name in tensors}
    return {name: tuple(tensors[name].shape) for name in names if name in tensors}


def _equal(ours: np.ndarray, theirs: np.ndarray) -> bool:
    if ours.shape != theirs.shape:
        return False
    return bool(np.array_equal(ours.astype(np.float32), theirs.astype(np.float32)))


def _report(missing: list[str], strange: list[str], wrong: list[str]) -> str:
    lines = ["the tensors of the MTP modules do not fit the configuration:"]
    lines += listed(missing=missing, unexpected=strange, wrong_shape=wrong)
    lines.append("  Take config.json and the weights from the same release.")
    return "\n".join(lines)
