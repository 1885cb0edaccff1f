# SPDX-License-Identifier: Apache-2.0
"""Tests the limits that the driver itself enforces for a container's control group. The test processes are called
tenants here; each runs raw_client.py on the host, without libvgpu.so. A tenant enters the container's control group
while the container waits. The driver limits the group, so it limits the tenant like a statically linked program of the
container.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from typing import Any, Callable, Iterator

from ..gpu import memory_limits
from ..gpu.nvml import NvmlError
from . import driver_verdicts, raw_client
from .driver_verdicts import Deltas, Sum
from .verdicts import MIB

# Prefix of the names of test groups below the container's group.
CHILD = "vgpu-check"
# Bytes of one test allocation.
PIECE = 64 * MIB
# A tenant tries to allocate at most this many bytes beyond the limit, because memory beyond the limit belongs to other
# slices.
BEYOND = 64 * MIB
# Seconds to wait for one reply of a tenant. They are many, because a context on a sleeping card takes long.
ANSWER_S = 60.0
# Seconds to wait until a tenant's processes are gone and its control group can be removed.
GONE_S = 5.0
# Environment variables that a tenant must not have, because they would load the library or hide the GPU.
OURS = ("LD_PRELOAD", "LD_BIND_NOW", "CUDA_", "NVIDIA_VISIBLE", "VGPU_", "GPU_CORE_", "ACTIVE_")


class TenantError(Exception):
    """A tenant or its control group cannot be created, or the tenant failed; the text gives the reason."""


class Account:
    """Reads the driver's accounting on one GPU. Raises NvmlError."""

    def __init__(self, reader: Any, uuid: str) -> None:
        self._reader = reader
        found = [reader.handle(index) for index in range(reader.count())]
        self._handle = next((one for one in found if reader.uuid(one) == uuid), None)

    def of(self, group: str) -> memory_limits.Limits:
        return memory_limits.get_limits(self._reader.library, self._handle, group)

    def used(self, group: str) -> int:
        return self.of(group).used

    def card(self) -> tuple[int, int]:
        """Returns (total, used) bytes of the GPU's memory."""
        total, used = self._reader.memory(self._handle)
        return int(total), int(used)


class Tenant:
    """Runs one process in a control group. Raises TenantError."""

    def __init__(self, group: str, python: str = sys.executable) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        self._process: Any = subprocess.Popen(
            [python, "-I", "-c", source(), group],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ask(self, word: str, **more: Any) -> dict[str, Any]:
        process = self._process
        try:
            process.stdin.write(json.dumps({"do": word, **more}) + "\n")
            process.stdin.flush()
        except OSError:
            raise TenantError(self._why()) from None
        ready, _writable, _failed = select.select([process.stdout], [], [], ANSWER_S)
        line = process.stdout.readline() if ready else ""
        if not line:
            raise TenantError(f"a test process gave no answer within {ANSWER_S:.0f} s" if not ready else self._why())
        return dict(json.loads(line))

    def must(self, word: str, **more: Any) -> dict[str, Any]:
        answer = self.ask(word, **more)
        if answer["code"] != 0:
            raise TenantError(f"a test process failed: {answer.get('call', word)} returned {answer['code']}")
        return answer

    def granted(self, word: str, **more: Any) -> bool:
        """Sends a request that may be refused. Returns False if the driver refused it because memory is short."""
        answer = self.ask(word, **more)
        if answer["code"] not in (0, driver_verdicts.OUT_OF_MEMORY):
            raise TenantError(f"a test process failed: {answer.get('call', word)} returned {answer['code']}")
        return bool(answer["code"] == 0)

    def _why(self) -> str:
        self.end()
        said = " ".join(self._process.stderr.read().split())[-200:]
        return f"a test process ended: {said or self._process.returncode}"

    def end(self) -> None:
        """Kills the tenant and its child, which is in the same session and would keep its GPU memory."""
        deadline = time.monotonic() + GONE_S
        with contextlib.suppress(ProcessLookupError, PermissionError):
            while time.monotonic() < deadline:
                os.killpg(self._process.pid, 9)
                self._process.poll()
                time.sleep(0.01)
        self._process.wait()


def source() -> str:
    """Returns the text of raw_client.py, even if this module was loaded from a zip file."""
    loader: Any = raw_client.__loader__
    return str(loader.get_source(raw_client.__name__))


@contextlib.contextmanager
def tenants(*groups: str) -> Iterator[list[Tenant]]:
    made: list[Tenant] = []
    try:
        for group in groups:
            made.append(Tenant(group))
        yield made
    finally:
        for one in made:
            one.end()


@contextlib.contextmanager
def children(group: str, count: int) -> Iterator[list[str]]:
    """Creates control groups below the container's group and removes them in any case. Raises TenantError."""
    made = [os.path.join(group, f"{CHILD}-{os.getpid()}-{place}") for place in range(count)]
    try:
        for one in made:
            try:
                os.mkdir(one)
            except OSError as fault:
                raise TenantError(f"cannot create a control group below the container's: {fault}") from None
        yield made
    finally:
        for one in made:
            _remove(one)


def _remove(group: str) -> None:
    deadline = time.monotonic() + GONE_S
    while os.path.isdir(group):
        try:
            os.rmdir(group)
        except OSError:
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)


