# SPDX-License-Identifier: Apache-2.0
"""Tests the tool that converts the settings of other projects (NVIDIA's and 4paradigm's device plugins, HAMi's chart)
to group variables. The tool prints a note about each setting that it cannot convert, and about what the user must do.
There is a row for each option that these projects document.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ansible_collections.vgpu.fleet.plugins.module_utils.pods import fractions, preferences
from ansible_collections.vgpu.fleet.plugins.module_utils.pods.resources import Config, resource_names

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "tools" / "convert_values"
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "native" / "plugin" / "src")]

from convert_values import convert, tables  # noqa: E402

POLICY = "scheduler: {defaultSchedulerPolicy"
CHART = {
    "vgpu_sharing": "vcuda",
    "vgpu_slice_sizing": "requested",
    "vgpu_kubeconfig": "~/.kube/config",
    "vgpu_split_count": 10,
}


def converted(text):
    return convert.convert(list(yaml.safe_load_all(text)))


def daemonset(*args, image="4pdosc/k8s-device-plugin:latest", env=""):
    words = "".join(f"\n        - {word}" for word in args)
    return f"""
apiVersion: apps/v1
kind: DaemonSet
metadata: {{name: nvidia-device-plugin-daemonset}}
spec:
  template:
    spec:
      containers:
      - name: nvidia-device-plugin-ctr
        image: {image}
        args:{words or " []"}
        env: [{env}]
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--fail-on-init-error=false"], {"vgpu_fail_on_init_error": False}),
        (["--fail-on-init-error"], {"vgpu_fail_on_init_error": True}),
        (["--device-split-count=7"], {"vgpu_split_count": 7}),
        (["--device-split-count", '"7"'], {"vgpu_split_count": 7}),
        (["--device-memory-scaling=1.5"], {"vgpu_memory_scaling": "1.5"}),
        (["--device-cores-scaling=3"], {"vgpu_cores_scaling": 3}),
        (["--enable-legacy-preferred=true"], {"vgpu_legacy_preferred": True}),
        (["--mig-strategy=mixed"], {"vgpu_mig_strategy": "mixed"}),
        (["--pass-device-specs=true"], {"device_plugin_options": ["--pass-device-specs=true"]}),
        (["--pass-device-specs", "--device-split-count=3"],
         {"device_plugin_options": ["--pass-device-specs=true"], "vgpu_split_count": 3}),
        (["--device-id-strategy=index"], {"device_plugin_options": ["--device-id-strategy=index"]}),
        (["--device-list-strategy=volume-mounts"], {"vgpu_handover": "volume-mounts"}),
        (["--device-list-strategy=envvar,cdi-cri"], {"vgpu_handover": "auto"}),
        (["--disable-core-limit=true"], {"vgpu_disable_core_limit": True}),
        (["--nvidia-driver-root=/run/nvidia/driver"],
         {"device_plugin_options": ["--nvidia-driver-root=/run/nvidia/driver"]}),
    ],
)  # fmt: skip
def test_options_of_a_plugin_are_converted(words, expected):
    assert converted(daemonset(*words)).variables == {"vgpu_sharing": "vcuda", **expected}


# columns: environment variable of HAMi's device plugin; expected group variables
@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ('{name: DEVICE_SPLIT_COUNT, value: "4"}', {"vgpu_split_count": 4}),
        ("{name: GPU_CORE_UTILIZATION_POLICY, value: force}", {"vgpu_core_policy": "force"}),
        ('{name: ACTIVE_OOM_KILLER, value: "true"}', {"vgpu_oom_killer": True}),
        ('{name: LIBCUDA_LOG_LEVEL, value: "5"}', {"vgpu_log_level": 5}),
    ],
)
def test_environment_of_a_plugin_is_converted(env, expected):
    assert converted(daemonset(env=env)).variables == {"vgpu_sharing": "vcuda", **expected}


