# SPDX-License-Identifier: Apache-2.0
"""Damages files, services or GPUs of a finished node without Kubernetes while a docker container works in a slice.

A slice is a part of a GPU. Each case has a loss, the messages that an operator must see, and the commands of the
repair. In all cases the container keeps its limit, no other container gets its slice, and the node is healthy
afterwards. Memory is read from the simulated driver's accounts and from inside the container. The section "When
something is lost" of docs/operations.md lists the same losses by symptom.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import Node, changed, play, set_group
from node_work import HELD_MIB, MIB, NAME, SLICE_MIB, Work, reboot, text, until

HOST = "gpu-t4-1"
ALLOCATIONS = "/run/vgpu/allocations"
RECORD = "/var/lib/vgpu/allocations.json"
PLUGIN, ARBITER = "vgpu-device-plugin.service", "vgpu-arbiter.service"


@pytest.fixture(scope="module")
def node(nodes: dict[str, Node]) -> Node:
    """The host after a run of site.yml."""
    first = play("--limit", HOST)
    assert first.returncode == 0, first.stdout
    return nodes[HOST]


@pytest.fixture(scope="module")
def work(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Work]:
    work = Work.start(node, tmp_path_factory.mktemp("fill"))
    yield work
    work.remove()


@dataclass(frozen=True)
class Lost:
    """A loss on the host and its repair.

    ``harm``: shell command that causes the loss. ``seen``: expected pairs (vgpuctl command, text that it prints within
    a minute). ``metric``: expected pattern of a line of the metrics. ``page``: expected text on the report page of all
    hosts. ``mend``: shell command of the repair. ``site``: true if the repair also needs a run of site.yml.
    ``again``: true if the container has a new process after the repair.
    """

    name: str
    harm: str
    seen: tuple[tuple[str, str], ...] = ()
    metric: str = ""
    page: str = ""
    mend: str = "true"
    site: bool = False
    again: bool = False


LEDGERS = f"{ALLOCATIONS}/*/rw/ledger"
LOST = [
    Lost("the plugin is killed", f"systemctl kill --signal=KILL {PLUGIN}"),
    Lost("the plugin is restarted", f"systemctl restart {PLUGIN}"),
    Lost("the arbiter is killed", f"systemctl kill --signal=KILL {ARBITER}"),
    Lost("the socket is removed", "rm /run/vgpu/plugin.sock"),
    Lost(
        "everything in /run/vgpu is removed",
        "rm -rf /run/vgpu || true",
        (("watch", "has files that were removed from the node"),),
        "vgpu_watch_incomplete 1",
        "has files that were removed from the node",
        f"docker restart {NAME}",
        again=True,
    ),
    Lost(
        "the record of all allocations is not valid JSON",
        f"echo '{{' > {RECORD}; systemctl restart {PLUGIN}",
        (("status", "recovered from /run/vgpu/allocations"), ("status", f"{RECORD} could not be read")),
        mend=f"systemctl restart {PLUGIN}",
    ),
    Lost(
        "the container's ledger is overwritten",
        f"for one in {LEDGERS}; do head -c $(stat -c %s $one) /dev/zero | dd of=$one conv=notrunc status=none; done",
        (("watch", "no-slot"), ("status", "was overwritten"), ("top --once", f"docker {NAME}")),
        page="was overwritten",
        mend=f"docker restart {NAME}",
        again=True,
    ),
    Lost(
        "node.yaml is not valid",
        "echo '{' > /etc/vgpu/node.yaml",
        (("status", "the configuration was not applied, the one before stays"),),
        site=True,
    ),
    Lost(
        "the link to the current library is removed",
        "rm /usr/local/lib/vgpu/current",
        (("status", "library none"),),
        site=True,
    ),
    Lost(
        "the driver does not answer",
        f"gpusimctl nvml-fail on; systemctl restart --no-block {PLUGIN}",
        (("status", "the plugin does not run, or waits for the driver"),),
        mend="gpusimctl nvml-fail off",
    ),
    Lost(
        "a GPU has fallen off the bus and the plugin was restarted",
        f"gpusimctl fall-off 1; systemctl restart {PLUGIN}",
        (("status", "GPU 1 (Tesla T4, GPU-"), ("status", "is lost"), ("explain 1", "is lost")),
        r'vgpu_gpu_healthy\{gpu="1",[^}]*\} 0',
        "fallen off the bus",
        "gpusimctl recover 1",
    ),
    Lost(
        "docker is restarted",
        "systemctl restart docker",
        again=True,
    ),
    Lost("the container is killed", f"docker kill --signal KILL {NAME}; docker start {NAME}", again=True),
]


def show(node: Node, command: str) -> str:
    return text(node, "vgpuctl", *command.split())


def shown(node: Node, seen: tuple[tuple[str, str], ...]) -> list[str]:
    """Returns the expected words that vgpuctl does not print yet."""
    said = {command: show(node, command) for command, _words in seen}
    return [f"{command}: {words}: {said[command]}" for command, words in seen if words not in said[command]]


def answer(node: Node, command: str) -> dict[str, Any]:
    """Returns a vgpuctl command's output as JSON; a fault has the key "error"."""
    found: dict[str, Any] = json.loads(node.run("vgpuctl", command, "--json", check=False))
    return found


