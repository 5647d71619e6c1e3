"""What XLA makes of the programs, on CPU and, ahead of time, for a TPU.

A copy of a cache inside the decode loop costs more than the forward it serves, and is
invisible in the Python code; so is a host callback. These tests read the compiled text.
"""

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import pytest
import toy
from jax.experimental.compilation_cache import compilation_cache

from jaxdec import batching, decoding, program, strategies
from jaxdec.cache import BLOCK as BLOCK_SLOTS
from jaxdec.draft_length import when_wanted
from jaxdec.drafters.draft_model import draft_model
from jaxdec.drafters.dspark import block_drafter
from jaxdec.drafters.eagle import eagle, recurrent_net
from jaxdec.drafters.first_of import first_of
from jaxdec.drafters.lookup import lookup
from jaxdec.drafters.mtp import mtp
from jaxdec.drafters.none import none
from jaxdec.drafters.recurrent_tree import recurrent_tree
from jaxdec.models.block import BlockConfig, make_block_net
from jaxdec.models.block_weights import init_block_params
from jaxdec.models.config import ModelConfig
from jaxdec.models.decoder import abstract_params, make_model
from jaxdec.models.eagle import init_eagle_params
from jaxdec.models.eagle_config import EagleConfig
from jaxdec.models.mtp import MtpConfig, init_mtp_params, make_mtp
from jaxdec.types import DrafterParams, StrategyParams

BATCH, SLOTS = 2, 64
CAPACITY = 1024
TPU_CAPACITY = 2**19
"""So that a cache (268 MB) does not fit into a chip's vector memory: the TPU compiler
moves a small one there as a whole, which is not the copy that is looked for."""
CONFIG = ModelConfig(
    family="llama",
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_positions=8192,
    tie_embeddings=True,
)
EAGLE = EagleConfig(
    layers=dataclasses.replace(CONFIG, num_layers=1),
    taps=(0, 1, 2),
    target_hidden_size=128,
    draft_vocab_size=300,
    own_embedding=False,
    own_head=True,
    draft_length=4,
)
BLOCK = BlockConfig(
    layers=dataclasses.replace(CONFIG, num_layers=2, qk_norm=True),
    taps=(0, 1, 2),
    block_size=4,
    sample_from_anchor=True,
    mask_token=0,
    draft_vocab_size=300,
    own_embedding=False,
    own_head=True,
    markov="none",
    markov_rank=0,
    confidence="none",
    windows=(None, None),
    causal=(False, False),
)
STRATEGIES = (
    "none",
    "lookup",
    "widths",
    "draft_model",
    "rejection",
)
TRAINED = (
    "eagle_tree",
    "eagle_wide_tree",
    "eagle",
    "peagle",
    "mtp",
    "mtp_modules",
    "dflash",
    "dspark",
    "first_of",
)
"""On CPU only: they take long to compile for a TPU."""


def cache_shape(capacity, batch=BATCH):
    return f"[{batch},{CONFIG.num_kv_heads},{capacity},{CONFIG.head_dim}]"


def trained(name, dtype):
    """A drafter that reads the target, and the shapes of its own arrays."""
    if name in ("dflash", "dspark"):
        has_heads = name == "dspark"
        config = dataclasses.replace(
            BLOCK,
            markov="vanilla" if has_heads else "none",
            markov_rank=16 if has_heads else 0,
            confidence="hidden_and_previous" if has_heads else "none",
        )
        drafter = block_drafter(make_block_net(config, dtype=dtype))
        init = init_block_params
    elif name.startswith("mtp"):
        num = 2 if name == "mtp_modules" else 1
        config = MtpConfig(
            block=dataclasses.replace(CONFIG, num_layers=num),
            num_target_layers=CONFIG.num_layers,
            hidden_source="post",
            recycle="post",
        )
        drafter, init = mtp(make_mtp(config, dtype=dtype), 4), init_mtp_params
    else:
        is_parallel = name == "peagle"
        config = dataclasses.replace(EAGLE, mask_token=3 if is_parallel else None)
        net, init = recurrent_net(config, dtype=dtype), init_eagle_params
        drafter = eagle(config, length=4, dtype=dtype)
        if name.endswith("_tree"):
            # The wide one writes as many entries as may be a chunk.
            nodes = 20 if "wide" in name else 12
            drafter = recurrent_tree(net, nodes=nodes, depth=4, width=3)
    return drafter, jax.eval_shape(lambda: init(config, jax.random.key(0), dtype))