# columns: values of HAMi's chart; expected group variables
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("devicePlugin: {deviceSplitCount: 5}", {"vgpu_split_count": 5}),
        ("devicePlugin: {deviceMemoryScaling: 1.5}", {"vgpu_memory_scaling": "1.5"}),
        ("devicePlugin: {deviceMemoryScaling: 5}", {"vgpu_memory_scaling": 5}),
        ("devicePlugin: {deviceCoreScaling: 2.0}", {"vgpu_cores_scaling": "2"}),
        ("devicePlugin: {migStrategy: mixed}", {"vgpu_mig_strategy": "mixed"}),
        ('devicePlugin: {migStrategy: "none"}', {"vgpu_mig_strategy": "none"}),
        ('devicePlugin: {disablecorelimit: "true"}', {"vgpu_disable_core_limit": True}),
        ('devicePlugin: {disablecorelimit: "false"}', {"vgpu_disable_core_limit": False}),
        ("resourceName: example.com/gpu", {"vgpu_resource_names": {"count": "example.com/gpu"}}),
        ("resourceMem: example.com/mem", {"vgpu_resource_names": {"memory": "example.com/mem"}}),
        ("resourceMem: a.b/c\nresourceMemPercentage: a.b/d",
         {"vgpu_resource_names": {"memory": "a.b/c", "memory_percentage": "a.b/d"}}),
        ("resourceCores: a.b/c", {"vgpu_resource_names": {"cores": "a.b/c"}}),
        ("resourceName: a.b/c\nresourcePriority: a.b/p",
         {"vgpu_resource_names": {"count": "a.b/c", "priority": "a.b/p"}}),
        # HAMi gives defaultMem to a pod that requests only a number of GPUs. Our scheduler does so only with
        # scheduler_plain: default.
        ("scheduler: {defaultMem: 5000}", {"scheduler_default_memory": 5000, "scheduler_plain": "default"}),
        ("scheduler: {defaultMem: '3000'}", {"scheduler_default_memory": 3000, "scheduler_plain": "default"}),
        ("scheduler: {defaultMem: 0}", {"scheduler_default_memory": 0}),
        ("scheduler: {defaultCores: 30}", {"scheduler_default_cores": 30}),
        ("scheduler: {defaultCores: 0}", {"scheduler_default_cores": 0}),
        ("scheduler: {defaultGPUNum: 2}", {"scheduler_default_count": 2}),
        ("scheduler: {defaultGPUNum: 0}", {"scheduler_default_count": 0}),
        (f"{POLICY}: {{nodeSchedulerPolicy: spread}}}}", {"scheduler_node_policy": "spread"}),
        (f"{POLICY}: {{gpuSchedulerPolicy: topology-aware}}}}", {"scheduler_gpu_policy": "topology"}),
        ('devicePlugin: {extraArgs: ["--pass-device-specs"]}', {"device_plugin_options": ["--pass-device-specs=true"]}),
        ("devicePlugin: {passDeviceSpecsEnabled: true}", {"device_plugin_options": ["--pass-device-specs=true"]}),
        ("devicePlugin: {nvidiaDriverRoot: /run/nvidia/driver}",
         {"device_plugin_options": ["--nvidia-driver-root=/run/nvidia/driver"]}),
        ("devices: {nvidia: {gpuCorePolicy: force, libCudaLogLevel: 4}}\nschedulerName: hami-scheduler",
         {"vgpu_core_policy": "force", "vgpu_log_level": 4}),
        # a complete values file, with NVIDIA's default as the resource name
        ("devicePlugin: {enabled: true, deviceSplitCount: 4}\nresourceName: nvidia.com/gpu",
         {"vgpu_split_count": 4, "vgpu_resource_names": {"count": "nvidia.com/gpu"}}),
    ],
)  # fmt: skip
def test_values_of_hami_are_converted(text, expected):
    assert converted(text).variables == {**CHART, **expected}


# columns: values of HAMi's chart that cannot be converted; expected path in the note
@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("devicePlugin: {brandNew: '{a: 1}'}", "devicePlugin.brandNew"),
        (f"{POLICY}: {{gpuSchedulerPolicy: mutex}}}}", "scheduler.defaultSchedulerPolicy.gpuSchedulerPolicy"),
        ("devicePlugin: {somethingNew: 1}", "devicePlugin.somethingNew"),
        ("devicePlugin: {extraArgs: [--brand-new=1]}", "devicePlugin.extraArgs[0]"),
        ("scheduler: {service: {monitorPort: 31993}}", "scheduler.service.monitorPort"),
        ("scheduler: {service: {httpPort: 443, schedulerPort: 31998}}", "scheduler.service.schedulerPort"),
        ("devicePlugin: {service: {httpPort: 31992}}", "devicePlugin.service.httpPort"),
        ("devicePlugin: {monitor: {ctrPath: /usr/local/vgpu/containers}}", "devicePlugin.monitor.ctrPath"),
    ],
)
def test_unknown_values_of_hami_get_a_note(text, path):
    found = converted(text)
    assert path in [note.path for note in found.notes]
    assert found.variables == CHART


