"""Published block drafters: what is read, what is filled in, and what is refused."""

import copy
import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.drafters.block import read_block, recognise
from jaxdec.io.drafters.sharing import share_with_target
from jaxdec.models.block import split_block_network
from jaxdec.models.block_weights import (
    block_params_from_tensors,
    expected_block_tensors,
)
from jaxdec.models.config import ModelConfig
from jaxdec.models.decoder import init_params

TARGET = ModelConfig(
    family="qwen3",
    vocab_size=16,
    hidden_size=8,
    intermediate_size=12,
    num_layers=10,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_positions=64,
    qk_norm=True,
)
LAYERS = {
    "model_type": "qwen3",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
}
ZLAB = LAYERS | {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 4,
    "num_target_layers": 10,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "torch_dtype": "float32",
    "tie_word_embeddings": True,
    "dflash_config": {"mask_token_id": 15, "target_layer_ids": [1, 4]},
}
DEEPSPEC = LAYERS | {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 3,
    "num_target_layers": 10,
    "num_anchors": 512,
    "target_layer_ids": [-1, 8],
    "mask_token_id": 15,
    "markov_rank": 2,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "dtype": "float32",
    "tie_word_embeddings": False,
}
SPECULATORS = {
    "architectures": ["DSparkDraftModel"],
    "speculators_model_type": "dspark",
    "speculators_version": "0.9.0",
    "speculators_config": {
        "algorithm": "dspark",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
    },
    "aux_hidden_state_layer_ids": [2, 10],
    "block_size": 4,
    "draft_vocab_size": 4,
    "mask_token_id": 15,
    "sample_from_anchor": True,
    "markov_rank": 2,
    "markov_head_type": "gated",
    "enable_confidence_head": True,
    "confidence_head_with_markov": False,
    "target_hidden_size": None,
    "transformer_layer_config": LAYERS,
}
DFLASH = {k: v for k, v in SPECULATORS.items() if "markov" not in k} | {
    "speculators_model_type": "dflash",
    "sample_from_anchor": False,
}
del DFLASH["enable_confidence_head"]
KEPT = (1, 3, 4, 9)
MAP = {
    "d2t": np.asarray([1, 2, 2, 6], np.int64),
    "t2d": np.isin(np.arange(16), KEPT),
}


def tensors_of(
    num_taps=2, *, bias=False, markov=None, rank=2, confidence=None, **own
) -> dict[str, np.ndarray]:
    """What a file holds: two layers, heads, and `own` (matrices, as rows by name)."""
    shapes = {
        "fc.weight": (8, num_taps * 8),
        "hidden_norm.weight": (8,),
        "norm.weight": (8,),
    }
    for i in range(2):
        attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        for name, rows in (("q", 8), ("k", 4), ("v", 4), ("o", 8)):
            shapes[f"{attention}.{name}_proj.weight"] = (rows, 8)
            if bias:
                shapes[f"{attention}.{name}_proj.bias"] = (rows,)
        for name in ("q_norm", "k_norm"):
            shapes[f"{attention}.{name}.weight"] = (4,)
        for name, shape in (("gate", (12, 8)), ("up", (12, 8)), ("down", (8, 12))):
            shapes[f"{mlp}.{name}_proj.weight"] = shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"layers.{i}.{name}.weight"] = (8,)
    if markov is not None:
        shapes["markov_head.markov_w1.weight"] = (16, rank)
        shapes["markov_head.markov_w2.weight"] = (own.get("lm_head", 16), rank)
    if markov == "gated":
        shapes["markov_head.gate_proj.weight"] = (rank, 8 + rank)
        shapes["markov_head.gate_proj.bias"] = (rank,)
    if confidence is not None:
        shapes["confidence_head.proj.weight"] = (1, confidence)
        shapes["confidence_head.proj.bias"] = (1,)
    shapes |= {f"{name}.weight": (rows, 8) for name, rows in own.items()}
    rng = np.random.default_rng(0)
    return {n: rng.normal(size=shape).astype(np.float32) for n, shape in shapes.items()}


def deepspec_tensors():
    return tensors_of(markov="vanilla", confidence=10, embed_tokens=16, lm_head=16)


def speculators_tensors():
    return tensors_of(markov="gated", confidence=8, embed_tokens=16, lm_head=4) | MAP


FILES = {
    "z-lab DFlash": (ZLAB, tensors_of),
    "DeepSpec DSpark": (DEEPSPEC, deepspec_tensors),
    "speculators DSpark": (SPECULATORS, speculators_tensors),
    "speculators DFlash": (
        DFLASH,
        lambda: tensors_of(embed_tokens=16, lm_head=4) | MAP,
    ),
}
each_format = pytest.mark.parametrize("name", FILES)


