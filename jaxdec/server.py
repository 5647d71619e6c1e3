"""Many requests at once: submitted, streamed and cancelled while others run.

    server = jaxdec.Server(lm, "lookup", num_slots=8)
    tickets = [server.submit(prompt, max_new_tokens=64) for prompt in prompts]
    server.run()
    print(tickets[0].text, tickets[0].record.ttft_s)

A server has a number of slots on one compiled step (`jaxdec.batching`) and a policy
that says whose turn it is (`jaxdec.scheduling`). With the rule ``match`` a request says
what it says alone, whatever its neighbours, its slot and the time of its arrival; but
for rounding, which depends on the number of slots (`jaxdec.rounding`).
Different strategies are groups of slots with a step of their own each; one prefill
chunk, of one group, goes before the steps of all.

Nothing runs by itself: `Server.step` makes a round, and `run`, `stream` and `result`
call it. A server belongs to one thread.
"""

import numbers
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from jaxdec import serving_costs
from jaxdec.cache import headroom, round_capacity
from jaxdec.call import Call, check
from jaxdec.decoding import PREFILL_CHUNK
from jaxdec.lm import LM
from jaxdec.policies import Limits, Policy, check_fits, check_whole, find_policy
from jaxdec.program import ProgramKey
from jaxdec.rounding import COMMON
from jaxdec.scheduling import CostTable
from jaxdec.serving_loop import ServingLoop
from jaxdec.slot_group import SlotGroup, SlotGroups, for_each_group
from jaxdec.strategies import resolve
from jaxdec.text import Generated, Piece
from jaxdec.ticket import Ticket
from jaxdec.types import LogitsProcessor


