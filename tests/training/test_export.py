"""Every drafter goes out in published formats, and comes back saying the same."""

import dataclasses
import json

import helpers_tiny
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdec
from jaxdec.io.checkpoint import CheckpointError
from jaxdec.loaded_drafter import save_drafter
from jaxdec.training import kinds
from jaxdec.training.recipe import (
    DflashRecipe,
    DraftRecipe,
    DsparkRecipe,
    Eagle3Recipe,
    MtpRecipe,
)
from jaxdec.training.session import as_drafter
from jaxdec.training.store import Record, read_store, write_shard

CASES = {
    "eagle3": (Eagle3Recipe(vocabulary=100, taps=(0, 1, 2)), None),
    "eagle3 full": (
        Eagle3Recipe(vocabulary=999, taps=(1, 2), norm_each_tap=False, num_layers=2),
        "speculators",
    ),
    "mtp": (MtpRecipe(vocabulary=50), "speculators"),
    "mtp verifier": (MtpRecipe(vocabulary=50), None),
    "dflash": (DflashRecipe(vocabulary=999, taps=(1,), block_size=4), None),
    "dflash tap 0": (
        DflashRecipe(vocabulary=999, taps=(0, 2), block_size=4),
        "speculators",
    ),
    "dflash speculators": (
        DflashRecipe(vocabulary=50, taps=(0, 2), block_size=4),
        "speculators",
    ),
    "dspark": (
        DsparkRecipe(vocabulary=100, taps=(1, 2), block_size=4, markov_rank=8),
        None,
    ),
    "dspark gated": (
        DsparkRecipe(
            vocabulary=100,
            taps=(1, 2),
            block_size=4,
            markov_rank=8,
            markov="gated",
            sees_previous=False,
        ),
        None,
    ),
    "dspark deepspec": (
        DsparkRecipe(
            vocabulary=999, taps=(1,), block_size=4, markov_rank=8, markov="rnn"
        ),
        "deepspec",
    ),
    "draft": (DraftRecipe(vocabulary=50, from_layers=(1,)), None),
}


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    folder = helpers_tiny.write_model(tmp_path_factory.mktemp("target") / "model")
    return jaxdec.load(folder, dtype="float32")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    rng = np.random.default_rng(0)
    write_shard(
        folder,
        [
            Record(
                prompt=[1, 2],
                answer=rng.integers(0, 255, 30).tolist(),
                is_validation=i > 4,
            )
            for i in range(6)
        ],
    )
    return read_store(folder)


@pytest.fixture(params=CASES)
def case(request, lm, store):
    """A drafter whose arrays are all different from how they begin, and a format."""
    recipe, format = CASES[request.param]
    objective = kinds.make_objective(recipe, lm, store)
    own = objective.init(jax.random.key(1))
    rng = np.random.default_rng(2)

    def shaken(path, x):
        is_fixed = path[0].key in ("head", "vocabulary")
        if is_fixed or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return x + jnp.asarray(rng.normal(size=x.shape, scale=0.1), x.dtype)

    own = jax.tree_util.tree_map_with_path(shaken, own)
    return as_drafter(objective, own, lm, "made"), format


