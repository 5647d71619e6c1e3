"""MTP modules in every layout: one network under five sets of names, and what is
refused. Each layout is written from the same canonical tensors, and read back to them.
"""

import json
from collections import ChainMap

import numpy as np
import pytest
from conftest import LLAMA, random_tensors, write_folder, write_gguf

from jaxdec.io.checkpoint import CheckpointError, expected_tensors, shapes_of
from jaxdec.io.drafters.layer_config import left_out
from jaxdec.io.drafters.mtp import read_mtp, read_native, recognise
from jaxdec.io.gguf import load_gguf
from jaxdec.io.hf_config import config_from_hf
from jaxdec.io.safetensors import load_folder, open_tensors
from jaxdec.models.mtp import MtpConfig, expected_mtp_tensors

F32 = np.dtype(np.float32)
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "vocab_size": 40,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
VALUES = {
    "llama": LLAMA | SMALL,
    "qwen3": LLAMA
    | SMALL
    | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "mimo": LLAMA
    | SMALL
    | {
        "model_type": "mimo",
        "architectures": ["MiMoForCausalLM"],
        "attention_bias": True,
    },
    "qwen3_moe": LLAMA
    | SMALL
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "norm_topk_prob": True,
    },
}
NUM_LAYERS = LLAMA["num_hidden_layers"]


def canonical(target, num_modules=1, seed=5):
    """A configuration of modules with the target's layers, and tensors for it."""
    moe = target.moe
    if moe is not None:
        moe = type(moe)(**vars(moe) | {"layers": tuple(range(num_modules))})
    fields = vars(target) | {"num_layers": num_modules, "moe": moe}
    config = MtpConfig(
        block=type(target)(**fields),
        num_target_layers=target.num_layers,
        hidden_source="post",
        recycle="post",
    )
    rng = np.random.default_rng(seed)
    return config, {
        name: rng.normal(size=shape).astype(np.float32)
        for name, shape in expected_mtp_tensors(config).items()
    }


NAMES = {
    "deepseek": {
        "embed_norm": f"model.layers.{NUM_LAYERS}.enorm",
        "hidden_norm": f"model.layers.{NUM_LAYERS}.hnorm",
        "project": f"model.layers.{NUM_LAYERS}.eh_proj",
        "final_norm": f"model.layers.{NUM_LAYERS}.shared_head.norm",
        "block": f"model.layers.{NUM_LAYERS}",
    },
    "qwen": {
        "embed_norm": "mtp.pre_fc_norm_embedding",
        "hidden_norm": "mtp.pre_fc_norm_hidden",
        "project": "mtp.fc",
        "final_norm": "mtp.norm",
        "block": "mtp.layers.0",
    },
    "mimo": {
        "embed_norm": "model.mtp_layers.0.token_layernorm",
        "hidden_norm": "model.mtp_layers.0.hidden_layernorm",
        "project": "model.mtp_layers.0.input_proj",
        "final_norm": "model.mtp_layers.0.final_layernorm",
        "block": "model.mtp_layers.0",
    },
    "mimo_v2": {
        "embed_norm": "model.mtp.layers.0.enorm",
        "hidden_norm": "model.mtp.layers.0.hnorm",
        "project": "model.mtp.layers.0.eh_proj",
        "final_norm": "model.mtp.layers.0.final_layernorm",
        "block": "model.mtp.layers.0",
    },
    "speculators": {
        "embed_norm": "mtp_layers.0.token_layernorm",
        "hidden_norm": "mtp_layers.0.hidden_layernorm",
        "project": "mtp_layers.0.input_proj",
        "final_norm": "mtp_layers.0.final_layernorm",
        "block": "mtp_layers.0",
    },
}


def in_layout(layout: str, tensors: dict) -> dict:
    """Module 0 under the names, and in the column order, of a layout."""
    stored = {}
    for name, tensor in tensors.items():
        part, rest = name.removeprefix("modules.0.").split(".", 1)
        if part == "project" and layout == "mimo":
            embedding, hidden = np.split(tensor, 2, axis=1)
            tensor = np.concatenate([hidden, embedding], axis=1)
        if layout == "mimo_v2" and rest == "post_attention_layernorm.weight":
            rest = "pre_mlp_layernorm.weight"
        stored[f"{NAMES[layout][part]}.{rest}"] = tensor
    return stored


