# SPDX-License-Identifier: Apache-2.0
"""Tests the verdicts on memory limits of slices (parts of a GPU) that the driver enforces for control groups: whether a
container's own group has the promised limit, and whether this limit also stops a program that bypasses our library.
dmem and misc are the kernel's controllers by which the driver counts GPU memory.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.gpu import memory_limits
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import driver_verdicts, observer, verdicts
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation.driver_verdicts import Deltas, DriverLimit, Sum
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation.verdicts import Expected

MIB = 1 << 20
SLICE, CARD = 5000 * MIB, 15360 * MIB
GROUP = "/sys/fs/cgroup/kubepods/pod/c"
NONE = memory_limits.UNLIMITED
EXPECTED = Expected("GPU-1", 5000)


class Library:
    """A simulated driver. ``limits`` has the limit of each group. With ``misc`` (the backend of the kernel's misc
    controller), a group without a limit shows the limit of its nearest ancestor."""

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
# columns: case, limits of the driver by group; expected verdict, words of the detail
FAULTS = [
    ("correct limit", {GROUP: SLICE}, "passed", "group " + GROUP),
    ("another limit on the parent", {GROUP: SLICE, PARENT: 9 * SLICE}, "passed", ""),
    ("no limit after a driver reload", {}, "violated", "the device plugin reports "),
    ("limit dropped without an error", {GROUP: NONE}, "violated", "the driver has no limit for its control group"),
    ("limit of another container", {GROUP: 2 * SLICE}, "violated", ""),
    ("limit of a former container", {GROUP: 300 * MIB}, "violated", ""),
    ("limit on the parent alone", {PARENT: SLICE}, "violated", ""),
]


@pytest.mark.parametrize("misc", [True, False])
@pytest.mark.parametrize(("what", "limits", "verdict", "said"), FAULTS)
def test_driver_limit_belongs_to_the_group_and_has_the_promised_size(what, limits, verdict, said, misc):
    seen = observer.driver_limit(Reader(Library(limits, misc)), "GPU-1", GROUP)
    found = driver_verdicts.of_driver("driver-misc", seen, EXPECTED)
    assert (found["name"], found["verdict"]) == ("driver-limit", verdict), (what, found)
    assert said in found["detail"]


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        (DriverLimit(GROUP, 0, SLICE, card=CARD), "passed"),
        (DriverLimit(GROUP, 1, SLICE, card=CARD), "violated"),  # With dmem, a soft limit remains when a container ends.
        (DriverLimit(GROUP, 0, SLICE - 1, card=CARD), "violated"),
        (DriverLimit(GROUP, 0, SLICE, own=False, card=CARD), "violated"),
        # An oversold slice is larger than the card, so the driver limits it to the memory of the card.
        (DriverLimit(GROUP, 0, 3000 * MIB, card=3000 * MIB), "passed"),
        (DriverLimit(GROUP, 0, SLICE), "passed"),  # The memory of the card is unknown.
        (DriverLimit(GROUP, hard=SLICE), "passed"),  # The soft limit is 0 by default.
    ],
)
def test_driver_limit_checks_every_figure(seen, verdict):
    found = driver_verdicts.of_driver("driver-dmem", seen, EXPECTED)
    assert (found["verdict"], found["expected"]) == (verdict, f"soft 0, hard {SLICE}")
    above = "" if seen.own else ", but the limit was set on a group above it"
    assert found["detail"] == f"driver-dmem, group {GROUP}{above}"


def test_limit_missing_on_one_of_two_gpus_is_found():
    """On a host with two GPUs, each limit is read by the UUID of its GPU."""
    library = Library({GROUP: SLICE}, False)
    answer = library.nvmlDeviceGetMemoryLimits_v1
    library.nvmlDeviceGetMemoryLimits_v1 = lambda handle, words: 3 if handle == 0 else answer(handle, words)
    assert observer.driver_limit(Reader(library), "GPU-1", GROUP).hard == SLICE
    assert observer.driver_limit(Reader(library), "GPU-0", GROUP).hard is None
    assert "NVML lists no GPU-9" in observer.driver_limit(Reader(library), "GPU-9", GROUP).fault


@pytest.mark.parametrize(
    ("found", "verdict"), [("passed", "passed"), ("open", "violated"), ("not-run", "not-run"), ("violated", "violated")]
)
def test_bypass_not_refused_by_the_driver_is_a_violation(found, verdict):
    one = verdicts.check("bypass-own-loader", found, 0, 0, "bytes", "64 MiB more were granted")
    assert driver_verdicts.of_bypass(one, "driver-misc")["verdict"] == verdict


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("0::/kubepods/pod/c\n", "/cg/kubepods/pod/c"),
        ("9:memory:/a\n0::/b\n", "/cg/b"),
        ("9:memory:/a\n", ""),
        (None, ""),
    ],
)
def test_group_of_a_process_is_its_version_2_group(tmp_path, text, group):
    (tmp_path / "7").mkdir()
    if text is not None:
        (tmp_path / "7/cgroup").write_text(text)
    assert observer.group_of(7, "/cg", str(tmp_path)) == group


HARD = SLICE
SUMS = [
    # columns: figures after a program without our library allocated GPU memory until the driver refused (allocated
    # bytes, used bytes of its control group, free bytes of the card, error); expected verdict, words of the detail
    (Sum(SLICE - 200 * MIB, SLICE - 3 * MIB, 4000 * MIB), "passed", "refused the rest"),
    (Sum(SLICE, SLICE, 0), "passed", "refused the rest"),
    (Sum(SLICE + 2 * MIB, 0, 4000 * MIB), "violated", "the driver granted"),  # More was allocated than the limit.
    (Sum(100 * MIB, SLICE + 1, 4000 * MIB), "violated", "the driver granted"),
    (Sum(SLICE + 2 * MIB, 0, 0, "it ended"), "violated", "the driver granted"),
    (Sum(SLICE + 2 * MIB), "violated", f"the driver granted {SLICE + 2 * MIB} bytes and counts 0 bytes"),
    (Sum(300 * MIB, 400 * MIB, 10 * MIB), "not-run", "the card was full"),
    # The limit counts as the cause of the refusal if at most 64 MiB of it were unused, or if the card had at least
    # 64 MiB free. Otherwise the card was full.
    (Sum(0, SLICE - 64 * MIB, 0), "passed", "refused the rest"),
    (Sum(0, SLICE - 64 * MIB - 1, 0), "not-run", "the card was full"),
    (Sum(0, 400 * MIB, 64 * MIB), "passed", "refused the rest"),
    (Sum(0, 400 * MIB, 64 * MIB - 1), "not-run", "the card was full"),
    # A limit below the promised size is reported by another check, so it is no violation here.
    (Sum(300 * MIB, 400 * MIB, 4000 * MIB), "passed", "refused the rest"),
    (Sum(fault="no libcuda"), "not-run", "no libcuda"),
    (Sum(0, 0, 4000 * MIB), "not-run", "refused even a context"),
]


@pytest.mark.parametrize(("found", "verdict", "said"), SUMS)
def test_allocated_sum_is_judged_by_the_hard_limit(found, verdict, said):
    one = driver_verdicts.of_sum("driver-refuses", "driver-misc", HARD, found)
    assert (one["verdict"], said in one["detail"]) == (verdict, True), one


BYPASSES = [
    # columns: hard limit of the group (None: no limit), greatest usage of the group while the bypass held its memory
    # (None: no poll saw it); expected verdict, words of the detail
    (SLICE, SLICE, "passed", "the group used at most"),
    (SLICE, SLICE + 1, "violated", "the group used at most"),
    # With a memory scaling above 1 the limit is the size of the card, and the rest of the slice is in host memory.
    (CARD, CARD - MIB, "passed", "the driver's limit is"),
    (CARD, CARD + 64 * MIB, "violated", ""),
    (SLICE, 10 * MIB, "violated", "did not count"),
    (SLICE, None, "violated", "refused nothing"),  # No poll saw the memory of the bypass.
    (None, SLICE, "violated", "refused nothing"),  # The group has no hard limit.
]


@pytest.mark.parametrize(("hard", "most", "verdict", "said"), BYPASSES)
def test_bypass_is_judged_by_the_usage_of_its_group(hard, most, verdict, said):
    one = verdicts.check("bypass-own-loader", "open", 0, 64 * MIB, "bytes", "64 MiB more were granted")
    found = driver_verdicts.of_bypass(one, "driver-misc", hard, most)
    assert (found["verdict"], said in found["detail"]) == (verdict, True), found


def test_bypass_without_a_figure_of_granted_memory_is_judged_by_the_limit_alone():
    one = verdicts.check("bypass-own-loader", "open", 0, "none", "bytes", "")
    assert driver_verdicts.of_bypass(one, "driver-misc", SLICE, 0)["verdict"] == "passed"


@pytest.mark.parametrize(
    ("code", "capabilities", "verdict"),
    [
        (4, 0, "passed"),
        (4, 1 << 21, "passed"),
        (0, 0, "violated"),
        (0, 1 << 21, "open"),  # The container has CAP_SYS_ADMIN, so it is privileged.
        (13, 0, "not-run"),
        (-1, 0, "not-run"),
    ],
)
def test_nvml_call_as_root_of_the_container(code, capabilities, verdict):
    assert driver_verdicts.of_root("driver-misc", code, "nvmlInit_v2", capabilities)["verdict"] == verdict


PIECE = 64 * MIB
MANAGED = [
    # Driver 615 does not charge managed memory to the group, so this bypass is open.
    (Deltas(PIECE, group=0, card=PIECE, ordinary=PIECE), "open"),
    # A later driver may charge managed memory to the group.
    (Deltas(PIECE, group=PIECE, card=PIECE, ordinary=PIECE), "passed"),
    (Deltas(PIECE, group=0, card=PIECE, ordinary=0), "violated"),
    (Deltas(PIECE, group=0, card=0, ordinary=PIECE), "not-run"),  # The managed memory stayed on the host.
    (Deltas(PIECE, fault="no answer"), "not-run"),
    # Growth of used memory by at least 90 % of an allocation counts as the whole allocation.
    (Deltas(1000, group=0, card=900, ordinary=900), "open"),
    (Deltas(1000, group=0, card=1000, ordinary=899), "violated"),
    (Deltas(1000, group=0, card=899, ordinary=1000), "not-run"),
    (Deltas(1000, group=900, card=1000, ordinary=1000), "passed"),
    (Deltas(1000, group=899, card=1000, ordinary=1000), "open"),
]


@pytest.mark.parametrize(("found", "verdict"), MANAGED)
def test_managed_memory_is_judged_by_the_growth_of_used_memory(found, verdict):
    assert driver_verdicts.of_managed("driver-misc", found)["verdict"] == verdict


@pytest.mark.parametrize(
    ("code", "call", "found", "verdict", "said"),
    [
        (0, "", Deltas(PIECE, group=PIECE), "passed", ""),
        (0, "", Deltas(PIECE, group=0), "violated", ""),
        (0, "", Deltas(1000, group=900), "passed", ""),
        (0, "", Deltas(1000, group=899), "violated", ""),
        (2, "", Deltas(PIECE), "passed", ""),
        # libcuda does not work in the child process.
        (3, "", Deltas(PIECE), "not-run", "libcuda returned 3 to the child"),
        (3, "cuInit", Deltas(PIECE), "not-run", "cuInit returned 3 to the child"),
        (0, "", Deltas(PIECE, fault="it did not end"), "not-run", "it did not end"),
    ],
)
def test_memory_of_an_exited_process_stays_charged(code, call, found, verdict, said):
    one = driver_verdicts.of_orphan("driver-misc", code, call, found)
    assert one["verdict"] == verdict
    assert said in one["detail"]


SAME = (0, SLICE, PIECE)
BESIDE = [
    # columns: state of the other slice's control group before, during and after a program filled our slice, verdict on
    # the filled slice; expected verdict
    ([SAME, SAME, SAME], "passed", "passed"),
    ([SAME, (0, SLICE, 2 * PIECE), SAME], "passed", "violated"),
    ([SAME, SAME, (0, NONE, PIECE)], "passed", "violated"),
    ([SAME, SAME, SAME], "violated", "violated"),
    ([SAME, SAME, SAME], "not-run", "not-run"),
    ([SAME], "not-run", "not-run"),
]


@pytest.mark.parametrize(("seen", "fill", "verdict"), BESIDE)
def test_neighbour_keeps_its_limit_and_memory(seen, fill, verdict):
    filled = verdicts.check("driver-limit-beside", fill, "", "", "bytes", "so it was")
    found = driver_verdicts.of_beside("driver-misc", filled, dict(zip(("before", "while", "after"), seen)))
    assert found["verdict"] == verdict


def test_report_on_the_neighbour_has_its_figures_at_each_time():
    seen = {"before": (0, SLICE, PIECE), "while": (1, 2, 3), "after": (4, 5, 6)}
    found = driver_verdicts.of_beside("driver-misc", verdicts.check("driver-limit-beside", "passed", "", ""), seen)
    assert found["found"] == (
        f"before soft 0, hard {SLICE}, used {PIECE}; while soft 1, hard 2, used 3; after soft 4, hard 5, used 6"
    )


UNKNOWN = DriverLimit(GROUP, 0, SLICE, card=CARD)  # without the inode of the group
FIRST = UNKNOWN._replace(inode=7)


# columns: limit at the container's first start, limit at its second start; expected verdict, words of the detail
@pytest.mark.parametrize(
    ("first", "again", "verdict", "said"),
    [
        (FIRST, UNKNOWN._replace(inode=8), "passed", "a new group"),
        (FIRST, FIRST, "passed", "the same group"),
        (UNKNOWN, UNKNOWN, "passed", "a new group"),
        (FIRST, DriverLimit(GROUP, 0, 2 * SLICE, card=CARD, inode=8), "violated", "a new group"),
        (FIRST, DriverLimit(GROUP, fault="the driver has no limit for its control group"), "violated", "has no limit"),
    ],
)
def test_limit_after_a_second_start(first, again, verdict, said):
    found = driver_verdicts.of_restart("driver-misc", first, again, EXPECTED)
    assert (found["name"], found["verdict"], said in found["detail"]) == ("driver-limit-restart", verdict, True), found


def test_only_the_limit_at_each_start_is_mandatory():
    """All checks of the driver are optional except the limit at each start, because an unknown limit is not a pass."""
    found = {name: verdicts.optional(name) for name in verdicts.DRIVER_CHECKS}
    assert sorted(name for name, optional in found.items() if not optional) == ["driver-limit", "driver-limit-restart"]
    assert set(found) <= set(verdicts.OWN), "the probe does not run these checks"
