# SPDX-License-Identifier: Apache-2.0
"""Applies a MIG plan to all GPUs of a host as one transaction: a failure restores every GPU to its former state."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import mig_plan
from .mig_nvml import INSUFFICIENT_RESOURCES, Mig
from .mig_plan import Steps
from .nvml import NvmlError


class MigError(Exception):
    """The geometry cannot be applied; the text names the GPU, the reason, and the state that is left."""


class Outcome(NamedTuple):
    plan: list[str]
    warnings: list[str]
    before: dict[str, dict[str, int]]
    after: dict[str, dict[str, int]]


def apply(
    nvml: Mig,
    geometry: dict[str, int],
    check_mode: bool = False,
    of_gpu: dict[str, dict[str, int]] | None = None,
) -> Outcome:
    """Applies the geometry (MIG profiles with counts) to every GPU that supports MIG. An empty geometry switches MIG
    off. ``of_gpu`` contains the geometry of GPUs that need another one, by UUID.
    """
    gpus = nvml.gpus()
    able, warnings = mig_plan.targets(gpus, geometry)
    wanted = {gpu["uuid"]: (of_gpu or {}).get(gpu["uuid"], geometry) for gpu in able}
    steps = [(gpu, mig_plan.plan(gpu, wanted[gpu["uuid"]])) for gpu in able]
    errors = [text for _gpu, one in steps for text in one.errors]
    if errors:
        raise MigError("\n".join([*errors, "No GPU was changed."]))
    lines = [line for gpu, one in steps for line in mig_plan.describe(gpu, one)]
    before = {gpu["uuid"]: mig_plan.found(gpu) for gpu in able}
    if check_mode or not lines:
        after = {gpu["uuid"]: dict(wanted[gpu["uuid"]]) if one.changes else before[gpu["uuid"]] for gpu, one in steps}
        return Outcome(lines, warnings, before, after)
    done: list[dict[str, Any]] = []
    for gpu, one in steps:
        if not one.changes:
            continue
        done.append(gpu)
        try:
            _carry_out(nvml, gpu, one, wanted[gpu["uuid"]])
        except NvmlError as fault:
            raise MigError(_failed(nvml, gpu, wanted[gpu["uuid"]], fault, done)) from None
    return Outcome(lines, warnings, before, {gpu["uuid"]: mig_plan.found(nvml.gpu(gpu["index"])) for gpu in able})


def _carry_out(nvml: Mig, gpu: dict[str, Any], steps: Steps, geometry: dict[str, int]) -> None:
    index = gpu["index"]
    for instance_id in steps.destroy:
        nvml.destroy(index, instance_id)
    if steps.mode is not None:
        nvml.set_mode(index, steps.mode)
    profiles = nvml.profiles(nvml.handle(index)) if steps.create else {}
    try:
        for name in steps.create:
            nvml.create(index, _known(profiles, name))
    except NvmlError as fault:
        if fault.code != INSUFFICIENT_RESOURCES or any(one["instance"] is not None for one in gpu["processes"]):
            raise
        # An instance that should stay is where a new one must be placed. No process uses an instance, so destroy all
        # and create all again, the largest first.
        _clear(nvml, index)
        fresh = mig_plan.plan({**nvml.gpu(index), "processes": []}, geometry)
        for name in fresh.create:
            nvml.create(index, _known(profiles, name))


def _known(profiles: dict[str, dict[str, int]], name: str) -> dict[str, int]:
    if name not in profiles:
        raise NvmlError(3, f"the MIG profile {name} (available: {', '.join(sorted(profiles)) or 'none'})")
    return profiles[name]


def _clear(nvml: Mig, index: int) -> None:
    for instance in nvml.gpu(index)["instances"]:
        nvml.destroy(index, instance["id"])


def _failed(
    nvml: Mig, gpu: dict[str, Any], geometry: dict[str, int], fault: NvmlError, done: list[dict[str, Any]]
) -> str:
    """Reverts all changes, the last first, and reports the result."""
    lines = [f"GPU {gpu['index']} ({gpu['model']}): the geometry {mig_plan.show(geometry)} cannot be made: {fault}"]
    left = []
    for one in reversed(done):
        try:
            restore(nvml, one)
        except NvmlError as second:
            left.append(f"GPU {one['index']} could not be restored to {mig_plan.show(mig_plan.found(one))}: {second}")
    if left:
        return "\n".join([*lines, *left, "check the GPUs: nvidia-smi -L, nvidia-smi mig -lgi"])
    return "\n".join([*lines, "Every GPU has the geometry that it had before."])


def restore(nvml: Mig, gpu: dict[str, Any]) -> None:
    """Restores a GPU to the described state: its mode, and each instance at its placement."""
    index, now = gpu["index"], nvml.gpu(gpu["index"])
    same = [(one["profile"], one["start"]) for one in gpu["instances"]]
    for instance in now["instances"]:
        if (instance["profile"], instance["start"]) not in same:
            nvml.destroy(index, instance["id"])
    if now["mode"] != gpu["mode"]:
        nvml.set_mode(index, bool(gpu["mode"]))
    if not gpu["mode"]:
        return
    now = nvml.gpu(index)
    there = [(one["profile"], one["start"]) for one in now["instances"]]
    for instance in gpu["instances"]:
        if (instance["profile"], instance["start"]) not in there:
            nvml.create(index, now["profiles"][instance["profile"]], instance["start"], instance["size"])
