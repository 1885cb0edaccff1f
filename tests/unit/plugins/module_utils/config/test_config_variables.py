# SPDX-License-Identifier: Apache-2.0
"""Tests the table of group variables (the inventory variables named vgpu_*), which checks their values, and node.yaml,
the device plugin's configuration file that is written from them and read back strictly. A named configuration is an
additional file, set by vgpu_configs, that a node label selects.
"""

from __future__ import annotations

import json

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.config import kinds, node_config
from ansible_collections.vgpu.fleet.plugins.module_utils.config import variables as schema

# columns: variable, its invalid value; expected words of the message
BAD_VARIABLES = [
    ("vgpu_split_count", 0, "whole number from 1"),
    ("vgpu_split_count", -3, "found -3"),
    ("vgpu_split_count", "seven", 'found "seven"'),
    ("vgpu_split_count", 2.5, "found 2.5"),
    ("vgpu_split_count", True, "found True"),
    ("vgpu_split_count", None, "found None"),
    ("vgpu_sharing", "vcude", 'did you mean "vcuda"'),
    ("vgpu_sharing", "slices", "one of vcuda, time-slicing"),
    ("vgpu_memory_scaling", 0, "above 0"),
    ("vgpu_memory_scaling", -1.5, "above 0"),
    ("vgpu_memory_scaling", "a lot", "above 0"),
    ("vgpu_memory_scaling", float("nan"), "above 0"),
    ("vgpu_memory_scaling", float("inf"), "above 0"),
    ("vgpu_cores_scaling", 0.0, "above 0"),
    ("vgpu_cores_scaling", False, "above 0"),
    ("vgpu_devices", {"index": 0}, "expected a list"),
    ("vgpu_count_context", "maybe", "true or false"),
    ("vgpu_count_context", 1, "true or false"),
    ("vgpu_log_level", 6, "from 0 to 5"),
    ("vgpu_resource_names", {"count": "gpu"}, "resource name"),
    ("vgpu_mig_geometry", {"1gb": 7}, "MIG profile"),
    ("vgpu_mig_geometry", {"1g.5gb": 0}, "from 1 to 7"),
    ("vgpu_mig_geometry", {"1g.5gb": 8}, "from 1 to 7"),
    ("vgpu_mig_replicas", {"1g.5gb": 1}, "from 2 to 1024"),
    ("vgpu_split_count", 1025, "from 1 to 1024"),
    # A trailing line break, which a pattern with $ would accept, must be an error like any other invalid character.
    ("vgpu_resource_names", {"count": "nvidia.com/gpu\n"}, "resource name"),
    ("vgpu_devices", [{"match": {"uuid": "GPU-1\n"}}], "GPU UUID"),
    ("vgpu_mig_geometry", {"1g.10gb\n": 7}, "MIG profile"),
    ("vgpu_configs", {"big\n": {}}, "lowercase letters"),
    ("vgpu_verify", "sometimes", "changed, always, never"),
]


@pytest.mark.parametrize(
    ("name", "value"), [("vgpu_split_count", 1024), ("vgpu_mig_geometry", {"1g.5gb": 7}), ("vgpu_log_level", 5)]
)
def test_the_greatest_value_is_accepted(name, value):
    findings = []
    schema.read({name: value}, findings)
    assert findings == []


@pytest.mark.parametrize(("name", "value", "words"), BAD_VARIABLES)
def test_bad_value_is_one_error_that_names_the_variable(name, value, words):
    findings = []
    schema.read({name: value}, findings)
    assert [finding.level for finding in findings] == ["error"]
    assert findings[0].path.startswith(name)
    assert words in findings[0].message


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("vgpu_splitcount", "vgpu_split_count"),
        ("vgpu_split_counts", "vgpu_split_count"),
        ("vgpu_memory_scale", "vgpu_memory_scaling"),
        ("vgpu_device", "vgpu_devices"),
        ("vgpu_oom_kiler", "vgpu_oom_killer"),
        ("vgpu_slices", "vgpu_split_count"),
        ("vgpu_slice", "vgpu_split_count"),
        ("vgpu_slices_per_gpu", "vgpu_split_count"),
        ("vgpu_slice_sizng", "vgpu_slice_sizing"),
    ],
)
def test_unknown_variable_names_the_nearest(name, meant):
    findings = []
    schema.read({name: 1}, findings)
    assert [finding.path for finding in findings] == [name]
    assert f'did you mean "{meant}"?' in findings[0].message


