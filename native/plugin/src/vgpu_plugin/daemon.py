# SPDX-License-Identifier: Apache-2.0
"""Puts the parts together and keeps them running: start, housekeeping, signals, stop."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import IO

import grpc

from . import cdi, driver_files, version
from . import settings as node_settings
from ._proto import admin_pb2_grpc
from .admin import Admin
from .allocation_files import AllocationFiles
from .allocator import Allocator
from .collector import Collector
from .errors import Fatal
from .gpus import Gpu, GpuError, GpuSource
from .health import HealthWatch
from .leases import Leases
from .mounts import KernelMounter, Mounter
from .notify import notify
from .paths import Paths
from .pool import Pool
from .records import RecordStore
from .registration import Registration
from .service import DevicePlugin
from .static_slices import StaticSlices

HOUSEKEEPING_S = 10.0
DRIVER_RETRY_S = 5.0
FIRST_REGISTRATION_S = 3.0
STREAM_JOIN_S = 10.0

log = logging.getLogger(__name__)


class Daemon:
    """``open_gpus`` opens the driver and may be called again after a GpuError."""

    def __init__(self, paths: Paths, open_gpus: Callable[[], GpuSource], mounter: Mounter | None = None) -> None:
        self._paths = paths
        self._open_gpus = open_gpus
        self._mounter = mounter or KernelMounter()
        self._stopping = threading.Event()
        self._lock: IO[str] | None = None

    def stop(self) -> None:
        self._stopping.set()

    def stop_on_signals(self) -> None:
        def handle(number: int, _frame: FrameType | None) -> None:
            log.info("signal %s: stopping", signal.Signals(number).name)
            self.stop()

        for one in (signal.SIGTERM, signal.SIGINT):
            signal.signal(one, handle)

    def run(self) -> None:
        """Runs until stopped. Raises Fatal where the program cannot run."""
        settings = node_settings.load(self._paths.config)
        self._make_folders()
        self._be_alone()
        source, gpus = self._driver(settings)
        if source is None:
            return  # stopped while waiting for the driver
        try:
            self._serve(settings, source, gpus)
        finally:
            source.close()

    def purge(self) -> None:
        """Ends every allocation and removes our files; the folders go where nothing of others is in them."""
        self._make_folders()
        self._be_alone()
        files = AllocationFiles(self._paths.allocations, self._mounter)
        for allocation in [*files.present(), *files.static()]:
            files.remove(allocation)
        if self._paths.cdi_dir is not None:
            cdi.remove(self._paths.cdi_dir)
        records = self._paths.records
        for path in (records, records.with_suffix(".broken"), self._paths.admin_socket, self._paths.lock):
            path.unlink(missing_ok=True)
        for folder in (self._paths.allocations, self._paths.run_dir, self._paths.state_dir, self._paths.config.parent):
            with contextlib.suppress(OSError):  # not empty, or not there
                folder.rmdir()

    def _make_folders(self) -> None:
        for folder in (self._paths.run_dir, self._paths.state_dir):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                if folder.stat().st_mode & 0o7777 != 0o755:
                    os.chmod(folder, 0o755)
            except OSError as fault:
                raise Fatal(f"{folder} cannot be made ready: {fault}; this program keeps its files there") from None

    def _be_alone(self) -> None:
        """Two plugins on one node would take the socket from each other for ever."""
        try:
            self._lock = open(self._paths.lock, "a+")  # noqa: SIM115 - held for as long as the program lives
        except OSError as fault:
            raise Fatal(f"{self._paths.lock} cannot be opened: {fault}; is {self._paths.state_dir} writable?") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "unknown"
            raise Fatal(
                f"{self._paths.lock}: another vgpu-device-plugin runs already (pid {holder}); stop it first"
            ) from None
        # The pid is for people; the lock is what counts, and it needs no room on a full disk.
        with contextlib.suppress(OSError):
            self._lock.truncate(0)
            self._lock.write(str(os.getpid()))
            self._lock.flush()

    def _driver(self, settings: node_settings.Settings) -> tuple[GpuSource | None, list[Gpu]]:
        """The driver with at least one GPU; waits for it where failOnInitError is false."""
        told = ""
        while not self._stopping.is_set():
            try:
                source = self._open_gpus()
                gpus = source.gpus()
                if gpus:
                    return source, gpus
                source.close()
                fault = "NVML lists no GPU on this host"
            except GpuError as error:
                fault = str(error)
            if settings.fail_on_init_error:
                raise Fatal(
                    f"{fault}; set flags.failOnInitError: false in {settings.path} to wait for the driver instead"
                )
            if fault != told:
                log.warning("%s; looking again every %.0f s", fault, DRIVER_RETRY_S)
                notify(f"READY=1\nSTATUS=waiting for the driver: {fault}")
                told = fault
            self._stopping.wait(DRIVER_RETRY_S)
        return None, []

    def _serve(self, settings: node_settings.Settings, source: GpuSource, gpus: list[Gpu]) -> None:
        paths, resource = self._paths, settings.resource
        pool = Pool(gpus, node_settings.make_slices(gpus, settings))
        records = RecordStore(paths.records)
        records.load()
        files = AllocationFiles(paths.allocations, self._mounter)
        allocator = Allocator(paths, settings, pool, records, files)
        driver = driver_files.find(settings.driver_root, settings.dev_root)
        has_cuda = any(name == "libcuda.so.1" for name, _host in driver.libraries)
        allocator.hand_over = settings.hand_over(paths.host_root, has_cuda and paths.cdi_dir is not None)
        log.info("hand-over: %s (%s)", ", ".join(allocator.hand_over.strategies), allocator.hand_over.reason)
        outside = StaticSlices(paths, settings, pool, allocator, files, driver)
        outside.refresh()
        allocator.outside = outside
        registration = Registration(
            paths.kubelet_socket,
            paths.endpoint(resource),
            resource,
            lambda on_streams: DevicePlugin(pool, allocator, on_streams),
        )
        leases = Leases(allocator, pool, paths.checkpoint, resource, registration.registered)
        leases.restore()
        collector = Collector(allocator, files, paths.checkpoint, resource)
        health = HealthWatch(source, pool)
        admin = self._serve_admin(Admin(settings, pool, allocator, leases, registration.state))
        threads = [
            threading.Thread(target=one.run, name=name, daemon=True)
            for name, one in (("registration", registration), ("health", health))
        ]
        for thread in threads:
            thread.start()
        try:
            registration.first_attempt.wait(FIRST_REGISTRATION_S)
            summary = f"{len(gpus)} GPUs, {len(pool.slices)} slices as {resource}"
            log.info("version %s: %s", version(), summary)
            notify(f"READY=1\nSTATUS={summary}")
            while not self._stopping.wait(HOUSEKEEPING_S):
                self._keep_house(leases.expire, collector.collect, outside.refresh, outside.look)
        finally:
            notify("STOPPING=1")
            registration.stop()
            health.stop()
            admin.stop(grace=1.0).wait()
            # The health thread sits in the driver's wait; it ends by itself and holds nothing that matters.
            for thread in threads:
                thread.join(STREAM_JOIN_S)

    @staticmethod
    def _keep_house(*tasks: Callable[[], object]) -> None:
        """Nothing of it is worth ending the program for: running containers' slices hang on its records."""
        for task in tasks:
            try:
                task()
            except Exception:
                log.exception("housekeeping failed; it is tried again in %.0f s", HOUSEKEEPING_S)

    def _serve_admin(self, service: Admin) -> grpc.Server:
        self._paths.admin_socket.unlink(missing_ok=True)
        server = grpc.server(ThreadPoolExecutor(max_workers=4, thread_name_prefix="admin"))
        admin_pb2_grpc.add_AdminServicer_to_server(service, server)
        # The umask of main makes the socket root's alone from its first moment.
        server.add_insecure_port(f"unix:{self._paths.admin_socket}")
        server.start()
        os.chmod(self._paths.admin_socket, 0o600)
        return server