def troubles(node: Node) -> list[str]:
    """Returns every warning and fault of the node."""
    answers = [answer(node, command) for command in ("status", "watch", "slices")]
    if faults := [one["error"] for one in answers if "error" in one]:
        return faults
    status, watch, slices = answers
    found = [*status["warnings"], *([watch["fault"]] if watch["fault"] else [])]
    found += [one["text"] for one in watch["findings"] if one["kind"] == "container"]
    return found + [f"{one['id']} is unhealthy" for one in slices["slices"] if one["state"] == "unhealthy"]


def on_page(folder: Path, words: str) -> dict[str, Any]:
    """Checks that the page of report.yml lists the host among those with a problem, with the reason and with the
    container that uses the host's slice. Returns the host's data from the page."""
    made = play("--limit", HOST, "-e", f"report_dir={folder}", playbook="report.yml")
    assert made.returncode == 0, made.stdout
    page = json.loads((folder / "fleet.json").read_text())
    (host,) = [one for one in page["nodes"] if one["name"] == HOST]
    said = [*host["warnings"], *(one["found"] for one in host["drift"])]
    assert host["state"] in page["trouble"] and [one for one in said if words in one], host
    assert [use["by"] for gpu in host["gpus"] for use in gpu["taken"]] == [f"docker {NAME}"]
    return dict(host)


def limited(work: Work) -> None:
    """Checks that the container can allocate the rest of its slice, and no byte more."""
    rest = work.rest()
    assert 0.6 * (SLICE_MIB - HELD_MIB) * MIB < rest < (SLICE_MIB - HELD_MIB) * MIB


@pytest.mark.parametrize("lost", LOST, ids=[one.name for one in LOST])
def test_lost_and_found(node: Node, work: Work, lost: Lost, tmp_path: Path) -> None:
    """Causes the loss, checks what the operator sees, repairs the host, and checks that the node is healthy."""
    until(lambda: not troubles(node), "the node reports no trouble before the loss", 30)
    work.wait()
    held, process = work.slices(), work.process()

    node.shell(lost.harm)
    if lost.seen:
        until(lambda: not shown(node, lost.seen), f"{lost.name}: vgpuctl prints {lost.seen}")
    if lost.metric:
        assert re.search(f"^{lost.metric}$", show(node, "metrics"), re.MULTILINE)
    if lost.page:
        on_page(tmp_path, lost.page)
    if not lost.again:
        limited(work)

    node.shell(lost.mend)
    if lost.site:
        mended = play("--limit", HOST)
        assert mended.returncode == 0, mended.stdout
    work.wait()
    until(lambda: not troubles(node), f"{lost.name}: the node reports no trouble after the repair", 90)
    assert (work.slices(), work.process() != process) == (held, lost.again)
    limited(work)