NEEDED = [
    # columns: values of HAMi's chart; expected words of a note
    ("devicePlugin: {deviceSplitCount: 5}", "cluster.yml"),
    ("devicePlugin: {deviceSplitCount: 5}", "a pod that requests only a count of GPUs gets 5000 MiB from older charts"),
    ("scheduler: {defaultMem: 5000}", "all compute of the card"),
]


@pytest.mark.parametrize(("text", "words"), NEEDED)
def test_notes_name_additional_steps_for_hami(text, words):
    assert [one for one in converted(text).notes if words in one.text], converted(text).notes


def test_default_that_is_set_causes_no_note():
    assert not [one for one in converted("scheduler: {defaultMem: 0}").notes if "5000" in one.text]


RENAMED = [
    ("A100.large_Config", "a100-large-config"),
    ("-x-", "x"),
    ("plain", "plain"),
]


@pytest.mark.parametrize(("name", "ours"), RENAMED)
def test_invalid_configuration_names_are_changed(name, ours):
    """Preflight, the check before a run, would refuse the old name. So the name is changed, and a note says which node
    label selects the new name."""
    inner = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: %d}]}}"
    values = {"config": {"default": "all", "map": {"all": inner % 2, name: inner % 8}}}
    found = convert.convert([values])
    assert list(found.variables["vgpu_configs"]) == [ours]
    told = [one.text for one in found.notes if f"nvidia.com/device-plugin.config={ours}" in one.text]
    assert bool(told) == (name != ours)
    assert not [one for one in found.notes if one.text.startswith("preflight says (error)")], found.notes


def test_configurations_with_equal_new_names_are_not_merged():
    inner = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: %d}]}}"
    values = {"config": {"default": "all", "map": {"all": inner % 2, "Big": inner % 8, "big": inner % 4}}}
    found = convert.convert([values])
    assert found.variables["vgpu_configs"] == {"big": {"sharing": "time-slicing", "split_count": 8}}
    assert [one.path for one in found.notes if "is taken" in one.text] == ["config.map.big"]


def test_other_vendors_devices_give_one_note():
    found = converted(
        "resourceName: nvidia.com/gpu\nmluResourceName: a.b/c\nhcuResourceMem: a.b/d\n"
        "devices: {ascend: {enabled: true}, kunlun: {customresources: [a.b/e]}}"
    )
    assert [note.text for note in found.notes if "vendor" in note.text] == [
        "and 3 more settings are for other vendors' cards: this collection shares only NVIDIA's GPUs"
    ]
    assert len(found.notes) == 1 + len(converted("resourceName: nvidia.com/gpu").notes)
    (one,) = [note for note in converted("resourceName: a.b/c\nmluResourceName: a.b/d").notes if "vendor" in note.text]
    assert one == ("mluResourceName", "is for other vendors' cards: this collection shares only NVIDIA's GPUs")


def test_unknown_setting_of_nvidia_gets_no_note_on_other_vendors():
    found = converted("schedulerName: hami\ndevices: {nvidia: {unheardOf: x}}")
    assert [note.text for note in found.notes if note.path == "devices.nvidia.unheardOf"] == [convert.tables.NO_MEANING]


def test_nodes_in_the_values_of_hami():
    inner = '{"nodeconfig": [{"name": "node-1", "devicesplitcount": 3}]}'
    found = convert.convert([{"devicePlugin": {"nodeConfiguration": {"config": inner}}}])
    assert found.variables == CHART
    (note,) = [one for one in found.notes if "nodeconfig" in one.path]
    assert note.path == "devicePlugin.nodeConfiguration.config.nodeconfig[0]"
    assert "host_vars/node-1.yml: vgpu_split_count: 3" in note.text


def test_image_settings_of_a_chart_cause_no_note():
    found = converted("devicePlugin: {image: {repository: x}}\nscheduler: {kubeScheduler: {imageTag: v1.27.4}}")
    assert [note.path for note in found.notes if note.path.startswith(("devicePlugin", "scheduler"))] == []


