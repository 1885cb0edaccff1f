# SPDX-License-Identifier: Apache-2.0
"""Translates a pod's GPU request into Kubernetes claims (Dynamic Resource Allocation). The request may be in any
dialect (the resource names and annotations of one GPU-sharing project). A claim requests MiB and percent of compute on
each of ``count`` different GPUs. A request that claims cannot express is an error and is never ignored. For example, a
pod must not wrongly rely on having its GPU alone. No I/O.
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
# Label that chooses whether a pod gets its GPUs by claims or by the scheduler's extender, and the two values. A pod's
# label overrides that of its namespace.
ALLOCATION, CLAIMS, EXTENDER = "vgpu.fleet/allocation", "dra", "extender"
NEXT = f"request it in another way, or label the pod {ALLOCATION}: {EXTENDER}"
# The webhook adds two things to a pod: a label, by which such pods are selected, and the annotation with the requests
# of its claims.
LABEL, WANTED = "vgpu.fleet/claims", "wanted"
ANNOTATION = "vgpu.fleet/claims"
# Maximum number of claims of one pod, and maximum bytes of a CEL expression. Kubernetes allows 10 KiB for an
# expression; this is less, to leave a margin.
MOST_CLAIMS, LONGEST_EXPRESSION = 16, 8 * 1024
MOST_SELECTORS, MOST = 4, 1 << 40


class Share(NamedTuple):
    """Holds the request of one claim: ``gpus`` different GPUs, and MiB and percent of compute on each of them, where 0
    means the equal part.
    """

    gpus: int
    memory_mib: int
    cores: int


class Claims(NamedTuple):
    """Holds the claims of one pod. ``shares``: the shares by container, or by the claim's name. ``selectors``: CEL
    expressions that each GPU of the pod must meet.
    """

    shares: dict[str, Share]
    selectors: tuple[str, ...]
    warnings: tuple[Finding, ...] = ()


def way_of(labels: Mapping[str, Any], of_namespace: str, findings: list[Finding]) -> str:
    """Returns how a pod gets its GPUs, CLAIMS or EXTENDER. ``of_namespace``: the value of the namespace's label, empty
    if it has none.
    """
    own = labels.get(ALLOCATION)
    if own not in (None, CLAIMS, EXTENDER):
        text = f"expected {CLAIMS} or {EXTENDER}, found {show(own)}"
        findings.append(error(f'metadata.labels["{ALLOCATION}"]', text))
    elif own is None and of_namespace not in ("", CLAIMS, EXTENDER):
        findings.append(error("namespace", f"its label {ALLOCATION} is neither {CLAIMS} nor {EXTENDER}; correct it"))
    return str(own or of_namespace or EXTENDER)


def read_claims(ask: PodAsk, findings: list[Finding]) -> Claims:
    """Returns the pod's requests by container. Adds faults to ``findings``. The text of a fault follows the name of its
    field.
    """
    selectors = _selectors(ask.preferences, findings)
    _of_pod(ask, findings)
    shares, warnings = {}, []
    for one in ask.asks:
        _of_container(one, findings)
        shares[one.container] = Share(one.gpus, one.memory.amount, one.cores)
        if not one.cores:
            text = "names no compute; a claim then gives the equal part of a GPU, not the compute that others leave"
            warnings.append(warning(one.where, text))
    if len(shares) > MOST_CLAIMS:
        findings.append(error("spec.containers", f"more than {MOST_CLAIMS} containers request GPUs; {NEXT}"))
    return Claims(shares, tuple(selectors), tuple(warnings))


def write_claims(claims: Claims) -> str:
    """Returns the text of the annotation; ``read_annotation`` is the inverse function."""
    said = {name: list(share) for name, share in claims.shares.items()}
    return json.dumps({"claims": said, "selectors": list(claims.selectors)}, separators=(",", ":"), ensure_ascii=False)


def read_annotation(text: str) -> Claims:
    """Parses the annotation; the result has ``shares`` by the claim's name. If a user writes this annotation, the pod
    gets no more than it could request by a dialect: shares of our device class, and no other field of a claim. Raises
    ValueError with the expected and the found values.
    """
    try:
        found = json.loads(text)
        if sorted(found) != ["claims", "selectors"] or not isinstance(found["claims"], dict):
            raise TypeError
        if not isinstance(found["selectors"], list):
            raise TypeError
        shares = {str(name): Share(*map(_number, numbers)) for name, numbers in found["claims"].items()}
        selectors = tuple(_selector(one) for one in found["selectors"])
    except (ValueError, TypeError, RecursionError):
        raise ValueError(f"{ANNOTATION}: expected claims and selectors as admission writes them") from None
    if not 0 < len(shares) <= MOST_CLAIMS or len(selectors) > MOST_SELECTORS:
        text = f"expected at most {MOST_CLAIMS} claims and {MOST_SELECTORS} selectors"
        raise ValueError(f"{ANNOTATION}: {text}, found {len(shares)} and {len(selectors)}")
    return Claims(shares, selectors)


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MOST:
        raise ValueError(value)
    return value


def _selector(value: Any) -> str:
    if not isinstance(value, str) or len(value.encode()) > LONGEST_EXPRESSION:
        raise ValueError(value)
    return value


def object_name(review: str, container: str) -> str:
    """Returns the name of a container's ResourceClaim.

    ``review``: the uid of the admission review. The uid stays the same if the API server calls another replica of the
    webhook. No user knows it before the review, so no user can create a claim with this name in advance.
    """
    return f"vgpu-{hashlib.sha256(f'{review} {container}'.encode()).hexdigest()[:16]}"


def claim_name(container: str, taken: set[str]) -> str:
    """Returns the name of a container's claim within its pod: a DNS label of at most 63 letters
    that is not in ``taken``.
    """
    name, n = f"vgpu-{container}", 0
    while len(name) > 63 or name in taken:
        digest = hashlib.sha256(f"{container} {n}".encode()).hexdigest()[:8]
        name, n = f"vgpu-{container[:48].rstrip('-')}-{digest}", n + 1
    return name


def spec_of(share: Share, selectors: tuple[str, ...]) -> dict[str, Any]:
    """Returns the spec of a ResourceClaim with every default that the API server would set, so that
    the stored spec is equal.
    """
    amounts = {"memory": mebibytes(share.memory_mib)}
    if share.cores:
        amounts["cores"] = str(share.cores)
    exactly: dict[str, Any] = {
        "deviceClassName": CLASS,
        "allocationMode": "ExactCount",
        "count": share.gpus,
        "capacity": {"requests": amounts},
    }
    if selectors:
        exactly["selectors"] = [{"cel": {"expression": text}} for text in selectors]
    return {"devices": {"requests": [{"name": REQUEST, "exactly": exactly}]}}


def _of_container(one: Ask, findings: list[Finding]) -> None:
    if one.memory.kind != MIB:
        text = f"requests {needs(one)}, and a claim supports only MiB; {NEXT}"
        findings.append(error(one.where, text))
    if one.burst_mib:
        findings.append(error(one.where, f"is promised less than its limit, which a claim cannot express; {NEXT}"))
    if one.one_numa and one.gpus > 1:
        findings.append(
            error(annotation(preferences.NUMA_BIND), (f"a claim cannot request GPUs of one NUMA node; {NEXT}"))
        )


def _of_pod(ask: PodAsk, findings: list[Finding]) -> None:
    # Every claim has the low priority, 1.
    if ask.priority == 0:
        where = next(one.where for one in ask.asks if one.priority == 0)
        findings.append(error(where, f"names the high priority, and claims have only the low priority; {NEXT}"))
    chosen = ask.preferences
    if chosen.node_policy:
        text = f"a claim cannot request {chosen.node_policy}; {NEXT}"
        findings.append(error(annotation(preferences.NODE_POLICY[0]), text))
    if chosen.gpu_policy or chosen.alone:
        words = ", ".join(filter(None, (chosen.gpu_policy, preferences.MUTEX if chosen.alone else "")))
        findings.append(error(annotation(preferences.GPU_POLICY[0]), f"a claim cannot request {words}; {NEXT}"))


def _selectors(chosen: preferences.Preferences, findings: list[Finding]) -> list[str]:
    """Returns CEL expressions on the attributes that our driver publishes. The device class already selects our
    driver's devices.
    """
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
            findings.append(error(annotation(name), f"has more entries than a claim allows; name fewer, or {NEXT}"))
        out.append(text)
    return out


def _text(value: Any) -> str:
    """Returns a string or list as CEL. JSON has the same notation, except for surrogate escapes, which are avoided."""
    return json.dumps(value, ensure_ascii=False)
