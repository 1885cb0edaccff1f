# SPDX-License-Identifier: Apache-2.0
"""The kubelet's file of claims: it lists which pods use which claim, and the devices that the drivers returned for it.
The file survives a restart of the kubelet.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .claim_driver import ClaimRef, Refused

STATE = "dra_manager_state"
HEAD = {"kind": "DRACheckpoint", "apiVersion": "checkpoint.dra.kubelet.k8s.io/v1"}


class ClaimState:
    """The file, which is read again at each call. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / STATE

    def add(self, claim: ClaimRef, pod_uid: str) -> None:
        """Adds a pod to a claim. Raises Refused if a claim with this name and another uid still exists."""
        entries = self._read()
        found = next(
            (one for one in entries if (one["Namespace"], one["ClaimName"]) == (claim.namespace, claim.name)), None
        )
        if found is None:
            found = {
                "ClaimUID": claim.uid,
                "ClaimName": claim.name,
                "Namespace": claim.namespace,
                "PodUIDs": {},
                "DriverState": {driver: {"Devices": None} for driver in claim.drivers},
            }
            entries.append(found)
        elif found["ClaimUID"] != claim.uid:
            raise Refused(
                f"old ResourceClaim with same name {claim.name} and different UID {found['ClaimUID']} still exists "
                "(previous pod force-deleted?!)"
            )
        found["PodUIDs"][pod_uid] = {}
        self._write(entries)

    def add_devices(self, uid: str, driver: str, devices: list[dict[str, Any]]) -> None:
        """Adds devices to the known devices of a claim. Kubelets up to 1.36 keep the earlier devices, so a later
        response replaces none.
        """
        entries = self._read()
        for one in entries:
            if one["ClaimUID"] == uid:
                state = one["DriverState"][driver]
                state["Devices"] = [*(state["Devices"] or ()), *devices]
        self._write(entries)

    def without(self, uid: str, pod_uid: str) -> ClaimRef | None:
        """Removes the pod from a claim that other pods use too, and returns None. If it is the claim's last pod,
        removes nothing and returns the claim. Returns None if the claim is unknown.
        """
        entries = self._read()
        for one in entries:
            if one["ClaimUID"] != uid:
                continue
            if len(one["PodUIDs"]) <= 1:
                return ClaimRef(one["Namespace"], one["ClaimName"], uid, tuple(one["DriverState"]))
            one["PodUIDs"].pop(pod_uid, None)
            self._write(entries)
        return None

    def remove(self, uid: str) -> None:
        self._write([one for one in self._read() if one["ClaimUID"] != uid])

    def pods(self) -> set[str]:
        return {pod for one in self._read() for pod in one["PodUIDs"]}

    def claims_of(self, pod_uid: str) -> list[str]:
        return [one["ClaimUID"] for one in self._read() if pod_uid in one["PodUIDs"]]

    def devices(self, uid: str, request: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields driver and device of each device that belongs to the request of the claim, or to the whole claim if
        the request is empty.
        """
        for one in self._read():
            for driver, state in one["DriverState"].items() if one["ClaimUID"] == uid else ():
                for device in state["Devices"] or ():
                    if not request or not device["RequestNames"] or request in device["RequestNames"]:
                        yield driver, device

    def ids(self, uid: str, request: str) -> list[str]:
        return [name for _driver, device in self.devices(uid, request) for name in device["CDIDeviceIDs"] or ()]

    def _read(self) -> list[dict[str, Any]]:
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return []
        found: list[dict[str, Any]] = json.loads(json.loads(text)["Data"])["ClaimInfoStateList"]
        return found

    def _write(self, entries: list[dict[str, Any]]) -> None:
        data = json.dumps({**HEAD, "ClaimInfoStateList": entries})
        # The kubelet's file store also writes a temporary file and renames it, so a reader never sees a part.
        fresh = self._path.with_name(f".{STATE}")
        fresh.write_text(json.dumps({"Data": data, "Checksum": zlib.crc32(data.encode())}))
        os.replace(fresh, self._path)
