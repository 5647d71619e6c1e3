"""Files of EAGLE drafters: what is read, what is refused, and in which words."""

import dataclasses
import functools
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.drafters.eagle import read_eagle, recognise
from jaxdec.io.drafters.read import open_drafter
from jaxdec.io.drafters.sharing import share_with_target
from jaxdec.io.hf_config import config_from_hf
from jaxdec.io.safetensors import open_stored, read_json
from jaxdec.io.torch_files import read_torch_file
from jaxdec.models.vocabulary import target_ids_of

CASES = Path(__file__).parents[1] / "golden" / "cases"
STORED = ("F32", "I64", "BOOL")
MTP = ("qwen3_5_module", "speculators_qwen3")
IDS = "eagle_aux_hidden_state_layer_ids"


@functools.cache
def _stored(name):
    folder = CASES / ("mtp" if name in MTP else "drafters") / name
    paired = read_json(folder / "case.json").get("pairs_with") or "nothing"
    target = None
    if (CASES / paired / "config.json").exists():
        target = config_from_hf(read_json(CASES / paired / "config.json"))
    tensors = open_stored(folder, STORED)
    return (
        (folder / "config.json").read_text(encoding="utf-8"),
        {k: tensors[k] for k in tensors},
        target,
    )


def case(name):
    """Copies of a case's settings and tensors, to be changed; and its target."""
    text, tensors, target = _stored(name)
    return json.loads(text), dict(tensors), target


def read(name, *, change=None, tensors=None, drop=(), **overrides):
    """A case, with settings and tensors changed before it is read."""
    values, stored, target = case(name)
    values |= change or {}
    stored |= tensors or {}
    stored = {k: v for k, v in stored.items() if k not in drop}
    return read_eagle(values, stored, target, overrides)


def refused(words, name, **kwargs):
    with pytest.raises(CheckpointError, match=words):
        read(name, **kwargs)


# ---- Formats -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("eagle1_bias", "SafeAILab EAGLE-1/2"),
        ("eagle3", "SafeAILab EAGLE-3"),
        ("deepspec_eagle3", "DeepSpec EAGLE-3"),
        ("spec_eagle31", "speculators EAGLE-3"),
        ("spec_peagle", "speculators P-EAGLE"),
        ("deepspec_dflash", None),
        ("deepspec_dspark_rnn", None),
        ("spec_dflash", None),
        ("zlab_dflash", None),
        ("qwen3_5_module", None),
        ("speculators_qwen3", None),
    ],
)
def test_formats_are_told_apart(name, expected):
    values, tensors, _ = case(name)
    assert recognise(values, {k: x.shape for k, x in tensors.items()}) == expected


def test_no_eagle_drafter():
    values, tensors, target = case("zlab_dflash")
    with pytest.raises(CheckpointError, match="no EAGLE drafter"):
        read_eagle(values, tensors, target)
    assert recognise({"model_type": "llama"}, {"lm_head.weight": (3, 2)}) is None


def test_a_leading_model_is_stripped_and_copies_of_the_verifier_ignored():
    values, tensors, target = case("spec_eagle3_nbr")
    renamed = {f"model.{name}": x for name, x in tensors.items()}
    renamed["verifier_lm_head.weight"] = np.full((3, 3), np.nan, np.float32)
    found = read_eagle(values, renamed, target)
    assert found.config == read("spec_eagle3_nbr").config
    renamed["norm.weight"] = renamed["model.norm.weight"]
    with pytest.raises(CheckpointError, match="are both 'norm.weight'"):
        read_eagle(values, renamed, target)


def test_gemma_is_refused():
    change = {"architectures": ["Gemma4Eagle3Model"], "model_type": "gemma4_text"}
    refused("for 'gemma4_text' are not", "deepspec_eagle3", change=change)


# ---- Taps: one name, two meanings (B35) ----------------------------------------------


def specforge(**change):
    return {"architectures": ["LlamaForCausalLMEagle3"], **change}


