# SPDX-License-Identifier: Apache-2.0
"""Limits the size of the pods that a program reads. One program reads the pods of all users. Without limits, a pod of 1
MB with only mistyped names would block it for seconds and get an error message of megabytes. The limits are far above
the size of usable pods. The limit for annotations is that of Kubernetes.
"""

from __future__ import annotations

import json
from typing import Any, Sequence

from ..config.kinds import Finding, error

# Maximum numbers in one pod: containers of all kinds, resource names of all containers, and mounts of all containers.
MOST_CONTAINERS, MOST_RESOURCES, MOST_MOUNTS = 500, 1000, 5000
# Maximum lengths in characters: of a resource name, by the API server's rules (253 before the slash and 63 after it),
# and of all annotations together.
LONGEST_NAME, LONGEST_ANNOTATIONS = 317, 256 * 1024
# Maximum length of one annotation in JSON, in characters. This is far above what 500 containers need.
LONGEST_JSON = 64 * 1024
# Maximum number of findings in one refusal, and the maximum length of each in characters.
MOST_FINDINGS, LONGEST_FINDING = 10, 1000
KINDS = ("initContainers", "containers", "ephemeralContainers")


def excess(pod: dict[str, Any]) -> list[Finding]:
    """Returns one finding if the pod exceeds a limit, else none. Reads each entry once, and stops at the first limit
    that is exceeded.
    """
    spec = _mapping(pod.get("spec"))
    # Count the entries even if there is a mapping or a text in place of a list, because a reader iterates over these as
    # well.
    kinds = [one for one in (spec.get(kind) for kind in KINDS) if isinstance(one, (list, dict, str))]
    count = sum(len(one) for one in kinds)
    if count > MOST_CONTAINERS:
        return [error("spec.containers", f"expected at most {MOST_CONTAINERS} containers of all kinds, found {count}")]
    named = mounts = 0
    for container in (container for one in kinds for container in one if isinstance(container, dict)):
        mounts += sum(len(_list(container.get(kind))) for kind in ("volumeMounts", "volumeDevices"))
        if mounts > MOST_MOUNTS:
            return [error("spec.containers", f"expected at most {MOST_MOUNTS} mounts in all")]
        for within in ("limits", "requests"):
            names = _mapping(_mapping(container.get("resources")).get(within))
            named += len(names)
            if named > MOST_RESOURCES:
                return [error("spec.containers", f"expected at most {MOST_RESOURCES} names of resources in all")]
            if any(len(str(name)) > LONGEST_NAME for name in names):
                text = f"expected names of resources of at most {LONGEST_NAME} letters"
                return [error("spec.containers", text)]
    annotations = _mapping(_mapping(pod.get("metadata")).get("annotations"))
    size = sum(len(str(one)) for pair in annotations.items() for one in pair)
    if size > LONGEST_ANNOTATIONS:
        return [error("metadata.annotations", f"expected at most {LONGEST_ANNOTATIONS} letters, found {size}")]
    return []


def read_json(text: Any) -> Any:
    """Parses JSON that the owner of a pod wrote. Raises ValueError."""
    if not isinstance(text, str) or len(text) > LONGEST_JSON:
        raise ValueError(f"expected text of at most {LONGEST_JSON} letters")
    try:
        found = json.loads(text, object_pairs_hook=_once)
        # Reject a lone UTF-16 surrogate. JSON can contain it as an escape, but no reply, event or log can encode it.
        json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return found


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("names a key twice")
    return found


def sentence(findings: Sequence[Finding]) -> str:
    """Returns one text with the first findings and the number of further findings. It is short, because the scheduler's
    reply repeats it for each node of a cluster.
    """
    text = "; ".join(str(one)[:LONGEST_FINDING] for one in findings[:MOST_FINDINGS])
    return text + (f"; and {len(findings) - MOST_FINDINGS} more" if len(findings) > MOST_FINDINGS else "")


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
