# SPDX-License-Identifier: Apache-2.0
"""Follows the label of this node that names a configuration, and says on the node what became of it: a condition for
how it is now, an event for each change. Keeps annotations and feature labels of the node too, and resources that no
plugin registers.
"""

from __future__ import annotations

import datetime
import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import quote

from ..node.kube_api import ApiError
from . import node_capacity, node_features
from .config_choice import LABEL
from .persist import persist
from .reconfigure import REFUSED

CONDITION = "VgpuConfiguration"
COMPONENT = "vgpu-device-plugin"
GONE = 410
# What the API server accepts of an event's text.
LONGEST_TEXT = 1000

log = logging.getLogger(__name__)


class Client(Protocol):
    """What is needed of kube_api.Api."""

    @property
    def server(self) -> str: ...

    def get(self, path: str) -> dict[str, Any]: ...

    def watch(self, path: str) -> Any: ...

    def patch(self, path: str, body: dict[str, Any]) -> dict[str, Any]: ...

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]: ...

    def stop(self) -> None: ...


class NodeLabel:
    """``run`` follows the label and ``report`` tells outcomes, a thread each: a server that is slow to take a report
    delays no change of the label. ``choose`` is called with each name, empty without the label.
    """

    def __init__(self, api: Client, node: str, choose: Callable[[str], None]) -> None:
        self._api = api
        self._node = node
        self._choose = choose
        self._path = f"/api/v1/nodes/{quote(node, safe='')}"
        self._stopping = threading.Event()
        self._news = threading.Condition()
        self._outcome: tuple[str, str] | None = None
        self._reported: tuple[str, str] | None = None
        self._name: str | None = None
        # Annotations that the node is to have, and those that it has.
        self._wanted: dict[str, tuple[str, bool]] = {}
        self._found: dict[str, str | None] = {}
        self._read = False
        # The node as it was seen, the resources that it is to have, and the request that is due for them.
        self._node_seen: dict[str, Any] = {}
        self._amounts: dict[str, int] | None = None
        self._due: dict[str, Any] | None = None
        # The same for feature labels; None: they are left as they are.
        self._features: dict[str, str] | None = None
        self._keeps_features = True
        self._features_due: dict[str, Any] | None = None
        # Why the label is not followed, or the outcome not reported; empty while all is well.
        self.faults: dict[str, str] = {}

    def notes(self) -> list[str]:
        return [f"{what}: {why}" for what, why in sorted(self.faults.items())]

    def tell(self, outcome: tuple[str, str]) -> None:
        """The outcome of now, a word and a sentence; the same again is reported once."""
        with self._news:
            if outcome != self._outcome:
                self._outcome = outcome
                self._news.notify_all()

    def annotate(self, name: str, text: str, add: bool = True) -> None:
        """What an annotation of the node is to say; ``add``: also where the node has none of that name. Written again
        where somebody changes it.
        """
        with self._news:
            if self._wanted.get(name) != (text, add):
                self._wanted[name] = text, add
                self._news.notify_all()

    def list_resources(self, amounts: dict[str, int]) -> None:
        """Name → amount in the node's capacity. Written again where the kubelet or somebody else drops it."""
        with self._news:
            if amounts != self._amounts:
                self._amounts = amounts
                self._find_due()

    def set_features(self, labels: dict[str, str], keep: bool = True) -> None:
        """The feature labels of the node. ``keep``: written again where somebody changes them; else once."""
        with self._news:
            self._features, self._keeps_features = labels, keep
            self._find_due()

    def _find_due(self) -> None:
        if not self._node_seen:
            return
        if self._amounts is not None:
            self._due = node_capacity.patch(self._node_seen, self._amounts)
        if self._features is not None:
            self._features_due = node_features.patch(self._node_seen["metadata"], self._features)
            if not self._keeps_features:
                self._features = None
        self._news.notify_all()

    def stop(self) -> None:
        self._stopping.set()
        self._api.stop()
        with self._news:
            self._news.notify_all()

    def run(self) -> None:
        persist(self._follow, self._stopping, self.faults, f"the label {LABEL} of node {self._node} is not followed")

    def report(self) -> None:
        trouble = f"the outcome of the configuration is not reported on node {self._node}"
        persist(self._report, self._stopping, self.faults, trouble)

    def _follow(self) -> None:
        """Reads the node and follows it until the server ends the watch."""
        node = self._api.get(self._path)
        self._saw(node)
        self.faults.pop(f"the label {LABEL} of node {self._node} is not followed", None)
        selector = quote(f"metadata.name={self._node}", safe="")
        version = quote(str((node.get("metadata") or {}).get("resourceVersion") or ""), safe="")
        for event in self._api.watch(f"/api/v1/nodes?fieldSelector={selector}&resourceVersion={version}"):
            kind, found = event.get("type"), event.get("object") or {}
            if kind == "ERROR":
                # 410: the version is too old for the server; the node is read again.
                if found.get("code") != GONE:
                    raise ApiError(int(found.get("code") or 0), f"{self._api.server}: watch: {found.get('message')}")
                return
            if kind in ("ADDED", "MODIFIED"):
                self._saw(found)

    def _saw(self, node: dict[str, Any]) -> None:
        metadata = node.get("metadata") or {}
        self._keep(metadata)
        with self._news:
            self._node_seen = {"metadata": metadata, "status": node.get("status") or {}}
            self._find_due()
        name = str((metadata.get("labels") or {}).get(LABEL) or "")
        if name != self._name:
            if self._name is not None or name:
                log.info('the label %s of node %s names "%s"', LABEL, self._node, name)
            self._name = name
            self._choose(name)

    def _keep(self, metadata: dict[str, Any]) -> None:
        with self._news:
            self._found = dict(metadata.get("annotations") or {})
            self._read = True
            self._news.notify_all()

    def _missing(self) -> dict[str, str]:
        """Annotations that differ, once the node was read."""
        return {
            key: text
            for key, (text, add) in self._wanted.items()
            if self._read and (add or key in self._found) and self._found.get(key) != text
        }

    def _report(self) -> None:
        with self._news:
            self._news.wait_for(
                lambda: (
                    self._stopping.is_set()
                    or self._missing()
                    or self._due
                    or self._features_due
                    or self._outcome != self._reported
                )
            )
            outcome, missing, due, self._due = self._outcome, self._missing(), self._due, None
            features, self._features_due = self._features_due, None
        if self._stopping.is_set():
            return
        if missing:
            self._write(missing)
        if due:
            self._write_resources(due)
        if features:
            self._write_features(features)
        if outcome is None or outcome == self._reported:
            return
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        reason, text = outcome
        text = text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"
        condition = {
            "type": CONDITION,
            "status": "False" if reason == REFUSED else "True",
            "reason": reason,
            "message": text,
            "lastHeartbeatTime": now,
            "lastTransitionTime": now,
        }
        self._api.patch(f"{self._path}/status", {"status": {"conditions": [condition]}})
        self._api.post("/api/v1/namespaces/default/events", self._event(reason, text, now))
        self._reported = outcome

    def _write(self, missing: dict[str, str]) -> None:
        """Writes annotations. They count as found before the call, for what the watch says while the answer is on its
        way may be newer than the answer; what the server did not keep is wanted again.
        """
        with self._news:
            self._found.update(missing)
        kept: dict[str, Any] = {}
        try:
            answer = self._api.patch(self._path, {"metadata": {"annotations": missing}})
            kept = (answer.get("metadata") or {}).get("annotations") or {}
        finally:
            with self._news:
                for key, text in missing.items():
                    if kept.get(key) != text and self._found.get(key) == text:
                        self._found[key] = None

    def _write_resources(self, due: dict[str, Any]) -> None:
        """What the watch says meanwhile counts; where the server refuses, the same is due again."""
        try:
            self._api.patch(f"{self._path}/status", due)
        except ApiError:
            with self._news:
                self._due = self._due or due
            raise

    def _write_features(self, due: dict[str, Any]) -> None:
        try:
            self._api.patch(self._path, due)
        except ApiError:
            with self._news:
                self._features_due = self._features_due or due
            raise

    def _event(self, reason: str, text: str, now: str) -> dict[str, Any]:
        return {
            "metadata": {"generateName": f"{self._node}.", "namespace": "default"},
            # As the kubelet has it: the uid of an event about a node is the node's name.
            "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": self._node, "uid": self._node},
            "type": "Warning" if reason == REFUSED else "Normal",
            "reason": f"{CONDITION}{reason}",
            "message": text,
            "source": {"component": COMPONENT, "host": self._node},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
