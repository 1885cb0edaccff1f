# SPDX-License-Identifier: Apache-2.0
"""``vgpuctl top``: shows the GPUs, and how much each container uses of them. It prints this once as text or as JSON, or
shows a live screen with ANSI sequences.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import select
import shutil
import socket
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .._proto import admin_pb2 as api
from ..admin.admin_socket import Client, Fault
from ..admin.plain import plain
from .tables import Row, age, mib, percent, shortened, table, wide, wrapped
from .tenants import Tenants
from .text import MIB, bursting, gpu_table, reasons

HEAD = ("GPU", "TENANT", "MEM MiB", "OF MiB", "MEM %", "SM %", "GRANT %", "GOT %", "PID", "PROGRAM")
NUMBERS = (2, 3, 4, 5, 6, 7, 8)
# Head of the table for a narrow terminal. It has no column MEM %, because that value can be computed from two other
# columns.
SHORT_HEAD = ("GPU", "TENANT", "MiB", "OF MiB", "SM%", "GRANT%", "GOT%", "PID", "PROGRAM")
LEFT_OUT = 4
TENANT, MOST_PROGRAMS, LONGEST_PROGRAM, SHORT_PROGRAM = 1, 4, 15, 11
NOBODY = "no container holds a limited slice"
# ANSI sequences for the live screen. BEGIN switches to the terminal's alternate screen and hides the cursor, and END
# reverts both.
BEGIN, END = "\033[?1049h\033[?25l", "\033[?25h\033[?1049l"
HOME, REST_OF_LINE, REST_OF_SCREEN = "\033[H", "\033[K", "\033[J"


def rows_of(one: Mapping[str, Any], index: str, tenant: str, got: str) -> list[Row]:
    """Returns the rows of one container on one GPU. The first row has the container's figures and its first process;
    each further process has a row of its own.
    """
    limit = one["memory_limit"]
    # Two sources count the memory: the container's own ledger (the file in which its processes record their usage) and
    # the driver. The larger figure is shown.
    used = max(one["memory_used"], one.get("memory_driver", -1))
    programs = one.get("programs", [])
    named = [(str(each["pid"]), shortened(each["name"], LONGEST_PROGRAM)) for each in programs[:MOST_PROGRAMS]]
    if not named:
        # The driver lists no process, because the process has just started or because there is none. So the row shows
        # the number of processes in the ledger.
        named = [("-", f"{one['processes']} in ledger" if one["processes"] else "-")]
    if len(programs) > MOST_PROGRAMS:
        named.append(("", f"and {len(programs) - MOST_PROGRAMS} more"))
    figures = (
        mib(used),
        mib(limit) if limit else "-",
        percent(used / limit) if limit else "-",
        percent(one["share_limit"]),
        percent(one["share_granted"]),
        got,
    )
    first: Row = (index, tenant, *figures, *named[0])
    memory = {str(each["pid"]): mib(each["bytes"]) for each in programs}
    return [first, *(("", "", memory.get(pid, ""), "", "", "", "", "", pid, name) for pid, name in named[1:])]


def top(
    usages: Sequence[Mapping[str, Any]],
    before: Mapping[tuple[str, str], float] | None = None,
    seconds: float = 0.0,
    width: int = 0,
    indexes: Mapping[str, int] | None = None,
    tenants: Mapping[str, str] | None = None,
) -> str:
    """Returns the table as text. ``before`` has the GPU seconds that each (allocation, GPU UUID) had used ``seconds``
    ago. The share that each really got is computed from them. ``width`` is the width of the terminal; 0 means
    unlimited. ``indexes`` maps UUIDs to indexes of GPUs, and ``tenants`` maps allocations to names of containers.
    """
    rows: list[Row] = [HEAD]
    order = indexes or {}
    for one in sorted(usages, key=lambda use: (order.get(use["uuid"], len(order)), use["allocation"])):
        then = (before or {}).get((one["allocation"], one["uuid"]))
        got = "-"
        if then is not None and seconds > 0:
            got = percent(max(0.0, one["device_seconds"] - then) / seconds)
        name = (tenants or {}).get(one["allocation"]) or tenant(one)
        rows += rows_of(one, str(order.get(one["uuid"], shortened(one["uuid"], 8))), name, got)
    if len(rows) == 1:
        return NOBODY
    lines = table(rows, NUMBERS)
    if wide(lines, width):
        short = [[*row[:LEFT_OUT], *row[LEFT_OUT + 1 : -1], shortened(str(row[-1]), SHORT_PROGRAM)] for row in rows[1:]]
        lines = table([SHORT_HEAD, *short], NUMBERS[:-1], width, TENANT)
    return "\n".join([*lines, *(bursting(*one) for one in bursts(usages, order, tenants or {}))])


def bursts(
    usages: Sequence[Mapping[str, Any]], indexes: Mapping[str, int], tenants: Mapping[str, str]
) -> Iterator[tuple[str, Any, int, int, int]]:
    """Yields (container, GPU, promised MiB, maximum MiB, current MiB) for each container with burst memory. The limit
    of such a container may grow above its promised memory.
    """
    for one in usages:
        sizes = [one.get(name, 0) // MIB for name in ("memory_promised", "memory_most", "memory_limit")]
        if sizes[0] < sizes[1]:
            name = tenants.get(one["allocation"]) or tenant(one)
            yield name, indexes.get(one["uuid"], one["uuid"]), sizes[0], sizes[1], sizes[2]


def tenant(one: Mapping[str, Any]) -> str:
    """Returns namespace/pod/container. If there is no pod, returns the holder of the lease (a reservation of slices),
    or the allocation's id."""
    if one["pod"]:
        return "/".join((one["namespace"], one["pod"], one["container"]))
    return str(one.get("holder") or f"({one['kind']} {one['allocation']})")


