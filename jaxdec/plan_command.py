"""The subcommand `jaxdec plan`: its options, and the table that it prints."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from jaxdec import console as terminal

HEADERS = (
    "\nstrategy",
    "draft\ntokens",
    "GFLOP\na step",
    "GiB\na step",
    "ms a step\nat best",
    "tokens a step\nto break even",
    "weights\nGiB",
    "+ state\nGiB",
    "+ other\nGiB",
    "= total\nGiB",
    "\nfits",
)
"""Titles of the columns of `rows`."""


def plan(
    model: Annotated[
        str,
        typer.Option(
            help="qwen3-8b, qwen3-4b, qwen3-1.7b, qwen3-0.6b, a config.json or its "
            "folder; no weights are read."
        ),
    ] = "qwen3-8b",
    topology: Annotated[
        str,
        typer.Option(help="v5e:2x2, v6e:2x2, v5p:2x2x1, v4:2x2x1, tpu7x:2x2x1, ..."),
    ] = "v5e:2x2",
    strategies: Annotated[
        str, typer.Option(help="Names, with commas; drafters of published shape.")
    ] = "greedy,lookup,self_draft,eagle3,eagle3_tree,dflash,dspark",
    batch_size: Annotated[int, typer.Option(help="Requests at once.", min=1)] = 1,
    capacity: Annotated[
        int, typer.Option(help="Slots of the caches, for prompt and output.", min=1)
    ] = 4096,
    cache_dtype: Annotated[
        str, typer.Option(help="Of keys and values: float32 or bfloat16.")
    ] = "float32",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, for machines.")
    ] = False,
) -> None:
    """Say what fits on a TPU and what a step costs, without one.

    Compiles the decode loop of each strategy ahead of time, from a configuration alone.
    """
    terminal.prepare_jax()
    from jaxdec.plan import plan as run

    names = [name.strip() for name in strategies.split(",") if name.strip()]
    with terminal.progress_bar() as progress:
        found = run(
            model,
            names,
            topology=topology,
            batch_size=batch_size,
            capacity=capacity,
            cache_dtype=cache_dtype,
            progress=progress,
        ).to_dict()
    if as_json:
        typer.echo(json.dumps(found, allow_nan=False, ensure_ascii=False))
        return
    out = terminal.output()
    for line in title(found["settings"]):
        out.print(line, markup=False, highlight=False)
    terminal.print_table(out, HEADERS, rows(found))
    for line in _NOTES:
        out.print(line, style="dim", markup=False, highlight=False)


_NOTES = (
    "Of one chip. A step: loop bodies times their trips; FLOPs of matmuls, bytes of",
    "weights and caches; at best: no waits, no talk between chips. Memory: the",
    "compiler's, of the whole decode loop; other is temporaries, records and code.",
)


def title(settings: Mapping[str, Any]) -> list[str]:
    """What was planned for, in lines."""
    device, num = settings["device"], settings["num_devices"]
    weights = f"{settings['num_params'] / 1e9:.2f} B parameters in {settings['dtype']}"
    return [
        f"{settings['model']}: {weights}, KV caches in {settings['cache_dtype']}",
        f"{settings['topology']}: {num} x {device['kind']}, each "
        f"{device['memory_bytes'] / 2**30:.2f} GiB, "
        f"{device['bytes_per_s'] / 1e9:.0f} GB/s, "
        f"{device['flops_per_s'] / 1e12:.0f} TFLOP/s",
        f"batch {settings['batch_size']}, capacity {settings['capacity']} of which "
        "half is live",
    ]


def rows(plan: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row a strategy, under `HEADERS`."""

    def gib(value: float | int) -> str:
        return f"{value / 2**30:.2f}"

    room = plan["settings"]["device"]["memory_bytes"]
    found = []
    for item in plan["strategies"]:
        memory = item["memory"]
        short = f"NO (+{gib(memory['total'] - room)})"
        found.append(
            (
                item["strategy"],
                str(item["draft_length"] or "-"),
                f"{item['flops'] / 1e9:.1f}",
                gib(item["num_bytes"]),
                f"{item['step_ms']:.2f}",
                f"{item['break_even']:.2f}",
                *(gib(memory[k]) for k in ("weights", "state", "other", "total")),
                "yes" if item["fits"] else short,
            )
        )
    return found
