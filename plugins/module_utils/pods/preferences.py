# SPDX-License-Identifier: Apache-2.0
"""Reads a pod's preferences for its GPUs from annotations: policies for nodes and GPUs, and GPUs by UUID and model.

HAMi's annotations are read as well; the annotations of vgpu.fleet override them. An unsupported preference is an error
and is never ignored, because a pod must not wrongly rely on it.

A policy for GPUs may list several words, separated by commas, as in HAMi 2.10. ``mutex`` always counts first and
``topology`` second. ``binpack``, ``spread`` and ``numa`` count in the order in which they are written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..config.kinds import Finding, error, nearest, show

BINPACK, SPREAD, TOPOLOGY, NUMA, MUTEX = "binpack", "spread", "topology", "numa", "mutex"
NODE_POLICY = ("vgpu.fleet/node-policy", "hami.io/node-scheduler-policy")
GPU_POLICY = ("vgpu.fleet/gpu-policy", "hami.io/gpu-scheduler-policy")
# Maps HAMi's word for a policy to the word of this scheduler.
SAME = {"topology-aware": TOPOLOGY}
USE_UUID, AVOID_UUID = "nvidia.com/use-gpuuuid", "nvidia.com/nouse-gpuuuid"
USE_MODEL, AVOID_MODEL = "nvidia.com/use-gputype", "nvidia.com/nouse-gputype"
NUMA_BIND = "nvidia.com/numa-bind"
# Annotations of HAMi and qGPU that this scheduler does not support. Each is mapped to the values that are accepted,
# because they request nothing.
NOT_DONE = {"nvidia.com/vgpu-mode": ("hami-core",), "tke.cloud.tencent.com/app-class": ("online",)}


class Preferences(NamedTuple):
    """Holds a pod's preferences. An empty policy means the default of the node or the scheduler. ``gpu_policy``: one or
    several words, separated by commas. Models are parts of a model name in lower case. ``alone``: the pod uses only
    GPUs that no other pod uses when it is placed. ``one_numa``: the GPUs of a container belong to one NUMA node.
    """

    node_policy: str = ""
    gpu_policy: str = ""
    use_uuids: tuple[str, ...] = ()
    avoid_uuids: tuple[str, ...] = ()
    use_models: tuple[str, ...] = ()
    avoid_models: tuple[str, ...] = ()
    alone: bool = False
    one_numa: bool = False

    @property
    def selects(self) -> bool:
        return bool(self.use_uuids or self.avoid_uuids or self.use_models or self.avoid_models)

    def takes(self, uuid: str, model: str) -> bool:
        """Returns whether the pod may use a GPU. A GPU that the pod both names and excludes is excluded."""
        name, text = uuid.lower(), model.lower()
        if name in self.avoid_uuids or any(part in text for part in self.avoid_models):
            return False
        if self.use_uuids and name not in self.use_uuids:
            return False
        return not self.use_models or any(part in text for part in self.use_models)


def read_preferences(annotations: dict[str, Any], findings: list[Finding]) -> Preferences:
    """Reads the preferences. Adds faults to ``findings``. The text of a fault follows the name of its annotation."""
    for name, harmless in NOT_DONE.items():
        value = annotations.get(name)
        if value is not None and str(value).strip().lower() not in ("", *harmless):
            message = f"{show(value)} is not available in this version; leave the annotation out"
            findings.append(error(_path(name), message))
    chain = _chain(annotations, findings)
    return Preferences(
        _node_policy(annotations, findings),
        ",".join(sorted((word for word in chain if word != MUTEX), key=lambda word: word != TOPOLOGY)),
        _words(annotations, USE_UUID, findings),
        _words(annotations, AVOID_UUID, findings),
        _words(annotations, USE_MODEL, findings),
        _words(annotations, AVOID_MODEL, findings),
        MUTEX in chain,
        _yes(annotations, NUMA_BIND, findings),
    )


def words_of(policy: str) -> tuple[str, ...]:
    """Returns the words of a GPU policy, the most important first."""
    return tuple(policy.split(","))


def _node_policy(annotations: dict[str, Any], findings: list[Finding]) -> str:
    name = next((name for name in NODE_POLICY if name in annotations), "")
    return _word(name, str(annotations[name]), (BINPACK, SPREAD, TOPOLOGY), findings) if name else ""


def _chain(annotations: dict[str, Any], findings: list[Finding]) -> list[str]:
    name = next((name for name in GPU_POLICY if name in annotations), "")
    if not name:
        return []
    known = (BINPACK, SPREAD, TOPOLOGY, NUMA, MUTEX)
    chain = [_word(name, part, known, findings) for part in str(annotations[name]).split(",")]
    if {BINPACK, SPREAD} <= set(chain):
        findings.append(error(_path(name), f"{BINPACK} and {SPREAD} contradict each other; name one"))
    return list(dict.fromkeys(filter(None, chain)))


def _word(name: str, text: str, words: tuple[str, ...], findings: list[Finding]) -> str:
    value = text.strip()
    word = SAME.get(value, value)
    if word in words:
        return word
    meant = nearest(word, words)
    hint = f'; did you mean "{meant}"?' if meant else ""
    findings.append(error(_path(name), f"expected one of {', '.join(words)}, found {show(value)}{hint}"))
    return ""


def _yes(annotations: dict[str, Any], name: str, findings: list[Finding]) -> bool:
    value = str(annotations.get(name, "")).strip().lower()
    if value not in ("", "true", "false"):
        findings.append(error(_path(name), f"expected true or false, found {show(annotations[name])}"))
    return value == "true"


def _words(annotations: dict[str, Any], name: str, findings: list[Finding]) -> tuple[str, ...]:
    if name not in annotations:
        return ()
    words = [word.strip().lower() for word in str(annotations[name]).split(",")]
    if not all(words):
        message = f"expected names with commas between them, found {show(annotations[name])}"
        findings.append(error(_path(name), message))
    return tuple(sorted({word for word in words if word}))


def _path(name: str) -> str:
    return f'metadata.annotations["{name}"]'
