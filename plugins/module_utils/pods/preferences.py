# SPDX-License-Identifier: Apache-2.0
"""Where a pod wants its GPUs, from its annotations: policies for nodes and GPUs, and GPUs by UUID and model.

HAMi's annotations are understood; those of vgpu.fleet win over them. What is not carried out is an error and never
ignored: a pod that believes itself pinned and is not would be worse.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..config.kinds import Finding, error, nearest, show

BINPACK, SPREAD, TOPOLOGY = "binpack", "spread", "topology"
NODE_POLICY = ("vgpu.fleet/node-policy", "hami.io/node-scheduler-policy")
GPU_POLICY = ("vgpu.fleet/gpu-policy", "hami.io/gpu-scheduler-policy")
# Words of HAMi for the same thing.
SAME = {"topology-aware": TOPOLOGY}
USE_UUID, AVOID_UUID = "nvidia.com/use-gpuuuid", "nvidia.com/nouse-gpuuuid"
USE_MODEL, AVOID_MODEL = "nvidia.com/use-gputype", "nvidia.com/nouse-gputype"
# Annotations of HAMi that ask for what this scheduler does not do, and the values that ask for nothing.
NOT_DONE = {"nvidia.com/numa-bind": ("false",), "nvidia.com/vgpu-mode": ("hami-core",)}


class Preferences(NamedTuple):
    """Empty policies are the scheduler's default. Models are parts of a name, in small letters."""

    node_policy: str = ""
    gpu_policy: str = ""
    use_uuids: tuple[str, ...] = ()
    avoid_uuids: tuple[str, ...] = ()
    use_models: tuple[str, ...] = ()
    avoid_models: tuple[str, ...] = ()

    @property
    def selects(self) -> bool:
        return bool(self.use_uuids or self.avoid_uuids or self.use_models or self.avoid_models)

    def takes(self, uuid: str, model: str) -> bool:
        """Whether a GPU may be taken; what is to be avoided wins."""
        name, text = uuid.lower(), model.lower()
        if name in self.avoid_uuids or any(part in text for part in self.avoid_models):
            return False
        if self.use_uuids and name not in self.use_uuids:
            return False
        return not self.use_models or any(part in text for part in self.use_models)


def read_preferences(annotations: dict[str, Any], findings: list[Finding]) -> Preferences:
    """Faults go to ``findings``, named by annotation."""
    for name, harmless in NOT_DONE.items():
        value = annotations.get(name)
        if value is not None and str(value).strip().lower() not in ("", *harmless):
            message = f"{show(value)} is not available in this version; leave the annotation out"
            findings.append(error(_path(name), message))
    return Preferences(
        _policy(annotations, NODE_POLICY, (BINPACK, SPREAD, TOPOLOGY), findings),
        _policy(annotations, GPU_POLICY, (BINPACK, SPREAD, TOPOLOGY), findings),
        _words(annotations, USE_UUID, findings),
        _words(annotations, AVOID_UUID, findings),
        _words(annotations, USE_MODEL, findings),
        _words(annotations, AVOID_MODEL, findings),
    )


def _policy(
    annotations: dict[str, Any], names: tuple[str, ...], words: tuple[str, ...], findings: list[Finding]
) -> str:
    for name in names:
        if name not in annotations:
            continue
        value = str(annotations[name]).strip()
        word = SAME.get(value, value)
        if word in words:
            return word
        meant = nearest(word, words)
        hint = f'; did you mean "{meant}"?' if meant else ""
        findings.append(error(_path(name), f"expected one of {', '.join(words)}, found {show(value)}{hint}"))
        return ""
    return ""


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
