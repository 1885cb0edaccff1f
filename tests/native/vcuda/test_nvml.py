# SPDX-License-Identifier: Apache-2.0
"""Inside a slice (a container's part of a GPU) NVML shows only the container's processes, under their own pids, and
utilisation relative to the share.

The tests compare the results with two references: the same query without the library, and the simulated driver's own
records. Strings such as ``rates()`` are Python expressions that a process of the container evaluates with the functions
of programs/nvml_raw.py."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import layouts
import pytest
from conftest import HERE, LIMIT, MIB, PROFILE, ROOT, Host
from newer import newer_driver
from nvml_inside import ask

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
NONE = 0xFFFFFFFF

LISTS = [
    (f"nvmlDeviceGet{kind}RunningProcesses{version}", "Two" if version else "One", kind == "Compute")
    for kind in ("Compute", "Graphics", "MPSCompute")
    for version in ("", "_v2", "_v3")
]


def test_process_lists_show_only_the_container(host: Host) -> None:
    stranger = host.puppet(preload=False).start()
    stranger.get("alloc", 700 * MIB)
    own = [host.puppet().start() for _unused in range(2)]
    for i, puppet in enumerate(own):
        puppet.get("alloc", (i + 1) * 10 * MIB)
    on_card = host.physical()
    entries = {
        "One": sorted([p.process.pid, on_card[p.process.pid]] for p in own),
        "Two": sorted([p.process.pid, on_card[p.process.pid], NONE, NONE] for p in own),
    }
    questions = [f"lists('{name}', {entry})" for name, entry, _unused in LISTS] + [
        f"details({mode})" for mode in range(3)
    ]
    expected = [[0, 2, entries[entry]] if compute else [0, 0, []] for _unused, entry, compute in LISTS]
    expected += [[0, 2, entries["Two"]], [0, 0, []], [0, 0, []]]
    assert ask(host, *questions) == expected
    # A process without a context on device 1 is in no list of device 1. Without the library all processes are listed.
    assert ask(host, "lists('nvmlDeviceGetComputeRunningProcesses_v3', Two, device=1)") == [[0, 0, []]]
    everybody = sorted([pid, size, NONE, NONE] for pid, size in on_card.items())
    assert ask(host, questions[2], questions[9], preload=False) == [[0, 3, everybody]] * 2


def test_too_short_process_list_returns_the_needed_length(host: Host) -> None:
    own = [host.puppet().start() for _unused in range(2)]
    questions = [f"lists('{name}', {entry}, {room})" for name, entry, compute in LISTS if compute for room in (0, 1)]
    questions += ["details(0, 0)", "details(0, 1)"]
    assert ask(host, *questions) == [[7, 2, []]] * len(questions)
    assert len(own) == 2


def test_dead_process_is_not_listed_and_errors_are_the_drivers(host: Host) -> None:
    own = host.puppet().start()
    question = "lists('nvmlDeviceGetComputeRunningProcesses_v3', Two)"
    assert ask(host, question)[0][1] == 1
    own.process.kill()
    own.process.wait()
    null = "lib.nvmlDeviceGetComputeRunningProcesses_v3(gpu(0), None, None)"
    foreign = "lib.nvmlDeviceGetComputeRunningProcesses_v3(ctypes.c_void_p(1), ctypes.byref(ctypes.c_uint(0)), None)"
    inside, outside = ask(host, question, null, foreign), ask(host, question, null, foreign, preload=False)
    assert inside == outside
    assert inside[0] == [0, 0, []] and inside[1:] == [2, 2]


# --- pid namespaces ----------------------------------------------------------------------------------------------

APART = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
PIDS = "[e[0] for e in lists('nvmlDeviceGetComputeRunningProcesses_v3', Two)[2]]"


@needs_root
def test_listed_pids_are_of_the_viewers_namespace(host: Host) -> None:
    outer, inner = host.puppet().start(), host.puppet(wrapper=APART).start()
    assert inner.say("pid")[1] == 1
    shell = inner.process.pid
    number = int(Path(f"/proc/{shell}/task/{shell}/children").read_text())
    held = {row["pid"]: row for row in layouts.read_ledger(str(host.ledger))["slots"]}
    assert sorted(held) == sorted([1, outer.process.pid]), (
        "the ledger must have each process's pid in its own namespace"
    )
    assert sorted(ask(host, PIDS)[0]) == sorted([outer.process.pid, number])
    enter = ("nsenter", "-t", str(number), "-p", "-m")
    assert ask(host, PIDS, prefix=enter) == [[1]], "inside a pid namespace, processes outside must not be listed"
    assert ask(host, PIDS, prefix=APART) == [[]], "a second namespace must see no process of the first"
    # A pid namespace that still has its parent's /proc cannot translate pids. Its list must then be empty, because any
    # pid in it would be wrong.
    assert ask(host, PIDS, prefix=("unshare", "--pid", "--fork")) == [[]]


# --- utilisation --------------------------------------------------------------------------------------------------

CLOCKED = "clock = manual\njitter_percent = 0\nseed = 7\n" + PROFILE


@pytest.fixture(scope="module")
def advance_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("busy") / "busy_gpu"
    core = ROOT / "native" / "gpusim" / "core"
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O1", f"-I{core}"]
    source = ROOT / "tests" / "native" / "gpusim_nvml" / "busy_gpu.c"
    subprocess.run(["cc", *flags, "-o", program, source, *sorted(core.glob("*.c"))], check=True)
    return program


class Clocked(Host):
    """A simulated host with worker processes that keep GPUs busy. The test advances the simulated clock."""

    def __init__(self, folder: Path, programs: Path, advance: Path) -> None:
        super().__init__(folder, programs, CLOCKED)
        self._advance, self._workers = advance, []

    def worker(self, kernel: str, size: int = 0, **options: object) -> int:
        worker = subprocess.Popen(
            [sys.executable, HERE / "programs" / "worker.py", "0", str(size), kernel],
            env=self.env(**options),  # type: ignore[arg-type]
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._workers.append(worker)
        assert worker.stdout
        return int(worker.stdout.readline())

    def advance(self, milliseconds: int) -> None:
        subprocess.run([self._advance, "advance", str(milliseconds)], env=self.driver_env, check=True)

    def share(self, percent: int, policy: str = "default") -> None:
        devices = [{"uuid": uuid, "memory_bytes": LIMIT, "sm_percent": percent} for uuid in self.uuids]
        self.limits.write_bytes(layouts.pack_limits({"allocation": "t", "devices": devices, "core_policy": policy}))
        if not self.ledger.exists():
            self.ledger.write_bytes(layouts.pack_ledger(self.uuids, "t"))

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.wait()
        super().close()


@pytest.fixture
def clocked(programs: Path, tmp_path: Path, advance_program: Path):
    host = Clocked(tmp_path, programs, advance_program)
    host.share(0)
    yield host
    host.close()


FIGURES = [
    "rates()",
    "process_utilization()",
    "processes_utilization()",
    "samples(NVML_GPU_UTILIZATION_SAMPLES)",
    "samples(NVML_MEMORY_UTILIZATION_SAMPLES)",
]


def test_utilisation_hides_a_busy_neighbour(clocked: Clocked) -> None:
    idle, neighbour = clocked.worker("0"), clocked.worker("inf", preload=False)
    clocked.advance(1000)
    rates, by_pid, info, gpu, memory = ask(clocked, *FIGURES)
    assert rates == [0, 0]
    assert by_pid == "NVML_ERROR_NOT_FOUND"
    assert info == [6, 0, []]
    assert set(gpu) == set(memory) == {0}
    outside = ask(clocked, *FIGURES, preload=False)
    assert outside[0][0] >= 99 and [row[0] for row in outside[1]] == [neighbour] and max(outside[3]) >= 99
    assert idle != neighbour


@pytest.mark.parametrize(
    ("percent", "policy"),
    [(0, "default"), (100, "force"), (50, "default"), (33, "force"), (10, "default"), (10, "disable")],
)
def test_utilisation_is_relative_to_the_share(clocked: Clocked, percent: int, policy: str) -> None:
    """A kernel of 200 ms uses a part of the card's time; NVML shows this part relative to the slice's share."""
    clocked.share(percent, policy)
    worker = clocked.worker("200000")
    clocked.advance(1000)
    truth = ask(clocked, *FIGURES, preload=False)
    share = 100 if policy == "disable" or percent == 0 else percent
    [[pid, sm, memory]] = truth[1]
    assert pid == worker
    assert 1 <= sm <= 40, "the driver's own utilisation must show the 200 ms of work"
    expected = [min(100, sm * 100 // share), min(100, memory * 100 // share)]
    rates, by_pid, info, gpu, mem = ask(clocked, *FIGURES)
    assert rates == expected
    assert by_pid == [[worker, *expected]]
    assert info == [0, 1, [[worker, *expected]]]
    assert (set(gpu), set(mem)) == ({expected[0]}, {expected[1]})
    assert len(gpu) == len(truth[3])


def test_utilisation_sums_the_containers_processes(clocked: Clocked) -> None:
    clocked.share(50)
    workers = [clocked.worker("inf"), clocked.worker("inf")]
    neighbour = clocked.worker("inf", preload=False)
    clocked.advance(20000)
    truth, recent = ask(clocked, "process_utilization()", "process_utilization(newest() - 1000000)", preload=False)
    assert [row[0] for row in truth] == sorted([*workers, neighbour])
    by_pid, rates = ask(clocked, "process_utilization()", "rates()")
    assert by_pid == [[pid, min(100, sm * 2), min(100, memory * 2)] for pid, sm, memory in truth if pid in workers]
    mine = [[min(100, sm * 2), min(100, memory * 2)] for pid, sm, memory in recent if pid in workers]
    assert rates == [min(100, sum(figures)) for figures in zip(*mine)] if mine else [0, 0]


def test_accounting_lists_live_processes_of_the_container(clocked: Clocked) -> None:
    clocked.share(50)
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import pynvml as n; n.nvmlInit(); n.nvmlDeviceSetAccountingMode(n.nvmlDeviceGetHandleByIndex(0), 1)",
        ],
        env=clocked.env(preload=False),
        check=True,
    )
    worker, neighbour = clocked.worker("200000", MIB), clocked.worker("200000", preload=False)
    clocked.advance(1000)
    pids = "nvmlDeviceGetAccountingPids(gpu(0))"
    stats = [f"[nvmlDeviceGetAccountingStats(gpu(0), {pid}).gpuUtilization]" for pid in (worker, neighbour)]
    outside = ask(clocked, pids, *stats, preload=False)
    assert sorted(outside[0]) == sorted([worker, neighbour])
    assert outside[1][0] > 0 and outside[2][0] > 0
    inside = ask(clocked, pids, *stats)
    assert inside == [[worker], [min(100, outside[1][0] * 2)], "NVML_ERROR_NOT_FOUND"]


def test_accounting_stats_v2_hides_a_neighbour(clocked: Clocked, tmp_path: Path) -> None:
    """NVML of driver 615 has nvmlDeviceGetAccountingStats_v2, which must show no process of another container."""
    clocked.driver_env["LD_LIBRARY_PATH"] = str(newer_driver(tmp_path / "newer"))
    clocked.share(50)
    mode = "import pynvml as n; n.nvmlInit(); n.nvmlDeviceSetAccountingMode(n.nvmlDeviceGetHandleByIndex(0), 1)"
    subprocess.run([sys.executable, "-c", mode], env=clocked.env(preload=False), check=True)
    worker, neighbour = clocked.worker("200000", MIB), clocked.worker("200000", preload=False)
    clocked.advance(1000)
    asked = [f"stats_v2({pid})" for pid in (worker, neighbour)]
    (status, percent, total), other = ask(clocked, *asked, preload=False)
    assert status == other[0] == 0 and total == 400 * percent > 0 and other[1] > 0
    double = [0, min(100, 2 * percent), min(40000, 2 * total)]
    not_found = 6
    assert ask(clocked, *asked) == [double, [not_found, 0, 0]]


def test_utilisation_is_unsupported_if_the_driver_lists_other_pids(clocked: Clocked) -> None:
    """If the driver's pids do not match the ledger's, the library reports utilisation as unsupported. The ledger is the
    file in which the container's processes register. Without matching pids the library cannot tell which utilisation
    belongs to the container, and must not show another container's."""
    worker = clocked.worker("inf")
    clocked.advance(1000)
    assert ask(clocked, "rates()")[0][0] >= 90
    with clocked.ledger.open("r+b") as ledger:  # Replaces the pid by one that the driver does not list.
        ledger.seek(layouts.fields.LEDGER_SLOT_OFFSET + layouts.fields.LEDGER_SLOT_FIELDS["pid"][0])
        assert struct.unpack("<I", ledger.read(4)) == (worker,)
        ledger.seek(-4, os.SEEK_CUR)
        ledger.write(struct.pack("<I", 4000001))
    assert ask(clocked, *FIGURES) == ["NVML_ERROR_NOT_SUPPORTED"] * 2 + [[3, 0, []]] + ["NVML_ERROR_NOT_SUPPORTED"] * 2