# columns: an invalid entry of vgpu_devices (an exception: other values for some GPUs); expected key in the error, words
# of the error
BAD_EXCEPTIONS = [
    ({"match": {"index": 0}, "splitcount": 1}, "vgpu_devices[0].splitcount", 'did you mean "split_count"?'),
    ({"match": {"idx": 0}, "split_count": 1}, "vgpu_devices[0].match.idx", 'did you mean "index"?'),
    ({"split_count": 1}, "vgpu_devices[0]", 'the key "match" is missing'),
    ({"match": {}, "split_count": 1}, "vgpu_devices[0].match", "at least one of index, uuid, model"),
    ({"match": {"index": 0}, "split_count": 0}, "vgpu_devices[0].split_count", "whole number from 1"),
    ({"match": {"index": "first"}}, "vgpu_devices[0].match.index", "whole number from 0"),
    ({"match": {"index": 256}}, "vgpu_devices[0].match.index", "whole number from 0 to 255, found 256"),
    ({"match": {"index": -1}}, "vgpu_devices[0].match.index", "found -1"),
    ({"match": {"uuid": "0"}}, "vgpu_devices[0].match.uuid", "GPU UUID"),
    ("0", "vgpu_devices[0]", "expected a mapping"),
]


@pytest.mark.parametrize(("exception", "path", "words"), BAD_EXCEPTIONS)
def test_bad_exception_is_an_error_with_its_place(exception, path, words):
    findings = []
    schema.read({"vgpu_devices": [exception]}, findings)
    assert [(finding.level, finding.path) for finding in findings] == [("error", path)]
    assert words in findings[0].message


@pytest.mark.parametrize(
    ("name", "value", "clean"),
    [
        ("vgpu_split_count", "7", 7),  # -e vgpu_split_count=7 gives a string
        ("vgpu_memory_scaling", 1, "1"),
        ("vgpu_memory_scaling", 0.29, "0.29"),
        ("vgpu_memory_scaling", "1.50", "1.50"),
        ("vgpu_memory_scaling", 1e-5, "0.00001"),
        ("vgpu_cores_scaling", None, None),
        ("vgpu_oom_killer", "true", True),
        # Names of profiles of an RTX PRO 6000.
        ("vgpu_mig_geometry", {"1g.24gb-me": 3, "1g.24gb+me.all": "1"}, {"1g.24gb-me": 3, "1g.24gb+me.all": 1}),
        ("vgpu_devices", [], []),
        ("vgpu_devices", [{"match": {"index": 0}}], [{"match": {"index": 0}}]),
        ("vgpu_devices", [{"match": {"index": 255}}], [{"match": {"index": 255}}]),
    ],
)
def test_valid_value_is_converted(name, value, clean):
    findings = []
    assert schema.read({name: value}, findings)[name] == clean
    assert findings == []


@pytest.mark.parametrize(
    ("values", "split"),
    [
        ({}, 2),
        ({"vgpu_slice_sizing": "equal"}, 2),
        ({"vgpu_slice_sizing": "requested"}, 10),
        ({"vgpu_slice_sizing": "requested", "vgpu_split_count": 2}, 2),
        ({"vgpu_slice_sizing": "requested", "vgpu_sharing": "time-slicing"}, 2),
    ],
)
def test_default_split_count_is_10_if_pods_request_their_sizes(values, split):
    """If pods request their own sizes, the default is 10, because with a limit of two pods on a GPU, two small pods
    would keep a third pod off a nearly free GPU."""
    assert schema.read(values, [])["vgpu_split_count"] == split


@pytest.mark.parametrize("name", ["vgpu_kubeconfig", "vgpu_kube_context", "vgpu_package_environment"])
def test_named_configuration_refuses_cluster_access_variables(name):
    findings = []
    schema.read({"vgpu_configs": {"small": {name[len("vgpu_") :]: "x"}}}, findings)
    assert [(one.level, one.path) for one in findings] == [("error", f"vgpu_configs.small.{name[len('vgpu_') :]}")]


