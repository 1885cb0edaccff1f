# SPDX-License-Identifier: Apache-2.0
"""Collects data about containers for vgpuctl and Prometheus: their GPU usage, and the findings of the watcher, which
looks for programs that bypass their limits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from .._proto import admin_pb2 as api
from ..allocation.allocation_files import AllocationFiles
from ..allocation.records import RecordStore
from ..node import podresources
from ..node.gauges import Gauges
from ..offer.health import Xids
from ..watch import setup as watch_setup
from ..watch import usage
from ..watch.watcher import Watch


class Containers:
    """Collects the usage of containers. ``gauges`` returns the current measurements of GPUs by UUID. ``xids`` returns
    the Xid errors that the driver reported for one GPU.
    """

    def __init__(
        self,
        records: RecordStore,
        files: AllocationFiles,
        watch: Watch,
        pod_resources: Path,
        gauges: Callable[[Collection[str]], dict[str, Gauges]] = lambda uuids: dict.fromkeys(uuids, Gauges()),
        xids: Callable[[str], Xids] = lambda _uuid: Xids(),
    ) -> None:
        self._records = records
        self._files = files
        self._watch = watch
        self._pod_resources = pod_resources
        self.gauges = gauges
        self.xids = xids
        self._violations = usage.Violations()

    def usages(self) -> list[usage.Usage]:
        """Returns the usage of every allocation (the slices of one container) that has limits, with the pod names from
        the kubelet's PodResources service.
        """
        return self._seen(lambda: podresources.holders(self._pod_resources))

    def count_violations(self) -> None:
        """Counts memory violations without asking the kubelet for pod names. It is called regularly, so that violations
        between two calls of ``usages`` are counted too.
        """
        self._seen(lambda: None)

    def _seen(self, holders: Callable[[], dict[str, podresources.Holder] | None]) -> list[usage.Usage]:
        state = self._watch.state()
        found = usage.of_all(self._records.all(), self._files, holders)
        return self._violations.seen([*found, *usage.of_static(self._files, state)], state)

    def watched(self) -> api.WatchResponse:
        return watch_setup.answer(self._watch.state(), self._records, self._pod_resources)
