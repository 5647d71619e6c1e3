"""How the command meets its surroundings: JAX's start, the terminal, errors."""

import contextlib
import glob
import importlib.metadata
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import rich.box
import rich.console
import rich.markup
import rich.progress
import rich.table
import typer

USAGE, FAILURE, INTERRUPTED = 2, 1, 130
"""Exit statuses."""
QUIET_S = 10.0
"""Seconds between two lines of progress."""


def run(app: typer.Typer, arguments: Sequence[str] | None) -> int:
    """Runs a command line (this process's, if None); returns its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    command = typer.main.get_command(app)
    try:
        status = command.main(
            arguments or ["--help"],
            prog_name="jaxdec",
            standalone_mode=False,
        )
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has left (`| head`). Nothing more can be written, not at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except (ValueError, OSError) as error:
        return _fail(str(error) or type(error).__name__, FAILURE)
    except Exception as error:
        # Typer ships its own copy of Click; a usage error of either knows its text.
        show = getattr(error, "format_message", None)
        if show is None:
            raise
        return _fail(f"{show()} (see jaxdec --help)", USAGE)


def _fail(message: str, status: int) -> int:
    print(f"jaxdec: {message}", file=sys.stderr)
    return status


def output() -> rich.console.Console:
    """The console of results. Wide where nobody looks at it as it comes."""
    return rich.console.Console(width=None if sys.stdout.isatty() else 160)


def errors() -> rich.console.Console:
    """The console of everything else."""
    return rich.console.Console(stderr=True, highlight=False, markup=False)


def notice(text: str) -> None:
    """One line about something slow that begins."""
    errors().print(text, style="dim", soft_wrap=True)


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr while the block runs, and the function that moves it.

    Where stderr is no terminal there is a line every `QUIET_S` seconds instead.
    """
    if not sys.stderr.isatty():
        said = time.monotonic()

        def say(done: int, total: int, text: str) -> None:
            nonlocal said
            if time.monotonic() - said > QUIET_S:
                said = time.monotonic()
                notice(f"[{done}/{total}] {text}")

        yield say
        return
    with rich.progress.Progress(
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("{task.description}", markup=False),
        console=errors(),
        transient=True,
    ) as bars:
        task = bars.add_task("starting", total=None)

        def move(done: int, total: int, text: str) -> None:
            bars.update(task, completed=done, total=total, description=text)

        yield move


def print_table(
    console: rich.console.Console,
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    caption: str | None = None,
) -> None:
    """Prints a table; where it is wide, the inner columns are numbers."""
    table = rich.table.Table(
        box=rich.box.SIMPLE,
        show_header=any(titles),
        caption=caption,
        padding=(0, 0 if len(titles) > 3 else 1),
        pad_edge=False,
    )
    for number, title in enumerate(titles):
        is_number = len(titles) > 3 and number not in (0, len(titles) - 1)
        table.add_column(title, justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*(rich.markup.escape(cell) for cell in row))
    console.print(table)


def prepare_jax() -> None:
    """Keeps what XLA compiles for the next run, and picks no absent accelerator."""
    import jax

    from jaxdec.io.storage import cache_folder

    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
    if not os.environ.get("JAX_PLATFORMS") and _only_cpu():
        # An installed libtpu looks for a TPU by itself, and is loud when it has none.
        jax.config.update("jax_platforms", "cpu")


def _only_cpu() -> bool:
    """Whether libtpu is installed, yet there is no TPU and no other accelerator."""
    if importlib.util.find_spec("libtpu") is None:
        return False
    has_tpu = glob.glob("/dev/accel*") or glob.glob("/dev/vfio/*")
    has_tpu = has_tpu or "TPU_NAME" in os.environ or "TPU_WORKER_ID" in os.environ
    others = importlib.metadata.entry_points(group="jax_plugins")
    others = list(others) or importlib.util.find_spec("jax_plugins")
    return not has_tpu and not others


def summary(strategy: str, evidence: Any) -> str:
    """The evidence of one answer in a line."""
    parts = [
        f"{evidence.num_emitted} tokens in {evidence.num_steps} steps "
        f"({evidence.tokens_per_step or 0:.2f} a step)"
    ]
    if evidence.acceptance_rate is not None:
        parts.append(
            f"{evidence.acceptance_rate:.0%} of {evidence.num_judged} draft tokens "
            "accepted"
        )
    parts.append(f"first token after {evidence.ttft_s:.2f} s")
    if evidence.tpot_ms is not None:
        parts.append(f"then {evidence.tpot_ms:.1f} ms a token")
    if evidence.num_compilations:
        parts.append(f"compiling took {evidence.compile_s:.1f} s")
    ends = ", ".join(reason.replace("_", " ") for reason in evidence.finish_reasons)
    return f"[{strategy}] {'; '.join(parts)}; ended by {ends}"
