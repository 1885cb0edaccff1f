# SPDX-License-Identifier: Apache-2.0
"""The options of the 4paradigm, NVIDIA and HAMi device plugins, under the names that these plugins use. Each option has
a flag, an environment variable, and a place in node.yaml whose value it overrides. The flag takes precedence over the
environment variable, then comes node.yaml, then the default.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, NamedTuple

VCUDA = ("sharing", "vcuda")
PLUGIN = ("flags", "plugin")
GFD = ("flags", "gfd")


class Option(NamedTuple):
    """One option. ``many``: it takes several values separated by commas; ``true``: the flag without a value
    means true.
    """

    flag: str
    environment: str
    place: tuple[str, ...]
    about: str
    many: bool = False
    true: bool = False


OPTIONS = (
    # Options of 4paradigm's plugin.
    Option(
        "fail-on-init-error",
        "FAIL_ON_INIT_ERROR",
        ("flags", "failOnInitError"),
        "exit if the driver does not respond at the start; false: wait for it",
        true=True,
    ),
    Option("device-split-count", "DEVICE_SPLIT_COUNT", (*VCUDA, "splitCount"), "number of slices of each GPU (K)"),
    Option(
        "device-memory-scaling",
        "DEVICE_MEMORY_SCALING",
        (*VCUDA, "memoryScaling"),
        "memory of all slices divided by the GPU's memory (S)",
    ),
    Option(
        "device-cores-scaling",
        "DEVICE_CORES_SCALING",
        (*VCUDA, "coresScaling"),
        "factor C: each slice gets 100*C/K %% of the SMs (multiprocessors)",
    ),
    Option(
        "enable-legacy-preferred",
        "ENABLE_LEGACY_PREFERRED",
        (*VCUDA, "legacyPreferred"),
        "spread slices over GPUs for a kubelet without GetPreferredAllocation",
        true=True,
    ),
    # Options of HAMi's plugin.
    Option("resource-name", "RESOURCE_NAME", (*VCUDA, "resourceName"), "resource name of the slices"),
    Option(
        "disable-core-limit",
        "DISABLE_CORE_LIMIT",
        (*VCUDA, "disableCoreLimit"),
        "do not limit the use of the SMs",
        true=True,
    ),
    Option(
        "gpu-core-policy",
        "GPU_CORE_UTILIZATION_POLICY",
        (*VCUDA, "corePolicy"),
        "limit of the SMs: default, force or disable",
    ),
    Option(
        "active-oom-killer",
        "ACTIVE_OOM_KILLER",
        (*VCUDA, "oomKiller"),
        "end a process that exceeds the memory limit",
        true=True,
    ),
    Option(
        "libcuda-log-level", "LIBCUDA_LOG_LEVEL", (*VCUDA, "logLevel"), "log level of the library in containers, 0 to 5"
    ),
    # Options of NVIDIA's plugin.
    Option(
        "mig-strategy", "MIG_STRATEGY", ("flags", "migStrategy"), "how MIG devices are offered: none, single or mixed"
    ),
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
        "auto, nvml or tegra; accepted for compatibility, has no effect",
    ),
    Option(
        "pass-device-specs",
        "PASS_DEVICE_SPECS",
        (*PLUGIN, "passDeviceSpecs"),
        "list the device nodes in each allocation",
        true=True,
    ),
    Option(
        "device-list-strategy",
        "DEVICE_LIST_STRATEGY",
        (*PLUGIN, "deviceListStrategy"),
        "how containers get GPUs: auto, envvar, volume-mounts, cdi-annotations, cdi-cri; several separated by commas",
        many=True,
    ),
    Option(
        "device-id-strategy",
        "DEVICE_ID_STRATEGY",
        (*PLUGIN, "deviceIDStrategy"),
        "how GPUs are named for the container runtime: uuid or index",
    ),
    Option(
        "cdi-annotation-prefix",
        "CDI_ANNOTATION_PREFIX",
        (*PLUGIN, "cdiAnnotationPrefix"),
        "prefix of the annotation that cdi-annotations uses",
    ),
    Option(
        "nvidia-ctk-path", "NVIDIA_CTK_PATH", (*PLUGIN, "nvidiaCTKPath"), "accepted for compatibility, has no effect"
    ),
    Option(
        "container-driver-root",
        "CONTAINER_DRIVER_ROOT",
        (*PLUGIN, "containerDriverRoot"),
        "accepted for compatibility, has no effect",
    ),
    Option(
        "shared-devices-allocation-policy",
        "SHARED_DEVICES_ALLOCATION_POLICY",
        (*PLUGIN, "sharedDevicesAllocationPolicy"),
        "order of GPUs for new slices: distributed or packed",
    ),
    Option("oneshot", "GFD_ONESHOT", (*GFD, "oneshot"), "write the node's labels only at the start", true=True),
    Option(
        "no-timestamp",
        "GFD_NO_TIMESTAMP",
        (*GFD, "noTimestamp"),
        "write no timestamp into the node's labels",
        true=True,
    ),
    Option(
        "sleep-interval",
        "GFD_SLEEP_INTERVAL",
        (*GFD, "sleepInterval"),
        "time between two updates of the node's labels, such as 60s",
    ),
    Option(
        "output-file", "GFD_OUTPUT_FILE", (*GFD, "outputFile"), "path of the feature file, which has the node's labels"
    ),
    Option(
        "machine-type-file",
        "GFD_MACHINE_TYPE_FILE",
        (*GFD, "machineTypeFile"),
        "file with the machine's product name, for a label of the node",
    ),
    Option(
        "imex-channel-ids",
        "IMEX_CHANNEL_IDS",
        ("imex", "channelIDs"),
        "IMEX channels (of NVIDIA's memory exchange) for containers: 0, or empty for none",
        many=True,
    ),
    Option("imex-required", "IMEX_REQUIRED", ("imex", "required"), "whether the IMEX channels are required", true=True),
)


def add_to(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "options of node.yaml",
        "Each option, or the environment variable in brackets, overrides the value in node.yaml.",
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
    """Returns (option, text, source) of each option that is set; ``source`` is the flag or variable. An empty variable
    counts as unset.
    """
    out = []
    for one in OPTIONS:
        said = given.get(one.flag.replace("-", "_"))
        if said is not None:
            out.append((one, str(said), f"--{one.flag}"))
        elif environment.get(one.environment):
            out.append((one, environment[one.environment], one.environment))
    return out


def apply(config: dict[str, Any], chosen: list[tuple[Option, str, str]]) -> dict[str, str]:
    """Writes the options into ``config``, the parsed node.yaml. Returns place → flag or variable that set it, so that
    messages can name it.
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
