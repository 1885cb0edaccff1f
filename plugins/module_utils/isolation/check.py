# SPDX-License-Identifier: Apache-2.0
"""Checks the isolation of one slice (share of a GPU), which the device plugin leases to the check. Inside the slice the
check runs nvidia-smi and the probe, a program that tries to exceed the limits. Outside, it reads the host's NVML and
the findings of the node's watcher, which looks for processes that bypass the library. On some hosts the driver
enforces the memory limit, by the container's control group.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, Callable, Mapping

from ..gpu import memory_limits
from ..gpu.nvml import NvmlError
from ..host.mount_namespace import Mount
from . import driver_verdicts, observer, readers, verdicts, watcher
from . import pair as isolation_pair
from .driver_checks import Account, DriverChecks
from .engines import NAMESPACE, Engines, Lease
from .plugin_client import Plugin, PluginError
from .runner import ASK_S, SHELL, START_S, RunnerError

# Paths in the slice: the folder of the library's version, and the library file that an older device plugin mounts.
LIBRARY, OLD_LIBRARY = "/dev/vgpu/lib", "/usr/local/lib/vgpu/libvgpu.so"
# The probe is mounted separately in the slice, so that it also exists where the library is not mounted.
PROBE = "/dev/vgpu-probe"
# Milliseconds for which the probe keeps the slice's memory filled. They are enough for one poll of NVML even on a busy
# host, where seconds pass between two polls.
HOLD_MS = 3000
# A bypass is an attempt of the probe to get memory past the library. If several bypasses run at once, each needs this
# many MiB of the slice: for a context on a large card, and for its allocation.
ROOM_MIB = 512
# Seconds for which a slice's compute share is measured while another slice is busy.
BESIDE_S = 5.0
# Seconds that the programs in two slices need for the import check, in which one program exports memory and the other
# tries to import it.
MEET_S = 2.0
# A program that ends at once. It is used if a check needs only a container that waits for its start signal, and no
# program in it.
IDLE = [SHELL, "-c", ":"]
# Milliseconds for which a bypass keeps memory that the driver did not refuse, so that the memory sum of its control
# group can be read.
SUM_MS = 2000
# Seconds by which the lease of the second slice exceeds the program's time-out. A slow engine needs them to create,
# start, end and remove both containers, because the first container waits for the second.
ENGINE_S = isolation_pair.WAIT_S + START_S + 4 * ASK_S
NO_LIMIT_PERCENT = 100
MOST_TTL_S = 3600  # The longest lease that the plugin grants.


class BadOption(Exception):
    """An option names something that does not exist on the host."""


class SliceCheck:
    """Runs all checks in one leased slice."""

    def __init__(
        self,
        params: Mapping[str, Any],
        plugin: Plugin,
        lease: dict[str, Any],
        status: dict[str, Any],
        engines: Engines | None = None,
    ) -> None:
        """``params``: the options of the module vgpu_isolation; ``engines``: the engines of the module's run. Raises
        BadOption and RunnerError.
        """
        self._engines = engines or Engines(params)
        self._plugin = plugin
        self._params = params
        self._begun = time.monotonic()
        self._lease = lease
        self.slice = next(one for one in status["slices"] if one["id"] == lease["ids"][0])
        gpu = next(one for one in status["gpus"] if one["uuid"] == self.slice["uuid"])
        others = [one for one in status["slices"] if one["uuid"] == gpu["uuid"] and one["id"] not in lease["ids"]]
        # The plugin's report of what enforces memory limits.
        self._claimed = str(status.get("memory_enforcement") or "")
        self._has_neighbours = any(one["in_use"] for one in others)
        of_gpu = [one.get("memory_mib", 0) for one in status["slices"] if one["uuid"] == gpu["uuid"]]
        self._oversold = "memory_mib" in gpu and sum(of_gpu) > gpu["memory_mib"]
        self._minors = [gpu["minor"]]
        self._expected = verdicts.Expected(self.slice["uuid"], self.slice["memory_mib"])
        every = [Mount(one["container_path"], one["host_path"], one["read_only"]) for one in lease["mounts"]]
        # Leave out mounts of /dev/null, which the process does not see. Their paths name a GPU to NVIDIA's runtime, if
        # deviceListStrategy is volume-mounts.
        self._promised = [one for one in every if one.host_path != "/dev/null"]
        self._words = [one for one in every if one.host_path == "/dev/null"]
        paths = [one.container_path for one in self._promised]
        strangers = [one for one in self._params["omit_mounts"] if one not in paths]
        if strangers:
            raise BadOption(f"omit_mounts: expected paths of mounts ({', '.join(paths)}), found {', '.join(strangers)}")
        self._mounts = [one for one in self._promised if one.container_path not in self._params["omit_mounts"]]
        self.runner = self._choose_runner()
        self._by_driver = self._claimed.startswith("driver-") and self.runner.name != NAMESPACE
        # The driver's limit for the container's control group, as read at the container's first start.
        self._limit = driver_verdicts.DriverLimit(fault="the host did not read the limit")
        self.smi_table = ""
        # Bypasses that did not run, or ran too briefly for the watcher, because the time ``duration`` had passed.
        self.left_out: list[str] = []

    def _choose_runner(self) -> Any:
        return self._engines.runner(self._as_leased())

    def _as_leased(self, *more: Mount) -> Lease:
        """Returns the slice in the form that the runner needs, with the mounts from the device plugin's reply.
        ``more``: additional mounts.
        """
        lease, probe = self._lease, self._probe_mount()
        environment = {name: str(value) for name, value in self._params["environment"].items()}
        return Lease(
            self.slice["uuid"],
            self._minors,
            probe.host_path,
            [*self._mounts, probe, *more],
            self._words,
            dict(lease["envs"], **environment),
            lease["devices"],
            lease["cdi_devices"],
        )

    def _probe_mount(self) -> Mount:
        sources = {one.container_path: one.host_path for one in self._promised}
        folder = sources.get(LIBRARY) or os.path.dirname(sources.get(OLD_LIBRARY, ""))
        if not folder:
            raise RunnerError(f"the device plugin mounts no {LIBRARY}, so libvgpu.so does not share this GPU")
        return Mount(PROBE, os.path.join(folder, os.path.basename(PROBE)), True)

    def run(self) -> list[dict[str, Any]]:
        """Runs all checks and returns their results. When ``duration`` has passed, only the bypasses stop."""
        asked = [name for name in self._params["checks"] if name not in verdicts.OWN]
        ways = [name for name in asked if name.startswith(verdicts.BYPASS)]
        wanted = [name for name in asked if name not in ways] or (["totals"] if ways else list(verdicts.PROBE_CHECKS))
        checks = self._run_probe(wanted)
        checks += self._check_driver() if self._by_driver else []
        checks += [self._run_nvidia_smi(), self._run_nvidia_ml_py()]
        checks += self._try_bypasses(ways if asked else list(verdicts.PROBE_BYPASSES))
        named = self._params["checks"]
        if not named or verdicts.IMPORT in named:
            checks.append(self._import_beside())
        if self._by_driver and (not named or driver_verdicts.BESIDE in named):
            checks.append(self._driver_beside())
        if verdicts.BESIDE in named:  # This check needs a second slice, so it runs only on request.
            checks.append(self._share_beside())
        return [one for one in checks if not named or one["name"] in [*named, "probe"]]

    def _left_s(self) -> float:
        """Returns the seconds for which one program may run, at most ``timeout``. This is the remaining ``duration``
        less the time that the program's container takes to start and end. Without a ``duration`` it is ``timeout``.
        """
        duration, timeout = self._params["duration"], float(self._params["timeout"])
        left = self._begun + duration - time.monotonic() - self.runner.overhead_s
        return min(left, timeout) if duration else timeout

    def _run_probe(self, wanted: list[str]) -> list[dict[str, Any]]:
        seen: dict[str, Any] = {"missing": None, "nodes": None}
        watch = observer.watch(self._expected.uuid)

        def before_start(pid: int) -> None:
            seen["missing"] = observer.missing_mounts(pid, self._promised)
            seen["nodes"] = observer.gpu_device_nodes(pid)
            # Read the limit while the container waits, because the control group disappears with the container.
            if self._by_driver and watch is not None:
                self._limit = observer.driver_limit(watch.reader, self._expected.uuid, self._group_of(pid))

        def while_running(pid: int) -> None:
            if watch is not None:
                watch.poll(pid)

        # The lease of the slice lasts long enough for one more run of the probe after this deadline.
        deadline = time.monotonic() + self._params["timeout"]
        argv = [PROBE, "--json", "--checks", ",".join(wanted)]
        outcome = self.runner.run(argv, float(self._params["timeout"]), before_start, while_running)
        checks = [verdicts.of_mounts(seen["missing"], [one.container_path for one in self._promised])]
        checks.append(verdicts.of_device_nodes(seen["nodes"], len(self._minors)))
        if self._by_driver:
            checks.append(driver_verdicts.of_driver(self._claimed, self._limit, self._expected))
        checks += verdicts.of_probe(outcome.rc, outcome.out, outcome.err, outcome.timed_out, self._expected, wanted)
        checks = verdicts.of_namespace(checks) if self.runner.name == NAMESPACE else checks
        filled = verdicts.filled(checks)
        if watch is None:
            checks.append(verdicts.of_outside(None, 0, "the host has no libnvidia-ml.so.1", self._expected, filled))
        else:
            checks += self._fill_until_seen(watch, filled, while_running, deadline)
            watch.close()
            checks.append(verdicts.of_outside(watch.most_bytes, watch.polls, watch.fault, self._expected, filled))
        return checks

    def _group_of(self, pid: int) -> str:
        return observer.group_of(pid, self._params.get("cgroup_root") or memory_limits.CGROUP_ROOT)

    def _tenants(self, reader: Any) -> DriverChecks:
        """Returns an object that checks the limits that the driver enforces on this slice's GPU. Its test processes are
        called tenants. Raises NvmlError.
        """
        full = self._oversold and self._has_neighbours
        crowded = (
            ("the GPU's slices are oversold and other slices are in use, so this slice is not filled") if full else ""
        )
        return DriverChecks(Account(reader, self._expected.uuid), self._expected.uuid, self._claimed, crowded)

    def _check_driver(self) -> list[dict[str, Any]]:
        """Starts the container again and tests its memory limit while the container waits."""
        named = self._params["checks"]
        if named and not set(named) & set(verdicts.DRIVER_CHECKS):
            return []
        checks: list[dict[str, Any]] = []
        seen: list[driver_verdicts.DriverLimit] = []

        def before_start(pid: int) -> None:
            group = self._group_of(pid)
            with readers.of_host(self._expected.uuid) as reader:
                seen.append(observer.driver_limit(reader, self._expected.uuid, group))
                if seen[0].hard is not None:
                    tenants = self._tenants(reader)
                    checks.extend(tenants.run(group, pid, seen[0].hard, lambda one: not named or one in named))

        try:
            self.runner.run(IDLE, float(self._params["timeout"]), before_start)
        except (RunnerError, NvmlError) as fault:
            self._engines.heed(fault)
            seen.append(driver_verdicts.DriverLimit(fault=str(fault)))
            if not checks:
                wanted = [one for one in driver_verdicts.OF_TENANTS if not named or one in named]
                checks = [verdicts.check(one, verdicts.NOT_RUN, "", "", detail=str(fault)) for one in wanted]
        if seen[0].hard is None:
            # The driver has no limit for this group, so there is nothing to test. But a user who requested one of these
            # checks by name must see that it did not run.
            checks = [driver_verdicts.of_driver(self._claimed, seen[0], self._expected, one) for one in named]
            checks = [one for one in checks if one["name"] in driver_verdicts.OF_TENANTS]
        return [driver_verdicts.of_restart(self._claimed, self._limit, seen[0], self._expected), *checks]

    def _driver_beside(self) -> dict[str, Any]:
        """Fills this slice with a process without libvgpu.so, and tests whether the driver's limit and memory account
        of another slice stay unchanged.
        """
        timeout = float(self._params["timeout"])
        found: list[dict[str, Any]] = []

        def work(other: SliceCheck) -> dict[str, Any]:
            def beside(theirs: int, ours: int) -> None:
                with readers.of_host(self._expected.uuid) as reader:
                    group = self._group_of(ours)
                    limit = observer.driver_limit(reader, self._expected.uuid, group)
                    tenants = self._tenants(reader)
                    found.append(tenants.beside(group, limit.hard or 0, self._group_of(theirs)))

            other.runner.run(IDLE, timeout, lambda one: self.runner.run(IDLE, timeout, lambda our: beside(one, our)))
            return found[0]

        return self._beside(driver_verdicts.BESIDE, MEET_S + 2 * self.runner.overhead_s, work)

    def _fill_until_seen(self, watch: Any, filled: int, look: Any, deadline: float) -> list[dict[str, Any]]:
        """If no poll saw the slice filled, fills its memory again for HOLD_MS. This is needed because a fill may start
        and end between two polls. Returns the violated checks of the second fill.
        """
        blind = not filled or watch.fault or watch.untold
        if blind or verdicts.seen(watch.most_bytes, filled) or time.monotonic() > deadline:
            return []
        names = verdicts.FILLS[:1]
        argv = [PROBE, "--json", "--checks", ",".join(names), "--hold", str(HOLD_MS)]
        outcome = self.runner.run(argv, float(self._params["timeout"]), while_running=look)
        checks = verdicts.of_probe(outcome.rc, outcome.out, outcome.err, outcome.timed_out, self._expected, names)
        return [one for one in checks if one["verdict"] == verdicts.VIOLATED]

    def _try_bypasses(self, ways: list[str]) -> list[dict[str, Any]]:
        """Runs the bypasses. A bypass that must be prevented runs while another process fills the slice, because in a
        full slice it must get no memory. A bypass that cannot be prevented gets memory. So it runs in an empty slice,
        where it takes no other container's memory. PAST_THE_SLICE takes more than the slice's memory, so it runs alone,
        and only if no other slice of the GPU is in use.
        """
        if self._by_driver:
            # The driver refuses memory over the limit to every bypass, so none can use another container's memory.
            checks = self._by_sum(self._try(ways))
            self.left_out += [one["name"] for one in checks if one["left_out"]]
            return checks
        closed = [name for name in ways if name not in verdicts.MAY_BE_OPEN]
        rest = [name for name in ways if name in verdicts.MAY_BE_OPEN and name != verdicts.PAST_THE_SLICE]
        at_once = max(1, self._expected.memory_mib // ROOM_MIB)
        groups = [rest[first : first + at_once] for first in range(0, len(rest), at_once)]
        checks = self._try(closed) + [one for group in groups for one in self._show(group)]
        if verdicts.PAST_THE_SLICE in ways:
            alone = verdicts.PAST_THE_SLICE
            checks += [verdicts.neighbours_in_use(alone)] if self._has_neighbours else self._show([alone])
        self.left_out += [one["name"] for one in checks if one["left_out"]]
        return checks

    def _by_sum(self, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Repeats the bypasses that the driver did not refuse. Each keeps its memory for SUM_MS, while the memory sum
        of the control group is read and judged.
        """
        opened = [one["name"] for one in found if one["verdict"] == verdicts.OPEN]
        if not opened:
            return found
        most: list[int] = []
        watch = observer.watch(self._expected.uuid)

        def look(pid: int) -> None:
            if watch is not None and not watch.fault:
                watch.poll(pid)
                with contextlib.suppress(NvmlError):
                    account = Account(watch.reader, self._expected.uuid)
                    most.append(max(account.used(self._group_of(pid)), watch.most_bytes or 0))

        again = {one["name"]: one for one in self._ask_probe(opened, "--hold", str(SUM_MS), look=look)}
        if watch is not None:
            watch.close()
        greatest = max(most, default=None)
        return [
            driver_verdicts.of_bypass(again.get(one["name"], one), self._claimed, self._limit.hard, greatest)
            if one["name"] in opened
            else one
            for one in found
        ]

    def _try(self, ways: list[str]) -> list[dict[str, Any]]:
        left = self._left_s()
        if not ways or left < 1.0:
            return [verdicts.left_out(name, self._params["duration"]) for name in ways]
        return self._ask_probe(ways, "--seconds", str(int(left)))

    def _ask_probe(self, ways: list[str], *options: str, look: Any = None) -> list[dict[str, Any]]:
        argv = [PROBE, "--json", *options, "--checks", ",".join(ways)]
        more = {"while_running": look} if look else {}
        outcome = self.runner.run(argv, float(self._params["timeout"]), **more)
        checks = verdicts.of_probe(outcome.rc, outcome.out, outcome.err, outcome.timed_out, self._expected, ways)
        return [one for one in checks if one["name"] in ways or one["name"] == "probe"]

    def _show(self, ways: list[str]) -> list[dict[str, Any]]:
        """Runs these bypasses, which user space cannot prevent, all at once, until the node's watcher has named each of
        them.
        """
        left = self._left_s()
        if not ways or left < 1.0:
            return [verdicts.left_out(name, self._params["duration"]) for name in ways]
        names = {name: name[len(verdicts.BYPASS) :] for name in ways}
        observation = watcher.Observation(
            self._ask_watcher, self._lease["allocation"], names, reasons=verdicts.NAMED_FOR
        )
        if observation.absent:
            found = self._ask_probe(ways, "--together")
            return [
                verdicts.of_watcher(one, None, 0, 1, observation.absent) if one["verdict"] == verdicts.OPEN else one
                for one in found
            ]
        hold_ms = str(int(min(observation.hold_s, left) * 1000))
        try:
            found = self._ask_probe(ways, "--together", "--hold", hold_ms, look=observation.poll)
        except watcher.AllNamed:
            found = [verdicts.open_way(name) for name in ways]
        cut = f"the {self._params['duration']} s of this slice had passed" if left < observation.hold_s else ""
        out = [self._judge(one, observation, cut) for one in found]
        if cut:
            self.left_out += [one["name"] for one in out if one["verdict"] == verdicts.OPEN]
        return out

    def _judge(self, one: dict[str, Any], observation: watcher.Observation, cut: str) -> dict[str, Any]:
        """Judges whether the watcher named one bypass. ``cut``: why the bypass ran for less time than the watcher
        needs, empty if it ran long enough. Polls during a slow start of the container do not count.
        """
        if one["name"] in observation.named:
            seconds, text = observation.named[one["name"]]
            return verdicts.of_watcher(one, seconds, observation.polls, observation.needed, "", text)
        if one["verdict"] != verdicts.OPEN:
            return one  # Do not judge the watcher, because the bypass allocated nothing that a poll could see.
        return verdicts.of_watcher(one, None, observation.polls, observation.needed, observation.fault or cut)

    def _ask_watcher(self) -> dict[str, Any] | None:
        try:
            return self._plugin.ask("watch")
        except PluginError:
            return None

    def _share_beside(self) -> dict[str, Any]:
        """Measures the compute share again while a second program of the check is busy in another free slice of the
        GPU.
        """
        percent = self.slice["sm_percent"]
        if not 0 < percent < NO_LIMIT_PERCENT:
            # Without a compute share there is no limit to test. The probe's check ``share`` reports the same.
            return verdicts.check(verdicts.BESIDE, verdicts.PASSED, 0, 0, "shares", "no share is set")

        def measure(other: SliceCheck) -> dict[str, Any]:
            argv = [PROBE, "--json", "--checks", verdicts.SHARE]
            mine, theirs = isolation_pair.run_both(self.runner, other.runner, argv, float(self._params["timeout"]))
            return verdicts.of_beside(mine.out, theirs.out)

        return self._beside(verdicts.BESIDE, BESIDE_S, measure)

    def _import_beside(self) -> dict[str, Any]:
        """Tests whether this slice can import memory that another slice exported, through a folder
        that both slices see.
        """

        def meet(other: SliceCheck) -> dict[str, Any]:
            timeout = float(self._params["timeout"])
            with isolation_pair.meeting(os.path.dirname(self._params["socket"])) as folder:
                ours, theirs = (self._engines.runner(one._as_leased(folder)) for one in (self, other))
                argv = [PROBE, "--json", "--beside", f"{folder.container_path}/socket", "--checks"]
                taker, maker = [*argv, verdicts.IMPORT], [*argv, verdicts.EXPORT]
                taken, made = isolation_pair.run_both(ours, theirs, taker, timeout, maker)
            return verdicts.of_import(taken.out, made.out, f"{taken.err} {made.err}")

        return self._beside(verdicts.IMPORT, MEET_S + self.runner.overhead_s, meet)

    def _beside(self, name: str, least_s: float, work: Callable[[SliceCheck], dict[str, Any]]) -> dict[str, Any]:
        """Leases another free slice of this GPU, and returns the result of ``work`` with that slice. If less than
        ``least_s`` seconds of ``duration`` remain, the check is left out.
        """
        if self._left_s() < least_s:
            self.left_out.append(name)
            return verdicts.left_out(name, self._params["duration"])
        ttl = str(min(int(self._params["timeout"] + ENGINE_S), MOST_TTL_S))
        try:
            lease = self._plugin.ask("lease", "--ttl", ttl, "--uuid", self.slice["uuid"])
        except PluginError as fault:
            return verdicts.check(name, verdicts.NOT_RUN, "another slice", "none", detail=str(fault))
        try:
            return work(SliceCheck(self._params, self._plugin, lease, self._plugin.ask("status"), self._engines))
        except (RunnerError, PluginError, NvmlError) as fault:
            self._engines.heed(fault)
            return verdicts.check(name, verdicts.NOT_RUN, "two slices", "one", detail=str(fault))
        finally:
            # The device plugin ends the lease when it expires, even if this release fails.
            with contextlib.suppress(PluginError):
                self._plugin.ask("release", lease["allocation"])

    def _run_nvidia_smi(self) -> dict[str, Any]:
        program, timeout = self._params["nvidia_smi"], float(self._params["timeout"])
        found, self.smi_table = readers.by_nvidia_smi(self.runner, program, timeout, self._expected)
        return found

    def _run_nvidia_ml_py(self) -> dict[str, Any]:
        """Runs nvidia-ml-py always in a namespace of the host, because no image has this package."""

        def runner() -> Any:
            return self.runner if self.runner.name == NAMESPACE else self._engines.namespace(self._as_leased())

        timeout = float(self._params["timeout"])
        return readers.by_nvidia_ml_py(runner, self._params["vgpuctl"], timeout, self._expected)
