# SPDX-License-Identifier: Apache-2.0
"""Tests the options of the device plugins of NVIDIA, 4paradigm and HAMi, which this plugin accepts under their own
names. Precedence: the flag, then the environment variable, then node.yaml, then the default.
"""

from __future__ import annotations

import json

import pytest
from vgpu_plugin import main
from vgpu_plugin.errors import Fatal
from vgpu_plugin.offer import options
from vgpu_plugin.offer.settings import load

# Each row is an option. columns: its flag, its environment variable and its key in node.yaml; then three values for the
# test: one for node.yaml, one for the environment and one for the flag
ROWS = [
    ("fail-on-init-error", "FAIL_ON_INIT_ERROR", "flags.failOnInitError", False, "true", "false"),
    ("device-split-count", "DEVICE_SPLIT_COUNT", "sharing.vcuda.splitCount", 2, "3", "4"),
    ("device-memory-scaling", "DEVICE_MEMORY_SCALING", "sharing.vcuda.memoryScaling", "1.0", "1.5", "2.0"),
    ("device-cores-scaling", "DEVICE_CORES_SCALING", "sharing.vcuda.coresScaling", "1", "0.29", "2"),
    ("enable-legacy-preferred", "ENABLE_LEGACY_PREFERRED", "sharing.vcuda.legacyPreferred", False, "true", "false"),
    ("resource-name", "RESOURCE_NAME", "sharing.vcuda.resourceName", "a.io/gpu", "b.io/gpu", "c.io/gpu"),
    ("disable-core-limit", "DISABLE_CORE_LIMIT", "sharing.vcuda.disableCoreLimit", False, "true", "false"),
    ("gpu-core-policy", "GPU_CORE_UTILIZATION_POLICY", "sharing.vcuda.corePolicy", "default", "force", "disable"),
    ("active-oom-killer", "ACTIVE_OOM_KILLER", "sharing.vcuda.oomKiller", False, "true", "false"),
    ("libcuda-log-level", "LIBCUDA_LOG_LEVEL", "sharing.vcuda.logLevel", 1, "3", "4"),
    ("mig-strategy", "MIG_STRATEGY", "flags.migStrategy", "none", "single", "mixed"),
    ("mps-root", "MPS_ROOT", "flags.mpsRoot", "/a", "/b", "/c"),
    ("nvidia-driver-root", "NVIDIA_DRIVER_ROOT", "flags.nvidiaDriverRoot", "/a", "/b", "/c"),
    ("nvidia-dev-root", "NVIDIA_DEV_ROOT", "flags.nvidiaDevRoot", "/a", "/b", "/c"),
    ("gdrcopy-enabled", "GDRCOPY_ENABLED", "flags.gdrcopyEnabled", False, "true", "false"),
    ("gds-enabled", "GDS_ENABLED", "flags.gdsEnabled", False, "true", "false"),
    ("mofed-enabled", "MOFED_ENABLED", "flags.mofedEnabled", False, "true", "false"),
    ("device-discovery-strategy", "DEVICE_DISCOVERY_STRATEGY", "flags.deviceDiscoveryStrategy", "auto", "nvml", "auto"),
    ("pass-device-specs", "PASS_DEVICE_SPECS", "flags.plugin.passDeviceSpecs", False, "true", "false"),
    ("device-list-strategy", "DEVICE_LIST_STRATEGY", "flags.plugin.deviceListStrategy", "auto", "envvar", "cdi-cri"),
    ("device-id-strategy", "DEVICE_ID_STRATEGY", "flags.plugin.deviceIDStrategy", "uuid", "index", "uuid"),
    ("cdi-annotation-prefix", "CDI_ANNOTATION_PREFIX", "flags.plugin.cdiAnnotationPrefix", "a.io/", "b.io/", "c.io/"),
    ("nvidia-ctk-path", "NVIDIA_CTK_PATH", "flags.plugin.nvidiaCTKPath", "/a", "/b", "/c"),
    ("container-driver-root", "CONTAINER_DRIVER_ROOT", "flags.plugin.containerDriverRoot", "/a", "/b", "/c"),
    (
        "shared-devices-allocation-policy",
        "SHARED_DEVICES_ALLOCATION_POLICY",
        "flags.plugin.sharedDevicesAllocationPolicy",
        "distributed",
        "packed",
        "distributed",
    ),
    ("oneshot", "GFD_ONESHOT", "flags.gfd.oneshot", False, "true", "false"),
    ("no-timestamp", "GFD_NO_TIMESTAMP", "flags.gfd.noTimestamp", False, "true", "false"),
    ("sleep-interval", "GFD_SLEEP_INTERVAL", "flags.gfd.sleepInterval", "1s", "2s", "3s"),
    ("output-file", "GFD_OUTPUT_FILE", "flags.gfd.outputFile", "/a", "/b", "/c"),
    ("machine-type-file", "GFD_MACHINE_TYPE_FILE", "flags.gfd.machineTypeFile", "/a", "/b", "/c"),
    ("imex-required", "IMEX_REQUIRED", "imex.required", False, "true", "false"),
]


