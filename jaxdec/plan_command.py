"""The subcommand `jaxdec plan`."""

import json
from typing import Annotated

import typer

from jaxdec import console as terminal


def plan(
    model: Annotated[
        str,
        typer.Option(
            help="A name (qwen3-8b, smollm2, ...), a config.json or its folder, or a "
            ".gguf file; no weights are read."
        ),
    ] = "qwen3-8b",
    topology: Annotated[
        str,
        typer.Option(help="v5e:2x2, v6e:2x2, v5p:2x2x1, v4:2x2x1, tpu7x:2x2x1; cpu."),
    ] = "v5e:2x2",
    strategies: Annotated[
        str | None,
        typer.Option(
            help="Names, with commas: greedy, lookup, self_draft, draft_model, mtp, "
            "mtp_tree, eagle3, eagle3_tree, dflash, dspark, first_of."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Requests at once.")] = 1,
    capacity: Annotated[
        int, typer.Option(help="Slots of the caches, for prompt and output.")
    ] = 4096,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens live in the step that is counted; half of capacity."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of the weights: bfloat16 or float32.")
    ] = "bfloat16",
    cache_dtype: Annotated[
        str, typer.Option(help="Of keys and values: float32 or bfloat16.")
    ] = "float32",
    tokens_per_step: Annotated[
        float, typer.Option(help="For which tokens per second are told.")
    ] = 3.0,
    data: Annotated[
        int, typer.Option(help="Groups of devices that share the requests.")
    ] = 1,
    full: Annotated[
        bool,
        typer.Option("--full", help="Compile all layers; else a few, and a line."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, for machines.")
    ] = False,
) -> None:
    """Compile strategies for a TPU without one: memory, FLOPs, bytes, break-even.

    Drafters have the shapes that are published for them. Numbers are of one device;
    times are floors, without communication.
    """
    terminal.prepare_jax()
    from jaxdec.plan import DEFAULT_STRATEGIES
    from jaxdec.plan import plan as run
    from jaxdec.report import planned

    names = DEFAULT_STRATEGIES
    if strategies is not None:
        names = tuple(name.strip() for name in strategies.split(",") if name.strip())
    with terminal.progress_bar() as progress:
        found = run(
            model,
            names,
            topology=topology,
            batch_size=batch,
            capacity=capacity,
            context=context,
            dtype=dtype,
            cache_dtype=cache_dtype,
            tokens_per_step=tokens_per_step,
            data=data,
            full=full,
            progress=progress,
        ).to_dict()
    if as_json:
        typer.echo(json.dumps(found, allow_nan=False, ensure_ascii=False))
        return
    out = terminal.output()
    terminal.print_table(
        out, planned.HEADERS, planned.rows(found), planned.caption(found)
    )
    for note in found["notes"]:
        out.print(f"- {note}", markup=False, highlight=False)