class Source:
    """Fetches the data to show from the plugin. The functions ``usages`` and ``status`` may raise Fault."""

    def __init__(self, plugin: Client) -> None:
        self._plugin = plugin
        self._tenants = Tenants()
        self._before: dict[tuple[str, str], float] | None = None
        self._then = 0.0

    def usages(self) -> list[dict[str, Any]]:
        return list(plain(self._plugin.call("Usage", api.UsageRequest()))["usages"])

    def status(self) -> dict[str, Any]:
        return plain(self._plugin.call("Status", api.StatusRequest()))

    def measure(self) -> list[dict[str, Any]]:
        """Returns the usages and stores them. The next call of ``table`` shows the shares that containers got since
        this call.
        """
        found, self._then = self.usages(), time.monotonic()
        self._before = {(one["allocation"], one["uuid"]): one["device_seconds"] for one in found}
        return found

    def table(self, width: int) -> tuple[str, dict[str, Any]]:
        """Returns the current table, and the status from which it was made."""
        status, before, then = self.status(), self._before, self._then
        usages = self.measure()
        indexes = {gpu["uuid"]: gpu["index"] for gpu in status["gpus"]}
        return top(usages, before, self._then - then, width, indexes, self._tenants.of(usages)), status


def run(given: argparse.Namespace, plugin: Client) -> int:
    """Prints the table once or repeatedly, or the usages as JSON. Raises Fault if the plugin does not respond at the
    start.
    """
    source = Source(plugin)
    if given.json:
        print(json.dumps({"usages": source.usages()}, indent=1))
        return 0
    terminal = sys.stdout.isatty()
    if given.once:
        source.measure()
        time.sleep(given.interval)
        print(source.table(shutil.get_terminal_size().columns if terminal else 0)[0])
        return 0
    source.measure()
    if terminal or given.live:
        return _live(given, source)
    while True:
        time.sleep(given.interval)
        print(source.table(0)[0], flush=True)


def screen(table_text: str, status: dict[str, Any], size: tuple[int, int], interval: float) -> str:
    """Returns the text of the live screen, with GPUs and containers. ``size`` is the size of the terminal (columns,
    lines). If lines must be omitted, the last line says how many.
    """
    width, height = size
    states = [one["state"] for one in status["slices"]]
    sums = ", ".join(f"{states.count(name)} {name}" for name in ("free", "in use", "unhealthy") if name in states)
    title = f"{socket.gethostname()}  {time.strftime('%H:%M:%S')}  slices: {sums or 'none'}"
    lines = [title, "", *gpu_table(status, width), "", *table_text.splitlines()]
    if troubles := reasons(status):
        lines += ["", *wrapped("\n".join(troubles), width).splitlines()]
    if len(lines) > height - 1:
        lines = [*lines[: height - 2], f"{len(lines) - height + 2} more lines; see: vgpuctl top --once"]
    lines += [""] * (height - 1 - len(lines))
    return "\n".join([*lines, f"updated every {interval:g} s; q ends"])


def _live(given: argparse.Namespace, source: Source) -> int:
    failed_since = 0.0
    with _terminal():
        while True:
            size = shutil.get_terminal_size()
            try:
                text = screen(*source.table(size.columns), (size.columns, size.lines), given.interval)
                failed_since = 0.0
            except Fault as fault:
                # An error is shown on the screen and the loop goes on, because the plugin may be restarting and respond
                # again soon.
                failed_since = failed_since or time.monotonic()
                text = f"vgpuctl: {fault}\nno response for {age(time.monotonic() - failed_since)}; q ends"
            rows = [shortened(line, size.columns) + REST_OF_LINE for line in text.splitlines()]
            sys.stdout.write(HOME + "\n".join(rows) + REST_OF_SCREEN)
            sys.stdout.flush()
            try:
                if _quit_within(given.interval):
                    return 0
            except KeyboardInterrupt:
                return 0


def _quit_within(seconds: float) -> bool:
    """Waits up to ``seconds`` for a key. Returns whether the key q was typed."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if not sys.stdin.isatty():
            time.sleep(left)
        elif select.select([sys.stdin], [], [], left)[0] and sys.stdin.read(1) in ("q", "Q", ""):
            return True
    return False


@contextlib.contextmanager
def _terminal() -> Iterator[None]:
    """Switches to the terminal's alternate screen and reads keys without waiting for Enter. Both are restored at the
    end.
    """
    keys = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
    sys.stdout.write(BEGIN)
    try:
        if keys is not None:
            tty.setcbreak(sys.stdin.fileno())
        yield
    finally:
        if keys is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, keys)
        sys.stdout.write(END)
        sys.stdout.flush()
