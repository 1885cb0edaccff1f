# SPDX-License-Identifier: Apache-2.0
"""Command line of vgpu-device-plugin, the device plugin that runs on each node."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from . import lean, logs, version
from .errors import Fatal
from .node.paths import Paths
from .offer import options
from .offer.health import CLEAN_S
from .watch.rule import INTERVAL_S


def seconds(text: str) -> float:
    """Parses a number of seconds. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"expected seconds from 0 to 3600, found {text!r}")
    return value


def _add_paths(out: argparse.ArgumentParser) -> None:
    defaults = Paths()
    out.add_argument(
        "--config",
        "--config-file",
        type=Path,
        default=defaults.config,
        help="node configuration (default: %(default)s)",
    )
    out.add_argument(
        "--kubelet-dir", type=Path, default=defaults.kubelet_dir, help="folder of kubelet.sock (default: %(default)s)"
    )
    out.add_argument(
        "--run-dir",
        type=Path,
        default=defaults.run_dir,
        help="folder of sockets and allocations (default: %(default)s)",
    )
    out.add_argument(
        "--state-dir",
        type=Path,
        default=defaults.state_dir,
        help="folder of the allocation records (default: %(default)s)",
    )
    out.add_argument(
        "--sys-root",
        type=Path,
        default=defaults.sys_root,
        help="mount point of sysfs, for NUMA nodes (default: %(default)s)",
    )
    out.add_argument(
        "--cgroup-root",
        type=Path,
        default=defaults.cgroup_root,
        help="mount point of control groups version 2, for limits that the driver enforces (default: %(default)s)",
    )
    out.add_argument(
        "--in-container",
        action="store_true",
        help="this program runs in a pod, so search the driver's files below --host-root",
    )
    out.add_argument(
        "--host-root",
        type=Path,
        default=defaults.host_root,
        help="path of the host's root folder, which has the configurations of container runtimes (default: /)",
    )
    out.add_argument(
        "--cdi-dir",
        default=str(defaults.cdi_dir),
        help="folder in which CDI files are written; empty: write none (default: %(default)s)",
    )


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="vgpu-device-plugin",
        description="Offers slices of this host's GPUs to the kubelet, as configured in node.yaml.",
    )
    _add_paths(out)
    logs.add_to(out)
    out.add_argument(
        "--purge", action="store_true", help="end every allocation, remove all files of this program, and exit"
    )
    out.add_argument(
        "--health-clean-period",
        type=float,
        default=CLEAN_S,
        metavar="SECONDS",
        help="time without errors after which a GPU is healthy again (default: %(default).0f)",
    )
    out.add_argument(
        "--metrics-listen",
        default="",
        metavar="HOST:PORT",
        help="serve Prometheus metrics on this address; empty: serve none (default)",
    )
    out.add_argument("--labels", action="store_true", help="write labels for node-feature-discovery (gfd.* options)")
    out.add_argument(
        "--node-labels", action="store_true", help="set the labels of --labels on the Node object; needs --kubeconfig"
    )
    out.add_argument(
        "--unhealthy-taint",
        choices=("none", "any", "all"),
        default="none",
        help="taint this node with NoSchedule while any or all of its GPUs are unhealthy; needs --kubeconfig with a "
        "user who may change taints (a kubelet's user may not; default: %(default)s)",
    )
    out.add_argument(
        "--configs-dir",
        type=Path,
        default=None,
        help="folder of named configurations (default: the folder configs next to the file of --config)",
    )
    out.add_argument(
        "--kubeconfig",
        default="",
        metavar="FILE",
        help="kubeconfig file for the API server, or in-cluster: the pod's service account; also follows this node's "
        "label nvidia.com/device-plugin.config, which names a configuration (default: no API server)",
    )
    out.add_argument("--node-name", default="", help="name of this node (default: NODE_NAME, else the host's name)")
    out.add_argument(
        "--watch-interval",
        type=seconds,
        default=INTERVAL_S,
        metavar="SECONDS",
        help="time between two polls for processes that bypass the library; 0: never (default: %(default)s)",
    )
    options.add_to(out)
    out.add_argument("--version", action="version", version=version())
    return out


def _paths(given: argparse.Namespace) -> Paths:
    return Paths(
        given.config,
        given.kubelet_dir,
        given.run_dir,
        given.state_dir,
        given.sys_root,
        given.cgroup_root,
        given.host_root,
        Path(given.cdi_dir) if given.cdi_dir else None,
        configs_dir=given.configs_dir,
        in_container=given.in_container,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    logs.configure(given, "%(levelname)s %(message)s")
    # From now on, new files and sockets are accessible only to root from the moment of their creation.
    os.umask(0o077)
    lean.with_quiet_servers()
    lean.with_few_arenas()
    from .assembly import Extras, Setup
    from .daemon import Daemon
    from .inject import driver_files
    from .node.nvml import Nvml
    from .offer import settings as node_settings
    from .purge import purge
    from .reconcile.config_choice import ConfigChoice

    paths = _paths(given)
    chosen = options.overrides(vars(given), os.environ)
    node_name = given.node_name or os.environ.get("NODE_NAME", "")
    rest = lean.CoarseTimers().look
    extras = Extras(
        given.metrics_listen,
        given.labels,
        given.kubeconfig,
        node_name,
        given.watch_interval,
        rest,
        given.node_labels,
        given.unhealthy_taint,
    )

    def open_gpus() -> Nvml:
        root = paths.seen_root
        if root == Path("/"):
            return Nvml(paths.sys_root)
        settings = node_settings.load(paths.config, chosen, bool(given.kubeconfig))
        found = driver_files.find(settings.driver_root, settings.dev_root, host_root=root).libraries
        return Nvml(paths.sys_root, next((f"{root}{path}" for name, path in found if name == "libnvidia-ml.so.1"), ""))

    choice = ConfigChoice(paths, chosen, bool(given.kubeconfig))
    setup = Setup(paths, choice, clean_s=given.health_clean_period, extras=extras)
    daemon = Daemon(setup, open_gpus)
    # The signal handlers are installed for a purge too, so that a signal does not interrupt it.
    daemon.stop_on_signals()
    try:
        if given.purge:
            purge(setup)
        else:
            daemon.run()
    except Fatal as fault:
        logs.end(given, "vgpu-device-plugin", fault)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
