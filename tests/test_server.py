"""Serving text on a tiny model with a byte tokenizer: as `generate`, and when."""

import functools
import itertools
from types import SimpleNamespace

import pytest
from helpers_tiny import write_model

import jaxdec
from jaxdec import policies
from jaxdec.types import FinishReason

PROMPTS = ["abcabcabcabc", "the cat and the cat and", "x", "one two three " * 4]
LOOKUP = jaxdec.lookup(3)
NAN, FEW = float("nan"), {"max_new_tokens": 2}


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return jaxdec.load(write_model(tmp_path_factory.mktemp("tiny")), dtype="float32")


@pytest.fixture
def server(lm):
    """Two groups of slots; compiled once, for the model keeps what it compiled."""
    return jaxdec.Server(
        lm, [LOOKUP, "sample"], num_slots=[2, 1], max_length=100, prefill_chunk=16
    )


@pytest.fixture(scope="module")
def plain(lm):
    """What plain decoding says, four requests at a time."""

    @functools.cache
    def generate(stop=(), **options):
        return jaxdec.generate(
            lm,
            PROMPTS,
            strategy="sample",
            max_new_tokens=[9, 24, 17, 20],
            temperature=[0.0, 0.8, 0.8, 0.0],
            seed=[1, 2, 1, 4],
            stop=[list(stop)] * 4,
            **options,
        )

    return generate


def test_the_first_token_waits_for_no_tables(lm):
    """A tokenizer's tables took 270 ms, between the first two steps of a server."""
    tokenizer = lm.tokenizer
    for table in ("_special", "_added", "_is_byte_level"):
        vars(tokenizer).pop(table, None)
    server = jaxdec.Server(lm, LOOKUP, num_slots=2, max_length=100, prefill_chunk=16)
    backend = tokenizer._backend
    try:  # Of the backend only single tokens are asked.
        tokenizer._backend = SimpleNamespace(id_to_token=backend.id_to_token)
        ticket = server.submit([3, 4, 5], max_new_tokens=6, stop_tokens=[])
        server.run()
    finally:
        tokenizer._backend = backend
    assert len(ticket.tokens) == 6 and ticket.text == tokenizer.decode(ticket.tokens)


def submit_all(server, **options):
    """The requests of `plain`, in both groups, some with fewer draft tokens."""
    wanted = [(9, 0.0, 1), (24, 0.8, 2), (17, 0.8, 1), (20, 0.0, 4)]
    where = [("sample", None), (LOOKUP, 1), (LOOKUP, None), (None, 0)]
    return [
        server.submit(
            prompt,
            max_new_tokens=max_new,
            temperature=temperature,
            seed=seed,
            strategy=strategy,
            draft_length=length,
            **options,
        )
        for prompt, (max_new, temperature, seed), (strategy, length) in zip(
            PROMPTS, wanted, where, strict=True
        )
    ]


def test_a_server_says_what_generate_says(server, plain):
    tickets = submit_all(server)
    server.run()
    assert [ticket.generated for ticket in tickets] == list(plain())
    assert server.num_free_slots == 3
    for ticket in tickets:
        record = ticket.record
        times = [record.arrival_s, record.admitted_s, record.bursts[0].time_s]
        assert times == sorted(times) and record.finished_s >= times[-1]
        assert record.num_tokens == len(ticket.tokens)
    assert all(burst.num_drafted == 0 for burst in tickets[3].record.bursts)


def test_stop_strings_end_a_request_and_only_that(server, plain):
    """Also where a step emits more than the string, which then is cut."""
    free = plain()
    stop = tuple(item.text[3:5] for item in free[1:3])
    assert all(len(string) == 2 for string in stop)
    expected = plain(stop=stop)
    assert [item.finish_reason for item in expected].count("stop_string") >= 2
    tickets = submit_all(server, stop=list(stop))
    streamed = "".join(piece.text for piece in server.stream(tickets[1]))
    server.run()
    assert [ticket.generated for ticket in tickets] == list(expected)
    assert streamed == expected[1].text


