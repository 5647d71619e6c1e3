"""Slots of one strategy and one length: their compiled step, loop and costs.

A `jaxdec.Server` has one or several of these.
"""

from collections.abc import Callable

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
