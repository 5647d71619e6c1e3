"""The steps of one answer, token by token: what was drafted, and what became of it.

A report keeps, of its first few prompts, the text of every token and of the draft
tokens that were refused (`record`); how many tokens of a step were accepted stands in
the steps that every request keeps. Out of both, `steps` puts the answer together again.

An accepted draft token is the target's token, so only refused ones need words of their
own: those that stood where the target spoke (one of a chain, several of a tree), then
how the draft went on after the first of them. Other branches of a tree are left out.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxdec.counts import origins
from jaxdec.detokenize import TextStream
from jaxdec.types import StepInfo

NUM_PROMPTS = 3
"""Prompts whose answers a report keeps token by token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Token:
    """One emitted token."""

    text: str
    origin: str
    """One of `jaxdec.counts.ORIGINS`."""
    logprob: float | None
    """Under the target's raw logits, in nats."""
    confidence: float | None
    """The drafter's, that this token of its draft is accepted; None of the target's
    own tokens, and where the drafter has none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One round, as the report tells it."""

    num_judged: int
    num_accepted: int
    tokens: tuple[Token, ...]
    refused: tuple[str, ...]
    """Draft tokens in place of which the target said its own."""
    dropped: tuple[str, ...]
    """How the draft went on after the first of `refused`."""
    refused_confidence: float | None
    """The drafter's, in the first of `refused`."""


def pieces(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The text of each token; together, and without special tokens, the answer.

    A token that ends within a character has no text of its own; the one that completes
    the character has it. Special tokens have their names.
    """
    if tokenizer is None:
        return [f"{token} " for token in tokens]
    stream = TextStream(tokenizer)
    found = [
        _named(tokenizer, token)
        if tokenizer.is_special(token)
        else stream.push([token])
        for token in tokens
    ]
    if found:
        found[-1] += stream.finish()
    return found


def record(
    tokenizer: Any, tokens: Sequence[int], info: StepInfo, row: int
) -> dict[str, Any]:
    """What a report keeps of one answer; plain JSON values.

    Args:
        tokenizer: the model's; without one, tokens are told by their numbers.
        tokens: of the answer.
        info: leaves ``[B, steps, ...]``, cut where the answer ends.
        row: which of the B.

    Returns:
        ``pieces``, the text of each token; and for each step ``refused`` and
        ``dropped``, texts as in `Step`, and the number of the draft node that is the
        first of ``refused``, 0 if there is none.
    """
    found = {
        "pieces": pieces(tokenizer, tokens),
        "refused": [],
        "dropped": [],
        "refused_node": [],
    }
    for step in np.flatnonzero(info.is_live[row]):
        refused, dropped = _refused(info, row, int(step))
        drafted = info.draft_tokens[row, step]
        for name, nodes in (("refused", refused), ("dropped", dropped)):
            texts = [_named(tokenizer, int(drafted[node - 1])) for node in nodes]
            found[name].append(texts)
        found["refused_node"].append(refused[0] if refused else 0)
    return found


def steps(request: Mapping[str, Any]) -> list[Step]:
    """The steps of a request of a report; none if it was not kept token by token.

    Raises:
        ValueError: the texts and the counts are of different answers.
    """
    kept, counted = request.get("timeline") or {}, request.get("steps") or {}
    texts, logprobs = kept.get("pieces"), request.get("logprobs")
    columns = [
        counted.get(name) for name in ("num_judged", "num_accepted", "num_emitted")
    ]
    if any(column is None or None in column for column in (texts, *columns)):
        return []
    rows = list(zip(*columns, strict=True))
    if sum(emitted for _, _, emitted in rows) != len(texts):
        raise ValueError(
            f"the timeline has {len(texts)} tokens, but the steps emitted "
            f"{sum(emitted for _, _, emitted in rows)}; take both from one report"
        )
    found, at = [], 0
    for i, (judged, accepted, emitted) in enumerate(rows):
        confidence = _entry(counted.get("draft_confidence"), i) or []
        path = _entry(counted.get("path"), i) or []
        tokens = [
            Token(
                text=texts[at + j],
                origin=origin,
                logprob=_entry(logprobs, at + j),
                confidence=_confidence(confidence, _entry(path, j))
                if origin == "accepted"
                else None,
            )
            for j, origin in enumerate(origins(judged, accepted, emitted))
        ]
        found.append(
            Step(
                num_judged=judged,
                num_accepted=accepted,
                tokens=tuple(tokens),
                refused=_texts(kept.get("refused"), i),
                dropped=_texts(kept.get("dropped"), i),
                refused_confidence=_confidence(
                    confidence, _entry(kept.get("refused_node"), i)
                ),
            )
        )
        at += emitted
    return found


def _refused(info: StepInfo, row: int, step: int) -> tuple[list[int], list[int]]:
    """Nodes that were refused, and how the draft went on from the first of them."""
    accepted = int(info.num_accepted[row, step])
    num = int(info.num_judged[row, step]) - accepted
    if num < 1:
        return [], []
    parents = info.draft_parents[row, step, : info.num_drafted[row, step]]

    def children(node: int) -> list[int]:
        return (np.flatnonzero(parents == node) + 1).tolist()

    refused = children(int(info.path[row, step, accepted]))
    dropped, node = [], refused[0] if refused else -1
    while len(dropped) < num - 1 and (more := children(node)):
        node = more[0]
        dropped.append(node)
    return refused, dropped


def _named(tokenizer: Any, token: int) -> str:
    """The text of a token by itself; half a character becomes U+FFFD."""
    if tokenizer is None:
        return f"{token} "
    return tokenizer.token_bytes(token).decode("utf-8", "replace")


def _texts(values: Sequence[Any] | None, index: int) -> tuple[str, ...]:
    found = _entry(values, index) or ()
    return tuple(text for text in found if text is not None)


def _confidence(values: Sequence[Any], node: int | None) -> float | None:
    """Of a draft node; a drafter without confidence records zeros."""
    return _entry(values, node - 1) if node and any(values) else None


def _entry(values: Sequence[Any] | None, index: int) -> Any:
    return values[index] if values and index < len(values) else None