def test_lost_gpu_is_named_by_plan_and_result(node: Node, work: Work, tmp_path: Path) -> None:
    """The plan (printed before any change) warns of the lost GPU, and the run's result names the GPU once."""
    node.shell(f"gpusimctl fall-off 1; systemctl restart {PLUGIN}")
    try:
        until(lambda: "is lost" in show(node, "status"), "vgpuctl status reports the lost GPU")
        planned = play("--limit", HOST, "--check", "--diff")
        assert "1 of 2 GPUs: 1 x Tesla T4" in planned.stdout, planned.stdout
        assert re.search(r"warning: GPU 1 \(GPU-[0-9a-f-]+\) is lost", planned.stdout), planned.stdout
        run = play("--limit", HOST)
        assert run.returncode == 2 and "restart vgpu-device-plugin" not in run.stdout, run.stdout
        differs = [line for line in run.stdout.splitlines() if "DIFFERS" in line and "GPU" in line]
        assert len(differs) == 1 and "reset or replace it" in differs[0], run.stdout
        assert [one["index"] for one in on_page(tmp_path, "fallen off the bus")["lost"]] == [1]
    finally:
        node.run("gpusimctl", "recover", "1")
    until(lambda: not troubles(node), "the node reports no trouble after the repair")
    limited(work)


def test_only_an_xid_of_the_gpu_makes_its_slices_unhealthy(node: Node, work: Work, tmp_path: Path) -> None:
    """Xid 31 is a program's own fault. Xid 79 is the GPU's fault: only this GPU's slices become unhealthy."""
    slices = {one["id"]: one["gpu"] for one in answer(node, "slices")["slices"]}
    try:
        node.run("gpusimctl", "xid", "1", "31")
        node.run("gpusimctl", "xid", "1", "79")
        found = until(
            lambda: [one for one in troubles(node) if "unhealthy" in one], "the node reports unhealthy slices"
        )
        assert {one.split()[0] for one in found if "::" in one} == {one for one, gpu in slices.items() if gpu == 1}
        assert len(on_page(tmp_path, "Xid 79")["drift"]) == 1
        said = show(node, "explain 1")
        assert "Xid 79" in said and "Xid 31" not in said
        limited(work)
    finally:
        node.shell(f"gpusimctl recover 1; systemctl restart {PLUGIN}")
    until(lambda: not troubles(node), "the node reports no trouble after the repair")


REFUSED = "No space left on device"


def test_full_run_is_named_and_harms_no_container(node: Node, work: Work) -> None:
    """While /run is full no container starts, and running containers continue. With free space the node is healthy."""
    size = "df --output=size --block-size=1K /run | tail -1"
    used = "df --output=used --block-size=1K /run | tail -1"
    before = int(node.shell(size))
    try:
        node.shell(f"mount -o remount,size=$(($({used}) + 64))k /run; dd if=/dev/zero of=/run/fill 2>/dev/null || true")
        said = text(node, "vgpuctl", "lease")
        assert REFUSED in said and "/run" in said
        until(lambda: "/run/vgpu is full" in show(node, "status"), "vgpuctl status warns of the full /run")
        # docker needs space in /run to start a second program in the container, so the test starts none.
        assert work.held() >= HELD_MIB * MIB
    finally:
        node.shell(f"rm -f /run/fill; mount -o remount,size={before}k /run")
    until(lambda: not troubles(node), "the node reports no trouble after the repair")
    lease = answer(node, "lease")
    node.run("vgpuctl", "release", lease["allocation"])


