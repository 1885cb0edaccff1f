# SPDX-License-Identifier: Apache-2.0
"""Tests memory limits that the NVIDIA driver itself enforces on a container's control group. The plugin polls these
limits. It repairs or reports a limit that is lost, removed or too low, and reports a container without a limit.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from vgpu_plugin._shared.abi import files as abi_files
from vgpu_plugin._shared.gpu.memory_limits import UNLIMITED, Limits
from vgpu_plugin.allocation.driver_limits import DriverLimits
from vgpu_plugin.allocation.enforcement import Enforcement
from vgpu_plugin.allocation.leases import Leases, Terms
from vgpu_plugin.errors import Refused
from vgpu_plugin.inject import cdi, limit_hook

from .conftest import FakeGpus
from .samples import gpus

MIB = 1 << 20


class Place:
    """A folder of allocations, a folder of control groups, and a driver double that enforces limits by the cgroup
    controller ``misc``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.cgroups = folder / "allocations", folder / "cgroup"
        self.source = FakeGpus(gpus("T4", "T4"))
        self.source.backend = "misc"
        self.uuid = self.source.listed[0].uuid
        self.told: list[tuple[str, str]] = []
        self.limits = DriverLimits(self.folder, self.cgroups, self.source, Enforcement(None, self.source))  # type: ignore[arg-type]
        self.limits.tell = lambda name, text: self.told.append((name, text))

    def container(self, name: str, mib: int = 1000, enforcement: str = "driver", card: int = 0, **more: object) -> str:
        """Makes a container with the limit that the CDI hook sets at a container's start; returns the folder of its
        control group.
        """
        group = self.cgroups / name
        group.mkdir(parents=True)
        (group / "cgroup.events").write_text("populated 1\nfrozen 0\n")
        (self.folder / name).mkdir(parents=True)
        self.promise(name, mib, card)
        words = {"group": f"/{name}", "inode": group.stat().st_ino, "enforcement": enforcement, "reason": "no luck"}
        words["devices"] = [{"uuid": self.uuid, "soft": 0, "hard": mib * MIB}]
        (self.folder / name / "driver-limit").write_text(json.dumps({**words, **more}))
        self.source.limits[self.uuid, str(group)] = Limits(0, mib * MIB, 7)
        return str(group)

    def promise(self, name: str, mib: int, card: int = 0) -> None:
        device = {"uuid": self.uuid, "memory_bytes": mib * MIB, "card_bytes": card * MIB}
        (self.folder / name / "limits").write_bytes(abi_files.pack_limits({"allocation": name, "devices": [device]}))

    def state(self) -> list[tuple]:
        self.limits.poll()
        return [
            (one.allocation, one.expected // MIB, one.found // MIB, one.used, one.fault) for one in self.limits.state
        ]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_correct_limit_has_no_fault(place: Place) -> None:
    place.container("a")
    assert place.state() == [("a", 1000, 1000, 7, "")]
    assert (place.told, place.limits.notes(), place.limits.repaired) == ([], [], 0)


@pytest.mark.parametrize(
    "found", [None, Limits(0, UNLIMITED, 7), Limits(0, 500 * MIB, 7), Limits(3 * MIB, 1000 * MIB, 7)]
)
def test_lost_driver_limit_is_set_again(place: Place, found: Limits | None) -> None:
    group = place.container("a")
    if found is None:
        del place.source.limits[place.uuid, group]
    else:
        place.source.limits[place.uuid, group] = found
    ((_name, expected, now, _used, fault),) = place.state()
    assert (expected, now) == (1000, 1000)
    assert "it was set again" in fault
    assert place.source.limits[place.uuid, group].hard == 1000 * MIB
    assert [(name, "it was set again" in text) for name, text in place.told] == [("a", True)]
    assert place.limits.repaired == 1
    assert place.state()[0][-1] == "", "expected no fault at the next poll"


def test_ineffective_set_stays_a_fault(place: Place) -> None:
    group = place.container("a")
    place.source.limits[place.uuid, group] = Limits(0, UNLIMITED, 7)
    place.source.drops = True
    assert "and cannot be set: the container uses more than this limit, or the driver lost it" in place.state()[0][-1]
    assert "no limit, expected 1000 MiB" in place.limits.notes()[0]
    place.state()
    assert len(place.told) == 1, "expected one event for all polls"


def test_resize_sets_the_drivers_limit(place: Place) -> None:
    group = place.container("a", 1000, card=15360)
    place.promise("a", 3000, 15360)
    assert place.limits.apply("a") == ""
    assert place.source.limits[place.uuid, group].hard == 3000 * MIB
    place.promise("a", 20000, 15360)
    assert place.limits.apply("a") == ""
    assert place.source.limits[place.uuid, group].hard == 15360 * MIB, "expected the GPU's memory as the limit"
    place.source.drops = True
    place.promise("a", 10, 15360)
    assert "cannot be set" in place.limits.apply("a")
    assert place.limits.apply("of nobody") == ""


def test_shared_group_keeps_the_sum_of_its_allocations(place: Place) -> None:
    """Two allocations share one control group, so its limit is the sum of both and not the value in one limits file."""
    place.container("a", 5000, shared_with=1)
    place.promise("a", 2000)
    assert place.state() == [("a", 5000, 5000, 7, "")]


# Signs by which the plugin sees that a container has ended: the case → the function that causes it.
ENDED = {
    "control group removed": lambda place, group: [one.unlink() for one in group.iterdir()] and group.rmdir(),
    "control group empty": lambda place, group: (group / "cgroup.events").write_text("populated 0\n"),
    "control group recreated": lambda place, group: (place.folder / "a/driver-limit").write_text(
        (place.folder / "a/driver-limit").read_text().replace(str(group.stat().st_ino), "1")
    ),
}


@pytest.mark.parametrize("case", ENDED)
def test_ended_container_is_not_polled(place: Place, case: str) -> None:
    group = Path(place.container("a"))
    ENDED[case](place, group)
    assert place.state() == []
    if case == "control group empty":
        assert place.source.limits[place.uuid, str(group)].hard == UNLIMITED, (
            "expected a cleared limit while the group exists"
        )


def test_enforcement_by_the_library_only_is_reported(place: Place) -> None:
    place.container("a", enforcement="library")
    assert place.state() == []
    assert place.limits.notes() == ["allocation a: only the library enforces its memory limit: no luck"]


def test_ended_allocation_clears_the_limit(place: Place) -> None:
    group = place.container("a")
    place.limits.clear("a")
    assert place.source.limits[place.uuid, group].hard == UNLIMITED
    assert place.state() == []
    place.limits.clear("a")


# Damaged texts of the file in which the hook records the container's control group.
@pytest.mark.parametrize("text", ["", "{", "[]", '{"group": 1}', '{"group": "/a", "inode": "x"}'])
def test_damaged_file_is_skipped(place: Place, text: str) -> None:
    place.container("a")
    place.container("b")
    (place.folder / "a/driver-limit").write_text(text)
    assert [one[0] for one in place.state()] == ["b"]


def test_gpus_have_the_hook_and_mig_devices_do_not() -> None:
    hook = limit_hook.hook("/p/vgpu-limit-hook", "/run/a", "/sys/fs/cgroup", "/lib/nvml.so", "misc", "driver")
    assert hook["hookName"] == "createRuntime"
    assert hook["args"] == [
        *("vgpu-limit-hook", "--allocations", "/run/a", "--cgroup-root", "/sys/fs/cgroup"),
        *("--nvml", "/lib/nvml.so", "--backend", "misc", "--enforce", "driver"),
    ]
    devices = [("GPU-1", {"mounts": []})]
    assert cdi.with_hooks(devices, [hook]) == [("GPU-1", {"mounts": [], "hooks": [hook]})]
    assert cdi.with_hooks(devices, []) == devices


def test_limits_have_the_gpus_real_size(node) -> None:
    """If the driver enforces a limit, it reports the limit as the GPU's size. So the library reads the GPU's real size
    from the limits file.
    """
    pool, allocator, _files = node.parts()
    source = FakeGpus(node.gpus)
    source.backend = "misc"
    allocator.enforcement = Enforcement(node.paths, source)
    allocator.enforcement.verdict = allocator.enforcement.verdict._replace(active="driver-misc")
    allocator.enforcement.gpus = tuple(node.gpus)
    (answer,) = allocator.allocate([[pool.slices[0].id]])
    (device,) = allocator.records.get(answer.allocation).limits["devices"]
    assert device["card_bytes"] == node.gpus[0].memory_mib * MIB
    allocator.enforcement.verdict = allocator.enforcement.verdict._replace(active="library")
    (answer,) = allocator.allocate([[pool.slices[1].id]])
    assert "card_bytes" not in allocator.records.get(answer.allocation).limits["devices"][0]


# --- containers that started without the hook


def enforced(node, requested: str, strategies: tuple[str, ...] = ("cdi-cri",)):
    """Returns the slices and the allocator of a node whose driver has proven, before any kubelet started, that it
    enforces limits.
    """
    pool, allocator, _files = node.parts()
    source = FakeGpus(node.gpus)
    source.backend = "misc"
    allocator.enforcement = Enforcement(node.paths, source)
    allocator.enforcement.requested = requested
    allocator.enforcement.verdict = allocator.enforcement.verdict._replace(active="driver-misc")
    allocator.hand_over = replace(allocator.hand_over, strategies=strategies)
    return pool, allocator


@pytest.mark.parametrize(
    ("requested", "strategies", "refused"),
    [
        ("driver", ("cdi-cri",), False),
        ("driver", ("envvar", "cdi-annotations"), False),
        ("driver", ("envvar",), True),
        ("driver", ("volume-mounts",), True),
        ("auto", ("envvar",), False),
    ],
)
def test_pod_without_cdi_does_not_start_if_the_driver_must_enforce_limits(node, requested, strategies, refused) -> None:
    """The kubelet may start after this program, so the program checks at each allocation whether the container starts
    with CDI.
    """
    pool, allocator = enforced(node, requested, strategies)
    if refused:
        with pytest.raises(Refused, match="starts without CDI, so no hook"):
            allocator.allocate([[pool.slices[0].id]])
        assert allocator.records.all() == []
    else:
        allocator.allocate([[pool.slices[0].id]])


@pytest.mark.parametrize(
    ("requested", "terms", "refused"),
    [
        ("driver", Terms("container", "x", "docker", by_cdi=False), True),
        ("driver", Terms("container", "x", "podman", by_cdi=True), False),
        ("driver", Terms("exec", "x"), True),  # A host program is in no container's control group.
        ("driver", Terms("lease"), False),  # This lease is allowed, because the isolation check needs it.
        ("auto", Terms("container", "x", "docker", by_cdi=False), False),
        ("auto", Terms("exec", "x"), False),
    ],
)
def test_lease_without_cdi_is_refused_if_the_driver_must_enforce_limits(node, requested, terms, refused) -> None:
    pool, allocator = enforced(node, requested)
    leases = Leases(allocator, pool, node.paths.checkpoint, lambda: False)
    if refused:
        with pytest.raises(Refused, match="starts without CDI, so no hook"):
            leases.lease(terms=terms)
        assert allocator.records.all() == []
    else:
        leases.lease(terms=terms)


# A process that uses the container's ledger (its file of memory counts) shows that the library runs in the container.
# columns: whether the driver enforces limits; whether a process uses the ledger; whether the hook ran; whether the
# container is expected to be reported
@pytest.mark.parametrize(
    ("by_driver", "in_use", "hook", "named"),
    [
        (True, True, "none", True),
        (True, True, "of an ended container", True),
        (True, True, "ran", False),
        (True, False, "none", False),
        (False, True, "none", False),
    ],
)
def test_container_without_the_hook_is_reported(place: Place, by_driver, in_use, hook, named) -> None:
    """The library runs in the container, but the container's control group has no limit: it was started without CDI or
    before the hook was installed.
    """
    place.limits.in_use = lambda path: in_use and path == str(place.folder / "a/rw/ledger")
    verdict = place.limits._enforcement.verdict
    place.limits._enforcement.verdict = verdict._replace(active="driver-misc" if by_driver else "library")
    group = Path(place.container("a"))
    if hook == "none":
        (place.folder / "a/driver-limit").unlink()
    elif hook != "ran":
        (group / "cgroup.events").write_text("populated 0\n")
    for _look in range(2):
        place.limits.poll()
    assert (list(place.limits.without) == ["a"]) is named
    notes = [one for one in place.limits.notes() if one.startswith("allocation a")]
    assert ["no CDI hook ran" in one for one in notes] == [True] * named
    assert ["no CDI hook ran" in text for _name, text in place.told] == [True] * named, "one event for all polls"
