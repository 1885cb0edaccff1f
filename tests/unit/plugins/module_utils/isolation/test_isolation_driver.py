# SPDX-License-Identifier: Apache-2.0
"""The check that the driver enforces what is claimed: the limit of the container's own group, and the bypasses."""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.gpu import memory_limits
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import observer, verdicts
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation.verdicts import DriverLimit, Expected

MIB = 1 << 20
SLICE, CARD = 5000 * MIB, 15360 * MIB
GROUP = "/sys/fs/cgroup/kubepods/pod/c"
NONE = memory_limits.UNLIMITED
EXPECTED = Expected("GPU-1", 5000)


class Library:
    """A driver with one limit for each group by ``limits``; ``misc``: without one the nearest above is shown."""

    def __init__(self, limits: dict[str, int], misc: bool, soft: int = 0) -> None:
        self.limits, self.misc, self.soft = limits, misc, soft

    def nvmlDeviceGetMemoryLimits_v1(self, _handle: object, argument: object) -> int:
        words = argument._obj
        group = words.group.decode()
        above = [one for one in self.limits if group == one or group.startswith(one + "/")]
        found = max(above, key=len, default=None) if self.misc else group if group in self.limits else None
        words.soft, words.hard = self.soft, NONE if found is None else self.limits[found]
        return 3 if found is None and self.misc else 0


class Reader:
    def __init__(self, library: Library) -> None:
        self.library = library

    def start(self) -> None:
        pass

    def count(self) -> int:
        return 2

    def handle(self, index: int) -> int:
        return index

    def uuid(self, handle: int) -> str:
        return f"GPU-{handle}"

    def memory(self, handle: int) -> tuple[int, int]:
        return CARD, 0


PARENT = GROUP.rpartition("/")[0]
# What went wrong, the limits that the driver has then, verdict, a part of what is said; for each backend.
FAULTS = [
    ("as it must be", {GROUP: SLICE}, "passed", "group " + GROUP),
    ("the parent has another one", {GROUP: SLICE, PARENT: 9 * SLICE}, "passed", ""),
    ("lost by a reload", {}, "violated", "is claimed: "),
    ("dropped in silence", {GROUP: NONE}, "violated", "the driver has no limit for its group"),
    ("another container's", {GROUP: 2 * SLICE}, "violated", ""),
    ("stale", {GROUP: 300 * MIB}, "violated", ""),
    ("on the parent alone", {PARENT: SLICE}, "violated", ""),
]


@pytest.mark.parametrize("misc", [True, False])
@pytest.mark.parametrize(("what", "limits", "verdict", "said"), FAULTS)
def test_the_limit_is_the_groups_own_and_as_promised(what, limits, verdict, said, misc):
    seen = observer.driver_limit(Reader(Library(limits, misc)), "GPU-1", GROUP)
    found = verdicts.of_driver("driver-misc", seen, EXPECTED)
    assert (found["name"], found["verdict"]) == ("driver-limit", verdict), (what, found)
    assert said in found["detail"]


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        (DriverLimit(GROUP, 0, SLICE, card=CARD), "passed"),
        (DriverLimit(GROUP, 1, SLICE, card=CARD), "violated"),  # dmem leaks a soft limit at each end
        (DriverLimit(GROUP, 0, SLICE - 1, card=CARD), "violated"),
        (DriverLimit(GROUP, 0, SLICE, own=False, card=CARD), "violated"),
        (DriverLimit(GROUP, 0, 3000 * MIB, card=3000 * MIB), "passed"),  # an oversold slice: at most the card
    ],
)
def test_every_figure_counts(seen, verdict):
    assert verdicts.of_driver("driver-dmem", seen, EXPECTED)["verdict"] == verdict


def test_the_hook_was_missing_in_one_of_two_gpus():
    """Each GPU is looked at by its own name."""
    library = Library({GROUP: SLICE}, False)
    answer = library.nvmlDeviceGetMemoryLimits_v1
    library.nvmlDeviceGetMemoryLimits_v1 = lambda handle, words: 3 if handle == 0 else answer(handle, words)
    assert observer.driver_limit(Reader(library), "GPU-1", GROUP).hard == SLICE
    assert observer.driver_limit(Reader(library), "GPU-0", GROUP).hard is None
    assert "NVML lists no GPU-9" in observer.driver_limit(Reader(library), "GPU-9", GROUP).fault


@pytest.mark.parametrize(
    ("found", "verdict"), [("passed", "passed"), ("open", "violated"), ("not-run", "not-run"), ("violated", "violated")]
)
def test_a_bypass_that_the_driver_did_not_refuse_fails_the_check(found, verdict):
    one = verdicts.check("bypass-own-loader", found, 0, 0, "bytes", "64 MiB more were granted")
    assert verdicts.of_driver_bypass(one, "driver-misc")["verdict"] == verdict


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("0::/kubepods/pod/c\n", "/cg/kubepods/pod/c"),
        ("9:memory:/a\n0::/b\n", "/cg/b"),
        ("9:memory:/a\n", ""),
        (None, ""),
    ],
)
def test_the_group_of_a_process(tmp_path, text, group):
    (tmp_path / "7").mkdir()
    if text is not None:
        (tmp_path / "7/cgroup").write_text(text)
    assert observer.group_of(7, "/cg", str(tmp_path)) == group
