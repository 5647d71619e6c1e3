"""Names of tensors: from what files call them to one canonical set, and a check of it.

Canonical are the names of Hugging Face files (those of GPT-2 for models with learned
positions), with matrices as ``[out, in]`` and every expert of a mixture on its own.
A file may store several canonical tensors as one, or one transposed; so a canonical
tensor is a `Part` of a stored one.

Native multi-token-prediction (MTP) modules lie beside their model in its files. The
model does not read them, but they are recognised, and handed on to whoever does.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jaxdec.io.checkpoint import (
    CheckpointError,
    LazyTensors,
    expected_tensors,
    shapes_of,
)
from jaxdec.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Part:
    """Where a canonical tensor is stored: a stored tensor, or a piece of one."""

    source: str
    """Name in the file."""
    index: tuple[int | slice, ...] = ()
    """Which piece, along the leading axes; slices have both ends."""
    is_transposed: bool = False
    """The file has ``[in, out]``."""

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The canonical shape, given that of the stored tensor."""
        lengths = [i.stop - i.start for i in self.index if isinstance(i, slice)]
        shape = (*lengths, *stored[len(self.index) :])
        return shape[::-1] if self.is_transposed else shape


_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("embed_tokens.", "model.embed_tokens."),
    ("layers.", "model.layers."),
    ("norm.", "model.norm."),
    ("transformer.", ""),
)
"""Some decoders are saved with, or without, the wrapper around them."""

_CONV1D = re.compile(r"h\.\d+\.(attn\.(c_attn|c_proj)|mlp\.(c_fc|c_proj))\.weight")
"""GPT-2 stores these transposed."""

_FUSED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")

_IGNORED = re.compile(
    r"(.*\.)?rotary_emb\.inv_freq"
    r"|(model\.)?(vision_tower|vision_model|visual|multi_modal_projector)\..*"
    r"|h\.\d+\.attn\.(masked_)?bias"
)
"""Tensors that a text decoder never reads: tables that the configuration determines,
the vision half of a multimodal model."""

_MTP = re.compile(r"(model\.)?(mtp|mtp_layers)\..*")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_MTP_LAYER = re.compile(r"(eh_proj|enorm|hnorm|shared_head\..*)\.weight")


def _canonical(name: str) -> str:
    for old, new in _PREFIXES:
        if name.startswith(old):
            return new + name[len(old) :]
    return name


def _parts(
    name: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int | slice, ...], bool]]:
    """The canonical tensors in one of a file: name, index, whether transposed."""
    target = _canonical(name)
    fused = _FUSED_EXPERTS.fullmatch(target)
    if fused is None or len(shape) != 3:
        yield target, (), _CONV1D.fullmatch(target) is not None
        return
    for expert in range(shape[0]):
        prefix = f"{fused[1]}.{expert}"
        if fused[2] == "down_proj":
            yield f"{prefix}.down_proj.weight", (expert,), False
        else:
            half = shape[1] // 2
            yield f"{prefix}.gate_proj.weight", (expert, slice(0, half)), False
            yield f"{prefix}.up_proj.weight", (expert, slice(half, shape[1])), False


def canonical_parts(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Part]:
    """Maps canonical names to what a Hugging Face file stores.

    Args:
        shapes: Of the tensors in the file, by their names there.

    Raises:
        CheckpointError: Two tensors in the file mean the same one.
    """
    return unique_parts(
        (target, Part(name, index, is_transposed))
        for name, shape in shapes.items()
        for target, index, is_transposed in _parts(name, tuple(shape))
    )


def unique_parts(found: Iterable[tuple[str, Part]]) -> dict[str, Part]:
    """The parts by canonical name.

    Raises:
        CheckpointError: Two parts have the same name.
    """
    parts: dict[str, Part] = {}
    for target, part in found:
        if target in parts:
            raise CheckpointError(
                f"tensors {parts[target].source!r} and {part.source!r} are both "
                f"{target!r}; remove one of them from the checkpoint."
            )
        parts[target] = part
    return parts


def mtp_names(config: ModelConfig, names: Iterable[str]) -> list[str]:
    """Which of these canonical names belong to MTP modules.

    Those are top-level modules (``mtp.``, ``model.mtp_layers.``), and layers past the
    last one that have a projection or a norm which only such modules have.
    """
    names = list(names)
    layers = {name: _LAYER.fullmatch(name) for name in names}
    past = {
        name: int(match[1])
        for name, match in layers.items()
        if match is not None and int(match[1]) >= config.num_layers
    }
    modules = {i for n, i in past.items() if _MTP_LAYER.fullmatch(layers[n][2])}
    return [n for n in names if _MTP.fullmatch(n) or past.get(n) in modules]


def split_tensors(
    config: ModelConfig, tensors: LazyTensors
) -> tuple[LazyTensors, LazyTensors]:
    """A whole checkpoint as what its model reads, and its MTP modules.

    Neither is read yet. Tensors that nothing reads may be present too: rotary tables, a
    head equal to the embeddings by configuration, vision towers.

    Args:
        config: What the model is.
        tensors: Tensors under canonical names.

    Raises:
        CheckpointError: Lists all missing, unexpected and mis-shaped tensors.
    """
    check_tensors(config, tensors)
    extra = mtp_names(config, tensors)
    return tensors.select(expected_tensors(config)), tensors.select(extra)


def check_tensors(config: ModelConfig, tensors: Mapping) -> None:
    """Compares a whole checkpoint with what its configuration needs.

    Args:
        config: What the model is.
        tensors: Tensors under canonical names.

    Raises:
        CheckpointError: Lists all missing, unexpected and mis-shaped tensors.
    """
    found = shapes_of(tensors)
    if config.num_layers > len(found):
        # Said before listing them, which would take long if the number is damaged.
        raise CheckpointError(
            f"the configuration has {config.num_layers} layers, but there are only "
            f"{len(found)} tensors; take config.json and the weights from the same "
            "release."
        )
    expected = expected_tensors(config)
    mtp = set(mtp_names(config, found))

    def is_ignored(name: str) -> bool:
        is_copy = config.tie_embeddings and name == "lm_head.weight"
        return is_copy or name in mtp or _IGNORED.fullmatch(name) is not None

    missing = [name for name in expected if name not in found]
    unexpected = [n for n in found if n not in expected and not is_ignored(n)]
    wrong = [
        f"{name}: has {list(found[name])}, needs {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != shape
    ]
    if missing or unexpected or wrong:
        raise CheckpointError(_report(missing, unexpected, wrong))


def listed(**names: Sequence[str]) -> list[str]:
    """Indented lines that name tensors under a title each; empty lists say nothing."""
    lines = []
    for title, some in names.items():
        if some:
            lines.append(f"  {title.replace('_', ' ')} ({len(some)}):")
            lines += [f"    {name}" for name in some]
    return lines


def _report(missing: list[str], unexpected: list[str], wrong: list[str]) -> str:
    lines = ["the tensors do not fit the configuration:"]
    lines += listed(missing=missing, unexpected=unexpected, wrong_shape=wrong)
    if "lm_head.weight" in missing:
        lines.append(
            "  The configuration says that the output head is not tied to the "
            "embeddings (tie_word_embeddings is false, or absent where that means "
            "false). If the model does share them, set tie_word_embeddings to true."
        )
    lines.append("  Take config.json and the weights from the same release.")
    return "\n".join(lines)
