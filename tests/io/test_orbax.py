"""Parameters through Orbax: exact, with their structure, checked leaf by leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.orbax import load_metadata, load_params, save_params


@pytest.fixture
def tree():
    keys = iter(jax.random.split(jax.random.key(0), 9))
    return {
        "layers": {
            i: {"kernel": jax.random.normal(next(keys), (3, 4), jnp.bfloat16)}
            for i in (0, 1, 10)
        },
        "stack": [jnp.arange(3), {"scale": jnp.float32(1) / 3}],
        "norm": jax.random.normal(next(keys), (5,)),
    }


def assert_equal(found, tree):
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        assert isinstance(mine, jax.Array) and mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)


def test_round_trip(tmp_path, tree):
    metadata = {"target": "abc", "taps": [1, 2], "nested": {"rate": 0.1}}
    save_params(tmp_path / "p", tree, metadata)
    found, read = load_params(tmp_path / "p")
    assert_equal(found, tree)
    assert read == metadata
    abstract = jax.eval_shape(lambda: tree)
    assert_equal(load_params(tmp_path / "p", abstract)[0], tree)
    as_tuple = tree | {"stack": tuple(tree["stack"])}
    assert_equal(load_params(tmp_path / "p", as_tuple)[0], as_tuple)


def test_a_folder_does_not_say_where_it_was_made(tmp_path, tree):
    save_params(tmp_path / "params", tree, {"a": 1})
    files = [x for x in (tmp_path / "params").rglob("*") if x.is_file()]
    assert files
    for file in files:
        assert str(tmp_path).encode() not in file.read_bytes(), file


def test_every_difference_is_listed(tmp_path, tree):
    save_params(tmp_path / "p", tree, {})
    template = jax.eval_shape(lambda: tree)
    del template["norm"]
    template["new"] = jax.ShapeDtypeStruct((2,), jnp.float32)
    template["stack"][0] = jax.ShapeDtypeStruct((4,), jnp.int32)
    template["layers"][10]["kernel"] = jax.ShapeDtypeStruct((3, 4), jnp.float32)
    with pytest.raises(CheckpointError) as error:
        load_params(tmp_path / "p", template)
    for part in (
        "missing: new",
        "unexpected: norm",
        "differs: stack/0 has ((3,), 'int32'), needs ((4,), 'int32')",
        "differs: layers/10/kernel",
    ):
        assert part in str(error.value)


def test_metadata_is_read_without_arrays(tmp_path, tree, monkeypatch):
    save_params(tmp_path / "p", tree, {"taps": [1, 2]})
    monkeypatch.setattr(ocp.args, "PyTreeRestore", None)
    assert load_metadata(tmp_path / "p") == {"taps": [1, 2]}
    (tmp_path / "empty").mkdir()
    for name, words in (("empty", "incomplete"), ("nothing", "is no folder")):
        with pytest.raises(CheckpointError, match=words):
            load_metadata(tmp_path / name)


def test_what_cannot_be_saved_or_found(tmp_path, tree):
    save_params(tmp_path / "p", tree, {"version": 1})
    with pytest.raises(CheckpointError, match="overwrite=True"):
        save_params(tmp_path / "p", tree, {})
    save_params(tmp_path / "p", {"one": jnp.ones(2)}, {"version": 2}, overwrite=True)
    found, metadata = load_params(tmp_path / "p")
    assert list(found) == ["one"] and metadata == {"version": 2}
    with pytest.raises(CheckpointError, match="nothing to save"):
        save_params(tmp_path / "q", {}, {})
    with pytest.raises(CheckpointError, match="the same path"):
        save_params(tmp_path / "q", {"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}}, {})
    with pytest.raises(CheckpointError, match="is no folder"):
        load_params(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="incomplete"):
        load_params(tmp_path / "empty")


def test_damage_on_disk_is_noticed(tmp_path, tree):
    """A changed byte in the data still restores; the weights would be others."""
    save_params(tmp_path / "p", {"norm": jnp.arange(4096.0)}, {})
    files = [f for f in (tmp_path / "p" / "arrays").rglob("*") if f.is_file()]
    data = max(files, key=lambda f: f.stat().st_size)
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    with pytest.raises(CheckpointError, match="not those that were saved|restored"):
        load_params(tmp_path / "p")
