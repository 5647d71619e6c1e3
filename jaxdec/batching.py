"""Continuous batching: requests come and go while one compiled step runs on.

A slot is a row. Between two steps a request that has been read may be put into a free
slot, and one that has ended gives its slot back; no other row notices. A request is
read apart, as a batch of one, a chunk at a time, so that the running ones never wait
for longer than a chunk:

    begin     a row that has read nothing, from a request (and what it said before)
    resume    a row that has read as much as another, which stays
    copy      the same row twice
    read      the row after its next chunk
    insert    the slots with the row in one of them: one tree map
    extract   the row of a slot, as it stands: inserted again, it goes on where it was
    step      one round of every slot that is not free, and what each of them emitted

A step may be told to draft less than its requests allow (`jaxdec.speculation`): that is
a value too, and where the strategy has widths, or drafts nothing at all, it costs less.

Different draft lengths, temperatures, seeds, limits and stop tokens are values in the
rows, so all of these are compiled once.

Invariants: those of `jaxdec.decoding`, which say that a row's tokens depend on nothing
but its request; and what lies in a free slot, NaN included, is blanked before it is
used. All functions are pure; `jit_slots` donates only rows and slots that the host
loop owns.

New rows take the memory of rows that are used up, their *spare*. On a CPU, memory that
the process did not have before costs ten times as much as the copy that goes there: a
row of SmolLM2 with 1,024 entries takes 3 ms, and 30 in new memory.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxdec.cache import KVCache
from jaxdec.decoding import window
from jaxdec.sampling_params import make_sampling_params
from jaxdec.types import DecodeState, Request, Strategy, StrategyParams, pytree

NO_LIMIT = 2**31 - 1
"""Of the draft tokens of a step: as many as its requests allow."""
MOST_SPARES = 3
"""Used-up rows that are held: a round begins one row, keeps one, and extracts one."""


@pytree
class Emitted:
    """What a step said in every slot; zeros in free ones."""

    tokens: Int[Array, "B K+1"]
    """Entries at or past `num_tokens` are scratch."""
    num_tokens: Int[Array, "B"]
    finish: Int[Array, "B"]
    """`FinishReason` after the step."""
    num_drafted: Int[Array, "B"]
    num_accepted: Int[Array, "B"]


class Batching(NamedTuple):
    """A strategy over slots. A *row* is a `DecodeState` of one request."""

    empty: Callable[[], DecodeState]
    """All slots, free."""
    blank: Callable[[], DecodeState]
    """A row of nobody, to be a spare."""
    begin: Callable[[Request, Int[Array, "1"], DecodeState], DecodeState]
    """``(request, num_said, spare) -> row``. The buffer `Request.prompt` holds the
    prompt and the `num_said` tokens that an interrupted request said before."""
    resume: Callable[[Request, Int[Array, "1"], DecodeState, DecodeState], DecodeState]
    """``(request, num_said, kept, spare) -> row``: has read what `kept` has, whose
    tokens must be those of the request."""
    copy: Callable[[DecodeState, DecodeState], DecodeState]
    """``(row, spare) -> row``."""
    read: Callable[[StrategyParams, DecodeState], DecodeState]
    insert: Callable[[DecodeState, DecodeState, Int[Array, ""]], DecodeState]
    """``(slots, row, slot) -> slots``."""
    extract: Callable[[DecodeState, Int[Array, ""], DecodeState], DecodeState]
    """``(slots, slot, spare) -> row``."""
    step: Callable[
        [StrategyParams, DecodeState, Bool[Array, "B"], Int[Array, ""]],
        tuple[DecodeState, Emitted],
    ]
    """``(params, slots, is_free, draft_limit) -> (slots, emitted)``; a step judges at
    most `draft_limit` draft tokens of a row."""


def slots(
    strategy: Strategy,
    num_slots: int,
    *,
    num_stop_slots: int = 4,
    num_bias_slots: int = 8,
) -> Batching:
    """A strategy over `num_slots` slots, as pure functions.

    Args:
        strategy: from `jaxdec.decoding.speculative`.
        num_slots: requests that run at once.
        num_stop_slots: room for stop tokens of a request.
        num_bias_slots: room for logit biases of a request.

    Raises:
        ValueError: no slots.
    """
    if num_slots < 1:
        raise ValueError(f"num_slots is {num_slots}; give at least 1")

    def blank(num: int) -> DecodeState:
        return strategy.begin(_nobody(num, num_stop_slots, num_bias_slots))

    def empty() -> DecodeState:
        return blank(num_slots)

    def begin(
        request: Request, num_said: Int[Array, "1"], spare: DecodeState
    ) -> DecodeState:
        row = strategy.begin(request)
        length = request.prompt_length + num_said
        return row.replace(sequences=row.sequences.replace(length=length))

    def resume(
        request: Request,
        num_said: Int[Array, "1"],
        kept: DecodeState,
        spare: DecodeState,
    ) -> DecodeState:
        # What a drafter remembers is of the tokens alone, like the cache.
        known = copy(kept, spare)
        row = begin(request, num_said, spare)
        return row.replace(cache=known.cache, drafter=known.drafter)

    def copy(row: DecodeState, spare: DecodeState) -> DecodeState:
        return jax.tree.map(jnp.copy, row)

    def insert(
        state: DecodeState, row: DecodeState, slot: Int[Array, ""]
    ) -> DecodeState:
        def put(whole, part):
            return jax.lax.dynamic_update_slice_in_dim(whole, part, slot, axis=0)

        return jax.tree.map(put, state, row)

    def extract(
        state: DecodeState, slot: Int[Array, ""], spare: DecodeState
    ) -> DecodeState:
        def take(whole):
            return jax.lax.dynamic_slice_in_dim(whole, slot, 1, axis=0)

        return jax.tree.map(take, state)

    def step(
        params: StrategyParams,
        state: DecodeState,
        is_free: Bool[Array, "B"],
        draft_limit: Int[Array, ""],
    ) -> tuple[DecodeState, Emitted]:
        before = vacate(state, blank(1), is_free)
        most = before.sequences.max_draft_length
        limited = before.sequences.replace(
            max_draft_length=jnp.minimum(most, draft_limit)
        )
        after, info = strategy.step(params, before.replace(sequences=limited))
        # What a request allows is its own; the limit is this step's.
        after = after.replace(sequences=after.sequences.replace(max_draft_length=most))
        emitted = Emitted(
            tokens=window(
                after.sequences.tokens,
                before.sequences.length,
                strategy.max_length + 1,
            ),
            num_tokens=info.num_emitted,
            finish=after.sequences.finish,
            num_drafted=info.num_drafted,
            num_accepted=info.num_accepted,
        )
        return after, emitted

    return Batching(
        empty=empty, blank=lambda: blank(1), begin=begin, resume=resume, copy=copy,
        read=strategy.read, insert=insert, extract=extract, step=step,
    )  # fmt: skip


def vacate(
    state: DecodeState, blank: DecodeState, is_free: Bool[Array, "B"]
) -> DecodeState:
    """Blanks the free slots: finished, with nothing said and nothing to attend.

    Cache entries stay as they are, since past a length nothing is read; that makes it
    cheap enough for every step.

    Args:
        state: the slots.
        blank: the row of a request that asks for nothing.
        is_free: which slots to blank.
    """

    def put(old, new):
        if isinstance(old, KVCache):
            return old.replace(length=jnp.where(is_free, 0, old.length))
        which = is_free.reshape(-1, *(1,) * (old.ndim - 1))
        return jnp.where(which, new, old)

    def is_cache(node):
        return isinstance(node, KVCache)

    return jax.tree.map(put, state, blank, is_leaf=is_cache)


def jit_slots(
    batching: Batching, compiler_options: dict[str, Any] | None = None
) -> Batching:
    """The same functions, compiled when first called.

    `read`, `insert` and `step` give up the row or the slots that they replace, and what
    takes a spare gives up that; nothing else is donated, so a row may be inserted more
    than once.
    """

    def jit(function, *donated):
        return jax.jit(
            function,
            donate_argnums=donated,
            # A spare is not read, and its memory wanted.
            keep_unused=True,
            compiler_options=compiler_options,
        )

    return Batching(
        empty=jit(batching.empty),
        blank=jit(batching.blank),
        begin=jit(batching.begin, 2),
        resume=jit(batching.resume, 3),
        copy=jit(batching.copy, 1),
        read=jit(batching.read, 1),
        insert=jit(batching.insert, 0),
        extract=jit(batching.extract, 2),
        step=jit(batching.step, 1),
    )


class SlotDevice:
    """The slots of one strategy where they run: the only holder of mutable state.

    What `jaxdec.serving_loop` drives. Everything is compiled when it is made.
    """

    def __init__(self, batching: Batching, params: StrategyParams, request: Request):
        """Takes functions from `jit_slots`, and any request of the shapes to come."""
        self._batching = batching
        self._params = params
        self._state = batching.empty()
        self._spares: list[DecodeState] = []
        self.num_slots = int(self._state.sequences.length.shape[0])
        row = self.read(self.begin(request, ()))
        rows = row, self.begin(request, (), kept=row), self.copy(row)
        for row in rows:
            self.insert(row, 0)
        self.insert(self.extract(0), 0)
        self.step(np.ones(self.num_slots, bool))

    def begin(
        self,
        request: Request,
        said: Sequence[int],
        kept: DecodeState | None = None,
    ) -> DecodeState:
        """A row that has read nothing, of a request that said some tokens before.

        With `kept`, another row, it has read as much as that one, whose tokens must be
        those of the request.
        """
        if said:
            tokens = np.array(request.prompt)
            start = int(request.prompt_length[0])
            tokens[0, start : start + len(said)] = said
            request = request.replace(prompt=jnp.asarray(tokens))
        num_said = jnp.asarray([len(said)], jnp.int32)
        if kept is None:
            return self._batching.begin(request, num_said, self._spare())
        return self._batching.resume(request, num_said, kept, self._spare())

    def copy(self, row: DecodeState) -> DecodeState:
        """The same row; using up the one leaves the other."""
        return self._batching.copy(row, self._spare())

    def read(self, row: DecodeState) -> DecodeState:
        """The row after its next chunk; the one that was given is used up."""
        return self._batching.read(self._params, row)

    def insert(self, row: DecodeState, slot: int) -> None:
        """Puts a row into a slot; the one that was given is used up."""
        self._state = self._batching.insert(self._state, row, jnp.int32(slot))
        self.discard(row)

    def discard(self, row: DecodeState) -> None:
        """Takes back a row that nobody reads any more."""
        if len(self._spares) < MOST_SPARES:
            self._spares.append(row)

    def extract(self, slot: int) -> DecodeState:
        """A copy of the row in a slot."""
        return self._batching.extract(self._state, jnp.int32(slot), self._spare())

    def _spare(self) -> DecodeState:
        """A row that nobody needs."""
        return self._spares.pop() if self._spares else self._batching.blank()

    def step(
        self, is_free: Bool[np.ndarray, "B"], draft_limit: int | None = None
    ) -> Emitted:
        """One round of all slots that are not free, on the host.

        Args:
            is_free: which slots nobody runs in.
            draft_limit: most draft tokens of a row in this step; None is no limit but
                that of each request.
        """
        limit = NO_LIMIT if draft_limit is None else min(draft_limit, NO_LIMIT)
        self._state, emitted = self._batching.step(
            self._params, self._state, jnp.asarray(is_free), jnp.int32(limit)
        )
        return jax.device_get(emitted)

    def reset(self) -> None:
        """All slots free, whatever happened to them."""
        # What there was is not to be held beside the new.
        self._state, self._spares = None, []
        self._state = self._batching.empty()

    def wait(self, row: DecodeState | None = None) -> None:
        """Until the slots, and a row beside them, are computed."""
        jax.block_until_ready((self._state, row))


def _nobody(num: int, num_stop_slots: int, num_bias_slots: int) -> Request:
    """Requests that ask for nothing."""

    def zeros(*shape):
        return jnp.zeros((num, *shape), jnp.int32)

    return Request(
        prompt=zeros(1),
        prompt_length=zeros() + 1,
        max_new_tokens=zeros(),
        max_draft_length=zeros(),
        stop_tokens=zeros(num_stop_slots),
        num_stop_tokens=zeros(),
        key=jax.random.split(jax.random.key(0), num),
        sampling=make_sampling_params(num, num_bias_slots=num_bias_slots),
    )
