"""The configuration files of EAGLE drafters, each read into an `EagleConfig`.

Four kinds of file are in circulation, and the same name does not always mean the same:

    SafeAILab     a Llama configuration with a few keys more; the taps are not in it
    SpecForge     the same for EAGLE-3, with more switches (also ModelOpt's, and those
                  that vLLM reads); ids inside ``eagle_config`` name *outputs* of layers
    DeepSpec      the target's configuration with a few keys more; ids name outputs
    speculators   a layer's configuration inside the drafter's; ids name inputs (taps)
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol

from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.drafters.eagle_settings import (
    DEFAULT_LENGTH,
    IDS,
    File,
    without,
)
from jaxdec.io.drafters.words import class_defaults
from jaxdec.models.config import ModelConfig, RopeConfig
from jaxdec.models.eagle_config import EagleConfig

_SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")

_WINDOW_KEYS = (
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
)

_HARMLESS = frozenset(
    """
    algorithm architectures auto_map dtype embed_requires_grad enable_sp_ulysses
    has_no_defaults_at_init model_type speculators_config speculators_model_type
    speculators_version tie_word_embeddings torch_dtype transformers_version
    num_depths para_depths max_seq_len prediction_loss_weight down_sample_ratio
    down_sample_ratio_min
    """.split()
)
"""Top-level keys of speculators about training and bookkeeping."""

_LAYER_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
}
"""What a layer's configuration means where it leaves out a default of its class."""


class Reader(Protocol):
    """Reads the configuration of one format."""

    def __call__(self, file: File) -> EagleConfig:
        """What the drafter is; notes what was decided in ``file.choices``."""
        ...


class Format(NamedTuple):
    """A kind of file: what it is called, how to read it, what may be overridden."""

    name: str
    read: Reader
    overrides: tuple[str, ...]


