"""Exercises of the first four notebooks: decoding, verification, MTP, trees.

Right answers are found by the library's own functions, not written down here; how
answers are looked at is told in `jaxdec.course.checking`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxdec import acceptance, sampling, tree
from jaxdec.course.checking import agrees, is_close, judge
from jaxdec.course.display import evidence_of
from jaxdec.lm import LM
from jaxdec.planning.break_even import expected_tokens
from jaxdec.text import Outputs
from jaxdec.types import DecodeState, StepInfo

# ---- 01: greedy and sampling ---------------------------------------------------------


def check_temperature(law: Callable[[np.ndarray, float], Any]) -> None:
    """``law(logits, temperature)``: the probabilities from which a token is drawn."""
    logits = np.array([2.0, 1.0, 0.0, -1.0])
    for temperature in (1.0, 0.5, 2.0):
        found = law(logits, temperature)
        wanted = _law(logits, temperature=temperature)
        is_right = agrees(found, wanted)
        if not is_right:
            break
    judge(
        found,
        lambda answer: is_close(answer, wanted),
        f"At temperature {temperature}, logits {logits.tolist()} should give "
        f"{np.round(wanted, 3).tolist()}: divide the logits by the temperature, take "
        "the exponential, and make the sum 1.",
        "Below 1 the likeliest token gains, above 1 all become alike; 0 is the limit "
        "in which only the likeliest is left: greedy decoding.",
    )


TOP_P_LAW = (0.5, 0.25, 0.15, 0.06, 0.04)


def check_top_p(answer: int | None) -> None:
    """How many tokens of `TOP_P_LAW` does top_p = 0.8 keep?"""
    kept = int(np.sum(_law(np.log(TOP_P_LAW), temperature=1.0, top_p=0.8) > 0))
    judge(
        answer,
        lambda found: is_close(found, kept),
        f"Add up {TOP_P_LAW} from the likeliest on, until the sum is at least 0.8.",
        "The token that reaches 0.8 is kept too; after that, what is left is made to "
        "sum to 1.",
    )


def check_kv_bytes(lm: LM, answer: int | None) -> None:
    """Bytes that one token leaves in the KV cache of a model."""
    judge(
        answer,
        lambda found: int(found) == lm.kv_bytes_per_token,
        f"Keys and values, of {lm.config.num_layers} layers, with "
        f"{lm.config.num_kv_heads} heads of {lm.config.head_dim} numbers each, and "
        f"{jnp.dtype(lm.cache_dtype).itemsize} bytes a number ({lm.cache_dtype}).",
        "Every step writes that much and reads it for all tokens before; the weights "
        "are read as well, however many tokens a step looks at.",
    )


def _law(logits: Any, **options: Any) -> np.ndarray:
    """What the library samples from."""
    params = sampling.make_sampling_params(1, **options)
    rows = jnp.asarray(logits, jnp.float32)[None, None]
    return np.exp(np.asarray(sampling.log_probs(params, rows)[0, 0]))


# ---- 02: exact verification ----------------------------------------------------------

_P = np.array([0.5, 0.3, 0.15, 0.05], np.float32)
_Q = np.array([0.3, 0.5, 0.0, 0.2], np.float32)


def check_acceptance_probability(chance: Callable[[Any, Any], Any]) -> None:
    """``chance(p, q)``: how often a draft token of q is kept, where p is wanted."""
    found = chance(_P, _Q)
    judge(
        found,
        lambda answer: is_close(answer, np.minimum(_P, _Q).sum()),
        f"Token x is drafted with q(x) and kept with min(1, p(x) / q(x)); the product "
        f"is min(p(x), q(x)). For p = {_P.tolist()} and q = {_Q.tolist()}, add that up "
        "over all tokens.",
        "So acceptance is what the two laws have in common: 1 minus their distance in "
        "total variation.",
    )


def check_residual(residual: Callable[[Any, Any], Any]) -> None:
    """``residual(p, q)``: the law of the token that replaces a refused draft."""
    found = residual(_P, _Q)
    rest = np.maximum(_P - _Q, 0)
    wanted = np.asarray(acceptance.residual(jnp.asarray(_P), jnp.asarray(_Q)))
    hint = "What min(p, q) leaves out of p is max(p - q, 0); make its sum 1."
    if agrees(found, rest):
        hint = "Nearly: these are the right parts, but their sum is not 1."
    elif agrees(found, _P):
        hint = (
            "Drawing again from p says tokens that q likes too often, because those "
            f"were kept already. {hint}"
        )
    judge(
        found,
        lambda answer: is_close(answer, wanted),
        hint,
        "Kept drafts add min(p, q), and refused ones, replaced so, add the rest of p: "
        "together p, whatever q was.",
    )


def check_rollback(answer: int | None, info: StepInfo, after: DecodeState) -> None:
    """Cache entries that a step wrote for anchor and draft, and that do not count."""
    wrote = int(info.num_drafted[0]) + 1
    wasted = wrote - int(info.num_emitted[0])
    judge(
        answer,
        lambda found: int(found) == wasted,
        f"The target read the anchor and {wrote - 1} draft tokens, so it wrote {wrote} "
        f"entries. {int(info.num_emitted[0])} tokens were emitted; how many entries "
        f"does the cache have more, now that its length is "
        f"{int(after.cache.length[0])}?",
        "They lie past the length, are never read, and are written over by the next "
        "step. Nothing was undone: that is all there is to a rollback.",
    )


# ---- 03: native MTP ------------------------------------------------------------------


def check_expected_tokens(expected: Callable[[Sequence[float]], Any]) -> None:
    """``expected(given)``: tokens of a step, on average, from conditional acceptance.

    Entry i of ``given`` is the probability that draft token i is accepted, given that
    the one before it was.
    """
    for given in ([0.5], [0.8, 0.8], [0.9, 0.5, 0.2]):
        found, wanted = expected(given), expected_tokens(given, len(given))
        if not agrees(found, wanted):
            break
    judge(
        found,
        lambda answer: is_close(answer, wanted),
        f"For {given} it should be {wanted:.3g}: the target's own token is certain; "
        "draft token i counts if all up to it are accepted, which is a product.",
        "Since the terms are products, each further draft token brings less than the "
        "one before: there is a best length.",
    )


def check_acceptance_length(answer: float | None, outputs: Outputs) -> None:
    """Tokens of a step on average, had no answer been cut at its end."""
    found = evidence_of(outputs)
    judge(
        answer,
        lambda given: abs(float(given) - found.acceptance_length) < 0.01,
        f"{found.num_accepted} draft tokens were accepted in {found.num_steps} steps, "
        "and every step adds one token of the target's own.",
        "Papers call it the acceptance length, or tau. The tokens per step that were "
        f"counted are {found.tokens_per_step:.3f}: less where the last step was cut.",
    )


# ---- 04: trees -----------------------------------------------------------------------

TREE_PARENTS = (0, 0, 1, 1, 2)
TREE_DRAFT = ("the", "a", "cat", "dog", "house")
TREE_TARGET = ("the", "dog", "house", "sat", "barks", "is")
"""What the target says after each node, the anchor first."""


def check_ancestors(mask: Callable[[Sequence[int]], Any]) -> None:
    """``mask(parents)``: may node i attend node j? Node 0 is the anchor."""
    wanted = np.asarray(tree.ancestors(jnp.asarray(TREE_PARENTS, jnp.int32)))
    found = mask(list(TREE_PARENTS))
    judge(
        found,
        lambda answer: np.array_equal(np.asarray(answer, bool), wanted),
        f"For parents {list(TREE_PARENTS)} the mask is {len(wanted)} by {len(wanted)}. "
        "A node sees itself and whatever its parent sees; parents come first, so one "
        "pass over the nodes is enough.",
        "One forward scores all branches at once, since no node sees another branch.",
    )


def check_tree_path(answer: Sequence[str] | None) -> None:
    """The words that a step emits, of the draft tree above."""
    words = sorted({*TREE_DRAFT, *TREE_TARGET})
    drafted, said = (
        jnp.asarray([words.index(w) for w in part], jnp.int32)
        for part in (TREE_DRAFT, TREE_TARGET)
    )
    parents = jnp.asarray(TREE_PARENTS, jnp.int32)
    path, num = acceptance.matching_path(
        drafted, parents, jnp.int32(len(drafted)), said
    )
    nodes = [int(node) for node in path[: int(num) + 1]]
    wanted = [TREE_DRAFT[node - 1] for node in nodes[1:]] + [TREE_TARGET[nodes[-1]]]
    judge(
        answer,
        lambda found: [str(word) for word in found] == wanted,
        "Start at the anchor. If what the target says there is one of the children, go "
        "to that child and go on; the last thing the target says is emitted as well.",
        "Two draft tokens of five, and one of the target's own: a tree counts by its "
        "depth, not by its nodes.",
    )
