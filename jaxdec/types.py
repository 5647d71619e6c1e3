"""The nouns of the library: what flows between target, drafter and engine.

Every decoding strategy is the same step: a drafter *proposes* a draft, the target
*scores* it in one forward, an acceptance rule *accepts* a prefix (or tree path) of it,
and the step *commits* that path. Autoregressive decoding is the step whose draft is
empty; greedy decoding is temperature zero.

Pytrees are frozen, and every leaf leads with the batch axis B, so that inserting a
request into a slot is one tree map. Records of functions are named tuples; they are
static, never leaves.

Shape letters used everywhere: B batch, P prompt, L token buffer, S cache slots,
T tokens in this forward, K draft tokens, V vocabulary, F features, E model width,
N layers, H query heads, G key/value heads, D head width, M list buckets.
"""

import enum
import typing
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

Params = Any
"""A pytree of arrays: plain, no Flax variables."""


@typing.dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(struct.field,)
)
def pytree(cls):
    """Makes a frozen, keyword-only dataclass whose fields are JAX leaves.

    Shapes in its annotations are documentation: vmap, scan and eval_shape rebuild such
    classes with stacked or abstract leaves, so jaxtyping's checks are switched off for
    the class (functions stay checked).
    """
    return typing.no_type_check(struct.dataclass(cls, kw_only=True))


class FinishReason(enum.IntEnum):
    """Why a row stopped; a value on device, a lower-case name for people."""

    NONE = 0
    """Still running."""
    STOP_TOKEN = 1
    """A stop token was emitted (it is kept as the last token)."""
    STOP_STRING = 2
    """A stop string appeared in the text (set by the host between segments)."""
    LENGTH = 3
    """max_new_tokens, or the room in the buffers, is used up."""
    NONFINITE = 4
    """The target's logits held NaN or +inf, or every token was banned."""
    CANCELLED = 5
    """The caller gave up on the request (set by the host between segments)."""

    @property
    def label(self) -> str:
        """The name in results and JSON, for example ``stop_token``."""
        return self.name.lower()


@pytree
class SamplingParams:
    """What a request asks of the sampling distribution; every leaf is per row.

    The order in which they act is fixed in `jaxdec.sampling`. The "off" value of each
    changes nothing, so values can change without recompiling.
    """

    temperature: Float[Array, "B"]
    """0 is greedy: the token with the largest processed logit."""
    top_k: Int[Array, "B"]
    """Keep the k largest; 0, or anything from V up, keeps all."""
    top_p: Float[Array, "B"]
    """Keep the smallest set of most likely tokens with this mass; 1 keeps all."""
    min_p: Float[Array, "B"]
    """Keep tokens at least this likely relative to the likeliest; 0 keeps all."""
    repetition_penalty: Float[Array, "B"]
    """Divides (multiplies, if negative) logits of tokens seen in prompt or output."""
    presence_penalty: Float[Array, "B"]
    """Subtracted once from logits of tokens already generated; 0 is off."""
    frequency_penalty: Float[Array, "B"]
    """Subtracted per occurrence among generated tokens; 0 is off."""
    no_repeat_ngram: Int[Array, "B"]
    """Ban tokens that would repeat an n-gram of prompt and output; 0 is off."""
    min_new_tokens: Int[Array, "B"]
    """Stop tokens are banned until this many tokens are generated."""
    bias_tokens: Int[Array, "B M"]
    """Token ids whose logits get a bias; -inf bans a token."""
    bias_values: Float[Array, "B M"]
    """Added to these tokens' raw logits."""
    num_bias: Int[Array, "B"]
    """How many of the M entries are live."""


@pytree
class Request:
    """What a caller asks for, B at a time."""

    prompt: Int[Array, "B L"]
    """Prompt tokens, left-aligned in a buffer of the strategy's capacity."""
    prompt_length: Int[Array, "B"]
    """Tokens of the prompt, at least 1."""
    max_new_tokens: Int[Array, "B"]
    """The most tokens of the answer, the stop token among them."""
    max_draft_length: Int[Array, "B"]
    """At most this many draft tokens are judged a step; 0 is plain decoding."""
    stop_tokens: Int[Array, "B M"]
    """Ids that end the answer; the first `num_stop_tokens` are live."""
    num_stop_tokens: Int[Array, "B"]
    key: Key[Array, "B"]
    """One PRNG key per request, never used up; the row index never enters."""
    sampling: SamplingParams


@pytree
class Sequences:
    """What has been said, and all that a drafter may see of the engine."""

    tokens: Int[Array, "B L"]
    """Prompt and committed tokens; entries at or past `length` are scratch."""
    length: Int[Array, "B"]
    """Committed tokens, those of the prompt among them."""
    prompt_length: Int[Array, "B"]
    limit: Int[Array, "B"]
    """The length at which the row stops."""
    finish: Int[Array, "B"]
    """FinishReason."""
    max_draft_length: Int[Array, "B"]
    """This and what follows is as in `Request`."""
    stop_tokens: Int[Array, "B M"]
    num_stop_tokens: Int[Array, "B"]
    key: Key[Array, "B"]
    sampling: SamplingParams

    @property
    def anchor(self) -> Int[Array, "B"]:
        """The last committed token: said, and not yet read."""
        last = (self.length - 1)[:, None]
        return jnp.take_along_axis(self.tokens, last, axis=1)[:, 0]


