# SPDX-License-Identifier: Apache-2.0
"""The pieces that this node offered last, kept over restarts and reboots.

A program that starts with another split must not offer a GPU again while slices of the former one are held: both
together are more than the GPU has.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from .._shared.config.sharing import Piece
from ..node.gpus import Gpu

FORMAT = 1

log = logging.getLogger(__name__)


class LastOffer:
    """One file, replaced by a rename. Without it, or with one that cannot be read, nothing is remembered."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pieces = self._read()

    def _read(self) -> list[Piece]:
        try:
            data = json.loads(self._path.read_text())
            if data["version"] != FORMAT:
                raise ValueError(f"version is {data['version']!r}, expected {FORMAT}")
            return [Piece(**one) for one in data["pieces"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as fault:
            log.warning("%s could not be read (%s): GPUs whose slices are held are offered again", self._path, fault)
            return []

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

    def persist(self, pieces: Iterable[Piece]) -> None:
        """A disk that is full costs the memory of this alone, so it is logged and ends nothing."""
        fresh = list(pieces)
        if fresh == self._pieces:
            return
        text = json.dumps({"version": FORMAT, "pieces": [one._asdict() for one in fresh]}, separators=(",", ":"))
        new = self._path.with_suffix(".new")
        try:
            new.write_text(text)
            os.replace(new, self._path)
        except OSError as fault:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            log.warning("%s could not be written (%s): after a restart GPUs are offered again", self._path, fault)
            return
        self._pieces = fresh
