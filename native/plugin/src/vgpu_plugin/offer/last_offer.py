# SPDX-License-Identifier: Apache-2.0
"""The pieces that this node offered last, and of which GPUs, kept over restarts and reboots.

A program that starts with another split must not offer a GPU again while slices of the former one are held: both
together are more than the GPU has. And a GPU that was offered and is gone is lost, not forgotten.
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
# Found again at each start: the ways to other GPUs.
NOT_KEPT = ("links",)

log = logging.getLogger(__name__)


class LastOffer:
    """One file, replaced by a rename. Without it, or with one that cannot be read, nothing is remembered."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pieces, self._gpus = self._read()

    def _read(self) -> tuple[list[Piece], list[Gpu]]:
        try:
            data = json.loads(self._path.read_text())
            if data["version"] != FORMAT:
                raise ValueError(f"version is {data['version']!r}, expected {FORMAT}")
            # Files of former versions have no GPUs.
            return [Piece(**one) for one in data["pieces"]], [_gpu(one) for one in data.get("gpus", [])]
        except FileNotFoundError:
            return [], []
        except (OSError, ValueError, KeyError, TypeError) as fault:
            log.warning("%s could not be read (%s): GPUs whose slices are held are offered again", self._path, fault)
            return [], []

    def with_lost(self, gpus: Sequence[Gpu]) -> list[Gpu]:
        """The GPUs that are there, and those that were and are not, in NVML's order."""
        return with_lost(gpus, self._gpus)

    def before(self, gpus: Iterable[Gpu], pieces: Iterable[Piece]) -> list[Piece]:
        """What was offered of each GPU; of one that is new, or whose MIG devices are others now, ``pieces``."""
        out = []
        fresh = list(pieces)
        for gpu in gpus:
            devices = {gpu.uuid, *(one.uuid for one in gpu.mig)}
            old = [one for one in self._pieces if one.uuid == gpu.uuid]
            known = bool(old) and all(one.device in devices for one in old)
            out += old if known else [one for one in fresh if one.uuid == gpu.uuid]
        return out

    def persist(self, pieces: Iterable[Piece], gpus: Iterable[Gpu]) -> None:
        """A disk that is full costs the memory of this alone, so it is logged and ends nothing."""
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
            log.warning("%s could not be written (%s): after a restart GPUs are offered again", self._path, fault)
            return
        self._pieces, self._gpus = fresh, known


def with_lost(gpus: Sequence[Gpu], known: Iterable[Gpu]) -> list[Gpu]:
    """``gpus`` and those of ``known`` that are lost; one in whose place is another was replaced, and is not."""
    here, places = {gpu.uuid for gpu in gpus}, {gpu.pci for gpu in gpus}
    lost = [gpu for gpu in known if gpu.uuid not in here and gpu.pci not in places]
    return sorted([*gpus, *lost], key=lambda gpu: gpu.index)


def _facts(gpus: Iterable[Gpu]) -> list[dict[str, Any]]:
    return [{key: value for key, value in asdict(gpu).items() if key not in NOT_KEPT} for gpu in gpus]


def _gpu(facts: dict[str, Any]) -> Gpu:
    """A GPU as JSON keeps it. Raises TypeError, KeyError."""
    mig = (
        MigDevice(**dict(one, attributes=tuple((name, value) for name, value in one["attributes"])))
        for one in facts["mig"]
    )
    return Gpu(**dict(facts, mig=tuple(mig)))