@pytree
class DecodeState:
    """All that the next step needs, and nothing else."""

    sequences: Sequences
    """What has been said."""
    cache: Any
    """What the target remembers; one entry per token read."""
    drafter: Any
    """What the drafter remembers; opaque to the engine."""


@pytree
class Draft:
    """A proposal: node 0 is the anchor, node i+1 is ``tokens[:, i]``.

    A chain has parents 0, 1, ..., K-1, or ``parents=None``, which says so statically
    and lets commit skip the gather. Parents precede children.
    """

    tokens: Int[Array, "B K"]
    """Ids of the target's vocabulary, in range also past `length`."""
    parents: Int[Array, "B K"] | None = None
    """The node that each token follows."""
    length: Int[Array, "B"]
    """Draft tokens at or past it are not judged."""
    log_probs: Float[Array, "B K V"] | None = None
    """The distribution each token was drawn from; None is a point mass."""
    confidence: Float[Array, "B K"] | None = None
    """Estimated probability that a token is accepted, given that its parent was."""
    source: Int[Array, "B"] | None = None
    """Which of several drafters proposed it (`first_of`)."""


@pytree
class Judgement:
    """What the target says of every node, under the request's sampling parameters."""

    tokens: Int[Array, "B T"]
    """The target's own sample after each node, with the position's noise."""
    is_finite: Bool[Array, "B T"]
    """False where the target's logits cannot be sampled from."""
    log_probs: Float[Array, "B T V"] | None
    """The sampling distribution after each node; only where a rule needs it."""


@pytree
class Acceptance:
    """The outcome of judging a draft."""

    path: Int[Array, "B T"]
    """Node indices, root first; the first ``num_accepted + 1`` are live."""
    num_accepted: Int[Array, "B"]
    """Draft tokens kept; excludes `next_token`."""
    next_token: Int[Array, "B"]
    """The target's token that ends the step: recovered (after a rejection) or bonus."""


@pytree
class Commit:
    """What a step (or a prefill chunk) made permanent, for the drafter to learn."""

    tokens: Int[Array, "B T+1"]
    """``tokens[:, i]`` was read; ``tokens[:, i+1]`` followed it, up to the anchor."""
    features: Float[Array, "B T F"]
    """The target's features at ``tokens[:, i]``."""
    length: Int[Array, "B"]
    """Live prefix: how many tokens were read."""


@pytree
class StepInfo:
    """What happened in a step; interesting to people, never needed by the next step.

    From `generate`, every leaf has a step axis after B; entries at or past the number
    of steps run hold zeros, with ``is_live`` False.
    """

    is_live: Bool[Array, "B"]
    """The row was running when the step began."""
    draft_tokens: Int[Array, "B K"]
    """What was proposed; the first `num_drafted` were scored."""
    draft_parents: Int[Array, "B K"]
    """Their parents; of a chain 0, 1, 2, ..."""
    draft_confidence: Float[Array, "B K"]
    """Zeros where the drafter has no confidence."""
    draft_source: Int[Array, "B"]
    """Which of `Drafter.sources` proposed it; 0 where there is one."""
    path: Int[Array, "B T"]
    """Node indices, root first; for a tree, as many as its depth allows."""
    num_drafted: Int[Array, "B"]
    """Draft tokens that were scored by the target."""
    num_judged: Int[Array, "B"]
    """`num_drafted`, clipped where an accepted stop token ended the row."""
    num_accepted: Int[Array, "B"]
    """Draft tokens among the emitted ones."""
    num_emitted: Int[Array, "B"]
    """Tokens appended to the sequence: accepted drafts, then the target's token."""
    logprobs: Float[Array, "B T"]
    """Log-probability of each emitted token (zeros unless asked for), raw or processed
    as the strategy was built."""
    top_logprobs: Float[Array, "B T n"]
    """Of the n likeliest tokens at each place, the likeliest first."""
    top_tokens: Int[Array, "B T n"]
    """Their ids."""
    observed: Any = ()
    """What the strategy's `observe` function returned; for certificates."""


@pytree
class Output:
    """What a target forward returns for T tokens a row."""

    logits: Float[Array, "B T V"]
    """Raw model output, float32."""
    features: Float[Array, "B T F"]
    """The taps that were asked for, concatenated in that order."""
    hidden: Float[Array, "B T E"]
    """The residual stream after the last layer, before the final norm."""
    normed_hidden: Float[Array, "B T E"]
    """`hidden` after the final norm: what the head reads."""


@pytree
class StrategyParams:
    """The arrays of a strategy: the target's, and the drafter's."""

    target: Any
    """What the target's `Model.forward` takes."""
    drafter: Any
    """Whatever the drafter's functions take: `DrafterParams`, or ``()`` if it has none.
    """


