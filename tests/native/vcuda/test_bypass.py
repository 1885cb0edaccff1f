# SPDX-License-Identifier: Apache-2.0
"""Tests the bypass checks of vgpu-probe, each of which tries to get GPU memory past the library. Here only the variable
LD_PRELOAD loads the library. A tenant can remove this variable, so some checks must fail.

tests/integration/device_plugin/test_isolation.py runs the same checks in real slices, where they pass.

``alloc 50 4096`` (allocate 4096 bytes, keep the address in register 50) is a command to programs/puppet.c.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import CARD, MIB, OK, PRELOAD, PROBE, Host
from test_files import FORCED, container
from test_probe import run, verdicts
from test_probe_finds import broken

pytestmark = pytest.mark.slow

# Keys: checks of the probe. Values: the expected verdict if LD_PRELOAD loads the library and variables name the
# library's files, which the tenant can write. The verdict "open" means a known bypass that the library cannot prevent.
WITHOUT_MOUNTS = {
    "bypass-path": "passed",
    "bypass-copy": "passed",
    "bypass-renamed": "passed",
    "bypass-namespace": "open",
    "bypass-symbol-table": "open",
    "bypass-own-loader": "open",
    "bypass-leader": "open",
    "bypass-covered": "open",
    "bypass-covered-preload": "not-run",
    "bypass-folder": "passed",
    "bypass-no-preload": "violated",
    "bypass-other-preload": "violated",
    "bypass-own-limits": "violated",
    "bypass-setuid": "violated",
    "bypass-other-libcuda": "violated",
    "bypass-more-devices": "passed",
    "bypass-own-files": "violated",
    "bypass-descriptors": "passed",
    "bypass-ledger-removed": "violated",
    "bypass-ledger-grown": "violated",
    "bypass-ledger-emptied": "violated",
    "bypass-ledger-spoiled": "violated",
    "bypass-ledger-lie": "open",
    "bypass-ledger-boast": "open",
}


def test_checks_fail_with_a_preload_that_the_tenant_can_remove(host: Host) -> None:
    status, report = run(host, "--checks", ",".join(WITHOUT_MOUNTS))
    assert verdicts(report) == WITHOUT_MOUNTS, report
    assert status == 1
    assert host.on_card() == host.charged() == 0, "an attempt left memory on the card"


def test_probe_finds_a_library_without_a_dlsym_hook(host: Host, tmp_path) -> None:
    library = broken(tmp_path, "libvgpu.map", "        dlsym;\n", "")
    names = ["bypass-path", "bypass-copy"]
    environment = host.env(LD_PRELOAD=str(library))
    done = subprocess.run(
        [PROBE, "--json", "--checks", ",".join(names)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.count('"verdict":"violated"') == 2, done.stdout


@pytest.mark.parametrize("name", ["bypass-path", "bypass-descriptors"])
def test_without_the_library_the_checks_fail(host: Host, name: str) -> None:
    environment = {key: value for key, value in host.env().items() if key != "LD_PRELOAD"}
    done = subprocess.run(
        [PROBE, "--checks", name], env=environment, stdout=subprocess.PIPE, text=True, timeout=300, check=False
    )
    assert done.returncode != 0, done.stdout


SPOILING = [
    "bypass-ledger-removed",
    "bypass-ledger-grown",
    "bypass-ledger-emptied",
    "bypass-ledger-spoiled",
    "bypass-ledger-lie",
    "bypass-ledger-boast",
]


def test_probe_does_not_damage_a_ledger_in_use(host: Host) -> None:
    """The ledger is the file in which the container's processes record their GPU memory. While processes use a ledger,
    the probe must not truncate it: SIGBUS would kill every process that maps the file, including the workload."""

    def spoiled(folder: str) -> dict:
        environment = dict(host.driver_env)
        command = [*container(host, PRELOAD, folder=folder), PROBE, "--json", "--checks", ",".join(SPOILING)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=300, check=False)
        return {one["name"]: (one["verdict"], one["detail"]) for one in json.loads(done.stdout)["checks"]}

    at_work = host.puppet(wrapper=container(host, PRELOAD), **FORCED).start()
    at_work.get("alloc", 100 * MIB)
    found = spoiled("beside")
    assert [verdict for verdict, _why in found.values()] == ["not-run"] * len(SPOILING), found
    assert all("another process" in why for _verdict, why in found.values()), found
    assert at_work.result("alloc 50 4096") == OK
    assert host.charged() == host.on_card() > 100 * MIB
    at_work.end()
    assert [verdict for verdict, _why in spoiled("alone").values()] == [
        *["passed"] * (len(SPOILING) - 2),
        "open",
        "open",
    ]


WAYS_AT_ONCE = ["bypass-namespace", "bypass-symbol-table", "bypass-own-loader", "bypass-leader"]


def test_open_bypasses_run_together_and_leave_no_memory(host: Host) -> None:
    """With --hold, the process of each bypass check keeps a small allocation and is named after its check. Tests of the
    watcher use --hold; this service of the node compares the driver's figures of each process with the charges."""
    names = ",".join(WAYS_AT_ONCE)
    command = [PROBE, "--json", "--together", "--checks", names, "--hold", "15000"]
    probe = subprocess.Popen(command, env=host.env(), stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        wanted = {name.removeprefix("bypass-")[:15] for name in WAYS_AT_ONCE}
        deadline = time.monotonic() + 60
        while (seen := holders(host)).keys() != wanted and time.monotonic() < deadline:
            time.sleep(0.05)
        assert seen.keys() == wanted, (
            "the driver must list one process of each check, whose name in the kernel is the name of the check"
        )
        assert all(64 * MIB <= held < 1024 * MIB for held in seen.values()), seen
        assert host.charged() == 0
        answer, _nothing = probe.communicate(timeout=90)
        assert verdicts(json.loads(answer)) == dict.fromkeys(WAYS_AT_ONCE, "open")
    finally:
        if probe.poll() is None:
            os.killpg(probe.pid, signal.SIGKILL)
            probe.wait()
    assert host.on_card() == host.charged() == 0


def test_killed_probe_leaves_no_file(host: Host) -> None:
    """The node's isolation check kills the probe while the probe holds memory. No files of the probe may then remain in
    /tmp."""
    command = [PROBE, "--json", "--together", "--checks", "bypass-own-loader", "--hold", "15000"]
    probe = subprocess.Popen(command, env=host.env(), stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not holders(host) and time.monotonic() < deadline:
            time.sleep(0.05)
        pids = family(probe.pid)
        assert set(host.physical()) & set(pids), "the probe must hold GPU memory when it is killed"
    finally:
        os.killpg(probe.pid, signal.SIGKILL)
        probe.wait()
    assert [path for pid in pids for path in Path("/tmp").glob(f"vgpu-probe-{pid}-*")] == []


def family(group: int) -> list[int]:
    """Returns the pids of a process group."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(folder.name)) == group:
                found.append(int(folder.name))
    return found


def holders(host: Host) -> dict[str, int]:
    """Returns a dict from the name of each process (comm) to its bytes on all GPUs."""
    found = {}
    for pid, held in host.physical().items():
        with contextlib.suppress(OSError):
            found[Path(f"/proc/{pid}/comm").read_text().strip()] = held
    return found


def test_open_bypasses_are_not_run_on_a_full_card(host: Host) -> None:
    """On a full GPU the driver also refuses a process that bypasses the library, so the check proves nothing and must
    not pass.
    """
    stranger = host.puppet(preload=False).start()
    stranger.get("alloc", CARD - host.on_card())
    command = [PROBE, "--json", "--together", "--checks", ",".join(WAYS_AT_ONCE)]
    done = subprocess.run(command, env=host.env(), stdout=subprocess.PIPE, text=True, check=False, timeout=90)
    assert verdicts(json.loads(done.stdout)) == dict.fromkeys(WAYS_AT_ONCE, "not-run")


@pytest.mark.parametrize("check", ["limit-exact", "bypass-path"])
def test_option_together_accepts_only_open_bypasses(host: Host, check: str) -> None:
    command = [PROBE, "--together", "--checks", check]
    done = subprocess.run(command, env=host.env(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr[:6]) == (64, "usage:")


def test_checks_that_start_too_late_are_left_out(host: Host) -> None:
    _status, report = run(host, "--checks", "limit-exact,bypass-path", "--hold", "2500", "--seconds", "1")
    rows = {one["name"]: one for one in report["checks"]}
    assert (rows["bypass-path"]["verdict"], rows["bypass-path"]["left_out"]) == ("not-run", True)
    assert rows["limit-exact"]["left_out"] is False
    _status, report = run(host, "--checks", "limit-exact,bypass-path", "--seconds", "3600")
    assert verdicts(report) == {"limit-exact": "passed", "bypass-path": "passed"}
    assert {one["left_out"] for one in report["checks"]} == {False}


@pytest.mark.parametrize("seconds", ["", "0", "-1", "1s", "3601"])
def test_invalid_time_limit_is_refused(host: Host, seconds: str) -> None:
    done = subprocess.run([PROBE, "--seconds", seconds], env=host.env(), stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr[:6]) == (64, b"usage:")


@pytest.mark.parametrize(("preload", "status"), [(True, 41), (False, 40)])
def test_charged_program_counts_as_no_bypass(host: Host, preload: bool, status: int) -> None:
    """A program that gets memory has bypassed the library only if the ledger does not charge this memory."""
    command = [PROBE, "--together", "--beyond", "0", "honest"]
    assert subprocess.run(command, env=host.env(preload=preload), check=False, timeout=60).returncode == status