def test_labels_are_set_by_default():
    assert schema.defaults()["vgpu_labels"] is True


def test_every_default_is_valid():
    findings = []
    schema.read(schema.defaults(), findings)
    assert findings == []


def test_unrelated_variables_are_ignored():
    findings = []
    assert "ansible_user" not in schema.read({"ansible_user": "x", "docker_vgpu_x": 1}, findings)
    assert findings == []


@pytest.mark.parametrize(
    ("values", "path", "level"),
    [
        ({"vgpu_sharing": "mig", "vgpu_mig_strategy": "mixed"}, "vgpu_mig_geometry", "error"),
        ({"vgpu_sharing": "mig", "vgpu_mig_geometry": {"1g.10gb": 7}}, "vgpu_mig_strategy", "error"),
        ({"vgpu_mig_geometry": {"1g.10gb": 7}}, "vgpu_mig_geometry", "warning"),
        ({"vgpu_mig_replicas": {"1g.10gb": 2}}, "vgpu_mig_replicas", "warning"),
        (
            {
                "vgpu_sharing": "mig",
                "vgpu_mig_strategy": "mixed",
                "vgpu_mig_geometry": {"1g.10gb": 7},
                "vgpu_mig_replicas": {"2g.20gb": 2},
            },
            "vgpu_mig_replicas.2g.20gb",
            "error",
        ),
        ({"vgpu_sharing": "mps", "vgpu_devices": [{"match": {"index": 0}, "split_count": 8}]}, "vgpu_devices", "error"),
        (
            {"vgpu_sharing": "mps", "vgpu_configs": {"big": {"devices": [{"match": {"index": 0}}]}}},
            "vgpu_configs.big.devices",
            "error",
        ),
        (
            {"vgpu_sharing": "mps", "vgpu_configs": {"big": {"split_count": 3}}},
            "vgpu_configs.big.split_count",
            "error",
        ),
        ({"vgpu_allocation": "dra", "vgpu_sharing": "mps"}, "vgpu_allocation", "error"),
        ({"vgpu_allocation": "dra", "vgpu_handover": "envvar"}, "vgpu_handover", "error"),
        ({"vgpu_allocation": "dra", "vgpu_multi_slice": "merge"}, "vgpu_multi_slice", "warning"),
        ({"vgpu_configs": {"big": {"allocation": "dra"}}}, "vgpu_configs.big.allocation", "error"),
        ({"vgpu_sharing": "time-slicing", "vgpu_log_level": 4}, "vgpu_log_level", "warning"),
        (
            {"vgpu_sharing": "time-slicing", "vgpu_resource_names": {"count": "x.io/gpu"}},
            "vgpu_resource_names",
            "error",
        ),
        ({"vgpu_resource_names": {"memory": "x.io/mem"}}, "vgpu_resource_names.memory", "warning"),
        ({"vgpu_configs": {"big": {"time_slice": "long"}}}, "vgpu_configs.big.time_slice", "error"),
        ({"vgpu_configs": {"big": {"sharing": "mps"}}}, "vgpu_configs.big.sharing", "error"),
        ({"vgpu_sharing": "none", "vgpu_configs": {"big": {"sharing": "vcuda"}}}, "vgpu_configs.big.sharing", "error"),
        ({"vgpu_configs": {"big": {"memory_scaling": 2}}}, "vgpu_configs.big.memory_scaling", "warning"),
        (
            {"vgpu_configs": {"big": {"devices": [{"match": {"index": 0}, "memory_scaling": 2}]}}},
            "vgpu_configs.big.devices[0].memory_scaling",
            "warning",
        ),
        # Only the host's variable vgpu_memory_scaling gets the warning. The named configuration "big" inherits its
        # value and does not set it, so "big" gets none.
        ({"vgpu_memory_scaling": 2, "vgpu_configs": {"big": {"split_count": 3}}}, "vgpu_memory_scaling", "warning"),
        ({"vgpu_time_slice": "long"}, "vgpu_time_slice", "warning"),
        ({"vgpu_sharing": "none", "vgpu_split_count": 4}, "vgpu_split_count", "warning"),
        ({"vgpu_sharing": "none", "vgpu_resource_names": {"count": "x.io/gpu"}}, "vgpu_resource_names", "error"),
    ],
)
def test_variable_without_effect_has_a_finding(values, path, level):
    findings = []
    clean = schema.read(values, findings)
    assert findings == []
    assert [(finding.path, finding.level) for finding in schema.unavailable(clean)] == [(path, level)]