def test_streams_take_turns_and_may_be_closed(server, plain):
    """A stream that is closed cancels its request; the others go on."""
    tickets = submit_all(server)
    first, second, third = (server.stream(ticket) for ticket in tickets[1:])
    pieces = [next(first)]
    next(second)
    second.close()
    pieces += list(first)
    assert "".join(piece.text for piece in pieces) == plain()[1].text
    assert tuple(t for piece in pieces for t in piece.tokens) == plain()[1].tokens
    assert [p.finish_reason for p in pieces if p.finish_reason] == ["length"]
    assert tickets[2].finish_reason == "cancelled"
    assert tickets[2].tokens == plain()[2].tokens[: len(tickets[2].tokens)]
    assert list(third)[-1].finish_reason == plain()[3].finish_reason
    assert server.result(tickets[0]) == plain()[0]
    assert not server.step() and server.num_free_slots == 3


def test_a_callback_that_submits_and_breaks_ends_its_own_request_only(server):
    others = []

    def again(piece):
        del piece
        others.append(server.submit("abc", max_new_tokens=3, stop_tokens=[]))
        raise RuntimeError("broken")

    first = server.submit("x", max_new_tokens=0, on_piece=again)
    server.run()
    (other,) = others
    assert str(first.error) == "broken" and other.error is None
    assert (other.finish_reason, len(other.tokens)) == ("length", 3)
    assert first.id != other.id


@pytest.mark.parametrize("preemption", ["recompute", "keep"])
def test_rows_of_one_block_and_the_chunks_of_the_engine(lm, preemption):
    """The last chunk of a long prompt reaches past the end of its row."""
    server = jaxdec.Server(
        lm,
        LOOKUP,
        num_slots=1,
        max_length=240,
        policy="shortest_remaining",
        preemption=preemption,
    )
    (group,) = server._groups
    assert group.key.capacity == 256
    system = "the cat sat on the mat and the dog on the rug; " * 3
    options = [(system + "abc " * 18, 24), (system + "x y z " * 12, 20), ("a" * 9, 2)]
    tickets = []
    for prompt, num in options:
        asked = dict(max_new_tokens=num, seed=num, temperature=0.8, stop_tokens=[])
        tickets.append(server.submit(prompt, **asked))
        for _ in range(6):
            server.step()
    server.run()
    ends = [ticket.record.finished_s for ticket in tickets]
    assert ends[2] < min(ends[:2])  # It came last: another had to give way.
    alone = [
        jaxdec.generate(
            lm,
            prompt,
            strategy="sample",
            max_new_tokens=num,
            seed=num,
            temperature=0.8,
            stop_tokens=[],
        )
        for prompt, num in options
    ]
    assert len(lm.tokenizer.encode(options[0][0])) > 192
    assert [ticket.generated for ticket in tickets] == [one[0] for one in alone]


def test_callbacks_hear_every_piece_and_break_only_their_own(server, plain):
    heard = []
    ticket = server.submit(
        PROMPTS[0], max_new_tokens=9, seed=1, temperature=0.0, on_piece=heard.append
    )
    steps = server.submit(
        PROMPTS[2], max_new_tokens=9, on_piece=lambda piece: server.step()
    )
    # One cancels the other in the very round in which both said something.
    told = []
    victim = server.submit(PROMPTS[0], max_new_tokens=30, on_piece=told.append)
    server.submit(
        PROMPTS[0],
        max_new_tokens=9,
        on_piece=lambda piece: server.cancel(victim),
        strategy="sample",
        temperature=0.0,
    )
    nothing = server.submit(PROMPTS[2], max_new_tokens=0, on_piece=heard.append)
    assert nothing.finish_reason == "length" and heard.pop().tokens == ()
    server.run()
    assert "".join(piece.text for piece in heard) == ticket.text == plain()[0].text
    assert isinstance(steps.error, RuntimeError) and "step outside" in str(steps.error)
    assert steps.finish_reason == "cancelled" and ticket.error is None
    assert tuple(t for piece in told for t in piece.tokens) == victim.tokens
    assert [piece.finish_reason for piece in told][-1] == "cancelled"
    assert not server.cancel(steps) and server.num_free_slots == 3


