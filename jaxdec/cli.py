"""The `jaxdec` command: generate, show, compare, plan, load, inspect, models; training.

One function per subcommand, and no logic of its own: what a subcommand prints is what
the library returns. Results go to stdout; progress, evidence lines and errors go to
stderr, so that stdout can be piped. An error that a person can mend is one message
without a traceback: exit status 1, or 2 if the command line itself is wrong.
"""

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxdec import console as terminal
from jaxdec import load_command, options, plan_command, show_command, train_command

_HELP = """Decoding strategies for language models, chosen on evidence.

\b
A worked path:
  jaxdec generate "Why is the sky blue?"
      streams an answer of the built-in model (fetched once, 93 MB)
  jaxdec generate "Why is the sky blue?" --strategy lookup
      the same tokens, several a step where text repeats itself
  jaxdec show "Why is the sky blue?" --strategy lookup
      the same in colours: accepted drafts, corrections, bonus tokens
  jaxdec compare
      runs plain decoding, lookup and the drafters that come with the model
      on the same prompts, certifies that none changes the answer, says
      which to use;
      report/report.html shows every step
  jaxdec plan --model qwen3-8b --topology v5e:2x2
      whether each strategy fits on a TPU, and when it pays, without one
  jaxdec load --rate 2 --strategy lookup --sweep 1,10,100
      serves many requests at once; how long they wait, here and simulated
  jaxdec inspect model.gguf
      what a checkpoint is; the other commands take it as --model
  jaxdec regenerate prompts.jsonl --out answers
  jaxdec train eagle3 --data answers --out run
      makes a drafter for the model; then: --drafter run/drafter

Each command has its own --help.
"""

