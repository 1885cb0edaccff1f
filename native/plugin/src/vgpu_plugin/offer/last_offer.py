# SPDX-License-Identifier: Apache-2.0
"""The slices (parts of GPUs) and the GPUs that this node offered last, saved over restarts and reboots.

If the program starts with a configuration that splits a GPU differently, the new slices must not be offered while
slices of the former split are allocated, because together they exceed the GPU. A GPU that was offered before and is
missing now is reported as lost.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .._shared.config.sharing import Piece
from ..node.gpus import Gpu, MigDevice

FORMAT = 1
# Fields of a GPU that are not saved, because they are read from the driver at each start: its links to other GPUs.
NOT_KEPT = ("links",)

log = logging.getLogger(__name__)


class LastOffer:
    """Reads and writes the file with the last offer, and replaces it by a rename. If the file is missing or unreadable,
    the program starts as if the node had offered nothing before.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pieces, self._gpus = self._read()

    def _read(self) -> tuple[list[Piece], list[Gpu]]:
        try:
            data = json.loads(self._path.read_text())
            if data["version"] != FORMAT:
                raise ValueError(f"version is {data['version']!r}, expected {FORMAT}")
            # Older versions of this program wrote files without GPUs.
            return [Piece(**one) for one in data["pieces"]], [_gpu(one) for one in data.get("gpus", [])]
        except FileNotFoundError:
            return [], []
        except (OSError, ValueError, KeyError, TypeError) as fault:
            log.warning(
                "%s could not be read (%s): GPUs with allocated slices of a former configuration are offered at once",
                self._path,
                fault,
            )
            return [], []

    def with_lost(self, gpus: Sequence[Gpu]) -> list[Gpu]:
        """Returns the GPUs that are present and those that were offered before and are missing, in NVML's order."""
        return with_lost(gpus, self._gpus)

    def before(self, gpus: Iterable[Gpu], pieces: Iterable[Piece]) -> list[Piece]:
        """Returns for each GPU the slices that were offered before. For a GPU that is new, or that has other MIG
        devices now, returns the GPU's slices from ``pieces``, which follow from the present configuration.
        """
        out = []
        fresh = list(pieces)
        for gpu in gpus:
            devices = {gpu.uuid, *(one.uuid for one in gpu.mig)}
            old = [one for one in self._pieces if one.uuid == gpu.uuid]
            known = bool(old) and all(one.device in devices for one in old)
            out += old if known else [one for one in fresh if one.uuid == gpu.uuid]
        return out

    def persist(self, pieces: Iterable[Piece], gpus: Iterable[Gpu]) -> None:
        """Saves slices and GPUs. An error, such as a full disk, is only logged, because the program can offer slices
        without this file.
        """
        fresh, known = list(pieces), list(gpus)
        if fresh == self._pieces and _facts(known) == _facts(self._gpus) and self._path.exists():
            return
        data = {"version": FORMAT, "pieces": [one._asdict() for one in fresh], "gpus": _facts(known)}
        text = json.dumps(data, separators=(",", ":"))
        new = self._path.with_suffix(".new")
        try:
            new.write_text(text)
            os.replace(new, self._path)
        except OSError as fault:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            log.warning(
                "%s could not be written (%s): after a restart, GPUs with allocated slices are offered at once",
                self._path,
                fault,
            )
            return
        self._pieces, self._gpus = fresh, known


def with_lost(gpus: Sequence[Gpu], known: Iterable[Gpu]) -> list[Gpu]:
    """Returns ``gpus`` and those of ``known`` that are lost. A known GPU whose PCI slot now has another GPU was
    replaced, so it is not lost.
    """
    here, places = {gpu.uuid for gpu in gpus}, {gpu.pci for gpu in gpus}
    lost = [gpu for gpu in known if gpu.uuid not in here and gpu.pci not in places]
    return sorted([*gpus, *lost], key=lambda gpu: gpu.index)


def _facts(gpus: Iterable[Gpu]) -> list[dict[str, Any]]:
    return [{key: value for key, value in asdict(gpu).items() if key not in NOT_KEPT} for gpu in gpus]


def _gpu(facts: dict[str, Any]) -> Gpu:
    """Converts the JSON form of a GPU to a Gpu. Raises TypeError or KeyError if the form is invalid."""
    mig = (
        MigDevice(**dict(one, attributes=tuple((name, value) for name, value in one["attributes"])))
        for one in facts["mig"]
    )
    return Gpu(**dict(facts, mig=tuple(mig)))
