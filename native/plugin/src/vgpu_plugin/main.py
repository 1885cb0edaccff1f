# SPDX-License-Identifier: Apache-2.0
"""Command line of vgpu-device-plugin."""

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
        "--run-dir", type=Path, default=defaults.run_dir, help="sockets, allocations (default: %(default)s)"
    )
    out.add_argument("--state-dir", type=Path, default=defaults.state_dir, help="records (default: %(default)s)")
    out.add_argument("--sys-root", type=Path, default=defaults.sys_root, help="sysfs, for NUMA (default: %(default)s)")
    out.add_argument(
        "--cgroup-root",
        type=Path,
        default=defaults.cgroup_root,
        help="version 2 of control groups, for limits that the driver enforces (default: %(default)s)",
    )
    out.add_argument(
        "--in-container",
        action="store_true",
        help="this is a pod: the driver is the host's, below --host-root (default: it is where this program runs)",
    )
    out.add_argument(
        "--host-root",
        type=Path,
        default=defaults.host_root,
        help="the host's root folder, for runtimes' configurations (default: /)",
    )
    out.add_argument(
        "--cdi-dir",
        default=str(defaults.cdi_dir),
        help="where CDI files are written; empty: none (default: %(default)s)",
    )


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="vgpu-device-plugin", description="Offers slices of this host's GPUs to the kubelet, as node.yaml says."
    )
    _add_paths(out)
    logs.add_to(out)
    out.add_argument(
        "--purge", action="store_true", help="end every allocation, remove what this program left, and exit"
    )
    out.add_argument(
        "--health-clean-period",
        type=float,
        default=CLEAN_S,
        metavar="SECONDS",
        help="a GPU without a fault for so long is healthy again (default: %(default).0f)",
    )
    out.add_argument(
        "--metrics-listen",
        default="",
        metavar="HOST:PORT",
        help="serve Prometheus metrics there; empty: nowhere (default)",
    )
    out.add_argument("--labels", action="store_true", help="write labels for node-feature-discovery (gfd.* options)")
    out.add_argument(
        "--node-labels", action="store_true", help="set the same labels on this node's object; needs --kubeconfig"
    )
    out.add_argument(
        "--unhealthy-taint",
        choices=("none", "any", "all"),
        default="none",
        help="taint this node, NoSchedule, while any or all of its GPUs are unhealthy; needs --kubeconfig and a user "
        "who may change taints, which a kubelet may not (default: %(default)s)",
    )
    out.add_argument(
        "--configs-dir", type=Path, default=None, help="named configurations (default: configs next to the file)"
    )
    out.add_argument(
        "--kubeconfig",
        default="",
        metavar="FILE",
        help="follow this node's label nvidia.com/device-plugin.config, which names a configuration; in-cluster: with "
        "the pod's service account (default: the label is not followed)",
    )
    out.add_argument("--node-name", default="", help="name of this node (default: NODE_NAME, else the host's name)")
    out.add_argument(
        "--watch-interval",
        type=seconds,
        default=INTERVAL_S,
        metavar="SECONDS",
        help="between two polls for processes that bypass the library; 0: none (default: %(default)s)",
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
    # New files and sockets are accessible to root only, from their creation on.
    os.umask(0o077)
    lean.with_quiet_servers()
    lean.with_few_arenas()
    from .assembly import Extras, Setup
    from .daemon import Daemon
    from .inject import driver_files
    from .node.gpus import Nvml
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
    # Before a purge too: a signal must not interrupt it.
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
