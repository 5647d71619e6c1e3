"""Plans from a configuration alone: against arithmetic, XLA and the TPU's compiler."""

import dataclasses
import functools
import importlib.util
import json

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxdec import console, plan_command
from jaxdec.ahead import Setting, build, step_work
from jaxdec.cli import app
from jaxdec.io.checkpoint import CheckpointError
from jaxdec.models.config import ModelConfig, MoeConfig
from jaxdec.models.decoder import abstract_params
from jaxdec.plan import plan
from jaxdec.planning.chips import Device, Topology, find_topology

pytestmark = pytest.mark.xdist_group("libtpu")
"""One process at a time may hold the TPU's compiler."""

CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=512,
    hidden_size=128,
    intermediate_size=384,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    max_positions=4096,
    qk_norm=True,
)
CAPACITY, SLOTS = 1024, 768
"""With half of the capacity live, three blocks of 256 slots are read."""
KV_BYTES = 4 * 2 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim
"""Of a token."""


@functools.cache
def setting(topology="", capacity=CAPACITY, batch_size=1):
    """One CPU device, or a slice of TPUs."""
    mesh = Mesh(np.asarray(jax.devices("cpu")[:1]).reshape(1, 1), ("data", "model"))
    device = Device(kind="cpu", memory_bytes=1e9, bytes_per_s=1e9, flops_per_s=1e12)
    here = Topology(name="here", mesh=mesh, device=device)
    return Setting(
        config=CONFIG,
        topology=find_topology(topology) if topology else here,
        batch_size=batch_size,
        capacity=capacity,
        cache_dtype="float32",
    )


@functools.cache
def work_of(name, **options):
    return step_work(build(name, setting(**options)), setting(**options))


def sizes(*names):
    """Weights of the target's matrices, all or those under some names."""
    params = abstract_params(CONFIG, "bfloat16")
    parts = [params[name] for name in names or ("layers", "head")]
    return sum(leaf.size for leaf in jax.tree.leaves(parts) if leaf.ndim == 2)


def flops_of(rows):
    """A forward of the target: its matrices, and attention over the slots read."""
    attention = 2 * CONFIG.num_layers * CONFIG.num_heads * CONFIG.head_dim * SLOTS
    return 2 * rows * (sizes() + attention)


# Plain decoding reads 2 rows. The drafter of self_draft is all of these few layers: its
# 4 forwards read 2 rows each, in a loop, and the target 5.
@pytest.mark.parametrize(
    ("name", "forwards", "rows"),
    [("greedy", 1, 2), ("lookup", 1, 7), ("self_draft", 5, 4 * 2 + 5)],
)
def test_a_step_is_its_forwards(name, forwards, rows):
    found = work_of(name)
    assert found.flops == flops_of(rows)
    weights = forwards * sizes()
    assert 1 <= found.bytes_by_label["weights"] / (2 * weights) < 1.02  # And norms.
    written = found.bytes_by_label["kv"] / KV_BYTES - forwards * SLOTS
    assert 0 < written <= 2 * rows


def test_a_drafter_reads_its_weights_once_a_forward():
    built = build("eagle3", setting())
    own = built.params.drafter.own
    head, fusion = own["head"].size, own["fusion"]["weight"].size
    layer = sum(x.size for x in jax.tree.leaves(own["layers"]))
    drafted = 7 * (layer + head) + fusion
    found = work_of("eagle3").bytes_by_label["weights"] / 2 - sizes()
    assert 1 <= found / drafted < 1.02
    assert work_of("eagle3").num_open_loops == 0
    # A tree of depth 4, and blocks that are filled at once.
    drafted = 4 * (layer + head) + fusion
    found = work_of("eagle3_tree").bytes_by_label["weights"] / 2 - sizes()
    assert 1 <= found / drafted < 1.02
    own = build("dflash", setting()).params.drafter.own
    # The keys and values of what was committed are made apart from those of the block.
    again = sum(
        x["attention"]["key_value"]["weight"].size for x in own["layers"].values()
    )
    block = sum(x.size for x in jax.tree.leaves(own)) + again + sizes("head")
    found = work_of("dflash").bytes_by_label["weights"] / 2 - sizes()
    assert 1 <= found / block < 1.02


def test_requests_are_counted():
    one, four = work_of("lookup"), work_of("lookup", batch_size=4)
    assert four.flops == 4 * one.flops
    assert four.bytes_by_label["kv"] == 4 * one.bytes_by_label["kv"]
    assert four.bytes_by_label["weights"] < 1.01 * one.bytes_by_label["weights"]


def test_flops_agree_with_xla():
    """With one block of slots there is no loop, so XLA's count is right too."""
    small = setting(capacity=256)
    built = build("lookup", small)
    compiled = jax.jit(built.strategy.step).lower(built.params, built.state).compile()
    theirs = compiled.cost_analysis()["flops"]
    # It counts additions and the like as well, of which few layers have many.
    assert 0.8 * theirs < work_of("lookup", capacity=256).flops < theirs


needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is missing"
)


