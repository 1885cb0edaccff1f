# SPDX-License-Identifier: Apache-2.0
"""Keeps this node's ResourceSlices at the API server up to date. It lists and watches them, compares them with the
desired ones, writes the differences, and checks what the server stored.

A kubelet deletes all ResourceSlices of its node when it starts, and when the plugin was gone for half a minute. So they
must be written again.

An API server without consumable capacity (before 1.36, or with the feature gate off) silently drops fields. It would
store a shared GPU as a device for a single claim. So each ResourceSlice is first sent as a dry run. If fields are
missing in the response, nothing is published, and published ResourceSlices are deleted.
"""

from __future__ import annotations

import logging
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from .._shared.pods import quantity
from ..node.kube_api import ApiError
from ..node.persist import FIRST_RETRY_S, LAST_RETRY_S, persist
from .names import DRIVER

PATH = "/apis/resource.k8s.io/v1/resourceslices"
DRY_RUN = "?dryRun=All"
CONFLICT, NOT_FOUND = 409, 404
# Pause after the API server dropped fields. It is long, because only an upgrade of the server helps.
DROPPED_RETRY_S = 300.0

log = logging.getLogger(__name__)


class Server(Protocol):
    """The methods of kube_api.Api that this module calls."""

    def get(self, path: str) -> dict[str, Any]: ...
    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]: ...
    def put(self, path: str, body: dict[str, Any]) -> dict[str, Any]: ...
    def delete(self, path: str) -> dict[str, Any]: ...
    def watch(self, path: str) -> Iterator[dict[str, Any]]: ...
    def stop(self) -> None: ...


class Dropped(Exception):
    """Raised if the API server drops fields. The text names the first dropped field."""


class Publisher:
    """Publishes the ResourceSlices. ``desired`` returns their current specifications. ``run`` and ``follow`` need a
    thread each, and any thread may call ``ask``. ``writer`` and ``watcher`` are separate connections, because a watch
    occupies its connection.
    """

    def __init__(
        self, writer: Server, watcher: Server, node: str, desired: Callable[[], Sequence[Mapping[str, Any]]]
    ) -> None:
        self._api = writer
        self._watched = watcher
        self._node = node
        self._desired = desired
        self._stopping = threading.Event()
        self._asked = threading.Event()
        self._fault = ""
        # The desired specifications at the last attempt, even if the attempt failed.
        self._looked_for: list[Mapping[str, Any]] = []

    def ask(self) -> None:
        """Requests a comparison of the stored and the desired ResourceSlices. Called when something may have
        changed."""
        self._asked.set()

    def poll(self) -> None:
        """Requests a comparison if the desired ResourceSlices have changed without a call of ``ask``. Called regularly.

        It does not read the stored ResourceSlices, because regular lists by 5 000 nodes would be too much load. The
        watch notices changes of the stored ones.
        """
        if list(self._desired()) != self._looked_for:
            self.ask()

    def notes(self) -> list[str]:
        """Returns warnings for the node's administrator."""
        return [self._fault] if self._fault else []

    def run(self) -> None:
        retry_s = FIRST_RETRY_S
        while not self._stopping.is_set():
            self._asked.clear()
            pause: float | None = None
            try:
                self.bring_in_line()
                self._fault, retry_s = "", FIRST_RETRY_S
            except Dropped as fault:
                self._note(str(fault))
                pause = DROPPED_RETRY_S
            except ApiError as fault:
                self._note(f"slices of node {self._node} are not published: {fault}")
                pause, retry_s = retry_s, min(LAST_RETRY_S, 2 * retry_s)
            except Exception as fault:
                # The thread must not end, because the API server would then keep the node's last devices for ever.
                log.exception("publishing failed; it is tried again in %.0f s", LAST_RETRY_S)
                self._fault = f"slices of node {self._node} are not published: {type(fault).__name__}: {fault}"
                pause = LAST_RETRY_S
            self._asked.wait(pause)

    def follow(self) -> None:
        """Watches the stored ResourceSlices and requests a comparison after every event. Events of this program's own
        writes cause a comparison too, which finds no difference.
        """
        faults: dict[str, str] = {}
        while not self._stopping.is_set():
            try:
                persist(self._follow, self._stopping, faults, "stored ResourceSlices are not watched")
            except Exception:
                log.exception("the watch of ResourceSlices failed; it is tried again in %.0f s", LAST_RETRY_S)
                self._stopping.wait(LAST_RETRY_S)

    def _follow(self) -> None:
        version = (self._list().get("metadata") or {}).get("resourceVersion") or ""
        self.ask()
        for _event in self._watched.watch(f"{self._selected()}&resourceVersion={version}"):
            self.ask()

    def stop(self) -> None:
        self._stopping.set()
        self._asked.set()
        self._watched.stop()

    def _note(self, fault: str) -> None:
        if fault != self._fault:
            log.error("%s", fault)
        self._fault = fault

    # ---- one comparison of stored and desired ResourceSlices

    def bring_in_line(self) -> None:
        """Writes the differences between the stored and the desired ResourceSlices. If the API server drops fields,
        deletes the stored ones and raises Dropped. Raises ApiError for other errors.
        """
        self._looked_for = desired = list(self._desired())
        found = sorted(self._own(), key=lambda one: str(one["metadata"]["name"]))
        try:
            self._write(found, desired)
        except Dropped:
            self._delete(self._own())
            raise

    def _write(self, found: list[dict[str, Any]], desired: list[Mapping[str, Any]]) -> None:
        by_name = {str(one["metadata"]["name"]): one for one in found}
        names = [slice_name(self._node, n) for n in range(len(desired))]
        extra = [one for name, one in by_name.items() if name not in names]
        generation = max((int(one["spec"]["pool"].get("generation") or 0) for one in found), default=0)
        changed = [
            name
            for name, spec in zip(names, desired, strict=True)
            if name not in by_name or not same(by_name[name]["spec"], spec)
        ]
        if not changed and not extra:
            return
        # If a pool has several ResourceSlices, the scheduler ignores the pool until all of them have the same
        # generation. So all are written together, with a new generation.
        alone = len(desired) == 1 and not extra
        if not alone or not found:
            generation += 1
            changed = names
        owner = self._owner()
        for name, spec in zip(names, desired, strict=True):
            if name in changed:
                self._put(name, {**spec, "pool": {**spec["pool"], "generation": generation}}, by_name.get(name), owner)
        self._delete(extra)
        log.info("published %d of %d slices of node %s", len(changed), len(desired), self._node)

    def _put(
        self, name: str, spec: dict[str, Any], before: Mapping[str, Any] | None, owner: list[dict[str, Any]]
    ) -> None:
        metadata: dict[str, Any] = {"name": name, "ownerReferences": owner}
        body: dict[str, Any] = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "spec": spec}
        if before is not None:
            metadata["resourceVersion"] = before["metadata"]["resourceVersion"]
        body["metadata"] = metadata
        for path in (DRY_RUN, ""):
            if before is None:
                stored = self._api.post(PATH + path, body)
            else:
                stored = self._api.put(f"{PATH}/{name}{path}", body)
            if lost := first_lost(spec, stored.get("spec") or {}):
                raise Dropped(
                    f"the API server dropped {lost} of slice {name}, so nothing of node {self._node} is published: "
                    "shares of a device need Kubernetes 1.36 with the feature gate DRAConsumableCapacity"
                )

    def _owner(self) -> list[dict[str, Any]]:
        """Returns an owner reference to the Node, so that the ResourceSlices are deleted together with the Node."""
        node = self._api.get(f"/api/v1/nodes/{urllib.parse.quote(self._node, safe='')}")
        uid = node["metadata"]["uid"]
        return [{"apiVersion": "v1", "kind": "Node", "name": self._node, "uid": uid, "controller": True}]

    def _delete(self, slices: Iterable[Mapping[str, Any]]) -> None:
        for one in slices:
            try:
                self._api.delete(f"{PATH}/{one['metadata']['name']}")
            except ApiError as fault:
                if fault.status != NOT_FOUND:
                    raise

    def withdraw(self) -> None:
        """Deletes all ResourceSlices of this driver. Called when the node stops offering devices. Raises ApiError."""
        self._delete(self._own())

    def _own(self) -> list[dict[str, Any]]:
        """Returns the stored ResourceSlices of this driver. The node's credentials permit only a list of this node's
        ResourceSlices, with this selector. The list contains those of all drivers, so it is filtered here.
        """
        return [one for one in self._list().get("items") or () if one["spec"].get("driver") == DRIVER]

    def _list(self) -> dict[str, Any]:
        return self._api.get(self._selected())

    def _selected(self) -> str:
        return f"{PATH}?fieldSelector={urllib.parse.quote(f'spec.nodeName={self._node}', safe='')}"