def test_the_load_may_decide_how_long_drafts_are(server, plain):
    """Off, on and between, from step to step: no token changes."""
    limits, running = itertools.cycle([3, 0, 0, 2, 1]), []

    def rule(num_running):
        running.append(num_running)
        return next(limits)

    server.limit_drafts(rule, LOOKUP)
    tickets = submit_all(server)
    server.run()
    assert [ticket.generated for ticket in tickets] == list(plain())
    assert set(running) == {1, 2}
    drafted = [{b.num_drafted for b in t.record.bursts} for t in tickets[1:3]]
    assert drafted[0] == {0, 1} and drafted[1] <= {0, 1, 2, 3}
    # Also after steps without drafts, of which there is one in any five.
    later = [b.num_drafted for b in tickets[1].record.bursts[5:]]
    assert any(later)
    # Off altogether, then again without a limit.
    for rule, is_drafting in ((lambda num_running: 0, False), (None, True)):
        server.limit_drafts(rule)
        ticket = server.submit(PROMPTS[1], max_new_tokens=24, temperature=0.8, seed=2)
        assert server.result(ticket) == plain()[1]
        found = any(burst.num_drafted for burst in ticket.record.bursts)
        assert found == is_drafting


@pytest.mark.parametrize(("limit", "told"), [(-1, "-1 for 1"), (1.5, "1.5 for 1")])
def test_a_rule_that_says_no_length_harms_nobody(server, plain, limit, told):
    ticket = server.submit(PROMPTS[1], max_new_tokens=24, temperature=0.8, seed=2)
    server.limit_drafts(lambda num_running: limit if ticket.tokens else 2)
    with pytest.raises(ValueError, match=f"said {told} running .* at least 0, or None"):
        server.run()
    server.limit_drafts(lambda num_running: 2**40)
    assert server.result(ticket) == plain()[1]


def test_a_ticket_is_of_one_server(lm, server, plain):
    """Others have the same numbers, and no request of theirs is ended for it."""
    other = jaxdec.Server(lm, "sample", num_slots=1, max_length=100, prefill_chunk=16)
    theirs = other.submit(PROMPTS[0], max_new_tokens=9, temperature=0.0, seed=1)
    ours = server.submit(PROMPTS[0], max_new_tokens=9, temperature=0.0, seed=1)
    assert theirs.id == ours.id == 0
    for use in (server.cancel, server.result, server.stream):
        with pytest.raises(ValueError, match="request 0 is not one of this server's"):
            use(theirs)
    other.run()
    assert not server.cancel(theirs) and server.result(theirs) == plain()[0]
    assert server.result(ours) == plain()[0]


def test_groups_of_a_strategy_are_told_apart(lm):
    """Limits are of all lengths, costs of one; a name is its first configuration."""
    made = dict(num_slots=[1, 1, 1], max_length=[100, 40, 40], prefill_chunk=16)
    server = jaxdec.Server(lm, [LOOKUP, LOOKUP, jaxdec.lookup(2)], **made)
    long, short, other = server._groups
    server.limit_drafts(lambda num_running: 0, "lookup")
    for prompt in ("abcabcabc", "abcabcabc" * 9):
        ticket = server.submit(prompt, max_new_tokens=9, temperature=0.0)
        server.run()
        assert {burst.num_drafted for burst in ticket.record.bursts} == {0}
    for length, group in ((100, long), (40, short), (None, short)):
        read, group.device.num_read = group.device.read, 0

        def counted(row, group=group, read=read):
            group.device.num_read += 1
            return read(row)

        group.device.read = counted
        server.measure_costs(32, max_length=length, repeats=1)
        assert group.device.num_read
        group.device.read = read
    with pytest.raises(ValueError, match="slots of 40, 100 tokens, none of 60; give"):
        server.measure_costs(max_length=60)
    server.limit_drafts(None, max_length=40)
    assert (long.loop.draft_limit is None, short.loop.draft_limit) == (False, None)
    # With the second configuration there is always a free slot, and nobody is sent.
    tickets = [
        server.submit("abc", max_new_tokens=4, strategy="lookup") for _ in range(4)
    ]
    assert other.loop.num_open == 0
    server.run()
    assert all(ticket.is_done for ticket in tickets)
    with pytest.raises(ValueError, match="repeats is 0; give at least 1"):
        server.measure_costs(repeats=0)