@pytest.mark.parametrize(
    ("change", "taps"),
    [
        ({}, (2, 4, 5)),
        (specforge(), (2, 4, 5)),
        (specforge(**{IDS: [1, 3, 8]}), (1, 3, 8)),
        (specforge(eagle_config={IDS: [0, 3, 7]}), (1, 4, 8)),
        (specforge(eagle_config={IDS: [], "use_aux_hidden_state": True}), (2, 4, 5)),
    ],
)
def test_ids_inside_eagle_config_name_outputs(change, taps):
    assert read("eagle3", change=change).config.taps == taps


@pytest.mark.parametrize(
    ("name", "field", "ids", "taps"),
    [
        ("deepspec_eagle3", "target_layer_ids", [0, 2, 4, 6, 9], (1, 3, 5, 7, 10)),
        ("spec_eagle3_nbr", IDS, [0, 3, 8], (0, 3, 8)),
        ("spec_eagle3_nbr", IDS, None, (2, 4, 5)),
    ],
)
def test_ids_of_other_formats(name, field, ids, taps):
    assert read(name, change={field: ids}).config.taps == taps


def test_ids_that_cannot_be():
    refused("taps 0 to 8, so .9. are out", "spec_eagle3_nbr", change={IDS: [2, 4, 9]})
    refused("are out of range", "spec_eagle3_nbr", change={IDS: [2, 4, -1]})
    ids = {"target_layer_ids": [0, 2, 4, 6, 10]}
    refused("so .11. are out of range", "deepspec_eagle3", change=ids)
    refused("must be a list", "spec_eagle3_nbr", change={IDS: "2,4,5"})
    refused("pass taps", "deepspec_eagle3", change={"target_layer_ids": None})
    both = specforge(eagle_config={IDS: [1, 3, 4]}, **{IDS: [2, 4, 5]})
    refused("means something else", "eagle3", change=both)
    # The first matrix says how many taps there are.
    refused(r"fc.weight: has \[32, 96\]", "spec_eagle3_nbr", change={IDS: [2, 4]})
    assert read("spec_eagle3_nbr", taps=[1, 2, 3]).config.taps == (1, 2, 3)


# ---- Settings ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["eagle1_bias", "eagle3", "deepspec_eagle3", "spec_eagle3_nbr"]
)
def test_unknown_settings_are_named(name):
    refused("shiny_option=3", name, change={"shiny_option": 3})
    assert read(name, change={"shiny_option": None, "transformers_version": "9"})


def test_unknown_settings_inside_are_named():
    values, tensors, target = case("spec_eagle3_nbr")
    values["transformer_layer_config"]["shiny_option"] = 3
    with pytest.raises(CheckpointError, match="the drafter: .* shiny_option=3"):
        read_eagle(values, tensors, target)
    nested = specforge(eagle_config={"use_mtp_layernorm": True})
    refused("use_mtp_layernorm=True", "eagle3", change=nested)


def test_choices_are_written_down_and_overridden_by_name():
    found = read("spec_eagle3_nbr", change={"norm_before_residual": None})
    assert not found.config.norm_before_residual
    assert found.facts["choices"]["norm_before_residual"] == (
        "not given, taken as false; override with norm_before_residual=..."
    )
    found = read("eagle3", norm_before_residual=True, max_positions=99)
    assert found.config.norm_before_residual
    assert found.config.layers.max_positions == found.facts["context"] == 99
    assert read("eagle3", rope_theta=5e5).config.layers.ropes[0].theta == 5e5
    assert read("eagle1_bias").config.fusion_bias
    assert "taken as true" in read("eagle1_bias").facts["choices"]["bias"]
    refused("no settings sample_from_anchor", "eagle3", sample_from_anchor=True)
    refused("no settings taps", "eagle1_bias", taps=[1])
    refused("must be true or false", "eagle3", norm_before_residual="yes")
    refused("rope_theta must be a positive", "eagle3", rope_theta=-1)
    refused("'max_positions' must be a whole", "eagle3", max_positions=0)
    json.dumps(found.facts)


def test_draft_lengths_are_the_authors():
    assert read("spec_eagle31").config.draft_length == 4
    assert read("deepspec_eagle3").config.draft_length == 6
    assert read("spec_peagle").config.draft_length == 5
    found = read("eagle3")
    assert found.config.draft_length == 5
    assert found.facts["choices"]["draft length"] == "not given, taken as 5"