def changed(values, **changes):
    """A configuration with fields changed; None takes one out."""
    values = copy.deepcopy(values) | changes
    return {name: value for name, value in values.items() if value is not None}


def refused(values, tensors, *says, target=TARGET, **overrides):
    """Asserts that a drafter is refused in these words."""
    with pytest.raises(CheckpointError) as error:
        read_block(values, tensors, target, overrides)
    for word in says:
        assert word in str(error.value), str(error.value)


# ---- What is read --------------------------------------------------------------------


@each_format
@pytest.mark.parametrize("prefix", ["", "model."])
def test_every_format(name, prefix):
    """One record from three formats; every stored tensor is used, with any prefix."""
    values, make = FILES[name]
    tensors = make()
    found = read_block(
        values, {f"{prefix}{k}": v for k, v in tensors.items()}, TARGET, {}
    )
    assert recognise(values, {}) == found.format == name and found.family == "block"
    stored = set(tensors) - {"d2t", "t2d"}
    assert set(found.tensors) - {"d2t"} == stored
    assert set(found.tensors) == set(expected_block_tensors(found.config))
    for key in stored:
        np.testing.assert_array_equal(found.tensors[key], tensors[key])
    if "d2t" in tensors:
        assert found.tensors["d2t"].tolist() == MAP["d2t"].tolist()
    built = block_params_from_tensors(found.config, found.tensors)
    wanted = nnx.to_pure_dict(split_block_network(found.config, "float32")[1])
    assert jax.tree.structure(built) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(built), jax.tree.leaves(wanted), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)


def test_layers_to_read():
    """B35: what an id names, in each style; found.taps enter the layer they name."""
    taps = {
        name: read_block(values, make(), TARGET, {}).config.taps
        for name, (values, make) in FILES.items()
    }
    assert taps == {
        "z-lab DFlash": (2, 5),
        "DeepSpec DSpark": (0, 9),
        "speculators DSpark": (2, 10),
        "speculators DFlash": (2, 10),
    }


def test_layouts():
    facts = {
        name: read_block(values, make(), TARGET, {}).facts
        for name, (values, make) in FILES.items()
    }
    assert facts["z-lab DFlash"]["draft_length"] == 3
    assert facts["z-lab DFlash"]["layout"].startswith("1 + N")
    assert facts["DeepSpec DSpark"]["draft_length"] == 3
    assert facts["DeepSpec DSpark"]["layout"].startswith("anchor first")
    assert facts["DeepSpec DSpark"]["markov_head"] == "vanilla, rank 2"
    assert facts["speculators DSpark"]["draft_vocabulary"] == 4
    assert "z-lab's own code drafts greedily" in facts["z-lab DFlash"]["proposal"]
    plain = changed(
        DEEPSPEC, markov_rank=0, enable_confidence_head=False, markov_head_type=None
    )
    found = read_block(plain, tensors_of(embed_tokens=16, lm_head=16), TARGET, {})
    assert found.format == "DeepSpec DFlash" and found.config.max_length == 3


def test_both_spellings_of_rope():
    for values in (
        ZLAB,
        changed(
            ZLAB,
            rope_theta=None,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
    ):
        layers = read_block(values, tensors_of(), TARGET, {}).config.layers
        assert layers.ropes[0].theta == 1e6
    nested = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    layers = SPECULATORS["transformer_layer_config"] | {"rope_parameters": nested}
    values = changed(SPECULATORS, transformer_layer_config=layers)
    found = read_block(values, speculators_tensors(), TARGET, {})
    assert found.config.layers.ropes[0].theta == 1e4
    assert "sliding_attention" in found.facts["choices"]["rope"]


def test_biases():
    values = changed(ZLAB, attention_bias=True)
    found = read_block(values, tensors_of(bias=True), TARGET, {})
    assert found.config.layers.qkv_bias and found.config.layers.output_bias


SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 7,
    "use_sliding_window": True,
}


