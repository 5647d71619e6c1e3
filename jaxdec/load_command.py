"""The subcommand `jaxdec load`: its options, and the tables that it prints."""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxdec import console as terminal


def load(
    model: Annotated[
        str,
        typer.Option(help="smollm2, a folder, a .gguf file, or a Hugging Face Hub id."),
    ] = "smollm2",
    strategy: Annotated[
        str, typer.Option(help="greedy, sample, lookup, self_draft, or a drafter's.")
    ] = "greedy",
    drafter: Annotated[
        str | None, typer.Option(help="A trained drafter: a folder or a Hub id.")
    ] = None,
    draft_length: Annotated[
        int | None, typer.Option(help="Draft tokens a step; each strategy has its own.")
    ] = None,
    speculation: Annotated[
        str,
        typer.Option(
            help="scheduled: drafts as long as the load makes worth while; fixed; off."
        ),
    ] = "scheduled",
    temperature: Annotated[
        float | None, typer.Option(help="Of all requests; if not given: as generate.")
    ] = None,
    policies: Annotated[
        str,
        typer.Option(
            help="first_come, priority, shortest_remaining, deadline; with commas."
        ),
    ] = "first_come",
    preemption: Annotated[
        str, typer.Option(help="none, recompute or keep: how running ones give way.")
    ] = "none",
    slots: Annotated[int, typer.Option(help="Requests that run at once.", min=1)] = 8,
    max_length: Annotated[
        int, typer.Option(help="Most tokens of a request, prompt and output.", min=2)
    ] = 512,
    kv_tokens: Annotated[
        int | None, typer.Option(help="Tokens that all running requests may hold.")
    ] = None,
    prefill_chunk: Annotated[
        int, typer.Option(help="Prompt tokens read between two steps.", min=1)
    ] = 96,  # `jaxdec.decoding.PREFILL_CHUNK`, without importing jax.
    rate: Annotated[float, typer.Option(help="Requests per second.")] = 2.0,
    requests: Annotated[int, typer.Option(help="How many.", min=1)] = 64,
    arrivals: Annotated[
        str, typer.Option(help="poisson (one by one) or bursty.")
    ] = "poisson",
    burst: Annotated[float, typer.Option(help="Mean requests of a burst.")] = 8.0,
    lengths: Annotated[
        str,
        typer.Option(
            help="builtin, or a .jsonl file: prompt_length and output_length a line."
        ),
    ] = "builtin",
    prompt_tokens: Annotated[
        float, typer.Option(help="Median of the built-in prompts.")
    ] = 64.0,
    output_tokens: Annotated[
        float, typer.Option(help="Median of the built-in outputs.")
    ] = 48.0,
    ttft_ms: Annotated[
        float, typer.Option(help="Goodput counts requests up to this TTFT.")
    ] = math.inf,
    tpot_ms: Annotated[float, typer.Option(help="... and up to this TPOT.")] = math.inf,
    simulate: Annotated[
        bool,
        typer.Option("--simulate", help="On the simulated clock alone."),
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option(help="What was measured before; with --simulate no model is run."),
    ] = None,
    save_profile: Annotated[
        Path | None, typer.Option(help="File for what was measured.")
    ] = None,
    sweep: Annotated[
        str,
        typer.Option(
            help="Requests per second, with commas, to simulate as well: 1,10,100,..."
        ),
    ] = "",
    replicas: Annotated[
        int,
        typer.Option(help="Devices, with --simulate and in the sweep.", min=1),
    ] = 1,
    route: Annotated[
        str, typer.Option(help="least_loaded or round_robin: to which of them.")
    ] = "least_loaded",
    plots: Annotated[
        Path | None,
        typer.Option(help="Folder for plots; needs pip install 'jaxdec[plots]'."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of the weights: bfloat16 or float32.")
    ] = "bfloat16",
    seed: Annotated[int, typer.Option(help="Of the load.", min=0)] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, for machines.")
    ] = False,
) -> None:
    """Serve many requests that come at random; say how long each waits for what.

    Measures the server, then serves the load in real time, and again on a simulated
    clock, which can also carry loads that this machine cannot.
    """
    from jaxdec.latency import Objective
    from jaxdec.report import load as reports

    if plots is not None:
        reports.check_plots()
    if save_profile is not None:
        _check_new(save_profile, profile)
    rates = _rates(sweep)
    known = None if profile is None else _json_file(profile)
    terminal.prepare_jax()
    import jaxdec
    from jaxdec import load_run, strategies
    from jaxdec.traffic import Traffic

    setup = load_run.Setup(
        traffic=Traffic(
            rate=rate,
            num_requests=requests,
            arrivals=arrivals,
            burst=burst,
            lengths=lengths,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            max_length=max_length,
            seed=seed,
        ),
        policies=tuple(name.strip() for name in policies.split(",")),
        num_slots=slots,
        prefill_chunk=prefill_chunk,
        preemption=preemption,
        kv_tokens=kv_tokens,
        speculation=speculation,
        objective=Objective(ttft_s=ttft_ms / 1000, tpot_s=tpot_ms / 1000),
        temperature=temperature,
    )
    setup.draw()  # Before a model is loaded: the load may make no sense.
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
    found = None if known is None else load_run.Profile.from_dict(known)
    lm = config = None
    if found is None or not simulate:
        strategies.check_name(strategy)
        lm = jaxdec.load(model, dtype=dtype, progress=terminal.notice)
        if drafter is not None:
            loaded = jaxdec.load_drafter(drafter, lm, progress=terminal.notice)
            jaxdec.add_drafter(lm, loaded)
        config = strategies.resolve(strategy, draft_length, lm)
    with terminal.progress_bar() as progress:
        if found is None:
            found = load_run.measure(lm, config, setup, progress)
            if save_profile is not None:
                save_profile.write_text(json.dumps(found.to_dict(), indent=1))
        report, _ = load_run.run(
            setup,
            lm=None if simulate else lm,
            strategy=config,
            profile=found,
            rates=rates,
            num_replicas=replicas,
            route=route,
            progress=progress,
        )
    if plots is not None:
        for path in reports.plot(report, plots):
            terminal.notice(f"wrote {path}")
    if as_json:
        typer.echo(json.dumps(report, allow_nan=False, ensure_ascii=False))
        return
    out = terminal.output()
    terminal.print_table(out, reports.HEADERS, reports.rows(report))
    if report["sweep"]:
        table = reports.SWEEP_HEADERS, reports.sweep_rows(report)
        terminal.print_table(out, *table, "on the simulated clock")
    for line in report["notes"]:
        out.print(line, markup=False, highlight=False)


def _rates(text: str) -> list[float]:
    """Numbers with commas between them."""
    try:
        rates = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        rates = [math.nan]
    if not all(0 < rate < math.inf for rate in rates):
        raise ValueError(
            f"--sweep takes requests per second with commas, such as 1,10,100, got "
            f"{text!r}"
        )
    return rates


def _check_new(path: Path, known: Path | None) -> None:
    """Raises ValueError where a profile could not be saved, before it is measured."""
    if known is not None:
        raise ValueError(
            f"--save-profile is for what is measured, and --profile {known} was "
            "measured before; leave one of them out"
        )
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(
            f"--save-profile takes a file in a folder that exists, got {path}; make "
            "the folder, or name another"
        )


def _json_file(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is not JSON ({error}); make it with jaxdec load --save-profile"
        ) from None
