"""Whose turn it is: orders of service, as functions of what a scheduler knows.

A policy is a rank, smallest first; ties go to the earlier arrival:

    first_come            by arrival
    priority              larger `Job.priority` first
    shortest_remaining    fewest rounds left at most: chunks to read, tokens to say
    deadline              earliest deadline first

`patient` makes any of them let nobody starve. All are plain functions on the host.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

PREEMPTIONS = ("none", "recompute", "keep")
"""Ways to let a waiting request go before a running one; see `jaxdec.scheduling`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What a scheduler knows of a request. Sizes are in tokens, times in seconds."""

    id: int
    arrival_s: float
    prompt_length: int
    max_new_tokens: int
    priority: int = 0
    """Larger is more urgent."""
    deadline_s: float = math.inf
    num_shared: int = 0
    """Tokens that a new row of it has read from the start (`jaxdec.prefixes`)."""
    num_said: int = 0
    """Tokens emitted so far."""
    num_read: int = 0
    """Tokens of prompt and output that its row has read."""
    has_row: bool = False
    """Whether it has a row, in a slot or beside the slots."""

    @property
    def num_unread(self) -> int:
        """Tokens to read before it can run; the last one said is read by a step."""
        return self.prompt_length + self.num_said - 1 - self.num_read

    @property
    def num_reserved(self) -> int:
        """Tokens that it may come to hold: what admission counts."""
        return self.prompt_length + self.max_new_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What the device has to give."""

    num_slots: int
    row_tokens: int
    """Most tokens, prompt and output, that a row has room for."""
    chunk: int
    """Tokens that a prefill chunk reads."""
    kv_tokens: int | None = None
    """Most tokens reserved by all requests that have a row; None is no limit but that
    of the rows."""
    preemption: str = "none"
    max_kept: int = 0
    """Rows that may be kept beside the slots for requests that gave way."""

    def __post_init__(self):
        for name in ("num_slots", "row_tokens", "chunk", "kv_tokens"):
            value = getattr(self, name)
            if name != "kv_tokens" or value is not None:
                check_whole(name, value)
        check_whole("max_kept", self.max_kept, least=0)
        if self.preemption not in PREEMPTIONS:
            raise ValueError(
                f"preemption must be one of {', '.join(PREEMPTIONS)}, got "
                f"{self.preemption!r}; 'none' lets nobody give way"
            )

    def rounds_left(self, job: Job) -> int:
        """Rounds that a job needs at most: a chunk or a token each."""
        num_unread = job.num_unread - (0 if job.has_row else job.num_shared)
        chunks = -(-num_unread // self.chunk)
        return chunks + job.max_new_tokens - job.num_said


Rank = Callable[[Job, float, Limits], tuple]
"""``(job, now_s, limits) -> rank``; the smallest goes first."""


class Policy(NamedTuple):
    """An order of service."""

    name: str
    rank: Rank


def _arrival(job: Job, now_s: float, limits: Limits) -> tuple:
    del now_s, limits
    return job.arrival_s, job.id


def _priority(job: Job, now_s: float, limits: Limits) -> tuple:
    return -job.priority, *_arrival(job, now_s, limits)


def _shortest(job: Job, now_s: float, limits: Limits) -> tuple:
    return limits.rounds_left(job), *_arrival(job, now_s, limits)


def _deadline(job: Job, now_s: float, limits: Limits) -> tuple:
    return job.deadline_s, *_arrival(job, now_s, limits)


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("first_come", _arrival),
        Policy("priority", _priority),
        Policy("shortest_remaining", _shortest),
        Policy("deadline", _deadline),
    )
}


def patient(policy: Policy, patience_s: float) -> Policy:
    """The same policy, but what arrived `patience_s` ago goes first, oldest first."""

    def rank(job: Job, now_s: float, limits: Limits) -> tuple:
        if now_s - job.arrival_s >= patience_s:
            return 0, *_arrival(job, now_s, limits)
        return 1, *policy.rank(job, now_s, limits)

    return Policy(f"patient {policy.name}", rank)


def find_policy(policy: str | Policy) -> Policy:
    """The policy of a name, or a policy as it is.

    Raises:
        ValueError: an unknown name.
    """
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ValueError(
            f"unknown policy {policy!r}; use one of {', '.join(POLICIES)}, or a "
            "jaxdec.policies.Policy"
        )
    return POLICIES[policy]


def check_fits(limits: Limits, prompt_length: int, max_new_tokens: int) -> None:
    """Raises ValueError for a request that could never run."""
    need = prompt_length + max_new_tokens
    told = f"{need} tokens ({prompt_length} of prompt + {max_new_tokens} new)"
    if need > limits.row_tokens:
        raise ValueError(
            f"the request needs {told}, but a slot holds {limits.row_tokens}; shorten "
            "the prompt, lower max_new_tokens, or make the server with a larger "
            "max_length"
        )
    if limits.kv_tokens is not None and need > limits.kv_tokens:
        raise ValueError(
            f"the request needs {told}, but the KV budget is {limits.kv_tokens}; "
            "shorten the prompt, lower max_new_tokens, or raise kv_tokens"
        )


def check_whole(name: str, value: Any, least: int = 1) -> None:
    """Raises ValueError for what is no whole number, or too small a one."""
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_whole or value < least:
        raise ValueError(
            f"{name} is {value!r}; give at least {least}, as a whole number"
        )


def check_ranked(**values: Any) -> None:
    """Raises ValueError for what no policy could put requests in order by."""
    for name, value in values.items():
        if not isinstance(value, numbers.Real) or math.isnan(value):
            raise ValueError(
                f"{name} is {value!r}, and requests are put in order by it; give a "
                "number"
            )
