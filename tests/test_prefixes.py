"""Beginnings that prompts share are read once, and that changes nothing."""

import numpy as np
import pytest
from helpers_tiny import write_model

import jaxdec
from jaxdec.prefixes import Prefixes

CHUNK = 4
SHARED = list(range(20, 31))


def read_through(prefixes, prompt):
    """Reads a prompt chunk by chunk; where it began, and what was kept on the way."""
    found = prefixes.find(prompt)
    num_read = begun = 0 if found is None else found.num_read
    kept = []
    while num_read < len(prompt) - 1:
        num_read += min(CHUNK, len(prompt) - 1 - num_read)
        if prefixes.is_wanted(prompt, num_read):
            prefixes.keep(prompt, num_read, f"{num_read} of {prompt}")
            kept.append(num_read)
    return begun, kept


def test_the_second_to_share_keeps_it_and_the_third_begins_there():
    prefixes = Prefixes(CHUNK, 2)
    prompts = [[*SHARED, i, i, i] for i in range(3)]
    prefixes.see(prompts[0])
    assert read_through(prefixes, prompts[0]) == (0, [])
    prefixes.see(prompts[1])
    # 11 tokens are shared: rows may read 8, whole chunks of at most 10.
    assert read_through(prefixes, prompts[1]) == (0, [8])
    prefixes.see(prompts[2])
    assert read_through(prefixes, prompts[2]) == (8, [])
    # The row knows the token after what it has read.
    assert prefixes.find(SHARED[:9]).row == f"8 of {prompts[1]}"
    assert prefixes.find([*SHARED[:8], 0]) is None
    assert prefixes.find(SHARED[:8]) is None and prefixes.find([]) is None


def test_rows_are_kept_where_prompts_part_and_the_last_used_stay():
    prefixes = Prefixes(CHUNK, 2)
    for prompt in ([*SHARED, 1], [*SHARED, 2], [*SHARED[:6], 3, 3], [*SHARED, 4]):
        prefixes.see(prompt)
        read_through(prefixes, prompt)
    assert [kept.num_read for kept in prefixes._kept] == [8, 4]
    prefixes.use(prefixes._kept[0])
    for last in (1, 2):
        prefixes.see([9, 9, 9, 9, 9, last])
        read_through(prefixes, [9, 9, 9, 9, 9, last])
    assert [kept.tokens.tolist() for kept in prefixes._kept] == [SHARED[:9], [9] * 5]


@pytest.mark.parametrize("second", [[5, *SHARED], SHARED[:4], [0]])
def test_what_is_not_shared_is_not_kept(second):
    """Other prompts; and one of a whole chunk, whose last token is never read."""
    prefixes = Prefixes(CHUNK, 2)
    for prompt in (SHARED, second, SHARED[:3]):
        prefixes.see(prompt)
        assert read_through(prefixes, prompt) == (0, [])


def test_nothing_is_kept_where_there_is_room_for_nothing():
    prefixes = Prefixes(CHUNK, 0)
    for _ in range(3):
        prefixes.see(SHARED)
        assert read_through(prefixes, SHARED) == (0, [])


def test_a_prefix_is_found_again_whatever_was_seen_since():
    """At random: what a prompt begins with is always its own, and whole chunks."""
    rng = np.random.default_rng(0)
    prefixes, begun = Prefixes(CHUNK, 3), []
    for _ in range(300):
        prompt = rng.integers(0, 2, rng.integers(1, 30)).tolist()
        prefixes.see(prompt)
        found = prefixes.find(prompt)
        if found is not None:
            assert prompt[: len(found.tokens)] == found.tokens.tolist()
            prefixes.use(found)
        start, _ = read_through(prefixes, prompt)
        assert start % CHUNK == 0 and start <= len(prompt) - 1
        begun.append(start)
        assert len(prefixes) <= 3
    assert sum(b > 0 for b in begun) > 20


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return jaxdec.load(write_model(tmp_path_factory.mktemp("tiny")), dtype="float32")


SYSTEM = "you are a cat, and say so and say so and say so. "
PROMPTS = [SYSTEM + end for end in ("who? ", "why, and why? ", "say so", "", "so")]


class Counted:
    """A device that counts chunks."""

    def __init__(self, device):
        self.device, self.num_chunks = device, 0

    def __getattr__(self, name):
        return getattr(self.device, name)

    def read(self, row):
        self.num_chunks += 1
        return self.device.read(row)


