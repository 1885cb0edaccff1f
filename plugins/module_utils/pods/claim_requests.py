# SPDX-License-Identifier: Apache-2.0
"""A pod's request in any dialect as claims of Kubernetes (Dynamic Resource Allocation), as far as claims can say it.

Amounts of a claim are absolute: MiB and percent of compute on each of ``count`` different GPUs. What they cannot say is
an error and never left out: a pod that believes itself alone on its GPU and is not would be worse. Pure.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Mapping, NamedTuple

from ..config.kinds import Finding, error, show, warning
from . import preferences
from .quantity import mebibytes
from .requests import PodAsk, needs
from .resources import MIB, Ask, annotation

DRIVER, CLASS, REQUEST = "gpu.vgpu.fleet", "vgpu", "gpu"
# Label of a pod or of its namespace, and its values; the pod's wins.
ALLOCATION, CLAIMS, EXTENDER = "vgpu.fleet/allocation", "dra", "extender"
NEXT = f"ask otherwise, or label the pod {ALLOCATION}: {EXTENDER}"
# Objects that one pod makes, and letters of what Kubernetes takes as an expression (10 KiB), with room for the rest.
MOST_TEMPLATES, LONGEST_EXPRESSION = 16, 8 * 1024


class Claims(NamedTuple):
    """``specs``: container → what its claim has as ``spec``."""

    specs: dict[str, dict[str, Any]]
    warnings: tuple[Finding, ...]


def way_of(labels: Mapping[str, Any], of_namespace: str, findings: list[Finding]) -> str:
    """CLAIMS or EXTENDER. ``of_namespace``: the value of the namespace's label, empty for none."""
    own = labels.get(ALLOCATION)
    if own not in (None, CLAIMS, EXTENDER):
        text = f"expected {CLAIMS} or {EXTENDER}, found {show(own)}"
        findings.append(error(f'metadata.labels["{ALLOCATION}"]', text))
    elif own is None and of_namespace not in ("", CLAIMS, EXTENDER):
        findings.append(error("namespace", f"its label {ALLOCATION} is neither {CLAIMS} nor {EXTENDER}; correct it"))
    return str(own or of_namespace or EXTENDER)


def read_claims(ask: PodAsk, findings: list[Finding]) -> Claims:
    """What the pod asks for, by container; faults go to ``findings`` and name the field."""
    selectors = _selectors(ask.preferences, findings)
    _of_pod(ask, findings)
    specs, warnings = {}, []
    for one in ask.asks:
        _of_container(one, findings)
        specs[one.container] = _spec(one, selectors)
        if not one.cores:
            text = "names no compute; by a claim that is the equal part of a GPU, and not what others leave"
            warnings.append(warning(one.where, text))
    if len({template_name(spec) for spec in specs.values()}) > MOST_TEMPLATES:
        findings.append(error("spec.containers", f"ask for more than {MOST_TEMPLATES} different sizes; {NEXT}"))
    return Claims(specs, tuple(warnings))


def template_name(spec: Mapping[str, Any]) -> str:
    """Of the ResourceClaimTemplate for claims of this spec: who asks for the same shares it."""
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return f"vgpu-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def claim_name(container: str, taken: set[str]) -> str:
    """Of a container's claim within its pod: a DNS label of at most 63 letters that is not in ``taken``."""
    name, n = f"vgpu-{container}", 0
    while len(name) > 63 or name in taken:
        digest = hashlib.sha256(f"{container} {n}".encode()).hexdigest()[:8]
        name, n = f"vgpu-{container[:48].rstrip('-')}-{digest}", n + 1
    return name


def _spec(one: Ask, selectors: list[str]) -> dict[str, Any]:
    """With each field that the API server would fill in, so that what it stores is the same."""
    amounts = {"memory": mebibytes(one.memory.amount)}
    if one.cores:
        amounts["cores"] = str(one.cores)
    exactly: dict[str, Any] = {
        "deviceClassName": CLASS,
        "allocationMode": "ExactCount",
        "count": one.gpus,
        "capacity": {"requests": amounts},
    }
    if selectors:
        exactly["selectors"] = [{"cel": {"expression": text}} for text in selectors]
    return {"devices": {"requests": [{"name": REQUEST, "exactly": exactly}]}}


def _of_container(one: Ask, findings: list[Finding]) -> None:
    if one.memory.kind != MIB:
        text = f"asks for {needs(one)}, and a claim has MiB alone; {NEXT}"
        findings.append(error(one.where, text))
    if one.burst_mib:
        findings.append(error(one.where, f"is promised less than its limit, which no claim can be; {NEXT}"))
    if one.one_numa and one.gpus > 1:
        findings.append(error(annotation(preferences.NUMA_BIND), f"GPUs of one NUMA node are in no claim; {NEXT}"))


def _of_pod(ask: PodAsk, findings: list[Finding]) -> None:
    # Low, 1, is what every claim has.
    if ask.priority == 0:
        where = next(one.where for one in ask.asks if one.priority == 0)
        findings.append(error(where, f"names the high priority, and claims have the low one; {NEXT}"))
    chosen = ask.preferences
    if chosen.node_policy:
        text = f"a claim cannot ask for {chosen.node_policy}; {NEXT}"
        findings.append(error(annotation(preferences.NODE_POLICY[0]), text))
    if chosen.gpu_policy or chosen.alone:
        words = ", ".join(filter(None, (chosen.gpu_policy, preferences.MUTEX if chosen.alone else "")))
        findings.append(error(annotation(preferences.GPU_POLICY[0]), f"a claim cannot ask for {words}; {NEXT}"))


def _selectors(chosen: preferences.Preferences, findings: list[Finding]) -> list[str]:
    """CEL on what our driver publishes of a device; the class has seen to it that it is one of ours."""
    uuid, model = (f"device.attributes[{_text(DRIVER)}].{name}.lowerAscii()" for name in ("uuid", "model"))
    listed = (
        (preferences.USE_UUID, chosen.use_uuids, f"{uuid} in {{}}"),
        (preferences.AVOID_UUID, chosen.avoid_uuids, f"!({uuid} in {{}})"),
        (preferences.USE_MODEL, chosen.use_models, f"{{}}.exists(part, {model}.contains(part))"),
        (preferences.AVOID_MODEL, chosen.avoid_models, f"!{{}}.exists(part, {model}.contains(part))"),
    )
    out = []
    for name, words, expression in listed:
        if not words:
            continue
        text = expression.format(_text(list(words)))
        if len(text.encode()) > LONGEST_EXPRESSION:
            findings.append(error(annotation(name), f"is longer than a claim may be; name fewer, or {NEXT}"))
        out.append(text)
    return out


def _text(value: Any) -> str:
    """Strings and lists of CEL; JSON writes them the same, but for halves of characters beyond 16 bits."""
    return json.dumps(value, ensure_ascii=False)
