"""Many requests on the real model: what holds, and what it costs, within one run.

    python tests/benchmarks/serving.py [alone] [gaps] [throughput] [--transformers]

alone: 50 requests in random order of arrival, with cancels, mixed draft lengths,
    temperatures and seeds, on servers of 1, 3 and 8 slots: every finished one says
    what it says alone on the same server, token for token; all slots are free then.
gaps: a stream of long prompts beside running requests: P99 and longest token gap, and
    the bound. A machine is not equally fast at all times, so requests and measurements
    of chunk and step times take turns; the bound is of the medians of these.
throughput: greedy decoding (bf16, all included, medians of 5, in turns) of 8 prompts x
    128 tokens, and of 24 prompts whose answers end where they end: one slot, 8 slots,
    and with ``--transformers`` (needs torch and transformers) their ``generate`` on the
    same weights, in batches of 8.

Everything is warm and compilation is apart.
"""

import argparse
import dataclasses
import statistics
import time

import jax
import numpy as np

import jaxdec
from jaxdec import call, measure
from jaxdec.latency import summarise
from jaxdec.prompts import builtin
from jaxdec.scheduling import CostTable, token_gap_bound

REPEATS = 5
NEW_TOKENS = 128
LENGTH = 4


def requests(num, rng):
    """What 50 callers ask for."""
    prompts = builtin()
    return [
        dict(
            prompt=prompts[int(rng.integers(len(prompts)))].text,
            max_new_tokens=int(rng.integers(4, 49)),
            draft_length=int(rng.integers(0, LENGTH + 1)),
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            seed=int(rng.integers(2**31)),
        )
        for _ in range(num)
    ]


def alone(lm, num=50):
    """Requests among others, and each by itself."""
    for slots in (1, 3, 8):
        rng = np.random.default_rng(slots)
        asked = requests(num, rng)
        server = jaxdec.Server(lm, jaxdec.lookup(LENGTH), num_slots=slots)
        wait = rng.permutation(num)
        begins = rng.integers(0, 4, num)  # Rounds between two arrivals.
        ends = {int(i): int(rng.integers(30)) for i in range(num) if rng.random() < 0.2}
        tickets = {}
        for index, rounds in zip(wait, begins, strict=True):
            tickets[index] = server.submit(**asked[index])
            for _ in range(rounds):
                server.step()
            for other, ticket in tickets.items():
                if len(ticket.tokens) >= ends.get(other, 10**9):
                    server.cancel(ticket)
        while server.step():
            for other, ticket in tickets.items():
                if len(ticket.tokens) >= ends.get(other, 10**9):
                    server.cancel(ticket)
        assert server.num_free_slots == slots
        cancelled = equal = drafted = accepted = 0
        for index, ticket in tickets.items():
            by_itself = server.result(server.submit(**asked[index])).tokens
            said = ticket.tokens
            drafted += sum(b.num_drafted for b in ticket.record.bursts)
            accepted += sum(b.num_accepted for b in ticket.record.bursts)
            if ticket.finish_reason == "cancelled":
                cancelled += 1
                assert by_itself[: len(said)] == said, (slots, index)
            else:
                equal += by_itself == said
        print(
            f"alone: {slots} slots, {num} requests: {equal} of {num - cancelled} that "
            f"finished say what they say alone, {cancelled} cancelled a part of it; "
            f"{accepted} of {drafted} draft tokens accepted; all slots free"
        )
        assert equal == num - cancelled


def gaps(lm, turns=4, num=8):
    """Long prompts while others run."""
    for name, strategy in (("greedy", "greedy"), ("lookup", jaxdec.lookup(LENGTH))):
        server = jaxdec.Server(lm, strategy, num_slots=4, max_length=1024)
        rng = np.random.default_rng(0)
        tickets, tables = [], [server.measure_costs(context=768)]
        for _ in range(turns):
            for _ in range(num):
                ids = rng.integers(100, lm.config.vocab_size, 700).tolist()
                tickets.append(server.submit(ids, max_new_tokens=96, stop_tokens=[]))
            server.run()
            tables.append(server.measure_costs(context=768))
        costs = median_of(tables)
        bound = token_gap_bound(costs, shares=True) * 1e3
        found = summarise([ticket.record for ticket in tickets])
        chunk, step = costs.longest_chunk_s * 1e3, costs.longest_step_s * 1e3
        rounds = [(t.longest_chunk_s + t.longest_step_s) * 1e3 for t in tables]
        print(
            f"gaps: {name}, {turns * num} prompts of 700 tokens, 4 slots: P50 "
            f"{found.p50_token_gap_ms:.1f}, P99 {found.p99_token_gap_ms:.1f}, longest "
            f"{found.max_token_gap_ms:.1f} ms; bound {bound:.1f} ms = "
            f"{bound / (chunk + step):.2f} x (chunk {chunk:.1f} + step {step:.1f}); "
            f"P99 / (chunk + step) {found.p99_token_gap_ms / (chunk + step):.2f}; "
            f"chunk + step from {min(rounds):.1f} to {max(rounds):.1f}"
        )