NVIDIA = """
version: v1
flags:
  migStrategy: "none"
  failOnInitError: true
  nvidiaDriverRoot: "/"
  plugin:
    passDeviceSpecs: false
    deviceListStrategy: "envvar"
    deviceIDStrategy: "uuid"
  gfd:
    oneshot: false
    noTimestamp: false
    outputFile: /etc/kubernetes/node-feature-discovery/features.d/gfd
    sleepInterval: 60s
"""
FLAGS = {
    "vgpu_mig_strategy": "none",
    "vgpu_fail_on_init_error": True,
    "vgpu_handover": "envvar",
    "device_plugin_options": [
        "--nvidia-driver-root=/",
        "--pass-device-specs=false",
        "--device-id-strategy=uuid",
        "--oneshot=false",
        "--no-timestamp=false",
        "--output-file=/etc/kubernetes/node-feature-discovery/features.d/gfd",
        "--sleep-interval=60s",
    ],
}


@pytest.mark.parametrize(
    ("sharing", "expected"),
    [
        ("", {"vgpu_sharing": "none"}),
        ("timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 5}]}",
         {"vgpu_sharing": "time-slicing", "vgpu_split_count": 5}),
        ("mps: {resources: [{name: nvidia.com/gpu, replicas: 4}]}", {"vgpu_sharing": "mps", "vgpu_split_count": 4}),
        ("timeSlicing: {renameByDefault: true, failRequestsGreaterThanOne: true, "
         "resources: [{name: nvidia.com/gpu, replicas: 2}]}",
         {"vgpu_sharing": "time-slicing", "vgpu_split_count": 2, "vgpu_rename_by_default": True,
          "vgpu_fail_requests_greater_than_one": True}),
        ('timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 3, devices: ["0", GPU-5d1b]}, '
         "{name: nvidia.com/gpu, replicas: 2}]}",
         {"vgpu_sharing": "time-slicing", "vgpu_split_count": 2,
          "vgpu_devices": [{"match": {"index": 0}, "split_count": 3},
                           {"match": {"uuid": "GPU-5d1b"}, "split_count": 3}]}),
    ],
)  # fmt: skip
def test_file_of_nvidia(sharing, expected):
    text = NVIDIA + (f"sharing:\n  {sharing}\n" if sharing else "")
    assert converted(text).variables == {**FLAGS, **expected}


def test_values_of_nvidia_with_two_files():
    inner = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: %d}]}}"
    values = {
        "gfd": {"enabled": True},
        "config": {"default": "all", "map": {"all": inner % 2, "a100-80gb-config": inner % 8}},
    }
    found = convert.convert([values])
    assert found.variables == {
        "vgpu_sharing": "time-slicing",
        "vgpu_split_count": 2,
        "vgpu_configs": {"a100-80gb-config": {"sharing": "time-slicing", "split_count": 8}},
        "device_plugin_options": ["--labels"],
    }


