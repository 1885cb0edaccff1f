# SPDX-License-Identifier: Apache-2.0
"""Objects of the cluster, asked by kubectl itself: whatever it takes to log in, kubectl knows it already."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from typing import Any

# Set by a caller whose kubectl has another name, as k3s.
KUBECTL = "VGPU_KUBECTL"
# A list of 100 000 pods takes its time.
TIMEOUT_S = 120.0


class NoAnswer(Exception):
    """kubectl is not there or failed; the text says which, in its own words."""


class Cluster:
    def __init__(self, options: Sequence[str] = ()) -> None:
        """``options``: of kubectl, such as --context; they come before its command."""
        self._command = [*os.environ.get(KUBECTL, "kubectl").split(), *options]

    def nodes(self) -> list[dict[str, Any]]:
        """Raises NoAnswer."""
        return self._items("get", "nodes")

    def pods(self, namespace: str = "") -> list[dict[str, Any]]:
        """Of one namespace; empty: of all. Raises NoAnswer."""
        return self._items("get", "pods", *_where(namespace))

    def resource_slices(self) -> list[dict[str, Any]]:
        """Raises NoAnswer, also where Kubernetes has none (before 1.34)."""
        return self._items("get", "resourceslices.v1.resource.k8s.io")

    def resource_claims(self, namespace: str = "") -> list[dict[str, Any]]:
        """Of one namespace; empty: of all. Raises NoAnswer."""
        return self._items("get", "resourceclaims.v1.resource.k8s.io", *_where(namespace))

    def pod(self, namespace: str, name: str) -> dict[str, Any]:
        """Raises NoAnswer."""
        where = ("--namespace", namespace) if namespace else ()
        found: dict[str, Any] = self._asked("get", "pod", name, *where)
        return found

    def events(self, namespace: str, uid: str) -> list[dict[str, Any]]:
        """Of one object. Raises NoAnswer."""
        return self._items("get", "events", "--namespace", namespace, "--field-selector", f"involvedObject.uid={uid}")

    def metrics(self, node: str, port: int) -> str:
        """What the exporter of a node says, by the API server's own way to the node. Raises NoAnswer."""
        return self._said("get", "--raw", f"/api/v1/nodes/{node}:{port}/proxy/metrics")

    def node(self, name: str) -> dict[str, Any]:
        """Raises NoAnswer."""
        return self._asked("get", "node", name)

    def annotate(self, kind: str, name: str, namespace: str, note: str, value: str | None) -> None:
        """Writes an annotation; None takes it away. Raises NoAnswer."""
        where = ("--namespace", namespace) if namespace else ()
        words = [f"{note}={value}", "--overwrite"] if value is not None else [f"{note}-"]
        self._said("annotate", kind, name, *where, *words)

    def evict(self, namespace: str, name: str, body: dict[str, Any]) -> None:
        """Asks for the pod's end, which its disruption budget may refuse. Raises NoAnswer."""
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
            raise NoAnswer(f"{' '.join(command)}: its answer is no JSON: {fault}") from None
        if not isinstance(found, dict):
            raise NoAnswer(f"{' '.join(command)}: expected an object, found {type(found).__name__}")
        return found


def _where(namespace: str) -> list[str]:
    return ["--namespace", namespace] if namespace else ["--all-namespaces"]
