"""Where fetched and converted files are kept, and how they get there.

A file or folder in the cache is complete: it is written under another name, flushed,
and renamed. So an interrupted process leaves nothing that counts, and two processes
that write the same thing are harmless; the lock only spares the second one the work.
"""

import contextlib
import glob
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

Progress = Callable[[str], None]
"""Receives one line of text whenever something slow begins."""


def cache_folder() -> Path:
    """The folder for fetched and converted files: ``JAXDEC_CACHE``, or the user's."""
    chosen = os.environ.get("JAXDEC_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "jaxdec"


def make_folder(path: str | Path) -> Path:
    """Makes a folder, unless it is there, and tries whether it can be written.

    Raises:
        ValueError: it cannot.
    """
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        reason = error.strerror.lower() if error.strerror else str(error)
        raise ValueError(
            f"nothing can be written to the folder {str(path)!r}: {reason}; name "
            "another"
        ) from None
    return path


@contextlib.contextmanager
def lock(target: Path, progress: Progress | None = None) -> Iterator[bool]:
    """Holds an advisory lock on what is to be written at `target`.

    The system drops it when the process ends, however it ends. Where locks do not exist
    (some network file systems) this yields False, and the work may be done twice.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / f".{target.name}.lock", "a+b") as file:
        try:
            import fcntl
        except ImportError:
            import msvcrt

            def acquire(block: bool) -> None:
                file.seek(0)
                while True:
                    try:
                        msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
                        return
                    except OSError:
                        # LK_LOCK gives up after ten seconds.
                        if not block:
                            raise BlockingIOError from None
        else:

            def acquire(block: bool) -> None:
                flags = fcntl.LOCK_EX | (0 if block else fcntl.LOCK_NB)
                fcntl.flock(file, flags)

        is_held = True
        try:
            acquire(block=False)
        except BlockingIOError:
            if progress is not None:
                progress(f"waiting for another process that prepares {target.name}")
            acquire(block=True)
        except OSError:
            is_held = False
        # Closing the file releases the lock.
        yield is_held


@contextlib.contextmanager
def publish(target: Path, is_alone: bool) -> Iterator[Path]:
    """Yields an empty folder; what the body leaves at its ``result`` becomes `target`.

    Args:
        target: A file or folder; replaced if it exists.
        is_alone: Whether the lock is held, so that other unfinished folders can only be
            leftovers of interrupted processes, and are removed.
    """
    marker = f".{target.name}.partial-"
    if is_alone:
        for leftover in target.parent.glob(f"{glob.escape(marker)}*"):
            shutil.rmtree(leftover, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=marker, dir=target.parent))
    try:
        yield folder
        result = folder / "result"
        _flush(result)
        if target.is_dir():
            target.rename(folder / "replaced")
        os.replace(result, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _flush(path: Path) -> None:
    """Writes a file, or every file of a folder, through to the disk."""
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            with open(file, "r+b") as handle:
                os.fsync(handle.fileno())
