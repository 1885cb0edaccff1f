# SPDX-License-Identifier: Apache-2.0
"""Which runtime would start a pod's containers, by its RuntimeClass, and whether limits hold there.

libvgpu.so comes into a container by mounts and /etc/ld.so.preload. With runc and crun, and NVIDIA's runtime before
them, that was tried; a virtual machine (Kata) or a kernel in user space (gVisor) may hand a GPU in without it.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import wire

# Of a RuntimeClass. ``nvidia`` is runc with NVIDIA's hook, by the name that the role container_runtime gives it.
TRIED = ("crun", "nvidia", "runc")
# The role's variable; the key of the configuration file is runtimeHandlers.
VARIABLE = "scheduler_runtime_handlers"


class RuntimeClasses:
    """RuntimeClasses of the cluster, as a list and its watch tell them. ``more``: handlers that the inventory lists."""

    def __init__(self, more: Sequence[str] = ()) -> None:
        self.allowed = frozenset((*TRIED, *more))
        # By name; None before the first list.
        self.handlers: dict[str, str] | None = None

    def enter_all(self, classes: list[wire.RuntimeClass], _began: float) -> None:
        self.handlers = {one.metadata.name: one.handler for one in classes}

    def enter(self, gone: bool, one: wire.RuntimeClass) -> None:
        handlers = {} if self.handlers is None else self.handlers
        if gone:
            handlers.pop(one.metadata.name, None)
        else:
            handlers[one.metadata.name] = one.handler
        self.handlers = handlers

    def refusal(self, pod: str, name: str) -> str:
        """ "" or why ``pod`` (namespace/name) gets no slice. One that names no RuntimeClass has its node's runtime."""
        if not name:
            return ""
        start = f'pod {pod}: RuntimeClass "{name}"'
        if self.handlers is None:
            return f"{start}: RuntimeClasses have not been listed yet, so its handler is not known; try again"
        handler = self.handlers.get(name)
        if handler is None:
            return f"{start} is not known here, so its handler is not; try again in a moment"
        if handler in self.allowed:
            return ""
        return (
            f'{start} has the handler "{handler}", in which no limit of a slice was tried; expected one of '
            f"{', '.join(sorted(self.allowed))}. Where limits hold in it, list it in {VARIABLE}"
        )