def file_with(path, place: str, value) -> None:
    config: dict = {"version": "v1"}
    section = config
    *parents, last = place.split(".")
    for key in parents:
        section = section.setdefault(key, {})
    section[last] = value
    path.write_text(json.dumps(config))


def found(settings, place: str):
    value = settings.config
    for key in place.split("."):
        value = value[key]
    return value


def read_as(value):
    """Converts a text to the type that the value has in node.yaml."""
    return {"true": True, "false": False}.get(value, value)


def chosen(arguments: list[str], environment: dict[str, str]):
    return options.overrides(vars(main.parser().parse_args(arguments)), environment)


@pytest.mark.parametrize(
    ("flag", "variable", "place", "file", "environment", "said"), ROWS, ids=[row[0] for row in ROWS]
)
def test_precedence_is_flag_environment_file(tmp_path, flag, variable, place, file, environment, said):
    path = tmp_path / "node.yaml"
    file_with(path, place, file)
    number = isinstance(file, int) and not isinstance(file, bool)

    def as_file(text):
        return int(text) if number else read_as(text)

    assert found(load(path, chosen([], {})), place) == file
    assert found(load(path, chosen([], {variable: environment})), place) == as_file(environment)
    both = chosen([f"--{flag}={said}"], {variable: environment})
    assert found(load(path, both), place) == as_file(said)
    # An empty variable counts as not set.
    assert found(load(path, chosen([], {variable: ""})), place) == file


def test_every_option_is_in_the_table():
    assert {row[0] for row in ROWS} | {"imex-channel-ids"} == {one.flag for one in options.OPTIONS}
    assert {row[1] for row in ROWS} | {"IMEX_CHANNEL_IDS"} == {one.environment for one in options.OPTIONS}
    assert {row[2] for row in ROWS} | {"imex.channelIDs"} == {".".join(one.place) for one in options.OPTIONS}


@pytest.mark.parametrize(
    ("arguments", "place", "value"),
    [
        # Go programs accept a boolean flag without a value, so this program must accept it too.
        (["--fail-on-init-error"], "flags.failOnInitError", True),
        (["--device-list-strategy", "envvar,cdi-annotations"], "flags.plugin.deviceListStrategy", None),
        (["--imex-channel-ids", "0"], "imex.channelIDs", [0]),
    ],
)
def test_accepted_spellings_of_flags(tmp_path, arguments, place, value):
    path = tmp_path / "node.yaml"
    path.write_text('{"version": "v1"}')
    settings = load(path, chosen(arguments, {}))
    assert found(settings, place) == (value if value is not None else ["envvar", "cdi-annotations"])


def test_scaling_of_the_environment_is_exact(tmp_path):
    """If the factor were a binary float, 100 * 0.29 would become 28 instead of 29."""
    from vgpu_plugin.offer.settings import make_slices

    from ..samples import gpus

    path = tmp_path / "node.yaml"
    path.write_text('{"version": "v1", "sharing": {"vcuda": {"splitCount": 1}}}')
    settings = load(path, chosen([], {"DEVICE_CORES_SCALING": "0.29"}))
    assert [one.sm_percent for one in make_slices(gpus("T4"), settings)] == [29]


# columns: command-line arguments, environment variables; expected words of the error
@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (
            ["--device-split-count=many"],
            {},
            'expected a whole number from 1 to 1024, found "many" (set by --device-split',
        ),
        ([], {"DEVICE_MEMORY_SCALING": "-1"}, "sharing.vcuda.memoryScaling: expected a decimal above 0"),
        ([], {"DEVICE_MEMORY_SCALING": "-1"}, "(set by DEVICE_MEMORY_SCALING)"),
        ([], {"MIG_STRATEGY": "singel"}, 'did you mean "single"'),
    ],
)
def test_error_names_the_source_of_the_option(tmp_path, arguments, environment, words):
    path = tmp_path / "node.yaml"
    path.write_text('{"version": "v1"}')
    with pytest.raises(Fatal) as fault:
        load(path, chosen(arguments, environment))
    assert words in str(fault.value)


def test_yaml_file_is_read_with_exact_decimals(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "version: v1\nflags:\n  migStrategy: none\nsharing:\n  vcuda:\n    splitCount: 4\n    memoryScaling: 1.10\n"
    )
    vcuda = load(path).vcuda
    assert (vcuda["splitCount"], vcuda["memoryScaling"]) == (4, "1.10")
