# SPDX-License-Identifier: Apache-2.0
"""Keeps the feature file of labels in line with GPUs and configuration."""

from __future__ import annotations

import logging
from pathlib import Path

from .._shared.config import sharing
from ..node.gpus import GpuError, GpuSource
from ..offer.pool import Pool
from ..offer.settings import Settings
from . import labels

log = logging.getLogger(__name__)


class Labeller:
    def __init__(self, source: GpuSource, pool: Pool) -> None:
        self._source = source
        self._pool = pool

    def write(self, settings: Settings) -> None:
        """Faults are logged and end nothing: labels are no reason to offer no GPU."""
        gfd = settings.flags.get("gfd") or {}
        path = Path(gfd.get("outputFile") or labels.FILE)
        machine = labels.machine_type(Path(gfd.get("machineTypeFile") or labels.MACHINE_FILE))
        # What a label says of a GPU that is lost nobody could use.
        gpus = [one for one in self._pool.gpus if not self._pool.is_lost(one.uuid)]
        here = {one.uuid for one in gpus}
        try:
            found = labels.labels(
                gpus,
                [piece for piece in self._pool.slices if piece.uuid in here],
                self._source.driver(),
                machine,
                sharing.mig_strategy(settings.config),
                None if gfd.get("noTimestamp") else labels.now(),
            )
            if labels.write(path, found):
                log.info("%d labels written to %s", len(found), path)
        except (OSError, GpuError) as fault:
            log.warning("the labels in %s are not up to date: %s", path, fault)