def slice_name(node: str, number: int) -> str:
    """Returns the name of a ResourceSlice. The number comes first, because since 1.36 the devices of a pool are ordered
    by the names of its ResourceSlices. The name is cut to 253 characters, the maximum in Kubernetes.
    """
    return f"{number:x}-{DRIVER}-{node}"[:253].rstrip("-.")


def same(stored: Mapping[str, Any], desired: Mapping[str, Any]) -> bool:
    """Returns whether two specifications are equal. The generation and the fields that the server adds are ignored."""
    return not first_lost(_without_generation(desired), _without_generation(stored)) and not first_lost(
        _without_generation(stored), _without_generation(desired)
    )


def _without_generation(spec: Mapping[str, Any]) -> dict[str, Any]:
    pool = {key: value for key, value in spec["pool"].items() if key != "generation"}
    return {**spec, "pool": pool}


# Fields of a taint that the server adds.
ADDED = ("timeAdded",)


def first_lost(sent: Any, kept: Any, place: str = "spec") -> str:
    """Returns the path of the first field of ``sent`` that is missing or different in ``kept``, or an empty string if
    there is no such field. Quantities are compared as numbers. An empty value counts as missing.
    """
    if isinstance(sent, Mapping):
        for key, value in sent.items():
            if key in ADDED or value in (None, "", [], {}, False):
                continue
            if not isinstance(kept, Mapping) or key not in kept:
                return f"{place}.{key}"
            if lost := first_lost(value, kept[key], f"{place}.{key}"):
                return lost
        return ""
    if isinstance(sent, (list, tuple)):
        if not isinstance(kept, (list, tuple)) or len(kept) != len(sent):
            return place
        pairs = enumerate(zip(sent, kept, strict=True))
        return next(filter(None, (first_lost(one, other, f"{place}[{n}]") for n, (one, other) in pairs)), "")
    if sent == kept:
        return ""
    number = quantity.exact(sent) if isinstance(sent, str) else None
    return "" if number is not None and number == quantity.exact(kept) else place
