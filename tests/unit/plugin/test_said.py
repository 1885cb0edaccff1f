# SPDX-License-Identifier: Apache-2.0
"""Tests that the status of the running device plugin shows faults with the affected path, and no longer shows them once
they are fixed.
"""

from __future__ import annotations

import errno
import json
import os

import pytest
from vgpu_plugin.ctl import main as ctl
from vgpu_plugin.daemon import Daemon

from .conftest import FakeGpus
from .samples import until


@pytest.fixture
def daemon(node, kubelet, running, monkeypatch):
    monkeypatch.setattr("vgpu_plugin.daemon.HOUSEKEEPING_S", 0.05)
    monkeypatch.setattr("vgpu_plugin.offer.health.LOOK_S", 0.05)
    node.configure(splitCount=2)
    out = Daemon(node.setup(), lambda: FakeGpus(node.gpus))
    running(out)
    until(node.paths.admin_socket.exists, "the socket")
    return out


def warnings(node, capsys) -> list[str]:
    rc = ctl.main(["--socket", str(node.paths.admin_socket), "status", "--json"])
    text = capsys.readouterr().out
    return list(json.loads(text)["warnings"]) if rc == 0 else ["no answer"]


# Damage to node.yaml → the function that causes it.
SPOILT = {
    "half": lambda path: path.write_bytes(path.read_bytes()[:30]),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "gone": lambda path: path.unlink(),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "a list": lambda path: path.write_text("[]"),
    "nested without end": lambda path: path.write_bytes(b"[" * 5000),
}


@pytest.mark.parametrize("how", SPOILT)
def test_configuration_damaged_at_run_time_is_reported(node, daemon, capsys, how):
    path = node.paths.config
    until(lambda: warnings(node, capsys) == [], "a plugin without warnings")
    text = path.read_bytes()
    SPOILT[how](path)
    (said,) = until(lambda: warnings(node, capsys), "the warning")
    assert str(path) in said
    assert "was not applied" in said
    if path.is_dir():
        path.rmdir()
    path.write_bytes(text)
    until(lambda: warnings(node, capsys) == [], "the end of the warning")


def test_full_run_folder_is_reported(node, daemon, capsys, monkeypatch):
    """The file system of /run/vgpu is full, so the plugin cannot make a removed file again."""
    until(lambda: warnings(node, capsys) == [], "a plugin without warnings")

    def full(path, *_rest, **_named):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (node.paths.run_dir / "root" / "0").rmdir()
    with monkeypatch.context() as room:
        room.setattr("vgpu_plugin.allocation.safe_files.make_folder", full)
        said = until(lambda: [one for one in warnings(node, capsys) if "No space left" in one], "the warning")
        assert str(node.paths.run_dir) in said[0]
    until(lambda: warnings(node, capsys) == [], "the end of the warning")