def build(name, capacity, is_optional=False):
    """A strategy at the test's shapes, and the shapes of its arrays."""
    dtype = "bfloat16"
    target = abstract_params(CONFIG, dtype)
    accept = decoding.acceptance.match
    drafter, params, widths = none(), (), ()
    if name == "lookup":
        drafter = lookup(4)
    elif name == "widths":
        drafter, widths = lookup(4), (0, 2, 4)
    elif name in ("draft_model", "rejection"):
        first = make_model(CONFIG, dtype=dtype, num_layers=1)
        drafter = draft_model(first, 4, coupled=name == "draft_model")
        params = DrafterParams(own=None, shared=target)
        if name == "rejection":
            accept = decoding.acceptance.rejection
    elif name == "first_of":
        second, own = trained("dspark", dtype)
        drafter = first_of(lookup(4), second)
        params = DrafterParams(own=((), own), shared=((), target))
    elif name in TRAINED:
        drafter, own = trained(name, dtype)
        params = DrafterParams(own=own, shared=target)
    if is_optional and drafter.max_length:
        drafter = when_wanted(drafter)
    strategy = decoding.speculative(
        make_model(CONFIG, dtype=dtype, taps=drafter.taps),
        drafter,
        accept,
        capacity=capacity,
        widths=widths,
    )
    return strategy, StrategyParams(target=target, drafter=params)


def request_shapes(capacity):
    key = program.ProgramKey(
        config=strategies.lookup(4),
        batch_size=BATCH,
        capacity=capacity,
        num_slots=SLOTS,
        num_stop_slots=4,
        num_bias_slots=8,
    )
    return program.abstract_request(types.SimpleNamespace(mesh=None), key)


def compiled_texts(name, capacity, sharding=None):
    """Optimised text of prefill and of the whole loop."""

    def put(tree):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    strategy, params = build(name, capacity)
    programs = decoding.jit_programs(strategy, SLOTS)
    request = request_shapes(capacity)
    state = jax.eval_shape(strategy.prefill, params, request)
    steps = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding)
    prefill = programs.prefill.trace(put(params), put(request))
    loop = programs.generate.trace(put(params), put(state), steps)
    options = toy.OPTIMISED if sharding is None else None
    platforms = {} if sharding is None else {"lowering_platforms": ("tpu",)}
    return {
        "prefill": prefill.lower(**platforms).compile(options).as_text(),
        "loop": loop.lower(**platforms).compile(options).as_text(),
    }


def cache_copies(text, capacity=CAPACITY, batch=BATCH, with_entry=False):
    """Copies of a whole cache, in the entry computation only if asked, as HLO lines."""
    copies, inside_entry = [], False
    shape = re.escape(cache_shape(capacity, batch))
    pattern = re.compile(r"= \(?\w+" + shape + r"\S* (copy|transpose)")
    for line in text.splitlines():
        if line and not line.startswith((" ", "}")):
            inside_entry = line.startswith("ENTRY")
        if (with_entry or not inside_entry) and pattern.search(line):
            copies.append(line.strip()[:120])
    return copies


def host_calls(text):
    """Custom calls into Python, and transfers to or from the host."""
    found = re.findall(r'custom_call_target="([^"]*(?:callback|python)[^"]*)"', text)
    return found + re.findall(r" (infeed|outfeed|send|recv)\(", text)


