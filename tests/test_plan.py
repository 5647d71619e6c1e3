"""Plans from a configuration alone: counts against XLA, memory, and what is printed."""

import dataclasses
import functools
import importlib.util
import json
import math

import jax
import pytest

from jaxdec import console
from jaxdec.abstract_lm import STRATEGIES, abstract_drafter, abstract_lm, strategy_of
from jaxdec.ahead import DRAFTER, KV, TARGET, Setting, build, compiled, lowered
from jaxdec.ahead import step_work as count_step
from jaxdec.cli import app
from jaxdec.io.checkpoint import CheckpointError
from jaxdec.models.config import ModelConfig
from jaxdec.models.decoder import init_params
from jaxdec.plan import plan
from jaxdec.planning import presets
from jaxdec.planning.bandwidth import weight_bytes
from jaxdec.planning.chips import Device, Topology, find_topology

CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=512,
    hidden_size=128,
    intermediate_size=384,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_positions=4096,
    qk_norm=True,
)
CAPACITY, CONTEXT = 1024, 700
BLOCKS = 3
"""Blocks of 256 slots that 700 live ones lie in."""


@pytest.fixture(autouse=True)
def slow_memory(monkeypatch):
    """Nothing is measured here."""
    monkeypatch.setattr("jaxdec.planning.chips.memory_bandwidth", lambda: 1e9)


@functools.cache
def setting(capacity=CAPACITY, context=CONTEXT, batch=1, topology="cpu"):
    if topology == "cpu":
        device = Device(kind="cpu", memory_bytes=1e9, bytes_per_s=1e9, flops_per_s=None)
        devices = tuple(jax.local_devices(backend="cpu")[:1])
        found = Topology(name="cpu", platform="cpu", devices=devices, device=device)
    else:
        found = find_topology(topology)
    mesh = found.mesh()
    lm = abstract_lm(
        CONFIG, name="tiny", dtype="float32", cache_dtype="float32", mesh=mesh
    )
    return Setting(
        lm=lm,
        mesh=mesh,
        topology=found,
        batch_size=batch,
        capacity=capacity,
        context=context,
    )


def built(name, **options):
    found = setting(**options)
    return build(found, strategy_of(name, found.lm, found.mesh)), found
