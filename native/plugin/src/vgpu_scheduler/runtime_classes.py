# SPDX-License-Identifier: Apache-2.0
"""Checks by a pod's RuntimeClass whether the runtime of its containers applies our limits.

libvgpu.so, the library that applies the limits, gets into a container by mounts and /etc/ld.so.preload. This was tested
with runc and crun, also if NVIDIA's runtime calls them. But a virtual machine (Kata) or a kernel in user space (gVisor)
may give a container the GPU without the library, so pods with runtimes that were not tested get no slices.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import wire

# Handlers of a RuntimeClass that were tested. ``nvidia`` is runc with NVIDIA's hook, under the name that the role
# container_runtime gives it.
TRIED = ("crun", "nvidia", "runc")
# Name of the role's variable for additional handlers. The same setting in the scheduler's configuration file is
# runtimeHandlers.
VARIABLE = "scheduler_runtime_handlers"


class RuntimeClasses:
    """The RuntimeClasses of the cluster, as last listed and watched. ``more``: additional handlers that the inventory
    allows.
    """

    def __init__(self, more: Sequence[str] = ()) -> None:
        self.allowed = frozenset((*TRIED, *more))
        # Name of a RuntimeClass → its handler; None until the first list has arrived.
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
        """Returns "" or why ``pod`` (namespace/name) gets no slice. ``name``: the pod's RuntimeClass; a pod without one
        is not refused, because it uses its node's default runtime.
        """
        if not name:
            return ""
        start = f'pod {pod}: RuntimeClass "{name}"'
        if self.handlers is None:
            return f"{start}: RuntimeClasses have not been listed yet, so its handler is unknown; try again"
        handler = self.handlers.get(name)
        if handler is None:
            return f"{start} is not in the scheduler's list, so its handler is unknown; try again in a moment"
        if handler in self.allowed:
            return ""
        return (
            f'{start} has the handler "{handler}", with which the limits of slices were not tested; expected one of '
            f"{', '.join(sorted(self.allowed))}. If limits are effective with this handler, list it in {VARIABLE}"
        )