def test_full_disk_is_named_and_forgets_no_allocation(node: Node, work: Work) -> None:
    """/var/lib/vgpu is on a disk of 8 MiB (a loop device), which the test fills. The plugin keeps all allocations."""
    state, held = "/var/lib/vgpu", work.slices()
    node.shell(
        f"systemctl stop {PLUGIN}; truncate -s 8M /root/disk; mkfs.ext4 -q -m 0 /root/disk; mkdir -p /mnt/disk; "
        f"mount -o loop /root/disk /mnt/disk; cp -a {state}/. /mnt/disk/; mount --move /mnt/disk {state} || "
        f"{{ umount /mnt/disk; mount -o loop /root/disk {state}; }}; systemctl start {PLUGIN}"
    )
    try:
        work.wait()
        node.shell(f"dd if=/dev/zero of={state}/fill bs=1K 2>/dev/null || true")
        # A few more leases succeed, because the blocks of the record still have room.
        leases: list[str] = []
        while "error" not in (said := answer(node, "lease")):
            leases.append(said["allocation"])
        assert REFUSED in said["error"] and state in said["error"]
        until(lambda: f"{state} is full" in show(node, "status"), "vgpuctl status warns of the full disk")
        limited(work)
        node.run("systemctl", "kill", "--signal=KILL", PLUGIN)
        work.wait()
        assert work.slices() == held
        assert {one["id"] for one in answer(node, "status")["allocations"]} >= set(leases)
        node.shell(f"rm {state}/fill")
        for lease in [*leases, answer(node, "lease")["allocation"]]:
            node.run("vgpuctl", "release", lease)
    finally:
        node.shell(
            f"systemctl stop {PLUGIN}; rm -f {state}/fill; cp -a {state} /root/state; umount {state}; "
            f"rm -rf {state}; mv /root/state {state}; rm -rf {state}/lost+found /root/disk; systemctl start {PLUGIN}"
        )
    until(lambda: not troubles(node), "the node reports no trouble after the repair")
    assert work.slices() == held


FAKETIME = "/usr/lib/*/faketime/libfaketime.so.1"
CLOCK = "/srv/clock"
DROP_IN = f"/etc/systemd/system/{PLUGIN}.d/clock.conf"


@pytest.fixture
def clock(node: Node, tmp_path: Path) -> Iterator[list[str]]:
    """Lets the plugin read its wall clock from the file CLOCK. Yields the command prefix that does so for a command."""
    node.shell("DEBIAN_FRONTEND=noninteractive apt-get -qq install -y libfaketime >/dev/null")
    nap = tmp_path / "nap.so"
    source = Path(__file__).with_name("nap.c")
    subprocess.run(["cc", "-std=c11", "-D_GNU_SOURCE", "-O1", "-shared", "-fPIC", "-o", nap, source], check=True)
    node.copy(nap, "/srv/nap.so")
    library = node.shell(f"ls {FAKETIME}").strip()
    settings = [
        f"LD_PRELOAD=/srv/nap.so:{library}",
        f"FAKETIME_TIMESTAMP_FILE={CLOCK}",
        "FAKETIME_NO_CACHE=1",
        # As on a real host, setting the clock does not change the monotonic clock.
        "FAKETIME_DONT_FAKE_MONOTONIC=1",
        "DONT_FAKE_MONOTONIC=1",
    ]
    node.write(CLOCK, "+0\n")
    node.run("mkdir", "-p", DROP_IN.rpartition("/")[0])
    node.write(DROP_IN, "[Service]\n" + "".join(f"Environment={one}\n" for one in settings))
    node.shell(f"systemctl daemon-reload; systemctl restart {PLUGIN}")
    yield ["env", *settings]
    node.shell(
        f"rm -r {DROP_IN.rpartition('/')[0]} {CLOCK} /srv/nap.so; systemctl daemon-reload; systemctl restart {PLUGIN}"
    )
    until(lambda: not troubles(node), "the node reports no trouble after the repair")


