# SPDX-License-Identifier: Apache-2.0
"""Tests the NVML calls that limit the GPU memory of a control group (driver 615 and later), and the probe, which sets
and reads a limit to find out whether the host's driver enforces such limits. NVML is simulated.
"""

from __future__ import annotations

import ctypes

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.gpu import memory_limits
from ansible_collections.vgpu.fleet.plugins.module_utils.gpu.memory_limits import PROBE_BYTES, UNLIMITED
from ansible_collections.vgpu.fleet.plugins.module_utils.gpu.nvml import NvmlError


class Library:
    """A simulated NVML. ``codes`` are the return codes by call. ``keeps`` is called with each limit that is set, and
    its result is stored instead, so a test can simulate a driver that stores another limit."""

    def __init__(self, codes=None, keeps=lambda hard: hard, soft=0) -> None:
        self.codes, self.keeps, self.soft = codes or {}, keeps, soft
        self.limits: dict = {}
        self.calls: list = []

    def nvmlDeviceSetMemoryLimits_v1(self, handle, argument):
        words = argument._obj
        self.calls.append(("set", handle, words.group.decode(), words.soft, words.hard))
        if not self.codes.get("set"):
            self.limits[handle] = self.keeps(words.hard)
        return self.codes.get("set", 0)

    def nvmlDeviceGetMemoryLimits_v1(self, handle, argument):
        words = argument._obj
        words.soft, words.hard, words.used = self.soft, self.limits.get(handle, UNLIMITED), 7
        return self.codes.get("get", 0)


def probed(tmp_path, library, **more):
    found = memory_limits.probe(library, [("GPU-0", 10), ("GPU-1", 11)], str(tmp_path), **more)
    assert [one for one in tmp_path.iterdir() if one.is_dir()] == [], "expected no remaining group of the probe"
    return found


def test_probe_passes_on_a_capable_host(tmp_path):
    """On each GPU the probe sets a limit on a control group of its own, reads the limit, clears it and reads again."""
    library = Library()
    assert probed(tmp_path, library) == ("misc", "")
    (group,) = {call[2] for call in library.calls}
    assert group.startswith(f"{tmp_path}/vgpu-probe-")
    assert [(call[1], call[3], call[4]) for call in library.calls] == [
        (handle, 0, hard) for handle in (10, 11) for hard in (PROBE_BYTES, UNLIMITED)
    ]


# columns: NVML with a fault; expected words of the reason why the driver cannot enforce limits
FAULTS = [
    (Library({"set": 3}), "GPU-0: the driver does not enforce limits here"),
    (Library({"get": 3}), "GPU-0: the driver does not enforce limits here"),
    (Library({"set": 4}), "GPU-0: nvmlDeviceSetMemoryLimits_v1 failed with 4"),
    (Library(keeps=lambda hard: UNLIMITED), "GPU-0: a limit of 67108864 bytes reads back as"),
    (Library(keeps=lambda hard: PROBE_BYTES), f"GPU-0: a limit of {UNLIMITED} bytes reads back as hard {PROBE_BYTES}"),
    (Library(soft=1), "soft 1"),
    (object(), "this driver cannot limit the GPU memory of control groups; branch 615 and newer can"),
]


@pytest.mark.parametrize(("library", "said"), FAULTS)
def test_probe_names_the_fault_of_a_host_without_limits(tmp_path, library, said):
    backend, why = probed(tmp_path, library)
    assert (backend, said in why) == ("", True), why


def test_group_that_cannot_be_created_is_named(tmp_path):
    backend, why = memory_limits.probe(Library(), [], str(tmp_path / "none"))
    assert (backend, "no control group can be made in" in why) == ("", True)


@pytest.mark.parametrize(
    ("capacity", "backend"),
    [
        (None, "misc"),
        ("drm/0000:03:00.0/vram0 8514437120\n", "misc"),
        ("nvidia/00000000:02:00.0/vidmem 16106127360\n", "dmem"),
    ],
)
def test_backend_follows_the_dmem_capacity_of_the_kernel(tmp_path, capacity, backend):
    if capacity is not None:
        (tmp_path / "dmem.capacity").write_text(capacity)
    assert probed(tmp_path, Library()) == (backend, "")


@pytest.mark.parametrize(("root", "written", "said"), [("cpu misc", "+misc", ""), ("cpu", "", ""), (None, "", "")])
def test_probe_enables_the_controller(tmp_path, root, written, said):
    if root is not None:
        (tmp_path / "cgroup.controllers").write_text(root)
        (tmp_path / "cgroup.subtree_control").write_text("")
    assert probed(tmp_path, Library()) == ("misc", said)
    if root is not None:
        assert (tmp_path / "cgroup.subtree_control").read_text() == written


def test_limits_of_a_group_are_set_read_and_cleared():
    library = Library()
    memory_limits.set_limits(library, 1, "/g", 5)
    assert memory_limits.get_limits(library, 1, "/g") == (0, 5, 7)
    memory_limits.clear_limits(library, 1, "/g")
    assert memory_limits.get_limits(library, 1, "/g").hard == UNLIMITED
    with pytest.raises(NvmlError, match="failed with 17"):
        memory_limits.get_limits(Library({"get": 17}), 1, "/g")


def test_structures_have_the_sizes_of_nvml():
    """NVML's structure to set a limit has three 64-bit words, and the structure to read one has four. Neither has a
    version field."""
    assert ctypes.sizeof(memory_limits._Set) == 24
    assert ctypes.sizeof(memory_limits._Get) == 32


@pytest.mark.parametrize(("folder", "found"), [("/proc", False), ("/nonexistent", False)])
def test_folder_that_is_not_a_cgroup_is_recognised(folder, found):
    assert memory_limits.is_cgroup2(folder) is found
