# SPDX-License-Identifier: Apache-2.0
"""Tests how GPU requests of pods are read in each dialect: the resource names, labels and annotations of one project
(HAMi, NVIDIA, Alibaba, Tencent, Volcano). The expected sizes were calculated by hand from the documentation of these
projects.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.pods import quantity, requests
from ansible_collections.vgpu.fleet.plugins.module_utils.pods.quantity import QuantityError, exact, whole
from ansible_collections.vgpu.fleet.plugins.module_utils.pods.requests import Card, Config, DialectError, Size

V100 = Card(16160, 16160, 8080, 50)
DOUBLED = Card(16160, 32320, 8080, 25)
SMALL = Card(1000, 1000, 500, 50)
GPU, MEM, PERCENT, CORES = "nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpumem-percentage", "nvidia.com/gpucores"
ALI, ALI_CORE, COUNT = "aliyun.com/gpu-mem", "aliyun.com/gpu-core.percentage", "aliyun.com/gpu-count"
CORE, UNITS = "tencent.com/vcuda-core", "tencent.com/vcuda-memory"
QCORE, QMEM = "tke.cloud.tencent.com/qgpu-core", "tke.cloud.tencent.com/qgpu-memory"
VOLCANO = "volcano.sh/vgpu-number"
VMEM, VPERCENT, VCORES = (f"volcano.sh/vgpu-{one}" for one in ("memory", "memory-percentage", "cores"))


def pod(limits=None, labels=None, annotations=None, **more):
    container = {"name": "main", "resources": {"limits": limits or {}}}
    return {
        "metadata": {"name": "a", "labels": labels or {}, "annotations": annotations or {}},
        "spec": {"containers": [container], **more},
    }


# columns: limits and labels of the pod, variables of the scheduler; expected dialect, number of GPUs, size of each
# share on a V100 of 16160 MiB (None: it does not fit)
ASKED = [
    ({GPU: 1, MEM: 3000, CORES: 30}, {}, {}, "hami", 1, Size(3000, 30)),
    ({GPU: "2", MEM: "3k"}, {}, {}, "hami", 2, Size(3000, 0)),
    ({MEM: 3000}, {}, {}, "hami", 1, Size(3000, 0)),
    ({GPU: 1, PERCENT: 50}, {}, {}, "hami", 1, Size(8080, 0)),
    ({GPU: 1, PERCENT: 33}, {}, {}, "hami", 1, Size(5332, 0)),
    ({GPU: 1, PERCENT: 0, CORES: 0}, {}, {}, "hami", 1, Size(5000, 0)),
    ({GPU: 1, "nvidia.com/cores": 40}, {}, {}, "hami", 1, Size(5000, 40)),
    ({CORES: 10}, {}, {"default_count": 3, "default_memory_mib": 100}, "hami", 3, Size(100, 10)),
    ({CORES: 10}, {}, {"default_memory_mib": 0}, "hami", 1, Size(16160, 10)),
    ({GPU: 1, MEM: 100}, {}, {"default_cores": 7}, "hami", 1, Size(100, 7)),
    ({GPU: 1, MEM: 10}, {}, {"memory_factor": 256}, "hami", 1, Size(2560, 0)),
    ({GPU: 1, MEM: 16161}, {}, {}, "hami", 1, None),
    ({GPU: 1}, {}, {"plain": "default"}, "hami", 1, Size(5000, 0)),
    ({GPU: 1}, {}, {}, "nvidia", 1, Size(16160, 100)),
    ({GPU: 2}, {}, {"plain": "slice"}, "4paradigm", 2, Size(8080, 50)),
    ({GPU + ".shared": 1}, {}, {}, "nvidia", 1, Size(8080, 50)),
    # The example of Alibaba's documentation: 8 GiB on two GPUs, of which nvidia-smi shows 4309 MiB each.
    ({ALI: 8}, {COUNT: "2"}, {}, "alibaba", 2, Size(4309, 0)),
    ({ALI: 8}, {COUNT: "2"}, {"gpu_mem_unit": "strict"}, "alibaba", 2, Size(4096, 0)),
    ({ALI: 15}, {}, {}, "alibaba", 1, Size(16160, 0)),
    ({ALI: 16}, {}, {}, "alibaba", 1, None),
    ({ALI: 4, ALI_CORE: 30}, {}, {}, "alibaba", 1, Size(4309, 30)),
    ({ALI: 8, GPU: 2}, {COUNT: "2"}, {}, "alibaba", 2, Size(4309, 0)),
    # Tencent's unit is 256 MiB, so 30 units are 7680 MiB.
    ({CORE: 50, UNITS: 30}, {}, {}, "tencent", 1, Size(7680, 50)),
    ({CORE: 100}, {}, {}, "tencent", 1, Size(16160, 100)),
    ({CORE: 300}, {}, {}, "tencent", 3, Size(16160, 100)),
    ({CORE: 300, GPU: 3}, {}, {}, "tencent", 3, Size(16160, 100)),
    ({QCORE: 30, QMEM: 5}, {}, {}, "qgpu", 1, Size(5120, 30)),
    ({QMEM: 5}, {}, {}, "qgpu", 1, Size(5120, 0)),
    ({QCORE: 200}, {}, {}, "qgpu", 2, Size(16160, 100)),
    # Tencent's own examples on two GPUs: core 160 gives 80 on each, core 121 gives 60 on each, rounded down.
    ({QCORE: 160, QMEM: 20}, {}, {}, "qgpu", 2, Size(10240, 80)),
    ({QCORE: 121, QMEM: 31}, {}, {}, "qgpu", 2, Size(15360, 60)),
    ({QCORE: 160, QMEM: 20, GPU: 2}, {}, {}, "qgpu", 2, Size(10240, 80)),
    ({VOLCANO: 2, VMEM: 3000, VCORES: 30}, {}, {}, "volcano", 2, Size(3000, 30)),
    ({VOLCANO: 1}, {}, {}, "volcano", 1, Size(16160, 0)),
    ({VOLCANO: 1, VPERCENT: 50, GPU: 1}, {}, {}, "volcano", 1, Size(8080, 0)),
    ({VMEM: 3000}, {}, {"default_count": 2}, "volcano", 2, Size(3000, 0)),
]


@pytest.mark.parametrize(("limits", "labels", "variables", "dialect", "count", "size"), ASKED)
def test_size_is_read_in_each_dialect(limits, labels, variables, dialect, count, size):
    asked = requests.read_pod(pod(limits, labels), Config(**variables))
    (ask,) = asked.asks
    assert (asked.dialect, ask.dialect, ask.gpus, requests.size_on(ask, V100)) == (dialect, dialect, count, size)
    assert ask.compute == ("shared" if ask.cores == 0 else "limited")


def test_size_is_also_read_from_requests():
    written = pod()
    written["spec"]["containers"][0]["resources"] = {"requests": {GPU: 1, MEM: 3000}}
    assert requests.size_on(requests.read_pod(written).asks[0], V100) == Size(3000, 0)


def test_relative_sizes_follow_the_card():
    (half,) = requests.read_pod(pod({GPU: 1, PERCENT: 50})).asks
    assert requests.size_on(half, DOUBLED) == Size(16160, 0), "percent of the memory that may be allocated"
    (units,) = requests.read_pod(pod({ALI: 4})).asks
    assert requests.size_on(units, DOUBLED) == Size(4309, 0), "a unit is relative to the card, not to oversold memory"
    assert requests.size_on(units, SMALL) is None, "a card under 1 GiB has no unit"


# columns: limits and labels of the pod; expected field that the message names, words of the message
LIMIT = 'spec.containers[0].resources.limits["{}"]'
REFUSED = [
    ({GPU: -1}, {}, LIMIT.format(GPU), "from 0 to 128 GPUs, found -1"),
    ({GPU: 0, MEM: 100}, {}, LIMIT.format(GPU), "is 0 together with nvidia.com/gpumem"),
    ({GPU: 1, MEM: 0}, {}, LIMIT.format(MEM), "from 1 to"),
    ({GPU: 1, MEM: -5}, {}, LIMIT.format(MEM), "found -5"),
    ({GPU: 1, MEM: "1.5"}, {}, LIMIT.format(MEM), "no whole number"),
    ({GPU: 1, MEM: "1500m"}, {}, LIMIT.format(MEM), "no whole number"),
    ({GPU: 1, MEM: "3000MB"}, {}, LIMIT.format(MEM), "no quantity"),
    ({GPU: 1, MEM: "lots"}, {}, LIMIT.format(MEM), "no quantity"),
    ({GPU: 1, MEM: ""}, {}, LIMIT.format(MEM), "no quantity"),
    ({GPU: 1, MEM: None}, {}, LIMIT.format(MEM), "no quantity"),
    ({GPU: 1, MEM: True}, {}, LIMIT.format(MEM), "no quantity"),
    ({GPU: 1, MEM: "9" * 39}, {}, LIMIT.format(MEM), "from 1 to"),
    ({GPU: 1, MEM: "9" * 400}, {}, LIMIT.format(MEM), "no quantity"),
    ({GPU: 1, MEM: "1E"}, {}, LIMIT.format(MEM), "from 1 to"),
    ({GPU: 129}, {}, LIMIT.format(GPU), "from 0 to 128"),
    ({GPU: 1, PERCENT: 101}, {}, LIMIT.format(PERCENT), "from 0 to 100 %"),
    ({GPU: 1, CORES: 101}, {}, LIMIT.format(CORES), "from 0 to 100 %"),
    ({GPU: 1, CORES: 30, "nvidia.com/cores": 40}, {}, LIMIT.format("nvidia.com/cores"), "nvidia.com/gpucores is 30"),
    ({GPU: 1, MEM: 100, PERCENT: 10}, {}, LIMIT.format(PERCENT), "together with nvidia.com/gpumem"),
    ({GPU: 1, "nvidia.com/priority": 2}, {}, LIMIT.format("nvidia.com/priority"), "from 0 to 1"),
    ({"nvidia.com/priority": 1}, {}, LIMIT.format("nvidia.com/priority"), "without a GPU"),
    ({GPU: 1, "nvidia.com/gpumemory": 1}, {}, LIMIT.format("nvidia.com/gpumemory"), '"nvidia.com/gpumem"'),
    ({"aliyun.com/gpumem": 1}, {}, LIMIT.format("aliyun.com/gpumem"), '"aliyun.com/gpu-mem"'),
    ({ALI: 7}, {COUNT: "2"}, LIMIT.format(ALI), "7 GiB over 2 GPUs"),
    ({ALI: 8}, {COUNT: "0"}, f'metadata.labels["{COUNT}"]', "from 1 to 128 GPUs"),
    ({ALI: 8}, {COUNT: "two"}, f'metadata.labels["{COUNT}"]', "no quantity"),
    ({ALI: 8}, {COUNT: "1.5"}, f'metadata.labels["{COUNT}"]', "no whole number"),
    ({ALI: 8}, {COUNT: "-2"}, f'metadata.labels["{COUNT}"]', "found"),
    ({ALI: 8, ALI_CORE: 30}, {COUNT: "2"}, LIMIT.format(ALI_CORE), "only memory is divided"),
    ({ALI: 8, GPU: 3}, {COUNT: "2"}, LIMIT.format(GPU), "asks for 2 GPUs"),
    ({ALI_CORE: 30}, {}, LIMIT.format(ALI_CORE), "without aliyun.com/gpu-mem"),
    ({CORE: 150, UNITS: 1}, {}, LIMIT.format(CORE), "multiple of 100"),
    ({CORE: 0, UNITS: 1}, {}, LIMIT.format(CORE), "from 1 to"),
    ({CORE: 50}, {}, LIMIT.format(CORE), "needs tencent.com/vcuda-memory"),
    ({CORE: 50, UNITS: 0}, {}, LIMIT.format(UNITS), "from 1 to"),
    ({UNITS: 4}, {}, LIMIT.format(UNITS), "without tencent.com/vcuda-core"),
    ({QCORE: 30}, {}, LIMIT.format(QCORE), "needs tke.cloud.tencent.com/qgpu-memory"),
    ({QCORE: 250, QMEM: 2}, {}, LIMIT.format(QMEM), "2 GiB over 3 GPUs"),
    ({QCORE: 160, QMEM: 20, GPU: 1}, {}, LIMIT.format(GPU), "asks for 2 GPUs"),
    ({QMEM: 0}, {}, LIMIT.format(QMEM), "from 1 to"),
    # Resources for the compute that other pods leave unused, which our scheduler does not support.
    ({QCORE + "-greedy": 30, QMEM: 5}, {}, LIMIT.format(QCORE + "-greedy"), "is no resource of GPU sharing"),
    ({VOLCANO: 1, VMEM: 100, VPERCENT: 10}, {}, LIMIT.format(VPERCENT), "together with volcano.sh/vgpu-memory"),
    ({VOLCANO: 0, VMEM: 100}, {}, LIMIT.format(VOLCANO), "from 1 to 128 GPUs"),
    ({VOLCANO: 1, VCORES: 101}, {}, LIMIT.format(VCORES), "from 0 to 100 %"),
    ({VOLCANO: 1, "volcano.sh/vgpu-mem": 1}, {}, LIMIT.format("volcano.sh/vgpu-mem"), '"volcano.sh/vgpu-memory"'),
    ({VOLCANO: 1, MEM: 100}, {}, LIMIT.format(VOLCANO), "of another dialect"),
    ({MEM: 100, ALI: 4}, {}, LIMIT.format(ALI), "of another dialect"),
    ({CORE: 50, UNITS: 4, ALI: 4}, {}, LIMIT.format(CORE), "of another dialect"),
]


@pytest.mark.parametrize(("limits", "labels", "where", "words"), REFUSED)
def test_refusal_names_the_field_and_the_reason(limits, labels, where, words):
    with pytest.raises(DialectError) as fault:
        requests.read_pod(pod(limits, labels))
    assert [one for one in fault.value.findings if one.path == where and words in one.message], str(fault.value)


def test_nvidias_resource_is_ignored_if_the_count_has_another_name():
    config = Config(gpu="example.com/gpu")
    assert not requests.read_pod(pod({"nvidia.com/gpu": "1"}), config).wants_gpus
    assert requests.read_pod(pod({"example.com/gpu": "1"}), config).wants_gpus
    with pytest.raises(DialectError, match="did you mean"):
        requests.read_pod(pod({"nvidia.com/gpumen": "1"}), config)


def test_count_is_mandatory_if_configured():
    with pytest.raises(DialectError, match=r"gpumem.*without nvidia.com/gpu"):
        requests.read_pod(pod({MEM: 100}), Config(default_count=0))


@pytest.mark.parametrize("limits", [{}, {"cpu": "2", "memory": "1Gi"}, {GPU: 0}, {"nvidia.com/mig-1g.5gb": 1}])
def test_pods_without_our_resources_are_ignored(limits):
    asked = requests.read_pod(pod(limits, {COUNT: "many"}, {"hami.io/gpu-scheduler-policy": "x"}))
    assert not asked.wants_gpus and asked.dialect == ""


def containers(*limits, **more):
    made = pod(**more)
    made["spec"]["containers"] = [
        {"name": f"c{n}", "resources": {"limits": one}} for n, one in enumerate(limits) if one is not None
    ]
    return made


def test_each_of_several_containers_has_its_request():
    asked = requests.read_pod(containers({GPU: 1, MEM: 100}, {}, {GPU: 1, CORES: 20}, {GPU: 1}))
    assert [(ask.container, ask.cores) for ask in asked.asks] == [("c0", 0), ("c2", 20), ("c3", 100)]
    assert asked.dialect == "hami"


def test_sidecars_count_and_init_containers_have_ended():
    made = containers({GPU: 1})
    made["spec"]["initContainers"] = [
        {"name": "first", "resources": {"limits": {GPU: 1}}},
        {"name": "side", "restartPolicy": "Always", "resources": {"limits": {GPU: 1}}},
    ]
    assert [(ask.container, ask.init) for ask in requests.read_pod(made).asks] == [
        ("first", True),
        ("side", False),
        ("c0", False),
    ]


# columns: pod with several containers; expected words of the refusal
@pytest.mark.parametrize(
    ("made", "words"),
    [
        (containers({MEM: 100}, {ALI: 4}), "one dialect in all containers"),
        (containers({GPU: 1}, {CORE: 50, UNITS: 4}), "one dialect in all containers"),
        (containers({ALI: 4}, {ALI: 4}, labels={COUNT: "2"}), "several containers request memory: c0, c1"),
        (containers({GPU: 1, "nvidia.com/priority": 0}, {GPU: 1, "nvidia.com/priority": 1}), "different priorities"),
    ],
)
def test_containers_of_different_dialects_are_refused(made, words):
    with pytest.raises(DialectError, match=words):
        requests.read_pod(made)


def test_several_containers_of_alibaba_on_one_gpu_each():
    asked = requests.read_pod(containers({ALI: 4}, {ALI: 2}))
    assert [requests.size_on(ask, V100).memory_mib for ask in asked.asks] == [4309, 2154]


def test_all_faults_are_reported_at_once():
    with pytest.raises(DialectError) as fault:
        requests.read_pod(containers({GPU: -1}, {MEM: "x"}, annotations={"hami.io/gpu-scheduler-policy": "binpak"}))
    assert len(fault.value.findings) == 3


PREFERENCES = [
    ({"hami.io/gpu-scheduler-policy": "topology-aware"}, {"gpu_policy": "topology"}),
    ({"hami.io/node-scheduler-policy": "spread"}, {"node_policy": "spread"}),
    ({"vgpu.fleet/gpu-policy": "spread", "hami.io/gpu-scheduler-policy": "binpack"}, {"gpu_policy": "spread"}),
    ({"nvidia.com/use-gpuuuid": "GPU-b, GPU-a"}, {"use_uuids": ("gpu-a", "gpu-b")}),
    ({"nvidia.com/nouse-gputype": "T4,a100"}, {"avoid_models": ("a100", "t4")}),
    ({"nvidia.com/numa-bind": "false", "nvidia.com/vgpu-mode": "hami-core"}, {}),
    ({"tke.cloud.tencent.com/app-class": "online"}, {}),
    # Annotations of HAMi 2.10: a GPU without other pods ("mutex"), GPUs of one NUMA node, and chains of policies. In a
    # chain, topology always comes first.
    ({"hami.io/gpu-scheduler-policy": "mutex"}, {"alone": True}),
    ({"nvidia.com/numa-bind": "True"}, {"one_numa": True}),
    ({"hami.io/gpu-scheduler-policy": "binpack,topology-aware"}, {"gpu_policy": "topology,binpack"}),
    ({"hami.io/gpu-scheduler-policy": " spread , numa "}, {"gpu_policy": "spread,numa"}),
    ({"vgpu.fleet/gpu-policy": "numa,binpack,mutex,numa"}, {"gpu_policy": "numa,binpack", "alone": True}),
]


@pytest.mark.parametrize(("annotations", "preferences"), PREFERENCES)
def test_preferences_of_a_pod(annotations, preferences):
    found = requests.read_pod(pod({GPU: 1}, {}, annotations))
    assert found.preferences == requests.Preferences(**preferences)
    (ask,) = found.asks
    assert (ask.alone, ask.one_numa) == (preferences.get("alone", False), preferences.get("one_numa", False))


# columns: the pod's annotations; expected words of the refusal
@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        ({"hami.io/gpu-scheduler-policy": "binpak"}, 'did you mean "binpack"'),
        ({"hami.io/gpu-scheduler-policy": "binpack,mutx"}, 'did you mean "mutex"'),
        ({"hami.io/gpu-scheduler-policy": "binpack,"}, 'found ""'),
        ({"hami.io/gpu-scheduler-policy": "spread,binpack"}, "contradict each other"),
        ({"hami.io/node-scheduler-policy": "mutex"}, "expected one of binpack, spread, topology"),
        ({"hami.io/node-scheduler-policy": "least"}, "expected one of binpack, spread, topology"),
        ({"nvidia.com/use-gpuuuid": "GPU-a,,"}, "expected names with commas"),
        ({"nvidia.com/numa-bind": "1"}, "expected true or false"),
        ({"nvidia.com/vgpu-mode": "mps"}, "not available in this version"),
        ({"tke.cloud.tencent.com/app-class": "offline"}, "not available in this version"),
    ],
)
def test_invalid_preferences_are_refused(annotations, words):
    with pytest.raises(DialectError, match=words) as fault:
        requests.read_pod(pod({GPU: 1}, {}, annotations))
    assert fault.value.findings[0].path == f'metadata.annotations["{next(iter(annotations))}"]'


FRACTION, MEMORY = "gpu-fraction", "gpu-memory"
DEVICES, NAMED = "gpu-fraction-num-devices", "gpu-fraction-container-name"
# columns: annotations of KAI, limits of both containers, (requesting container, GPUs, size on a V100)
FRACTIONS = [
    ({FRACTION: "0.5"}, {}, {}, ("c0", 1, Size(8080, 0))),
    ({FRACTION: "0.27"}, {}, {}, ("c0", 1, Size(4363, 0))),
    ({MEMORY: "2000"}, {}, {}, ("c0", 1, Size(2000, 0))),
    ({MEMORY: "16161"}, {}, {}, ("c0", 1, None)),
    ({MEMORY: "2000", DEVICES: "3"}, {}, {}, ("c0", 3, Size(2000, 0))),
    ({FRACTION: ".25", DEVICES: "2", NAMED: "c1"}, {}, {}, ("c1", 2, Size(4040, 0))),
    # The webhook adds the limit.
    ({FRACTION: "0.5", DEVICES: "2"}, {GPU: "2"}, {}, ("c0", 2, Size(8080, 0))),
]


@pytest.mark.parametrize(("annotations", "first", "second", "expected"), FRACTIONS)
def test_annotations_of_kai(annotations, first, second, expected):
    asked = requests.read_pod(containers(first, second, annotations=annotations))
    (ask,) = asked.asks
    assert (ask.container, ask.gpus, requests.size_on(ask, V100)) == expected
    assert (asked.dialect, ask.compute) == ("kai", "shared")


@pytest.mark.parametrize(
    ("annotations", "first", "second", "where", "words"),
    [
        ({FRACTION: "1"}, {}, {}, FRACTION, "from 0.01 to 0.99"),
        ({FRACTION: "0"}, {}, {}, FRACTION, "from 0.01 to 0.99"),
        ({FRACTION: "-0.5"}, {}, {}, FRACTION, "from 0.01 to 0.99"),
        ({FRACTION: "0.125"}, {}, {}, FRACTION, "at most two digits"),
        ({FRACTION: "half"}, {}, {}, FRACTION, 'found "half"'),
        ({MEMORY: "0"}, {}, {}, MEMORY, "from 1 to"),
        ({MEMORY: "2000Mib"}, {}, {}, MEMORY, "no quantity"),
        ({MEMORY: "2000", FRACTION: "0.5"}, {}, {}, FRACTION, "together with gpu-memory"),
        ({MEMORY: "2000", DEVICES: "0"}, {}, {}, DEVICES, "from 1 to 128 GPUs"),
        ({MEMORY: "2000", NAMED: "c7"}, {}, {}, NAMED, "no container"),
        ({MEMORY: "2000"}, {GPU: "2"}, {}, GPU, "asks for 1 GPU"),
        ({MEMORY: "2000"}, {MEM: "100"}, {}, MEM, "together with the annotation gpu-memory"),
        ({MEMORY: "2000"}, {}, {MEM: "100"}, MEM, "one dialect in all containers"),
    ],
)
def test_invalid_annotations_of_kai_are_refused(annotations, first, second, where, words):
    with pytest.raises(DialectError) as fault:
        requests.read_pod(containers(first, second, annotations=annotations))
    assert [one for one in fault.value.findings if f'"{where}"' in one.path and words in one.message], str(fault.value)


def of(container, field):
    return f"nvidia.com/container.{container}.{field}"


C0, C0_REQUEST = of("c0", "gpu-memory.limit"), of("c0", "gpu-memory.request")
C1, C1_REQUEST = of("c1", "gpu-memory.limit"), of("c1", "gpu-memory.request")
# columns: annotations of KAI, limits of the first container, (promised MiB, limit MiB) by container
OF_CONTAINERS = [
    ({C0: "2000Mi"}, {}, {"c0": (2000, 2000)}),
    ({C0: "8Gi"}, {}, {"c0": (8192, 8192)}),
    ({C0: "1048576"}, {}, {"c0": (1, 1)}),
    ({C1: "8Gi"}, {}, {"c1": (8192, 8192)}),
    ({C0: "8Gi", C0_REQUEST: "8Gi"}, {}, {"c0": (8192, 8192)}),
    ({C0: "8Gi", C0_REQUEST: "2000Mi"}, {}, {"c0": (2000, 8192)}),
    ({C0: "8Gi", C1: "4Gi", C1_REQUEST: "1Gi"}, {}, {"c0": (8192, 8192), "c1": (1024, 4096)}),
    # The webhook adds the limit.
    ({C0: "8Gi"}, {GPU: "1"}, {"c0": (8192, 8192)}),
    # Other names of KAI request nothing without a fraction or memory.
    ({C0: "8Gi", DEVICES: "2"}, {}, {"c0": (8192, 8192)}),
]


@pytest.mark.parametrize(("annotations", "first", "expected"), OF_CONTAINERS)
def test_limits_of_containers_by_kai(annotations, first, expected):
    asked = requests.read_pod(containers(first, {}, annotations=annotations))
    assert {one.container: (one.memory.amount, one.memory.amount + one.burst_mib) for one in asked.asks} == expected
    assert {(one.gpus, one.memory.kind, one.compute) for one in asked.asks} == {(1, "mib", "shared")}
    assert asked.dialect == "kai"


@pytest.mark.parametrize(
    ("annotations", "first", "second", "where", "words"),
    [
        ({C0: "0"}, {}, {}, C0, "in whole MiB"),
        ({C0: "8G"}, {}, {}, C0, 'found "8G"'),
        ({C0: "2000"}, {}, {}, C0, "such as 2000Mi"),
        ({C0: "1.5Mi"}, {}, {}, C0, "in whole MiB"),
        ({C0: "-1Gi"}, {}, {}, C0, "in whole MiB"),
        ({C0: "32Ti"}, {}, {}, C0, "in whole MiB"),
        ({C0: "much"}, {}, {}, C0, 'found "much"'),
        ({C0: None}, {}, {}, C0, "in whole MiB"),
        ({C0_REQUEST: "1Gi"}, {}, {}, C0_REQUEST, f"without {C0}"),
        ({C0: "1Gi", C0_REQUEST: "2Gi"}, {}, {}, C0_REQUEST, "more than the limit of 1024 MiB"),
        ({C0: "1Gi", C0_REQUEST: "0"}, {}, {}, C0_REQUEST, "in whole MiB"),
        ({C0: "1Gi", of("c0", "gpus.devices"): "0"}, {}, {}, of("c0", "gpus.devices"), "leave it out"),
        ({of("c0", "gpu-compute.mode"): "sm-sharing"}, {}, {}, of("c0", "gpu-compute.mode"), "leave it out"),
        ({of("c0", "gpu-memory.limits"): "1Gi"}, {}, {}, of("c0", "gpu-memory.limits"), "correct the name"),
        ({"nvidia.com/container.": "1Gi"}, {}, {}, "nvidia.com/container.", "correct the name"),
        ({of("c7", "gpu-memory.limit"): "1Gi"}, {}, {}, of("c7", "gpu-memory.limit"), 'no container "c7"'),
        ({C1: "1Gi", FRACTION: "0.5"}, {}, {}, C1, "together with gpu-fraction"),
        ({C0: "1Gi"}, {GPU: "2"}, {}, GPU, "asks for 1 GPU"),
        ({C0: "1Gi"}, {MEM: "100"}, {}, MEM, f"together with the annotation {C0}"),
        ({C0: "1Gi"}, {}, {MEM: "100"}, MEM, "one dialect in all containers"),
    ],
)
def test_invalid_limits_of_containers_by_kai_are_refused(annotations, first, second, where, words):
    with pytest.raises(DialectError) as fault:
        requests.read_pod(containers(first, second, annotations=annotations))
    assert [one for one in fault.value.findings if f'"{where}"' in one.path and words in one.message], str(fault.value)


@pytest.mark.parametrize("limit", ["0", "8G", "much", None])
def test_invalid_limit_is_one_fault(limit):
    """The request gets no second message, because without a valid limit there is nothing to compare it with."""
    with pytest.raises(DialectError) as fault:
        requests.read_pod(containers({}, {}, annotations={C0: limit, C0_REQUEST: "2Gi"}))
    assert [one.path for one in fault.value.findings] == [f'metadata.annotations["{C0}"]'], str(fault.value)


LIMIT, REQUEST = "NVIDIA_GPU_MEMORY_LIMIT", "NVIDIA_GPU_MEMORY_REQUEST"
# columns: limits, environment variables of the container; expected variables in a warning
VARIABLES = [
    ({GPU: "1", MEM: "2000"}, [{"name": LIMIT, "value": "15000"}], [LIMIT]),
    ({GPU: "1"}, [{"name": "A", "value": "b"}, {"name": REQUEST, "value": "many"}], [REQUEST]),
    ({GPU: "1"}, [{"name": LIMIT, "valueFrom": {"fieldRef": {}}}, {"name": REQUEST, "value": "1"}], [LIMIT, REQUEST]),
    ({GPU: "1"}, [LIMIT, None], []),
    ({GPU: "1"}, {LIMIT: "1"}, []),
    # A pod without a GPU request gets no warning.
    ({}, [{"name": LIMIT, "value": "15000"}], []),
]


@pytest.mark.parametrize(("limits", "env", "named"), VARIABLES)
def test_variables_of_nvidias_limits_are_warnings_and_no_request(limits, env, named):
    """Image and pod may set these variables. They change no size, and a warning names them."""
    plain = containers(limits)
    asked = containers(limits)
    asked["spec"]["containers"][0]["env"] = env
    expected, found = requests.read_pod(plain), requests.read_pod(asked)
    assert found._replace(warnings=()) == expected._replace(warnings=())
    assert [one.message.split()[0] for one in found.warnings if ".env[" in one.path] == named
    assert all(MEM in one.message for one in found.warnings if ".env[" in one.path)


@pytest.mark.parametrize(
    ("annotations", "spec"),
    [
        ({FRACTION: "0.5"}, {"schedulerName": "kai-scheduler"}),
        ({FRACTION: "many"}, {"schedulerName": "kai-scheduler"}),
        ({C0: "much"}, {"schedulerName": "kai-scheduler"}),
        # These annotations alone request nothing.
        ({DEVICES: "many", NAMED: "x"}, {}),
    ],
)
def test_pods_of_the_kai_scheduler_are_ignored(annotations, spec):
    assert not requests.read_pod(pod({}, {}, annotations, **spec)).wants_gpus


@pytest.mark.parametrize(
    ("preferences", "uuid", "model", "taken"),
    [
        ({}, "GPU-a", "Tesla T4", True),
        ({"use_uuids": ("gpu-a",)}, "GPU-A", "Tesla T4", True),
        ({"use_uuids": ("gpu-a",)}, "GPU-b", "Tesla T4", False),
        ({"use_uuids": ("gpu-a",), "avoid_uuids": ("gpu-a",)}, "GPU-a", "Tesla T4", False),
        ({"use_models": ("t4",)}, "GPU-a", "Tesla T4", True),
        ({"use_models": ("a100",)}, "GPU-a", "Tesla T4", False),
        ({"avoid_models": ("tesla",)}, "GPU-a", "Tesla T4", False),
    ],
)
def test_preferences_select_gpus_by_uuid_and_model(preferences, uuid, model, taken):
    assert requests.Preferences(**preferences).takes(uuid, model) is taken


def test_pod_that_bypasses_the_scheduler_or_its_limit_is_refused():
    made = pod({GPU: 1}, nodeName="node-1")
    made["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    found = requests.admission_findings(made, requests.read_pod(made))
    assert [one.path for one in found] == ["spec.nodeName", "spec.containers[0].securityContext.privileged"]
    made["spec"]["containers"][0]["resources"] = {}
    assert requests.admission_findings(made, requests.read_pod(made)) == []


def test_pod_with_warnings_is_accepted():
    asked = requests.read_pod(pod({CORE: 100, UNITS: 3}, {COUNT: "2"}))
    assert len(asked.warnings) == 2 and asked.wants_gpus


NUMBERS = {"8": 8, 8: 8, "3k": 3000, "2Ki": 2048, "1e3": 1000, "1E3": 1000, "2500000m": 2500, "+5": 5, "5 ": 5}
NO_NUMBERS = ["0.5", "1_000", "0x10", "e3", "1e", "∞", "٣", 8.0, True, None, {}, "1K", "1Mib"]


@pytest.mark.parametrize(("text", "number"), [*NUMBERS.items(), *((text, None) for text in NO_NUMBERS)])
def test_quantities_are_whole_numbers(text, number):
    if number is None:
        with pytest.raises(QuantityError):
            whole(text, -(10**9), 10**9)
    else:
        assert whole(text, 0, 10**9) == number == exact(text)


def test_oversized_quantity_is_not_cached():
    """The webhook gets labels before the API server checks their length."""
    longest = "-" + "1" * 40 + "." + "5" * 40 + "e-10"
    assert len(longest) == quantity.LONGEST and exact(longest) is not None
    before = quantity._exact.cache_info().currsize
    assert exact("7" * 100_000) is None and exact("x" * 100_000) is None
    assert quantity._exact.cache_info().currsize == before