@pytest.mark.parametrize("attention", ["training", "vllm", "full"])
def test_sliding_layers(attention):
    """13.27: the training mask, unless another reading is asked for."""
    layers = SPECULATORS["transformer_layer_config"] | SLIDING
    values = changed(SPECULATORS, transformer_layer_config=layers)
    tensors = speculators_tensors()
    config = read_block(values, tensors, TARGET, {"attention": attention}).config
    assert (config.windows, config.causal, config.window_from) == {
        "training": ((7, None), (True, False), "anchor"),
        "vllm": ((7, None), (True, True), "row"),
        "full": ((None, None), (False, False), "anchor"),
    }[attention]
    both_ways = changed(values, sliding_window_non_causal=True)
    config = read_block(both_ways, tensors, TARGET, {"attention": attention}).config
    assert not any(config.causal)
    config = read_block(ZLAB | SLIDING, tensors_of(), TARGET, {}).config
    assert (config.windows, config.causal) == ((7, None), (True, False))
    assert config.window_from == "row"
    inner = ZLAB["dflash_config"] | {"use_swa": True, "swa_window_size": 9}
    values = changed(ZLAB, dflash_config=inner)
    config = read_block(values, tensors_of(), TARGET, {}).config
    assert (config.windows, config.causal) == ((9, 9), (False, False))


def test_windows_that_are_switched_off_say_so():
    refused(ZLAB | SLIDING | {"use_sliding_window": False}, tensors_of(), "set both")
    refused(DEEPSPEC | SLIDING, deepspec_tensors(), "sliding layers")


# ---- Missing fields ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "num_drafted", "bonus", "expected"),
    [
        ("DSpark", 3, None, False),
        ("DSpark", 4, None, True),
        ("DSpark", None, None, True),
        ("DSpark", 4, True, False),
        ("DFlash", 3, None, False),
        ("DFlash", 4, None, False),
    ],
)
def test_sample_from_anchor_when_missing(kind, num_drafted, bonus, expected):
    """11.4: by the number of speculative tokens, and never for DFlash."""
    source, make = FILES[f"speculators {kind}"]
    proposals = {"proposal_methods": [{"speculative_tokens": num_drafted}]}
    values = changed(
        source,
        sample_from_anchor=None,
        speculators_config=proposals,
        dspark_bonus_anchor=bonus,
    )
    found = read_block(values, make(), TARGET, {})
    assert found.config.sample_from_anchor is expected
    text = f"taken as {str(expected).lower()}"
    assert text in found.facts["choices"]["sample_from_anchor"]
    asked = read_block(values, make(), TARGET, {"sample_from_anchor": not expected})
    assert asked.config.sample_from_anchor is not expected
    assert asked.facts["overrides"] == {"sample_from_anchor": not expected}


def test_fields_that_have_a_default():
    nested = changed(LAYERS, model_type=None, rms_norm_eps=None)
    values = changed(
        SPECULATORS,
        transformer_layer_config=nested,
        markov_head_type=None,
        confidence_head_with_markov=None,
        enable_confidence_head=None,
    )
    tensors = tensors_of(markov="vanilla", confidence=10, lm_head=4) | MAP
    found = read_block(values, tensors, TARGET, {})
    assert found.config.markov == "vanilla"
    assert found.config.confidence == "hidden_and_previous"
    assert not found.config.own_embedding and found.facts["embedding"] == "the target's"
    assert "not in the file" in found.facts["choices"]["embedding"]
    # Llama's own defaults: the width of a head follows from the others.
    llama = changed(LAYERS, head_dim=None, model_type="llama", mlp_bias=False)
    values = changed(SPECULATORS, transformer_layer_config=llama)
    found = read_block(values, speculators_tensors(), TARGET, {})
    assert found.config.layers.head_dim == 4


def test_zlab_fields_in_either_place():
    inner = ZLAB["dflash_config"] | {"block_size": 4}
    values = changed(ZLAB, block_size=None, dflash_config=inner)
    assert read_block(values, tensors_of(), TARGET, {}).config.block_size == 4
    refused(changed(values, block_size=5), tensors_of(), "block_size=5", "4")
    inner = {"mask_token_id": 15}
    found = read_block(changed(ZLAB, dflash_config=inner), tensors_of(), TARGET, {})
    assert found.config.taps == (2, 8)
    assert "2, 8 (z-lab's rule)" in found.facts["choices"]["taps"]


# ---- What is refused -----------------------------------------------------------------


def test_other_families_are_not_recognised():
    for values in (
        LAYERS | {"architectures": ["Qwen3ForCausalLM"]},
        {"speculators_model_type": "eagle3"},
        LAYERS | {"architectures": ["Qwen3Eagle3Model"]},
    ):
        assert recognise(values, {}) is None
    for changes, word in (
        ({"architectures": ["Gemma4DSparkModel"]}, "Gemma 4"),
        ({"architectures": ["DominoDraftModel"]}, "SpecForge"),
        ({"dflash_config": {"projector_type": "domino"}}, "SpecForge"),
    ):
        values = changed(ZLAB, **changes)
        assert word in recognise(values, {})
        refused(values, tensors_of(), word, "not supported")


