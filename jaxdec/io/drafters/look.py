"""What a drafter is, without a target: for people who look at a file.

Pairing needs the target, so a stand-in takes its place: as wide as the drafter says,
and with as many layers as its files speak of. Where the taps follow from the number of
the target's layers, and no file gives it, they are told as a rule.
"""

from collections.abc import Mapping
from typing import Any

from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.drafters.checkpoint import DrafterCheckpoint
from jaxdec.io.drafters.layer_config import full_attention_config
from jaxdec.io.drafters.read import StoredDrafter, read_drafter
from jaxdec.models.config import ModelConfig

_FINAL = "the target's hidden state after its final norm"
_LOW_MIDDLE_HIGH = "what enters layers 2, N // 2 and N - 3 of a target of N layers"
_SPREAD = "what enters layers spread evenly over the target (z-lab's rule)"


def look(stored: StoredDrafter, target: ModelConfig | None = None) -> DrafterCheckpoint:
    """Reads a drafter as `read_drafter` does, for a target or for a stand-in.

    Raises:
        CheckpointError: it is not whole, or does not fit the target.
    """
    if target is not None:
        return read_drafter(stored, target)
    if stored.family == "mtp":
        # Modules of speculators come without tables, so they need a target's shapes.
        layers = stored.values.get("transformer_layer_config")
        stand_in = None if layers is None else full_attention_config(layers)
        return read_drafter(stored, stand_in)
    known = _num_target_layers(stored.values)
    if known is not None:
        return read_drafter(stored, _stand_in(stored, known))
    found = read_drafter(stored, _stand_in(stored, 64))
    other = read_drafter(stored, _stand_in(stored, 80))
    if found.facts["taps"] == other.facts["taps"]:
        return found
    rule = _SPREAD
    if found.family == "eagle":
        is_first = found.config.fusion == "embedding"
        rule = _FINAL if is_first else _LOW_MIDDLE_HIGH
    # The numbers are those of the stand-in.
    choices = {k: v for k, v in found.facts["choices"].items() if k != "taps"}
    facts = found.facts | {"taps": rule, "choices": choices}
    return DrafterCheckpoint(
        family=found.family,
        config=found.config,
        tensors=found.tensors,
        format=found.format,
        facts=facts,
    )


def _num_target_layers(values: Mapping[str, Any]) -> int | None:
    for name in ("num_target_layers", "target_num_hidden_layers"):
        if isinstance(values.get(name), int):
            return values[name]
    return None


def _stand_in(stored: StoredDrafter, num_layers: int) -> ModelConfig:
    """A target that the drafter fits, as far as its own files tell."""
    values = stored.values
    layers = values.get("transformer_layer_config") or values.get("text_config")
    layers = layers if isinstance(layers, Mapping) else values
    width = values.get("target_hidden_size") or layers.get("hidden_size")
    vocab_size = layers.get("vocab_size") or values.get("vocab_size")
    if not (isinstance(width, int) and isinstance(vocab_size, int)):
        raise CheckpointError(
            f"{stored.source}: config.json gives no hidden_size or no vocab_size, so "
            "it does not say what target the drafter is for; fetch it again"
        )
    return ModelConfig(
        family="stand-in",
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=width,
        num_layers=num_layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=width,
        max_positions=layers.get("max_position_embeddings") or 2048,
    )
