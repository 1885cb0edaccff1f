# SPDX-License-Identifier: Apache-2.0
"""Life cycle of the device plugin: waits for the driver, starts the parts, runs periodic tasks, handles signals, and
stops.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType

from . import assembly, version
from ._shared.config.sharing import Piece
from .admin import admin_socket, metrics, metrics_server, process
from .assembly import Parts, Setup
from .errors import Fatal, counted
from .node.claim import claimed
from .node.gpus import Gpu, GpuError, GpuSource
from .node.notify import notify
from .offer.health import HealthWatch
from .offer.last_offer import LastOffer
from .offer.settings import Settings

HOUSEKEEPING_S = 10.0
DRIVER_RETRY_S = 5.0
FIRST_REGISTRATION_S = 3.0
STREAM_JOIN_S = 10.0

log = logging.getLogger(__name__)


class Daemon:
    """Runs the plugin. The function ``open_gpus`` opens the driver, and may be called again after a GpuError."""

    def __init__(self, setup: Setup, open_gpus: Callable[[], GpuSource]) -> None:
        self._setup = setup
        self._open_gpus = open_gpus
        self._stopping = threading.Event()
        self._health: HealthWatch | None = None

    def stop(self) -> None:
        self._stopping.set()

    def stop_on_signals(self) -> None:
        """Installs the signal handlers. SIGTERM and SIGINT stop the program, and SIGHUP makes it read the configuration
        at once.
        """

        def handle(number: int, _frame: FrameType | None) -> None:
            log.info("signal %s: stopping", signal.Signals(number).name)
            self.stop()

        def poll(_number: int, _frame: FrameType | None) -> None:
            if self._health is not None:
                self._health.ask()

        for one in (signal.SIGTERM, signal.SIGINT):
            signal.signal(one, handle)
        signal.signal(signal.SIGHUP, poll)

    def run(self) -> None:
        """Runs until the program is stopped. Raises Fatal if the program cannot run."""
        settings = self._setup.choice.first_settings()
        with claimed(self._setup.paths):
            source, gpus = self._driver(settings)
            if source is None:
                return  # The program was stopped while it waited for the driver.
            try:
                gpus = LastOffer(self._setup.paths.last_offer).with_lost(gpus)
                settings, pieces = self._setup.choice.first_pieces(gpus, settings)
                self._serve(assembly.build(self._setup, settings, pieces, source, gpus), pieces)
            finally:
                source.close()

    def _driver(self, settings: Settings) -> tuple[GpuSource | None, list[Gpu]]:
        """Returns the driver and its GPUs. If failOnInitError is false, waits until the driver has at least one
        readable GPU. There is one exception: if this node had GPUs before, a driver without any readable GPU is
        returned too, so that the node's GPUs are reported as lost.
        """
        reported = ""
        had = LastOffer(self._setup.paths.last_offer).with_lost([])
        while not self._stopping.is_set():
            try:
                source = self._open_gpus()
                gpus = source.gpus()
                unreadable = source.unreadable()
                if gpus or (unreadable and had):
                    return source, gpus
                source.close()
                fault = "NVML lists no GPU on this host"
                if unreadable:
                    fault = (
                        f"NVML lists {counted(len(unreadable), 'GPU')}, but none can be read: "
                        f"{next(iter(unreadable.values()))}"
                    )
            except GpuError as error:
                fault = str(error)
            if settings.fail_on_init_error:
                raise Fatal(
                    f"{fault}; set flags.failOnInitError: false in {settings.path} to wait for the driver instead"
                )
            if fault != reported:
                log.warning("%s; trying again every %.0f s", fault, DRIVER_RETRY_S)
                notify(f"READY=1\nSTATUS=waiting for the driver: {fault}")
                reported = fault
            self._stopping.wait(DRIVER_RETRY_S)
        return None, []

    def _serve(self, parts: Parts, pieces: list[Piece]) -> None:
        settings = parts.changes.settings
        self._health, parts.changes.end = parts.health, self.stop
        try:
            parts.files.prepare()
        except OSError as fault:
            run = self._setup.paths.run_dir
            raise Fatal(
                f"{run}: the folder of all allocations cannot be created there: {fault}; is it writable?"
            ) from None
        parts.static_slices.refresh()
        parts.leases.restore()
        parts.resizer.restore()
        # The files of existing allocations (slices of containers) are restored as early as possible, because after a
        # boot an engine may restart containers at any time.
        self._attempt(parts.repair.poll)
        servers = self._servers(parts)
        if parts.labeller is not None:
            parts.labeller.write(settings)
        for warning in settings.warnings:
            log.warning("%s", warning)
        # The configuration is applied before the first registration, so that the kubelet gets the final slices at once.
        parts.changes.begin(pieces, parts.driver)
        parts.registrations.bring_in_line(parts.resources())
        health = self._start_threads(parts)
        if parts.claims is not None:
            parts.claims.start()
        try:
            parts.registrations.wait_for_first_attempts(FIRST_REGISTRATION_S)
            names = ", ".join(parts.resources())
            summary = f"{counted(len(parts.pool.gpus), 'GPU')}, {counted(len(parts.pool.slices), 'slice')} as {names}"
            log.info("version %s: %s", version(), summary)
            notify(f"READY=1\nSTATUS={summary}")
            self._housekeeping(parts, servers)
        finally:
            notify("STOPPING=1")
            parts.health.stop()
            parts.watch.stop()
            for follower in (parts.label, parts.pod_resizes):
                if follower is not None:
                    follower.stop()
            parts.registrations.stop()
            if parts.claims is not None:
                parts.claims.stop()
            for server in reversed(servers):
                server.stop()
            # The thread of the health check may be waiting inside a driver call. The call returns within a second, and
            # the thread holds no lock.
            health.join(STREAM_JOIN_S)

    def _start_threads(self, parts: Parts) -> threading.Thread:
        """Starts the threads. Returns the thread of the health check. The caller waits for this thread at the end,
        because it calls the driver.
        """

        def start(task: Callable[[], object], name: str) -> threading.Thread:
            thread = threading.Thread(target=task, name=name, daemon=True)
            thread.start()
            return thread

        health = start(parts.health.run, "health")
        if self._setup.extras.watch_s:
            start(parts.watch.run, "watch")
        if parts.label is not None:
            start(parts.label.run, "node label")
            start(parts.label.report, "node label")
        if parts.pod_resizes is not None:
            start(parts.pod_resizes.run, "pod sizes")
            start(parts.pod_resizes.retry, "pod sizes")
        return health

    def _housekeeping(self, parts: Parts, servers: list[admin_socket.Server | metrics_server.Server]) -> None:
        static = parts.static_slices
        tasks: list[Callable[[], object]] = [parts.repair.poll, *(one.renew for one in servers)]
        tasks += [parts.leases.follow, parts.leases.expire, parts.collector.collect]
        tasks += [parts.resizer.poll, parts.burst.poll]
        labeller = parts.labeller
        if labeller is not None:
            tasks.append(lambda: labeller.poll(parts.changes.settings))
        if parts.claims is not None:
            tasks.append(parts.claims.poll)
        tasks += [static.refresh_if_changed, static.poll, parts.driver_limits.poll, parts.containers.count_violations]
        while not self._stopping.wait(HOUSEKEEPING_S):
            self._attempt(*tasks)
            # After a registration the kubelet has called the plugin, so the threads of gRPC exist and can be tuned
            # (``rest``).
            if parts.registrations.any_registered():
                self._attempt(self._setup.extras.rest)

    @staticmethod
    def _attempt(*tasks: Callable[[], object]) -> None:
        """Runs a periodic task. An exception of the task is only logged and does not end the program, because running
        containers depend on it.
        """
        for task in tasks:
            try:
                task()
            except Exception:
                log.exception("a periodic task failed; it is tried again in %.0f s", HOUSEKEEPING_S)

    def _servers(self, parts: Parts) -> list[admin_socket.Server | metrics_server.Server]:
        """Returns the server of vgpuctl's socket and the server of metrics. The second exists only if an address for it
        is configured. Raises Fatal.
        """
        paths, address, service = self._setup.paths, self._setup.extras.metrics, parts.admin
        servers: list[admin_socket.Server | metrics_server.Server] = []
        try:
            servers.append(admin_socket.Server(paths.admin_socket, service))
        except OSError as fault:
            raise Fatal(f"{paths.admin_socket} cannot be served, and vgpuctl needs it: {fault}") from None
        if address:

            def make() -> str:
                # Imported only at the first scrape, because the module takes half a megabyte and most nodes are never
                # scraped.
                from .admin.plain import plain

                status = plain(service.status())
                usages, watched = plain(service.usage())["usages"], plain(service.watched())
                return metrics.text(status, usages, watched) + process.text()

            try:
                server = metrics_server.Server(address, make)
                servers.append(server)
                parts.changes.more_notes.append(server.notes)
            except (OSError, ValueError) as fault:
                raise Fatal(f"metrics cannot be served on {address}: {fault}") from None
        return servers
