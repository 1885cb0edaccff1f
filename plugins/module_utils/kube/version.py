# SPDX-License-Identifier: Apache-2.0
"""Checks whether a Kubernetes version can run a device plugin: 1.10 and newer can.

Its kubelet is the first that has device plugins on without being asked (v1beta1; before, behind the feature gate
DevicePlugins with another protocol), so an older one would never call us, and no pod would get a GPU.
"""

from __future__ import annotations

import os
import re
from typing import Any, Sequence

OLDEST = (1, 10)
KUBELETS = ("/usr/bin/kubelet", "/usr/local/bin/kubelet")


def of_host(host: Any) -> tuple[int, int] | None:
    """Major and minor of the kubelet of a ``Host``; None where there is none, or one that does not tell.

    That class is not imported: most modules that read a version by this file read no host.
    """
    for path in KUBELETS:
        if os.access(host.path(path), os.X_OK):
            return of_text(host.run([host.path(path), "--version"]).out)
    return None


def of_text(text: str) -> tuple[int, int] | None:
    """Major and minor of ``kubelet --version`` or of a version: "Kubernetes v1.34.2", "v1.29.8-eks-a18cd3a",
    "v1.9.11+icp"; None where there is none.
    """
    found = re.search(r"(?:^|\s)v?([0-9]+)\.([0-9]+)(?:\.[0-9]+)?(?:[-+]\S*)?(?:\s|\Z)", text)
    return (int(found.group(1)), int(found.group(2))) if found else None


def refusal(numbers: Sequence[int] | None, who: str) -> str:
    """Returns why this version is refused; empty if it is accepted or unknown."""
    if numbers is None or tuple(numbers[:2]) >= OLDEST:
        return ""
    found, oldest = (".".join(str(number) for number in one) for one in (numbers, OLDEST))
    return (
        f"{who} is Kubernetes {found}; expected {oldest} or newer, for older ones serve no device plugin of this kind. "
        "Upgrade Kubernetes first"
    )
