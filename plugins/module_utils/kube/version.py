# SPDX-License-Identifier: Apache-2.0
"""Checks whether a Kubernetes version can run a device plugin: 1.10 and newer can.

The kubelet of 1.10 is the first with device plugins enabled by default (protocol v1beta1). Older kubelets need the
feature gate DevicePlugins and use another protocol: they would never call our plugin, and no pod would get a GPU.
"""

from __future__ import annotations

import os
import re
from typing import Any, Sequence

OLDEST = (1, 10)
KUBELETS = ("/usr/bin/kubelet", "/usr/local/bin/kubelet")


def of_host(host: Any) -> tuple[int, int] | None:
    """Returns major and minor of the kubelet on a ``Host``; None if there is no kubelet or it reports no version.

    ``Host`` is not imported here, because most modules that import this file inspect no host.
    """
    for path in KUBELETS:
        if os.access(host.path(path), os.X_OK):
            return of_text(host.run([host.path(path), "--version"]).out)
    return None


def of_text(text: str) -> tuple[int, int] | None:
    """Returns major and minor from the output of ``kubelet --version`` or from a version: "Kubernetes v1.34.2",
    "v1.29.8-eks-a18cd3a", "v1.9.11+icp"; None if the text holds no version.
    """
    found = re.search(r"(?:^|\s)v?([0-9]+)\.([0-9]+)(?:\.[0-9]+)?(?:[-+]\S*)?(?:\s|\Z)", text)
    return (int(found.group(1)), int(found.group(2))) if found else None


def refusal(numbers: Sequence[int] | None, who: str) -> str:
    """Returns why this version cannot run the device plugin; empty if it can or is unknown."""
    if numbers is None or tuple(numbers[:2]) >= OLDEST:
        return ""
    found, oldest = (".".join(str(number) for number in one) for one in (numbers, OLDEST))
    return (
        f"{who} is Kubernetes {found}; expected {oldest} or newer, because older kubelets do not support this device "
        "plugin. Upgrade Kubernetes first"
    )
