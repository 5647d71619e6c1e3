"""Continuous batching on TINY: whoever comes, goes or sits beside, tokens are the same.

The reference is plain decoding of each request alone, a batch of one.
"""

import functools
import gc
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxdec import batching, policies
from jaxdec.batching import SlotDevice
from jaxdec.cache import KVCache
from jaxdec.policies import Limits
from jaxdec.scheduling import Queue
from jaxdec.serving_loop import ServingLoop
from jaxdec.types import FinishReason

BUFFER = 96
CANCELLED = FinishReason.CANCELLED


@functools.cache
def functions(name, num_slots):
    built = toy.method(name)
    return batching.jit_slots(batching.slots(built.strategy, num_slots), toy.FAST)


def request(rng):
    """A request of any kind, and what the host must know of it."""
    prompt = rng.integers(0, toy.VOCAB, rng.integers(1, 34)).tolist()
    max_new = int(rng.integers(1, 48))
    made = toy.make_request(
        [prompt],
        max_new=max_new,
        stop=rng.integers(0, toy.VOCAB, rng.integers(0, 3)).tolist(),
        seeds=[int(rng.integers(2**31))],
        max_draft=int(rng.integers(0, toy.K + 1)),
        buffer=BUFFER,
        temperature=float(rng.choice([0.0, 0.7, 1.0])),
        top_p=float(rng.choice([1.0, 0.9])),
        repetition_penalty=float(rng.choice([1.0, 1.0, 1.2])),
        frequency_penalty=float(rng.choice([0.0, 2.0])),
    )
    return made, len(prompt), max_new


@functools.cache
def requests(num, seed):
    rng = np.random.default_rng(seed)
    return [request(rng) for _ in range(num)]


@functools.cache
def alone(num, seed):
    """What plain decoding says to each request, and why it ends."""
    built = toy.method("plain")
    found = []
    for made, _, _ in requests(num, seed):
        state, _, _ = toy.run(built, made)
        found.append((toy.tokens_of(state)[0], toy.reasons(state)[0]))
    return found


class Caller:
    """Keeps what it is told, and may have something to do when notified."""

    def __init__(self, on_notify=None):
        self.on_notify = on_notify
        self.num_notified = 0

    def bind(self, served):
        self.served = served

    def take(self, tokens, finish):
        return len(tokens), finish

    def notify(self):
        self.num_notified += 1
        if self.on_notify is not None:
            self.on_notify(self)

    @property
    def tokens(self):
        return self.served.tokens

    @property
    def finish(self):
        return self.served.record.finish


