# SPDX-License-Identifier: Apache-2.0
"""Follows the node label that selects a configuration, and reports the outcome on the node: a condition for the current
state, an event for each change. The module also maintains annotations and feature labels of the node, the amounts of
resources that no device plugin registers, and the health of its GPUs.
"""

from __future__ import annotations

import datetime
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import quote

from .._shared.pods import annotations as pod_annotations
from ..node.kube_api import ApiError
from ..node.persist import persist
from . import node_capacity, node_features, node_health
from .config_choice import LABEL
from .reconfigure import REFUSED

CONDITION, DRAINED = "VgpuConfiguration", pod_annotations.DRAINED
COMPONENT = "vgpu-device-plugin"
GONE, CONFLICT = 410, 409
# Maximum length of an event's message that the API server accepts.
LONGEST_TEXT = 1000

log = logging.getLogger(__name__)


class Client(Protocol):
    """The methods of kube_api.Api that this module calls."""

    @property
    def server(self) -> str: ...

    def get(self, path: str) -> dict[str, Any]: ...

    def watch(self, path: str) -> Any: ...

    def patch(self, path: str, body: dict[str, Any]) -> dict[str, Any]: ...

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]: ...

    def stop(self) -> None: ...


class NodeLabel:
    """Follows the node label and reports outcomes. ``run`` follows the label and ``report`` writes outcomes, each in
    its own thread, so that a slow write does not delay a change of the label. ``choose`` is called with each name that
    the label gets, and with an empty name if the node has no label.
    """

    def __init__(
        self,
        api: Client,
        node: str,
        choose: Callable[[str], None],
        drain: Callable[[frozenset[str]], None] = lambda _uuids: None,
    ) -> None:
        """``drain`` is called with the UUIDs of the GPUs that an administrator drains."""
        self._api = api
        self._node = node
        self._choose = choose
        self._drain = drain
        self._path = f"/api/v1/nodes/{quote(node, safe='')}"
        self._stopping = threading.Event()
        self._news = threading.Condition()
        self._outcome: tuple[str, str] | None = None
        self._reported: tuple[str, str] | None = None
        self._name: str | None = None
        # Annotation → its desired text, and whether to add the annotation if it is missing.
        self._wanted: dict[str, tuple[str, bool]] = {}
        # Annotation → its text on the node as last seen.
        self._found: dict[str, str | None] = {}
        self._read = False
        # The Node object as last seen.
        self._node_seen: dict[str, Any] = {}
        # Desired amounts of resources, feature labels and GPU health. None means that this program does not maintain
        # them on the node.
        self._amounts: dict[str, int] | None = None
        self._features: dict[str, str] | None = None
        self._keeps_features = True
        self._health: node_health.Health | None = None
        # Patches that are still to be sent: (subject, path below the node) → patch.
        self._dues: dict[tuple[str, str], dict[str, Any]] = {}
        # Errors in following the label or reporting: subject → reason; empty if there is none.
        self.faults: dict[str, str] = {}

    def notes(self) -> list[str]:
        return [f"{what}: {why}" for what, why in sorted(self.faults.items())]

    def tell(self, outcome: tuple[str, str]) -> None:
        """Sets the current outcome, (reason, message); an unchanged outcome is not reported again."""
        with self._news:
            if outcome != self._outcome:
                self._outcome = outcome
                self._news.notify_all()

    def annotate(self, name: str, text: str, add: bool = True) -> None:
        """Sets the desired text of an annotation of the node. ``add``: also if the annotation is missing. The text is
        restored when others change it.
        """
        with self._news:
            if self._wanted.get(name) != (text, add):
                self._wanted[name] = text, add
                self._news.notify_all()

    def list_resources(self, amounts: dict[str, int]) -> None:
        """Sets resource name → amount in the node's capacity. An amount is restored when the kubelet or others remove
        it.
        """
        with self._news:
            if amounts != self._amounts:
                self._amounts = amounts
                self._find_due()

    def set_features(self, labels: dict[str, str], keep: bool = True) -> None:
        """Sets the feature labels of the node. ``keep``: whether labels that others change are restored; otherwise they
        are written once.
        """
        with self._news:
            self._features, self._keeps_features = labels, keep
            self._find_due()

    def tell_health(self, health: node_health.Health) -> None:
        """Sets the health of the GPUs, and whether the node gets a taint for it. Condition and taint are restored when
        others remove them.
        """
        with self._news:
            if health != self._health:
                self._health = health
                self._find_due()

    def _find_due(self) -> None:
        if not self._node_seen:
            return
        node = self._node_seen
        if self._amounts is not None:
            self._put_due("resources", "/status", node_capacity.patch(node, self._amounts))
        if self._features is not None:
            self._put_due("labels", "", node_features.patch(node["metadata"], self._features))
            if not self._keeps_features:
                self._features = None
        if self._health is not None:
            patch = node_health.condition_patch(node, self._health, _now(), LONGEST_TEXT)
            self._put_due("taint", "", node_health.taint_patch(node, self._health.tainted))
            self._put_due("health", "/status", patch)
        self._news.notify_all()

    def _put_due(self, what: str, below: str, patch: dict[str, Any] | None) -> None:
        self._dues.pop((what, below), None)
        if patch:
            self._dues[what, below] = patch

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
        """Reads the node and watches it until the server ends the watch."""
        node = self._api.get(self._path)
        self._saw(node)
        self.faults.pop(f"the label {LABEL} of node {self._node} is not followed", None)
        selector = quote(f"metadata.name={self._node}", safe="")
        version = quote(str((node.get("metadata") or {}).get("resourceVersion") or ""), safe="")
        for event in self._api.watch(f"/api/v1/nodes?fieldSelector={selector}&resourceVersion={version}"):
            kind, found = event.get("type"), event.get("object") or {}
            if kind == "ERROR":
                # Status 410 means that the resource version is too old, so the node is read again.
                if found.get("code") != GONE:
                    raise ApiError(int(found.get("code") or 0), f"{self._api.server}: watch: {found.get('message')}")
                return
            if kind in ("ADDED", "MODIFIED"):
                self._saw(found)

    def _saw(self, node: dict[str, Any]) -> None:
        metadata = node.get("metadata") or {}
        self._keep(metadata)
        with self._news:
            self._node_seen = {key: node.get(key) or {} for key in ("metadata", "spec", "status")}
            self._find_due()
        self._drain(pod_annotations.read_drained(str((metadata.get("annotations") or {}).get(DRAINED) or "")))
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
        """Returns the annotations whose text on the node differs from the desired text. Returns none before the node is
        first read.
        """
        return {
            key: text
            for key, (text, add) in self._wanted.items()
            if self._read and (add or key in self._found) and self._found.get(key) != text
        }

    def _report(self) -> None:
        with self._news:
            self._news.wait_for(
                lambda: self._stopping.is_set() or self._missing() or self._dues or self._outcome != self._reported
            )
            outcome, missing, dues, self._dues = self._outcome, self._missing(), self._dues, {}
        if self._stopping.is_set():
            return
        tasks: list[Callable[[], None]] = [lambda: self._write(missing)] if missing else []
        tasks += [functools.partial(self._write_due, key, patch) for key, patch in dues.items()]
        if outcome is not None and outcome != self._reported:
            tasks.append(lambda: self._write_outcome(*outcome))
        faults = []
        for task in tasks:
            try:
                task()
            except ApiError as fault:
                # One missing permission must not prevent the other writes.
                faults.append(fault)
        if faults:
            raise faults[0]

    def _write_outcome(self, reason: str, text: str) -> None:
        now, written = _now(), (reason, text)
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
        self._reported = written

    def _write(self, missing: dict[str, str]) -> None:
        """Writes annotations. Their texts are stored in ``_found`` before the call, because the watch may deliver a
        newer state before the response arrives. Annotations that the server did not store are written again later.
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

    def _write_due(self, key: tuple[str, str], patch: dict[str, Any]) -> None:
        """Sends a pending patch. After an error the patch is pending again, unless the watch has created a newer one
        meanwhile.
        """
        try:
            self._api.patch(self._path + key[1], patch)
        except ApiError as fault:
            if fault.status != CONFLICT:
                with self._news:
                    self._dues.setdefault(key, patch)
                raise
            # The node was changed meanwhile, so the server refused the patch; the watch delivers the new version.
            log.debug("the %s of node %s was changed by others meanwhile", key[0], self._node)

    def _event(self, reason: str, text: str, now: str) -> dict[str, Any]:
        return {
            "metadata": {"generateName": f"{self._node}.", "namespace": "default"},
            # The kubelet does the same: in its events about a node, the uid of the object is the node's name.
            "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": self._node, "uid": self._node},
            "type": "Warning" if reason == REFUSED else "Normal",
            "reason": f"{CONDITION}{reason}",
            "message": text,
            "source": {"component": COMPONENT, "host": self._node},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
