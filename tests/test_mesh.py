"""A target spread over a mesh says what it says on one device."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import jax
import numpy as np
import pytest

from jaxdec.models.sharding import check_mesh

HERE = pathlib.Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def result():
    """What `mesh_program.py` found, in a process with four devices."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(HERE / "mesh_program.py"), f"{folder}/model"],
            env={
                **os.environ,
                "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
                "PYTHONPATH": f"{HERE.parent}:{HERE}",
            },
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("shape", "name"),
    [("(2, 2)", "lookup"), ("(2, 2)", "self_draft"), ("(1, 4)", "sample")],
)
def test_same_tokens_as_on_one_device(result, shape, name):
    """Rows at temperature zero and above it, in one batch."""
    found = result[shape]["runs"][name]
    assert found == result["one"]
    assert all(len(set(tokens)) > 3 for tokens in found)


@pytest.mark.parametrize("name", ["eagle3_tree", "dspark"])
def test_trained_drafters_draft_the_same(result, name):
    """The same tokens, and as many of them accepted in every step."""
    one, many = result["trained"][name]
    assert one == many
    assert len(set(map(tuple, one[0]))) == 4
    assert len(set(one[0][1])) > 3  # A row that samples.


def test_arrays_are_where_they_should_be(result):
    """Split where it divides: two key/value heads over two devices, but not four."""
    halves, quarters = (result[shape]["places"] for shape in ("(2, 2)", "(1, 4)"))

    def parts(places):
        return {
            name: [whole // part for part, whole in zip(*shapes, strict=True)]
            for name, shapes in places.items()
        }

    # 259 tokens of vocabulary divide by nothing.
    assert parts(halves) == {
        "embedding": [1, 1],
        "qkv": [1, 2],
        "up": [1, 2],
        "down": [2, 1],
        "norm": [1],
        "cache": [2, 2, 1, 1],
        "tokens": [2, 1],
    }
    assert parts(quarters) == {
        "embedding": [1, 1],
        "qkv": [1, 1],
        "up": [1, 4],
        "down": [4, 1],
        "norm": [1],
        "cache": [1, 1, 1, 1],
        "tokens": [1, 1],
    }


def test_a_mixture_is_split_within_its_experts(result):
    assert result["mixture"] < 1e-5


def test_axes_have_names():
    devices = np.asarray(jax.devices()[:1]).reshape(1, 1)
    assert check_mesh(jax.sharding.Mesh(devices[0], ("model",))).shape == {"model": 1}
    with pytest.raises(ValueError, match=r"axes 'data' and 'model'.*'batch'"):
        check_mesh(jax.sharding.Mesh(devices, ("batch", "model")))
