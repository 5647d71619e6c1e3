"""Slots of one strategy and one length: their compiled step, loop and costs.

A `jaxdec.Server` has one or several of these.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxdec import program, serving_costs
from jaxdec.batching import SlotDevice
from jaxdec.call import Call, check
from jaxdec.lm import LM
from jaxdec.policies import Limits, Policy
from jaxdec.program import ProgramKey, make_request
from jaxdec.scheduling import CostTable
from jaxdec.serving_loop import ServingLoop
from jaxdec.types import Request


class SlotGroup:
    """The slots of one strategy."""

    def __init__(
        self,
        lm: LM,
        key: ProgramKey,
        policy: Policy,
        limits: Limits,
        clock: Callable[[], float],
        max_shared: int,
    ):
        self.key = key
        batching, params = program.compile_slots(lm, key)
        call = check(
            lm,
            [0],
            strategy=key.config,
            max_new_tokens=1,
            num_bias_slots=key.num_bias_slots,
        )
        self.device = SlotDevice(batching, params, self.request(call, 0))
        self.loop = ServingLoop(self.device, policy, limits, clock, max_shared)

    def request(self, call: Call, draft_length: int) -> Request:
        """A checked call in the shapes of the compiled step."""
        return make_request(
            prompts=[list(call.prompts[0])],
            max_new_tokens=[call.max_new_tokens[0]],
            stop_tokens=[list(call.stop_tokens[0])],
            seeds=[call.seeds[0]],
            max_draft_length=draft_length,
            sampling=call.request.sampling,
            capacity=self.key.capacity,
            num_stop_slots=self.key.num_stop_slots,
        )

    def measure_costs(
        self,
        lm: LM,
        context: int | None,
        repeats: int,
        progress: Callable[[int, int, str], None],
    ) -> CostTable:
        """Times the device; see `Server.measure_costs`."""
        config, limits = self.key.config, self.loop.limits
        new = config.length + 2
        context = limits.row_tokens // 2 if context is None else context
        context = max(2, min(context, limits.row_tokens - new))
        # It repeats itself, so that drafters that look for that find a draft.
        prompt = [i % min(16, lm.config.vocab_size) for i in range(context)]
        call = check(
            lm,
            prompt,
            single=True,
            strategy=config,
            max_new_tokens=new,
            stop_tokens=(),
            num_bias_slots=self.key.num_bias_slots,
        )
        return serving_costs.measure_costs(
            self.device,
            self.request(call, config.length),
            num_chunks=-(-(context - 1) // limits.chunk),
            num_slots=limits.num_slots,
            lengths=serving_costs.draft_lengths(config.length, config.widths),
            repeats=repeats,
            progress=progress,
        )


class SlotGroups(list[SlotGroup]):
    """All groups of a server."""

    def of(self, strategy: Any, max_length: int | None = None) -> list[SlotGroup]:
        """The groups of a strategy, shortest slots first.

        A name is that of the first configuration that has it.
        """
        if strategy is None:
            strategy = self[0].key.config
        configs = [group.key.config for group in self]
        config = next((c for c in configs if strategy in (c, c.name)), None)
        if config is None:
            raise ValueError(
                f"this server has no slots for strategy {strategy!r}; it has those of "
                f"{', '.join(dict.fromkeys(c.name for c in configs))}"
            )
        found = {
            group.loop.limits.row_tokens: group
            for group in self
            if group.key.config == config
        }
        lengths = sorted(found)
        if max_length is None:
            return [found[length] for length in lengths]
        if max_length not in found:
            raise ValueError(
                f"{config.name!r} has slots of {', '.join(map(str, lengths))} tokens, "
                f"none of {max_length!r}; give one of those"
            )
        return [found[max_length]]

    def where(self, strategy: Any, num_tokens: int) -> SlotGroup:
        """Where a request of so many tokens goes: where fewest wait.

        Of those that it fits; of equals the shortest. One that fits nowhere goes to the
        longest, which refuse it.
        """
        groups = self.of(strategy)

        def queue(group: SlotGroup) -> float:
            num_slots = group.loop.limits.num_slots
            return max(group.loop.num_open + 1 - num_slots, 0) / num_slots

        fit = [g for g in groups if g.loop.limits.row_tokens >= num_tokens] or groups[
            -1:
        ]
        return min(fit, key=queue)


def for_each_group(**given: Any) -> list[tuple]:
    """Values of every group, from one for each or one for all.

    Raises:
        ValueError: different numbers of them.
    """
    lists = {
        name: list(value)
        for name, value in given.items()
        if isinstance(value, Sequence) and not isinstance(value, str)
    }
    num = max((len(values) for values in lists.values()), default=1)
    wrong = [name for name, values in lists.items() if len(values) != num or not num]
    if wrong:
        told = ", ".join(f"{len(values)} of {name}" for name, values in lists.items())
        raise ValueError(
            f"the groups of slots do not fit together: {told}; give one for each "
            "group, or one for all"
        )
    values = [lists.get(name, [value] * num) for name, value in given.items()]
    return list(zip(*values, strict=True))
