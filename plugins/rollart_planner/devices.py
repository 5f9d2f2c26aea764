"""Figures of common devices from public data sheets, for dense bfloat16.

Takes: a device's name. Gives: its FLOP/s, bytes/s, memory and price. Never: measures. A cluster
file can add devices and override figures.

FLOP/s and bytes/s are the vendors' peaks without sparsity (NVIDIA: the data sheets of A100, H100,
H200, L40S, L4, A10, T4 and V100, of which the last two support only float16, and of HGX B200; AWS's
page of its A10G instances; the white paper of the Ada generation for the RTX 4090; AMD: the data
sheet of MI300X). H20 has no public sheet; its figures are those that server vendors publish.

Links are in bytes/s of one direction, from the same sheets. To other devices of the machine: half
of NVLink's (or Infinity Fabric's) total, else PCIe. To the host: 16 lanes of PCIe 3, 4 or 5 (16, 32
or 64 GB/s).

Prices are rounded on-demand prices per device and hour from public price lists of specialised
clouds in the given month. They differ by a factor of two or more between clouds. Set your own
prices in the cluster file if you compare by price.

A ``cpu`` device is one core of a recent server: AVX-512 with bfloat16, and its share of the memory
channels of its socket. The host cores of an accelerator are a separate pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CPU, SERVERLESS = "cpu", "serverless"
GB = 10**9


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of device."""

    flops_per_s: float
    """Peak dense bfloat16 FLOP/s."""
    bytes_per_s: float
    """Peak memory bandwidth in bytes/s."""
    memory_bytes: int
    price_per_hour: float
    """US dollars per hour."""
    link_bytes_per_s: float = 0.0
    """Peak bytes/s to another device of the machine."""
    host_bytes_per_s: float = 0.0
    """Peak bytes/s to the memory of the machine."""


DEVICES: Mapping[str, Device] = {
    "A100-40GB": Device(312e12, 1.555e12, 40 * GB, 1.3, 300e9, 32e9),
    "A100-80GB": Device(312e12, 2.039e12, 80 * GB, 1.5, 300e9, 32e9),
    "H100-SXM": Device(989e12, 3.35e12, 80 * GB, 2.95, 450e9, 64e9),
    "H100-PCIe": Device(756e12, 2.0e12, 80 * GB, 2.4, 64e9, 64e9),
    "H200": Device(989e12, 4.8e12, 141 * GB, 4.0, 450e9, 64e9),
    "H20": Device(148e12, 4.0e12, 96 * GB, 1.5, 450e9, 64e9),
    "B200": Device(2250e12, 8.0e12, 180 * GB, 5.5, 900e9, 64e9),
    "L40S": Device(362e12, 0.864e12, 48 * GB, 1.0, 32e9, 32e9),
    "L4": Device(121e12, 0.3e12, 24 * GB, 0.8, 32e9, 32e9),
    "A10G": Device(70e12, 0.6e12, 24 * GB, 1.0, 32e9, 32e9),
    "RTX-4090": Device(165e12, 1.008e12, 24 * GB, 0.5, 32e9, 32e9),
    "A10": Device(125e12, 0.6e12, 24 * GB, 0.7, 32e9, 32e9),
    "T4": Device(65e12, 0.32e12, 16 * GB, 0.4, 16e9, 16e9),
    "V100-16GB": Device(125e12, 0.9e12, 16 * GB, 0.6, 150e9, 16e9),
    "V100-32GB": Device(125e12, 0.9e12, 32 * GB, 0.8, 150e9, 16e9),
    "MI300X": Device(1307e12, 5.3e12, 192 * GB, 2.5, 448e9, 64e9),
    CPU: Device(0.1e12, 5e9, 4 * GB, 0.04, 5e9, 5e9),
    SERVERLESS: Device(0.0, 0.0, 0, 0.06),
}
"""Prices are from 2025-06; those of A100-80GB, H100-SXM and H200 are from 2026-05."""

ALIASES: Mapping[str, str] = {
    "A100": "A100-80GB",
    "H100": "H100-SXM",
    "V100": "V100-16GB",
    "4090": "RTX-4090",
    "H100 80GB HBM3": "H100-SXM",
    "A100-SXM4-40GB": "A100-40GB",
    "A100-PCIE-40GB": "A100-40GB",
    "A100-SXM4-80GB": "A100-80GB",
    "A100 80GB PCIe": "A100-80GB",
    "GeForce RTX 4090": "RTX-4090",
    "Tesla T4": "T4",
    "Tesla V100-SXM2-16GB": "V100-16GB",
    "Tesla V100-SXM2-32GB": "V100-32GB",
    "AMD Instinct MI300X": "MI300X",
}
"""A name without a variant means the most common variant. Others are the names that CUDA reports
after ``NVIDIA``."""


NETWORK_BYTES_PER_S = 25e9
"""Peak bytes/s between machines for each device: 200 Gb/s, as in a DGX A100 (its data sheet: one
port per device). A DGX H100 has twice as much; many clouds have less."""


def find_device(name: str, own: Mapping[str, Device] | None = None) -> Device | None:
    """Return the figures of a device, or None if it is unknown.

    Args:
        name: As in a cluster file. Case, ``_``, ``-`` and spaces are ignored.
        own: Devices in addition to the table's. They take precedence.
    """
    for table in (own or {}, DEVICES):
        known = {_plain(key): device for key, device in table.items()}
        known |= {_plain(a): known[_plain(to)] for a, to in ALIASES.items() if _plain(to) in known}
        if (device := known.get(_plain(name).removeprefix("nvidia"))) is not None:
            return device
    return None


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())
