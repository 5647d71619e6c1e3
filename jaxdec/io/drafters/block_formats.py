"""What the configurations of z-lab, DeepSpec and speculators say of a block drafter.

The three agree on the network and differ in what they call things, which residual
stream an id names, and which option is meant when a field is missing. Each reader fills
in every default, and notes where there was something to choose.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.drafters.block_settings import Settings, nothing_left, read_layers
from jaxdec.io.drafters.words import not_given
from jaxdec.models.config import ModelConfig

_TRAINING_ONLY = (
    "num_anchors",
    "max_anchors",
    "loss_decay_gamma",
    "ce_loss_alpha",
    "l1_loss_alpha",
    "confidence_head_alpha",
    "auf",
    "lambda_base_start",
    "lambda_base_decay_ratio",
    "embed_requires_grad",
    "emb_dim",
    "gru_hidden_dim",
    "pure_draft_prefix_len",
    "target_model_name_or_path",
    "target_model_type",
    "target_text_model_type",
)
"""Written by trainers; some belong to another projector, which is refused by name."""

_QWEN3 = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
}
_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
"""Class defaults, which speculators may leave out of its nested configuration."""


@dataclasses.dataclass(kw_only=True)
class Described:
    """What a configuration says, every default filled in."""

    format: str
    layers: ModelConfig
    taps: tuple[int, ...]
    block_size: int
    sample_from_anchor: bool
    mask_token: int
    draft_vocab_size: int
    markov: str = "none"
    markov_rank: int = 0
    confidence: str = "none"
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    window_from: Literal["anchor", "row"]
    vllm_causal: tuple[bool, ...]
    """What vLLM makes of `causal`."""
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    reads_outputs: bool = True
    """Whether layer ids name outputs of layers (-1 the embedding), not inputs."""
    brings: Literal["nothing", "all", "some"]
    """Of embedding and head: what files of this format hold."""
    num_target_layers: int | None = None
    choices: dict[str, str] = dataclasses.field(default_factory=dict)
    """Where a field was missing or has two readings: what was taken, and why."""


def read_zlab(values: Mapping[str, Any], target: ModelConfig) -> Described:
    """z-lab DFlash: masks are filled in place, with the target's embedding and head."""
    fields = Settings(values, "config.json")
    if not isinstance(values.get("dflash_config"), Mapping):
        raise CheckpointError(
            "config.json has no 'dflash_config', so neither the mask token nor the "
            "layers to read are known; take it from the drafter's release"
        )
    inner = Settings(fields.take("dflash_config"), "dflash_config")
    for source in (fields, inner):
        source.must_be("projector_type", "dflash")
        source.must_be("attention_sink_bias", False)
        source.must_be("output_multiplier", 1, 1.0)
    choices: dict[str, str] = {}
    num_target = fields.count("num_target_layers", target.num_layers)
    block_size = fields.take("block_size", None)
    own = inner.take("block_size", block_size)
    if block_size not in (None, own):
        raise CheckpointError(
            f"config.json says block_size={block_size} and its dflash_config {own}; "
            "keep one of them"
        )
    fields.left["block_size"] = own
    block_size = fields.count("block_size", least=2)
    mask = inner.take("mask_token_id", fields.take("mask_token_id", None))
    inner.left["mask_token_id"] = mask
    mask = inner.count("mask_token_id", least=0)
    causal = inner.take("causal", fields.take("is_causal", None))
    use_swa = inner.take("use_swa", False)
    swa_window = inner.take("swa_window_size", None)
    softcap = inner.take("final_logit_softcapping", None)
    scale = inner.take("input_embedding_scale", None)
    if scale is None:
        scale = target.embedding_scale
        if scale != 1.0:
            choices["embedding_scale"] = not_given(
                scale, because="the target's own", override="embedding_scale"
            )
    given = inner.take("target_layer_ids", fields.take("target_layer_ids", None))
    layers, windows = read_layers(fields, choices)
    num = layers.num_layers
    if use_swa and all(w is None for w in windows):
        inner.left["swa_window_size"] = swa_window
        windows = (inner.count("swa_window_size"),) * num
        causal = False if causal is None else causal
    if given is None:
        given = default_layer_ids(num, num_target)
        taps = [k + 1 for k in given]
        choices["taps"] = not_given(taps, because="z-lab's rule", override="taps")
    else:
        inner.left["target_layer_ids"] = given
        given = inner.ids("target_layer_ids")
    nothing_left(inner)
    if causal is None:
        in_block = tuple(w is not None for w in windows)
    else:
        in_block = (bool(causal),) * num
    if any(w is not None for w in windows):
        choices["attention"] = (
            "windows are counted from each row, and sliding layers are "
            f"{'causal' if any(in_block) else 'not causal'} inside the block, as z-lab "
            "and vLLM have it now; override with attention='full' for z-lab's older "
            "code, which ignored windows outside of flash kernels"
        )
    return Described(
        format="z-lab DFlash",
        layers=layers,
        taps=tuple(k + 1 for k in given),
        block_size=block_size,
        sample_from_anchor=False,
        mask_token=mask,
        draft_vocab_size=layers.vocab_size,
        windows=windows,
        causal=in_block,
        vllm_causal=in_block,
        window_from="row",
        embedding_scale=float(scale),
        logit_softcap=None if softcap is None else float(softcap),
        brings="nothing",
        num_target_layers=num_target,
        choices=choices,
    )


