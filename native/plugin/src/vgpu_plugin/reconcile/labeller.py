# SPDX-License-Identifier: Apache-2.0
"""Updates the labels of the node after changes of GPUs or configuration, in the feature file (for
node-feature-discovery) and on the Node object."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from .._shared.config import sharing
from .._shared.config.kinds import duration_s
from ..node.gpus import GpuError, GpuSource
from ..offer.pool import Pool
from ..offer.settings import Settings
from . import labels

log = logging.getLogger(__name__)


class Labeller:
    """Writes the labels. ``publish`` sets them on the Node object; its second argument says whether to restore labels
    that others change. ``publish`` is None if no API server is configured.
    """

    def __init__(
        self,
        source: GpuSource,
        pool: Pool,
        to_file: bool = True,
        publish: Callable[[dict[str, str], bool], None] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._pool = pool
        self._to_file = to_file
        self._publish = publish
        self._monotonic = monotonic
        self._written: float | None = None
        # Labels that gpu-feature-discovery does not have.
        self.more: Callable[[], dict[str, str]] = dict

    def write(self, settings: Settings) -> None:
        """Writes the labels; with the setting ``oneshot`` only the first time. Errors are only logged, because slices
        can be offered without labels.
        """
        gfd = settings.flags.get("gfd") or {}
        if self._written is not None and gfd.get("oneshot"):
            return
        try:
            found = self._labels(settings)
        except GpuError as fault:
            log.warning("the labels are not up to date: %s", fault)
            return
        if self._publish is not None:
            self._publish(found, not gfd.get("oneshot"))
        if self._to_file:
            self._write_file(Path(gfd.get("outputFile") or labels.FILE), found)
        self._written = self._monotonic()

    def poll(self, settings: Settings) -> None:
        """Writes the labels again after flags.gfd.sleepInterval, because some labels change although the GPUs do not:
        for example the driver's version after a reload.
        """
        interval_s = duration_s((settings.flags.get("gfd") or {}).get("sleepInterval"))
        if interval_s and (self._written is None or self._monotonic() - self._written >= interval_s):
            self.write(settings)

    def _labels(self, settings: Settings) -> dict[str, str]:
        """Returns all labels of the node. Raises GpuError."""
        gfd = settings.flags.get("gfd") or {}
        # A lost GPU (one that the driver no longer finds) is left out, because pods cannot use it.
        gpus = [one for one in self._pool.gpus if not self._pool.is_lost(one.uuid)]
        here = {one.uuid for one in gpus}
        found = labels.labels(
            gpus,
            [piece for piece in self._pool.slices if piece.uuid in here],
            self._source.driver(),
            labels.machine_type(Path(gfd.get("machineTypeFile") or labels.MACHINE_FILE)),
            sharing.mig_strategy(settings.config),
            None if gfd.get("noTimestamp") else labels.now(),
        )
        return {**found, **self.more()}

    @staticmethod
    def _write_file(path: Path, found: dict[str, str]) -> None:
        try:
            if labels.write(path, found):
                log.info("%d labels written to %s", len(found), path)
        except OSError as fault:
            log.warning("the labels in %s are not up to date: %s", path, fault)