SLICED = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}"
OPERATOR = {"operator": {"defaultRuntime": "docker"}, "driver": {"enabled": False}, "toolkit": {"enabled": True}}
CHARTS_OF_NVIDIA = [
    # columns: the case, the values, the expected variables, path and words of the expected note
    # All values, as printed by ``helm get values --all``. HAMi uses one of these keys too.
    ("default values", {"config": {"name": "", "map": {}}, "migStrategy": None, "devicePlugin": {"enabled": True},
                        "gfd": {"enabled": False}, "mps": {"root": "/run/nvidia/mps"}},
     {"vgpu_sharing": "none", "device_plugin_options": ["--mps-root=/run/nvidia/mps"]}, "devicePlugin.enabled", "role"),
    ("one file", {"config": {"map": {"any": SLICED}}, "devicePlugin": {"enabled": True}},
     {"vgpu_sharing": "time-slicing", "vgpu_split_count": 4}, "devicePlugin.enabled", "role"),
    ("flags only", {"migStrategy": "mixed", "failOnInitError": False},
     {"vgpu_sharing": "none", "vgpu_mig_strategy": "mixed", "vgpu_fail_on_init_error": False}, "", ""),
    ("labels", {"gfd": {"enabled": True, "noTimestamp": True, "sleepInterval": "30s"}},
     {"vgpu_sharing": "none", "device_plugin_options": ["--labels", "--no-timestamp=true", "--sleep-interval=30s"]},
     "", ""),
    ("ConfigMap outside the values", {"config": {"name": "plugin-configs"}}, {}, "config.name",
     "kubectl get configmap plugin-configs -o yaml | python tools/convert_values -"),
    ("operator", {**OPERATOR, "devicePlugin": {"enabled": True}, "mig": {"strategy": "single"}},
     {"vgpu_sharing": "none", "vgpu_mig_strategy": "single"}, "driver", "nvidia_driver"),
    ("operator with a file", {**OPERATOR, "devicePlugin": {"config": {"default": "any", "data": {"any": SLICED}}}},
     {"vgpu_sharing": "time-slicing", "vgpu_split_count": 4}, "toolkit", "nvidia_docker"),
    ("operator with a ConfigMap", {**OPERATOR, "devicePlugin": {"config": {"name": "mine"}}}, {},
     "devicePlugin.config.name", "kubectl get configmap mine -o yaml"),
    ("operator with environment variables",
     {**OPERATOR, "devicePlugin": {"env": [{"name": "DEVICE_LIST_STRATEGY", "value": "cdi-cri"}]}},
     {"vgpu_sharing": "none", "vgpu_handover": "cdi-cri"}, "operator", "not carried over"),
    # Only changed values, as printed by ``helm get values``.
    ("only the operator's ConfigMap", {"devicePlugin": {"config": {"name": "mine", "default": "any"}}}, {},
     "devicePlugin.config.name", "kubectl get configmap mine -o yaml"),
    ("only the operator's MIG strategy", {"mig": {"strategy": "single"}, "devicePlugin": {"env": []}},
     {"vgpu_sharing": "none", "vgpu_mig_strategy": "single"}, "devicePlugin", "role"),
    # Another plugin, such as HAMi, may share the GPUs, so no sharing variable is set.
    ("operator without its plugin",
     {**OPERATOR, "devicePlugin": {"enabled": False, "config": {"data": {"any": SLICED}}}}, {},
     "devicePlugin", "is off"),
    ("labels without the plugin", {"devicePlugin": {"enabled": False}, "gfd": {"enabled": True}},
     {"device_plugin_options": ["--labels"]}, "devicePlugin.enabled", "is off"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("about", "values", "expected", "path", "words"), CHARTS_OF_NVIDIA, ids=[one[0] for one in CHARTS_OF_NVIDIA]
)
def test_charts_of_nvidia(about, values, expected, path, words):
    found = convert.convert([values])
    assert found.variables == expected
    notes = {note.path: note.text for note in found.notes}
    assert words in notes.get(path, ""), notes


@pytest.mark.parametrize("title", ["USER-SUPPLIED VALUES", "COMPUTED VALUES"])
def test_title_printed_by_helm_is_ignored(title):
    values = {"migStrategy": "mixed", "gfd": {"enabled": True}}
    found, plain = convert.convert([{title: None, **values}]), convert.convert([values])
    assert (found.variables, found.notes) == (plain.variables, plain.notes)


def test_cluster_policy_of_the_operator_is_converted():
    document = {"kind": "ClusterPolicy", "spec": {**OPERATOR, "devicePlugin": {}, "mig": {"strategy": "mixed"}}}
    assert convert.convert([document]).variables == {"vgpu_sharing": "none", "vgpu_mig_strategy": "mixed"}


@pytest.mark.parametrize("items", [None, [], 1, 2])
def test_list_printed_by_kubectl_is_converted(items):
    """The list may be missing, be empty, or have one or more items."""
    policy = {"kind": "ClusterPolicy", "spec": {**OPERATOR, "mig": {"strategy": "mixed"}}}
    given = [policy] * items if isinstance(items, int) else items
    found = convert.convert([{"kind": "List", "items": given}])
    assert found.variables == ({"vgpu_sharing": "none", "vgpu_mig_strategy": "mixed"} if given else {})


def test_unknown_key_of_nvidias_chart_causes_a_note():
    """An unknown key causes a note; settings of the chart's own pods do not."""
    found = convert.convert([{"migStrategy": "none", "brandNew": 1, "updateStrategy": {"type": "RollingUpdate"}}])
    assert [note.path for note in found.notes] == ["brandNew"]


@pytest.mark.parametrize(
    ("documents", "said"),
    [
        ([{"colour": "green", "size": 1}], "the file has the keys colour, size; expected"),
        ([{}], "the file has the keys none; expected"),
        ([{"migStrategy": "none"}, {"colour": "green"}], "document 2 has the keys colour; expected"),
    ],
)
def test_unknown_document_is_refused(documents, said):
    with pytest.raises(convert.Unknown, match=said):
        convert.convert(documents)


def test_config_map_after_the_values_decides_the_sharing():
    """The values name a ConfigMap; the ConfigMap after them sets the sharing."""
    found = convert.convert([{"config": {"name": "mine"}}, {"kind": "ConfigMap", "data": {"any": SLICED}}])
    assert found.variables == {"vgpu_sharing": "time-slicing", "vgpu_split_count": 4}


def test_files_in_a_config_map_are_converted():
    document = {"kind": "ConfigMap", "data": {"any": NVIDIA, "notes": "just words"}}
    found = convert.convert([document])
    assert found.variables == {**FLAGS, "vgpu_sharing": "none"}
    assert [note.path for note in found.notes if note.path.startswith("data.")] == ["data.notes"]


def test_nodes_of_hami_are_host_variables():
    found = convert.convert(
        [{"nodeconfig": [{"name": "node-1", "devicesplitcount": 3, "filterdevices": {"index": [1]}}]}]
    )
    assert found.variables == {}
    assert [note.path for note in found.notes] == ["nodeconfig[0]", "nodeconfig[0].filterdevices"]
    assert "host_vars/node-1.yml: vgpu_split_count: 3" in found.notes[0].text


def test_first_of_two_conflicting_files_is_used():
    found = converted(daemonset("--device-split-count=3") + "---" + daemonset("--device-split-count=4"))
    assert found.variables["vgpu_split_count"] == 3
    assert any("vgpu_split_count would be 4" in note.text for note in found.notes)


def test_value_that_preflight_refuses_causes_a_note():
    found = converted(daemonset("--device-split-count=0"))
    assert any(note.text.startswith("preflight says (error)") for note in found.notes)


def test_plain_plugin_of_nvidia_has_no_sharing():
    text = daemonset("--device-split-count=3", image="nvcr.io/nvidia/k8s-device-plugin:v0.17.0")
    assert converted(text).variables["vgpu_sharing"] == "none"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ACTIVE_OOM_KILLER", "for all pods of a host group: vgpu_oom_killer"),
        ("GPU_CORE_UTILIZATION_POLICY", "for all pods of a host group: vgpu_core_policy"),
        ("LIBCUDA_LOG_LEVEL", "for all pods of a host group: vgpu_log_level"),
        ("CUDA_DISABLE_CONTROL", "vgpu_disable_core_limit"),
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "a pod may lower its own part by this variable"),
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "a pod may lower its own part by this variable"),
    ],
)
def test_environment_variables_of_a_pod_are_not_converted(name, words):
    env = [{"name": name, "value": "5"}, {"name": "MODEL", "value": "x"}]
    pod = {"kind": "Pod", "spec": {"containers": [{"image": "registry/train:1", "env": env}]}}
    found = convert.convert([pod])
    assert found.variables == {}
    assert [note.path for note in found.notes] == [f"containers[0].env.{name}"]
    assert words in found.notes[0].text


