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

    def pod(self, namespace: str, name: str) -> dict[str, Any]:
        """Raises NoAnswer."""
        where = ("--namespace", namespace) if namespace else ()
        found: dict[str, Any] = self._asked("get", "pod", name, *where)
        return found

    def annotate(self, namespace: str, name: str, key: str, value: str) -> None:
        """Writes an annotation of a pod. Raises NoAnswer."""
        where = ("--namespace", namespace) if namespace else ()
        self._asked("annotate", "pod", name, *where, "--overwrite", f"{key}={value}")

    def events(self, namespace: str, uid: str) -> list[dict[str, Any]]:
        """Of one object. Raises NoAnswer."""
        return self._items("get", "events", "--namespace", namespace, "--field-selector", f"involvedObject.uid={uid}")

    def _items(self, *words: str) -> list[dict[str, Any]]:
        return list(self._asked(*words).get("items") or [])

    def _asked(self, *words: str) -> dict[str, Any]:
        command = [*self._command, *words, "--output", "json"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except FileNotFoundError:
            raise NoAnswer(f"{command[0]} is not on the PATH; install kubectl, or set {KUBECTL}") from None
        except (OSError, subprocess.TimeoutExpired) as fault:
            raise NoAnswer(str(fault)) from None
        if done.returncode != 0:
            raise NoAnswer(done.stderr.strip() or f"{' '.join(command)}: exit status {done.returncode}")
        try:
            found = json.loads(done.stdout)
        except ValueError as fault:
            raise NoAnswer(f"{' '.join(command)}: its answer is no JSON: {fault}") from None
        if not isinstance(found, dict):
            raise NoAnswer(f"{' '.join(command)}: expected an object, found {type(found).__name__}")
        return found


def _where(namespace: str) -> list[str]:
    return ["--namespace", namespace] if namespace else ["--all-namespaces"]