def serve(lm, strategy, order, **options):
    server = jaxdec.Server(
        lm, strategy, num_slots=2, max_length=100, prefill_chunk=16, **options
    )
    (group,) = server._groups
    group.loop.device = counted = Counted(group.device)
    tickets = {
        i: server.submit(PROMPTS[i], max_new_tokens=20, temperature=0.7, seed=i)
        for i in order
    }
    server.run()
    judged = [
        [(burst.num_drafted, burst.num_accepted) for burst in tickets[i].record.bursts]
        for i in sorted(tickets)
    ]
    found = [tickets[i].generated for i in sorted(tickets)]
    return found, judged, counted.num_chunks


@pytest.mark.parametrize("strategy", ["sample", "lookup", "self_draft"])
def test_shared_beginnings_are_read_once_and_nothing_else_changes(lm, strategy):
    """The drafter's memory too: self_draft has a cache of its own.

    What it forgot would change no token, so its drafts are looked at: all are those
    that it would have made alone.
    """
    strategy = jaxdec.self_draft(1, length=2) if strategy == "self_draft" else strategy
    alone, judged, without = serve(lm, strategy, range(5), max_shared=0)
    chunks = [-(-(len(prompt) - 1) // 16) for prompt in PROMPTS]
    assert without == sum(chunks)
    for order in (range(5), reversed(range(5))):
        shared, drafts, num = serve(lm, strategy, order)
        assert shared == alone and drafts == judged
        # Four of five begin behind the 48 tokens that one has read.
        assert num == without - 4 * 3
    if strategy not in ("sample", "lookup"):
        assert any(accepted for one in judged for _, accepted in one)
    tokens = [found.tokens for found in alone]
    plain = jaxdec.generate(
        lm, PROMPTS, strategy="sample", max_new_tokens=20, temperature=0.7,
        seed=list(range(5)),
    )  # fmt: skip
    assert tokens == [found.tokens for found in plain]


def test_who_gives_way_begins_again_where_a_row_was_kept_meanwhile(lm):
    """Its new row is the shared one, though there was none when it came."""
    found = []
    for max_shared in (0, 2):
        server = jaxdec.Server(
            lm, "sample", num_slots=1, max_length=100, prefill_chunk=16,
            policy="priority", preemption="recompute", max_shared=max_shared,
        )  # fmt: skip
        first = server.submit(PROMPTS[0], max_new_tokens=12, temperature=0.7, seed=0)
        for _ in range(6):
            server.step()
        others = [
            server.submit(PROMPTS[i], max_new_tokens=4, priority=1) for i in (1, 2)
        ]
        server.run()
        assert first.record.interruptions_s
        (group,) = server._groups
        assert len(group.loop.prefixes) == bool(max_shared)
        found.append([ticket.generated for ticket in (first, *others)])
    assert found[0] == found[1]


def test_nobody_waits_for_a_short_slot_while_a_long_one_is_free(lm):
    """A crowd of short requests uses all slots, by how many each group has."""
    server = jaxdec.Server(
        lm, "sample", num_slots=[3, 1], max_length=[100, 40], prefill_chunk=16
    )
    long, short = server._groups
    for _ in range(20):
        server.submit("abc", max_new_tokens=2)
    assert (long.loop.num_open, short.loop.num_open) == (15, 5)
    server.run()


def test_short_requests_go_to_short_slots(lm):
    server = jaxdec.Server(
        lm, "sample", num_slots=[1, 1], max_length=[100, 40], prefill_chunk=16
    )
    long, short = server._groups
    assert short.device._state.cache.keys[0].shape[2] <= 256
    made = dict(max_new_tokens=8, temperature=0.0)
    tickets = [server.submit(text, **made) for text in ("abc", "abd", "abe", "x" * 60)]
    # One fits each; the third waits for the short one; the last fits the long alone.
    assert (short.loop.num_open, long.loop.num_open) == (2, 2)
    with pytest.raises(ValueError, match="101 tokens .* but a slot holds 100"):
        server.submit("x" * 93, max_new_tokens=8)
    server.run()
    plain = [
        jaxdec.generate(lm, text, **made)[0].tokens
        for text in ("abc", "abd", "abe", "x" * 60)
    ]
    assert [ticket.tokens for ticket in tickets] == plain
    assert server.num_free_slots == 2
