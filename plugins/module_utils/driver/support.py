# SPDX-License-Identifier: Apache-2.0
"""Finds the driver branches that support a GPU, from its PCI device id and before any driver is installed. No I/O.

Sources: the device ids are those of the PCI ID repository; first and last branches are NVIDIA's (data-centre driver
release notes, the list of legacy GPUs, the kernel-module page of the driver installation guide).
"""

from __future__ import annotations

import re
from typing import Any, Iterable, NamedTuple, Sequence

# The oldest driver that supports the GPUs and interfaces that this product needs.
OLDEST_DRIVER = (384, 81)
# Branches that NVIDIA maintains for data centres or that a supported distribution carries, oldest first.
BRANCHES = (390, 418, 450, 470, 510, 515, 525, 535, 550, 560, 565, 570, 575, 580, 590, 595, 610, 615)
# The default branch, which is the newest that still supports Maxwell, Pascal and Volta.
DEFAULT_BRANCH = 580
# First branch with open kernel modules, for data-centre GPUs only.
OPEN_FIRST = 515
# First branch for which NVIDIA recommends open modules.
OPEN_RECOMMENDED = 560
# First branch without proprietary modules.
OPEN_ONLY = 620
# Names of packages with modules that Ubuntu built and signed for one kernel.
PREBUILT = "linux-modules-nvidia-"


class Generation(NamedTuple):
    """Describes a GPU generation. ``first``, ``last``: the range of driver branches that support it, where 0 means no
    limit; ``modules``: the kinds of kernel modules that drive it.
    """

    name: str
    first: int
    last: int
    modules: tuple[str, ...]


PROPRIETARY, EITHER, OPEN = ("proprietary",), ("open", "proprietary"), ("open",)

FERMI = Generation("Fermi", 0, 390, PROPRIETARY)
KEPLER = Generation("Kepler", 0, 470, PROPRIETARY)
MAXWELL = Generation("Maxwell", 0, 580, PROPRIETARY)
PASCAL = Generation("Pascal", 375, 580, PROPRIETARY)
VOLTA = Generation("Volta", 384, 580, PROPRIETARY)
TURING = Generation("Turing", 410, 0, EITHER)
AMPERE = Generation("Ampere", 450, 0, EITHER)
ADA = Generation("Ada", 525, 0, EITHER)
HOPPER = Generation("Hopper", 525, 0, EITHER)
GRACE_HOPPER = Generation("Grace Hopper", 535, 0, OPEN)
BLACKWELL = Generation("Blackwell", 570, 0, OPEN)

# First and last PCI device id of each chip family. The first row whose range contains an id applies.
RANGES: tuple[tuple[int, int, Generation], ...] = (
    (0x06C0, 0x06DF, FERMI),
    (0x0DC0, 0x0DFF, FERMI),
    (0x0E22, 0x0E3B, FERMI),
    (0x0FC0, 0x0FFF, KEPLER),
    (0x1001, 0x103F, KEPLER),
    (0x1040, 0x10BF, FERMI),
    (0x1140, 0x117F, FERMI),
    (0x1180, 0x11FF, KEPLER),
    (0x1200, 0x127F, FERMI),
    (0x1280, 0x12BF, KEPLER),
    (0x1340, 0x15EF, MAXWELL),
    (0x15F0, 0x15FF, PASCAL),
    (0x1600, 0x17FF, MAXWELL),
    (0x1B00, 0x1D7F, PASCAL),
    (0x1D80, 0x1DFF, VOLTA),
    (0x1E00, 0x1FFF, TURING),
    (0x2080, 0x20FF, AMPERE),
    (0x2180, 0x21FF, TURING),
    (0x2200, 0x22FF, AMPERE),
    (0x2340, 0x234F, GRACE_HOPPER),
    (0x2300, 0x23FF, HOPPER),
    (0x2400, 0x25FF, AMPERE),
    (0x2680, 0x28FF, ADA),
    (0x2900, 0x2FFF, BLACKWELL),
    (0x3180, 0x31FF, BLACKWELL),
)
# GPUs that were released later than the rest of their family.
FIRST_BRANCH = {0x20B7: 460, 0x2329: 535, 0x2335: 550, 0x233B: 550, 0x3182: 580, 0x31C2: 580}

# NVSwitch as a PCI bridge: V100, A100 and H100 systems. Fourth-generation switches (Blackwell) are not PCI bridges.
NVSWITCH_IDS = (*range(0x1AC0, 0x1AC3), *range(0x1AF0, 0x1AF4), *range(0x22A0, 0x22A4))


