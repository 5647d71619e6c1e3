"""Loads: who comes when with how much, for the real server and the simulated clock.

A `Traffic` describes requests; its arrivals are drawn from a seed, so the same load can
be served by every policy, on a device (`drive`) and on a simulated clock
(`jaxdec.simulation`). Prompts are cut from real text to the lengths that were drawn,
and requests end after exactly as many tokens as they are to say, so both clocks serve
the same load.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdec import simulation
from jaxdec.call import encode
from jaxdec.counts import Number
from jaxdec.latency import Record
from jaxdec.policies import check_whole
from jaxdec.prompts import builtin
from jaxdec.server import Server
from jaxdec.simulation import Arrival
from jaxdec.ticket import Ticket

ARRIVALS = ("poisson", "bursty")
NUM_PRIORITIES = 3
SHORTEST_MESSAGE = 8  # Tokens of a message worth a chat template.
LONGEST_SLEEP_S = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """A load, as a distribution."""

    rate: Number
    """Requests per second."""
    num_requests: int
    arrivals: str = "poisson"
    """One by one, or "bursty"."""
    burst: Number = 8.0
    """Mean requests of a burst."""
    lengths: str = "builtin"
    """"builtin", or a file: see `read_lengths`."""
    prompt_tokens: Number = 64.0
    """Median of the built-in lengths, which are log-normal; so is `output_tokens`."""
    output_tokens: Number = 48.0
    sigma: Number = 0.7
    """Of the logarithm of built-in lengths; 0 makes all alike."""
    max_length: int = 512
    """Most tokens, prompt and output, of a request."""
    patience_s: Number = 2.0
    """A deadline is this long after the arrival, and a tenth of a second a token."""
    seed: int = 0

    def __post_init__(self):
        if self.arrivals not in ARRIVALS:
            raise ValueError(
                f"arrivals must be one of {', '.join(ARRIVALS)}, got {self.arrivals!r}"
            )
        for name in ("rate", "num_requests", "prompt_tokens", "output_tokens"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; a load has some of each, so "
                    "give a number above 0"
                )
        check_whole("num_requests", self.num_requests)
        check_whole("max_length", self.max_length, least=2)
        for name, least in (("burst", 1), ("sigma", 0), ("patience_s", 0)):
            if not least <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; give a number from {least} up"
                )

    def draw(self) -> tuple[Arrival, ...]:
        """The requests, in order of arrival."""
        num, seed = self.num_requests, self.seed
        if self.arrivals == "bursty":
            times = simulation.bursty_times(self.rate, num, seed, burst=self.burst)
        else:
            times = simulation.poisson_times(self.rate, num, seed)
        rng = np.random.default_rng((seed, 1))
        if self.lengths == "builtin":
            most = self.max_length // 2
            prompts, outputs = (
                simulation.lognormal_lengths(median, self.sigma, most, num, seed + i)
                for i, median in ((2, self.prompt_tokens), (3, self.output_tokens))
            )
        else:
            known = read_lengths(self.lengths, self.max_length)
            chosen = known[rng.integers(len(known), size=num)]
            prompts, outputs = chosen[:, 0], chosen[:, 1]
        arrivals = simulation.load(times, prompts, outputs)
        return tuple(
            dataclasses.replace(
                arrival,
                priority=int(rng.integers(NUM_PRIORITIES)),
                deadline_s=arrival.arrival_s
                + self.patience_s
                + 0.1 * arrival.output_length,
            )
            for arrival in arrivals
        )


def read_lengths(path: str | Path, max_length: int) -> np.ndarray:
    """Lengths of requests from a file, as an array ``[num, 2]``.

    Args:
        path: a line ``{"prompt_length": 120, "output_length": 40}`` for each.
        max_length: most tokens, prompt and output.

    Raises:
        ValueError: lines that are something else, all of them by number.
        OSError: the file cannot be read.
    """
    found, bad = [], []
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            pair = [values["prompt_length"], values["output_length"]]
        except (ValueError, KeyError, TypeError):
            bad.append(f"line {number}: no prompt_length and output_length")
            continue
        if not all(type(n) is int and n >= 1 for n in pair):
            bad.append(f"line {number}: {pair} are not whole numbers from 1")
        elif sum(pair) > max_length:
            bad.append(
                f"line {number}: {sum(pair)} tokens, but slots hold {max_length}"
            )
        found.append(pair)
    if bad or not found:
        told = "; ".join(bad[:5]) or "no lines"
        raise ValueError(
            f"{path} has {len(bad)} bad lines ({told}); write one object a line, such "
            'as {"prompt_length": 120, "output_length": 40}'
        )
    return np.array(found)


def prompts_of(lm: Any, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Token ids of text of those lengths; of a model without a tokenizer, any ids.

    What a chat model is asked is a user's message, where the length has room for one:
    how much of a draft is accepted depends on it.
    """
    rng = np.random.default_rng((seed, 4))
    if lm.tokenizer is None:
        return [rng.integers(lm.config.vocab_size, size=n).tolist() for n in lengths]
    texts = [lm.tokenizer.encode(prompt.text + "\n") for prompt in builtin()]
    before, after = _frame(lm)

    def one(length: int) -> list[int]:
        """From the beginning of some text, and on into the next ones."""
        room = length - len(before) - len(after)
        has_frame = room >= SHORTEST_MESSAGE
        size = room if has_frame else length
        tokens, which = [], int(rng.integers(len(texts)))
        while len(tokens) < size:
            tokens += texts[which % len(texts)]
            which += 1
        return [*before, *tokens[:size], *after] if has_frame else tokens[:size]

    return [one(int(length)) for length in lengths]