@pytree
class DrafterParams:
    """A drafter's own weights, apart from the arrays that it shares with the target."""

    own: Any
    """Arrays that only the drafter has; a pytree, or ``()``."""
    shared: Any
    """The target's, as they are: nothing is copied."""


@pytree
class Vocabulary:
    """A drafter's own, smaller vocabulary: W of the target's V tokens."""

    target_ids: Int[Array, "W"]
    """The target's token for each of its own, strictly increasing."""
    draft_index: Int[Array, "V"]
    """The inverse; W for tokens that the drafter cannot say."""


class Cache(Protocol):
    """Any pytree with a length and a way to make a path permanent."""

    length: Int[Array, "B"]

    def put(self, rows: Any) -> "Cache":
        """Writes rows that `Model.read` returned to the tail; length is unchanged."""
        ...

    def commit(self, path: Int[Array, "B T"] | None, num: Int[Array, "B"]) -> "Cache":
        """Keeps the first `num` entries of `path` (tail indices; None: in order)."""
        ...


class ForwardFn(Protocol):
    """Reads T tokens a row after the cache's live entries; length is unchanged."""

    def __call__(
        self,
        params: Params,
        cache: Any,
        tokens: Int[Array, "B T"],
        position: Int[Array, "B T"],
        mask: Bool[Array, "B T T"] | None,
    ) -> tuple[Any, Output]:
        """Writes entry i of the tail for ``tokens[:, i]``.

        ``mask[b, i, j]`` says whether tail token i may attend tail token j; None is
        causal. Every tail token attends all live entries.
        """
        ...


class Model(NamedTuple):
    """A causal language model as two pure functions and the facts the engine needs."""

    init_cache: Callable[[int, int], Any]
    """``(batch_size, capacity) -> Cache``; capacity in tokens."""
    forward: ForwardFn
    vocab_size: int
    max_positions: int
    """Longest sequence (prompt and output) that the model can read."""
    num_features: int
    """Width F of ``Output.features``: width of all taps together."""
    min_rows: int = 1
    """Forwards of fewer rows (B x T) are padded to this many; they write as many
    scratch entries."""
    read: Callable[..., tuple[Any, Output]] | None = None
    """Like `forward`, but leaves the cache alone and returns what the tail would hold,
    ``[B, G, T, D]`` leaves for `Cache.put`. Only for steps of several widths."""
    is_exact: bool = False
    """Whether all forwards of `min_rows` rows round a token alike, whatever else is
    drafted. The engine then keeps to that many rows wherever it adds floats up."""


class Drafter(NamedTuple):
    """What proposes. ``max_length`` is K; ``taps`` says what the target must return."""

    name: str
    max_length: int
    taps: tuple[int, ...]
    init: Callable[[int, int], Any]
    """``(batch_size, capacity) -> drafter state``."""
    extend: Callable[[Params, Any, Commit], Any]
    """Learns what became permanent; takes any T and empty rows."""
    propose: Callable[[Params, Any, Sequences], tuple[Any, Draft]]
    """Drafts from the committed tokens; may dirty its tail, never its length."""
    max_depth: int | None = None
    """Longest path of a tree, in tokens; None for a chain, whose longest is K. A step
    emits at most this many draft tokens, and commits no more entries."""
    keeps_state: bool = False
    """Whether `propose` returns the very state it was given, so that it may be left
    out of a step, and may stand in a branch."""
    sources: tuple[str, ...] = ()
    """Names of the drafters that `Draft.source` numbers; empty: this one alone."""


class AcceptFn(NamedTuple):
    """An acceptance rule: a name, what it needs, and the rule for one sequence."""

    name: str
    needs_log_probs: bool
    """Whether it reads the distributions of target and draft."""
    accept: Callable[[Sequences, Draft, Judgement], Acceptance]
    """Written for one sequence (leaves without B); the step vmaps it."""


class Strategy(NamedTuple):
    """A way of decoding: pure functions, and what a caller must know of them."""

    begin: Callable[[Request], DecodeState]
    """What has been said; nothing is read."""
    read: Callable[[StrategyParams, DecodeState], DecodeState]
    """Reads the next chunk of what is said and unread; the anchor stays unread."""
    prefill: Callable[[StrategyParams, Request], DecodeState]
    """`begin`, then `read` until nothing is left."""
    step: Callable[[StrategyParams, DecodeState], tuple[DecodeState, StepInfo]]
    capacity: int
    """Slots per row; prompt + max_new_tokens + `headroom` must fit."""
    headroom: int
    """Slots past the limit that a step may write as scratch."""
    max_length: int
    """K: draft tokens a step at most."""


LogitsProcessor = Callable[
    [Int[Array, "L"], Int[Array, ""], Float[Array, "V"]], Float[Array, "V"]
]
"""A custom pure ``(tokens, length, logits) -> logits`` for one sequence."""


def batch_size(tree: Any) -> int:
    """The size of the leading axis that every leaf of a state has."""
    return jax.tree.leaves(tree)[0].shape[0]
