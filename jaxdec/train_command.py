"""The subcommands that make drafters: regenerate, train, calibrate, export.

As in `jaxdec.cli`, no logic of their own: results go to stdout, progress to stderr.
"""

import enum
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxdec import console as terminal

Model = Annotated[
    str, typer.Option(help="The target: smollm2, a folder, a .gguf file, or a Hub id.")
]
Dtype = Annotated[str, typer.Option(help="Of the target: bfloat16 or float32.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
Prompts = Annotated[
    str,
    typer.Option(
        help="builtin, or a file: .jsonl with a prompt a line, or lines of text."
    ),
]


class Kind(enum.StrEnum):
    """What can be trained."""

    draft = "draft"
    mtp = "mtp"
    eagle3 = "eagle3"
    dflash = "dflash"
    dspark = "dspark"


def regenerate(
    prompts: Annotated[
        str, typer.Argument(help="A file: .jsonl with a prompt a line, or lines.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the token store.")],
    model: Model = "smollm2",
    dtype: Dtype = "bfloat16",
    tokens: Annotated[
        int, typer.Option(help="Stop at so many answer tokens; 0 answers all.", min=0)
    ] = 0,
    max_new_tokens: Annotated[
        int,
        typer.Option(help="Of an answer, at most; 0 keeps the prompts alone.", min=0),
    ] = 192,
    batch_size: Annotated[
        int, typer.Option(help="Prompts answered together.", min=1)
    ] = 32,
    sampled: Annotated[
        float, typer.Option(help="The part that is sampled; the rest is greedy.")
    ] = 0.5,
    temperature: Annotated[float, typer.Option(help="Of what is sampled.")] = 0.7,
    validation: Annotated[
        int, typer.Option(help="The last so many prompts are for validation.", min=0)
    ] = 500,
    start: Annotated[
        Path | None, typer.Option(help="A token store (.npz) to begin with.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of what is sampled.")] = 0,
    as_json: Json = False,
) -> None:
    """Let the target answer prompts: the data that drafters are trained on.

    Run it again after an interruption, or with more prompts: it goes on.
    """
    from jaxdec.prompts import read

    found = read(prompts)
    terminal.prepare_jax()
    import jaxdec
    from jaxdec.training import regenerate as work

    jobs = work.plan(found, num_validation=validation, sampled=sampled, seed=seed)
    if start is not None:
        work.begin_with(out, start)
    lm = jaxdec.load(model, dtype=dtype, progress=terminal.notice)
    with terminal.progress_bar() as progress:
        store = work.regenerate(
            lm,
            jobs,
            out,
            batch_size=batch_size,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            until=tokens or None,
            progress=progress,
        )
    facts = {
        "records": len(store),
        "answer_tokens": store.num_answer_tokens,
        "greedy": int(store.is_greedy.sum()),
        "validation": int(store.is_validation.sum()),
    }
    _show(facts, as_json)


def train(
    kind: Annotated[Kind, typer.Argument(help="What to train.")],
    data: Annotated[Path, typer.Option(help="The token store, of jaxdec regenerate.")],
    out: Annotated[Path, typer.Option(help="Folder of the run.")],
    model: Model = "smollm2",
    dtype: Dtype = "bfloat16",
    recipe: Annotated[
        Path | None, typer.Option(help="A .json file with fields of the recipe.")
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="name=value of the recipe; may be given several times."
        ),
    ] = None,
    features: Annotated[
        Path | None,
        typer.Option(
            help="Folder to keep the target's features in: faster, takes much disk."
        ),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            help="A drafter to go on with, in a new run; the vocabulary may be another."
        ),
    ] = None,
    until: Annotated[
        int | None,
        typer.Option(
            help="Stop after so many steps, with a drafter; may go on later.", min=1
        ),
    ] = None,
    devices: Annotated[
        int, typer.Option(help="Split batches over so many devices.", min=1)
    ] = 1,
    speed: Annotated[
        bool, typer.Option("--speed", help="Measure the step against plain products.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a drafter for a target; goes on where an interrupted run ended.

    The drafter is in OUT/drafter, for --drafter of the other commands.
    """
    values: dict[str, Any] = {} if recipe is None else _json_file(recipe)
    values |= dict(_assignment(text) for text in field or ())
    if values.setdefault("kind", kind.value) != kind.value:
        raise ValueError(
            f"{recipe} is a recipe for {values['kind']}, not for {kind.value}; use "
            f"jaxdec train {values['kind']}"
        )
    from jaxdec.training.recipe import recipe_from

    chosen = recipe_from(values)
    terminal.prepare_jax()
    import jax

    import jaxdec
    from jaxdec.training.session import train as run
    from jaxdec.training.store import read_store

    store = read_store(data)
    mesh = None
    if devices > 1:
        if devices > len(jax.devices()):
            raise ValueError(
                f"--devices {devices}, but there are {len(jax.devices())}; give fewer"
            )
        mesh = jax.make_mesh((devices,), ("data",))
    lm = jaxdec.load(model, dtype=dtype, progress=terminal.notice)
    with terminal.progress_bar() as progress:
        drafter, _ = run(
            chosen,
            lm,
            store,
            out,
            features=features,
            mesh=mesh,
            progress=progress,
            until=until,
            with_speed=speed,
            start=start,
        )
    facts = {"drafter": str(out / "drafter"), "parameters": drafter.num_params}
    keys = ("steps", "minutes", "tokens_read", "validation", "speed")
    facts |= {key: drafter.card[key] for key in keys if key in drafter.card}
    _show(facts, as_json)


def calibrate(
    drafter: Annotated[str, typer.Argument(help="A drafter with a confidence head.")],
    out: Annotated[Path, typer.Option(help="Folder for the calibrated drafter.")],
    model: Model = "smollm2",
    dtype: Dtype = "bfloat16",
    prompts: Prompts = "builtin",
    limit: Annotated[
        int, typer.Option(help="Use the last so many prompts; 0 uses all.", min=0)
    ] = 0,
    max_new_tokens: Annotated[int, typer.Option(help="Of each answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="Of the answers.")] = 0.0,
    batch_size: Annotated[int, typer.Option(help="Answered together.", min=1)] = 8,
    head: Annotated[
        bool, typer.Option(help="Fit the head, too, and not its temperatures alone.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Fit a confidence head to its rounds; ECE, AUROC and Brier before and after.

    What is told of a prompt was fitted to others.
    """
    from jaxdec.prompts import builtin, read

    chosen = builtin() if prompts == "builtin" else read(prompts)
    chosen = chosen[-limit:] if limit else chosen
    terminal.prepare_jax()
    import jaxdec
    from jaxdec.calibration import calibrate as run
    from jaxdec.report.plots import plot_calibration

    lm = jaxdec.load(model, dtype=dtype, progress=terminal.notice)
    loaded = jaxdec.load_drafter(drafter, lm, progress=terminal.notice)
    with terminal.progress_bar() as progress:
        calibrated, report = run(
            lm,
            loaded,
            [prompt.text for prompt in chosen],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            batch_size=batch_size,
            fits_head=head,
            progress=progress,
        )
    card = loaded.card | {"calibration": report}
    jaxdec.save_drafter(out, calibrated, lm, card=card)
    plot_calibration(report, out)
    if as_json:
        typer.echo(json.dumps(report, allow_nan=False))
        return
    for name in ("before", "after"):
        for row in report[name]:
            cells = [f"{k} {v:.4f}" for k, v in row.items() if isinstance(v, float)]
            typer.echo(f"{name:7} token {row['depth']}: {', '.join(cells)}")


def export(
    drafter: Annotated[str, typer.Argument(help="A drafter: a folder or a Hub id.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    model: Model = "smollm2",
    dtype: Dtype = "bfloat16",
    format: Annotated[
        str | None,
        typer.Option(
            help="speculators, zlab, deepspec, verifier (MTP in the target's own "
            "checkpoint) or model; if not given, the usual one."
        ),
    ] = None,
    target_name: Annotated[
        str | None, typer.Option(help="What serving engines find the target by.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a drafter in the format that serving engines load."""
    terminal.prepare_jax()
    import jaxdec

    lm = jaxdec.load(model, dtype=dtype, progress=terminal.notice)
    loaded = jaxdec.load_drafter(drafter, lm, progress=terminal.notice)
    written = jaxdec.export_drafter(
        out, loaded, lm, format=format, target_name=target_name
    )
    _show({"folder": str(out), "format": written}, as_json)


def register(app: typer.Typer) -> None:
    """Adds the subcommands."""
    for command in (regenerate, train, calibrate, export):
        app.command()(command)


def _json_file(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); correct it") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold one object with fields of the recipe")
    return values


def _assignment(text: str) -> tuple[str, Any]:
    """A field of a recipe from ``name=value``; the value as JSON, or else as text."""
    name, sign, value = text.partition("=")
    if not sign:
        raise ValueError(f"--set takes name=value, got {text!r}")
    try:
        return name.strip(), json.loads(value)
    except ValueError:
        return name.strip(), value


def _show(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(facts, allow_nan=False))
        return
    for name, value in facts.items():
        typer.echo(f"{name.replace('_', ' ')}: {value}")
