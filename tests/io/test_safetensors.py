"""Hugging Face folders: one file or several, variants of naming, everything missing."""

import dataclasses
import json
import re

import ml_dtypes
import numpy as np
import pytest
import safetensors
from conftest import write_folder
from safetensors.numpy import save_file

from jaxdec.io.cache import load_checkpoint
from jaxdec.io.checkpoint import (
    CheckpointError,
    check_finite,
    expected_tensors,
)
from jaxdec.io.names import check_tensors
from jaxdec.io.safetensors import load_folder, open_tensors


def assert_same(checkpoint, config, tensors):
    assert checkpoint.config == config
    assert set(checkpoint.tensors) == set(expected_tensors(config))
    for name, shape in expected_tensors(config).items():
        assert checkpoint.tensors[name].shape == shape
        np.testing.assert_array_equal(checkpoint.tensors[name], tensors[name], name)


@pytest.mark.parametrize("shards", [1, 3])
def test_one_file_and_three(tmp_path, llama, shards, monkeypatch):
    opened = []
    real = safetensors.safe_open

    def counting(path, **arguments):
        opened.append(path)
        return real(path, **arguments)

    monkeypatch.setattr(safetensors, "safe_open", counting)
    values, config, tensors = llama
    found = load_checkpoint(write_folder(tmp_path / "m", values, tensors, shards))
    assert_same(found, config, tensors)
    assert len(opened) == len(set(opened)) == shards
    assert found.format == "safetensors" and found.stop_tokens == (2,)
    assert found.tokenizer is None


@pytest.mark.parametrize(
    "rename",
    [
        lambda n: "language_model." + n,
        lambda n: n.replace("model.", "model.language_model.", 1),
        lambda n: n.removeprefix("model."),
    ],
)
def test_prefixes(tmp_path, llama, rename):
    values, config, tensors = llama
    renamed = {rename(name): tensor for name, tensor in tensors.items()}
    assert_same(
        load_folder(write_folder(tmp_path, values, renamed), np.dtype(np.float32)),
        config,
        tensors,
    )


def test_the_same_tensor_twice(tmp_path, llama):
    values, _, tensors = llama
    tensors["language_model.model.norm.weight"] = tensors["model.norm.weight"]
    with pytest.raises(CheckpointError, match="are both 'model.norm.weight'"):
        load_folder(write_folder(tmp_path, values, tensors), np.dtype(np.float32))


def test_tied_heads(tmp_path, llama):
    values, _, tensors = llama
    tied = values | {"tie_word_embeddings": True}
    with_head = load_checkpoint(write_folder(tmp_path / "a", tied, tensors))
    head = tensors.pop("lm_head.weight")
    without = load_checkpoint(write_folder(tmp_path / "b", tied, tensors))
    assert with_head.config == without.config and without.config.tie_embeddings
    assert "lm_head.weight" not in with_head.tensors
    assert head.shape == without.tensors["model.embed_tokens.weight"].shape
    with pytest.raises(
        CheckpointError, match="(?s)lm_head.weight.*tie_word_embeddings"
    ):
        load_checkpoint(write_folder(tmp_path / "c", values, tensors))


def test_ignored_tensors(tmp_path, llama):
    values, config, tensors = llama
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
        "vision_tower.patch.weight": np.ones((2, 2), np.float32),
        "mtp.layers.0.norm.weight": np.ones(2, np.float32),
        "model.layers.2.eh_proj.weight": np.ones((2, 4), np.float32),
        "model.layers.2.mlp.up_proj.weight": np.ones((2, 4), np.float32),
    }
    folder = write_folder(tmp_path, values, tensors | extra)
    assert_same(load_checkpoint(folder), config, tensors)
    assert set(extra) <= set(open_tensors(folder))


def test_mtp_modules_are_handed_on(tmp_path, llama):
    """Whatever their names; unread, and never mistaken for a layer too many."""
    values, config, tensors = llama
    modules = {
        "mtp.fc.weight": np.full((2, 4), 0.5, np.float32),
        "model.mtp_layers.0.input_proj.weight": np.ones((2, 4), np.float32),
        "model.layers.2.eh_proj.weight": np.ones((2, 4), np.float32),
        "model.layers.2.mlp.up_proj.weight": np.ones((2, 4), np.float32),
        "model.layers.3.shared_head.norm.weight": np.ones(2, np.float32),
    }
    broken = {"mtp.norm.weight": np.ones(2, np.int8)}
    values["num_nextn_predict_layers"] = 2
    folder = write_folder(tmp_path, values, tensors | modules | broken)
    found = load_checkpoint(folder, "bfloat16")
    assert set(found.extra) == set(modules | broken)
    assert found.extra["mtp.fc.weight"].dtype == ml_dtypes.bfloat16
    assert float(found.extra["mtp.fc.weight"][0, 0]) == 0.5
    assert found.settings["num_nextn_predict_layers"] == 2
    with pytest.raises(CheckpointError, match="number format I8"):
        found.extra["mtp.norm.weight"]
    with pytest.raises(CheckpointError, match="layers.3.mlp.up_proj.weight"):
        strange = {"model.layers.3.mlp.up_proj.weight": np.ones((2, 4), np.float32)}
        check_tensors(config, tensors | strange)


