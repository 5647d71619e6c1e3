"""The settings of one dictionary, each accounted for.

A configuration file is a program in disguise: every key may change the numbers. So
every key is read by somebody, or listed here as one that cannot change what a model
computes at inference, or it is an error that names it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxdec.io.checkpoint import CheckpointError

HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path architectures
    attention_dropout attn_implementation attn_pdrop auto_map begin_suppress_tokens
    bos_token_id cache_implementation chunk_size_feed_forward diversity_penalty
    do_sample dtype early_stopping embd_pdrop eos_token_id
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id
    hidden_dropout id2label initializer_range is_decoder is_encoder_decoder
    is_llama_config label2id length_penalty max_length min_length mlp_dropout model_type
    mtp_loss_step_weights mtp_loss_weight mtp_num_hidden_layers
    mtp_use_dedicated_embeddings name_or_path no_repeat_ngram_size ntp_loss_weight
    num_beam_groups num_beams num_mtp_layers num_nextn_predict_layers
    num_return_sequences num_speculative_steps output_attentions output_hidden_states
    output_router_logits output_scores pad_token_id prefix pretraining_tp problem_type
    remove_invalid_values reorder_and_upcast_attn repetition_penalty resid_dropout
    resid_pdrop return_dict return_dict_in_generate router_aux_loss_coef sep_token_id
    summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj suppress_tokens task_specific_params temperature
    tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript
    transformers.js_config transformers_version typical_p unsloth_fixed unsloth_version
    use_bfloat16 use_cache
    """.split()
)
"""Keys about training, bookkeeping, sampling defaults (never applied silently), or what
lies beside the model (multi-token-prediction modules)."""

_NEUTRAL: dict[str, Any] = {"partial_rotary_factor": 1.0, "logit_scale": 1.0}
"""Keys with a value that changes nothing; any other value is an error."""

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}

_REQUIRED = object()


class Fields:
    """The keys of one mapping, remembering which of them were read.

    Args:
        values: The mapping.
        where: What to call it in errors.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self._values = values
        self._where = where
        self._read: set[str] = set()

    def get(self, name: str, default: Any = _REQUIRED) -> Any:
        """The value of a key."""
        self._read.add(name)
        value = self._values.get(name, default)
        if value is _REQUIRED:
            raise CheckpointError(
                f"{self._where} has no {name!r}; add it, with the value that the model "
                "was trained with."
            )
        return value

    def name_of(self, names: Sequence[str]) -> str:
        """The one of several spellings of a setting that is there, or else the first.

        Raises:
            CheckpointError: Several are there, with different values.
        """
        present = [name for name in names if self._values.get(name) is not None]
        self._read.update(names)
        if any(self._values[name] != self._values[present[0]] for name in present[1:]):
            pairs = " and ".join(f"{name}={self._values[name]!r}" for name in present)
            raise CheckpointError(
                f"{self._where} says both {pairs}, which mean the same; keep one."
            )
        return (present or list(names))[0]

    def count(
        self, *names: str, default: Any = _REQUIRED, most: int | None = None
    ) -> int:
        """A whole number of at least 1, under any of these names."""
        name = self.name_of(names)
        value = self.get(name, default)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or value < 1 or (most is not None and value > most):
            limit = "" if most is None else f" and at most {most}"
            raise CheckpointError(
                f"{self._where}: {name!r} must be a whole number of at least 1{limit}, "
                f"got {value!r}; correct it."
            )
        return value

    def parts(self, *names: str, default: Any = _REQUIRED) -> int:
        """A number of layers or experts.

        They are listed one by one, which would take for ever if it were damaged.
        """
        return self.count(*names, default=default, most=2**16)

    def count_or_none(self, *names: str, default: Any) -> int | None:
        """A whole number of at least 1, or None where the file says null."""
        name = self.name_of(names)
        value = self.get(name, default)
        return None if value is None else self.count(name, default=default)

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """Any number."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CheckpointError(
                f"{self._where}: {name!r} must be a number, got {value!r}; correct it."
            )
        return float(value)

    def number_or_none(self, name: str, default: Any = None) -> float | None:
        """Any number, or None where the file says null."""
        value = self.get(name, default)
        return None if value is None else self.number(name, default)

    def flag(self, name: str, default: bool) -> bool:
        """True or false; null is the default."""
        value = self.get(name, default)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise CheckpointError(
                f"{self._where}: {name!r} must be true or false, got {value!r}; "
                "correct it."
            )
        return value

    def activation(self, *names: str, default: str) -> str:
        """An activation, by the name that `ModelConfig` has for it."""
        value = self.get(self.name_of(names), default)
        if value not in ACTIVATIONS:
            raise CheckpointError(
                f"activation {value!r} is not supported; only "
                f"{', '.join(ACTIVATIONS)} are."
            )
        return ACTIVATIONS[value]

    def finish(self, harmless: frozenset[str] = frozenset()) -> None:
        """Raises for keys that nobody read and that say something."""
        unknown = {
            name: value
            for name, value in self._values.items()
            if name not in self._read
            and name not in harmless
            and value is not None
            and value is not False
            and value not in ([], {}, "")
            and not (name in _NEUTRAL and value == _NEUTRAL[name])
        }
        if unknown:
            pairs = ", ".join(f"{name}={value!r}" for name, value in unknown.items())
            raise CheckpointError(
                f"{self._where} has settings that this library does not know: {pairs}. "
                "They might change what the model computes, so they are not ignored; "
                "remove those that you know to have no effect."
            )