def median_of(tables):
    """The table of the medians of several."""

    def middle(*values):
        return statistics.median(values)

    values = jax.tree.map(middle, *map(dataclasses.asdict, tables))
    return CostTable(**values)


def throughput(lm, with_transformers):
    """Tokens per second of the same prompts."""
    prompts = [prompt.text for prompt in builtin()]
    length = [len(call.encode(lm, prompt, None, None, 0)) for prompt in prompts]
    stops = list(lm.stop_tokens)

    def ours(slots, num, stop_tokens):
        # As long as it takes: one block of the cache, for the equal answers.
        longest = max(length[:num]) + NEW_TOKENS
        server = jaxdec.Server(lm, "greedy", num_slots=slots, max_length=longest)

        def run():
            asked = dict(max_new_tokens=NEW_TOKENS, stop_tokens=stop_tokens)
            tickets = [server.submit(prompt, **asked) for prompt in prompts[:num]]
            server.run()
            return sum(
                t not in stop_tokens for ticket in tickets for t in ticket.tokens
            )

        return run

    equal = {"1 slot": ours(1, 8, []), "8 slots": ours(8, 8, [])}
    ended = {"8 slots": ours(8, len(prompts), stops)}
    if with_transformers:
        equal["transformers"] = theirs(lm, prompts[:8], [])
        ended["transformers"] = theirs(lm, prompts, stops)
    for name, runs in (
        (f"8 answers of {NEW_TOKENS} tokens", equal),
        (f"{len(prompts)} answers that end where they end", ended),
    ):
        samples = {name: [] for name in runs}
        for turn in range(REPEATS + 1):
            for who, run in runs.items():
                started = time.perf_counter()
                num = run()
                if turn:
                    samples[who].append(num / (time.perf_counter() - started))
        speed = {who: statistics.median(found) for who, found in samples.items()}
        for who, found in speed.items():
            print(
                f"throughput: {name}: {who}: {found:.1f} tokens/s, 8 slots are "
                f"{speed['8 slots'] / found:.2f} times as fast"
            )


def theirs(lm, prompts, stop_tokens):
    """Batches of 8 in transformers, padded on the left."""
    import torch
    from step_cost import transformers_model

    model = transformers_model(lm)
    ids = [call.encode(lm, prompt, None, None, 0) for prompt in prompts]

    def batch(ids):
        longest = max(map(len, ids))
        padded = torch.tensor([[0] * (longest - len(row)) + list(row) for row in ids])
        mask = torch.tensor(
            [[0] * (longest - len(row)) + [1] * len(row) for row in ids]
        )
        with torch.inference_mode():
            out = model.generate(
                padded,
                attention_mask=mask,
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                use_cache=True,
                eos_token_id=stop_tokens or None,
                pad_token_id=stop_tokens[0] if stop_tokens else 0,
            )
        said = out[:, longest:].tolist()
        return sum(token not in stop_tokens for row in said for token in row)

    def run():
        return sum(batch(ids[i : i + 8]) for i in range(0, len(ids), 8))

    return run


def main():
    """Prints what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    everything = ["alone", "gaps", "throughput"]
    parser.add_argument("parts", nargs="*", default=everything)
    parser.add_argument("--transformers", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(everything):
        parser.error(f"no part is called {', '.join(unknown)}")
    lm = jaxdec.load("smollm2", dtype="bfloat16")
    print(measure.versions())
    for part in options.parts:
        if part == "alone":
            alone(lm)
        elif part == "gaps":
            gaps(lm)
        else:
            throughput(lm, options.transformers)


if __name__ == "__main__":
    main()