def whole(checkpoint):
    """Modules and model in one mapping, none of it read."""
    return ChainMap(checkpoint.extra, checkpoint.tensors)


def same(found: dict, tensors: dict):
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


@pytest.mark.parametrize(
    "family, layout, source, recycle",
    [
        ("llama", "deepseek", "post", "post"),
        ("qwen3", "deepseek", "post", "post"),
        ("qwen3", "qwen", "post", "post"),
        ("qwen3_moe", "qwen", "post", "post"),
        ("qwen3_moe", "deepseek", "post", "post"),
        ("mimo", "mimo", "pre", "post"),
        ("mimo", "mimo_v2", "pre", "pre"),
    ],
)
def test_native_layouts(tmp_path, family, layout, source, recycle):
    """A model exported with its module is one checkpoint, and both are found in it."""
    values = VALUES[family] | {"num_nextn_predict_layers": 1}
    target = config_from_hf(values)
    config, tensors = canonical(target)
    files = random_tensors(target) | in_layout(layout, tensors)
    folder = write_folder(tmp_path, values, files)
    checkpoint = load_folder(folder, F32)
    assert checkpoint.config == target
    assert recognise(values, open_tensors(folder).shapes).startswith("native MTP")
    found = read_native(checkpoint.settings, whole(checkpoint), target)
    assert found.config.block == config.block
    assert found.config.num_native_modules == found.facts["num_native_modules"] == 1
    assert (found.config.hidden_source, found.config.recycle) == (source, recycle)
    assert found.facts["taps"] == [NUM_LAYERS + (source == "post")]
    assert found.facts["embedding"] == found.facts["head"] == "the target's"
    same(found.tensors, tensors)
    other = {"pre": "post", "post": "pre"}[source]
    changed = read_native(
        checkpoint.settings, whole(checkpoint), target, {"hidden_source": other}
    )
    assert changed.config.hidden_source == other
    assert "overridden" in changed.facts["choices"]["hidden_source"]


def test_a_fastmtp_fine_tune_reads_the_normed_state():
    values = VALUES["mimo"] | {"mtp_loss_step_weights": [0.5, 0.3, 0.2]}
    target = config_from_hf(values)
    _, tensors = canonical(target)
    found = read_native(values, in_layout("mimo", tensors), target)
    assert (found.config.hidden_source, found.config.recycle) == ("post", "post")
    assert "FastMTP" in found.facts["choices"]["hidden_source"]


def test_swapping_the_columns_is_an_override(tmp_path):
    target = config_from_hf(VALUES["llama"])
    _, tensors = canonical(target)
    files = random_tensors(target) | in_layout("deepseek", tensors)
    swapped = read_native(VALUES["llama"], files, target, {"concat": "hidden_first"})
    embedding, hidden = np.split(tensors["modules.0.project.weight"], 2, axis=1)
    np.testing.assert_array_equal(
        swapped.tensors["modules.0.project.weight"],
        np.concatenate([hidden, embedding], axis=1),
    )


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_gguf(tmp_path, arch):
    """``blk.{L}.nextn.*`` after the trunk; the final norm may be the model's own."""
    values = VALUES[arch]
    target = config_from_hf(values)
    config, tensors = canonical(target)
    stored = in_layout("deepseek", tensors)
    prefix = f"model.layers.{NUM_LAYERS}"
    translated = {}
    for old, new in (
        ("enorm", "enorm"),
        ("hnorm", "hnorm"),
        ("eh_proj", "eh_proj"),
        ("shared_head.norm", "shared_head_norm"),
    ):
        tensor = stored.pop(f"{prefix}.{old}.weight")
        translated[f"blk.{NUM_LAYERS}.nextn.{new}.weight"] = tensor
    trunk = random_tensors(target)
    metadata = {f"{arch}.nextn_predict_layers": 1}

    def write(name, extra):
        # Blocks of modules are counted with the model's own.
        counted = type(target)(**vars(target) | {"num_layers": NUM_LAYERS + 1})
        return write_gguf(
            tmp_path / name,
            counted,
            trunk | stored,
            arch=arch,
            extra=extra,
            metadata=metadata,
            tokenizer=False,
        )

    checkpoint = load_gguf(write("m.gguf", translated), F32)
    assert checkpoint.config == target
    shapes = checkpoint.extra.shapes
    assert recognise(checkpoint.settings, shapes) == "native MTP (DeepSeek layout)"
    found = read_native(checkpoint.settings, whole(checkpoint), target)
    assert found.config.block == config.block
    same(found.tensors, tensors)
    del translated[f"blk.{NUM_LAYERS}.nextn.shared_head_norm.weight"]
    checkpoint = load_gguf(write("n.gguf", translated), F32)
    found = read_native(checkpoint.settings, whole(checkpoint), target)
    shared = {"modules.0.final_norm.weight": trunk["model.norm.weight"]}
    same(found.tensors, tensors | shared)