@pytest.mark.parametrize("sharing", ["vcuda", "time-slicing", "mps", "none"])
def test_mig_strategy_is_allowed_in_every_sharing_mode(sharing):
    """vgpu_mig_strategy decides whether GPUs in MIG mode are advertised in addition to the other GPUs, and by which
    resource name. So it has an effect in every sharing mode."""
    clean = schema.read({"vgpu_sharing": sharing, "vgpu_mig_strategy": "mixed"}, [])
    assert schema.unavailable(clean) == []


PART = {"match": {"index": 0}}

# columns: variables that are set; variables for which a warning about oversold memory is expected (a memory scaling
# above 1: the slices of a GPU together have more memory than the GPU)
OVERSOLD = [
    ({}, []),
    # No warning, because the library carries out this option.
    ({"vgpu_oom_killer": True}, []),
    # No warning, because the library and the arbiter (the program that shares out compute time) enforce shares of the
    # SMs.
    ({"vgpu_core_policy": "force"}, []),
    ({"vgpu_handover": "volume-mounts"}, []),
    ({"vgpu_handover": "envvar"}, []),
    ({"vgpu_memory_scaling": 1.5}, ["vgpu_memory_scaling"]),
    ({"vgpu_memory_scaling": "1.0"}, []),
    ({"vgpu_memory_scaling": 0.5}, []),
    ({"vgpu_devices": [dict(PART, memory_scaling=2)]}, ["vgpu_devices[0].memory_scaling"]),
    ({"vgpu_split_count": 4, "vgpu_cores_scaling": 1}, []),
    # Entries for single GPUs that inherit the host's memory scaling add no warnings of their own.
    (
        {"vgpu_memory_scaling": 2, "vgpu_devices": [dict(PART, split_count=3), dict(PART, split_count=5)]},
        ["vgpu_memory_scaling"],
    ),
]


@pytest.mark.parametrize(("values", "names"), OVERSOLD)
def test_oversold_memory_is_one_warning(values, names):
    findings = []
    clean = schema.read(values, findings)
    assert findings == []
    found = schema.unavailable(clean)
    assert [(finding.level, finding.path) for finding in found] == [("warning", name) for name in names]
    assert all("host memory" in finding.message and "\n" not in finding.message for finding in found)


def test_named_configurations_override_the_configuration_of_the_host():
    variables = {
        "vgpu_split_count": 7,
        "vgpu_log_level": 3,
        "vgpu_configs": {"big": {"split_count": 2}, "whole": {"sharing": "none"}, "slots": {"sharing": "time-slicing"}},
    }
    assert schema.unavailable(schema.read(variables, [])) == []
    named = node_config.named_from_vars(variables)
    base = node_config.from_vars(variables)
    assert named["big"]["sharing"]["vcuda"] == {**base["sharing"]["vcuda"], "splitCount": 2}
    assert named["whole"]["sharing"] == {}
    assert [one["replicas"] for one in named["slots"]["sharing"]["timeSlicing"]["resources"]] == [7]
    assert all(node_config.validate(one) == [] for one in named.values())


def test_fault_of_a_named_configuration_names_the_entry():
    variables = {"vgpu_configs": {"slots": {"sharing": "time-slicing", "split_count": 1}}}
    with pytest.raises(node_config.ConfigError, match=r"vgpu_configs\.slots: vgpu_split_count: expected at least 2"):
        node_config.named_from_vars(variables)


def test_named_configurations_are_checked_too():
    findings = []
    schema.read({"vgpu_configs": {"big": {"split_cuont": 2}}}, findings)
    assert [finding.path for finding in findings] == ["vgpu_configs.big.split_cuont"]


@pytest.mark.parametrize(
    ("node_path", "variable"),
    [
        ("sharing.vcuda.splitCount", "vgpu_split_count"),
        ("sharing.vcuda.devices[0].match", "vgpu_devices[0].match"),
        ("sharing.vcuda.devices[2].splitCount", "vgpu_devices[2].split_count"),
        ("flags.failOnInitError", "vgpu_fail_on_init_error"),
        ("sharing.vcuda", None),
    ],
)
def test_path_in_node_yaml_maps_to_its_variable(node_path, variable):
    assert schema.variable_of(node_path) == variable