def test_clock_that_jumps_ends_no_lease_and_no_container(node: Node, work: Work, clock: list[str]) -> None:
    """The clock jumps by an hour and by a year, forward and back, while plugin, metrics and vgpuctl run."""
    work.wait()
    held, lease = work.slices(), json.loads(node.run(*clock, "vgpuctl", "lease", "--json"))["allocation"]
    true = int(node.run("date", "+%s"))
    for offset in ("+3600", "+31536000", "-3600", "-31536000", "+0"):
        node.write(CLOCK, f"{offset}\n")
        # Negative control: a program with the prefix sees the jump.
        assert abs(int(node.run(*clock, "date", "+%s")) - true - int(offset)) < 600
        node.shell("sleep 12")  # One interval of the plugin's housekeeping.
        status = json.loads(node.run(*clock, "vgpuctl", "status", "--json"))
        (left,) = [one["expires_in_s"] for one in status["allocations"] if one["id"] == lease]
        assert 0 < left <= 300
        assert status["warnings"] == []
        watch = json.loads(node.run(*clock, "vgpuctl", "watch", "--json"))
        assert (watch["fault"], [one for one in watch["findings"] if one["age_s"] < 0]) == ("", [])
        assert "vgpu_watch_incomplete 0" in node.run(*clock, "vgpuctl", "metrics")
        assert work.slices() == held
        limited(work)
    node.run("vgpuctl", "release", lease)


def test_container_is_back_after_a_reboot(node: Node, work: Work) -> None:
    held = work.slices()
    reboot(node)
    work.wait()
    assert work.slices() == held
    until(lambda: not troubles(node), "the node reports no trouble after the reboot", 90)
    limited(work)


def test_plan_names_who_holds_slices_of_the_former_size(node: Node, work: Work, inventory: Path) -> None:
    set_group(inventory, "t4", vgpu_split_count=5)
    planned = play("--limit", HOST, "--check", "--diff", inventory=inventory)
    assert planned.returncode == 0, planned.stdout
    assert "containers that keep slices of their former size until they end: 1" in planned.stdout, planned.stdout
    assert "[disturbs running work]" not in planned.stdout, planned.stdout


def test_program_that_somebody_removed_is_named_by_the_plan(node: Node) -> None:
    """The plan warns of the missing nvidia-smi although the package database lists its package as installed."""
    program = node.shell("readlink --canonicalize $(command -v nvidia-smi)").strip()
    node.run("mv", program, "/root/removed")
    try:
        planned = play("--limit", HOST, "--check")
    finally:
        node.run("mv", "/root/removed", program)
    assert "warning: nvidia_driver: nvidia-smi is missing, though its package" in planned.stdout, planned.stdout


# columns: case, shell command that causes the fault, shell command that repairs it, text in the message
HINDERED = [
    (
        "/etc/vgpu is read-only",
        "mount --bind /etc/vgpu /etc/vgpu; mount -o remount,bind,ro /etc/vgpu",
        "umount /etc/vgpu",
        "Read-only file system",
    ),
    (
        "daemon.json has a comma too many",
        "sed -i 's/{/{,/' /etc/docker/daemon.json",
        "sed -i 's/{,/{/' /etc/docker/daemon.json",
        "line 1",
    ),
]


@pytest.mark.parametrize("name, harm, mend, words", HINDERED, ids=[row[0] for row in HINDERED])
def test_fault_of_a_file_is_named(
    node: Node, work: Work, inventory: Path, name: str, harm: str, mend: str, words: str
) -> None:
    set_group(inventory, "t4", vgpu_split_count=5)
    node.shell(harm)
    try:
        failed = play("--limit", HOST, inventory=inventory)
    finally:
        node.shell(mend)
    assert failed.returncode == 2 and words in failed.stdout, failed.stdout
    assert "Traceback" not in failed.stdout
    mended = play("--limit", HOST)
    assert mended.returncode == 0, mended.stdout
    work.wait()


@pytest.mark.parametrize("options", [["--check"], []], ids=["check mode", "without check mode"])
def test_teardown_refuses_before_the_first_change(node: Node, work: Work, options: list[str]) -> None:
    before = node.snapshot()
    refused = play("--limit", HOST, *options, playbook="teardown.yml")
    assert refused.returncode == 2 and NAME in refused.stdout, refused.stdout
    assert changed(before, node.snapshot()) == []
    work.wait()
    limited(work)
