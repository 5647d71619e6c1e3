"""What several requests at once get: tokens per second, and how long a gap can be.

One strategy decodes the requests as one batch, a step at a time, and every step is
timed. The tokens of a step come together, so the time of a step is the gap between two
bursts of tokens for every request that was running. Requests that end early leave
their row empty until the last one is through: that is what a static batch costs, and
what scheduling is for.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdec.call import check
from jaxdec.lm import LM
from jaxdec.rounding import EXACT_WIDTH
from jaxdec.strategies import StrategyConfig
from jaxdec.types import FinishReason


@dataclasses.dataclass(frozen=True, kw_only=True)
class Together:
    """What was measured of requests that ran as one batch."""

    strategy: str
    num_requests: int
    throughput_tokens_per_s: float
    """Of all requests, after the first step (as a time per token is counted)."""
    p99_gap_ms: float
    """99th percentile, over requests and their steps, of the time of a step."""


def run_together(
    lm: LM,
    prompts: Sequence[Any],
    strategy: StrategyConfig,
    *,
    label: str,
    seeds: Sequence[int],
    exact: bool | int = False,
    **options: Any,
) -> Together | None:
    """Runs requests as one batch to its end.

    Args:
        lm: from `jaxdec.load`.
        prompts: what each request says.
        strategy: how to decode.
        label: its name in the result.
        seeds: of each request.
        exact: as for `jaxdec.generate`; so many requests are run as it covers.
        **options: as for `jaxdec.generate`; stop strings are not looked for.

    Returns:
        None where fewer than two requests can run, or none takes a second step.
    """
    num = len(prompts)
    if exact:
        width = EXACT_WIDTH if exact is True else int(exact)
        num = min(num, width // (strategy.length + 1))
    if num < 2:
        return None
    call = check(
        lm,
        list(prompts[:num]),
        strategy=strategy,
        seed=list(seeds[:num]),
        exact=exact,
        **options,
    )
    program, _ = lm.program(call.key)

    def start():
        # The first step counts as prefill: it ends at the first token.
        return program.run(program.prefill(program.params, call.request), 1)[0]

    def is_running(state):
        return np.any(np.asarray(state.sequences.finish) == FinishReason.NONE)

    program.run(start(), 1)  # Warm: what follows is only the model's time.
    state = start()
    gaps: list[float] = []
    num_tokens, spent = 0, 0.0
    while is_running(state):
        started = time.perf_counter()
        state, info, _ = program.run(state, 1)
        gap = time.perf_counter() - started
        gaps += [1000 * gap] * int(info.is_live.sum())
        num_tokens += int(info.num_emitted.sum())
        spent += gap
    if not gaps:
        return None
    return Together(
        strategy=label,
        num_requests=num,
        throughput_tokens_per_s=num_tokens / spent,
        p99_gap_ms=float(np.percentile(gaps, 99)),
    )