def device_id(text: str) -> int | None:
    """Returns ``0x20b0`` of sysfs as a number, None if the text is no number."""
    return int(text, 16) if re.match(r"^(0x)?[0-9A-Fa-f]{1,4}\Z", text.strip()) else None


def generation(device: int | None) -> Generation | None:
    """Returns the generation of a GPU. Returns None if no row has its id, because the GPU may be newer than this
    table.
    """
    for low, high, found in RANGES:
        if device is not None and low <= device <= high:
            return found._replace(first=FIRST_BRANCH.get(device, found.first))
    return None


def branch_of(version: str) -> int | None:
    """Returns the branch in a version or a pattern: 535 of ``535.261.03-1``, ``1:580.65.06`` and ``535.*``."""
    found = re.match(r"^(?:\d+:)?(\d{3})(?:\.|-|\*|\Z)", version)
    return int(found.group(1)) if found else None


def upstream(version: str) -> str:
    """Returns NVIDIA's driver version within the version of a package: ``535.261.03`` of ``1:535.261.03-1~deb12u1``."""
    return re.sub(r"^\d+:", "", version).partition("-")[0]


def too_old(version: str) -> bool:
    """Returns whether a version is older than OLDEST_DRIVER. A branch alone, such as 535, counts as its newest
    version.
    """
    parts = [int(part) for part in re.findall(r"\d+", upstream(version))[:2]]
    if not parts:
        return False
    return tuple(parts) < OLDEST_DRIVER if len(parts) > 1 else parts[0] < OLDEST_DRIVER[0]


def generations(gpus: Iterable[dict[str, Any]]) -> list[tuple[str, Generation]]:
    """Returns the address and generation of each of these GPUs whose id is in the table."""
    found = [(str(gpu.get("address", "")), generation(device_id(str(gpu.get("device", ""))))) for gpu in gpus]
    return [(address, one) for address, one in found if one is not None]


def unknown_gpus(gpus: Iterable[dict[str, Any]]) -> list[str]:
    return [str(gpu["device"]) for gpu in gpus if generation(device_id(str(gpu.get("device", "")))) is None]


def fits(branch: int, one: Generation) -> bool:
    return one.first <= branch and (not one.last or branch <= one.last)


def newest_branch(found: Sequence[tuple[str, Generation]], offered: Sequence[int] = BRANCHES) -> int | None:
    """Returns the newest branch that drives every GPU and is not newer than DEFAULT_BRANCH. If only newer branches
    drive every GPU, returns the oldest of them; None if no branch does.
    """
    fitting = [branch for branch in offered if all(fits(branch, one) for _address, one in found)]
    usual = [branch for branch in fitting if branch <= DEFAULT_BRANCH]
    return max(usual) if usual else min(fitting) if fitting else None


def unsupported(branch: int, found: Sequence[tuple[str, Generation]]) -> list[str]:
    """Returns a sentence for each GPU that the branch does not drive."""
    said = []
    for address, one in found:
        if branch < one.first:
            said.append(
                f"branch {branch} is older than the {one.name} GPU at {address}, which needs {one.first} or newer"
            )
        elif one.last and branch > one.last:
            said.append(
                f"branch {branch} no longer supports the {one.name} GPU at {address}; the last branch with support is "
                f"{one.last}"
            )
    return said


def modules_for(branch: int | None, found: Sequence[tuple[str, Generation]]) -> str:
    """Returns ``open`` or ``proprietary``: the kind that NVIDIA recommends for these GPUs, or the only usable kind."""
    if found and all(one.modules == OPEN for _address, one in found):
        return "open"
    if any(one.modules == PROPRIETARY for _address, one in found) or branch is None or branch < OPEN_FIRST:
        return "proprietary"
    needed = any(one.modules == OPEN for _address, one in found)
    return "open" if needed or branch >= OPEN_RECOMMENDED else "proprietary"


def wrong_modules(kind: str, branch: int | None, found: Sequence[tuple[str, Generation]]) -> list[str]:
    """Returns a sentence for each reason why a kind of kernel modules cannot be used."""
    said = []
    for address, one in found:
        if kind not in one.modules:
            other = "proprietary" if kind == "open" else "open"
            limit = "open modules drive Turing and later" if kind == "open" else "it has no proprietary modules"
            said.append(
                f"the {kind} kernel modules do not drive the {one.name} GPU at {address} ({limit}); use {other}"
            )
    if kind == "open" and branch is not None and branch < OPEN_FIRST:
        said.append(f"branch {branch} has no open kernel modules; {OPEN_FIRST} is the first with them")
    if kind == "proprietary" and branch is not None and branch >= OPEN_ONLY:
        said.append(f"branch {branch} has only open kernel modules; use open, or a branch before {OPEN_ONLY}")
    return said