def test_a_server_measures_its_own_costs(server, plain):
    for strategy, num_slots, lengths in ((LOOKUP, 2, [0]), ("sample", 1, [])):
        costs = server.measure_costs(40, strategy=strategy, repeats=1)
        assert len(costs.step_s) == num_slots
        assert [length for length, _ in costs.limited_s] == lengths
        moves = (costs.begin_s, costs.insert_s, costs.extract_s)
        spent = (*costs.step_s, costs.chunk_s, *moves)
        assert all(cost > 0 for cost in spent)
    # Nothing is left of it.
    tickets = submit_all(server)
    with pytest.raises(RuntimeError, match="costs are measured on a server without"):
        server.measure_costs()
    server.run()
    assert [ticket.generated for ticket in tickets] == list(plain())


@pytest.mark.parametrize(
    ("prompt", "options", "told"),
    [
        ("abc", {"max_new_tokens": 98}, "101 tokens .* a slot holds 100; shorten"),
        # More than its arrays could hold.
        ("abc" * 200, {}, "728 tokens .* a slot holds 100; shorten"),
        ("", {}, "the prompt is empty"),
        ("abc", {"draft_length": 4}, "draft_length must be 0 to 3 for 'lookup', got 4"),
        ("abc", {"strategy": "dspark"}, "no slots for strategy 'dspark'; it has"),
        ("abc", {"exact": True}, "'exact' is compiled into a step"),
        ("abc", {"temprature": 1.0}, "did you mean 'temperature'"),
        ("abc", {"stop_tokens": [1, 2, 3, 4, 5]}, "has 5 stop tokens, but .* for 4"),
        ("abc", {"banned_tokens": list(range(9))}, "more than 8 biases and bans"),
        ("abc", {"deadline_s": NAN} | FEW, "deadline_s is nan, and requests are"),
        ("abc", {"arrival_s": NAN} | FEW, "arrival_s is nan, and requests are"),
    ],
)
def test_bad_requests_are_refused_at_once(server, prompt, options, told):
    neighbour = server.submit("x", max_new_tokens=2)
    with pytest.raises(ValueError, match=told):
        server.submit(prompt, **options)
    server.run()
    assert neighbour.record.finish in (FinishReason.LENGTH, FinishReason.STOP_TOKEN)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_length": 2000}, "2000, but the model has 1024 positions"),
        ({"num_slots": 0}, "num_slots is 0; give at least 1"),
        ({"num_slots": [1, 2]}, "two groups of 'greedy' with slots of 512 tokens"),
        ({"num_slots": [1, 2], "max_length": [9] * 3}, "2 of num_slots, 3 of max_len"),
        ({"num_slots": []}, "0 of num_slots; give one for each group"),
        ({"max_shared": -1}, "max_shared is -1; give at least 0"),
        ({"max_kept": -1}, "max_kept is -1; give at least 0"),
        ({"max_length": 0}, "max_length is 0; give at least 1"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0; give at least 1"),
        ({"kv_tokens": 0}, "kv_tokens is 0; give at least 1"),
        ({"num_stop_tokens": -1}, "num_stop_tokens is -1; give at least 0"),
        ({"num_biases": 0}, "num_biases is 0; give at least 1"),
        ({"num_slots": True}, "num_slots is True; give at least 1, as a whole number"),
        ({"policy": "fair"}, "unknown policy 'fair'"),
        ({"preemption": "drop"}, "one of none, recompute, keep, got 'drop'"),
    ],
)
def test_bad_servers_are_refused(lm, options, told):
    with pytest.raises(ValueError, match=told):
        jaxdec.Server(lm, **options)


@pytest.mark.parametrize("value", ["high", None, float("nan")])
def test_what_cannot_be_ordered_is_refused_before_it_stops_everybody(value):
    with pytest.raises(ValueError, match="priority is .*, and requests are put in ord"):
        policies.check_ranked(priority=value)
    policies.check_ranked(priority=-3, deadline_s=float("inf"))


@pytest.mark.parametrize("value", ["8", None, 1.5, True, 0])
def test_what_counts_nothing_is_refused(value):
    with pytest.raises(ValueError, match="num_slots is .*give at least 1, as a whole"):
        policies.check_whole("num_slots", value)
    policies.check_whole("num_slots", 1)
