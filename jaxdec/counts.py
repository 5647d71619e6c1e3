"""What happened in the steps of a run, counted.

Each word has one definition:

    step         one round of one running row. A batch of B rows that runs n rounds has
                 at most B x n steps. Prefill is no step and emits no token.
    drafted      draft tokens that the target scored (all nodes of a tree).
    judged       drafted, clipped at the budget and at an accepted stop token: what
                 could have been emitted. A tree counts depth, not nodes.
    accepted     draft tokens among the emitted ones.
    emitted      tokens appended: the accepted ones, then the target's own token, which
                 is missing where a stop token or the budget ended the row first.
    rollback     a step with judged > accepted: something was refused.

An emitted token is one of four, told apart by what its step counted (`origins`):

    accepted     a draft token that the target agreed with.
    correction   the target's own token at the end of a rollback.
    bonus        the target's own token after a draft that was accepted whole.
    plain        the target's own token in a step that judged no draft.

    acceptance_rate    = sum accepted / sum judged
    tokens_per_step    = sum emitted / steps
    acceptance_length  = sum (accepted + 1) / steps
                       = tokens_per_step + (steps without the target's token) / steps
    acceptance_by_position[i]
                       = P(draft token i accepted | the step judged it)
    conditional_acceptance_by_position[i]
                       = P(draft token i accepted | judged, and i - 1 accepted)
    block_acceptance[i]
                       = P(draft token i accepted | the step drafted at all)
    nodes verified     = drafted + 1: what the target read, the anchor included.

The lists end at the last position that was ever judged. A ratio 0/0 is None, never NaN;
a ratio of several requests is a ratio of sums, never a mean of ratios.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from jaxdec.types import StepInfo

Number = float | int | np.number
"""What a caller may pass as a figure; JSON and ratios make it plain."""

ORIGINS = ("accepted", "correction", "bonus", "plain")
"""Where an emitted token can come from."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """The countable part of a record; definitions in the module docstring."""

    num_steps: int
    num_drafted: int
    num_judged: int
    num_accepted: int
    num_emitted: int
    num_rollbacks: int
    num_nodes_verified: int
    tokens_per_step: float | None
    acceptance_rate: float | None
    acceptance_length: float | None
    acceptance_by_position: tuple[float | None, ...]
    conditional_acceptance_by_position: tuple[float | None, ...]
    block_acceptance: tuple[float | None, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestSteps:
    """What happened in each step that one request ran, in order."""

    num_drafted: tuple[int, ...]
    num_judged: tuple[int, ...]
    num_accepted: tuple[int, ...]
    num_emitted: tuple[int, ...]
    path: tuple[tuple[int, ...], ...]
    """Accepted draft nodes; 1, 2, ... for a chain."""
    draft_confidence: tuple[tuple[float, ...], ...]
    """Of each draft token; zeros where the drafter has none."""
    draft_source: tuple[int, ...]


def ratio(numerator: Number, denominator: Number) -> float | None:
    """A quotient in plain floats; None where there was nothing to divide by."""
    return float(numerator) / float(denominator) if denominator else None


def origins(num_judged: int, num_accepted: int, num_emitted: int) -> tuple[str, ...]:
    """Where each token that a step emitted came from, in order; one of `ORIGINS` each.

    >>> origins(3, 2, 3), origins(1, 1, 2), origins(0, 0, 1)
    (('accepted', 'accepted', 'correction'), ('accepted', 'bonus'), ('plain',))
    """
    if not num_judged:
        own = "plain"
    else:
        own = "bonus" if num_accepted == num_judged else "correction"
    return ("accepted",) * num_accepted + (own,) * (num_emitted - num_accepted)


def row_origins(info: StepInfo, row: int) -> tuple[str, ...]:
    """`origins` of all tokens that the steps of a row emitted, one after another.

    Args:
        info: Leaves ``[B, steps, ...]``.
        row: Which.
    """
    live = np.flatnonzero(info.is_live[row])
    leaves = (info.num_judged, info.num_accepted, info.num_emitted)
    steps = zip(*(leaf[row, live].tolist() for leaf in leaves), strict=True)
    return tuple(origin for step in steps for origin in origins(*step))


def count(
    num_drafted: Int[np.ndarray, "steps"],
    num_judged: Int[np.ndarray, "steps"],
    num_accepted: Int[np.ndarray, "steps"],
    num_emitted: Int[np.ndarray, "steps"],
) -> Counts:
    """Counts steps, of one request or of many laid end to end.

    Raises:
        ValueError: If a step breaks ``accepted <= judged <= drafted`` or
            ``accepted <= emitted <= accepted + 1``.
    """
    is_broken = (
        (num_accepted < 0)
        | (num_accepted > num_judged)
        | (num_judged > num_drafted)
        | (num_emitted < num_accepted)
        | (num_emitted > num_accepted + 1)
    )
    if is_broken.any():
        step = int(np.argmax(is_broken))
        raise ValueError(
            "a step needs accepted <= judged <= drafted and accepted <= emitted <= "
            f"accepted + 1, but step {step} accepted {num_accepted[step]}, judged "
            f"{num_judged[step]}, drafted {num_drafted[step]} and emitted "
            f"{num_emitted[step]}; correct the strategy's StepInfo."
        )
    num_steps = len(num_judged)
    positions = np.arange(num_judged.max(initial=0))[:, None]
    is_judged = num_judged > positions
    is_reached = is_judged & (num_accepted >= positions)
    times_accepted = (num_accepted > positions).sum(axis=1)

    def by_position(times):
        return tuple(ratio(a, b) for a, b in zip(times_accepted, times, strict=True))

    return Counts(
        num_steps=num_steps,
        num_drafted=int(num_drafted.sum()),
        num_judged=int(num_judged.sum()),
        num_accepted=int(num_accepted.sum()),
        num_emitted=int(num_emitted.sum()),
        num_rollbacks=int((num_judged > num_accepted).sum()),
        num_nodes_verified=int(num_drafted.sum()) + num_steps,
        tokens_per_step=ratio(num_emitted.sum(), num_steps),
        acceptance_rate=ratio(num_accepted.sum(), num_judged.sum()),
        acceptance_length=ratio((num_accepted + 1).sum(), num_steps),
        acceptance_by_position=by_position(is_judged.sum(axis=1)),
        conditional_acceptance_by_position=by_position(is_reached.sum(axis=1)),
        block_acceptance=by_position([int((num_drafted > 0).sum())] * len(positions)),
    )


def cut(
    info: StepInfo,
    num_tokens: Int[np.ndarray, "B"],
    is_stopped: Bool[np.ndarray, "B"] | None = None,
) -> StepInfo:
    """Keeps only what each row did for its first tokens.

    A stop string is found by the host after steps have run on. Tokens, logprobs and
    steps must then end at one index; this cuts the steps. The step that holds the cut
    counts as if a stop token had ended it there (its logprobs are left alone: they are
    cut as one list); later steps are no longer live.

    Args:
        info: Leaves ``[B, steps, ...]``.
        num_tokens: Output tokens that each row keeps.
        is_stopped: Rows that a stop string ended: drafts after their last token count
            as not judged, also where that token was the last of its step.
    """
    emitted = np.where(info.is_live, info.num_emitted, 0)
    before = np.cumsum(emitted, axis=1) - emitted
    room = np.maximum(num_tokens[:, None] - before, 0)
    kept = np.minimum(room, emitted)
    is_cut = kept < emitted
    # A row that keeps all its tokens keeps also a last step that emitted none.
    is_cut_row = emitted.sum(axis=1) > num_tokens
    is_live = np.asarray(info.is_live) & ((room > 0) | ~is_cut_row[:, None])
    if is_stopped is not None:
        is_last = is_live & (np.cumsum(is_live[:, ::-1], axis=1)[:, ::-1] == 1)
        is_cut = is_cut | (is_stopped[:, None] & is_last)

    def clip(counts):
        return np.where(is_live, np.where(is_cut, np.minimum(counts, kept), counts), 0)

    return info.replace(
        is_live=is_live,
        num_drafted=np.where(is_live, info.num_drafted, 0),
        num_judged=clip(info.num_judged),
        num_accepted=clip(info.num_accepted),
        num_emitted=np.where(is_live, kept, 0),
    )


def kv_bytes(
    info: StepInfo,
    prompt_length: Int[np.ndarray, "B"],
    bytes_per_token: int,
    num_rows: int | None = None,
) -> tuple[int, int]:
    """Bytes of KV state that all steps together read and wrote.

    A step over T tokens attends all live entries and its own T, and writes T; refused
    ones are written too. The live length before a row's first step is
    ``prompt_length - 1`` (the anchor is unread) and grows by what each step emits.
    Prefill is left out.

    Args:
        info: Leaves ``[B, steps, ...]``.
        prompt_length: Tokens.
        bytes_per_token: Keys and values of all layers.
        num_rows: T, if forwards are padded; else the nodes of a draft and the anchor.

    Returns:
        ``(read, written)``.
    """
    is_live = np.asarray(info.is_live)
    emitted = np.where(is_live, info.num_emitted, 0)
    rows = info.path.shape[-1] if num_rows is None else num_rows
    live = prompt_length[:, None] - 1 + np.cumsum(emitted, axis=1) - emitted
    read = int(np.where(is_live, live + rows, 0).sum(dtype=np.int64))
    written = rows * int(is_live.sum())
    return read * bytes_per_token, written * bytes_per_token


def request_steps(info: StepInfo, row: int) -> RequestSteps:
    """The steps that a row ran, as plain tuples."""
    live = np.flatnonzero(info.is_live[row])

    def numbers(leaf):
        return tuple(leaf[row, live].tolist())

    accepted = numbers(info.num_accepted)
    drafted = numbers(info.num_drafted)
    paths = info.path[row, live].tolist()
    confidences = info.draft_confidence[row, live].tolist()
    return RequestSteps(
        num_drafted=drafted,
        num_judged=numbers(info.num_judged),
        num_accepted=accepted,
        num_emitted=numbers(info.num_emitted),
        path=tuple(tuple(p[1 : n + 1]) for p, n in zip(paths, accepted, strict=True)),
        draft_confidence=tuple(
            tuple(c[:n]) for c, n in zip(confidences, drafted, strict=True)
        ),
        draft_source=numbers(info.draft_source),
    )


def count_steps(steps: Sequence[RequestSteps]) -> Counts:
    """Counts the steps of several requests together."""
    names = ("num_drafted", "num_judged", "num_accepted", "num_emitted")
    return count(
        **{
            name: np.array([n for s in steps for n in getattr(s, name)], np.int64)
            for name in names
        }
    )


def count_by_source(
    steps: Sequence[RequestSteps], sources: Sequence[str]
) -> dict[str, dict[str, Number | None]]:
    """What each of several drafters contributed.

    Args:
        steps: Of any number of requests.
        sources: Names in the order of `Draft.source`. A step without a draft counts for
            none of them.

    Returns:
        By name: steps with a draft of it, drafted, judged and accepted tokens, and the
        acceptance rate.
    """
    found = {}
    for number, name in enumerate(sources):
        rows = [
            (d, j, a)
            for s in steps
            for d, j, a, which in zip(
                s.num_drafted,
                s.num_judged,
                s.num_accepted,
                s.draft_source,
                strict=True,
            )
            if which == number and d > 0
        ]
        drafted, judged, accepted = (sum(r[i] for r in rows) for i in range(3))
        found[name] = {
            "num_steps": len(rows),
            "num_drafted": drafted,
            "num_judged": judged,
            "num_accepted": accepted,
            "acceptance_rate": ratio(accepted, judged),
        }
    return found
