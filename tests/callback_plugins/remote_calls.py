# SPDX-License-Identifier: Apache-2.0
"""Counts the remote calls of each host at the connection. Only tests use this plugin.

The plugin wraps every connection plugin of a worker and logs each command, upload and download. All operations for one
module (its folder, its files, the program, the cleanup) count as one call. They take one round trip with pipelining,
and five without. Each other operation counts as one call. Fact gathering, delegated and asynchronous tasks use
connections too; their calls count for the host of the task.

``VGPU_REMOTE_CALLS`` names the report: ``{host: number of calls}``. ``<report>.log`` next to it has one JSON line per
operation.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import tempfile

from ansible.executor.task_executor import TaskExecutor
from ansible.plugins.action import ActionBase
from ansible.plugins.callback import CallbackBase
from ansible.plugins.loader import connection_loader

DOCUMENTATION = """
    name: remote_calls
    type: aggregate
    short_description: counts the remote calls of each host
    description: The text at the top of this file describes the plugin.
"""

REPORT = os.environ.get("VGPU_REMOTE_CALLS", "")


class Recorder:
    """The state of the current call in a worker, and the log that all workers append to."""

    def __init__(self, log: str) -> None:
        self.log = log
        self.host = self.task = ""
        self.numbers = itertools.count(1)
        self.call = 0  # The number of the running module; 0: no module runs.
        self.transport_of = 0  # The number of the module whose temporary folder is created or removed now; 0: none.

    def record(self, operation: str, target: str, what: str) -> None:
        call = self.call or self.transport_of or next(self.numbers)
        row = {
            "host": self.host,
            "task": self.task,
            "call": f"{os.getpid()}.{call}",
            "operation": operation,
            "target": target,
            "what": what[:200],
        }
        # Each line is one short write in append mode, so lines of several workers do not mix.
        handle = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(handle, (json.dumps(row) + "\n").encode())
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def module(self):
        outer, self.call = self.call, self.call or next(self.numbers)
        self.transport_of = self.call
        try:
            yield
        finally:
            self.call = outer


def wrap_connection(connection, recorder: Recorder) -> None:
    """Wraps the three methods of a connection so that the recorder logs each use."""
    if getattr(connection, "_remote_calls", False):
        return
    connection._remote_calls = True
    for name in ("exec_command", "put_file", "fetch_file"):
        wrap_method(connection, name, recorder)


def wrap_method(connection, name: str, recorder: Recorder) -> None:
    inner = getattr(connection, name)

    def outer(*arguments, **options):
        what = arguments[0] if arguments else ""
        recorder.record(name, str(connection._play_context.remote_addr), str(what))
        return inner(*arguments, **options)

    setattr(connection, name, outer)


def install(recorder: Recorder) -> None:
    """Wraps Ansible's classes before the workers are forked, so that all workers inherit the wrappers."""
    get = connection_loader.get_with_context
    run, execute = TaskExecutor.run, ActionBase._execute_module
    make = ActionBase._make_tmp_path

    def get_with_context(*arguments, **options):
        found = get(*arguments, **options)
        if found.object is not None:
            wrap_connection(found.object, recorder)
        return found

    def task_run(self):
        recorder.host, recorder.task = self._host.name, self._task.get_name()
        recorder.transport_of = 0
        return run(self)

    def execute_module(self, *arguments, **options):
        with recorder.module():
            return execute(self, *arguments, **options)

    def make_tmp_path(self, *arguments, **options):
        # An action that sends a file makes its temporary folder before the module runs. Both steps count as one call.
        if not recorder.call and not recorder.transport_of:
            recorder.transport_of = next(recorder.numbers)
        return make(self, *arguments, **options)

    connection_loader.get_with_context = get_with_context
    TaskExecutor.run = task_run
    ActionBase._execute_module = execute_module
    ActionBase._make_tmp_path = make_tmp_path


def count(log: str) -> dict[str, int]:
    """Returns the number of calls of each host. Operations of one call have the same call id in the log."""
    calls: dict[str, set[str]] = {}
    with contextlib.suppress(FileNotFoundError), open(log, encoding="utf-8") as stream:
        for line in stream:
            row = json.loads(line)
            calls.setdefault(row["host"], set()).add(row["call"])
    return {host: len(found) for host, found in sorted(calls.items())}


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "remote_calls"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self.log = f"{REPORT}.log" if REPORT else tempfile.mkstemp(prefix="remote-calls-")[1]
        open(self.log, "w").close()
        install(Recorder(self.log))

    def v2_playbook_on_stats(self, stats) -> None:
        # A host of the play without any call gets the count 0, so that every host is in the report.
        calls = {**dict.fromkeys(stats.processed, 0), **count(self.log)}
        if REPORT:
            with open(REPORT, "w", encoding="utf-8") as stream:
                json.dump(calls, stream)
        for host, number in calls.items():
            self._display.display(f"remote calls: {host} {number}")
