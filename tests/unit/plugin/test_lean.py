# SPDX-License-Identifier: Apache-2.0
"""Tests how the device plugin saves memory and processor time: modules that it does not load, checks that gRPC makes
rarely, and coarse timers. Some tests start a new process, because an imported module stays loaded.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from vgpu_plugin import lean

from .conftest import PLUGIN

# Loads the program as its main function does, and prints which of three large modules are loaded.
AS_MAIN = """
import sys
sys.path[:0] = {path!r}
from vgpu_plugin import lean
{lean}
import vgpu_plugin.daemon, vgpu_plugin.node.nvml
heavy = ("yaml", "http.client", "google.protobuf.json_format")
print([one for one in heavy if one in sys.modules])
{after}
"""
QUIET = "lean.with_quiet_servers()"


def said(lean: str, after: str = "") -> list[str]:
    path = [str(PLUGIN / "src")]
    script = AS_MAIN.format(path=path, lean=lean, after=after)
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return found.stdout.splitlines()


def test_unneeded_modules_are_not_loaded():
    assert said(QUIET) == ["[]"]


def test_grpc_servers_check_rarely():
    """The plugin changes a period that is a private constant of grpc. If a release of grpc renames the constant, this
    test fails.
    """
    look = "import grpc._server as s; print(s._DEALLOCATED_SERVER_CHECK_PERIOD_S)"
    assert said("", look)[1] == "1.0"
    assert said(QUIET, look)[1] == "60.0"


SLACKS = """
import contextlib, os, pathlib, sys, threading
import grpc
from vgpu_plugin._proto import deviceplugin_pb2 as api, deviceplugin_pb2_grpc as rpc
from vgpu_plugin.kubelet.registration import Registration

class Service(rpc.DevicePluginServicer):
    together, later = None, []

    def GetDevicePluginOptions(self, request, context):
        if self.together is not None:
            self.later.append(pathlib.Path("/proc", str(threading.get_native_id()), "timerslack_ns").read_text())
            self.together.wait(60)
        return api.DevicePluginOptions()

    def stop(self):
        pass

def show(what, tasks):
    for task in tasks:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            name = pathlib.Path("/proc", task, "comm").read_text().strip()
            own = [one.name for one in threading.enumerate() if str(one.native_id) == task]
            who = "server" if own and "_serve" in own[0] else "ours" if own else name
            print(what, who, pathlib.Path("/proc", task, "timerslack_ns").read_text().strip())

folder = pathlib.Path({folder!r})
one = Registration(folder / "kubelet.sock", folder / "own.sock", "x/y", lambda _wake: Service())
one._serve()
def call():
    with grpc.insecure_channel("unix:" + str(folder / "own.sock")) as channel:
        rpc.DevicePluginStub(channel).GetDevicePluginOptions(api.Empty(), timeout=60)
call()
show("before", os.listdir("/proc/self/task"))
timers = lean.CoarseTimers()
timers.look()
show("after", timers._known)
# Three at a time: two for which the server has no worker yet.
Service.together = threading.Barrier(3)
callers = [threading.Thread(target=call) for n in range(3)]
for caller in callers:
    caller.start()
for caller in callers:
    caller.join()
for slack in Service.later:
    print("later ours", slack.strip())
one._stop_serving()
print("stopped here 0", flush=True)
os._exit(0)
"""


def test_only_grpc_threads_get_coarse_timers(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root: changes the slack of other threads")
    found: dict[tuple[str, str], set[int]] = {}
    for line in said(QUIET, SLACKS.format(folder=str(tmp_path)))[1:]:
        when, who, value = line.rsplit(" ", 2)
        found.setdefault((when, who), set()).add(int(value))
    (own,) = found["before", "ours"]
    assert {value for (when, _who), values in found.items() if when == "before" for value in values} == {own}
    assert own < 1_000_000
    for who in ("server", "event_engine", "grpc_global_tim"):
        assert found["after", who] == {500_000_000}, who
    for who in ("ours", "lifeguard"):
        assert found["after", who] == {own}, who
    assert found["later", "ours"] == {own}, "expected precise timers in later workers"
    assert ("stopped", "here") in found


def test_ending_thread_does_not_affect_others(tmp_path, caplog, monkeypatch):
    """A read of an open /proc file fails with ESRCH if its thread has ended. Other threads must still be handled."""
    caplog.set_level("DEBUG")
    for task in ("17", "18"):
        (tmp_path / "self" / "task" / task).mkdir(parents=True)
        (tmp_path / "self" / "task" / task / "comm").write_text("event_engine\n")
        (tmp_path / task).mkdir()
        (tmp_path / task / "timerslack_ns").write_text("50000")
    tried = []

    def ends(path, *rest):
        if str(path).endswith("/comm") and not tried:
            tried.append(path)
            raise ProcessLookupError(3, "No such process", path)
        return open(path, *rest)

    monkeypatch.setattr(lean, "open", ends, raising=False)
    lean.CoarseTimers(str(tmp_path)).look()
    assert sorted((tmp_path / task / "timerslack_ns").read_text() for task in ("17", "18")) == ["50000", "500000000"]
    assert not caplog.records


def test_timers_stay_unchanged_without_permission(tmp_path, caplog):
    """If the timers cannot be changed, no thread is recorded as done, so the next poll tries again."""
    caplog.set_level("DEBUG")
    task = tmp_path / "self" / "task" / "17"
    task.mkdir(parents=True)
    (task / "comm").write_text("event_engine\n")
    lean.CoarseTimers(str(tmp_path)).look()
    assert not caplog.records, "expected no log record for an ended thread"
    (tmp_path / "17" / "timerslack_ns").mkdir(parents=True)
    timers = lean.CoarseTimers(str(tmp_path))
    timers.look()
    assert "timers stay as they are" in caplog.text
    (tmp_path / "17" / "timerslack_ns").rmdir()
    (tmp_path / "17" / "timerslack_ns").write_text("50000")
    timers.look()
    assert (tmp_path / "17" / "timerslack_ns").read_text() == "500000000"
    (tmp_path / "17" / "timerslack_ns").write_text("50000")
    timers.look()
    assert (tmp_path / "17" / "timerslack_ns").read_text() == "50000", "expected only one change of each thread"