def default_layer_ids(num_layers: int, num_target: int) -> tuple[int, ...]:
    """The layers that z-lab reads where the configuration does not say.

    >>> default_layer_ids(5, 36), default_layer_ids(1, 36)
    ((1, 9, 17, 25, 33), (18,))
    """
    if num_layers == 1:
        return (num_target // 2,)
    span = num_target - 4
    return tuple(round(1 + i * span / (num_layers - 1)) for i in range(num_layers))


def read_deepspec(values: Mapping[str, Any]) -> Described:
    """DeepSpec, whose "DFlash" is its DSpark without heads: anchor first, always."""
    fields = Settings(values, "config.json")
    num_target = fields.count("num_target_layers")
    ids = fields.ids("target_layer_ids")
    block_size = fields.count("block_size")
    mask = fields.count("mask_token_id", least=0)
    markov, rank = _markov(fields, fields.count("markov_rank", least=0), None)
    has_confidence = fields.flag("enable_confidence_head")
    with_previous = fields.take("confidence_head_with_markov", None)
    if has_confidence and with_previous is None:
        fields.take("confidence_head_with_markov")
    confidence = _confidence(has_confidence, with_previous, markov)
    fields.drop(*_TRAINING_ONLY)
    layers, windows = read_layers(fields, {})
    if any(w is not None for w in windows):
        raise CheckpointError(
            "config.json has sliding layers, which DeepSpec's drafters do not; set "
            "every layer type to full_attention if this one was trained so"
        )
    num = layers.num_layers
    return Described(
        format="DeepSpec DFlash"
        if markov == confidence == "none"
        else "DeepSpec DSpark",
        layers=layers,
        taps=tuple(k + 1 for k in ids),
        block_size=block_size,
        sample_from_anchor=True,
        mask_token=mask,
        draft_vocab_size=layers.vocab_size,
        markov=markov,
        markov_rank=rank,
        confidence=confidence,
        windows=windows,
        causal=(False,) * num,
        vllm_causal=(False,) * num,
        window_from="anchor",
        brings="all",
        num_target_layers=num_target,
    )


def read_speculators(values: Mapping[str, Any]) -> Described:
    """Speculators ``dflash`` and ``dspark``."""
    fields = Settings(values, "config.json")
    kind = fields.take("speculators_model_type")
    is_dspark = kind == "dspark"
    choices: dict[str, str] = {}
    proposals = fields.take("speculators_config", {}).get("proposal_methods") or [{}]
    num_drafted = proposals[0].get("speculative_tokens")
    fields.must_be("projector_type", "dflash")
    fields.must_be("shift_label", False)
    bonus_anchor = fields.take("dspark_bonus_anchor", None)
    fields.drop(
        "speculators_version",
        "architectures",
        "auto_map",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "tie_word_embeddings",
        "model_type",
        *_TRAINING_ONLY,
    )
    ids = fields.ids("aux_hidden_state_layer_ids")
    mask = fields.count("mask_token_id", least=0)

    def or_default(name: str, default: Any) -> Any:
        if fields.left.get(name) is None:
            because = "the default of its class"
            choices[name.replace("_", " ")] = not_given(default, because=because)
        return fields.take(name, default)

    fields.left["block_size"] = or_default("block_size", 8)
    block_size = fields.count("block_size")
    non_causal = bool(fields.take("sliding_window_non_causal", False))
    from_anchor = fields.take("sample_from_anchor", None)
    if from_anchor is None:
        from_anchor, why = _from_anchor(
            is_dspark, bonus_anchor, num_drafted, block_size
        )
        choices["sample_from_anchor"] = not_given(
            from_anchor, because=why, override="sample_from_anchor"
        )
    markov, rank, confidence = "none", 0, "none"
    if is_dspark:
        rank = or_default("markov_rank", 256)
        markov, rank = _markov(fields, rank, "vanilla")
        has_confidence = bool(or_default("enable_confidence_head", True))
        with_previous = bool(or_default("confidence_head_with_markov", True))
        confidence = _confidence(has_confidence, with_previous, markov)
    nested = dict(fields.take("transformer_layer_config"))
    layer_kind = nested.get("model_type", "qwen3")
    if layer_kind not in ("qwen3", "llama"):
        raise CheckpointError(
            f"the drafter's layers are described as {layer_kind!r}; only those "
            "described as 'qwen3' or 'llama' are supported"
        )
    nested = (_LLAMA if layer_kind == "llama" else _QWEN3) | nested
    if layer_kind == "llama" and nested.get("head_dim") is None:
        nested["head_dim"] = nested["hidden_size"] // nested["num_attention_heads"]
    inner = Settings(nested, "transformer_layer_config")
    inner.drop("mlp_bias")
    layers, windows = read_layers(inner, choices)
    fields.left["draft_vocab_size"] = or_default("draft_vocab_size", 32000)
    drafted = fields.count("draft_vocab_size")
    target_size = fields.take("target_hidden_size", layers.hidden_size)
    if target_size != layers.hidden_size:
        raise CheckpointError(
            f"the drafter is {layers.hidden_size} wide and its target {target_size} "
            "(target_hidden_size); block drafters of another width than the target are "
            "not supported"
        )
    nothing_left(fields)
    num = layers.num_layers
    if any(w is not None for w in windows):
        choices["attention"] = (
            "windows are counted from the anchor, as in training; "
            "override with attention='vllm' to count them from each row"
        )
    return Described(
        format=f"speculators {'DSpark' if is_dspark else 'DFlash'}",
        layers=layers,
        taps=ids,
        block_size=block_size,
        sample_from_anchor=bool(from_anchor),
        mask_token=mask,
        draft_vocab_size=drafted,
        markov=markov,
        markov_rank=rank,
        confidence=confidence,
        windows=windows,
        causal=tuple(w is not None and not non_causal for w in windows),
        vllm_causal=(not non_causal,) * num,
        window_from="anchor",
        reads_outputs=False,
        brings="some",
        choices=choices,
    )


def _from_anchor(is_dspark, bonus_anchor, num_drafted, block_size) -> tuple[bool, str]:
    """The layout of files from before the field existed."""
    if bonus_anchor is not None:
        return not bonus_anchor, f"dspark_bonus_anchor={bonus_anchor}"
    if not is_dspark:
        return False, "every DFlash of that time fills masks in place"
    if num_drafted == block_size - 1:
        return False, f"{num_drafted} speculative tokens of a block of {block_size}"
    if num_drafted == block_size:
        return True, f"as many speculative tokens as the block has rows, {block_size}"
    return True, "the default of its class"


def _markov(fields: Settings, rank: Any, default: str | None) -> tuple[str, int]:
    kind = fields.take("markov_head_type", default)
    if rank == 0:
        return "none", 0
    if kind not in ("vanilla", "gated", "rnn"):
        raise CheckpointError(
            f"config.json has markov_rank={rank} and markov_head_type={kind!r}; the "
            "type must be 'vanilla', 'gated' or 'rnn'"
        )
    return kind, rank


def _confidence(enabled: bool, with_previous: Any, markov: str) -> str:
    if not enabled:
        return "none"
    if not with_previous:
        return "hidden"
    if markov == "none":
        raise CheckpointError(
            "config.json has confidence_head_with_markov=true and markov_rank=0: the "
            "confidence head would read a Markov head that is not there; take "
            "config.json and the weights from the same release"
        )
    return "hidden_and_previous"
