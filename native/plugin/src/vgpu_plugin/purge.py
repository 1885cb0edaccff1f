# SPDX-License-Identifier: Apache-2.0
"""Removes everything that this program left on the node."""

from __future__ import annotations

import contextlib
from pathlib import Path

from .admin import admin_socket
from .allocation.allocation_files import AllocationFiles
from .assembly import Setup
from .inject import cdi
from .node.claim import claimed
from .node.paths import Paths
from .reconcile import labels


def purge(setup: Setup) -> None:
    """Ends every allocation and removes our files; a folder goes where nothing of others is in it. With a kubeconfig,
    our traces on the node's object too. Raises Fatal.
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
    # Last: everything on the host goes whether or not the API answers.
    if extras.kubeconfig:
        from .node import kube_access, kube_api
        from .reconcile import node_trace

        node_trace.leave(kube_api.Api(kube_access.read(extras.kubeconfig)), extras.node)


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
        with contextlib.suppress(OSError):  # not empty, or not there
            folder.rmdir()