def test_several_modules():
    """Numbered on after the model's layers; each has its own tensors."""
    values = VALUES["qwen3"] | {"num_nextn_predict_layers": 3}
    target = config_from_hf(values)
    config, tensors = canonical(target, num_modules=3)
    files = {}
    for k in range(3):
        mine = {
            name.replace(f"modules.{k}.", "modules.0."): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"modules.{k}.")
        }
        for name, tensor in in_layout("deepseek", mine).items():
            moved = name.replace(f".{NUM_LAYERS}.", f".{NUM_LAYERS + k}.")
            files[moved] = tensor
    found = read_native(values, files, target)
    assert found.config.num_native_modules == 3
    assert found.config.block == config.block
    same(found.tensors, tensors)
    part = {n: t for n, t in files.items() if f".{NUM_LAYERS + 1}." not in n}
    with pytest.raises(CheckpointError, match=r"3 MTP modules.*hold \[2, 4\]"):
        read_native(values, part, target)
    with pytest.raises(CheckpointError, match="numbered from 2"):
        read_native(VALUES["qwen3"], part, target)


def test_copies_of_embedding_and_head(tmp_path):
    """Equal copies are dropped; others are the modules' own."""
    values = VALUES["llama"]
    target = config_from_hf(values)
    _, tensors = canonical(target)
    trunk = random_tensors(target)
    prefix = f"model.layers.{NUM_LAYERS}"
    names = (f"{prefix}.embed_tokens.weight", f"{prefix}.shared_head.head.weight")
    tables = (trunk["model.embed_tokens.weight"], trunk["lm_head.weight"])
    copies = dict(zip(names, tables, strict=True))
    modules = in_layout("deepseek", tensors) | copies
    found = read_native(values, trunk | modules, target)
    assert not found.config.own_embedding and not found.config.own_head
    assert "equal" in found.facts["embedding"] and "equal" in found.facts["head"]
    same(found.tensors, tensors)
    different = modules | {names[1]: copies[names[1]] + 1}
    found = read_native(values, trunk | different, target)
    assert found.config.own_head and not found.config.own_embedding
    same(found.tensors, tensors | {"head.weight": different[names[1]]})
    # Nothing to compare with: they are kept.
    found = read_native(values, modules, target)
    assert found.config.own_head and found.config.own_embedding


def test_dedicated_embedding():
    values = VALUES["qwen3"] | {
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": True,
    }
    target = config_from_hf(values)
    _, tensors = canonical(target)
    files = in_layout("qwen", tensors)
    with pytest.raises(CheckpointError, match="mtp_use_dedicated_embeddings is true"):
        read_native(values, files, target)
    own = np.ones((40, 16), np.float32)
    found = read_native(values, files | {"mtp.embed_tokens.weight": own}, target)
    assert found.config.own_embedding and not found.config.own_head
    same(found.tensors, tensors | {"embedding.weight": own})


HYBRID = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": SMALL
    | {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        "max_position_embeddings": 128,
        "linear_num_key_heads": 2,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 0],
        },
        "mtp_num_hidden_layers": 1,
    },
}


