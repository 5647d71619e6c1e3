"""GGUF files: the same tensors as safetensors, whatever the row order; damage."""

import dataclasses

import numpy as np
import pytest
from conftest import LLAMA, interleave, random_tensors, write_gguf

from jaxdec.io.checkpoint import CheckpointError, expected_tensors
from jaxdec.io.gguf import load_gguf, restore_rows
from jaxdec.io.hf_config import config_from_hf
from jaxdec.models.config import RopeConfig

F32 = np.dtype(np.float32)


def variant(arch):
    """A tiny model of an architecture, with its weights."""
    values = LLAMA | {"model_type": arch, "architectures": None}
    if arch == "qwen3":
        values["head_dim"] = 32
    config = config_from_hf(values)
    return config, random_tensors(config)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_equals_the_original(tmp_path, arch, kind):
    config, tensors = variant(arch)
    file = write_gguf(tmp_path / "m.gguf", config, tensors, arch=arch, kind=kind)
    found = load_gguf(file, F32)
    assert found.config == config
    assert list(found.tensors) == list(expected_tensors(config))
    cosine = {}
    for name, tensor in found.tensors.items():
        original = tensors[name]
        assert tensor.shape == original.shape and tensor.dtype == np.float32
        scale = np.linalg.norm(tensor) * np.linalg.norm(original)
        cosine[name] = float((tensor * original).sum() / scale)
        if kind != "Q8_0":
            tolerance = {"F32": 0.0, "F16": 1e-3, "BF16": 8e-3}[kind]
            np.testing.assert_allclose(tensor, original, rtol=tolerance, atol=1e-7)
    assert min(cosine.values()) > 0.999, cosine
    assert found.stop_tokens == (2, 0)
    assert found.format == "gguf" and len(found.content_hash) == 64


def test_rows_are_restored_per_head():
    rows = np.arange(24.0).reshape(12, 2)
    assert not np.array_equal(interleave(rows, 3), rows)
    np.testing.assert_array_equal(restore_rows(interleave(rows, 3), 3), rows)
    np.testing.assert_array_equal(
        restore_rows(interleave(rows[:, 0], 1), 1), rows[:, 0]
    )


def test_a_file_without_head_is_tied(tmp_path, llama):
    _, config, tensors = llama
    del tensors["lm_head.weight"]
    found = load_gguf(write_gguf(tmp_path / "m.gguf", config, tensors), F32)
    assert found.config == dataclasses.replace(config, tie_embeddings=True)


def test_rope_factors(tmp_path, llama):
    _, config, tensors = llama
    factors = np.linspace(1, 8, config.head_dim // 2).astype(np.float32)
    extra = {"rope_freqs.weight": factors}
    found = load_gguf(
        write_gguf(tmp_path / "m.gguf", config, tensors, extra=extra), F32
    )
    expected = tuple(float(factor) for factor in factors)
    assert found.config.ropes == (RopeConfig(kind="factors", factors=expected),)
    extra = {"rope_freqs.weight": factors[:3]}
    with pytest.raises(CheckpointError, match="3 values"):
        load_gguf(write_gguf(tmp_path / "n.gguf", config, tensors, extra=extra), F32)


def test_rope_scaling(tmp_path, llama):
    _, config, tensors = llama
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
    }
    found = load_gguf(
        write_gguf(tmp_path / "m.gguf", config, tensors, metadata=yarn), F32
    )
    rope = RopeConfig(kind="yarn", factor=4.0, original_max_positions=32)
    assert found.config.ropes == (rope,)
    foo = yarn | {"llama.rope.scaling.type": "foo"}
    with pytest.raises(CheckpointError, match="'foo' is not supported"):
        load_gguf(write_gguf(tmp_path / "n.gguf", config, tensors, metadata=foo), F32)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count=8"),
        ({"llama.attention.scale": 0.5}, "llama.attention.scale=0.5"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"llama.attention.key_length": 24}, "all three agree"),
    ],
)
def test_settings_are_not_ignored(tmp_path, llama, metadata, message):
    _, config, tensors = llama
    file = write_gguf(tmp_path / "m.gguf", config, tensors, metadata=metadata)
    with pytest.raises(CheckpointError, match=message):
        load_gguf(file, F32)


def test_unknown_architecture_and_tensors(tmp_path, llama):
    _, config, tensors = llama
    with pytest.raises(CheckpointError, match="'mamba' is not supported"):
        load_gguf(write_gguf(tmp_path / "a.gguf", config, tensors, arch="mamba"), F32)
    extra = {"blk.0.surprise.weight": np.ones((2, 32), np.float32)}
    del tensors["model.norm.weight"]
    with pytest.raises(CheckpointError) as error:
        load_gguf(write_gguf(tmp_path / "b.gguf", config, tensors, extra=extra), F32)
    assert "blk.0.surprise.weight" in str(error.value)
    assert "model.norm.weight" in str(error.value)


@pytest.mark.parametrize("at", [0.0, 0.001, 0.01, 0.02, 0.05, 0.5, 0.999])
def test_truncated(tmp_path, llama, at):
    _, config, tensors = llama
    whole = write_gguf(tmp_path / "m.gguf", config, tensors).read_bytes()
    file = tmp_path / "part.gguf"
    file.write_bytes(whole[: int(len(whole) * at)])
    with pytest.raises(CheckpointError, match="part.gguf cannot be read as GGUF"):
        load_gguf(file, F32)


def test_damaged(tmp_path, llama):
    _, config, tensors = llama
    whole = write_gguf(tmp_path / "m.gguf", config, tensors).read_bytes()
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"XXXX" + whole[4:])
    with pytest.raises(CheckpointError, match="magic"):
        load_gguf(file, F32)
    rng = np.random.default_rng(0)
    for _ in range(20):
        # Any byte of the header: either it does no harm, or the error is a clear one.
        broken = bytearray(whole)
        for place in rng.integers(24, 6000, size=4):
            broken[place] ^= 0xFF
        file.write_bytes(broken)
        try:
            dict(load_gguf(file, F32).tensors)
        except CheckpointError:
            pass


def test_unknown_number_format(tmp_path, llama):
    _, config, tensors = llama
    whole = write_gguf(tmp_path / "m.gguf", config, tensors).read_bytes()
    name = b"blk.0.ffn_up.weight"
    # After the name: number of dimensions, two dimensions, then the format.
    place = whole.index(name) + len(name) + 4 + 16
    for code, match in ((200, "not a valid GGMLQuantizationType"), (28, "F64|reshape")):
        changed = whole[:place] + code.to_bytes(4, "little") + whole[place + 4 :]
        file = tmp_path / f"{code}.gguf"
        file.write_bytes(changed)
        with pytest.raises(CheckpointError, match=match):
            dict(load_gguf(file, F32).tensors)


def test_nan_in_a_file(tmp_path, llama):
    _, config, tensors = llama
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = np.nan
    found = load_gguf(write_gguf(tmp_path / "m.gguf", config, tensors), F32)
    with pytest.raises(CheckpointError, match="layers.1.mlp.up_proj"):
        dict(found.tensors)


def test_a_file_without_vocabulary(tmp_path, llama):
    _, config, tensors = llama
    file = write_gguf(tmp_path / "m.gguf", config, tensors, tokenizer=False)
    found = load_gguf(file, F32)
    assert found.tokenizer is None and found.stop_tokens == ()
