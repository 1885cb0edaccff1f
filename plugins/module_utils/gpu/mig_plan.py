# SPDX-License-Identifier: Apache-2.0
"""Plans the steps from a GPU's present MIG instances to the desired ones, or explains why no steps are possible. No
I/O.

A geometry maps profile to count, such as ``{"1g.10gb": 3, "3g.40gb": 1}``. Instances that the geometry needs stay; only
surplus instances are destroyed. Missing instances are created largest first, because NVML places each where it fits,
and a small instance could block a large one.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence


class Steps(NamedTuple):
    """Holds the steps for one GPU. ``mode``: the new MIG mode, None if it stays; ``destroy``: instance ids; ``create``:
    profile names in order.
    """

    mode: bool | None
    destroy: list[int]
    create: list[str]
    errors: list[str]

    @property
    def empty(self) -> bool:
        return self.mode is None and not self.destroy and not self.create and not self.errors

    @property
    def changes(self) -> bool:
        return self.mode is not None or bool(self.destroy or self.create)


def plan(gpu: dict[str, Any], geometry: dict[str, int]) -> Steps:
    """Returns the steps for one GPU as ``mig_nvml.read`` describes it. An empty geometry switches MIG off."""
    name = f"GPU {gpu['index']} ({gpu['model']})"
    if gpu["mode"] is None:
        if not geometry:
            return Steps(None, [], [], [])
        return Steps(None, [], [], [f"{name} has no MIG; exclude it, or choose another way of sharing for its host"])
    errors = fits(name, gpu["profiles"], geometry)
    mode = None if gpu["mode"] == bool(geometry) else bool(geometry)
    if geometry and gpu["mode"] != gpu["pending"]:
        errors.append(
            f"{name} waits for a reset to change its MIG mode; end its clients and run nvidia-smi --gpu-reset -i "
            f"{gpu['index']}, or reboot"
        )
    destroy, left = [], dict(geometry)
    for instance in gpu["instances"]:
        if left.get(instance["profile"], 0) and instance["complete"]:
            left[instance["profile"]] -= 1
        else:
            destroy.append(instance["id"])
    create = [one for one, count in left.items() for _n in range(count)]
    create.sort(key=lambda one: (-gpu["profiles"].get(one, {}).get("slices", 0), _memory(gpu, one), one))
    steps = Steps(mode, destroy, create, errors)
    if steps.changes and not errors:
        errors += busy(name, gpu, steps)
    return steps


def _memory(gpu: dict[str, Any], profile: str) -> int:
    return -int(gpu["profiles"].get(profile, {}).get("memory_mib", 0))


def fits(name: str, profiles: dict[str, Any], geometry: dict[str, int]) -> list[str]:
    """Returns errors for a geometry with a profile that this GPU lacks, with more instances of a profile than NVML
    allows, or with more than seven compute slices. NVML places the instances, so their placement is not checked.
    """
    if not profiles:
        return []  # The NVML of some drivers lists no profiles before MIG is on.
    said = []
    for profile, count in geometry.items():
        known = profiles.get(profile)
        if known is None:
            said.append(f"{name} has no MIG profile {profile}; it has {', '.join(sorted(profiles))}")
        elif count > known["most"]:
            said.append(f"{name} takes at most {known['most']} instances of {profile}, not {count}")
    total = sum(count * profiles[one]["slices"] for one, count in geometry.items() if one in profiles)
    if not said and total > 7:
        said.append(f"{name} has 7 compute slices, and the geometry {show(geometry)} needs {total}")
    return said


def busy(name: str, gpu: dict[str, Any], steps: Steps) -> list[str]:
    """Returns an error if the steps would disturb processes. A change of the MIG mode disturbs all processes on the
    GPU. The destruction of an instance disturbs the processes in it, and perhaps those whose instance is unknown.
    """
    whole = steps.mode is not None
    held = [one for one in gpu["processes"] if whole or one["instance"] is None or one["instance"] in steps.destroy]
    if not held or not (whole or steps.destroy):
        return []
    who = ", ".join(str(one["pid"]) for one in held)
    return [f"{name} is used by the processes {who}; its MIG geometry stays unchanged until they end"]


def show(geometry: dict[str, int]) -> str:
    return ", ".join(f"{count} x {profile}" for profile, count in sorted(geometry.items())) or "no MIG"


def found(gpu: dict[str, Any]) -> dict[str, int]:
    """Returns the geometry that a GPU has now."""
    counts: dict[str, int] = {}
    for instance in gpu["instances"] if gpu["mode"] else []:
        counts[instance["profile"]] = counts.get(instance["profile"], 0) + 1
    return counts


def describe(gpu: dict[str, Any], steps: Steps) -> list[str]:
    """Describes the steps in sentences."""
    name = f"GPU {gpu['index']}"
    lines = []
    if steps.mode is not None:
        lines.append(f"{name}: switch MIG {'on' if steps.mode else 'off'}")
    gone = [one for one in gpu["instances"] if one["id"] in steps.destroy]
    lines += [f"{name}: destroy {one['profile']} (instance {one['id']})" for one in gone]
    return lines + [f"{name}: create {profile}" for profile in steps.create]


def targets(gpus: Sequence[dict[str, Any]], geometry: dict[str, int]) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the GPUs that a geometry applies to, and warnings. GPUs without MIG stay whole on a host that also has
    GPUs with MIG.
    """
    able = [gpu for gpu in gpus if gpu["mode"] is not None]
    if not able and geometry:
        return list(gpus), []
    others = ", ".join(f"GPU {gpu['index']} ({gpu['model']})" for gpu in gpus if gpu["mode"] is None)
    return able, [f"{others} has no MIG and stays whole"] if others and geometry else []