def hybrid_files():
    """Gains as w, and queries with gates, head by head."""
    rng = np.random.default_rng(3)
    names = NAMES["qwen"]
    block = names["block"]
    shapes = {
        f"{names['embed_norm']}.weight": (16,),
        f"{names['hidden_norm']}.weight": (16,),
        f"{names['project']}.weight": (16, 32),
        f"{names['final_norm']}.weight": (16,),
        f"{block}.input_layernorm.weight": (16,),
        f"{block}.post_attention_layernorm.weight": (16,),
        f"{block}.self_attn.q_proj.weight": (32, 16),
        f"{block}.self_attn.k_proj.weight": (8, 16),
        f"{block}.self_attn.v_proj.weight": (8, 16),
        f"{block}.self_attn.o_proj.weight": (16, 16),
        f"{block}.self_attn.q_norm.weight": (8,),
        f"{block}.self_attn.k_norm.weight": (8,),
        f"{block}.mlp.gate_proj.weight": (24, 16),
        f"{block}.mlp.up_proj.weight": (24, 16),
        f"{block}.mlp.down_proj.weight": (16, 24),
        "model.embed_tokens.weight": (40, 16),
        "lm_head.weight": (40, 16),
    }
    return {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}


def test_module_of_a_model_that_is_not_read():
    """Qwen3.5: gate, partial rotation, 1 + w; alone, with the tables beside it."""
    files = hybrid_files()
    found = read_mtp(HYBRID, files, None)
    block = found.config.block
    assert block.attention_gate and block.qk_norm and block.ropes[0].rotated == 0.5
    assert found.config.num_target_layers == 4 and found.config.taps == (5,)
    assert found.config.own_embedding and found.config.own_head
    stored = files["mtp.layers.0.self_attn.q_proj.weight"].reshape(2, 2, 8, 16)
    for which, name in enumerate(("q_proj", "gate")):
        rows = found.tensors[f"modules.0.block.self_attn.{name}.weight"]
        np.testing.assert_array_equal(rows, stored[:, which].reshape(16, 16))
    gains = found.tensors["modules.0.block.self_attn.q_norm.weight"]
    np.testing.assert_array_equal(
        gains, files["mtp.layers.0.self_attn.q_norm.weight"] + 1
    )
    plain = read_mtp(HYBRID, files, None, {"gains": "w"})
    np.testing.assert_array_equal(
        plain.tensors["modules.0.final_norm.weight"], files["mtp.norm.weight"]
    )
    del files["lm_head.weight"]
    with pytest.raises(CheckpointError, match="no 'lm_head.weight'.*give the target"):
        read_mtp(HYBRID, files, None)


@pytest.mark.parametrize(
    "name, reason",
    [
        ("mlp.shared_expert.gate_proj.weight", "shared ones"),
        ("mlp.gate.e_score_correction_bias", "corrects the scores"),
        ("self_attn.kv_a_proj_with_mqa.weight", "MLA"),
        ("self_attn.attention_sink_bias", "sinks"),
    ],
)
def test_blocks_that_are_refused(name, reason):
    files = hybrid_files() | {f"mtp.layers.0.{name}": np.ones((2, 2), np.float32)}
    with pytest.raises(CheckpointError, match=reason):
        read_mtp(HYBRID, files, None)


def speculators(layers, **values):
    return {
        "architectures": ["MTPDraftModel"],
        "num_nextn_predict_layers": 1,
        "speculators_config": {
            "algorithm": "mtp",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"name_or_path": "somewhere", "architectures": []},
        },
        "speculators_model_type": "mtp",
        "speculators_version": "0.9.0",
        "tie_word_embeddings": False,
        "transformer_layer_config": layers,
    } | values


def test_speculators():
    values = VALUES["qwen3"]
    target = config_from_hf(values)
    config, tensors = canonical(target)
    files = in_layout("speculators", tensors)
    settings = speculators(values)
    assert recognise(settings, shapes_of(files)) == "speculators MTP"
    found = read_mtp(settings, files | {"verifier_norm.weight": np.ones(16)}, target)
    assert found.config.block == config.block and found.format == "speculators MTP"
    assert found.facts["draft_length"] == 4 and found.facts["made_for"] == "somewhere"
    assert found.config.taps == (NUM_LAYERS + 1,)
    same(found.tensors, tensors)
    own = np.ones((40, 16), np.float32)
    found = read_mtp(settings, files | {"model.embed_tokens.weight": own}, target)
    assert found.config.own_embedding and not found.config.own_head


