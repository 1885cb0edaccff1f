# SPDX-License-Identifier: Apache-2.0
"""Reads objects of the cluster by calling kubectl, which knows the user's credentials."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from typing import Any

# Environment variable with the command to call, for users whose kubectl has another name, such as "k3s kubectl".
KUBECTL = "VGPU_KUBECTL"
# Maximum seconds of a call of kubectl. The limit is high, because a list of 100 000 pods takes long.
TIMEOUT_S = 120.0


class NoAnswer(Exception):
    """Raised if kubectl is missing or failed. The text contains kubectl's error message."""


class Cluster:
    def __init__(self, options: Sequence[str] = ()) -> None:
        """``options``: global options of kubectl, such as --context."""
        self._command = [*os.environ.get(KUBECTL, "kubectl").split(), *options]

    def nodes(self) -> list[dict[str, Any]]:
        """Returns all nodes. Raises NoAnswer."""
        return self._items("get", "nodes")

    def pods(self, namespace: str = "") -> list[dict[str, Any]]:
        """Returns the pods of one namespace, or of all if it is empty. Raises NoAnswer."""
        return self._items("get", "pods", *_where(namespace))

    def resource_slices(self) -> list[dict[str, Any]]:
        """Returns all ResourceSlices. Raises NoAnswer, also if Kubernetes has no such resource (before 1.34)."""
        return self._items("get", "resourceslices.v1.resource.k8s.io")

    def resource_claims(self, namespace: str = "") -> list[dict[str, Any]]:
        """Returns the ResourceClaims of one namespace, or of all if it is empty. Raises NoAnswer."""
        return self._items("get", "resourceclaims.v1.resource.k8s.io", *_where(namespace))

    def pod(self, namespace: str, name: str) -> dict[str, Any]:
        """Returns a pod. Raises NoAnswer."""
        where = ("--namespace", namespace) if namespace else ()
        found: dict[str, Any] = self._asked("get", "pod", name, *where)
        return found

    def events(self, namespace: str, uid: str) -> list[dict[str, Any]]:
        """Returns the events about one object. Raises NoAnswer."""
        return self._items("get", "events", "--namespace", namespace, "--field-selector", f"involvedObject.uid={uid}")

    def metrics(self, node: str, port: int) -> str:
        """Returns the metrics of a node's exporter, read through the API server's proxy. Raises NoAnswer."""
        return self._said("get", "--raw", f"/api/v1/nodes/{node}:{port}/proxy/metrics")

    def node(self, name: str) -> dict[str, Any]:
        """Returns a node. Raises NoAnswer."""
        return self._asked("get", "node", name)

    def annotate(self, kind: str, name: str, namespace: str, note: str, value: str | None) -> None:
        """Writes an annotation; None removes it. Raises NoAnswer."""
        where = ("--namespace", namespace) if namespace else ()
        words = [f"{note}={value}", "--overwrite"] if value is not None else [f"{note}-"]
        self._said("annotate", kind, name, *where, *words)

    def evict(self, namespace: str, name: str, body: dict[str, Any]) -> None:
        """Evicts a pod, which its PodDisruptionBudget may refuse. Raises NoAnswer."""
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/eviction"
        self._said("create", "--raw", path, "--filename", "-", text=json.dumps(body))

    def _items(self, *words: str) -> list[dict[str, Any]]:
        return list(self._asked(*words).get("items") or [])

    def _said(self, *words: str, text: str | None = None) -> str:
        command = [*self._command, *words]
        try:
            done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except FileNotFoundError:
            raise NoAnswer(f"{command[0]} is not on the PATH; install kubectl, or set {KUBECTL}") from None
        except (OSError, subprocess.TimeoutExpired) as fault:
            raise NoAnswer(str(fault)) from None
        if done.returncode != 0:
            raise NoAnswer(done.stderr.strip() or f"{' '.join(command)}: exit status {done.returncode}")
        return done.stdout

    def _asked(self, *words: str) -> dict[str, Any]:
        command = [*self._command, *words, "--output", "json"]
        try:
            found = json.loads(self._said(*words, "--output", "json"))
        except ValueError as fault:
            raise NoAnswer(f"{' '.join(command)}: expected JSON as output: {fault}") from None
        if not isinstance(found, dict):
            raise NoAnswer(f"{' '.join(command)}: expected an object, found {type(found).__name__}")
        return found


def _where(namespace: str) -> list[str]:
    return ["--namespace", namespace] if namespace else ["--all-namespaces"]
