# SPDX-License-Identifier: Apache-2.0
"""Puts the parts together and keeps them running: start, housekeeping, signals, stop."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, NamedTuple

from vgpu_plugin._shared.config.sharing import Piece
from vgpu_plugin._shared.pods import annotations as pod_annotations

from . import version
from .admin import admin_socket, metrics
from .admin.answers import Admin
from .allocation import sizing
from .allocation.allocation_files import AllocationFiles
from .allocation.allocator import Allocator
from .allocation.collector import Collector
from .allocation.leases import Leases
from .allocation.records import RecordStore
from .allocation.static_slices import StaticSlices
from .errors import Fatal
from .inject import cdi, driver_files
from .inject.mounts import KernelMounter, Mounter
from .kubelet.registration import Registration
from .kubelet.registrations import Registrations
from .kubelet.service import DevicePlugin
from .node import podresources
from .node.gpus import Gpu, GpuError, GpuSource
from .node.notify import notify
from .node.paths import Paths
from .offer import settings as node_settings
from .offer.health import CLEAN_S, HealthWatch
from .offer.health import rules as health_rules
from .offer.last_offer import LastOffer
from .offer.options import Option
from .offer.pool import Pool
from .reconcile import labels
from .reconcile.config_choice import ConfigChoice
from .reconcile.labeller import Labeller
from .reconcile.reconfigure import Reconfiguration
from .watch import setup as watch_setup
from .watch import usage
from .watch.rule import INTERVAL_S

if TYPE_CHECKING:
    from .reconcile.node_label import NodeLabel

HOUSEKEEPING_S = 10.0
DRIVER_RETRY_S = 5.0
FIRST_REGISTRATION_S = 3.0
STREAM_JOIN_S = 10.0
# The kubelet waits 30 s for PreStartContainer; two questions about its pod must fit.
POD_ANSWER_S = 8.0

log = logging.getLogger(__name__)


def offered(pool: Pool, settings: node_settings.Settings) -> list[str]:
    """The resources to register: those of the pieces; a node without any still says so under its plain one."""
    return pool.resources or [settings.resource]


class Extras(NamedTuple):
    """What is served beside the kubelet: metrics on an address, labels in a file; ``kubeconfig`` and the node's name:
    how the node's label is followed, empty: it is not. ``watch_s``: between two looks of the watcher; 0: none.
    """

    metrics: str = ""
    labels: bool = False
    kubeconfig: str = ""
    node_name: str = ""
    watch_s: float = INTERVAL_S
    # Called now and then while the kubelet listens, for what a program does about threads that it did not start.
    rest: Callable[[], object] = lambda: None


class Daemon:
    """``open_gpus`` opens the driver and may be called again after a GpuError. ``chosen``: what flags and environment
    set over the file. ``clean_s``: without a fault for so long a GPU is healthy again.
    """

    def __init__(
        self,
        paths: Paths,
        open_gpus: Callable[[], GpuSource],
        mounter: Mounter | None = None,
        chosen: list[tuple[Option, str, str]] | None = None,
        clean_s: float = CLEAN_S,
        extras: Extras | None = None,
    ) -> None:
        self._paths = paths
        self._open_gpus = open_gpus
        self._mounter = mounter or KernelMounter()
        self._stopping = threading.Event()
        self._lock: IO[str] | None = None
        self._chosen = chosen or []
        self._clean_s = clean_s
        self._extras = extras or Extras()
        self._health: HealthWatch | None = None
        follows = bool(self._extras.kubeconfig)
        self._choice = ConfigChoice(paths.config, paths.configs, paths.config_name, follows)

    def stop(self) -> None:
        self._stopping.set()

    def stop_on_signals(self) -> None:
        def handle(number: int, _frame: FrameType | None) -> None:
            log.info("signal %s: stopping", signal.Signals(number).name)
            self.stop()

        def look(_number: int, _frame: FrameType | None) -> None:
            if self._health is not None:
                self._health.ask()

        for one in (signal.SIGTERM, signal.SIGINT):
            signal.signal(one, handle)
        signal.signal(signal.SIGHUP, look)

    def run(self) -> None:
        """Runs until stopped. Raises Fatal where the program cannot run."""
        settings = self._first_settings()
        self._make_folders()
        self._be_alone()
        source, gpus = self._driver(settings)
        if source is None:
            return  # stopped while waiting for the driver
        try:
            self._serve(settings, source, gpus)
        finally:
            source.close()

    def _first_settings(self) -> node_settings.Settings:
        """Those of the named configuration that was in force before, where it can still be; else of node.yaml."""
        if name := self._choice.wanted:
            try:
                return node_settings.load(self._choice.path(name), self._chosen, self._choice.follows)
            except Fatal as fault:
                log.error("node.yaml is in force: %s", fault)
        return node_settings.load(self._paths.config, self._chosen, self._choice.follows)

    def _first_pieces(
        self, gpus: list[Gpu], settings: node_settings.Settings
    ) -> tuple[node_settings.Settings, list[Piece]]:
        """The same, once the GPUs are known: a named configuration may fit them no more."""
        try:
            return settings, node_settings.make_slices(gpus, settings)
        except Fatal as fault:
            if settings.path == self._paths.config:
                raise
            log.error("node.yaml is in force: %s", fault)
        settings = node_settings.load(self._paths.config, self._chosen, self._choice.follows)
        return settings, node_settings.make_slices(gpus, settings)

    def purge(self) -> None:
        """Ends every allocation and removes our files; the folders go where nothing of others is in them. With a
        kubeconfig, what we left on the node's object too. Raises Fatal.
        """
        self._make_folders()
        self._be_alone()
        files = AllocationFiles(self._paths.allocations, self._mounter)
        for allocation in [*files.present(), *files.static()]:
            files.remove(allocation)
        if self._paths.cdi_dir is not None:
            cdi.leave(self._paths.cdi_dir)
        if self._extras.labels:
            given = [text for option, text, _where in self._chosen if option.flag == "output-file"]
            labels.leave(Path(given[-1]) if given else labels.FILE)
        records = self._paths.records
        for path in (
            records,
            records.with_suffix(".broken"),
            records.with_suffix(".new"),
            self._paths.config_name,
            self._paths.last_offer,
            self._paths.last_offer.with_suffix(".new"),
            self._paths.admin_socket,
            self._paths.admin_socket.with_name(admin_socket.EARLY),
            self._paths.lock,
        ):
            path.unlink(missing_ok=True)
        for folder in (self._paths.allocations, self._paths.run_dir, self._paths.state_dir, self._paths.config.parent):
            with contextlib.suppress(OSError):  # not empty, or not there
                folder.rmdir()
        # Last: what is on the host goes whether or not the API answers.
        if self._extras.kubeconfig:
            from .node import kube_access, kube_api
            from .reconcile import node_trace

            api = kube_api.Api(kube_access.read(self._extras.kubeconfig))
            node_trace.leave(api, self._extras.node_name or socket.gethostname().lower())

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
        paths = self._paths
        settings, pieces = self._first_pieces(gpus, settings)
        last_offer = LastOffer(paths.last_offer)
        pool = Pool(gpus, last_offer.before(gpus, pieces))
        records = RecordStore(paths.records)
        records.load()
        files = AllocationFiles(paths.allocations, self._mounter)
        allocator = Allocator(paths, settings, pool, records, files)
        driver = driver_files.find(settings.driver_root, settings.dev_root, host_root=paths.seen_root)
        allocator.configure(settings, driver)
        log.info("hand-over: %s (%s)", ", ".join(allocator.hand_over.strategies), allocator.hand_over.reason)
        outside = StaticSlices(paths, settings, pool, allocator, files, driver)
        outside.refresh()
        allocator.outside = outside

        def register(resource: str) -> Registration:
            return Registration(
                paths.kubelet_socket,
                paths.endpoint(resource),
                resource,
                lambda on_streams: DevicePlugin(pool, allocator, on_streams, resource),
            )

        registrations = Registrations(register)
        leases = Leases(allocator, pool, paths.checkpoint, registrations.any_registered)
        leases.restore()
        collector = Collector(
            allocator,
            files,
            paths.checkpoint,
            lambda: podresources.holders(paths.pod_resources),
            tell_again=pool.tell_again,
        )
        changes = Reconfiguration(
            paths,
            self._chosen,
            settings,
            source,
            pool,
            allocator,
            lambda: leases.in_use() | outside.in_use(),
            self._choice,
            last_offer,
        )
        self._health = HealthWatch(source, pool, health_rules(os.environ), changes.look, self._clean_s)
        changes.on_lost = self._health.lost
        changes.after += [outside.configure, lambda *_: registrations.bring_in_line(offered(pool, changes.settings))]
        label = self._follow_label(allocator)
        violations = usage.Violations()
        watch = watch_setup.make(source, files, pool, allocator, paths, lambda: changes.settings, self._extras.watch_s)

        def usages(holders: Callable[[], dict[str, podresources.Holder] | None]) -> list[usage.Usage]:
            return violations.seen(usage.of_all(records.all(), files, holders))

        service = Admin(
            lambda: changes.settings,
            pool,
            allocator,
            leases,
            registrations.state,
            lambda: changes.notes() + (label.notes() if label is not None else []),
            lambda: usages(lambda: podresources.holders(paths.pod_resources)),
            lambda: (changes.name, changes.fault),
            lambda: changes.waiting,
            lambda: watch_setup.answer(watch.state(), allocator, paths),
        )
        admin = self._serve_admin(service)
        served = self._serve_metrics(service)
        if self._extras.labels:
            labeller = Labeller(source, pool)
            labeller.write(settings)
            changes.after.append(lambda new, _driver: labeller.write(new))
        for warning in settings.warnings:
            log.warning("%s", warning)
        watcher = threading.Thread(target=self._health.run, name="health", daemon=True)
        changes.begin(pieces, driver)
        registrations.bring_in_line(offered(pool, settings))
        watcher.start()
        if self._extras.watch_s:
            threading.Thread(target=watch.run, name="watch", daemon=True).start()
        if label is not None:
            changes.on_look = lambda: self._tell_node(label, changes, pool)
            for task in (label.run, label.report):
                threading.Thread(target=task, name="node label", daemon=True).start()
        try:
            registrations.wait_for_first_attempts(FIRST_REGISTRATION_S)
            summary = f"{len(gpus)} GPUs, {len(pool.slices)} slices as {', '.join(offered(pool, settings))}"
            log.info("version %s: %s", version(), summary)
            notify(f"READY=1\nSTATUS={summary}")
            while not self._stopping.wait(HOUSEKEEPING_S):
                self._keep_house(
                    leases.expire, collector.collect, outside.keep, outside.look, lambda: usages(lambda: None)
                )
                if registrations.any_registered():  # so the kubelet has called
                    self._keep_house(self._extras.rest)
        finally:
            notify("STOPPING=1")
            self._health.stop()
            watch.stop()
            if label is not None:
                label.stop()
            registrations.stop()
            if served is not None:
                served.stop()
            admin.stop()
            # The health thread sits in the driver's wait; it ends by itself and holds nothing that matters.
            watcher.join(STREAM_JOIN_S)

    def _follow_label(self, allocator: Allocator) -> NodeLabel | None:
        if not self._extras.kubeconfig:
            return None
        from .allocation.pod_sizes import PodSizes
        from .node import kube_access, kube_api
        from .reconcile.node_label import NodeLabel

        def choose(name: str) -> None:
            self._choice.choose(name)
            if self._health is not None:
                self._health.ask()

        node = self._extras.node_name or socket.gethostname().lower()
        access = kube_access.read(self._extras.kubeconfig)
        allocator.sizes = PodSizes(
            kube_api.Api(access, POD_ANSWER_S),
            node,
            self._paths.checkpoint,
            lambda: podresources.holders(self._paths.pod_resources),
        )
        return NodeLabel(kube_api.Api(access), node, choose)

    @staticmethod
    def _tell_node(label: NodeLabel, changes: Reconfiguration, pool: Pool) -> None:
        """What became of the configuration; and the GPUs that pods may ask parts of, for the scheduler."""
        label.tell(changes.outcome())
        gpus: list[pod_annotations.NodeGpu] = []
        if changes.settings.requested:
            sick = {gpu.uuid: pool.sickness(gpu.uuid) for gpu in pool.gpus}
            gpus = sizing.node_gpus(pool.gpus, changes.settings.config, sick)
        # None is said in words: an annotation that is gone means to the scheduler that somebody deleted it, and it
        # would go on placing by the GPUs that it knows.
        label.annotate(pod_annotations.GPUS, pod_annotations.write_gpus(gpus), add=changes.settings.requested)

    @staticmethod
    def _keep_house(*tasks: Callable[[], object]) -> None:
        """Nothing of it is worth ending the program for: running containers' slices hang on its records."""
        for task in tasks:
            try:
                task()
            except Exception:
                log.exception("housekeeping failed; it is tried again in %.0f s", HOUSEKEEPING_S)

    def _serve_metrics(self, service: Admin) -> metrics.Server | None:
        if not self._extras.metrics:
            return None

        # Half a megabyte that most nodes never need.
        from .admin.plain import plain

        def make() -> str:
            status = plain(service.status())
            return metrics.text(status, plain(service.usage())["usages"], plain(service.watched()))

        try:
            return metrics.Server(self._extras.metrics, make)
        except (OSError, ValueError) as fault:
            raise Fatal(f"metrics cannot be served on {self._extras.metrics}: {fault}") from None

    def _serve_admin(self, service: Admin) -> admin_socket.Server:
        try:
            return admin_socket.Server(self._paths.admin_socket, service)
        except OSError as fault:
            raise Fatal(f"{self._paths.admin_socket} cannot be served: {fault}; vgpuctl asks there") from None
