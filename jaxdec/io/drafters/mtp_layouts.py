"""What files call the tensors of MTP modules: five layouts of one network.

The same parts have other names in every family; and in the files of MiMo-7B, which name
them as those of speculators do, the projection's columns are in the other order.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Literal

Side = Literal["pre", "post"]

_PARTS = {
    "enorm": "embed_norm",
    "hnorm": "hidden_norm",
    "eh_proj": "project",
    "shared_head.norm": "final_norm",
    "embed_tokens": "embedding",
    "shared_head.head": "head",
}
_MIMO_PARTS = {
    "token_layernorm": "embed_norm",
    "hidden_layernorm": "hidden_norm",
    "input_proj": "project",
    "final_layernorm": "final_norm",
}
_QWEN_PARTS = {
    "pre_fc_norm_embedding": "embed_norm",
    "pre_fc_norm_hidden": "hidden_norm",
    "fc": "project",
    "norm": "final_norm",
    "embed_tokens": "embedding",
    "lm_head": "head",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How one kind of file names things, and what its modules were trained on."""

    name: str
    prefix: str
    """Of module k, with ``{}`` for its number."""
    parts: Mapping[str, str]
    """From names after the prefix to canonical ones; the others are the block's."""
    block_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Names of the block's tensors that are not canonical, to those that are."""
    shared_prefix: str | None = None
    """Where the parts are, if all modules have the same."""
    counts_trunk: bool = False
    """Whether module 0 has the number that follows the model's last layer."""
    hidden_first: bool = False
    """The projection's columns for the hidden state come first."""
    hidden_source: Side = "post"
    recycle: Side = "post"

    def file_name(self, name: str, first: int) -> str:
        """What a file calls a tensor, given its canonical name.

        Args:
            name: ``modules.{k}.block.{...}``, ``modules.{k}.{part}.weight``, or
                ``embedding.weight`` or ``head.weight``.
            first: The number of module 0.
        """
        if not name.startswith("modules."):
            return self._part_name(name, first)
        _, module, rest = name.split(".", 2)
        number = int(module) + first
        if not rest.startswith("block."):
            return self._part_name(rest, number)
        stem, _, suffix = rest.removeprefix("block.").rpartition(".")
        local = {new: old for old, new in self.block_names.items()}.get(stem, stem)
        return f"{self.prefix.format(number)}{local}.{suffix}"

    def _part_name(self, name, number):
        part, suffix = name.split(".")
        local = {new: old for old, new in self.parts.items()}[part]
        prefix = self.shared_prefix or self.prefix.format(number)
        return f"{prefix}{local}.{suffix}"


SPECULATORS = Layout(name="speculators MTP", prefix="mtp_layers.{}.", parts=_MIMO_PARTS)
NATIVE = (
    Layout(
        name="native MTP (DeepSeek layout)",
        prefix="model.layers.{}.",
        parts=_PARTS,
        counts_trunk=True,
    ),
    Layout(
        name="native MTP (Qwen layout)",
        prefix="mtp.layers.{}.",
        parts=_QWEN_PARTS,
        shared_prefix="mtp.",
    ),
    Layout(
        name="native MTP (MiMo layout)",
        prefix="model.mtp_layers.{}.",
        parts=_MIMO_PARTS,
        hidden_first=True,
        hidden_source="pre",
    ),
    Layout(
        name="native MTP (MiMo-V2 layout)",
        prefix="model.mtp.layers.{}.",
        parts={
            "enorm": "embed_norm",
            "hnorm": "hidden_norm",
            "eh_proj": "project",
            "final_layernorm": "final_norm",
        },
        block_names={"pre_mlp_layernorm": "post_attention_layernorm"},
        hidden_source="pre",
        recycle="pre",
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """The modules that a file holds."""

    layout: Layout
    numbers: tuple[int, ...]
    """Of the modules, as the file counts them."""
    names: tuple[str, ...]
    """Every tensor of theirs."""


def find_modules(
    layouts: Iterable[Layout], names: Iterable[str], num_layers: int
) -> Found | None:
    """The modules among some tensors, or None.

    Args:
        layouts: Which layouts to look for.
        names: Of tensors, as `jaxdec.io.safetensors.open_tensors` gives them.
        num_layers: Of the model itself.
    """
    names = list(names)
    for layout in layouts:
        pattern = re.escape(layout.prefix).replace(r"\{\}", r"(\d+)") + r"(.*)"
        matches = {n: m for n in names if (m := re.fullmatch(pattern, n)) is not None}
        if layout.counts_trunk:
            past = {n: m for n, m in matches.items() if int(m[1]) >= num_layers}
            own = tuple(layout.parts)
            modules = {int(m[1]) for m in past.values() if m[2].startswith(own)}
            matches = {n: m for n, m in past.items() if int(m[1]) in modules}
        shared = layout.shared_prefix
        found = [
            n
            for n in names
            if n in matches or (shared is not None and n.startswith(shared))
        ]
        if found:
            numbers = sorted({int(m[1]) for m in matches.values()})
            return Found(layout=layout, numbers=tuple(numbers), names=tuple(found))
    return None