# --- GPUs outside the slice, and figures that stay unchanged ---


def test_gpu_missing_in_the_limits_is_not_permitted(host: Host) -> None:
    devices = [{"uuid": host.uuids[1], "memory_bytes": LIMIT}]
    host.limits.write_bytes(layouts.pack_limits({"allocation": "t", "devices": devices}))
    stranger = host.puppet(preload=False).start()
    assert stranger.process.pid in host.physical()
    memory = ["nvmlDeviceGetMemoryInfo(gpu({}))", "nvmlDeviceGetMemoryInfo(gpu({}), version=nvmlMemory_v2)"]
    others = ["rates()", "lists('nvmlDeviceGetComputeRunningProcesses_v3', Two)"]
    count, *denied = ask(host, "nvmlDeviceGetCount()", *(one.format(0) for one in memory), *others)
    assert count == 2, "the count of the GPUs must stay unchanged"
    assert denied == ["NVML_ERROR_NO_PERMISSION"] * 3 + [[0, 0, []]]
    assert [one["total"] for one in ask(host, *(one.format(1) for one in memory))] == [LIMIT, LIMIT]
    puppet = host.puppet()
    puppet.say("init")
    assert [puppet.say("total 0"), puppet.say("total 1")] == [[0, 0], [0, LIMIT]]
    assert puppet.refused("ctx", 0) == 800