class DriverChecks:
    """Runs the checks in the control group of one waiting container. ``crowded``: why the memory must not be filled,
    empty if it may be.
    """

    def __init__(self, account: Account, uuid: str, claimed: str, crowded: str = "") -> None:
        self._account = account
        self._uuid = uuid
        self._claimed = claimed
        self._crowded = crowded

    def run(self, group: str, pid: int, hard: int, wanted: Callable[[str], bool]) -> list[dict[str, Any]]:
        """Returns the checks that ``wanted`` accepts. ``pid``: the container's first process; ``hard``: the limit of
        its group in bytes.
        """
        steps = (
            (driver_verdicts.REFUSES, lambda: self.refuses(group, hard)),
            (driver_verdicts.CHILDREN, lambda: self.children(group, hard)),
            (driver_verdicts.ROOT, lambda: self.root(group, pid, hard)),
            (driver_verdicts.MANAGED, lambda: self.managed(group)),
            (driver_verdicts.ORPHAN, lambda: self.orphan(group)),
        )
        return [step() for name, step in steps if wanted(name)]

    def refuses(self, group: str, hard: int, name: str = driver_verdicts.REFUSES, full: Any = None) -> dict[str, Any]:
        """Lets one tenant allocate until the driver refuses. Calls ``full`` while the tenant holds its memory."""
        return driver_verdicts.of_sum(name, self._claimed, hard, self._fill(group, [group], hard, full))

    def children(self, group: str, hard: int) -> dict[str, Any]:
        """Runs two tenants in two groups below the container's group: the first allocates a quarter of the limit, the
        second allocates until the driver refuses.
        """
        name = driver_verdicts.CHILDREN
        try:
            with children(group, 2) as below:
                found = self._fill(group, below, hard)
        except TenantError as fault:
            found = Sum(fault=str(fault))
        return driver_verdicts.of_sum(name, self._claimed, hard, found)

    def _fill(self, group: str, groups: list[str], hard: int, full: Any = None) -> Sum:
        if self._crowded:
            return Sum(fault=self._crowded)
        taken, used, room, fault = 0, 0, 0, ""
        try:
            with tenants(*groups) as made:
                for place, one in enumerate(made):
                    # The driver refuses a context that no longer fits, as it refuses any other allocation.
                    if not one.granted("open", uuid=self._uuid):
                        continue
                    last = place == len(made) - 1
                    taken += one.must("fill", most=hard + BEYOND - taken if last else hard // 4)["taken"]
                total, on_card = self._account.card()
                used, room = self._account.used(group), max(0, total - on_card)
                if full is not None:
                    full()
        except (TenantError, NvmlError) as error:
            fault = str(error)
        return Sum(taken, used, room, fault)

    def root(self, group: str, pid: int, hard: int) -> dict[str, Any]:
        """Tests whether a process with the container's capabilities may set the group's limit. The process sets the
        present value, so that nothing changes.
        """
        code, call, capabilities = -1, "", 0
        try:
            with tenants(group) as (one,):
                capabilities = one.must("become", pid=pid)["capabilities"]
                answer = one.ask("limit", uuid=self._uuid, group=group, hard=hard)
                code, call = answer["code"], answer.get("call", "")
        except TenantError as fault:
            call = str(fault)
        return driver_verdicts.of_root(self._claimed, code, call, capabilities)

    def managed(self, group: str) -> dict[str, Any]:
        found = Deltas(PIECE)
        try:
            with tenants(group) as (one,):
                one.must("open", uuid=self._uuid)
                before = self._account.used(group)
                one.must("take", size=PIECE)
                found = found._replace(ordinary=self._account.used(group) - before)
                one.must("free")
                before, on_card = self._account.used(group), self._account.card()[1]
                one.must("managed", size=PIECE)
                found = found._replace(group=self._account.used(group) - before, card=self._account.card()[1] - on_card)
        except NvmlError:
            found = found._replace(ordinary=0)  # The driver has no account of this group.
        except TenantError as fault:
            found = found._replace(fault=str(fault))
        return driver_verdicts.of_managed(self._claimed, found)

    def orphan(self, group: str) -> dict[str, Any]:
        found, code, call = Deltas(PIECE), 0, ""
        try:
            with tenants(group) as (one,):
                one.must("open", uuid=self._uuid)
                one.must("orphan")
                before = self._account.used(group)
                answer = one.ask("take", size=PIECE)
                code, call = answer["code"], answer.get("call", "cuMemAlloc")
                found = found._replace(group=self._account.used(group) - before)
        except (TenantError, NvmlError) as fault:
            found = found._replace(fault=str(fault))
        return driver_verdicts.of_orphan(self._claimed, code, call, found)

    def beside(self, group: str, hard: int, neighbour: str) -> dict[str, Any]:
        """Fills this group while a tenant in the group ``neighbour`` has a context and memory. Checks that the
        neighbour's limit and account do not change.
        """
        seen: dict[str, tuple[int, int, int]] = {}

        def look(when: str) -> None:
            seen[when] = tuple(self._account.of(neighbour))  # type: ignore[assignment]

        filled = driver_verdicts.of_sum(driver_verdicts.BESIDE, self._claimed, hard, Sum())
        try:
            with tenants(neighbour) as (other,):
                other.must("open", uuid=self._uuid)
                other.must("take", size=PIECE)
                look("before")
                filled = self.refuses(group, hard, driver_verdicts.BESIDE, lambda: look("while"))
                look("after")
        except (TenantError, NvmlError) as fault:
            filled = driver_verdicts.of_sum(driver_verdicts.BESIDE, self._claimed, hard, Sum(fault=str(fault)))
        return driver_verdicts.of_beside(self._claimed, filled, seen)