def test_all_problems_in_one_message(llama):
    _, config, tensors = llama
    del tensors["model.norm.weight"]
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = np.ones((2, 2), np.float32)
    tensors["surprise"] = np.ones(1, np.float32)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].T
    with pytest.raises(CheckpointError) as error:
        check_tensors(config, tensors)
    text = str(error.value)
    assert "missing (2)" in text and "unexpected (2)" in text
    for part in (
        "model.norm.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.2.mlp.up_proj.weight",
        "surprise",
        f"{name}: has [96, 64], needs [64, 96]",
    ):
        assert part in text


def test_a_damaged_number_of_layers(llama):
    _, config, tensors = llama
    config = dataclasses.replace(config, num_layers=2**31)
    with pytest.raises(CheckpointError, match="2147483648 layers"):
        check_tensors(config, tensors)


def test_missing_files(tmp_path, llama):
    values, _, tensors = llama
    folder = write_folder(tmp_path / "m", values, tensors, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    (folder / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(folder)
    assert "2 of 3 files" in str(error.value) and "00002-of-00003" in str(error.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"has no config.json"):
        load_checkpoint(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text(json.dumps(values))
    (tmp_path / "empty" / "pytorch_model.bin").write_text("")
    with pytest.raises(CheckpointError, match="pytorch_model.bin.*not read"):
        load_checkpoint(tmp_path / "empty")


def test_an_index_that_lies(tmp_path, llama):
    values, _, tensors = llama
    folder = write_folder(tmp_path, values, tensors, shards=3)
    index = folder / "model.safetensors.index.json"
    record = json.loads(index.read_text())
    first, *_, second = record["weight_map"]
    record["weight_map"][first] = record["weight_map"][second]
    index.write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=re.escape(f"places there: {first}")):
        load_checkpoint(folder)
    index.write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_checkpoint(folder)


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty"])
def test_damaged_file(tmp_path, llama, damage):
    values, _, tensors = llama
    file = write_folder(tmp_path, values, tensors) / "model.safetensors"
    whole = file.read_bytes()
    parts = {"truncated": whole[:-100], "garbage": b"\xff" * 64, "empty": b""}
    file.write_bytes(parts[damage])
    with pytest.raises(CheckpointError, match="fetch it again"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_number_formats(tmp_path, llama, stored, wanted):
    values, _, tensors = llama
    kept = {name: tensor.astype(stored) for name, tensor in tensors.items()}
    found = load_checkpoint(write_folder(tmp_path, values, kept), wanted)
    for name, tensor in found.tensors.items():
        # Gains of norms and biases are no factors of a matmul.
        assert tensor.dtype.name == (wanted if tensor.ndim > 1 else "float32")
        np.testing.assert_array_equal(tensor, kept[name].astype(tensor.dtype))


def test_unsupported_number_formats(tmp_path, llama):
    values, _, tensors = llama
    with pytest.raises(CheckpointError, match="float16 overflows"):
        load_checkpoint(write_folder(tmp_path / "a", values, tensors), "float16")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)
    found = load_checkpoint(write_folder(tmp_path / "b", values, tensors))
    with pytest.raises(CheckpointError, match="number format I8"):
        found.tensors["model.norm.weight"]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_nan_and_infinity_are_named(dtype):
    tensors = {name: np.ones((2, 2), dtype) for name in ("fine", "nan", "inf")}
    tensors["nan"][0, 1] = np.nan
    tensors["inf"][1, 0] = -np.inf
    with pytest.raises(CheckpointError, match="2 of 3 .*: nan, inf"):
        check_finite(tensors)


def test_nan_is_found_when_a_tensor_is_read(tmp_path, llama):
    values, _, tensors = llama
    tensors["model.norm.weight"][3] = np.nan
    found = load_checkpoint(write_folder(tmp_path, values, tensors))
    with pytest.raises(CheckpointError, match="model.norm.weight"):
        found.tensors["model.norm.weight"]


def test_hash_tells_weights_apart(tmp_path, llama):
    values, _, tensors = llama
    load = load_checkpoint
    first = load(write_folder(tmp_path / "a", values, tensors)).content_hash
    again = load(write_folder(tmp_path / "b", values, tensors)).content_hash
    tuned = {name: tensor + 0.1 for name, tensor in tensors.items()}
    other = load(write_folder(tmp_path / "c", values, tuned)).content_hash
    assert first == again != other


def test_stop_tokens_of_the_generation_settings_win(tmp_path, llama):
    values, _, tensors = llama
    folder = write_folder(tmp_path, values, tensors)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert load_checkpoint(folder).stop_tokens == (7, 9)


def test_one_file_of_another_name(tmp_path, llama):
    values, config, tensors = llama
    folder = write_folder(tmp_path, values, tensors)
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "weights.safetensors")
    assert_same(load_checkpoint(folder), config, tensors)