@each_format
def test_damaged_tensors(name):
    """Every missing, renamed, mis-shaped or broken tensor is named, all at once."""
    values, make = FILES[name]
    tensors = make()
    tensors["layers.1.mlp.up.weight"] = tensors.pop("layers.1.mlp.up_proj.weight")
    del tensors["hidden_norm.weight"]
    tensors["norm.weight"] = np.zeros((7,), np.float32)
    refused(
        values,
        tensors,
        "missing (2)",
        "layers.1.mlp.up_proj.weight",
        "hidden_norm.weight",
        "unexpected (1)",
        "layers.1.mlp.up.weight",
        "norm.weight: has [7], needs [8]",
    )
    tensors = make()
    tensors["layers.0.mlp.down_proj.weight"][3, 4] = np.nan
    refused(values, tensors, "layers.0.mlp.down_proj.weight", "NaN")


def test_nan_sentinels():
    """13.14: an embedding that was never filled in is not taken for one."""
    tensors = speculators_tensors()
    tensors["embed_tokens.weight"][:] = np.nan
    refused(SPECULATORS, tensors, "embed_tokens.weight")
    found = read_block(SPECULATORS, tensors, TARGET, {"embedding": "target"})
    assert not found.config.own_embedding


def test_a_lost_head_is_no_other_method():
    """B40: nothing turns a damaged DSpark into a DFlash, or its pruning off."""
    tensors = deepspec_tensors()
    del tensors["markov_head.markov_w1.weight"]
    refused(DEEPSPEC, tensors, "missing (1)", "markov_head.markov_w1.weight")
    tensors = deepspec_tensors()
    del tensors["confidence_head.proj.weight"], tensors["confidence_head.proj.bias"]
    refused(DEEPSPEC, tensors, "confidence_head.proj.weight", "'confidence': 'none'")
    found = read_block(DEEPSPEC, tensors, TARGET, {"confidence": "none"})
    assert found.facts["confidence_head"] == "none"
    assert found.facts["overrides"] == {"confidence": "none"}
    for name in ("mask_token_id", "target_layer_ids", "block_size", "markov_head_type"):
        refused(changed(DEEPSPEC, **{name: None}), deepspec_tensors(), name)
    refused(changed(DEEPSPEC, markov_rank=0), deepspec_tensors(), "markov_rank=0")
    refused(changed(ZLAB, dflash_config=None), tensors_of(), "dflash_config")
    # Heads that the configuration denies are not left unread either.
    denied = changed(DEEPSPEC, enable_confidence_head=False, markov_rank=0)
    refused(denied, deepspec_tensors(), "unexpected (2)", "markov_head.markov_w2")


def test_the_wrong_target():
    """B35, B38: every sign that a drafter belongs to another model."""
    for values, make in FILES.values():
        for changes, word in (
            ({"vocab_size": 17}, "vocabulary 16"),
            ({"hidden_size": 12}, "hidden size 8"),
        ):
            other = dataclasses.replace(TARGET, **changes)
            refused(values, make(), "another target", word, target=other)
    deeper = dataclasses.replace(TARGET, num_layers=11)
    refused(ZLAB, tensors_of(), "number of target layers 10", target=deeper)
    refused(ZLAB, tensors_of(3), "fc.weight reads 24 features", "2 taps")
    ids = {"mask_token_id": 15, "target_layer_ids": [1, 12]}
    refused(changed(ZLAB, dflash_config=ids), tensors_of(), "taps [2, 13]", "0", "10")
    values = changed(SPECULATORS, aux_hidden_state_layer_ids=[2, 12])
    refused(values, speculators_tensors(), "taps [2, 12]")
    refused(changed(SPECULATORS, mask_token_id=16), speculators_tensors(), "16 rows")


def test_the_last_layer_has_two_readings():
    """0.3: after the final norm or before it; the file cannot say."""
    values = changed(DEEPSPEC, target_layer_ids=[1, 9])
    refused(values, deepspec_tensors(), "final norm", "overrides={'taps'")
    found = read_block(values, deepspec_tensors(), TARGET, {"taps": [2, 11]})
    assert found.config.taps == (2, 11)


