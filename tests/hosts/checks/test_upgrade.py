# SPDX-License-Identifier: Apache-2.0
"""Runs upgrade.yml on nodes with running work: a good version disturbs nothing, a bad version is rolled back, and
unused versions are removed. The tests depend on each other, as upgrades do."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import signal
import subprocess
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import former
import pytest
from conftest import INVENTORY, ROOT, Node, environment, play, play_command
from simhosts.slice import docker_command

FIRST, SECOND = "gpu-t4-1", "gpu-v100-1"
LIBRARY = "/usr/local/lib/vgpu"
FORMER = f"{LIBRARY}/{former.VERSION}"
CACHE = ROOT / ".build" / "cache"
MACHINE = platform.machine()
# Seconds after which the plugin has certainly noticed that a pod is gone.
LIMIT = 150.0
CONFIGS = "/etc/vgpu/configs"
# Named configurations of the device plugin, which a node label may choose: NIGHT goes with the version that passes its
# checks, OTHER_NIGHT with the versions that fail.
NIGHT = ("-e", json.dumps({"vgpu_configs": {"night": {"split_count": 2}}}))
OTHER_NIGHT = {"vgpu_configs": {"night": {"split_count": 3}, "day": {"split_count": 4}}}
SPOILED = json.dumps({"device_plugin_options": ["--no-such-option"], **OTHER_NIGHT})


def current(node: Node) -> str:
    return node.run("readlink", f"{LIBRARY}/current").strip()


def versions(node: Node) -> list[str]:
    return sorted(set(node.run("ls", LIBRARY).split()) - {"current"})


def arbiter(node: Node) -> str:
    """Returns the program file of the running arbiter, which balances compute time."""
    pid = node.run("systemctl", "show", "vgpu-arbiter.service", "--property=MainPID", "--value").strip()
    return node.run("readlink", f"/proc/{pid}/exe").strip()


def status(node: Node) -> dict[str, Any]:
    found: dict[str, Any] = node.json("vgpuctl", "status", "--json")
    return found


def advertised(node: Node) -> list[str]:
    checkpoint = json.loads(node.read("/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"))
    found: list[str] = checkpoint["Data"]["RegisteredDevices"]["nvidia.com/gpu"]
    return sorted(found)


def repack(version: str, new: str, library: bytes | None = None) -> str:
    """Makes an archive of another version: the same code with a few more bytes at its end, or another library."""
    with tarfile.open(CACHE / f"vcuda-{version}-{MACHINE}.tar.gz") as bundle:
        files = {one.name: bundle.extractfile(one).read() for one in bundle if one.isfile()}  # type: ignore[union-attr]
    manifest = json.loads(files.pop("manifest.json"))
    files["libvgpu.so"] = library or files["libvgpu.so"] + f"\n{new}\n".encode()
    manifest["version"] = new
    manifest["files"] = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    with tarfile.open(CACHE / f"vcuda-{new}-{MACHINE}.tar.gz", "w:gz") as bundle:
        for name, content in {**files, "manifest.json": json.dumps(manifest).encode()}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            bundle.addfile(entry, io.BytesIO(content))
    return new


@pytest.fixture(scope="module")
def churn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("churn") / "churn"
    source = Path(__file__).with_name("churn.c")
    subprocess.run(["cc", "-std=c11", "-D_GNU_SOURCE", "-O1", "-o", program, source], check=True)
    return program


@pytest.fixture(scope="module")
def work(nodes: dict[str, Node], churn: Path) -> Iterator[subprocess.Popen[str]]:
    """A container in a slice (part of a GPU) that allocates from before the upgrade until a test stops it."""
    node = nodes[FIRST]
    node.copy(churn, "/root/churn")
    pod = node.json("vgpu-kubelet-double", "run-pod", "--name", "work", "--json", "--count", "1")
    options = ("--interactive", "--name", "work", "--volume", "/root/churn:/churn:ro")
    with node.start(*docker_command(pod["answer"], ["/churn"], *options)) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        yield program
        if program.poll() is None:
            program.communicate()
    node.run("vgpu-kubelet-double", "delete-pod", "--name", "work", check=False)
    node.run("rm", "-f", "/root/churn")


@dataclass
class OldWork:
    """The same program in a container of a former release: with its library, and with its mounts of single files."""

    node: Node
    allocation: str
    program: subprocess.Popen[str]

    @classmethod
    def make(cls, node: Node, library: Path, churn: Path) -> OldWork:
        node.run("mkdir", "--mode=0755", FORMER)
        node.copy(library, f"{FORMER}/libvgpu.so")
        node.copy(churn, "/root/old-churn")
        answer = node.json("vgpu-kubelet-double", "run-pod", "--name", "old", "--json", "--count", "1")["answer"]
        ledger = next(one["host_path"] for one in answer["mounts"] if one["container_path"] == "/dev/vgpu/0/ledger")
        folder = Path(ledger).parent.parent
        mounts = [
            ("/usr/local/lib/vgpu/libvgpu.so", f"{FORMER}/libvgpu.so", True),
            ("/etc/ld.so.preload", f"{folder}/ld.so.preload", True),
            ("/etc/vgpu/limits", f"{folder}/limits", True),
            ("/run/vgpu/ledger", f"{folder}/rw/ledger", False),
            ("/run/vgpu/tenant", f"{folder}/rw/tenant", False),
        ]
        pages = [name for name in node.run("ls", str(folder)).split() if name.startswith("gpu-")]
        mounts += [(f"/run/vgpu/{name}", f"{folder}/{name}", True) for name in pages]
        keys = ("container_path", "host_path", "read_only")
        ours = ("/dev/vgpu", "/etc/ld.so.preload")
        of_driver = [one for one in answer["mounts"] if not one["container_path"].startswith(ours)]
        old = {**answer, "mounts": [*of_driver, *(dict(zip(keys, one, strict=True)) for one in mounts)]}
        options = ("--interactive", "--name", "old", "--volume", "/root/old-churn:/churn:ro")
        run, container = docker_command(old, ["/churn"], *options), ["docker", "create"]
        assert run[:3] == ["docker", "run", "--rm"]
        node.run(*container, *run[3:])
        return cls(node, folder.name, cls.start(node))

    @staticmethod
    def start(node: Node) -> subprocess.Popen[str]:
        program = node.start("docker", "start", "--attach", "--interactive", "old")
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        return program

    @staticmethod
    def remove(node: Node) -> None:
        node.run("docker", "rm", "--force", "old", check=False)
        node.run("vgpu-kubelet-double", "delete-pod", "--name", "old", check=False)
        node.run("rm", "-rf", "/root/old-churn", FORMER)


@pytest.fixture(scope="module")
def old_work(nodes: dict[str, Node], churn: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OldWork | None]:
    """Starts a container before the upgrade with a former release's library; None if the checkout has no history from
    which to build that library."""
    if not former.has_history():
        yield None
        return
    built = former.check_out(tmp_path_factory.mktemp("former")).build
    try:
        yield OldWork.make(nodes[FIRST], built / "libvgpu.so", churn)
    finally:
        OldWork.remove(nodes[FIRST])


def named_as_old(node: Node) -> list[str]:
    """Returns the allocations (what one container was given) whose container has old mounts: single files of a former
    release. The list comes from the watcher, the part of the device plugin that looks for containers which bypass
    their limits. Before the list is read, the watcher polls three more times; it must report no bypass."""
    end = time.monotonic() + LIMIT
    goal = node.json("vgpuctl", "watch", "--json")["looks"] + 3
    while (found := node.json("vgpuctl", "watch", "--json"))["looks"] < goal and time.monotonic() < end:
        time.sleep(1)
    assert (found["looks"] >= goal, found["findings"], found["fault"]) == (True, [], "")
    return [one["allocation"] for one in found["old_mounts"]]


def started(node: Node, container: str = "work") -> str:
    return node.run("docker", "inspect", "--format", "{{.State.StartedAt}} {{.State.Pid}}", container).strip()


def configurations(node: Node) -> dict[str, str]:
    """Returns node.yaml and the named configurations, path → text."""
    paths = ["/etc/vgpu/node.yaml", *node.shell(f"ls {CONFIGS}/* 2>/dev/null || true").split()]
    return {path: node.read(path) for path in paths}


def upgrade(library: str, plugin: str, *options: str) -> subprocess.CompletedProcess[str]:
    versions = ["-e", f"vcuda_version={library}", "-e", f"device_plugin_version={plugin}"]
    return play(*versions, *options, playbook="upgrade.yml")


@pytest.fixture(scope="module")
def names(nodes: dict[str, Node]) -> dict[str, str]:
    """The names of the versions before and after the upgrade."""
    library, plugin = current(nodes[FIRST]), status(nodes[FIRST])["version"]
    return {
        "library": library,
        "plugin": plugin,
        "new": repack(library, "0.1.0-upgraded1"),
        # A library that loads but limits nothing, as a broken upgrade would install.
        "bad": repack(library, "0.1.0-unlimited", blank_library()),
        "new plugin": "0.1.0-upgraded1",
        # Another copy of the library, for an upgrade that is killed.
        "killed": repack(library, "0.1.0-upgraded2"),
    }


def blank_library() -> bytes:
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-o", "/dev/stdout", "-"]
    source = CACHE / "blank.so"
    subprocess.run([*command[:-2], str(source), "-"], input=b"int vgpu_nothing;\n", check=True)
    try:
        return source.read_bytes()
    finally:
        source.unlink()


def test_check_mode_shows_the_plan_and_changes_nothing(
    nodes: dict[str, Node], names: dict[str, str], work: subprocess.Popen[str]
) -> None:
    node = nodes[FIRST]
    before = started(node), advertised(node), configurations(node), versions(node), current(node)
    foretold = upgrade(names["new"], names["new plugin"], "--check", "--diff", *NIGHT)
    assert foretold.returncode == 0, foretold.stdout
    for words in (f"switch current from {names['library']} to {names['new']}", names["new plugin"]):
        assert words in " ".join(foretold.stdout.split())
    assert (started(node), advertised(node), configurations(node), versions(node), current(node)) == before
    assert status(node)["version"] == names["plugin"]
    assert work.poll() is None


def test_a_new_version_disturbs_no_running_work(
    nodes: dict[str, Node], names: dict[str, str], work: subprocess.Popen[str], old_work: OldWork | None
) -> None:
    node = nodes[FIRST]
    before = started(node), advertised(node)

    done = upgrade(names["new"], names["new plugin"], *NIGHT)

    assert done.returncode == 0, done.stdout
    assert (started(node), advertised(node)) == before
    assert sorted(configurations(node)) == [f"{CONFIGS}/night.yaml", "/etc/vgpu/node.yaml"]
    for one in nodes.values():
        assert current(one) == names["new"]
        assert status(one)["version"] == names["new plugin"]
        assert arbiter(one) == f"{LIBRARY}/{names['new']}/vgpu-arbiter"
    # The container maps the old version; no process on the other host does.
    held = [former.VERSION] if old_work is not None else []
    assert versions(nodes[FIRST]) == sorted([names["library"], names["new"], *held])
    assert versions(nodes[SECOND]) == [names["new"]]
    assert work.poll() is None


def test_a_container_with_old_mounts_runs_on_and_starts_again(old_work: OldWork | None) -> None:
    if old_work is None:
        pytest.skip(former.NO_HISTORY)
    node, before = old_work.node, started(old_work.node, "old")
    assert old_work.program.poll() is None, "expected the program in the container to run on after the upgrade"
    for _start in range(2):
        assert named_as_old(node) == [old_work.allocation]
        out = old_work.program.communicate(timeout=60)[0]
        rounds, *failures = (int(word) for word in out.split())
        assert (rounds > 100, failures) == (True, [0, 0, 0]), (
            "expected zero allocations that were wrongly refused, wrongly granted or failed"
        )
        old_work.program = old_work.start(node)
        assert started(node, "old") != before
    old_work.program.communicate(timeout=60)
    old_work.remove(node)


def test_a_new_container_gets_the_new_version(nodes: dict[str, Node], names: dict[str, str]) -> None:
    node = nodes[FIRST]
    pod = node.json("vgpu-kubelet-double", "run-pod", "--name", "next", "--json", "--count", "1")
    try:
        mounts = {mount["container_path"]: mount["host_path"] for mount in pod["answer"]["mounts"]}
        assert mounts["/dev/vgpu/lib"] == f"{LIBRARY}/{names['new']}"
    finally:
        node.run("vgpu-kubelet-double", "delete-pod", "--name", "next")


# The device plugin of the new version does not start, on a node with running work.
def test_a_plugin_that_does_not_start_is_rolled_back_on_the_first_host(
    nodes: dict[str, Node], names: dict[str, str], work: subprocess.Popen[str]
) -> None:
    node = nodes[FIRST]
    before = started(node), advertised(node), configurations(node)
    untouched = nodes[SECOND].snapshot()

    done = upgrade(names["new"], names["new plugin"], "-e", SPOILED)

    taken_back(done, node, names)
    # The upgrade had already written the plugin's files, with which the new plugin does not start.
    assert "Report why the program does not run" in done.stdout
    assert (started(node), advertised(node), configurations(node)) == before
    assert "--no-such-option" not in node.read("/etc/systemd/system/vgpu-device-plugin.service")
    assert nodes[SECOND].snapshot() == untouched
    assert work.poll() is None


# The play is killed after it switched the library and before the isolation check (attempts to exceed the limits).
def test_an_upgrade_after_a_killed_one_rolls_back_both(
    nodes: dict[str, Node], names: dict[str, str], work: subprocess.Popen[str]
) -> None:
    node = nodes[FIRST]
    command = [*play_command("upgrade.yml", INVENTORY), "-e", f"vcuda_version={names['killed']}"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("TASK [vgpu.fleet.vcuda : Read the version of the running arbiter]"):
                break
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert current(node) == names["killed"], (
        "the play was killed before it switched the library, so this test proves nothing"
    )
    before = configurations(node)

    done = upgrade(names["killed"], names["new plugin"], "-e", SPOILED)

    taken_back(done, node, names)
    assert configurations(node) == before
    assert work.poll() is None


def taken_back(done: subprocess.CompletedProcess[str], node: Node, names: dict[str, str]) -> None:
    said = " ".join(done.stdout.split())
    assert done.returncode != 0, done.stdout
    assert "It was not upgraded: " in said
    assert f"{node.name}: the host is back at library {names['new']} and device plugin {names['new plugin']}" in said
    assert "and advertises all its slices" in said
    assert current(node) == names["new"]
    assert arbiter(node) == f"{LIBRARY}/{names['new']}/vgpu-arbiter"


def test_the_program_had_no_failure_during_the_upgrades(work: subprocess.Popen[str]) -> None:
    out = work.communicate(timeout=60)[0]
    rounds, *failures = (int(word) for word in out.split())
    assert failures == [0, 0, 0], "expected zero allocations that were wrongly refused, wrongly granted or failed"
    assert rounds > 1000


# Runs after the work has ended, because a library without limits lets the isolation check fill the card.
def test_a_library_that_fails_the_isolation_check_is_rolled_back(nodes: dict[str, Node], names: dict[str, str]) -> None:
    done = upgrade(names["bad"], names["new plugin"])
    taken_back(done, nodes[FIRST], names)
    assert current(nodes[SECOND]) == names["new"]
    assert names["bad"] not in versions(nodes[SECOND])


def test_unused_versions_are_removed(nodes: dict[str, Node], names: dict[str, str]) -> None:
    node = nodes[FIRST]
    assert names["library"] in versions(node)
    node.run("vgpu-kubelet-double", "delete-pod", "--name", "work")
    end = time.monotonic() + LIMIT
    while status(node).get("allocations") and time.monotonic() < end:
        time.sleep(2)
    done = upgrade(names["new"], names["new plugin"])
    assert done.returncode == 0, done.stdout
    assert {name: versions(one) for name, one in nodes.items()} == {name: [names["new"]] for name in nodes}
    again = play("-e", f"vcuda_version={names['new']}", "-e", f"device_plugin_version={names['new plugin']}")
    assert again.returncode == 0, again.stdout
    assert again.stdout.count("changed=0 ") == len(nodes), again.stdout
