# SPDX-License-Identifier: Apache-2.0
"""Creates the objects of which the device plugin consists, and connects them. It starts no thread, because daemon.py
does that.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ._shared.config.sharing import Piece
from .admin.answers import Admin
from .admin.containers import Containers
from .admin.resizing import Resizing
from .allocation import limit_devices
from .allocation.allocation_files import AllocationFiles
from .allocation.allocator import Allocator
from .allocation.burst import Burst
from .allocation.collector import Collector
from .allocation.driver_limits import DriverLimits
from .allocation.enforcement import Enforcement
from .allocation.leases import Leases
from .allocation.pod_mounts import MountCheck
from .allocation.records import RecordStore
from .allocation.recovery import recover
from .allocation.repair import Repair
from .allocation.resizer import Resizer
from .allocation.sizer import Sizer
from .allocation.static_slices import StaticSlices
from .inject import driver_files
from .inject.driver_files import DriverFiles
from .inject.mounts import KernelMounter, Mounter
from .kubelet.registration import Registration
from .kubelet.registrations import Registrations
from .kubelet.service import DevicePlugin
from .node import podresources
from .node.driver_load import DriverLoad
from .node.gauges import Cached
from .node.gpus import Gpu, GpuSource
from .node.paths import Paths
from .offer.health import CLEAN_S, HealthWatch
from .offer.health import rules as health_rules
from .offer.last_offer import LastOffer
from .offer.pool import Pool
from .offer.settings import Settings
from .reconcile import labels
from .reconcile.config_choice import ConfigChoice
from .reconcile.labeller import Labeller
from .reconcile.reconfigure import Reconfiguration
from .watch.rule import INTERVAL_S
from .watch.setup import NodeView, Teller, notes
from .watch.watcher import Watch

if TYPE_CHECKING:
    from .allocation.pod_sizes import PodSizes
    from .dra.driver import ClaimDriver
    from .reconcile.node_label import NodeLabel
    from .reconcile.pod_resizes import PodResizes

# Timeout of one request for a pod during PreStartContainer. The kubelet waits 30 s for that call, and two such requests
# must fit in that time.
POD_ANSWER_S = 8.0
# Timeout of one request to the API server during NodePrepareResources. The kubelet waits 45 s for that call.
CLAIM_ANSWER_S = 10.0
# Timeout of the check of a pod's mounts. If there is no response within this time, the container starts unchecked.
MOUNTS_ANSWER_S = 1.5


class Extras(NamedTuple):
    """Optional services.

    ``metrics`` is the address of the metrics server. ``labels`` is true if the node's labels are written into a feature
    file. ``kubeconfig`` gives access to the API server. If it is empty, the node's label that chooses the configuration
    has no effect. ``watch_s`` is the number of seconds between two polls of the watcher, which looks for programs that
    bypass their limits. 0 means no watcher.
    """

    metrics: str = ""
    labels: bool = False
    kubeconfig: str = ""
    node_name: str = ""
    watch_s: float = INTERVAL_S
    # Function that is called regularly after the plugin was registered with the kubelet. It tunes the threads of gRPC,
    # which have started by then.
    rest: Callable[[], object] = lambda: None
    # True if the labels are also set on the Node object. This needs a kubeconfig.
    features: bool = False
    # Whether unhealthy GPUs give the node a taint. With ``none`` they never do, with ``any`` one unhealthy GPU is
    # enough, and with ``all`` every GPU must be unhealthy.
    taint: str = "none"

    @property
    def node(self) -> str:
        """The name of this node."""
        return self.node_name or socket.gethostname().lower()


@dataclass(frozen=True)
class Setup:
    """Options of the command line. ``clean_s`` is a number of seconds: an unhealthy GPU that had no error for so long
    is healthy again.
    """

    paths: Paths
    choice: ConfigChoice
    mounter: Mounter = field(default_factory=KernelMounter)
    clean_s: float = CLEAN_S
    extras: Extras = field(default_factory=Extras)


@dataclass(frozen=True)
class Parts:
    """The objects that the daemon starts, polls and stops. ``label``, ``pod_resizes``, ``labeller`` and ``claims`` are
    None if their function is not configured.
    """

    pool: Pool
    files: AllocationFiles
    leases: Leases
    collector: Collector
    static_slices: StaticSlices
    driver_limits: DriverLimits
    repair: Repair
    resizer: Resizer
    burst: Burst
    registrations: Registrations
    changes: Reconfiguration
    health: HealthWatch
    watch: Watch
    containers: Containers
    admin: Admin
    driver: DriverFiles
    label: NodeLabel | None
    pod_resizes: PodResizes | None
    labeller: Labeller | None
    claims: ClaimDriver | None

    def resources(self) -> list[str]:
        return resources(self.pool, self.changes.settings)


def resources(pool: Pool, settings: Settings) -> list[str]:
    """Returns the resources to register with the kubelet. Normally these are the resources of the slices (parts of
    GPUs). If there are no slices, returns the node's configured resource, which then has no devices. If the node serves
    claims, returns none.
    """
    if settings.claims:
        return []
    return pool.resources or [settings.resource]


def build(setup: Setup, settings: Settings, pieces: list[Piece], source: GpuSource, gpus: list[Gpu]) -> Parts:
    """Creates all parts. ``pieces`` are the slices that follow from the settings. A GPU that still has allocated slices
    from an earlier split keeps that split. ``gpus`` includes GPUs that the driver no longer finds. Raises Fatal.
    """
    paths, extras = setup.paths, setup.extras
    last_offer = LastOffer(paths.last_offer)
    pool = Pool(gpus, last_offer.before(gpus, pieces))
    records, files = _kept(setup)
    pods = _pod_sizes(setup, POD_ANSWER_S)
    sizer = Sizer(records, pool, paths.checkpoint, settings, pods, MountCheck(_pod_sizes(setup, MOUNTS_ANSWER_S)))
    allocator = Allocator(paths, settings, pool, records, files, sizer)
    driver = driver_files.find(settings.driver_root, settings.dev_root, host_root=paths.seen_root)
    driver_limits = _driver_limits(paths, source, allocator, Teller(records, pods).say)
    allocator.configure(settings, driver)
    static_slices = allocator.outside = StaticSlices(paths, settings, pool, allocator, files, driver)
    registrations = _registrations(paths, pool, allocator)
    leases = Leases(allocator, pool, paths.checkpoint, registrations.any_registered)
    holders = functools.partial(podresources.holders, paths.pod_resources)
    collector = Collector(allocator, files, paths.checkpoint, holders, send_again=pool.send_again)
    changes = Reconfiguration(
        setup.choice, settings, source, allocator, lambda: leases.in_use() | static_slices.in_use(), last_offer
    )
    health = _health(setup, source, changes, pool)
    changes.after += [static_slices.configure, lambda now, _driver: registrations.bring_in_line(resources(pool, now))]
    repair, resizer = Repair(paths, records, files), Resizer(records, pool, files, sizer)
    changes.more_notes += [static_slices.notes, repair.notes, lambda: limit_devices.notes(records.all()), resizer.notes]
    claims = _claims(setup, allocator, files, source, changes, driver)
    label = _label(setup, changes, health, pool)
    labeller = _labeller(extras, source, pool, changes, label, allocator)
    view = NodeView(pool, records, paths.checkpoint, changes.watch_policy, allocator.library)
    watch = Watch(source, files, view, Teller(records, pods).tell, interval_s=extras.watch_s)
    static_slices.stale, collector.alive, resizer.shown = watch.stale, watch.alive, watch.surely_holds
    pod_resizes = _pod_resizes(setup, pods, records, resizer, sizer, changes)
    changes.more_notes += [lambda: notes(watch.state()), driver_limits.notes]
    resizer.enforce, changes.loaded_again = driver_limits.apply, DriverLoad(paths.sys_root, driver_limits.count).again
    containers = Containers(records, files, watch, paths.pod_resources, Cached(source.gauges).of, health.xids)
    admin = Admin(pool, allocator, leases, claims.registration if claims else registrations, changes, containers)
    admin.resizing, admin.driver_limits = Resizing(pool, resizer, pods, holders), driver_limits
    return Parts(
        pool=pool,
        files=files,
        leases=leases,
        collector=collector,
        static_slices=static_slices,
        driver_limits=driver_limits,
        repair=repair,
        resizer=resizer,
        burst=_burst(records, pool, files, sizer, resizer),
        registrations=registrations,
        changes=changes,
        health=health,
        watch=watch,
        containers=containers,
        admin=admin,
        driver=driver,
        label=label,
        pod_resizes=pod_resizes,
        labeller=labeller,
        claims=claims,
    )


def _kept(setup: Setup) -> tuple[RecordStore, AllocationFiles]:
    """Loads the records and files of allocations (slices of containers) that were created before this program
    started."""
    records = RecordStore(setup.paths.records)
    records.load()
    files = AllocationFiles(setup.paths.allocations, setup.mounter)
    recover(records, files)
    return records, files


def _burst(records: RecordStore, pool: Pool, files: AllocationFiles, sizer: Sizer, resizer: Resizer) -> Burst:
    """Creates the manager of burst memory, which is memory above a container's promised amount. Sizer and resizer ask
    the manager to take back such memory for a container to which it was promised.
    """
    sizer.lender = resizer.lender = out = Burst(records, pool, files, sizer, resizer)
    return out


def _driver_limits(
    paths: Paths, source: GpuSource, allocator: Allocator, say: Callable[[str, str], None]
) -> DriverLimits:
    """Creates the check of the driver's memory limits. It must be called before the allocator is configured, because
    the configuration decides whether the library or the driver enforces memory limits.
    """
    allocator.enforcement = Enforcement(paths, source)
    out = DriverLimits(paths.allocations, paths.cgroup_root, source, allocator.enforcement)
    out.tell, allocator.clear_limits = say, out.clear
    return out


def _health(setup: Setup, source: GpuSource, changes: Reconfiguration, pool: Pool) -> HealthWatch:
    """Creates the health check. It finds lost GPUs at once, before slices are offered."""
    health = HealthWatch(source, pool, health_rules(os.environ), changes.poll, setup.clean_s)
    changes.on_lost, changes.poll_soon = health.lost, health.ask
    changes.find_gpus()
    return health


def _registrations(paths: Paths, pool: Pool, allocator: Allocator) -> Registrations:
    def make(resource: str) -> Registration:
        def service(on_streams: Callable[[], None]) -> DevicePlugin:
            return DevicePlugin(pool, allocator, on_streams, resource)

        return Registration(paths.kubelet_socket, paths.endpoint(resource), resource, service)

    return Registrations(make)


def _claims(
    setup: Setup,
    allocator: Allocator,
    files: AllocationFiles,
    source: GpuSource,
    changes: Reconfiguration,
    driver: DriverFiles,
) -> ClaimDriver | None:
    """Returns the driver for claims (Dynamic Resource Allocation), or None if claims are not configured. If the
    configuration changes from slices to claims or back, this program restarts.
    """
    if not changes.settings.claims:
        return None
    from .dra.driver import ClaimDriver, Connections
    from .node import kube_access, kube_api

    access = kube_access.read(setup.extras.kubeconfig)
    connections = Connections(kube_api.Api(access, CLAIM_ANSWER_S), kube_api.Api(access), kube_api.Api(access))
    out = ClaimDriver(setup.paths, setup.extras.node, allocator, files, source, connections)
    out.configure(changes.settings, driver)
    changes.after.append(out.configure)
    changes.more_notes.append(out.notes)
    return out


def _pod_sizes(setup: Setup, answer_s: float) -> PodSizes | None:
    """Returns the reader of pods' sizes, or None without a kubeconfig. ``answer_s`` is the timeout of one request to
    the API server, in seconds.
    """
    if not setup.extras.kubeconfig:
        return None
    from .allocation.pod_sizes import PodSizes
    from .node import kube_access, kube_api

    paths = setup.paths
    api = kube_api.Api(kube_access.read(setup.extras.kubeconfig), answer_s)
    return PodSizes(api, setup.extras.node, paths.checkpoint, lambda: podresources.holders(paths.pod_resources))


def _pod_resizes(
    setup: Setup, pods: PodSizes | None, records: RecordStore, resizer: Resizer, sizer: Sizer, changes: Reconfiguration
) -> PodResizes | None:
    """Returns the watch for requested resizes of this node's pods, or None without access to the API server. The watch
    has a connection of its own.
    """
    if pods is None:
        return None
    from .node import kube_access, kube_api
    from .reconcile.pod_resizes import PodResizes

    api = kube_api.Api(kube_access.read(setup.extras.kubeconfig))
    out = PodResizes(api, pods, resizer, records, setup.paths.checkpoint, lambda: sizer.settings.requested)
    changes.more_notes.append(out.notes)
    return out


def _labeller(
    extras: Extras,
    source: GpuSource,
    pool: Pool,
    changes: Reconfiguration,
    label: NodeLabel | None,
    allocator: Allocator,
) -> Labeller | None:
    """Returns the writer of node labels, or None if no labels are configured. If no labels are to be set on the Node
    object, those that an earlier run set there are removed.
    """
    publish = label.set_features if label is not None and extras.features else None
    if label is not None and publish is None:
        label.set_features({})
    if not extras.labels and publish is None:
        return None
    out = Labeller(source, pool, extras.labels, publish)
    out.more = lambda: {labels.ENFORCEMENT: allocator.enforcement.verdict.active}
    changes.after.append(lambda now, _driver: out.write(now))
    return out


def _label(setup: Setup, changes: Reconfiguration, health: HealthWatch, pool: Pool) -> NodeLabel | None:
    """Returns the object that follows the node's label for the configuration. After each poll it also reports the state
    on the Node object. Returns None without a kubeconfig.
    """
    if not setup.extras.kubeconfig:
        return None
    from .node import kube_access, kube_api
    from .node.kubelet_topology import KubeletTopology
    from .reconcile.node_label import NodeLabel
    from .reconcile.node_report import NodeReport

    def choose(name: str) -> None:
        setup.choice.choose(name)
        health.ask()

    def drain(uuids: frozenset[str]) -> None:
        pool.drain(uuids)
        health.ask()

    label = NodeLabel(kube_api.Api(kube_access.read(setup.extras.kubeconfig)), setup.extras.node, choose, drain)
    topology = KubeletTopology(setup.paths.kubelet_config)
    changes.on_poll = NodeReport(label, changes, pool, topology, setup.extras.taint).publish
    changes.more_notes += [label.notes, pool.notes]
    return label
