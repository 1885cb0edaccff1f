# SPDX-License-Identifier: Apache-2.0
"""The options of the 4paradigm, NVIDIA and HAMi plugins under their own names: for each a flag, an environment
variable, and the place in node.yaml that these override. Precedence: flag, environment, file, default.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, NamedTuple

VCUDA = ("sharing", "vcuda")
PLUGIN = ("flags", "plugin")
GFD = ("flags", "gfd")


class Option(NamedTuple):
    """``many``: several values separated by commas; ``true``: the flag without a value means true."""

    flag: str
    environment: str
    place: tuple[str, ...]
    about: str
    many: bool = False
    true: bool = False


OPTIONS = (
    # 4paradigm
    Option("fail-on-init-error", "FAIL_ON_INIT_ERROR", ("flags", "failOnInitError"), "end where NVML fails", true=True),
    Option("device-split-count", "DEVICE_SPLIT_COUNT", (*VCUDA, "splitCount"), "K: slices of each GPU"),
    Option(
        "device-memory-scaling", "DEVICE_MEMORY_SCALING", (*VCUDA, "memoryScaling"), "S: memory sold over the card's"
    ),
    Option(
        "device-cores-scaling", "DEVICE_CORES_SCALING", (*VCUDA, "coresScaling"), "C: 100*C/K %% of the SMs a slice"
    ),
    Option(
        "enable-legacy-preferred",
        "ENABLE_LEGACY_PREFERRED",
        (*VCUDA, "legacyPreferred"),
        "spread slices where the kubelet cannot ask for a preference",
        true=True,
    ),
    # HAMi
    Option("resource-name", "RESOURCE_NAME", (*VCUDA, "resourceName"), "name of the slices as a resource"),
    Option("disable-core-limit", "DISABLE_CORE_LIMIT", (*VCUDA, "disableCoreLimit"), "no limit of the SMs", true=True),
    Option("gpu-core-policy", "GPU_CORE_UTILIZATION_POLICY", (*VCUDA, "corePolicy"), "default, force or disable"),
    Option("active-oom-killer", "ACTIVE_OOM_KILLER", (*VCUDA, "oomKiller"), "end a process over its limit", true=True),
    Option("libcuda-log-level", "LIBCUDA_LOG_LEVEL", (*VCUDA, "logLevel"), "0 to 5, of the library in containers"),
    # NVIDIA
    Option("mig-strategy", "MIG_STRATEGY", ("flags", "migStrategy"), "none, single or mixed"),
    Option("mps-root", "MPS_ROOT", ("flags", "mpsRoot"), "folder of the MPS daemons' pipes"),
    Option("nvidia-driver-root", "NVIDIA_DRIVER_ROOT", ("flags", "nvidiaDriverRoot"), "root folder of the driver"),
    Option("nvidia-dev-root", "NVIDIA_DEV_ROOT", ("flags", "nvidiaDevRoot"), "root folder of the device nodes"),
    Option("gdrcopy-enabled", "GDRCOPY_ENABLED", ("flags", "gdrcopyEnabled"), "NVIDIA_GDRCOPY=enabled", true=True),
    Option("gds-enabled", "GDS_ENABLED", ("flags", "gdsEnabled"), "NVIDIA_GDS=enabled", true=True),
    Option("mofed-enabled", "MOFED_ENABLED", ("flags", "mofedEnabled"), "NVIDIA_MOFED=enabled", true=True),
    Option(
        "device-discovery-strategy",
        "DEVICE_DISCOVERY_STRATEGY",
        ("flags", "deviceDiscoveryStrategy"),
        "auto, nvml or tegra",
    ),
    Option("pass-device-specs", "PASS_DEVICE_SPECS", (*PLUGIN, "passDeviceSpecs"), "name the device nodes", true=True),
    Option(
        "device-list-strategy",
        "DEVICE_LIST_STRATEGY",
        (*PLUGIN, "deviceListStrategy"),
        "auto, envvar, volume-mounts, cdi-annotations, cdi-cri; several separated by commas",
        many=True,
    ),
    Option("device-id-strategy", "DEVICE_ID_STRATEGY", (*PLUGIN, "deviceIDStrategy"), "uuid or index"),
    Option("cdi-annotation-prefix", "CDI_ANNOTATION_PREFIX", (*PLUGIN, "cdiAnnotationPrefix"), "of cdi-annotations"),
    Option("nvidia-ctk-path", "NVIDIA_CTK_PATH", (*PLUGIN, "nvidiaCTKPath"), "accepted; no hook is used"),
    Option("container-driver-root", "CONTAINER_DRIVER_ROOT", (*PLUGIN, "containerDriverRoot"), "accepted, not used"),
    Option(
        "shared-devices-allocation-policy",
        "SHARED_DEVICES_ALLOCATION_POLICY",
        (*PLUGIN, "sharedDevicesAllocationPolicy"),
        "distributed or packed",
    ),
    Option("oneshot", "GFD_ONESHOT", (*GFD, "oneshot"), "labels: write them once", true=True),
    Option("no-timestamp", "GFD_NO_TIMESTAMP", (*GFD, "noTimestamp"), "labels: without a time", true=True),
    Option("sleep-interval", "GFD_SLEEP_INTERVAL", (*GFD, "sleepInterval"), "labels: look again after, such as 60s"),
    Option("output-file", "GFD_OUTPUT_FILE", (*GFD, "outputFile"), "labels: file"),
    Option("machine-type-file", "GFD_MACHINE_TYPE_FILE", (*GFD, "machineTypeFile"), "labels: the machine's product"),
    Option("imex-channel-ids", "IMEX_CHANNEL_IDS", ("imex", "channelIDs"), "IMEX channels, 0 or none", many=True),
    Option("imex-required", "IMEX_REQUIRED", ("imex", "required"), "refuse without the IMEX channels", true=True),
)


def add_to(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "options of node.yaml", "Each overrides the file; so does the environment variable of that name."
    )
    for one in OPTIONS:
        group.add_argument(
            f"--{one.flag}",
            default=None,
            metavar="VALUE",
            nargs="?" if one.true else None,
            const="true" if one.true else None,
            help=f"{one.about} [{one.environment}]",
        )


def overrides(given: Mapping[str, Any], environment: Mapping[str, str]) -> list[tuple[Option, str, str]]:
    """Returns (option, text, source) of all options set by flag or environment; an empty variable counts as unset."""
    out = []
    for one in OPTIONS:
        said = given.get(one.flag.replace("-", "_"))
        if said is not None:
            out.append((one, str(said), f"--{one.flag}"))
        elif environment.get(one.environment):
            out.append((one, environment[one.environment], one.environment))
    return out


def apply(config: dict[str, Any], chosen: list[tuple[Option, str, str]]) -> dict[str, str]:
    """Writes the options into a parsed node.yaml, in place. Returns place → flag or variable that set it,
    for messages.
    """
    places = {}
    for one, text, where in chosen:
        section = config
        for key in one.place[:-1]:
            inner = section.get(key)
            if not isinstance(inner, dict):
                inner = section[key] = {}
            section = inner
        section[one.place[-1]] = _value(one, text)
        places[".".join(one.place)] = where
    return places


def _value(one: Option, text: str) -> Any:
    if not one.many:
        return text
    words = [word.strip() for word in text.split(",") if word.strip()]
    return words[0] if len(words) == 1 and one.place[-1] == "deviceListStrategy" else words
