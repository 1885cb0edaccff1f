# SPDX-License-Identifier: Apache-2.0
"""Tests programs that run in their own mount namespace with the mounts of a slice (a part of a GPU). The isolation
check starts its programs in this way on hosts without a container engine. The tests need root.
"""

from __future__ import annotations

import os

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.host.mount_namespace import (
    Mount,
    NamespaceError,
    gpu_nodes,
    run,
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root")

ENVIRONMENT = {"PATH": "/usr/bin:/bin"}


def shell(script: str, mounts=(), devices=(), timeout: float = 30.0, before_start=lambda pid: None):
    return run(["sh", "-c", script], mounts, devices, ENVIRONMENT, timeout, before_start, lambda pid: None)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    path.write_text("content\n")
    return str(path)


# mount points in folders that exist, in folders that do not exist, and on a file that exists
TARGETS = ["/etc/vgpu-test-file", "/usr/local/lib/vgpu/lib.so", "/run/vgpu/deep/er/file", "/etc/hostname", "/opt/x/y"]
TARGETS += ["/dev/vgpu/deep/file", "/dev/vgpu-test-file"]


@pytest.mark.parametrize("target", TARGETS)
def test_mount_points_are_made_without_touching_the_host(source, target):
    before = os.path.lexists(target) and os.stat(target).st_ino
    folder_before = os.listdir("/etc")
    outcome = shell(f"cat {target}; ls -A /etc | wc -l; echo more >> {target}", [Mount(target, source, True)])
    assert outcome.out.startswith("content\n")
    assert "Read-only file system" in outcome.err
    assert (os.path.lexists(target) and os.stat(target).st_ino) == before
    assert os.listdir("/etc") == folder_before
    entries = int(outcome.out.split()[1])
    assert entries - len(folder_before) == (1 if target == "/etc/vgpu-test-file" else 0)


def test_writable_mount_reaches_the_source(source):
    shell("echo more >> /run/vgpu/ledger", [Mount("/run/vgpu/ledger", source, False)])
    with open(source) as stream:
        assert stream.read() == "content\nmore\n"


def test_what_is_mounted_in_a_mounted_folder(source, tmp_path):
    """A container gets a read-only folder with its limits (the share). One file in it is covered by a writable mount:
    the ledger, in which the library counts GPU memory. The namespace must have the same mounts."""
    share = tmp_path / "share"
    share.mkdir()
    (share / "limits").write_text("limits\n")
    (share / "ledger").touch()
    mounts = [Mount("/dev/vgpu/0", str(share), True), Mount("/dev/vgpu/0/ledger", source, False)]
    done = shell("cd /dev/vgpu/0; cat limits ledger; echo more >> ledger; echo more >> limits; touch new", mounts)
    assert done.out == "limits\ncontent\n"
    assert done.err.count("Read-only file system") == 2, done.err
    with open(source) as stream:
        assert ((share / "ledger").read_text(), stream.read()) == ("", "content\nmore\n")


# columns: label, command of a tenant; expected words of its error ("": the command succeeds). A tenant who moves the
# share could replace the limits. test_share_mounts.py in tests/integration runs similar commands in containers of runc.
MOVES = [
    ("share folder", "mv /dev/vgpu/0 /dev/vgpu/o", "Read-only"),
    ("file in the share", "mv /dev/vgpu/0/ledger /dev/vgpu/0/o", "Read-only"),
    ("parent folder of the share", "mv /dev/vgpu /dev/o", "busy"),
    ("folder that is not a mount", "mkdir /dev/plain && mv /dev/plain /dev/o", ""),
    ("/dev", "mv /dev /o", "busy"),
]


@pytest.mark.parametrize(("about", "command", "fault"), MOVES, ids=[one[0] for one in MOVES])
def test_share_cannot_be_moved(source, tmp_path, about, command, fault):
    (tmp_path / "ledger").touch()
    (tmp_path / "root/0").mkdir(parents=True)
    mounts = [Mount("/dev/vgpu", str(tmp_path / "root"), True), Mount("/dev/vgpu/0", str(tmp_path), True)]
    done = shell(command, [*mounts, Mount("/dev/vgpu/0/ledger", source, False)])
    assert (done.rc == 0, fault in done.err) == (not fault, True), done.err


def test_symlinks_and_folders_of_an_opened_folder_stay(source, tmp_path):
    folder = tmp_path / "open"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "file").write_text("deep\n")
    (folder / "link").symlink_to("sub/file")
    outcome = shell(f"cat {folder}/link {folder}/new; readlink {folder}/link", [Mount(f"{folder}/new", source, True)])
    assert outcome.out == "deep\ncontent\nsub/file\n"
    assert not (folder / "new").exists()


def test_devices_are_the_common_and_the_named_devices(tmp_path):
    outcome = shell(
        "ls /dev; echo x > /dev/null && head -c 3 /dev/zero | od -An -tx1", devices=["/dev/kmsg", "/dev/nothing"]
    )
    found = outcome.out.split()
    assert {"null", "zero", "urandom", "fd", "shm"} <= set(found)
    assert "nothing" not in found
    assert not [name for name in found if name.startswith(("sd", "vd", "loop", "nvidia"))]
    assert found[-3:] == ["00", "00", "00"]


def test_device_nodes_by_minor_numbers_of_gpus():
    assert gpu_nodes([0, 3])[-2:] == ["/dev/nvidia0", "/dev/nvidia3"]
    assert "/dev/nvidiactl" in gpu_nodes([])


def test_prepared_process_can_be_inspected_before_its_program_starts(source):
    seen = []

    def look(pid: int) -> None:
        with open(f"/proc/{pid}/root/run/vgpu/ledger") as stream:
            seen.append(stream.read())

    shell("echo changed > /run/vgpu/ledger", [Mount("/run/vgpu/ledger", source, False)], before_start=look)
    assert seen == ["content\n"]


# columns: shell command, time limit in seconds; expected exit status (-9: killed), whether the time limit was exceeded
@pytest.mark.parametrize(
    ("script", "timeout", "rc", "timed_out"),
    [("exit 7", 30, 7, False), ("kill -9 $$", 30, -9, False), ("sleep 1000 & sleep 1000", 0.2, -9, True)],
)
def test_outcome_has_the_exit_status_and_the_timeout(script, timeout, rc, timed_out):
    outcome = shell(script, timeout=timeout)
    assert (outcome.rc, outcome.timed_out) == (rc, timed_out)


def test_missing_program_returns_127():
    outcome = run(["/nonexistent"], [], [], ENVIRONMENT, 30, lambda pid: None, lambda pid: None)
    assert outcome.rc == 127
    assert "/nonexistent: No such file or directory" in outcome.err


def test_missing_mount_source_is_an_error():
    with pytest.raises(NamespaceError, match="mount source /nonexistent: No such file or directory"):
        shell("true", [Mount("/etc/x", "/nonexistent", True)])


def test_environment_has_only_the_given_variables():
    assert set(shell("env").out.split()) <= {"PATH=/usr/bin:/bin", "PWD=/", "OLDPWD=/", "SHLVL=0", "_=/usr/bin/env"}