def test_scaled_rotations_of_the_original_format():
    """Its own code forgets rope_theta where it scales."""
    change = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (rope,) = read("eagle3", change=change).config.layers.ropes
    assert (rope.theta, rope.kind, rope.factor) == (10000.0, "linear", 2.0)
    change["rope_scaling"] = {"type": "dynamic", "factor": 2.0}
    (rope,) = read("eagle1_bias", change=change).config.layers.ropes
    assert (rope.theta, rope.kind) == (10000.0, "default")
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    refused("knows no rope scaling", "eagle3", change={"rope_scaling": llama3})
    change = specforge(rope_theta=5e5, rope_scaling=llama3)
    (rope,) = read("eagle3", change=change).config.layers.ropes
    assert (rope.theta, rope.kind) == (5e5, "llama3")
    # Both spellings of the same thing.
    values, tensors, target = case("eagle3")
    del values["rope_theta"]
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": 77.0}
    assert read_eagle(values, tensors, target).config.layers.ropes[0].theta == 77.0
    del values["rope_parameters"]
    assert read_eagle(values, tensors, target).config.layers.ropes[0].theta == 1e4


def test_a_configuration_copied_from_a_target():
    """EAGLE's own code reads all settings as Llama's, and knows no windows."""
    change = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }
    changed = read("eagle1_qkvbias", change=change).config
    assert changed == read("eagle1_qkvbias").config


def test_layers_of_speculators():
    def layers(drop=(), **change):
        values, tensors, target = case("spec_eagle31")
        inner = values["transformer_layer_config"] | change
        values["transformer_layer_config"] = {
            k: v for k, v in inner.items() if k not in drop
        }
        return read_eagle(values, tensors, target)

    kinds = ["sliding_attention", "full_attention"]
    found = layers(layer_types=kinds, sliding_window=7, use_sliding_window=True)
    assert found.config.layers.layer_windows == (7, None)
    with pytest.raises(CheckpointError, match="sliding_window is None"):
        layers(layer_types=kinds)
    with pytest.raises(CheckpointError, match="layer_types must give"):
        layers(layer_types=["full_attention"])
    found = layers(drop=["model_type"])
    assert found.config.layers.qk_norm
    assert "model_type=qwen3" in found.facts["choices"]["layers"]
    with pytest.raises(CheckpointError, match="model_type 'mamba' are not"):
        layers(model_type="mamba")
    by_kind = {
        "full_attention": {"rope_type": "default", "rope_theta": 3.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 4.0},
    }
    assert layers(rope_parameters=by_kind).config.layers.ropes[0].theta == 4.0


def test_mask_tokens_of_parallel_drafters():
    assert read("spec_peagle").config.mask_token == 159
    aliases = {"mask_token_id": None, "ptd_token_id": 5}
    assert read("spec_peagle", change=aliases).config.mask_token == 5
    assert read("spec_peagle", mask_token=3).config.mask_token == 3
    refused("pass mask_token", "spec_peagle", change={"mask_token_id": None})
    refused("outside the embedding's 160", "spec_peagle", change={"mask_token_id": 160})
    # AWS writes the same tensors beside an EAGLE-3 configuration.
    values, tensors, target = case("spec_peagle")
    flat = values["transformer_layer_config"] | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 120,
        "ptd_token_id": 159,
        IDS: [2, 4, 5],
    }
    tensors["mask_hidden"] = tensors["mask_hidden"][0]
    found = read_eagle(flat, tensors, target)
    assert found.format == "P-EAGLE" and found.config.is_parallel
    assert found.config.layers == read("spec_peagle").config.layers


def test_norms_that_exclude_one_another():
    change = {"norm_before_fc": True, "fc_norm": True}
    refused("exclude one another", "spec_eagle31", change=change)


# ---- Tensors -------------------------------------------------------------------------


