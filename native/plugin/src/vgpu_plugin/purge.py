# SPDX-License-Identifier: Apache-2.0
"""Removes all files of this program from the node."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from .admin import admin_socket
from .allocation.allocation_files import AllocationFiles
from .assembly import Setup
from .inject import cdi
from .node.claim import claimed
from .node.paths import Paths
from .reconcile import labels

if TYPE_CHECKING:
    from .dra.publish import Server

log = logging.getLogger(__name__)


def purge(setup: Setup) -> None:
    """Ends every allocation (use of slices by a container), removes our files, and removes our folders if they contain
    no files of others. If a kubeconfig is given, also removes our data on the Node object. Raises Fatal.
    """
    paths, extras = setup.paths, setup.extras
    with claimed(paths):
        files = AllocationFiles(paths.allocations, setup.mounter)
        for allocation in [*files.present(), *files.static()]:
            files.remove(allocation)
        files.leave()
        if paths.cdi_dir is not None:
            cdi.leave(paths.cdi_dir)
        if extras.labels:
            given = [text for option, text, _where in setup.choice.chosen if option.flag == "output-file"]
            labels.leave(Path(given[-1]) if given else labels.FILE)
        _remove_files(paths)
    # This is done last, so that the host is cleaned even if the API server does not respond.
    if extras.kubeconfig:
        from .node import kube_access, kube_api
        from .reconcile import node_trace

        api = kube_api.Api(kube_access.read(extras.kubeconfig))
        _withdraw(api, extras.node)
        node_trace.leave(api, extras.node)


def _withdraw(api: Server, node: str) -> None:
    """Deletes this node's ResourceSlices. A running kubelet would delete them when our driver is gone, but the kubelet
    may be stopped.
    """
    from .dra.publish import Publisher
    from .node.kube_api import ApiError

    try:
        Publisher(api, api, node, list).withdraw()
    except ApiError as fault:
        # The request fails if the cluster has no ResourceSlices, or if the user may not read them.
        log.info("node %s: its ResourceSlices could not be deleted, if there are any: %s", node, fault)


def _remove_files(paths: Paths) -> None:
    for path in (
        paths.records,
        paths.records.with_suffix(".broken"),
        paths.records.with_suffix(".new"),
        paths.config_name,
        paths.last_offer,
        paths.last_offer.with_suffix(".new"),
        paths.admin_socket,
        paths.admin_socket.with_name(admin_socket.EARLY),
        paths.lock,
    ):
        path.unlink(missing_ok=True)
    for folder in (paths.allocations, paths.run_dir, paths.state_dir, paths.config.parent):
        with contextlib.suppress(OSError):  # The folder is missing, or contains files of others.
            folder.rmdir()