@functools.partial(jax.jit, donate_argnums=0)
def spoil(state, is_free):
    """Fills free slots: NaN, lengths that are full, and tokens that end everything."""

    def fill(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        bad = jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 200
        which = is_free.reshape(-1, *(1,) * (x.ndim - 1))
        return jnp.where(which, jnp.asarray(bad, x.dtype), x)

    return jax.tree.map(fill, state)


class Bench:
    """A loop on the slots of a method, its free slots spoiled before every round."""

    def __init__(
        self,
        name,
        num_slots,
        policy="first_come",
        mode="none",
        kv_tokens=None,
        max_shared=0,
    ):
        self.built = toy.method(name)
        example = toy.make_request([[1]], buffer=BUFFER)
        self.device = SlotDevice(functions(name, num_slots), self.built.params, example)
        limits = Limits(
            num_slots=num_slots,
            row_tokens=toy.CAPACITY - self.built.strategy.headroom,
            chunk=toy.CHUNK,
            kv_tokens=kv_tokens,
            preemption=mode,
            max_kept=2,
        )
        ticks = map(float, itertools.count())
        self.loop = ServingLoop(
            self.device,
            policies.POLICIES[policy],
            limits,
            clock=ticks.__next__,
            max_shared=max_shared,
        )
        self.ids = itertools.count()

    def submit(self, made, prompt_length, max_new, on_notify=None, **kwargs):
        caller = Caller(on_notify)
        self.loop.submit(
            made,
            job_id=next(self.ids),
            prompt_length=prompt_length,
            max_new_tokens=max_new,
            client=caller,
            **kwargs,
        )
        return caller

    def cancel(self, caller):
        return self.loop.cancel(caller.served.record.id)

    def round(self):
        is_free = jnp.asarray([job is None for job in self.loop.queue.slots])
        self.device._state = spoil(self.device._state, is_free)
        return self.loop.round()

    def run(self):
        while self.round():
            pass

    def assert_empty(self):
        """Slots, rows and places in the queue came back."""
        assert not self.loop.is_busy
        assert self.loop.queue == Queue(slots=(None,) * self.loop.limits.num_slots)


def serve(bench, num, seed, cancel_rate):
    """Random arrivals and cancels at any time; the callers, in order of request."""
    rng = np.random.default_rng(seed + 1)
    order = rng.permutation(num).tolist()
    callers = {}
    while order or bench.loop.is_busy:
        for _ in range(rng.poisson(0.5)):
            if order:
                index = order.pop()
                callers[index] = bench.submit(
                    *requests(num, seed)[index],
                    priority=int(rng.integers(9)),
                )
        if callers and rng.random() < cancel_rate:
            bench.cancel(callers[int(rng.choice(list(callers)))])
        bench.round()
    bench.assert_empty()
    return [callers[index] for index in range(num)]


def assert_as_alone(callers, num, seed):
    """Every finished request says what it says alone; a cancelled one, a part of it."""
    for caller, (tokens, reason) in zip(callers, alone(num, seed), strict=True):
        if caller.finish == CANCELLED:
            assert caller.tokens == tokens[: len(caller.tokens)]
        else:
            assert (caller.tokens, caller.finish) == (tokens, reason)
        assert caller.served.record.num_tokens == len(caller.tokens)


MIXES = [
    ("first_come", "none"),
    ("priority", "keep"),
    ("priority", "recompute"),
    ("shortest_remaining", "recompute"),
]


@pytest.mark.parametrize(("policy", "mode"), MIXES)
def test_requests_say_what_they_say_alone(policy, mode):
    num, seed = 40, 5
    callers = serve(Bench("corrupted", 3, policy, mode), num, seed, cancel_rate=0.15)
    assert_as_alone(callers, num, seed)
    records = [caller.served.record for caller in callers]
    cancelled = [caller.finish == CANCELLED for caller in callers]
    assert 0 < sum(cancelled) < num / 2
    assert any(r.interruptions_s for r in records) == (mode != "none")
    bursts = [burst for r in records for burst in r.bursts]
    assert max(b.num_accepted for b in bursts) > toy.K // 2
    assert min(b.num_drafted for b in bursts) == 0


@pytest.mark.parametrize(
    ("name", "num_slots"),
    [
        ("corrupted", 1),
        ("corrupted", 3),
        ("corrupted", 8),
        ("lookup", 8),
        ("tree", 3),
        ("first_of", 1),
    ],
)
def test_five_hundred_requests(name, num_slots):
    bench = Bench(name, num_slots, *MIXES[num_slots % 4])
    callers = serve(bench, 500, 6, cancel_rate=0.05)
    assert_as_alone(callers, 500, 6)
    assert sum(caller.finish != CANCELLED for caller in callers) > 300


def test_a_row_may_leave_and_come_back_to_any_slot():
    """Extract and insert are inverse, and a read that is done changes nothing.

    What it leaves behind in its old slot does not go on.
    """
    built = toy.method("corrupted")
    slots = functions("corrupted", 3)
    made, prompt_length, _ = requests(40, 5)[3]
    expected = alone(40, 5)[3][0]
    row = slots.begin(made, jnp.zeros(1, jnp.int32), slots.blank())
    for _ in range(-(-prompt_length // toy.CHUNK)):
        row = slots.read(built.params, row)
    state, said, slot = slots.insert(slots.empty(), row, jnp.int32(0)), [], 0
    while len(said) < len(expected):
        is_free = jnp.arange(3) != slot
        state, emitted = slots.step(built.params, state, is_free, jnp.int32(9))
        assert np.asarray(emitted.num_tokens)[np.asarray(is_free)].tolist() == [0, 0]
        num = int(emitted.num_tokens[slot])
        said += np.asarray(emitted.tokens)[slot, :num].tolist()
        row = slots.extract(state, jnp.int32(slot), slots.blank())
        slot = (slot + 1) % 3
        row = slots.read(built.params, row)
        state = slots.insert(state, row, jnp.int32(slot))
    assert said == expected


def test_new_rows_take_the_memory_of_used_ones():
    """Memory that a process never had is slow: begun, kept, extracted in a spare's."""
    bench = Bench("corrupted", 3)
    device, made = bench.device, requests(40, 5)[3][0]

    def where(row):
        arrays = jax.tree.leaves((row.cache.keys, row.cache.values))
        return {x.unsafe_buffer_pointer() for x in arrays}

    device._batching = device._batching._replace(blank=None)  # None is made anew.
    for _ in range(5):
        rows = [device.begin(made, ())]
        rows.append(device.copy(rows[0]))
        rows.append(device.begin(made, (), kept=rows[1]))
        used = set().union(*map(where, rows))
        assert len(used) == sum(len(where(row)) for row in rows)
        for row in rows:
            device.insert(row, 0)
        row = device.extract(0)
        assert where(row) <= used
        device.insert(row, 1)
    # A copy is one: what becomes of the row does not reach it.
    row = device.begin(made, ())
    copy = device.copy(row)
    before = jax.tree.map(np.array, copy.cache.keys)
    device.read(row)
    jax.tree.map(np.testing.assert_array_equal, copy.cache.keys, before)


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_who_gave_way_remembers_what_it_said(mode):
    """Penalties count what was said before, and the limit stays where it was."""
    bench = Bench("corrupted", 3, "priority", mode)
    penalties = {"frequency_penalty": 2.0, "min_new_tokens": 16, "max_draft": 1}
    made = toy.make_request([[5, 17]], max_new=24, stop=[4], buffer=BUFFER, **penalties)
    caller = bench.submit(made, 2, 24)
    for _ in range(3):
        bench.round()
    said = len(caller.tokens)
    others = [bench.submit(*prompt_of(3, 20, s), priority=1) for s in range(3)]
    bench.run()
    record = caller.served.record
    assert 3 <= said < 16 and len(record.interrupted_gaps_s) == 1
    state, _, _ = toy.run(toy.method("plain"), made)
    assert (caller.tokens, caller.finish) == (
        toy.tokens_of(state)[0],
        toy.reasons(state)[0],
    )
    assert others[0].served.record.finished_s < record.finished_s


def find(bench, caller):
    """Where a request is."""
    number = caller.served.record.id
    queue = bench.loop.queue
    if number in [job.id for job in queue.waiting]:
        return "waiting"
    if queue.reading is not None and queue.reading.id == number:
        return "reading"
    if number in [job.id for job in queue.running]:
        return "running"
    return "gone"


def prompt_of(length, max_new, seed):
    tokens = np.random.default_rng(seed).integers(0, toy.VOCAB, length).tolist()
    made = toy.make_request(
        [tokens], max_new=max_new, seeds=[seed], max_draft=2, buffer=BUFFER
    )
    return made, length, max_new


def test_cancelled_at_every_point():
    """Queued, in prefill, between steps, after the end, twice; neighbours go on."""
    bench = Bench("corrupted", 3)
    neighbours = [bench.submit(*prompt_of(3, 24, seed)) for seed in (0, 1)]
    for _ in range(2):
        bench.round()
    reading = bench.submit(*prompt_of(40, 20, 2))
    queued = bench.submit(*prompt_of(5, 20, 3))
    bench.round()
    assert find(bench, reading) == "reading" and find(bench, queued) == "waiting"
    assert bench.cancel(queued) and bench.cancel(reading)
    assert not bench.cancel(queued) and not bench.cancel(reading)
    running = bench.submit(*prompt_of(5, 20, 4))
    bench.round()
    assert find(bench, running) == "running"
    assert bench.cancel(running) and not bench.cancel(running)
    assert bench.loop.queue.slots.count(None) == 1
    # A late joiner gets all its tokens, in a slot that somebody left.
    late = bench.submit(*prompt_of(30, 24, 5))
    bench.run()
    assert not bench.cancel(neighbours[0])
    bench.assert_empty()
    gone = (queued, reading, running)
    assert [caller.finish for caller in gone] == [CANCELLED] * 3
    assert [len(caller.tokens) for caller in gone[:2]] == [0, 0]
    assert len(running.tokens) > 0
    for caller, args in (
        *zip(neighbours, [(3, 24, 0), (3, 24, 1)], strict=True),
        (late, (30, 24, 5)),
    ):
        expected = toy.plain(prompt_of(*args)[0])[0]
        assert (caller.tokens, caller.finish) == (expected, FinishReason.LENGTH)


def breaks(caller):
    raise RuntimeError("the caller's own fault")


def test_an_exception_in_a_callback_is_its_requests_own():
    bench = Bench("corrupted", 3)
    args = [(3, 12, seed) for seed in range(3)]
    broken = bench.submit(*prompt_of(*args[0]), on_notify=breaks)

    # One that cancels its neighbour and itself, from within a delivery.
    def cancels(caller):
        if caller.num_notified == 2:
            bench.cancel(victim)
            bench.cancel(caller)

    canceller = bench.submit(*prompt_of(*args[1]), on_notify=cancels)
    victim = bench.submit(*prompt_of(*args[1]))
    submitted = []

    def submits(caller):
        if not submitted:
            submitted.append(bench.submit(*prompt_of(*args[2])))

    first = bench.submit(*prompt_of(*args[2]), on_notify=submits)
    bench.run()
    bench.assert_empty()
    assert str(broken.served.error) == "the caller's own fault"
    assert (broken.finish, broken.num_notified) == (CANCELLED, 1)
    assert [victim.finish, canceller.finish] == [CANCELLED] * 2
    assert 0 < len(canceller.tokens) < 12
    expected = toy.plain(prompt_of(*args[2])[0])[0]
    assert first.tokens == submitted[0].tokens == expected


def test_an_interrupt_takes_nothing_from_anybody():
    """Control-C in one request's callback: the others go on where they were."""
    bench = Bench("corrupted", 3)

    def interrupts(caller):
        if caller.num_notified == 2:
            raise KeyboardInterrupt

    cases = [(3, 12, seed) for seed in range(3)]
    callers = [bench.submit(*prompt_of(*cases[0]), on_notify=interrupts)]
    callers += [bench.submit(*prompt_of(*case)) for case in cases[1:]]
    with pytest.raises(KeyboardInterrupt):
        bench.run()
    bench.run()
    bench.assert_empty()
    for caller, case in zip(callers, cases, strict=True):
        assert caller.tokens == toy.plain(prompt_of(*case)[0])[0]


def test_an_interrupt_keeps_nobody_from_hearing():
    """Neither of the last words of others, who end in the very same round."""
    bench = Bench("corrupted", 3)

    def interrupts(caller):
        if caller.finish != FinishReason.NONE:
            raise KeyboardInterrupt

    first, *others = [
        # They begin in one round after the other, and say a token in each.
        bench.submit(
            toy.make_request([[5]], max_new=max_new, max_draft=0, buffer=BUFFER),
            1,
            max_new,
            on_notify=on_notify,
        )
        for max_new, on_notify in ((12, interrupts), (11, None), (30, None))
    ]
    with pytest.raises(KeyboardInterrupt):
        bench.run()
    assert others[0].finish == first.finish == FinishReason.LENGTH
    assert not others[1].finish
    bench.run()
    for caller in others:
        assert caller.num_notified == len(caller.served.record.bursts)


class Failing:
    """A device on which one piece of work fails, once, when it is all but done."""

    def __init__(self, device, work, after):
        self.device, self.work, self.left = device, work, after

    def __getattr__(self, name):
        found = getattr(self.device, name)
        if name != self.work:
            return found

        def fails(*args):
            result = found(*args)
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return result

        return fails


@pytest.mark.parametrize("work", ["begin", "read", "insert", "step", "extract"])
def test_a_round_that_fails_on_the_device_ends_its_requests_and_no_others(work):
    """What was said is true, nothing is held, and the loop goes on as if it were new.

    Nobody goes on with a token missing, or is waited for without an end.
    """
    bench = Bench("corrupted", 3, "priority", "keep", max_shared=2)
    bench.loop.device = Failing(bench.device, work, 2)
    cases = [(3, 24, 0), (30, 24, 1), (5, 24, 2), (40, 8, 3), (9, 8, 4), (9, 8, 5)]
    made = [prompt_of(*case) for case in cases]
    callers = [
        bench.submit(*one, priority=i, prompt=list(range(one[1])))
        for i, one in enumerate(made[:3])
    ]
    with pytest.raises(KeyboardInterrupt):
        for _ in range(6):
            bench.round()
        callers += [bench.submit(*one, priority=9) for one in made[3:]]
        bench.run()
    bench.assert_empty()
    assert len(bench.loop.prefixes) == 0
    expected = [toy.plain(one[0])[0] for one in made]
    ended = [caller for caller in callers if caller.finish == CANCELLED]
    assert ended
    for caller, tokens in zip(callers, expected, strict=False):
        assert caller.tokens == tokens[: len(caller.tokens)]
        assert caller.num_notified
        is_cancelled = caller.finish == CANCELLED
        assert isinstance(caller.served.error, KeyboardInterrupt) == is_cancelled
        assert is_cancelled or caller.tokens == tokens
    again = [bench.submit(*one) for one in made]
    bench.run()
    assert [caller.tokens for caller in again] == expected


def test_who_is_done_holds_no_arrays():
    """Callers may keep thousands of records; only what they said is in them."""
    bench = Bench("corrupted", 3, max_shared=1)
    cases = [prompt_of(9, 3, seed % 3) for seed in range(12)]

    def serve(count):
        return [
            bench.submit(*cases[i], prompt=list(range(9)), on_notify=None)
            for i in range(count)
        ]

    first = serve(12)
    bench.run()
    gc.collect()
    before = len(jax.live_arrays())
    callers = serve(12)
    bench.cancel(callers[-1])
    bench.run()
    gc.collect()
    assert len(jax.live_arrays()) == before
    done = [caller.served for caller in (*first, *callers)]
    assert [s.request for s in done] == [s.row for s in done] == [None] * 24


@pytest.mark.parametrize(
    ("name", "policy", "mode", "kv_tokens"),
    [
        ("corrupted", "priority", "recompute", 130),
        ("draft_rejection", "shortest_remaining", "recompute", None),
        ("draft_rejection", "deadline", "keep", 130),
    ],
)
def test_shared_beginnings_under_preemption_and_cancels(name, policy, mode, kv_tokens):
    """Whatever is kept, evicted and begun again: tokens, and accepted drafts, as alone.

    With one row to keep and three beginnings, so rows come and go while jobs wait for
    them; prompts part in chunks, at their ends, and nowhere. Rejection draws on what
    the drafter remembers, so that must be right too.
    """
    rng = np.random.default_rng(len(policy))
    bases = rng.integers(0, toy.VOCAB, (3, 40))
    built = toy.method(name if "rejection" in name else "plain")
    bench = Bench(name, 3, policy, mode, kv_tokens, max_shared=1)
    loop, begun = bench.loop, []
    begin, blank, made_anew = bench.device.begin, bench.device._batching.blank, []

    def counted_blank():
        made_anew.append(len(callers))
        return blank()

    bench.device._batching = bench.device._batching._replace(blank=counted_blank)

    def counted(request, said, kept=None):
        begun.append(kept is not None)
        return begin(request, said, kept)

    bench.device.begin = counted
    callers = []
    while len(callers) < 50 or loop.is_busy:
        for _ in range(rng.poisson(0.5) if len(callers) < 50 else 0):
            cut = int(rng.choice([1, 8, 9, 17, 24, 25, 33]))
            end = rng.integers(0, toy.VOCAB, rng.choice([0, 0, 1]))
            prompt = [*bases[rng.integers(3)][:cut].tolist(), *end.tolist()]
            max_new = int(rng.integers(1, 24))
            made = toy.make_request(
                [prompt],
                max_new=max_new,
                seeds=[int(rng.integers(99))],
                buffer=BUFFER,
                temperature=float(rng.choice([0.0, 1.0])),
            )
            caller = bench.submit(
                made,
                len(prompt),
                max_new,
                prompt=prompt,
                priority=int(rng.integers(5)),
                deadline_s=float(rng.integers(-50, 300)),
            )
            state, _, _ = toy.run(built, made)
            callers.append((caller, toy.tokens_of(state)[0]))
        if callers and rng.random() < 0.06:
            bench.cancel(callers[int(rng.integers(len(callers)))][0])
        bench.round()
        assert len(loop.prefixes) <= 1
    bench.assert_empty()
    assert 5 < sum(begun) < len(begun)
    assert any(caller.served.record.interruptions_s for caller, _ in callers)
    # At once there are one that is read, two or fewer that wait and one that is kept;
    # whatever is given up, however, its memory is used again.
    assert len(made_anew) <= 4
    for caller, tokens in callers:
        is_done = caller.finish != CANCELLED
        assert caller.tokens == (tokens if is_done else tokens[: len(caller.tokens)])


def test_what_cannot_run_is_refused_and_what_asks_for_nothing_is_done():
    bench = Bench("corrupted", 3)
    neighbour = bench.submit(*prompt_of(3, 12, 0))
    bench.round()
    with pytest.raises(ValueError, match=r"a slot holds \d+; shorten the prompt"):
        bench.submit(*prompt_of(90, 200, 1))
    nothing = bench.submit(*prompt_of(3, 0, 0))
    assert (nothing.finish, nothing.tokens) == (FinishReason.LENGTH, [])
    bench.run()
    bench.assert_empty()
    assert neighbour.tokens == toy.plain(prompt_of(3, 12, 0)[0])[0]


@pytest.mark.parametrize("name", ["lookup", "corrupted"])
def test_two_thousand_requests_come_and_go(name):
    """Cancels at every point, callbacks that raise, requests that cannot fit."""
    rng = np.random.default_rng(9)
    cases = [(int(rng.integers(1, 40)), int(rng.integers(1, 9)), s) for s in range(40)]
    expected = [toy.plain(prompt_of(*case)[0])[0] for case in cases]
    bench = Bench(name, 3, "priority", "keep")
    callers, points = [], set()
    while len(callers) < 2000 or bench.loop.is_busy:
        for _ in range(rng.poisson(0.6) if len(callers) < 2000 else 0):
            which = int(rng.integers(len(cases)))
            raises = rng.random() < 0.05
            caller = bench.submit(
                *prompt_of(*cases[which]),
                on_notify=breaks if raises else None,
                priority=int(rng.integers(3)),
            )
            callers.append((caller, expected[which], raises))
        if rng.random() < 0.02:
            with pytest.raises(ValueError, match="cannot|holds"):
                bench.submit(*prompt_of(90, 200, 1))
        if callers and rng.random() < 0.3:
            caller = callers[-int(rng.integers(1, 12)) % len(callers)][0]
            where = find(bench, caller)
            points.add(where)
            assert bench.cancel(caller) == (where != "gone")
            assert not bench.cancel(caller)
        bench.round()
    bench.assert_empty()
    assert points == {"waiting", "reading", "running", "gone"}
    for caller, tokens, raises in callers:
        if caller.finish == CANCELLED:
            assert caller.tokens == tokens[: len(caller.tokens)]
        else:
            assert caller.tokens == tokens
            # A callback that raises is not called again; the last piece is too late.
            assert not raises or caller.num_notified == 1
    assert sum(caller.finish != CANCELLED for caller, _, _ in callers) > 1000


def test_slots_are_compiled_once():
    """Other values, slots and neighbours compile nothing."""
    slots = functions("corrupted", 3)
    serve(Bench("corrupted", 3), 40, 5, cancel_rate=0.1)
    assert {f._cache_size() for f in slots} == {1}


def test_a_free_slot_is_finished_and_attends_nothing():
    """Whatever lay there, it costs as little as a slot that was never used."""
    slots = functions("corrupted", 3)
    is_free = jnp.ones(3, bool)
    state = spoil(slots.empty(), is_free)
    assert np.asarray(state.cache.length).tolist() == [200] * 3
    params = toy.method("corrupted").params
    state, emitted = slots.step(params, state, is_free, jnp.int32(9))
    assert not np.any(np.asarray(emitted.num_tokens))
    assert toy.reasons(state) == [FinishReason.LENGTH] * 3
    caches = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, KVCache))
    lengths = [np.asarray(c.length) for c in caches if isinstance(c, KVCache)]
    np.testing.assert_array_equal(lengths, np.zeros((2, 3)))
