"""TPU slices that a program is compiled for: what a device holds, and how fast it is.

A topology is described by the TPU's compiler (libtpu), and needs no TPU. A device of
v4, v5e, v5p and v6e is a chip; a chip of TPU7x is two devices. Bandwidth and peak are
those of Google's documentation, https://docs.cloud.google.com/tpu/docs/{v4,v5e,...};
memory is what the compiler (libtpu 0.0.52) lets a program use.
"""

import dataclasses
import importlib.util
import os
import re

import numpy as np
from jax.sharding import Mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One device."""

    kind: str
    memory_bytes: float
    """What a program may use."""
    bytes_per_s: float
    """Of memory, at best."""
    flops_per_s: float
    """Of bfloat16 matmuls, at best."""


_KINDS: dict[str, tuple[float, float, float]] = {
    "TPU v4": (30.75, 1200, 275),
    "TPU v5 lite": (15.75, 819, 197),
    "TPU v5": (95.73, 2765, 459),
    "TPU v6 lite": (31.24, 1638, 918),
    "TPU7x": (94.74, 7380 / 2, 2307 / 2),  # Half of a chip.
}
"""By the name that JAX has for it: GiB that a program may use, GB/s, TFLOP/s."""

_NAMES = ("v4", "v5e", "v5p", "v6e", "tpu7x")
"""Kinds as topologies name them."""

_SURROUNDINGS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Environment variables with which libtpu does not look for a TPU."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """Devices of one kind."""

    name: str
    mesh: Mesh
    """All of them over the axis ``"model"``."""
    device: Device


def find_topology(name: str) -> Topology:
    """A slice of TPUs by its name, such as ``"v5e:2x2"``.

    Raises:
        ValueError: no such topology, or no compiler for it here.
    """
    found = re.fullmatch(r"(\w+?):([1-9]\d*(?:x[1-9]\d*){1,2})", name)
    if found is None or found[1] not in _NAMES:
        raise ValueError(
            f"unknown topology {name!r}; give a TPU's kind and the shape of the slice, "
            f"such as v5e:2x2 or v5p:2x2x1 (kinds: {', '.join(_NAMES)})"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"compiling for {name} needs the TPU's compiler, which is not installed "
            "here; run `pip install libtpu` (Linux, x86-64; no TPU is needed)"
        )
    for variable, value in _SURROUNDINGS.items():
        os.environ.setdefault(variable, value)
    from jax.experimental import topologies

    # Both cores of a v4 chip are one device.
    options = {"chip_config_name": "megacore"} if found[1] == "v4" else {}
    try:
        devices = topologies.get_topology_desc(
            platform="tpu", topology_name=name, **options
        ).devices
    except Exception as error:
        raise ValueError(
            f"the TPU's compiler has no topology {name!r}: {error}; v5e and v6e are "
            "squares such as 2x2, v4, v5p and tpu7x are blocks such as 2x2x1"
        ) from error
    kind = devices[0].device_kind
    memory, rate, peak = _KINDS[kind]
    return Topology(
        name=name,
        mesh=Mesh(np.asarray(devices).reshape(1, -1), ("data", "model")),
        device=Device(
            kind=kind,
            memory_bytes=memory * 2**30,
            bytes_per_s=rate * 1e9,
            flops_per_s=peak * 1e12,
        ),
    )