def find_format(
    values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> Format | None:
    """Which format a checkpoint has; None if it is no EAGLE drafter.

    Args:
        values: the contents of config.json.
        shapes: of the tensors, under canonical names.
    """
    model_type = values.get("speculators_model_type")
    if model_type is not None:
        return _SPECULATORS.get(model_type)
    architecture = next(iter(values.get("architectures") or ()), None)
    if architecture in ("Qwen3Eagle3Model", "Gemma4Eagle3Model"):
        return _DEEPSPEC
    width = values.get("hidden_size")
    if _has_wide_layer(width, shapes):
        if "mask_hidden" in shapes:
            return _PARALLEL
        is_descendant = architecture == "LlamaForCausalLMEagle3"
        return _SPECFORGE if is_descendant or "eagle_config" in values else _ORIGINAL_3
    # Block drafters with two taps have such a matrix too, and norms besides.
    joins_two = isinstance(width, int) and shapes.get("fc.weight") == (width, 2 * width)
    if joins_two and not {"norm.weight", "hidden_norm.weight"} & set(shapes):
        return _ORIGINAL_1
    if _has_bare_layer(shapes):
        return _ORIGINAL_1
    return None


def _has_wide_layer(width: Any, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the first layer reads an embedding beside its input: EAGLE-3."""
    query = shapes.get("layers.0.self_attn.q_proj.weight", ())
    is_wide = isinstance(width, int) and query[1:] == (2 * width,)
    return is_wide or "layers.0.hidden_norm.weight" in shapes


def _has_bare_layer(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether all there is, besides tables, is a layer without a norm: EAGLE-1."""
    kinds = {name.split(".")[0] for name in shapes}
    layers = {name.split(".")[1] for name in shapes if name.startswith("layers.")}
    has_norm = "layers.0.input_layernorm.weight" in shapes
    return layers == {"0"} and not has_norm and not kinds & {"norm", "lm_head"}


def _read_original_1(file: File) -> EagleConfig:
    """EAGLE-1 and EAGLE-2, which have the same files."""
    layers = _as_llama(file, ("bias", "qkv_bias"), is_original=True)
    layers = dataclasses.replace(layers, qkv_bias=file.flag("qkv_bias", False))
    return EagleConfig(
        layers=layers,
        taps=(file.target.num_layers + 1,),
        target_hidden_size=file.target.hidden_size,
        fusion="embedding",
        fusion_bias=file.flag("bias", True, is_open=True),
        wide_layers=0,
        output_norm="none",
        draft_vocab_size=layers.vocab_size,
        own_embedding="embed_tokens.weight" in file.shapes,
        own_head="lm_head.weight" in file.shapes,
        draft_length=file.draft_length(None, DEFAULT_LENGTH),
    )


def _read_original_3(file: File) -> EagleConfig:
    return _read_eagle3(file, is_original=True)


def _read_eagle3(file: File, *, is_original: bool = False) -> EagleConfig:
    """EAGLE-3 in the original format, or that of its descendants."""
    own = ["draft_vocab_size", "target_hidden_size", *_SWITCHES, IDS, "eagle_config"]
    own += ["mask_token_id", "pard_token", "ptd_token_id", "dflash_config"]
    own += ["parallel_drafting"]
    num = len({name.split(".")[1] for name in file.shapes if name[:7] == "layers."})
    layers = _as_llama(
        file, own, is_original=is_original, changes={"num_hidden_layers": num}
    )
    has_norms = "layers.0.self_attn.q_norm.weight" in file.shapes
    is_parallel = "mask_hidden" in file.shapes
    return EagleConfig(
        layers=dataclasses.replace(layers, qk_norm=has_norms),
        taps=file.specforge_taps(),
        target_hidden_size=file.count("target_hidden_size", layers.hidden_size),
        draft_vocab_size=file.draft_vocab_size(layers),
        # Those of parallel drafters are trained.
        own_embedding=is_parallel or "embed_tokens.weight" in file.shapes,
        own_head=True,
        mask_token=file.mask_token() if is_parallel else None,
        draft_length=file.draft_length(None, DEFAULT_LENGTH),
        **file.norms(),
    )


def _read_deepspec(file: File) -> EagleConfig:
    """EAGLE-3 as DeepSpec exports it; every layer reads the embedding."""
    own = """
        target_layer_ids num_target_layers draft_num_hidden_layers ttt_length
        step_loss_decay target_model_name_or_path target_model_type
        target_text_model_type
    """.split()
    if file.values.get("model_type") != "qwen3":
        raise CheckpointError(
            f"DeepSpec drafters for {file.values.get('model_type')!r} are not "
            "supported; only those for Qwen3 are."
        )
    layers = _turned(file, file.layers(without(file.values, own)))
    for name, expected in (
        ("draft_num_hidden_layers", layers.num_layers),
        ("num_target_layers", file.target.num_layers),
    ):
        if file.count(name, expected) != expected:
            raise CheckpointError(
                f"{name} is {file.values[name]}, but there are {expected} such layers; "
                "take the drafter's config.json and weights from one release, and the "
                "target that it was trained for."
            )
    ids = file.values.get("target_layer_ids")
    if ids is None and "taps" not in file.overrides:
        raise CheckpointError(
            "config.json has no target_layer_ids; pass taps=[...] with what the "
            "drafter was trained with."
        )
    return EagleConfig(
        layers=layers,
        taps=file.taps(ids, shift=1),
        target_hidden_size=layers.hidden_size,
        wide_layers=layers.num_layers,
        draft_vocab_size=layers.vocab_size,
        own_embedding=True,
        own_head=True,
        draft_length=file.draft_length(file.values.get("ttt_length"), 7),
    )


def _read_speculators(file: File) -> EagleConfig:
    """EAGLE-3 and P-EAGLE of the speculators library."""
    own = {"transformer_layer_config", "draft_vocab_size", "target_hidden_size", IDS}
    own |= {"mask_token_id", "ptd_token_id", *_SWITCHES}
    file.refuse_unknown(own | _HARMLESS)
    is_parallel = file.values["speculators_model_type"] == "peagle"
    # What was trained must be there; a frozen embedding is the target's.
    is_trained = bool(file.values.get("embed_requires_grad", is_parallel))
    layers = _speculators_layers(file)
    methods = file.mapping("speculators_config").get("proposal_methods") or [{}]
    stored = methods[0].get("speculative_tokens")
    return EagleConfig(
        layers=layers,
        taps=file.taps(file.values.get(IDS)),
        target_hidden_size=file.count("target_hidden_size", layers.hidden_size),
        draft_vocab_size=file.draft_vocab_size(layers),
        own_embedding=is_trained or "embed_tokens.weight" in file.shapes,
        own_head="lm_head.weight" in file.shapes,
        mask_token=file.mask_token() if is_parallel else None,
        draft_length=file.draft_length(stored, 8 if is_parallel else DEFAULT_LENGTH),
        **file.norms(),
    )


_PLAIN = ("rope_theta", "max_positions")
_TAPPED = (*_PLAIN, "taps", *_SWITCHES)
_ORIGINAL_1 = Format("SafeAILab EAGLE-1/2", _read_original_1, (*_PLAIN, "bias"))
_ORIGINAL_3 = Format("SafeAILab EAGLE-3", _read_original_3, _TAPPED)
_SPECFORGE = Format("SpecForge EAGLE-3", _read_eagle3, _TAPPED)
_PARALLEL = Format("P-EAGLE", _read_eagle3, (*_TAPPED, "mask_token"))
_DEEPSPEC = Format("DeepSpec EAGLE-3", _read_deepspec, (*_PLAIN, "taps"))
_SPECULATORS = {
    "eagle3": Format("speculators EAGLE-3", _read_speculators, _TAPPED),
    "peagle": Format(
        "speculators P-EAGLE", _read_speculators, (*_TAPPED, "mask_token")
    ),
}


def _as_llama(
    file: File,
    own: Collection[str],
    *,
    is_original: bool,
    changes: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """The layers of formats whose code reads every configuration as Llama's."""
    # It has no windows and no mixtures; a configuration copied from a target may.
    ignored = (*_WINDOW_KEYS, "num_experts_per_tok", "num_local_experts")
    ignored += ("output_router_logits", "router_aux_loss_coef")
    values = without(file.values, (*own, *ignored)) | {"model_type": "llama"}
    values |= changes or {}
    scaling = values.get("rope_scaling") or values.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if not is_original or kind == "default":
        return _turned(file, file.layers(values))
    factor = scaling.get("factor")
    is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if kind not in ("linear", "dynamic") or not is_number or factor < 1:
        raise CheckpointError(
            f"EAGLE's own code knows no rope scaling such as {dict(scaling)}, so no "
            "drafter of its format was trained with it; set rope_scaling to null, or "
            "to the linear or dynamic scaling that it was trained with."
        )
    # Where that code scales, it forgets rope_theta; and "dynamic" differs from no
    # scaling only past the longest position, where nothing is drafted.
    layers = file.layers(without(values, ("rope_scaling", "rope_parameters")))
    linear = RopeConfig(kind="linear", factor=float(factor))
    rope = linear if kind == "linear" else RopeConfig()
    return _turned(file, dataclasses.replace(layers, ropes=(rope,)))


def _turned(file: File, layers: ModelConfig) -> ModelConfig:
    """The layers, with the caller's own rope_theta if there is one."""
    theta = file.overrides.get("rope_theta", layers.ropes[0].theta)
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        raise CheckpointError(
            f"rope_theta must be a positive number, got {theta!r}; correct it."
        )
    rope = dataclasses.replace(layers.ropes[0], theta=float(theta))
    return dataclasses.replace(layers, ropes=(rope,))


def _speculators_layers(file: File) -> ModelConfig:
    """The layers of a speculators drafter, windows included."""
    stored = file.mapping("transformer_layer_config")
    kind = stored.get("model_type")
    taken: dict[str, Any] = {}
    if kind is None:
        kind = taken["model_type"] = "qwen3"
    if kind not in _LAYER_DEFAULTS:
        raise CheckpointError(
            f"drafter layers of model_type {kind!r} are not supported; only "
            f"{' and '.join(_LAYER_DEFAULTS)} are."
        )
    values = {**_LAYER_DEFAULTS[kind], **stored, "model_type": kind}
    defaults = _LAYER_DEFAULTS[kind].items()
    taken |= {name: value for name, value in defaults if name not in stored}
    file.choices.update(class_defaults(taken))
    ropes = values.get("rope_parameters") or {}
    for name in ("sliding_attention", "full_attention"):
        if isinstance(ropes.get(name), Mapping):
            values["rope_parameters"] = ropes[name]
            break
    layers = _turned(file, file.layers(without(values, _WINDOW_KEYS)))
    windows = _windows(values, layers.num_layers)
    return dataclasses.replace(layers, layer_windows=windows)


def _windows(values: Mapping[str, Any], num: int) -> tuple[int | None, ...]:
    """The sliding window of every layer; empty where none has one."""
    sliding = "sliding_attention"
    kinds, window = values.get("layer_types"), values.get("sliding_window")
    if kinds is None:
        is_on = window is not None and values.get("use_sliding_window") is not False
        first = values.get("max_window_layers", 28)
        kinds = [
            sliding if is_on and i >= first else "full_attention" for i in range(num)
        ]
    if len(kinds) != num or set(kinds) - {"full_attention", sliding}:
        raise CheckpointError(
            f"layer_types must give full_attention or {sliding} for each of {num} "
            f"layers, got {kinds!r}; correct the drafter's config.json."
        )
    if sliding not in kinds:
        return ()
    if type(window) is not int or window < 1:
        raise CheckpointError(
            f"layer_types has sliding layers, and sliding_window is {window!r}; give "
            "the number of positions that they see."
        )
    return tuple(window if kind == sliding else None for kind in kinds)