class Server:
    """Serves requests of one model, as many at once as there are slots."""

    def __init__(
        self,
        lm: LM,
        strategy: Any = "greedy",
        *,
        num_slots: int | Sequence[int] = 8,
        max_length: int | Sequence[int] = 512,
        policy: str | Policy = "first_come",
        preemption: str = "none",
        max_kept: int | None = None,
        max_shared: int = 2,
        kv_tokens: int | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        num_stop_tokens: int = 4,
        num_biases: int = 8,
        processor: LogitsProcessor | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Compiles the steps, unless a server of the same shapes did before.

        Args:
            lm: from `jaxdec.load`.
            strategy: a name or a configuration; several make a group of slots each.
            num_slots: requests that run at once; of every group, or of each.
            max_length: most tokens, prompt and output, of a request; of every group, or
                of each. Where one strategy has groups of several lengths, a request
                goes to the shortest that it fits, unless fewer wait for longer ones: so
                short ones do not pay for long ones, in memory or in time.
            policy: a name of `jaxdec.policies.POLICIES`, or a policy.
            preemption: whether a running request gives way to one that goes before it,
                and how: "none", "recompute" or "keep".
            max_kept: rows kept beside the slots of a group, with "keep"; None is as
                many as slots. Beyond that, tokens are read again.
            max_shared: rows kept beside the slots of a group for what prompts begin
                with that others began with too (a system prompt): it is read once, by
                the target and the drafter, and then copied.
            kv_tokens: most tokens, prompt and output, that the requests of a group with
                a row may come to hold, those that gave way and keep it too; rows of
                shared beginnings are apart. None is what there are rows for.
            prefill_chunk: prompt tokens that are read between two steps.
            num_stop_tokens: most stop tokens of a request.
            num_biases: most logit biases and bans of a request.
            processor: custom logits processor of all requests.
            clock: the time in seconds, of all records.

        Raises:
            ValueError: options that make no sense together.
        """
        if lm.mesh is not None:
            raise ValueError(
                "a server runs on one device, but this model is on a mesh; load it "
                "without mesh, or decode with jaxdec.generate"
            )
        shapes = for_each_group(
            strategy=strategy, num_slots=num_slots, max_length=max_length
        )
        for _, num, length in shapes:
            check_whole("num_slots", num)
            check_whole("max_length", length)
        check_whole("prefill_chunk", prefill_chunk)
        check_whole("max_shared", max_shared, least=0)
        check_whole("num_stop_tokens", num_stop_tokens, least=0)
        check_whole("num_biases", num_biases)
        longest = max(length for _, _, length in shapes)
        if longest > lm.config.max_positions:
            raise ValueError(
                f"max_length is {longest}, but the model has "
                f"{lm.config.max_positions} positions; give at most as many"
            )
        self.lm = lm
        self._num_bias_slots = num_biases
        self._num_stop_slots = num_stop_tokens
        shapes = [(resolve(config, None, lm), *rest) for config, *rest in shapes]
        policy = find_policy(policy)
        wanted: dict[tuple, tuple[ProgramKey, Limits]] = {}
        for config, num, row_tokens in shapes:
            if (config, row_tokens) in wanted:
                raise ValueError(
                    f"there are two groups of {config.name!r} with slots of "
                    f"{row_tokens} tokens; give one of them more slots, or another "
                    "max_length"
                )
            limits = Limits(
                num_slots=num,
                row_tokens=row_tokens,
                chunk=prefill_chunk,
                kv_tokens=kv_tokens,
                preemption=preemption,
                max_kept=num if max_kept is None else max_kept,
            )
            spare = headroom(prefill_chunk, config.length + 1, COMMON)
            key = ProgramKey(
                config=config,
                batch_size=num,
                capacity=round_capacity(row_tokens + spare),
                num_slots=1,
                num_stop_slots=num_stop_tokens,
                num_bias_slots=num_biases,
                processor=processor,
                prefill_chunk=prefill_chunk,
            )
            wanted[config, row_tokens] = key, limits
        self._groups = SlotGroups(
            SlotGroup(lm, key, policy, limits, clock, max_shared)
            for key, limits in wanted.values()
        )
        if lm.tokenizer is not None:
            lm.tokenizer.prepare()  # Or nobody is told anything for so long.
        self._turn = 0
        self._num_submitted = 0
        self._is_stepping = False

    def submit(
        self,
        prompt: Any,
        *,
        max_new_tokens: int = 128,
        strategy: Any = None,
        draft_length: int | None = None,
        temperature: float | None = None,
        seed: Any = 0,
        stop: str | Sequence[str] = (),
        stop_tokens: Sequence[int] | None = None,
        chat: bool | None = None,
        system: str | None = None,
        priority: int = 0,
        deadline_s: float = float("inf"),
        arrival_s: float | None = None,
        on_piece: Callable[[Piece], Any] | None = None,
        **sampling: Any,
    ) -> Ticket:
        """Takes a request; it runs in the rounds to come.

        Args:
            prompt: text, token ids, or role/content messages.
            max_new_tokens: at most so many tokens.
            strategy: which group of slots; None is the first.
            draft_length: at most so many draft tokens a step, from 0 to those of the
                strategy; None is all.
            temperature: as for `jaxdec.generate`, like all that follow up to `system`.
            seed: whole number or JAX key.
            stop: stop strings.
            stop_tokens: None takes the model's own.
            chat: whether to apply the chat template to text.
            system: system message.
            priority: larger is more urgent, for the policy "priority".
            deadline_s: on the server's clock, for the policy "deadline".
            arrival_s: when it arrived, on the server's clock; None is now.
            on_piece: called with every `Piece`. It may submit and cancel; if it raises,
                its request is cancelled, and `Ticket.error` says why.
            **sampling: see `jaxdec.sampling_params.make_sampling_params`.

        Raises:
            ValueError: bad input, or a request that could never fit.
        """
        group = self._groups.of(strategy)[0]
        fixed = sorted(set(sampling) & _OF_SERVER)
        if fixed:
            raise ValueError(
                f"option {fixed[0]!r} is compiled into a step, so a single request "
                "cannot have it; leave it out, or decode with jaxdec.generate"
            )
        most = group.key.config.length
        length = most if draft_length is None else draft_length
        is_whole = isinstance(length, numbers.Integral) and not isinstance(length, bool)
        if not is_whole or not 0 <= length <= most:
            raise ValueError(
                f"draft_length must be 0 to {most} for {group.key.config.name!r}, got "
                f"{draft_length!r}; make the server with a longer strategy"
            )
        if on_piece is not None and not callable(on_piece):
            raise ValueError(
                f"on_piece is called with every piece, so it must be a function, got "
                f"{on_piece!r}; leave it out, and read Ticket.pieces"
            )
        call = check(
            self.lm,
            prompt,
            single=True,
            strategy=group.key.config,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            stop=stop,
            stop_tokens=stop_tokens,
            chat=chat,
            system=system,
            num_bias_slots=self._num_bias_slots,
            **sampling,
        )
        self._check_room(call)
        size = len(call.prompts[0]), call.max_new_tokens[0]
        group = self._groups.where(strategy, sum(size))
        check_fits(group.loop.limits, *size)  # Before its arrays are to hold it.
        ticket = Ticket(self.lm, call, on_piece)
        # A callback may submit another one before this one is told of.
        number, self._num_submitted = self._num_submitted, self._num_submitted + 1
        group.loop.submit(
            group.request(call, length),
            job_id=number,
            prompt_length=size[0],
            max_new_tokens=size[1],
            client=ticket,
            prompt=call.prompts[0],
            arrival_s=arrival_s,
            priority=priority,
            deadline_s=deadline_s,
        )
        return ticket

    def cancel(self, ticket: Ticket) -> bool:
        """Ends a request at any time; whether there was anything to end.

        Raises:
            ValueError: it is another server's.
        """
        loop = self._loop_of(ticket)
        return loop is not None and loop.cancel(ticket.id)

    def step(self) -> bool:
        """One round: at most one prefill chunk, then a step of every group.

        Returns:
            Whether there was anything to do.

        Raises:
            RuntimeError: a callback of a request called it.
        """
        if self._is_stepping:
            raise RuntimeError(
                "a callback called the step that called it; submit and cancel there, "
                "and step outside"
            )
        self._is_stepping = True
        try:
            moved = self._prepare()
            ran = [group.loop.advance() for group in self._groups]
        finally:
            self._is_stepping = False
        return moved or any(ran)

    def run(self) -> None:
        """Steps until all requests are done."""
        while self.step():
            pass

    def result(self, ticket: Ticket) -> Generated:
        """Steps until a request is done; what it said.

        Raises:
            ValueError: it is another server's.
        """
        self._loop_of(ticket)
        while not ticket.is_done:
            self.step()
        return ticket.generated

    def stream(self, ticket: Ticket) -> Generator[Piece, None, None]:
        """Yields the pieces of a request, and steps where there are none yet.

        Closing it, once it has begun, cancels the request.

        Raises:
            ValueError: it is another server's.
        """
        self._loop_of(ticket)
        return self._stream(ticket)

    def _stream(self, ticket: Ticket) -> Generator[Piece, None, None]:
        try:
            while True:
                while ticket.pieces:
                    yield ticket.pieces.popleft()
                if ticket.is_done:
                    return
                self.step()
        finally:
            self.cancel(ticket)

    def limit_drafts(
        self,
        rule: Callable[[int], int | None] | None,
        strategy: Any = None,
        *,
        max_length: int | None = None,
    ) -> None:
        """Lets the load decide how long drafts are; no token changes, only the speed.

        Args:
            rule: how many requests of a group run to the most draft tokens of each,
                such as `jaxdec.speculation.scheduled`; None is no limit.
            strategy: whose groups of slots; None is that of the first.
            max_length: of which group, where there are several; None is all of them.

        Raises:
            ValueError: no such group, or no such rule.
        """
        if rule is not None and not callable(rule):
            raise ValueError(
                "a rule of draft lengths is asked in every step, so it must be a "
                f"function, got {rule!r}; for example lambda num_running: 2"
            )
        for group in self._groups.of(strategy, max_length):
            group.loop.draft_limit = rule

    def measure_costs(
        self,
        context: int | None = None,
        *,
        strategy: Any = None,
        max_length: int | None = None,
        repeats: int = serving_costs.REPEATS,
        progress: Callable[[int, int, str], None] = lambda *_: None,
    ) -> CostTable:
        """Times the steps of a group of slots, and what else a round does.

        Args:
            context: tokens that a request has read; None is half of what a slot holds.
            strategy: whose group of slots; None is that of the first.
            max_length: of which group, where there are several; None is the shortest.
            repeats: samples, of which the median counts.
            progress: called with what is done, all, and words.

        Raises:
            RuntimeError: some request is not done.
            ValueError: no such group, or nothing to measure.
        """
        check_whole("repeats", repeats)
        if context is not None:
            check_whole("context", context)
        if any(group.loop.is_busy for group in self._groups):
            raise RuntimeError(
                "costs are measured on a server without requests, and some of this one "
                "are not done; run() it first, or cancel them"
            )
        group = self._groups.of(strategy, max_length)[0]
        return group.measure_costs(self.lm, context, repeats, progress)

    @property
    def num_free_slots(self) -> int:
        """Slots of all groups that nobody runs in."""
        return sum(group.loop.queue.slots.count(None) for group in self._groups)

    def _prepare(self) -> bool:
        """Lets the next group that has something to read, or to move, do so."""
        num = len(self._groups)
        for i in range(num):
            which = (self._turn + i) % num
            if self._groups[which].loop.prepare():
                self._turn = which + 1
                return True
        return False

    def _loop_of(self, ticket: Ticket) -> ServingLoop | None:
        """Where a request is; None if it is done.

        Raises:
            ValueError: it is another server's.
        """
        if ticket.is_done:
            return None
        for group in self._groups:
            if group.loop.serves(ticket.served):
                return group.loop
        raise ValueError(
            f"request {ticket.id} is not one of this server's; ask the server that "
            "gave the ticket"
        )

    def _check_room(self, call: Call) -> None:
        """Raises ValueError for more stop tokens or biases than there is room for."""
        num = len(call.stop_tokens[0])
        if num > self._num_stop_slots:
            raise ValueError(
                f"the request has {num} stop tokens, but the server has room for "
                f"{self._num_stop_slots}; make it with a larger num_stop_tokens"
            )
        if call.key.num_bias_slots > self._num_bias_slots:
            raise ValueError(
                f"the request has more than {self._num_bias_slots} biases and bans; "
                "make the server with a larger num_biases"
            )


_OF_SERVER = frozenset(
    """
    logprobs processed_logprobs processor exact output_format cancelled observe accept
    capacity num_slots num_bias_slots
    """.split()
)
"""Options of `jaxdec.generate` and `check` that no single request can have."""