def test_the_checks_can_fail():
    shape = (2, 2, 1024, 32)

    def calls_back(x):
        def host(y):
            return y

        return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    x = jnp.zeros(shape)
    text = (
        "%body (p: f32[2,2,1024,32]) -> f32[2,2,1024,32] {\n"
        "  %copy.1 = f32[2,2,1024,32]{3,2,1,0} copy(%p)\n}\n"
        "ENTRY %main {\n  %copy.2 = f32[2,2,1024,32]{3,2,1,0} copy(%q)\n}\n"
    )
    assert len(cache_copies(text)) == 1
    assert host_calls(jax.jit(calls_back).lower(x).compile().as_text())


@pytest.mark.parametrize("name", STRATEGIES + TRAINED)
def test_cpu_program_copies_no_cache_in_its_loop(name):
    for kind, text in compiled_texts(name, CAPACITY).items():
        assert cache_shape(CAPACITY) in text
        assert cache_copies(text) == [], kind
        assert host_calls(text) == [], kind
        assert "f64[" not in text


@pytest.mark.parametrize("name", ["none", "lookup", "draft_model"])
def test_slots_change_in_place(name):
    """A step, a chunk and an insertion copy no cache, not even once."""
    strategy, params = build(name, CAPACITY, is_optional=True)
    slots = batching.jit_slots(batching.slots(strategy, BATCH), toy.OPTIMISED)
    state = jax.eval_shape(slots.empty)
    row = jax.eval_shape(slots.blank)
    is_free = jax.ShapeDtypeStruct((BATCH,), bool)
    for function, inputs in (
        (slots.step, (params, state, is_free, jnp.int32(1))),
        (slots.read, (params, row)),
        (slots.insert, (state, row, jnp.int32(0))),
    ):
        text = function.lower(*inputs).compile().as_text()
        batch = 1 if function is slots.read else BATCH
        assert cache_shape(CAPACITY, batch) in text
        assert cache_copies(text, batch=batch, with_entry=True) == []


@pytest.fixture(scope="module", autouse=True)
def compiled_here():
    """A program that comes out of the cache need not have its text, and one for a TPU
    cannot be read back without a TPU."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def test_layers_of_a_branch_read_their_caches_in_one_place():
    """Blocks of all layers at once, in fresh memory, took half of a step."""

    def temporaries(num_layers):
        config = dataclasses.replace(CONFIG, num_layers=num_layers)
        model = make_model(config)
        cache = jax.eval_shape(lambda: model.init_cache(BATCH, CAPACITY))
        tokens = jax.ShapeDtypeStruct((BATCH, 3), jnp.int32)

        def scores(which, params, cache, tokens, position):
            def of_width(num):
                def branch():
                    inputs = tokens[:, :num], position[:, :num], None
                    output = model.read(params, cache, *inputs)[1]
                    return output.logits[:, 0]

                return branch

            return jax.lax.switch(which, [of_width(1), of_width(3)])

        which, params = jax.ShapeDtypeStruct((), jnp.int32), abstract_params(config)
        lowered = jax.jit(scores).lower(which, params, cache, tokens, tokens)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    block = BATCH * CONFIG.num_kv_heads * BLOCK_SLOTS * CONFIG.head_dim * 4
    assert temporaries(6) - temporaries(2) < block


@pytest.fixture(scope="module")
def tpu():
    """One chip of a v5e slice, described by its compiler; no device is needed."""
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed")
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


@pytest.mark.tpu
@pytest.mark.xdist_group("libtpu")  # One process at a time may hold the TPU compiler.
@pytest.mark.parametrize("name", STRATEGIES)
def test_tpu_program_stays_on_the_chip(name, tpu):
    for kind, text in compiled_texts(name, TPU_CAPACITY, tpu).items():
        assert cache_shape(TPU_CAPACITY) in text
        assert cache_copies(text, TPU_CAPACITY) == [], kind
        assert host_calls(text) == [], kind
        assert "f64[" not in text, kind
        assert "<=" not in re.sub(r"/\*.*?\*/|metadata=\{[^}]*\}", "", text), (
            f"{kind} has a dynamic shape"
        )