# columns: a resource name of a pod's limits; expected: whether the name causes a note on slice sizes
ASKED = [
    ("nvidia.com/gpu", False),
    ("nvidia.com/gpu.shared", False),
    ("nvidia.com/gpumem", True),
    ("nvidia.com/gpumem-percentage", True),
    ("nvidia.com/gpucores", True),
    ("nvidia.com/cores", True),
    ("nvidia.com/priority", True),
    ("aliyun.com/gpu-mem", True),
    ("tencent.com/vcuda-core", True),
    ("tencent.com/vcuda-memory", True),
    ("tke.cloud.tencent.com/qgpu-core", True),
    ("tke.cloud.tencent.com/qgpu-memory", True),
    ("volcano.sh/vgpu-number", True),
    ("volcano.sh/vgpu-memory", True),
    ("volcano.sh/vgpu-memory-percentage", True),
    ("volcano.sh/vgpu-cores", True),
    ("cpu", False),
]


def around(kind, pod):
    """Returns an object of this kind whose pods are like ``pod``."""
    if kind == "CronJob":
        return {"kind": kind, "spec": {"jobTemplate": {"spec": {"template": pod}}}}
    return {"kind": kind, **pod} if kind == "Pod" else {"kind": kind, "spec": {"template": pod}}


@pytest.mark.parametrize(("name", "told"), ASKED)
@pytest.mark.parametrize("kind", ["Pod", "Job", "CronJob"])
@pytest.mark.parametrize("list_of", ["containers", "initContainers"])
def test_resource_requests_of_a_pod_cause_notes(name, told, kind, list_of):
    spec = {"containers": [{"image": "registry/other:1"}]}
    spec[list_of] = [{"image": "registry/train:1", "resources": {"limits": {name: 8}}}]
    found = convert.convert([around(kind, {"spec": spec})])
    assert found.variables == {}
    assert [note.path for note in found.notes] == ([f"{list_of}[0].resources.limits.{name}"] if told else [])
    assert not told or "vgpu_slice_sizing: requested" in found.notes[0].text