def test_all_faults_of_the_tensors_at_once():
    with pytest.raises(CheckpointError) as error:
        read(
            "spec_eagle31",
            drop=["fc_norm.1.weight", "layers.1.mlp.up_proj.weight"],
            tensors={
                "stray.weight": np.zeros(3, np.float32),
                "norm.weight": np.zeros(31, np.float32),
                "lm_head.weight": np.zeros((112, 32), np.int32),
            },
        )
    for words in (
        "missing (2):\n    fc_norm.1.weight\n    layers.1.mlp.up_proj.weight",
        "unexpected (1):\n    stray.weight",
        "norm.weight: has [31], needs [32]",
        "lm_head.weight: int32",
    ):
        assert words in str(error.value)


def test_nan_is_named():
    """Converters leave NaN where they had nothing to write."""
    table = np.full((160, 32), np.nan, np.float32)
    tensors = {"embed_tokens.weight": table}
    refused("embed_tokens.weight", "spec_eagle3_nbr", tensors=tensors)


def test_pairing_with_the_target():
    values, tensors, _ = case("spec_eagle3_nbr")
    _, _, other = case("spec_eagle3_qwen3")
    with pytest.raises(CheckpointError, match="160 tokens and the target has 168"):
        read_eagle(values, tensors, other)
    values, tensors, target = case("eagle3")
    wider = dataclasses.replace(target, hidden_size=48)
    with pytest.raises(CheckpointError, match="width 32 and the target's are 48"):
        read_eagle(values, tensors, wider)
    with pytest.raises(CheckpointError, match="no embedding of its own"):
        read_eagle(values | {"target_hidden_size": 48}, tensors, wider)
    tensors["fc.weight"] = np.ones((32, 3 * 48), np.float32)
    tensors["embed_tokens.weight"] = np.ones((160, 32), np.float32)
    found = read_eagle(values | {"target_hidden_size": 48}, tensors, wider)
    assert found.config.target_hidden_size == 48
    deeper = {"num_target_layers": 12}
    refused("num_target_layers is 12", "deepspec_eagle3", change=deeper)


# ---- The map between vocabularies (B37) ----------------------------------------------


def small(d2t, t2d=None, vocab_size=16):
    """A drafter of four tokens for a target of sixteen, with this map."""
    values, tensors, target = case("spec_eagle3_nbr")
    size = len(d2t)
    target = dataclasses.replace(target, vocab_size=vocab_size)
    inner = values["transformer_layer_config"] | {"vocab_size": vocab_size}
    values |= {"draft_vocab_size": size, "transformer_layer_config": inner}
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"][:vocab_size]
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:size]
    tensors["d2t"] = np.asarray(d2t, np.int64)
    del tensors["t2d"]
    if t2d is not None:
        tensors["t2d"] = np.isin(np.arange(vocab_size), t2d)
    return read_eagle(values, tensors, target)


def test_d2t_holds_offsets():
    found = small([1, 2, 2, 6], [1, 3, 4, 9])
    assert target_ids_of(found.tensors["d2t"]).tolist() == [1, 3, 4, 9]
    assert "t2d" not in found.tensors
    assert target_ids_of(small([1, 2, 2, 6]).tensors["d2t"]).tolist() == [1, 3, 4, 9]


@pytest.mark.parametrize(
    ("d2t", "t2d", "words"),
    [
        ([1, 3, 4, 9], [1, 3, 4, 9], "if d2t holds the ids themselves"),
        ([1, 3, 4, 9], None, "increases at every step, as the ids themselves"),
        ([1, 3, 4, 14], [1, 3, 4, 14], "look like the ids themselves"),
        ([0, 0, 0, 0], [1, 3, 4, 9], "are not the same"),
        ([0, 0, 0, 0], None, "is all zero"),
        ([1, 2, 2, 6], [1, 3, 4], "t2d marks 3 of 16"),
        ([1, -2, 2, 6], None, "must hold offsets"),
        ([1, 2, 2, 16], None, "must hold offsets"),
    ],
)
def test_maps_that_mean_something_else(d2t, t2d, words):
    with pytest.raises(CheckpointError, match=words):
        small(d2t, t2d)