@needs_libtpu
def test_chips_share_the_work():
    for name in ("greedy", "lookup", "self_draft"):
        one, four = work_of(name), work_of(name, topology="v5e:2x2")
        assert four.flops == one.flops / 4
        assert four.bytes_by_label["kv"] == one.bytes_by_label["kv"] / 4
        assert four.bytes_by_label["weights"] < 0.26 * one.bytes_by_label["weights"]


@functools.cache
def small_plan(names, **options):
    return plan(CONFIG, names, capacity=CAPACITY, **options)


@pytest.mark.tpu
@needs_libtpu
def test_the_compiler_says_what_it_takes():
    greedy, eagle = small_plan(("greedy", "eagle3")).strategies
    split = sizes("layers", "head", "embedding") * 2 / 4
    assert 1 <= greedy.memory.weights / split < 1.02
    own = jax.tree.leaves(build("eagle3", setting()).params.drafter.own)
    drafter = sum(leaf.size * leaf.dtype.itemsize for leaf in own)
    assert eagle.memory.weights - greedy.memory.weights == drafter
    assert 1 <= greedy.memory.state / (CAPACITY * KV_BYTES / 4) < 1.1
    assert greedy.memory.other > 0 and greedy.fits and not greedy.memory.is_refused
    assert greedy.break_even == 1 < eagle.break_even
    assert greedy.step_ms == pytest.approx(greedy.num_bytes / 819e9 * 1e3)
    assert (greedy.draft_length, eagle.draft_length) == (0, 7)


@pytest.mark.tpu
@needs_libtpu
def test_what_is_too_large_does_not_fit(tmp_path):
    names = ["vocab_size", "hidden_size", "intermediate_size", "head_dim"]
    values = {name: getattr(CONFIG, name) for name in names} | {
        "model_type": "qwen3",
        "num_hidden_layers": CONFIG.num_layers,
        "num_attention_heads": CONFIG.num_heads,
        "num_key_value_heads": CONFIG.num_kv_heads,
        "max_position_embeddings": CONFIG.max_positions,
        "rms_norm_eps": CONFIG.norm_eps,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    whole = plan(tmp_path, ["greedy"], capacity=2**24)
    assert (
        whole.settings["num_params"]
        == small_plan(("greedy", "eagle3")).settings["num_params"]
    )
    (found,) = whole.strategies
    assert found.memory.is_refused and not found.fits
    # A head of 32 is padded to the 128 lanes of the chip.
    assert plan_command.rows(whole.to_dict())[0][-1].startswith("NO (+")
    assert found.memory.total > 2**24 * KV_BYTES / 4 > found.memory.state * 0.99


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a command line: exit status, stdout, stderr."""
    monkeypatch.setattr(console, "prepare_jax", lambda: None)
    monkeypatch.setattr(console, "QUIET_S", 1e9)

    def call(*arguments):
        status = console.run(app, ["plan", *arguments])
        return status, *capsys.readouterr()

    return call


@pytest.mark.tpu
@needs_libtpu
def test_the_command_prints_a_table_or_json(run, monkeypatch, tmp_path):
    asked = []

    def remembered(model, names, **options):
        asked.append((model, names, options))
        return small_plan(tuple(names))

    monkeypatch.setattr("jaxdec.plan.plan", remembered)
    words = ["--model", "x", "--strategies", "greedy, eagle3", "--batch-size", "2"]
    status, out, _ = run(*words, "--capacity", "99", "--topology", "v6e:1x1")
    assert status == 0
    assert max(map(len, out.splitlines())) <= 100
    for word in ("4 x TPU v5 lite, each 15.75 GiB", "bfloat16", "greedy", "yes"):
        assert word in out
    (model, names, options) = asked[0]
    assert (model, names) == ("x", ["greedy", "eagle3"])
    assert (options["capacity"], options["batch_size"]) == (99, 2)
    assert options["topology"] == "v6e:1x1"
    status, out, _ = run(*words, "--json")
    found = json.loads(out)
    assert [s["strategy"] for s in found["strategies"]] == ["greedy", "eagle3"]
    memory = found["strategies"][0]["memory"]
    assert memory["total"] == sum(memory[k] for k in ("weights", "state", "other"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--topology", "v5e"], "such as v5e:2x2"),
        (["--topology", "v9:2x2"], "kinds: v4, v5e"),
        (["--strategies", "greedy,magic"], "cannot plan for strategies magic; give"),
        (["--strategies", ","], "greedy, lookup"),
        (["--model", "nowhere"], "give a config.json"),
        (["--cache-dtype", "int8"], "float32 or bfloat16"),
    ],
)
def test_slips_are_told_in_a_line(run, words, said):
    status, out, err = run(*words)
    assert (status, out) == (1, "") and err.count("\n") == 1
    assert said in err


def test_bad_models_and_a_missing_compiler(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="no JSON"):
        plan(tmp_path)
    experts = dict(num_experts=4, num_experts_per_token=2, intermediate_size=8)
    moe = MoeConfig(**experts, norm_topk_prob=True, layers=(0, 1))
    with pytest.raises(ValueError, match="mixture of experts"):
        plan(dataclasses.replace(CONFIG, moe=moe))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install libtpu"):
        plan(CONFIG)