app = typer.Typer(
    help=_HELP,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits; the entry point of ``jaxdec``."""
    sys.exit(terminal.run(app, arguments))


def _version(is_wanted: bool) -> bool:
    if is_wanted:
        import jaxdec

        typer.echo(f"jaxdec {jaxdec.__version__}")
        raise typer.Exit
    return is_wanted


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    del version


@app.command()
def generate(
    prompt: options.Prompt,
    model: options.Model = "smollm2",
    strategy: options.Strategy = "greedy",
    drafter: options.Drafter = None,
    draft_model: options.DraftModel = None,
    draft_length: options.DraftLength = None,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = None,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = 0,
    stop: options.Stop = None,
    dtype: options.Dtype = "bfloat16",
    chat: options.Chat = None,
    system: options.System = None,
    exact: options.Exact = False,
    as_json: options.Json = False,
) -> None:
    """Answer one prompt; stream the text.

    With --json: {"outputs": [{"text", "tokens", "finish_reason"}], "evidence": {...}}.
    """
    lm, prompt, asked = options.prepare(
        prompt,
        model=model,
        strategy=strategy,
        drafter=drafter,
        draft_model=draft_model,
        draft_length=draft_length,
        dtype=dtype,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=stop,
        chat=chat,
        system=system,
        exact=exact,
    )
    import jaxdec
    from jaxdec import measure

    if as_json:
        outputs = jaxdec.generate(lm, prompt, **asked)
        record = {
            "outputs": [
                {
                    "text": item.text,
                    "tokens": list(item.tokens),
                    "finish_reason": item.finish_reason,
                }
                for item in outputs
            ],
            "evidence": {} if outputs.run is None else outputs.evidence.to_dict(),
        }
        typer.echo(json.dumps(record, allow_nan=False, ensure_ascii=False))
        return
    outputs = _stream(jaxdec.stream(lm, prompt, **asked))
    if outputs.run is not None:
        evidence = measure.evidence(outputs.run, outputs.items, with_costs=False)
        terminal.errors().print(
            terminal.summary(asked["strategy"].name, evidence),
            style="dim",
            soft_wrap=True,
        )


def _stream(pieces: Iterator[Any]) -> Any:
    """Prints pieces as they come; returns the outputs behind them."""
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            sys.stdout.write("\n")
            sys.stdout.flush()
            return end.value
        sys.stdout.write(piece.text)
        sys.stdout.flush()


@app.command()
def compare(
    model: options.Model = "smollm2",
    strategies: Annotated[
        str | None,
        typer.Option(
            help="Names, with commas; greedy is always run. If not given: greedy, "
            "sample, lookup, and those of drafters that come along, or self_draft."
        ),
    ] = None,
    drafter: options.Drafter = None,
    draft_model: options.DraftModel = None,
    prompts: Annotated[
        str,
        typer.Option(
            help="builtin, or a file: .jsonl with a prompt a line, or lines of text."
        ),
    ] = "builtin",
    limit: Annotated[
        int, typer.Option(help="Use the first so many prompts; 0 uses all.", min=0)
    ] = 6,
    max_new_tokens: Annotated[int, typer.Option(help="Of each answer, at most.")] = 96,
    temperature: Annotated[
        float, typer.Option(help="Of all but greedy; sample uses 0.7 where it is 0.")
    ] = 0.0,
    draft_length: options.DraftLength = None,
    seed: Annotated[
        int, typer.Option(help="Of the first request; the next has the next.")
    ] = 0,
    repeats: Annotated[
        int, typer.Option(help="Runs of each request; the median counts.")
    ] = 1,
    batch_size: Annotated[
        int,
        typer.Option(help="Requests run together; times are then those of a batch."),
    ] = 1,
    dtype: options.Dtype = "bfloat16",
    exact: options.Exact = False,
    no_certify: Annotated[
        bool,
        typer.Option(
            "--no-certify",
            help="Leave out the certificates, which take as long as the runs; then no "
            "strategy is recommended.",
        ),
    ] = False,
    out: Annotated[
        Path, typer.Option(help="Folder for the report: .json, .md, .html, figures.")
    ] = Path("report"),
    as_json: options.Json = False,
) -> None:
    """Run strategies on the same prompts; certify, measure, and say which to use."""
    from jaxdec.prompts import builtin, read

    chosen = builtin() if prompts == "builtin" else read(prompts)
    chosen = chosen[: limit or None]
    terminal.prepare_jax()
    from jaxdec.compare import compare as run
    from jaxdec.compare import plan
    from jaxdec.io.storage import make_folder
    from jaxdec.report import plots, tables
    from jaxdec.strategies import BY_NAME, check_name, resolve

    names = [*BY_NAME, *(["draft_model"] if draft_model else [])]
    if strategies is not None:
        names = [name.strip() for name in strategies.split(",")]
    if not all(names):
        raise ValueError(
            f"--strategies has an empty name, got {strategies!r}; give names with "
            "commas between them, such as greedy,lookup"
        )
    for name in names:
        check_name(name)
    options.check_draft_model(names, draft_model, drafter)
    plan([n for n in names if n in BY_NAME], temperature, draft_length)
    make_folder(out)
    lm = options.load_model(model, dtype, drafter, draft_model)
    if strategies is None:
        names += [name for name in lm.strategies if name not in names]
        if lm.strategies:
            names.remove("self_draft")  # For want of anything better.
    with terminal.progress_bar() as progress:
        comparison = run(
            lm,
            chosen,
            names,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            draft_length=draft_length,
            repeats=repeats,
            batch_size=batch_size,
            certify=not no_certify,
            exact=exact,
            out=out,
            progress=progress,
        )
    report = comparison.to_dict()
    if as_json:
        typer.echo(json.dumps(report, allow_nan=False, ensure_ascii=False))
        return
    console = terminal.output()
    terminal.print_table(
        console, tables.HEADERS, tables.rows(report), tables.caption(report)
    )
    if len(report["strategies"][0]["tokens_per_step_by_task"]) > 1:
        terminal.print_table(
            console, *tables.task_table(report), "tokens per step, by task"
        )
    console.print()
    for line in tables.advice_lines(report):
        console.print(f"- {line}", markup=False, highlight=False)
    best = next(e for e in comparison.entries if e.label == comparison.advice.best)
    again = ["--strategy", best.config.name]
    if best.config.length != resolve(best.config.name, lm=lm).length:
        again += ["--draft-length", str(best.config.length)]
    again += ["--model", model] if model != "smollm2" else []
    again += [word for path in drafter or () for word in ("--drafter", path)]
    again += ["--draft-model", draft_model] if draft_model else []
    console.print()
    console.print(
        f"Try it: jaxdec generate PROMPT {shlex.join(again)}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    figures = ", figures as .png" if plots.can_draw() else ""
    terminal.notice(f"wrote {out / 'report.json'}, {out / 'report.md'}{figures}")
    terminal.notice(f"open {out / 'report.html'} in a browser")
    if not figures:
        terminal.notice(plots.WITHOUT)


app.command()(show_command.show)
app.command()(plan_command.plan)
app.command()(load_command.load)


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="A folder, a .gguf file, or a name.")],
    target: Annotated[
        str | None,
        typer.Option(help="Of a drafter: the model it is for; checks the pairing."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Say what a model or a drafter is."""
    from jaxdec.report.inspection import inspect as look
    from jaxdec.report.inspection import rows

    facts = look(path, target, terminal.notice)
    if as_json:
        typer.echo(json.dumps(facts, allow_nan=False, ensure_ascii=False))
        return
    console = terminal.output()
    terminal.print_table(console, ("", ""), rows(facts))
    if "fits" in facts:
        console.print(
            f"fits {facts['fits']}", markup=False, highlight=False, soft_wrap=True
        )


@app.command()
def models(as_json: options.Json = False) -> None:
    """List the built-in models, and what is in the cache."""
    from jaxdec.report.checkpoints import cached

    found = cached()
    if as_json:
        typer.echo(json.dumps(found, allow_nan=False, ensure_ascii=False))
        return
    console = terminal.output()
    rows = [
        (m["name"], "built in", "ready" if m["is_fetched"] else "fetched when used")
        for m in found["built_in"]
    ]
    rows += [
        (
            m["name"]
            if m["name_in_the_file"] in (None, m["name"])
            else f"{m['name']}\n(file: {m['name_in_the_file']})",
            f"converted to {m['dtype']}",
            f"{m['bytes'] / 1e6:.0f} MB",
        )
        for m in found["converted"]
    ]
    terminal.print_table(console, ("model", "what", "state"), rows)
    console.print(f"cache: {found['cache']}", style="dim", soft_wrap=True)


train_command.register(app)