def test_node_yaml_of_a_group():
    variables = {
        "vgpu_split_count": 7,
        "vgpu_memory_scaling": 1.0,
        "vgpu_cores_scaling": 7,
        "vgpu_devices": [{"match": {"index": 0}, "split_count": 1, "memory_scaling": 1.5}],
    }
    assert node_config.from_vars(variables) == {
        "version": "v1",
        "flags": {
            "failOnInitError": True,
            "migStrategy": "none",
            "plugin": {"deviceListStrategy": "auto"},
        },
        "sharing": {
            "vcuda": {
                "libraryRoot": "/usr/local/lib/vgpu",
                "resourceName": "nvidia.com/gpu",
                "splitCount": 7,
                "memoryScaling": "1.0",
                "coresScaling": "7",
                "sliceSizing": "equal",
                "multiSlice": "distinct",
                "countContext": True,
                "corePolicy": "default",
                "disableCoreLimit": False,
                "oomKiller": False,
                "logLevel": 1,
                "legacyPreferred": False,
                "watch": "report",
                "devices": [{"match": {"index": 0}, "splitCount": 1, "memoryScaling": "1.5"}],
            }
        },
    }


def test_node_yaml_of_a_group_that_does_not_share():
    config = node_config.from_vars({"vgpu_sharing": "none"})
    assert config["sharing"] == {}
    assert node_config.validate(config) == []
    assert node_config.resource_name(config) == "nvidia.com/gpu"


REPLICATED = [
    (
        {"vgpu_sharing": "time-slicing", "vgpu_split_count": 4},
        {
            "timeSlicing": {
                "renameByDefault": False,
                "failRequestsGreaterThanOne": False,
                "resources": [{"name": "nvidia.com/gpu", "replicas": 4}],
            }
        },
    ),
    (
        {
            "vgpu_sharing": "time-slicing",
            "vgpu_rename_by_default": True,
            "vgpu_fail_requests_greater_than_one": True,
            "vgpu_devices": [{"match": {"index": 1}, "split_count": 8}],
        },
        {
            "timeSlicing": {
                "renameByDefault": True,
                "failRequestsGreaterThanOne": True,
                "resources": [
                    {"name": "nvidia.com/gpu", "replicas": 8, "devices": ["1"]},
                    {"name": "nvidia.com/gpu", "replicas": 2},
                ],
            }
        },
    ),
]


@pytest.mark.parametrize(("variables", "wanted"), REPLICATED)
def test_node_yaml_of_a_group_with_time_slicing(variables, wanted):
    config = node_config.from_vars(variables)
    assert config["sharing"] == wanted
    assert node_config.validate(config) == []


@pytest.mark.parametrize(
    ("variables", "path"),
    [
        ({"vgpu_split_count": 1}, "vgpu_split_count"),
        ({"vgpu_devices": [{"match": {"model": "T4"}, "split_count": 3}]}, "vgpu_devices[0].match"),
        ({"vgpu_devices": [{"match": {"index": 0}, "split_count": 1}]}, "vgpu_devices[0].split_count"),
    ],
)
def test_setting_without_a_key_in_nvidias_file_is_an_error(variables, path):
    with pytest.raises(node_config.ConfigError) as caught:
        node_config.from_vars(dict(variables, vgpu_sharing="time-slicing"))
    assert [finding.path for finding in caught.value.findings] == [path]


def test_requested_sizes_use_all_resource_names():
    names = {"count": "x.io/gpu", "memory": "x.io/mem", "cores": "x.io/cores", "priority": "x.io/priority"}
    variables = {"vgpu_slice_sizing": "requested", "vgpu_resource_names": names}
    assert [one for one in schema.unavailable(schema.read(variables, [])) if "resource_names" in one.path] == []
    vcuda = node_config.from_vars(variables)["sharing"]["vcuda"]
    assert (vcuda["resourceName"], vcuda["priorityResource"]) == ("x.io/gpu", "x.io/priority")
    assert vcuda["resourceNames"] == {"memory": "x.io/mem", "cores": "x.io/cores"}
    assert "resourceNames" not in node_config.from_vars({"vgpu_slice_sizing": "requested"})["sharing"]["vcuda"]
    assert "priorityResource" not in node_config.from_vars({"vgpu_slice_sizing": "requested"})["sharing"]["vcuda"]