def _frame(lm: Any) -> tuple[list[int], list[int]]:
    """The tokens that stand before and after a user's message."""
    one, other = (encode(lm, text, None, None, 0) for text in ("yes", "Where?"))

    def shared(a, b):
        differs = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
        return next(differs, 0)

    num_before, num_after = shared(one, other), shared(one[::-1], other[::-1])
    return one[:num_before], one[len(one) - num_after :]


def drive(
    server: Server,
    arrivals: Sequence[Arrival],
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    progress: Callable[[int, int, str], None] = lambda *_: None,
) -> list[Record]:
    """Serves a load in real time: requests are submitted when their time has come.

    A request that arrives while a round goes on is seen after it, and has waited since
    its arrival. Its seed is its number.

    Args:
        server: without other requests.
        arrivals: the load, in any order; time 0 is now.
        prompts: of each.
        temperature: of all; None is that of the strategy.
        clock: the server's.
        sleep: waits some seconds for the next arrival.
        progress: called with requests done, all, and words.

    Returns:
        The records, in the order of `arrivals`.
    """
    order = sorted(range(len(arrivals)), key=lambda i: arrivals[i].arrival_s)
    tickets: dict[int, Ticket] = {}
    waiting: list[Ticket] = []
    started = clock()
    while True:
        now = clock() - started
        while len(tickets) < len(order):
            index = order[len(tickets)]
            arrival = arrivals[index]
            if arrival.arrival_s > now:
                break
            ticket = server.submit(
                list(prompts[index]),
                max_new_tokens=arrival.output_length,
                temperature=temperature,
                seed=index,
                stop_tokens=(),
                priority=arrival.priority,
                deadline_s=started + arrival.deadline_s,
                arrival_s=started + arrival.arrival_s,
            )
            tickets[index] = ticket
            waiting.append(ticket)
        did_something = server.step()
        waiting = [ticket for ticket in waiting if not ticket.is_done]
        num_done = len(tickets) - len(waiting)
        progress(num_done, len(order), f"{now:.0f} s of the load")
        if did_something:
            continue
        if len(tickets) == len(order):
            break
        ahead = arrivals[order[len(tickets)]].arrival_s - (clock() - started)
        if ahead > 0:
            sleep(min(ahead, LONGEST_SLEEP_S))
    return [tickets[index].record for index in range(len(arrivals))]