def test_speculators_configurations_are_differences():
    """What equals the default of its class is left out, the class name too."""
    layers = {"num_hidden_layers": 2, "vocab_size": 40}
    with pytest.raises(CheckpointError) as error:
        read_mtp(
            speculators(layers),
            {"mtp_layers.0.input_proj.weight": np.ones((2, 4))},
            None,
        )
    text = str(error.value)
    # Qwen3: 32 heads of 128, width 4096, MLP 22016, normed queries.
    assert "mtp_layers.0.self_attn.q_norm.weight" in text
    assert "needs [4096, 8192]" in text
    layers |= SMALL | {"model_type": "llama", "max_position_embeddings": 64}
    rope = {"rope_type": "default", "rope_theta": 777.0}
    local = {"rope_type": "default", "rope_theta": 1.0}
    by_kind = {"full_attention": rope, "sliding_attention": local}
    config, tensors = canonical(config_from_hf(layers | {"rope_parameters": rope}))
    found = read_mtp(
        speculators(layers | {"rope_parameters": by_kind}),
        in_layout("speculators", tensors)
        | {
            "model.embed_tokens.weight": np.ones((40, 16), np.float32),
            "lm_head.weight": np.ones((40, 16), np.float32),
        },
        None,
    )
    assert found.config.block == config.block and not found.config.block.qk_norm
    assert "layers" not in found.facts["choices"]
    del layers["vocab_size"]
    with pytest.raises(CheckpointError, match="needs .32000, 16"):
        read_mtp(
            speculators(layers),
            in_layout("speculators", tensors)
            | {"lm_head.weight": np.ones((40, 16), np.float32)},
            None,
        )
    assert left_out(layers) == {"vocab_size": 32000}


def test_errors_list_all_tensors_by_their_names():
    values = VALUES["llama"]
    target = config_from_hf(values)
    _, tensors = canonical(target)
    files = in_layout("deepseek", tensors)
    prefix = f"model.layers.{NUM_LAYERS}"
    del files[f"{prefix}.hnorm.weight"]
    del files[f"{prefix}.mlp.up_proj.weight"]
    files[f"{prefix}.self_attn.q_proj.weight"] = np.ones((3, 16), np.float32)
    files[f"{prefix}.surprise.weight"] = np.ones((3,), np.float32)
    with pytest.raises(CheckpointError) as error:
        read_native(values, files, target)
    text = str(error.value)
    for part in (
        "missing (2)",
        f"{prefix}.hnorm.weight",
        f"{prefix}.mlp.up_proj.weight",
        "unexpected (1)",
        f"{prefix}.surprise.weight",
        f"{prefix}.self_attn.q_proj.weight: has [3, 16], needs [16, 16]",
    ):
        assert part in text


def test_bad_input():
    target = config_from_hf(VALUES["qwen3"])
    _, tensors = canonical(target)
    native = in_layout("deepseek", tensors)
    values = VALUES["qwen3"]
    broken = dict(native)
    name = f"model.layers.{NUM_LAYERS}.hnorm.weight"
    broken[name] = broken[name].copy()
    broken[name][3] = np.nan
    files = in_layout("speculators", tensors)
    settings = speculators(values)
    wide = speculators(values | {"vocab_size": 41})

    def attempt(match, *arguments):
        with pytest.raises(CheckpointError, match=match):
            read_mtp(*arguments)

    attempt(f"NaN.*{name}", values, broken, target)
    attempt(
        "unknown override surprise=1.*hidden_source",
        values,
        native,
        target,
        {"surprise": 1},
    )
    attempt("hidden_source='last'", values, native, target, {"hidden_source": "last"})
    attempt("no multi-token-prediction modules", values, random_tensors(target), target)
    attempt("vocab_size=41, but the target has 40", wide, files, target)
    attempt("surprise=1", speculators(values, surprise=1), files, target)
    attempt(
        "speaks of 2 MTP modules",
        settings | {"num_nextn_predict_layers": 2},
        files,
        target,
    )
    attempt("no tensors of an MTP module", settings, {}, target)
    attempt(r"unexpected \(1\)", settings, files | {"fc.weight": np.ones(2)}, target)
    assert read_native(values, random_tensors(target), target) is None
    assert recognise(values, expected_tensors(target)) is None
    assert recognise({"speculators_model_type": "eagle3"}, shapes_of(files)) is None
    json.dumps(read_mtp(settings, files, target).facts)
