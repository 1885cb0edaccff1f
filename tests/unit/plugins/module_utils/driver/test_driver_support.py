# SPDX-License-Identifier: Apache-2.0
"""Tests what follows from the PCI device id of a GPU (its generation and the driver branches that support it) and from
the version text of a driver package (its branch).
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.driver import support as driver_support
from driver_samples import A30, A100, B200, GH200, GTX1080TI, H100, H200, K80, L4, M60, NEW, P100, T4, V100

# columns: PCI device id; expected generation, first branch that supports it (0: any), last branch that supports it (0:
# still supported)
GENERATIONS = [
    (K80, "Kepler", 0, 470), ("0x1023", "Kepler", 0, 470), ("0x0ff2", "Kepler", 0, 470), ("0x11bf", "Kepler", 0, 470),
    ("0x06d1", "Fermi", 0, 390), ("0x1091", "Fermi", 0, 390),
    (M60, "Maxwell", 0, 580), ("0x17fd", "Maxwell", 0, 580), ("0x13bd", "Maxwell", 0, 580),
    (P100, "Pascal", 375, 580), (GTX1080TI, "Pascal", 375, 580), ("0x1bb3", "Pascal", 375, 580),
    (V100, "Volta", 384, 580), ("0x1df6", "Volta", 384, 580),
    (T4, "Turing", 410, 0), ("0x1e04", "Turing", 410, 0), ("0x2187", "Turing", 410, 0),
    (A100, "Ampere", 450, 0), (A30, "Ampere", 460, 0), ("0x2235", "Ampere", 450, 0), ("0x25b6", "Ampere", 450, 0),
    (L4, "Ada", 525, 0), ("0x26b9", "Ada", 525, 0),
    (H100, "Hopper", 525, 0), (H200, "Hopper", 550, 0), (GH200, "Grace Hopper", 535, 0),
    (B200, "Blackwell", 570, 0), ("0x2b85", "Blackwell", 570, 0), ("0x3182", "Blackwell", 580, 0),
]  # fmt: skip


@pytest.mark.parametrize(("device", "name", "first", "last"), GENERATIONS)
def test_device_id_has_a_generation(device, name, first, last):
    found = driver_support.generation(driver_support.device_id(device))
    assert (found.name, found.first, found.last) == (name, first, last)


@pytest.mark.parametrize("device", [NEW, "0x0020", "", "zz", "0x123456"])
def test_unknown_device_id_has_no_generation(device):
    assert driver_support.generation(driver_support.device_id(device)) is None


# columns: version of a package; expected branch of the driver, version without epoch and package revision
@pytest.mark.parametrize(
    ("version", "branch", "plain"),
    [
        ("535.261.03-1", 535, "535.261.03"),
        ("1:580.65.06", 580, "580.65.06"),
        ("535.216.01-0ubuntu0.22.04.1", 535, "535.216.01"),
        ("535.*", 535, "535.*"),
        ("470.256.02-1~deb12u1", 470, "470.256.02"),
        ("1.2", None, "1.2"),
        ("", None, ""),
    ],
)
def test_branch_and_version_of_a_package(version, branch, plain):
    assert (driver_support.branch_of(version), driver_support.upstream(version)) == (branch, plain)


def test_device_id_ranges_overlap_only_for_grace_hopper():
    rows = sorted(driver_support.RANGES)
    for (_low, high, one), (low, _high, other) in zip(rows, rows[1:]):
        assert high < low or "Grace Hopper" in (one.name, other.name)
