# SPDX-License-Identifier: Apache-2.0
"""Tests that the running device plugin restores removed files with their content: its socket, its folders and its
records (the list of its allocations).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import struct

import pytest
from vgpu_plugin._shared.abi import fields as abi_fields
from vgpu_plugin._shared.abi import files as abi_files
from vgpu_plugin.ctl import main as ctl
from vgpu_plugin.daemon import Daemon

from .conftest import FakeGpus
from .samples import until

RESOURCE = "nvidia.com/gpu"
F_OFD_SETLK = 37


@pytest.fixture
def daemon(node, kubelet, running, monkeypatch):
    monkeypatch.setattr("vgpu_plugin.daemon.HOUSEKEEPING_S", 0.05)
    node.configure(splitCount=2)
    out = Daemon(node.setup(), lambda: FakeGpus(node.gpus))
    running(out)
    until(lambda: kubelet.state()["resources"].get(RESOURCE, {}).get("allocatable") == 4, "the slices")
    return out


def status(node, capsys) -> dict:
    rc = ctl.main(["--socket", str(node.paths.admin_socket), "status", "--json"])
    text = capsys.readouterr().out
    return json.loads(text) if rc == 0 else {}


def held(found: dict) -> set[tuple[str, str, tuple[str, ...]]]:
    return {(one["id"], one["kind"], tuple(one["slice_ids"])) for one in found.get("allocations", [])}


def remove(path, mounted) -> None:
    """Removes a folder as ``rm -rf`` does: everything except mount points and their parents."""
    if path.is_symlink() or path.is_file() or path.is_socket():
        path.unlink(missing_ok=True)
        return
    for one in list(path.iterdir()):
        remove(one, mounted)
    if path not in mounted and not any(path in one.parents for one in mounted):
        remove_all(path)  # The daemon creates files in the folder meanwhile, so one attempt may fail.


def remove_all(path) -> None:
    """Removes a folder by repeated attempts, because the daemon creates files in it meanwhile."""
    for _attempt in range(1000):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            if not path.exists():
                return
        except OSError as fault:
            if fault.errno != errno.ENOTEMPTY:
                raise
        else:
            return
    raise AssertionError(f"{path} cannot be removed")


# What is removed → the function that removes it while the plugin runs.
GONE = {
    "all of /run/vgpu": lambda node: remove(node.paths.run_dir, node.mounter.mounted),
    "the socket": lambda node: node.paths.admin_socket.unlink(),
    "foreign file in place of the folder": lambda node: (
        node.paths.admin_socket.unlink(),
        node.paths.admin_socket.write_text(""),
    ),
    "the records file": lambda node: node.paths.records.unlink(),
    "all of /var/lib/vgpu": lambda node: remove_all(node.paths.state_dir),
    "limits files of all allocations": lambda node: [one.unlink() for one in node.paths.allocations.rglob("limits")],
    "ledgers of all allocations": lambda node: [one.unlink() for one in node.paths.allocations.glob("*/rw/ledger")],
    "the node's root folder": lambda node: remove_all(node.paths.run_dir / "root"),
}


@pytest.mark.parametrize("what", GONE)
def test_removed_files_are_restored_with_their_content(node, kubelet, daemon, capsys, what):
    pod = kubelet.run_pod("one")
    rc = ctl.main(["--socket", str(node.paths.admin_socket), "lease", "--json"])
    lease = json.loads(capsys.readouterr().out)
    assert rc == 0
    before = status(node, capsys)
    files = {host for one in (pod["answer"], lease) for host in hosts(one)}
    assert all(map(os.path.exists, files))
    GONE[what](node)
    until(lambda: held(status(node, capsys)) == held(before), "the unchanged allocations")
    until(lambda: all(map(os.path.exists, files)), "the files of each allocation")
    until(node.paths.records.exists, "the records file")
    assert {one["id"] for one in json.loads(node.paths.records.read_text())["allocations"]} == {
        one["id"] for one in before["allocations"]
    }
    now = status(node, capsys)
    assert [one["in_use"] for one in now["slices"]] == [one["in_use"] for one in before["slices"]]
    assert oct(os.stat(node.paths.admin_socket).st_mode & 0o777) == "0o600"
    assert kubelet.restart_container("one")["ids"] == pod["ids"]
    assert kubelet.run_pod("two")["ids"]


def hosts(answer: dict) -> list[str]:
    return [one["host_path"] for one in answer["mounts"]]


def test_unrepairable_allocation_does_not_affect_others(node, kubelet, daemon, capsys, monkeypatch):
    pods = [kubelet.run_pod(name) for name in ("one", "two")]
    bad, good = sorted(one for one in node.paths.allocations.iterdir() if not one.name.startswith("slice-"))
    real = node.mounter.is_mount

    def is_mount(target):
        if bad in target.parents:
            raise OSError(5, "Input/output error", str(target))
        return real(target)

    monkeypatch.setattr(node.mounter, "is_mount", is_mount)
    for one in (bad, good):
        (one / "rw" / "ledger").unlink()
    until((good / "rw" / "ledger").exists, "the second allocation's ledger")
    until(lambda: any(str(bad) in one for one in status(node, capsys)["warnings"]), "the warning")
    monkeypatch.undo()
    # The plugin makes the ledger (the file of memory counts) first, so the other files may come a moment later.
    until(lambda: all(os.path.exists(host) for pod in pods for host in hosts(pod["answer"])), "the files of both pods")


def test_existing_files_are_not_replaced(node, kubelet, daemon, capsys):
    """A container has the existing files mounted, so the plugin makes only the missing file."""
    kubelet.run_pod("one")
    (folder,) = [one for one in node.paths.allocations.iterdir() if not one.name.startswith("slice-")]
    before = {name: os.stat(folder / name).st_ino for name in ("rw/ledger", "rw/tenant", "limits")}
    (folder / "ro" / "ld.so.preload").unlink()
    until((folder / "ro" / "ld.so.preload").exists, "the file")
    assert {name: os.stat(folder / name).st_ino for name in before} == before


def _overwrite(path, data: bytes) -> None:
    """Overwrites a file in place as a program in the container does, so the inode stays the same."""
    with path.open("r+b") as stream:
        stream.truncate(len(data))
        stream.write(data)


# Damage to an allocation's ledger (the file in which a container's processes count their memory) → the function that
# causes it.
SPOILT = {
    "zeros": lambda path: _overwrite(path, bytes(abi_files.LEDGER_FILE_SIZE)),
    "empty ledger": lambda path: _overwrite(path, b""),
    "ledger of another GPU": lambda path: _overwrite(path, abi_files.pack_ledger(["GPU-" + "f" * 8], "another")),
}


@pytest.mark.parametrize("what", SPOILT)
def test_damaged_ledger_is_reported_and_repaired_when_unused(node, daemon, capsys, what):
    assert ctl.main(["--socket", str(node.paths.admin_socket), "lease", "--json"]) == 0
    lease = json.loads(capsys.readouterr().out)["allocation"]
    path = node.paths.allocations / lease / "rw" / "ledger"
    whole = path.read_bytes()
    held = os.open(path, os.O_RDWR)
    # The test locks a slot of the ledger, as a live process of a container does.
    lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, abi_fields.LEDGER_ALIVE_BASE, 1, 0)
    fcntl.fcntl(held, F_OFD_SETLK, lock)
    inode = path.stat().st_ino
    SPOILT[what](path)
    spoilt = path.read_bytes()
    until(lambda: lease in " ".join(status(node, capsys).get("warnings", [])), "a warning that names the allocation")
    assert path.read_bytes() == spoilt
    os.close(held)
    until(lambda: path.read_bytes() == whole, "the repaired ledger")
    # A container may have the ledger mounted, so it is repaired in place.
    assert path.stat().st_ino == inode
    until(lambda: status(node, capsys).get("warnings") == [], "no warning")