@pytest.mark.parametrize("kind", ["Pod", "Job", "CronJob"])
def test_gpu_count_label_of_ack_causes_a_note(kind):
    """The label counts on the pod template, not on the Job."""
    labels = {"labels": {"app": "mnist", "aliyun.com/gpu-count": "2"}}
    pod = {"metadata": labels, "spec": {"containers": [{"image": "registry/train:1"}]}}
    found = convert.convert([around(kind, pod)])
    assert [note.path for note in found.notes] == ["metadata.labels.aliyun.com/gpu-count"]
    assert (
        convert.convert([{"kind": "Job", "metadata": labels, "spec": {"template": {"spec": pod["spec"]}}}]).notes == []
    )


def test_every_resource_and_annotation_of_a_request_has_a_note():
    """Every name has a note, except the GPU count, which works without a change."""
    config = Config()
    assert {*resource_names(config), "aliyun.com/gpu-count"} - {config.gpu, config.shared} == set(tables.ASKED)
    known = {*fractions.NAMES, *preferences.NODE_POLICY, *preferences.GPU_POLICY, preferences.NUMA_BIND}
    known |= {preferences.USE_UUID, preferences.AVOID_UUID, preferences.USE_MODEL, preferences.AVOID_MODEL}
    assert {one for one in known if not one.startswith("vgpu.fleet/")} == set(tables.ANNOTATIONS)
    assert tables.ANNOTATION_PREFIX == fractions.OF_CONTAINER


@pytest.mark.parametrize("kind", ["Pod", "Job", "CronJob"])
def test_request_annotations_of_a_pod_cause_notes(kind):
    limit = "nvidia.com/container.train.gpu-memory.limit"
    notes = {"gpu-fraction": "0.5", "hami.io/gpu-scheduler-policy": "mutex", "example.com/other": "x", limit: "8Gi"}
    pod = {"metadata": {"annotations": notes}, "spec": {"containers": [{"image": "registry/train:1"}]}}
    found = convert.convert([around(kind, pod)])
    assert [note.path for note in found.notes] == [
        "metadata.annotations.gpu-fraction",
        "metadata.annotations.hami.io/gpu-scheduler-policy",
        f"metadata.annotations.{limit}",
    ]
    assert "vgpu_slice_sizing: requested" in found.notes[0].text


def program(*arguments, **options):
    """Runs the program as a user does: from another folder and without this repository on PYTHONPATH."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False, **options)


@pytest.mark.parametrize("given", ["file", "stdin"])
def test_program_converts_a_file_and_its_input(tmp_path, given):
    values = tmp_path / "values.yaml"
    values.write_text("devicePlugin: {deviceSplitCount: 5, pluginPath: /kubelet}\n")
    done = program(values) if given == "file" else program("-", input=values.read_text())
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout) == {**CHART, "vgpu_split_count": 5}
    assert "# - devicePlugin.pluginPath: " in done.stdout


@pytest.mark.parametrize("text", ["- 1\n", "kind: Service\n", "a: [\n", "colour: green\n", '"just words"\n', "\udcff"])
def test_unusable_file_is_refused(tmp_path, text):
    path = tmp_path / "x.yaml"
    path.write_text(text, errors="surrogateescape")
    done = program(path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"convert_values: {path}: ") and done.stderr.count("\n") == 1


def test_missing_file_is_refused():
    done = program("/nowhere.yaml")
    assert done.returncode == 2
    assert "/nowhere.yaml" in done.stderr
