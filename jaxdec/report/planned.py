"""A plan as one table and a few words, from the dictionary that `--json` prints."""

from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]

HEADERS = (
    "strategy",
    "K",
    "weights\nGB",
    "state\nGB",
    "peak\nGB",
    "GFLOP\n/step",
    "GB\n/step",
    "ms\n/step",
    "break-\neven",
    "tokens\n/s",
    "fits",
)
"""Titles of the columns of `rows`; some have two lines, to fit 80 characters."""


def rows(plan: Record) -> list[tuple[str, ...]]:
    """One row a strategy, under `HEADERS`; all of one device but tokens."""
    room = plan["settings"]["device_memory_bytes"]
    return [
        (
            record["strategy"],
            str(record["draft_length"] or "-"),
            f"{record['weight_bytes'] / 1e9:.2f}",
            f"{record['state_bytes'] / 1e9:.2f}",
            f"{record['peak_bytes'] / 1e9:.2f}",
            f"{record['flops'] / 1e9:.1f}",
            f"{record['num_bytes'] / 1e9:.2f}",
            f"{record['step_ms']:.2f}",
            f"{record['break_even_tokens_per_step']:.2f}",
            f"{record['tokens_per_second']:.0f}",
            _fits(record, room),
        )
        for record in plan["strategies"]
    ]


def _fits(record: Record, room: float) -> str:
    margin = (room - record["peak_bytes"]) / 1e9
    if not record["fits"]:
        least = "at least " if None in record["memory"].values() else ""
        return f"NO, {least}{-margin:.1f} GB too much"
    return f"yes, {margin:.1f} GB left"


def caption(plan: Record) -> str:
    """What was held fixed."""
    settings = plan["settings"]
    count = settings["num_devices"]
    devices = "1 device" if count == 1 else f"each of {count} devices"
    tokens = max((r["tokens_per_step"] for r in plan["strategies"]), default=1.0)
    return (
        f"{settings['model']} in {settings['dtype']}, KV state in "
        f"{settings['cache_dtype']}, on {settings['topology']}: {devices} "
        f"({settings['device']}) with {settings['device_memory_bytes'] / 1e9:.1f} GB; "
        f"batch {settings['batch_size']}, capacity {settings['capacity']}, "
        f"{settings['context']} tokens live; tokens/s at {tokens:g} tokens a step "
        "(plain decoding: 1)"
    )
