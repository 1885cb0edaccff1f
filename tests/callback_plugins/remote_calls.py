# SPDX-License-Identifier: Apache-2.0
"""Counts remote calls for each host, at the connection. A test's measuring device, never part of a run for people.

Every connection plugin that a worker gets is wrapped: what it executes, sends or fetches is written down. All that is
sent for one module (its folder, its files, the program, the cleaning up) is one call, because that is one round trip
where pipelining works and five where it does not. Anything else that goes over a connection is a call by itself. Fact
gathering, delegated and asynchronous tasks go over connections too and are counted for the host whose task they are.

``VGPU_REMOTE_CALLS`` names the report: ``{host: number of calls}``. Beside it lies ``<report>.log`` with every single
operation, one JSON line each.
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
    short_description: count remote calls for each host
    description: see the module text
"""

REPORT = os.environ.get("VGPU_REMOTE_CALLS", "")


class Recorder:
    """What a worker knows of the call that it is in, and the log that all workers append to."""

    def __init__(self, log: str) -> None:
        self.log = log
        self.host = self.task = ""
        self.numbers = itertools.count(1)
        self.call = 0  # 0: no module is being run
        self.transport_of = 0  # the module that making and removing a temporary folder belongs to

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
        # One write of less than a page to a file opened for appending: workers cannot cut each other's lines.
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
    """Puts the recorder in front of the three things that a connection can do."""
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
    """Wraps what workers inherit when they are forked."""
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
        # Made before the module by actions that send a file first: the module that follows carries it.
        if not recorder.call and not recorder.transport_of:
            recorder.transport_of = next(recorder.numbers)
        return make(self, *arguments, **options)

    connection_loader.get_with_context = get_with_context
    TaskExecutor.run = task_run
    ActionBase._execute_module = execute_module
    ActionBase._make_tmp_path = make_tmp_path


def count(log: str) -> dict[str, int]:
    """Calls of each host: the different calls among the operations in the log."""
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
        # A host that was in the play and never called counts 0, so that its absence cannot pass for a small number.
        calls = {**dict.fromkeys(stats.processed, 0), **count(self.log)}
        if REPORT:
            with open(REPORT, "w", encoding="utf-8") as stream:
                json.dump(calls, stream)
        for host, number in calls.items():
            self._display.display(f"remote calls: {host} {number}")