def test_maps_that_change_nothing():
    assert small([0, 0, 0, 0], [0, 1, 2, 3]).config.is_reduced
    assert not small([0] * 16, range(16)).config.is_reduced
    with pytest.raises(CheckpointError, match="as large as the target's"):
        small([0] * 15 + [1], range(16))
    with pytest.raises(CheckpointError, match="holds float32"):
        read("eagle3", tensors={"d2t": np.zeros(96, np.float32)})
    refused(r"missing \(1\):\n    d2t", "eagle3", drop=["d2t"])


# ---- What is the target's ------------------------------------------------------------


def arrays(rows, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, 32)).astype(np.float32)


def test_copies_of_the_targets_arrays_are_dropped():
    embedding, head = arrays(168), arrays(168, 1)
    params = {"embedding": embedding, "head": {"weight": head}}
    copies = {"embed_tokens.weight": embedding, "lm_head.weight": head}
    found = share_with_target(read("deepspec_eagle3", tensors=copies), params)
    assert not found.config.own_embedding and not found.config.own_head
    assert not set(copies) & set(found.tensors)
    assert found.facts["head"] == "the target's"
    other = copies | {"lm_head.weight": head + 1e-3}
    found = share_with_target(read("deepspec_eagle3", tensors=other), params)
    assert found.config.own_head and found.facts["head"] == "its own"
    tied = {"embedding": embedding}
    both = {"embed_tokens.weight": embedding, "lm_head.weight": embedding}
    found = share_with_target(read("deepspec_eagle3", tensors=both), tied)
    assert not found.config.own_head


def test_a_missing_reduced_head_is_the_targets_rows():
    embedding, head = arrays(160), arrays(160, 1)
    found = read("spec_eagle3_nbr", drop=["lm_head.weight", "embed_tokens.weight"])
    assert not found.config.own_head
    params = {"embedding": embedding, "head": {"weight": head}}
    found = share_with_target(found, params)
    ids = target_ids_of(found.tensors["d2t"])
    np.testing.assert_array_equal(found.tensors["lm_head.weight"], head[ids])
    assert found.config.own_head and not found.config.own_embedding


# ---- Pickled files -------------------------------------------------------------------


def test_pickled_files_need_torch(tmp_path, monkeypatch):
    path = tmp_path / "pytorch_model.bin"
    with pytest.raises(CheckpointError, match="does not exist"):
        read_torch_file(path)
    path.write_bytes(b"\x80\x02}q\x00.")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CheckpointError, match="not installed; install it, or convert"):
        read_torch_file(path)


def test_pickled_files(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "pytorch_model.bin"
    values, tensors, target = case("eagle3")
    torch.save({k: torch.from_numpy(x.copy()) for k, x in tensors.items()}, path)
    found = read_torch_file(path)
    for name, x in tensors.items():
        np.testing.assert_array_equal(found[name], x)
        assert found[name].dtype == x.dtype
    assert read_eagle(values, found, target).config == read("eagle3").config
    torch.save({"x": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}, path)
    assert read_torch_file(path)["x"].astype(np.float32).tolist() == [1.5, -2.0]
    torch.save({"x": 3}, path)
    with pytest.raises(CheckpointError, match="something else than named tensors"):
        read_torch_file(path)
    torch.save({"x": Path("/nowhere")}, path)
    with pytest.raises(CheckpointError, match="cannot be read as tensors only"):
        read_torch_file(path)
    path.write_bytes(b"no pickle")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_torch_file(path)


def test_a_pickled_drafter_is_found_by_the_front_door(tmp_path, monkeypatch):
    """Only reading such a file needs PyTorch; finding it does not."""
    folder = tmp_path / "drafter"
    folder.mkdir()
    shutil.copy(CASES / "drafters" / "eagle3" / "config.json", folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    tensors = load_file(CASES / "drafters" / "eagle3" / "model.safetensors")
    monkeypatch.setattr("jaxdec.io.drafters.read.read_torch_file", lambda path: tensors)
    found = open_drafter(folder)
    assert (found.family, found.format) == ("eagle", "SafeAILab EAGLE-3")
    assert set(found.tensors) == set(tensors)