def test_unknown_settings():
    for name, where in (("z-lab DFlash", "config.json"), ("speculators DSpark", "")):
        values, make = FILES[name]
        refused(changed(values, gate_bias=0.5), make(), "gate_bias=0.5", where)
    inner = ZLAB["dflash_config"] | {"attention_sinks": 4}
    refused(changed(ZLAB, dflash_config=inner), tensors_of(), "attention_sinks=4")
    values, make = FILES["z-lab DFlash"]
    refused(values, make(), "unknown overrides nonsense", "embedding:", nonsense=1)
    refused(values, make(), "attention must be one of", attention="causal")
    refused(values, make(), "sample_from_anchor must be true", sample_from_anchor=1)


# ---- Vocabularies --------------------------------------------------------------------


def with_map(**maps):
    tensors = speculators_tensors()
    del tensors["d2t"], tensors["t2d"]
    return tensors | {name: np.asarray(x) for name, x in maps.items()}


def test_the_map_of_a_reduced_vocabulary():
    """B37: offsets; ids are an error unless asked for; never silent garbage."""

    def ids(tensors, **overrides):
        found = read_block(SPECULATORS, tensors, TARGET, overrides)
        return tuple(np.arange(4) + found.tensors["d2t"])

    offsets, absolute = MAP["d2t"], np.asarray(KEPT)
    assert ids(with_map(d2t=offsets)) == KEPT
    assert ids(with_map(t2d=MAP["t2d"])) == KEPT
    both = with_map(d2t=absolute, t2d=MAP["t2d"])
    refused(SPECULATORS, both, "holds the ids themselves", "'token_map': 'absolute'")
    assert ids(both, token_map="absolute") == KEPT
    refused(SPECULATORS, with_map(d2t=absolute), "'token_map'")
    assert ids(with_map(d2t=absolute), token_map="absolute") == KEPT
    zeros = np.zeros(4, np.int64)
    refused(SPECULATORS, with_map(d2t=zeros), "'token_map'")
    refused(SPECULATORS, with_map(d2t=zeros, t2d=MAP["t2d"]), "not a map")
    prefix = np.arange(16) < 4
    assert ids(with_map(d2t=zeros, t2d=prefix)) == (0, 1, 2, 3)
    refused(SPECULATORS, with_map(), "neither d2t nor t2d")
    refused(SPECULATORS, with_map(d2t=[1, 2, 2, 13]), "not a map")
    refused(SPECULATORS, with_map(d2t=[1, 1, -1, 6]), "not a map")
    refused(SPECULATORS, with_map(d2t=[1, 2, 2]), "d2t: has [3], needs [4]")
    refused(SPECULATORS, with_map(t2d=np.arange(16) < 5), "marks 5")
    full = changed(SPECULATORS, draft_vocab_size=16)
    tensors = tensors_of(markov="gated", confidence=8, embed_tokens=16, lm_head=16)
    found = read_block(full, tensors | {"d2t": np.zeros(16)}, TARGET, {})
    assert "d2t" not in found.tensors
    refused(full, tensors | {"t2d": prefix}, "says otherwise")


def test_arrays_are_shared_with_the_target():
    """11.4, 13.14: copies are dropped, what is missing is taken, rows by t2d."""
    target = init_params(TARGET, jax.random.key(0))
    table, head = np.asarray(target["embedding"]), np.asarray(target["head"]["weight"])
    tensors = deepspec_tensors()
    tensors |= {"embed_tokens.weight": table, "lm_head.weight": head}
    found = read_block(DEEPSPEC, tensors, TARGET, {})
    shared = share_with_target(found, target)
    assert not (shared.config.own_embedding or shared.config.own_head)
    assert set(found.tensors) - set(shared.tensors) == {
        "embed_tokens.weight",
        "lm_head.weight",
    }
    assert set(shared.tensors) == set(expected_block_tensors(shared.config))
    assert shared.facts["embedding"] == shared.facts["head"] == "the target's"
    # One number differs: then it is the drafter's own.
    tensors["embed_tokens.weight"] = table + np.eye(16, 8, dtype=np.float32)
    shared = share_with_target(read_block(DEEPSPEC, tensors, TARGET, {}), target)
    assert shared.config.own_embedding and not shared.config.own_head
    # A reduced vocabulary without a head: the target's rows.
    tensors = speculators_tensors()
    del tensors["lm_head.weight"]
    shared = share_with_target(read_block(SPECULATORS, tensors, TARGET, {}), target)
    assert shared.config.own_head and shared.facts["head"] == "its own"
    np.testing.assert_array_equal(shared.tensors["lm_head.weight"], head[list(KEPT)])