def same(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_what_is_written_is_what_comes_back(case, lm, tmp_path):
    drafter, format = case
    written = jaxdec.export_drafter(tmp_path / "out", drafter, lm, format=format)
    if written == "model":
        other = jaxdec.load(tmp_path / "out", dtype="float32")
        tables = {"embedding": lm.params["embedding"]}
        same(drafter.own | tables, other.params)
        assert other.stop_tokens == lm.stop_tokens
        assert dataclasses.replace(other.config, family="") == dataclasses.replace(
            drafter.config, family=""
        )
        return
    if written == "verifier":
        target = jaxdec.load(tmp_path / "out", dtype="float32")
        same(lm.params, target.params)
        assert target.config == lm.config
        back = target.strategies["mtp"].draft
    else:
        back = jaxdec.load_drafter(tmp_path / "out", lm)
        assert back.draft_length == drafter.draft_length
    own = dict(drafter.own)
    if drafter.family == "mtp":
        # Files of MTP modules have no smaller vocabulary, so they say all tokens.
        head, ids = own.pop("head"), own.pop("vocabulary")["target_ids"]
        np.testing.assert_array_equal(head, lm.params["embedding"][ids])
    same(own, back.own)
    assert back.kind == drafter.kind
    found = back.config
    if drafter.family in ("eagle", "block"):
        rest = dataclasses.replace(found, layers=drafter.config.layers)
        if drafter.family == "block":  # It has no windows to count from anywhere.
            rest = dataclasses.replace(rest, window_from=drafter.config.window_from)
        assert rest == drafter.config
    layers = "block" if drafter.family == "mtp" else "layers"
    ours, theirs = (getattr(x, layers) for x in (drafter.config, found))
    for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "ropes"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert (ours.norm_eps, ours.qk_norm) == (theirs.norm_eps, theirs.qk_norm)
    if drafter.kind != "dspark" or format is not None or back.config.markov == "gated":
        return
    # So it says the very same.
    outputs = [
        jaxdec.generate(
            lm,
            "abc abc",
            strategy=jaxdec.trained(x),
            max_new_tokens=12,
            temperature=1.0,
        )
        for x in (drafter, back)
    ]
    np.testing.assert_array_equal(*[o.run.info.draft_tokens for o in outputs])
    np.testing.assert_array_equal(*[o.run.info.draft_confidence for o in outputs])


def test_its_own_format_comes_back_in_either_dtype(case, lm, tmp_path):
    drafter, _ = case
    save_drafter(tmp_path / "own", drafter, lm, card={"a": 1})
    back = jaxdec.load_drafter(tmp_path / "own", lm)
    same(drafter.own, back.own)
    assert back.config == drafter.config and back.card["a"] == 1
    assert back.kind == drafter.kind and back.draft_length == drafter.draft_length
    half = jaxdec.load(lm.name, dtype="bfloat16")
    other = jaxdec.load_drafter(tmp_path / "own", half)
    assert other.num_params == back.num_params
    with pytest.raises(CheckpointError, match="leaves nothing open"):
        jaxdec.load_drafter(tmp_path / "own", lm, taps=[1])
    small = dataclasses.replace(lm.config, hidden_size=16)
    wrong = dataclasses.replace(lm, config=small)
    with pytest.raises(CheckpointError, match="another|hidden_size 32"):
        jaxdec.load_drafter(tmp_path / "own", wrong)


def test_temperatures_lie_beside_the_weights(lm, store, tmp_path):
    recipe, _ = CASES["dspark"]
    objective = kinds.make_objective(recipe, lm, store)
    drafter = as_drafter(objective, objective.init(jax.random.key(0)), lm)
    hot = (2.0, 1.0, 0.5, 3.0)
    config = dataclasses.replace(drafter.config, temperatures=hot)
    warm = dataclasses.replace(drafter, config=config)
    jaxdec.export_drafter(tmp_path / "out", warm, lm)
    back = jaxdec.load_drafter(tmp_path / "out", lm)
    assert back.config.temperatures == hot
    runs = [
        jaxdec.generate(lm, "ab", strategy=jaxdec.trained(x), max_new_tokens=6).run
        for x in (drafter, back)
    ]
    plain, scaled = (r.info.draft_confidence[0, 1] for r in runs)
    odds = np.log(plain) - np.log1p(-plain)
    np.testing.assert_allclose(scaled, 1 / (1 + np.exp(-odds / hot)), rtol=1e-4)
    path = tmp_path / "out" / "calibration.json"
    path.write_text(json.dumps({"temperatures": [1.0]}))
    with pytest.raises(CheckpointError, match="has 1 temperatures"):
        jaxdec.load_drafter(tmp_path / "out", lm)


@pytest.mark.parametrize(
    ("name", "format", "message"),
    [
        ("dspark", "zlab", "z-lab's DFlash"),
        ("dspark", "deepspec", "say all of the target's"),
        ("dflash speculators", "zlab", "says all of the target's"),
        ("dflash tap 0", "zlab", "tap 0"),
        ("eagle3", "zlab", "written as speculators"),
        ("draft", "speculators", "cannot be written as"),
        ("eagle3", "verifier", "no part of a target"),
    ],
)
def test_a_format_that_cannot_say_it_is_refused(
    name, format, message, lm, store, tmp_path
):
    objective = kinds.make_objective(CASES[name][0], lm, store)
    drafter = as_drafter(objective, objective.init(jax.random.key(0)), lm)
    with pytest.raises(CheckpointError, match=message):
        jaxdec.export_drafter(tmp_path / "out", drafter, lm, format=format)
    assert not (tmp_path / "out" / "model.safetensors").exists()
