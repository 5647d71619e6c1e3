"""How long a draft is worth while, by how many requests run.

A step over n requests that judges up to k draft tokens of each takes `step(n, k)`
seconds, which were measured (`jaxdec.scheduling.CostTable`), and says n E(k) tokens, of
an acceptance that was measured too. So

    tokens per second  =  n E(k) / step(n, k),    E(0) = 1,

and the best k is found by trying all: long drafts where few requests run and a step
waits for weights, shorter ones as rows fill the device, none above the break-even load.
Below it drafting comes back by itself, as the rule looks at nothing but n. There is no
cliff: where the best k changes, both choices say as many tokens per second.

The rule sees no token, so it is lossless under any acceptance rule. A drafter with a
confidence is limited within the step as well (`jaxdec.draft_length.throughput`), with
rates from the same table (`steps_per_second`).
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxdec.latency import Burst, Record
from jaxdec.planning.break_even import expected_tokens
from jaxdec.scheduling import CostTable
from jaxdec.types import FinishReason

WINDOW = 4096
"""Steps of the past that `measured` looks at."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """What becomes of drafts."""

    conditional: tuple[float, ...] = ()
    """Entry i: draft token i is accepted, given that the one before it was."""
    draft_rate: float = 1.0
    """How often a request has a draft at all."""
    is_tree: bool = False
    """Whether draft tokens are nodes of a tree. Entry i is then about depth i, in the
    whole tree; of parts of it nothing is known."""

    def __post_init__(self):
        if not all(0 <= p <= 1 for p in (*self.conditional, self.draft_rate)):
            raise ValueError(
                f"acceptance is made of probabilities from 0 to 1, got {self}; measure "
                "it with jaxdec.speculation.measured"
            )

    @property
    def length(self) -> int:
        """K."""
        return len(self.conditional)

    def tokens(self, draft_length: int) -> float:
        """E(k): tokens that a request says in a step, on average.

        Of a part of a tree, no more than what is certain.
        """
        if self.is_tree and draft_length < self.length:
            return 1.0
        gain = expected_tokens(self.conditional, draft_length) - 1
        return 1 + self.draft_rate * gain


def measured(
    records: Sequence[Record], length: int, *, is_tree: bool = False
) -> Acceptance:
    """The acceptance of requests that drafted `length` tokens in every step.

    The last steps of a request are left out, since its end cuts drafts short.

    Args:
        records: of the requests.
        length: K; of a tree, its nodes.
        is_tree: whether drafts are trees.
    """
    bursts = [burst for record in records for burst in _uncut(record, length)]
    if not bursts:  # All answers are shorter than a draft: better these than none.
        bursts = [burst for record in records for burst in record.bursts[:-1]]
    bursts = bursts[-WINDOW:]
    drafted = np.array([b.num_drafted for b in bursts], np.int64)
    accepted = np.array([b.num_accepted for b in bursts], np.int64)[drafted > 0]
    reached = [int((accepted >= i).sum()) for i in range(length + 1)]
    return Acceptance(
        conditional=tuple(
            after / before if before else 0.0
            for before, after in zip(reached[:-1], reached[1:], strict=True)
        ),
        draft_rate=float((drafted > 0).mean()) if bursts else 0.0,
        is_tree=is_tree,
    )


def _uncut(record: Record, length: int) -> list[Burst]:
    """The steps before which a request had room for a whole draft, but the last."""
    if record.finish != FinishReason.LENGTH:
        return record.bursts[:-1]
    left, found = record.num_tokens, []
    for burst in record.bursts[:-1]:
        if left > length:
            found.append(burst)
        left -= burst.num_tokens
    return found


def tokens_per_second(
    costs: CostTable, acceptance: Acceptance, num_running: int, draft_length: int
) -> float:
    """Of all running requests together, in expectation."""
    none_drafts = (1 - acceptance.draft_rate) ** num_running
    step_s = none_drafts * costs.step(num_running, 0)
    step_s += (1 - none_drafts) * costs.step(num_running, draft_length)
    return num_running * acceptance.tokens(draft_length) / max(step_s, 1e-12)


def best_lengths(costs: CostTable, acceptance: Acceptance) -> tuple[int, ...]:
    """The draft length with most tokens per second; entry n - 1 for n requests.

    Of equals the shortest.
    """

    def best(num_running: int) -> int:
        return max(
            range(acceptance.length + 1),
            key=lambda k: tokens_per_second(costs, acceptance, num_running, k),
        )

    return tuple(best(n) for n in range(1, len(costs.step_s) + 1))


def scheduled(costs: CostTable, acceptance: Acceptance) -> Callable[[int], int]:
    """`best_lengths` as the rule of a server: how many run to a draft length.

    The rule raises ValueError for more than the costs were measured with.
    """
    lengths = best_lengths(costs, acceptance)

    def rule(num_running: int) -> int:
        if num_running > len(lengths):
            raise ValueError(
                f"{num_running} requests run, but costs were measured with up to "
                f"{len(lengths)}; measure the group of slots that the rule is for"
            )
        return lengths[num_running - 1]

    return rule


def steps_per_second(
    costs: CostTable, num_slots: int, draft_length: int
) -> tuple[float, ...]:
    """Rates of steps that read 0, 1, 2, ... tokens in all, as `throughput` wants them.

    A compiled step costs what its longest draft costs. With all slots running, n tokens
    need drafts of at least ``ceil(n / num_slots) - 1``, and survivals of equal rows
    fill them evenly; that is the step whose rate is taken. Entry 0 is not used.
    """
    num_tokens = np.arange(num_slots * (draft_length + 1) + 1)
    longest = np.maximum(-(-num_tokens // num_slots) - 1, 0)
    return tuple(1 / max(costs.step(num_slots, int(k)), 1e-12) for k in longest)
