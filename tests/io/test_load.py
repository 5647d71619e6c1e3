"""The front door and its cache: kept once, rebuilt when damaged, safe in company."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import write_folder, write_gguf

import jaxdec.io.cache as cache_module
from jaxdec.io.cache import load_checkpoint
from jaxdec.io.checkpoint import CheckpointError, expected_tensors
from jaxdec.io.storage import cache_folder, lock, publish
from jaxdec.io.tokenizer import Tokenizer


@pytest.fixture
def conversions(monkeypatch):
    """Counts how often a file is really converted."""
    done = []
    real = cache_module.load_gguf

    def counting(path, dtype):
        done.append(path)
        return real(path, dtype)

    monkeypatch.setattr(cache_module, "load_gguf", counting)
    return done


def converted_folders():
    folder = cache_folder() / "converted"
    return sorted(p for p in folder.iterdir() if not p.name.startswith("."))


def test_converted_once_per_number_format(tmp_path, llama, conversions):
    _, config, tensors = llama
    file = write_gguf(tmp_path / "m.gguf", config, tensors)
    heard = []
    first = load_checkpoint(file, "float32", heard.append)
    second = load_checkpoint(file, np.float32, heard.append)
    assert len(conversions) == 1 and heard == ["converting m.gguf to float32 (once)"]
    for found in (first, second):
        assert found.config == config and found.format == "gguf"
        assert found.source == str(file) and found.stop_tokens == (2, 0)
        assert found.metadata["number_formats"] == {"F32": len(tensors)}
        assert found.tokenizer.encode("<|im_end|>he") == [2, 259]
        assert found.tokenizer.is_chat and found.tokenizer.eos_id == 2
        assert set(found.tensors) == set(expected_tensors(config))
        for name, tensor in found.tensors.items():
            np.testing.assert_array_equal(tensor, tensors[name])
    half = load_checkpoint(file, "bfloat16")
    assert len(conversions) == 2 and len(converted_folders()) == 2
    assert {t.dtype.name for t in half.tensors.values()} == {"bfloat16", "float32"}
    assert all(t.dtype.name == "bfloat16" for t in half.tensors.values() if t.ndim > 1)
    assert half.content_hash == first.content_hash
    moved = tmp_path / "other" / "name.gguf"
    moved.parent.mkdir()
    file.rename(moved)
    assert load_checkpoint(moved).source == str(moved) and len(conversions) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: (f / "checkpoint.json").write_text("{"),
        lambda f: (f / "checkpoint.json").unlink(),
        lambda f: (f / "tokenizer.json").write_text("{"),
        lambda f: os.truncate(f / "model.safetensors", 5000),
        lambda f: (f / "model.safetensors").unlink(),
        lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 100),
        shutil.rmtree,
    ],
)
def test_a_damaged_cache_is_rebuilt(tmp_path, llama, conversions, damage):
    _, config, tensors = llama
    file = write_gguf(tmp_path / "m.gguf", config, tensors)
    load_checkpoint(file)
    damage(converted_folders()[0])
    found = load_checkpoint(file)
    assert len(conversions) == 2
    name = "model.layers.1.self_attn.k_proj.weight"
    np.testing.assert_array_equal(found.tensors[name], tensors[name])
    load_checkpoint(file)
    assert len(conversions) == 2
    assert not list((cache_folder() / "converted").glob(".*partial*"))


def test_an_interrupted_conversion_does_not_count(tmp_path, llama, monkeypatch):
    _, config, tensors = llama
    file = write_gguf(tmp_path / "m.gguf", config, tensors)
    real = cache_module._write

    def interrupted(folder, checkpoint):
        real(folder, checkpoint)
        raise KeyboardInterrupt

    monkeypatch.setattr(cache_module, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_checkpoint(file)
    assert converted_folders() == []
    monkeypatch.setattr(cache_module, "_write", real)
    assert load_checkpoint(file).config == config
    assert len(converted_folders()) == 1


def test_leftovers_of_killed_processes_are_removed(tmp_path):
    target = tmp_path / "thing"
    (tmp_path / ".thing.partial-dead").mkdir()
    (tmp_path / ".thing.partial-dead" / "result").write_text("half")
    with lock(target) as is_alone, publish(target, is_alone) as folder:
        (folder / "result").write_text("whole")
    assert target.read_text() == "whole"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".thing.lock", "thing"]


def test_a_cache_that_cannot_be_written(tmp_path, llama, monkeypatch):
    _, config, tensors = llama
    file = write_gguf(tmp_path / "m.gguf", config, tensors)
    (tmp_path / "blocked").write_text("a file where a folder should be")
    monkeypatch.setenv("JAXDEC_CACHE", str(tmp_path / "blocked"))
    heard = []
    found = load_checkpoint(file, "float32", heard.append)
    assert heard[0].startswith("cannot keep the converted weights")
    name = "model.norm.weight"
    np.testing.assert_array_equal(found.tensors[name], tensors[name])


def test_damaged_files_are_not_cached(tmp_path, llama):
    _, config, tensors = llama
    file = write_gguf(tmp_path / "m.gguf", config, tensors)
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match="incomplete"):
        load_checkpoint(file)
    assert converted_folders() == []


def test_the_tokenizer_beside_a_file(tmp_path, llama):
    _, config, tensors = llama
    file = write_gguf(tmp_path / "m" / "m.gguf", config, tensors)
    inside = load_checkpoint(file).tokenizer
    inside.special_tokens["pad_token"] = "<|endoftext|>"
    inside.save(file.parent)
    assert load_checkpoint(file).tokenizer.special_tokens["pad_token"]
    # One with another vocabulary belongs to something else.
    other = (file.parent / "tokenizer.json").read_text().replace('"Ġt"', '"Ġx"')
    (file.parent / "tokenizer.json").write_text(other.replace('"t"\n', '"x"\n'))
    assert "pad_token" not in load_checkpoint(file).tokenizer.special_tokens
    assert isinstance(inside, Tokenizer)


def test_folders_with_gguf_files(tmp_path, llama):
    values, config, tensors = llama
    file = write_gguf(tmp_path / "one" / "m.gguf", config, tensors)
    assert load_checkpoint(file.parent).source == str(file)
    shutil.copy(file, file.with_name("n.gguf"))
    with pytest.raises(CheckpointError, match="several GGUF files.*m.gguf, n.gguf"):
        load_checkpoint(file.parent)
    write_folder(file.parent, values, tensors)
    assert load_checkpoint(file.parent).format == "safetensors"


_HOLD = """
import pathlib, sys, time
from jaxdec.io.storage import lock
with lock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    target = tmp_path / "thing"
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(target)], stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout.readline() == "held\n"
        heard = []

        def kill(message):
            heard.append(message)
            holder.send_signal(signal.SIGKILL)

        start = time.monotonic()
        with lock(target, kill):
            pass
    assert heard == ["waiting for another process that prepares thing"]
    assert time.monotonic() - start < 30


_LOAD = """
import json, sys
from jaxdec.io.cache import load_checkpoint
heard = []
found = load_checkpoint(sys.argv[1], "float32", heard.append)
print(json.dumps([heard, sum(float(t.sum()) for t in found.tensors.values())]))
"""


def test_two_processes_convert_once(tmp_path, llama):
    _, config, tensors = llama
    file = write_gguf(tmp_path / "m.gguf", config, tensors)
    both = [
        subprocess.Popen(
            [sys.executable, "-c", _LOAD, str(file)],
            env={**os.environ, "JAXDEC_CACHE": str(tmp_path / "cache")},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    results = [json.loads(process.communicate()[0]) for process in both]
    assert all(process.returncode == 0 for process in both)
    assert len({total for _, total in results}) == 1
    messages = [message for heard, _ in results for message in heard]
    assert sum(message.startswith("converting") for message in messages) == 1