@pytest.mark.parametrize("sharing", ["vcuda", "time-slicing", "none"])
def test_allocation_is_written_only_for_claims(sharing):
    """Claims are ResourceClaims of Kubernetes, a second way to allocate GPUs to pods. A group without claims must
    get the same file text as from earlier versions, so that an upgrade does not change the file."""
    group = {"vgpu_sharing": sharing}
    assert "allocation" not in node_config.from_vars(group)["flags"]
    assert "allocation" not in node_config.from_vars({**group, "vgpu_allocation": "device-plugin"})["flags"]
    written = node_config.from_vars({**group, "vgpu_allocation": "dra", "vgpu_configs": {"big": {}}})
    assert written["flags"]["allocation"] == "dra"
    named = node_config.named_from_vars({**group, "vgpu_allocation": "dra", "vgpu_configs": {"big": {}}})
    assert named["big"]["flags"]["allocation"] == "dra", "a node label does not change it"


def test_written_file_is_valid_and_reads_back_equal():
    config = node_config.from_vars({"vgpu_resource_names": {"count": "example.com/gpu"}})
    assert node_config.validate(config) == []
    assert node_config.load(node_config.dump(config)) == config
    assert node_config.resource_name(config) == "example.com/gpu"
    assert "coresScaling" not in config["sharing"]["vcuda"]  # The default follows each GPU's split count.


def test_variables_with_faults_give_no_file():
    with pytest.raises(node_config.ConfigError) as caught:
        node_config.from_vars({"vgpu_split_count": 0, "vgpu_sharing": "vcude"})
    assert {finding.path for finding in caught.value.findings} == {"vgpu_split_count", "vgpu_sharing"}


# columns: content of node.yaml; expected key in the error, words of the error
BAD_FILES = [
    ({"version": "v1", "sharing": {"timeSlcing": {}}}, "sharing.timeSlcing", 'did you mean "timeSlicing"?'),
    ({"version": "v1", "sharing": {"vcuda": {"splitcount": 2}}}, "sharing.vcuda.splitcount", '"splitCount"'),
    ({"version": "v2"}, "version", "expected one of v1"),
    ({}, "", '"version" is missing'),
    ({"version": "v1", "flags": {"failOnInitError": "maybe"}}, "flags.failOnInitError", "true or false"),
    ({"version": "v1", "sharing": {"vcuda": {}, "mps": {}}}, "sharing", "sharing.mps and sharing.vcuda exclude"),
    (
        {"version": "v1", "sharing": {"timeSlicing": {"resources": [{"name": "nvidia.com/gpu", "replicas": 1}]}}},
        "sharing.timeSlicing.resources[0].replicas",
        "from 2",
    ),
    ({"version": "v1", "sharing": {"vcuda": {"devices": [{"split": 1}]}}}, "sharing.vcuda.devices[0].split", ""),
]


@pytest.mark.parametrize(("config", "path", "words"), BAD_FILES)
def test_bad_file_names_the_file_the_key_and_the_fault(config, path, words):
    with pytest.raises(node_config.ConfigError) as caught:
        node_config.load(json.dumps(config), "/etc/vgpu/node.yaml")
    assert path in {finding.path for finding in caught.value.findings}
    assert words in str(caught.value)
    assert str(caught.value).startswith("/etc/vgpu/node.yaml: ")


def test_text_that_is_not_json_names_the_line():
    with pytest.raises(node_config.ConfigError) as caught:
        node_config.load('{\n "version": "v1"\n "flags": {}}', "/etc/vgpu/node.yaml")
    assert "line 3" in str(caught.value)


def test_a_scaling_written_as_a_number_keeps_its_digits():
    config = node_config.load('{"version": "v1", "sharing": {"vcuda": {"memoryScaling": 1.10, "splitCount": 2}}}')
    assert config["sharing"]["vcuda"]["memoryScaling"] == "1.10"


def test_nearest_is_silent_when_nothing_is_near():
    assert kinds.nearest("zzz", ["split_count"]) is None
