"""The devices that a program is compiled for: what they hold, and how fast they are.

A TPU topology is described by the TPU's compiler (libtpu), and needs no TPU. A device
of v4, v5e, v5p and v6e is a chip; a chip of TPU7x is two devices.

Capacity, bandwidth and peak are those of Google's documentation, per chip:
https://docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}. What a program may use of
the capacity is what the compiler (libtpu 0.0.52) names when it refuses a larger one.
"""

import dataclasses
import importlib.util
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxdec.planning.bandwidth import memory_bandwidth

GIB = 2**30
EXTRA = "tpu-plan"
"""The extra of this package that brings the TPU's compiler."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One device."""

    kind: str
    memory_bytes: float
    """What a program may use."""
    bytes_per_s: float
    """Of memory, at best."""
    flops_per_s: float | None
    """Of bfloat16 matmuls, at best; None if it is not known."""


_KINDS: dict[str, Device] = {
    name: Device(
        kind=name,
        memory_bytes=usable * GIB,
        bytes_per_s=rate * 1e9,
        flops_per_s=peak * 1e12,
    )
    for name, usable, rate, peak in (
        ("TPU v4", 30.75, 1200, 275),
        ("TPU v5 lite", 15.75, 819, 197),
        ("TPU v5", 95.73, 2765, 459),
        ("TPU v6 lite", 31.24, 1638, 918),
        # Half of a chip.
        ("TPU7x", 94.74, 7380 / 2, 2307 / 2),
    )
}
"""By the name that JAX has for it: GiB that a program may use, GB/s, TFLOP/s."""

_OPTIONS: dict[str, dict[str, Any]] = {
    "v4": {"chip_config_name": "megacore"},
    "v5e": {},
    "v5p": {},
    "v6e": {},
    "tpu7x": {},
}
"""By kind, what describing a topology wants besides its name."""

_SURROUNDINGS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Environment variables."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """Devices, and what one of them is."""

    name: str
    platform: str
    devices: Sequence[Any]
    device: Device

    def mesh(self, data: int = 1) -> Mesh:
        """All devices: `data` groups over the axis ``"data"``, else over ``"model"``.

        Raises:
            ValueError: the devices cannot be divided so.
        """
        num = len(self.devices)
        if data < 1 or num % data:
            raise ValueError(
                f"{self.name} has {num} devices, which do not divide into {data} "
                "groups; give a divisor as data"
            )
        shape = (data, num // data)
        return Mesh(np.asarray(self.devices).reshape(shape), ("data", "model"))


def find_topology(name: str) -> Topology:
    """The devices of a topology by name; see `jaxdec.plan.plan`.

    Raises:
        ValueError: no such topology, or no compiler for it here.
    """
    if name == "cpu":
        return _this_machine()
    found = re.fullmatch(r"(\w+?):(\d+(?:x\d+){1,2})", name)
    if found is None or found[1] not in _OPTIONS:
        raise ValueError(
            f"unknown topology {name!r}; give a TPU's kind and the shape of the slice, "
            f"such as v5e:2x2 or v5p:2x2x1 (kinds: {', '.join(_OPTIONS)}), or cpu"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"compiling for {name} needs the TPU's compiler, libtpu, which is not "
            f'installed here; run `pip install "jaxdec[{EXTRA}]"` (Linux, x86-64; no '
            "TPU is needed), or use the topology cpu"
        )
    # Where there is no TPU, libtpu must not look for one.
    for variable, value in _SURROUNDINGS.items():
        os.environ.setdefault(variable, value)
    from jax.experimental import topologies

    try:
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=name, **_OPTIONS[found[1]]
        )
    except Exception as error:
        raise ValueError(
            f"the TPU's compiler has no topology {name!r}: {error}; v5e and v6e are "
            "squares such as 2x2, v4, v5p and tpu7x are blocks such as 2x2x1"
        ) from error
    devices = tuple(described.devices)
    kind = devices[0].device_kind
    if kind not in _KINDS:
        raise ValueError(
            f"{name} is made of {kind!r}, whose memory is not known here; use one of "
            f"{', '.join(_OPTIONS)}"
        )
    return Topology(name=name, platform="tpu", devices=devices, device=_KINDS[kind])


def _this_machine() -> Topology:
    """The CPU at hand; its bandwidth is measured, its peak is not known."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    device = Device(
        kind="cpu",
        memory_bytes=pages,
        bytes_per_s=memory_bandwidth(),
        flops_per_s=None,
    )
    devices = tuple(jax.local_devices(backend="cpu")[:1])
    return Topology(name="cpu", platform="cpu", devices=devices, device=device)