@pytest.mark.parametrize("fault", ["missing", "torn"])
def test_broken_limits_show_nothing(host: Host, fault: str) -> None:
    host.limits.write_bytes(b"" if fault == "torn" else b"x")
    if fault == "missing":
        host.limits.unlink()
    question = ["nvmlDeviceGetMemoryInfo(gpu(0))", "lists('nvmlDeviceGetComputeRunningProcesses_v3', Two)"]
    assert ask(host, *question) == ["NVML_ERROR_NO_PERMISSION", [0, 0, []]]


def test_bar_and_sensors_stay_unchanged(host: Host) -> None:
    questions = [
        "nvmlDeviceGetBAR1MemoryInfo(gpu(0)).bar1Total",
        "nvmlDeviceGetTemperature(gpu(0), 0)",
        "nvmlDeviceGetName(gpu(0))",
        "[nvmlDeviceGetUUID(gpu(i)) for i in range(nvmlDeviceGetCount())]",
        "[v.nvmlReturn for v in nvmlDeviceGetFieldValues(gpu(0), [1, 82, 83, 186])]",
    ]
    assert ask(host, *questions) == ask(host, *questions, preload=False)


# --- the structures that the library declares ---

STRUCTURES = {
    "nvmlMemory_t": "c_nvmlMemory_t",
    "nvmlMemory_v2_t": "c_nvmlMemory_v2_t",
    "nvmlProcessInfo_t": "c_nvmlProcessInfo_v2_t",
    "nvmlProcessDetail_t": "c_nvmlProcessDetail_v1_t",
    "nvmlProcessDetailList_t": "c_nvmlProcessDetailList_v1_t",
    "nvmlUtilization_t": "c_nvmlUtilization_t",
    "nvmlProcessUtilizationSample_t": "c_nvmlProcessUtilizationSample_t",
    "nvmlProcessUtilizationInfo_t": "c_nvmlProcessUtilizationInfo_v1_t",
    "nvmlProcessesUtilizationInfo_t": "c_nvmlProcessesUtilizationInfo_v1_t",
    "nvmlSample_t": "c_nvmlSample_t",
    "nvmlAccountingStats_t": "c_nvmlAccountingStats_t",
}


def test_structures_match_nvidia_ml_py(tmp_path: Path) -> None:
    import ctypes

    import pynvml

    body, expected = "", []
    for name, python in STRUCTURES.items():
        known = getattr(pynvml, python)
        body += f'printf("%zu\\n", sizeof({name}));\n'
        expected.append(ctypes.sizeof(known))
        for field in known._fields_:
            if "reserved" in field[0].lower():
                continue
            body += f'printf("%zu\\n", offsetof({name}, {field[0]}));\n'
            expected.append(getattr(known, field[0]).offset)
    source = tmp_path / "abi.c"
    source.write_text(
        "#include <stdio.h>\n#include <stddef.h>\n#include <nvml_abi.h>\nint main(void){\n" + body + "}\n"
    )
    subprocess.run(["cc", "-I", ROOT / "native/vcuda/src/driver", "-o", tmp_path / "abi", source], check=True)
    done = subprocess.run([tmp_path / "abi"], stdout=subprocess.PIPE, text=True, check=True)
    assert [int(line) for line in done.stdout.split()] == expected
