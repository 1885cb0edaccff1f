# SPDX-License-Identifier: Apache-2.0
"""Tables for ``convert``: the settings of other GPU sharing projects and the group variables that replace them."""

from __future__ import annotations

# The texts of notes. Each note follows the path of its setting in the output, such as "devicePlugin.libPath: ".
NO_MEANING = "not carried over: this collection has no such setting"
PLUGIN_IS_OFF = "NVIDIA's plugin is off; convert the values of the plugin that shares the GPUs"

# Keys that identify the values of NVIDIA's GPU operator. A document is compared with the operator's keys first, then
# with those of HAMi's chart, then with those of the chart of NVIDIA's plugin.
OPERATOR_CHART = ("operator", "driver", "toolkit", "dcgmExporter", "migManager", "mig")
HAMI_CHART = ("scheduler", "resourceName", "resourceMem", "resourceCores", "schedulerName")
NVIDIA_CHART = (
    "config",
    "gfd",
    "migStrategy",
    "failOnInitError",
    "deviceListStrategy",
    "deviceIDStrategy",
    "nvidiaDriverRoot",
    "compatWithCPUManager",
)
# The key that all three charts have. A document with only this key counts as values of HAMi's chart.
ALL_CHARTS = "devicePlugin"
# A key below devicePlugin that only the operator's values have.
OPERATOR_PLUGIN = "config"
# Titles that ``helm get values`` prints above the values.
TITLES = ("USER-SUPPLIED VALUES", "COMPUTED VALUES")
# Words in the image names of device plugins that share GPUs by default. Other plugins, such as NVIDIA's, share GPUs
# only with a configuration file.
VCUDA_IMAGES = ("4pdosc", "4paradigm", "vgpu", "hami")
# Settings of a chart's own pods. A host group does not need them, so they give no note.
CHART_ONLY = (
    "global.", "image.", "nameOverride", "fullnameOverride", "namespaceOverride", "imagePullSecrets",
    "podSecurityContext", "securityContext", "resources.", "nodeSelector", "affinity", "tolerations",
    "podAnnotations", "podLabels", "updateStrategy", "nfd.", "allowDefaultNamespace", "selectorLabelsOverride",
    "componentSelectorLabels", "priorityClassName", "devicePlugin.containers", "gfd.", "mps.enableHost",
    "devicePlugin.image", "devicePlugin.resources", "devicePlugin.nvidianodeSelector", "devicePlugin.tolerations",
    "devicePlugin.podAnnotations", "devicePlugin.updateStrategy", "devicePlugin.monitor.image",
    "devicePlugin.monitor.resources", "scheduler.kubeScheduler", "scheduler.extender", "scheduler.image",
    "scheduler.resources", "scheduler.nodeSelector", "scheduler.tolerations", "scheduler.podAnnotations",
    "scheduler.patch", "scheduler.certManager",
)  # fmt: skip

# Defaults of HAMi's chart that differ from our defaults.
HAMI_DEFAULTS = {"devicePlugin.deviceSplitCount": 10}
HAMI_VARIABLES = {
    "devicePlugin.deviceSplitCount": "vgpu_split_count",
    "devicePlugin.deviceMemoryScaling": "vgpu_memory_scaling",
    "devicePlugin.deviceCoreScaling": "vgpu_cores_scaling",
    "devicePlugin.deviceCoresScaling": "vgpu_cores_scaling",
    "devicePlugin.migStrategy": "vgpu_mig_strategy",
    "devicePlugin.disablecorelimit": "vgpu_disable_core_limit",
    "devicePlugin.gpuCorePolicy": "vgpu_core_policy",
    "devicePlugin.libCudaLogLevel": "vgpu_log_level",
    "devicePlugin.deviceListStrategy": "vgpu_handover",
    "devicePlugin.failOnInitError": "vgpu_fail_on_init_error",
    "devices.nvidia.gpuCorePolicy": "vgpu_core_policy",
    "devices.nvidia.libCudaLogLevel": "vgpu_log_level",
    "scheduler.defaultMem": "scheduler_default_memory",
    "scheduler.defaultCores": "scheduler_default_cores",
    "scheduler.defaultGPUNum": "scheduler_default_count",
}
HAMI_PLACES = {
    "devicePlugin.passDeviceSpecsEnabled": ("flags", "plugin", "passDeviceSpecs"),
    "devicePlugin.nvidiaDriverRoot": ("flags", "nvidiaDriverRoot"),
    "devicePlugin.gdrcopyEnabled": ("flags", "gdrcopyEnabled"),
    "devicePlugin.gdsEnabled": ("flags", "gdsEnabled"),
    "devicePlugin.mofedEnabled": ("flags", "mofedEnabled"),
}
# Notes on ports and addresses, by the beginning of the setting's path.
HAMI_SERVICES = {
    "scheduler.service": "not carried over: the Service vgpu-scheduler has the webhook and /metrics at port 443",
    "devicePlugin.service": 'metrics are at the node\'s loopback address; vgpu_metrics_listen: ":9410" opens the port',
    "devicePlugin.monitor": "not carried over: the device plugin itself serves the metrics (vgpu_metrics_listen)",
}
# Memory of pods that request a count of GPUs without memory.
DEFAULT_MEMORY = "scheduler.defaultMem"
NO_DEFAULT_MEMORY = (
    "does not set scheduler.defaultMem: a pod that requests only a count of GPUs gets 5000 MiB from older charts, and "
    "the whole card from newer charts and from this collection; for 5000 MiB set scheduler_plain: default"
)
OF_COUNT_ALONE = (
    "a pod that requests only a count of GPUs also gets this memory (scheduler_plain: default). HAMi also gives such a "
    "pod all compute of the card, so no other pod shares the card. This is not carried over; the nearest setting is "
    "scheduler_plain: whole"
)
# Note on steps that a group with requested sizes needs, and that HAMi's values do not name.
OF_CLUSTER = (
    "run cluster.yml after site.yml to install the scheduler in the cluster; check vgpu_kubeconfig, which names "
    "kubectl's default file on the controller"
)
RENAMED = (
    "becomes {new}, because a name may have only small letters, digits and dashes; change the label of nodes with the "
    "old name: kubectl label node NODE nvidia.com/device-plugin.config={new} --overwrite"
)
# Path of the value that holds HAMi's config.json as a text.
HAMI_NODES = "devicePlugin.nodeConfiguration.config"
# Prefix of settings of NVIDIA's GPUs, next to those of other vendors.
NVIDIA_CARDS = "devices.nvidia."
# Prefixes of settings of other vendors' devices.
OTHER_VENDORS = ("mlu", "hcu", "dcu", "metax", "enflame", "kunlun", "vastai", "biren", "iluvatar", "devices.")
HAMI_RESOURCES = {
    "resourceName": "count",
    "resourceMem": "memory",
    "resourceMemPercentage": "memory_percentage",
    "resourceCores": "cores",
    "resourcePriority": "priority",
}
HAMI_POLICIES = {
    "scheduler.defaultSchedulerPolicy.nodeSchedulerPolicy": "scheduler_node_policy",
    "scheduler.defaultSchedulerPolicy.gpuSchedulerPolicy": "scheduler_gpu_policy",
}
# Maps HAMi's name of a policy to ours. HAMi's policy mutex has no counterpart.
POLICIES = {"binpack": "binpack", "spread": "spread", "topology-aware": "topology"}
# Notes on settings of HAMi's chart.
HAMI_NOTES = {
    "schedulerName": "the webhook of the role scheduler sets the scheduler of pods",
    "devicePlugin.pluginPath": "if the kubelet has another folder, set --kubelet-dir in device_plugin_options",
    "devicePlugin.libPath": "vcuda_root has a folder for each version of the library",
    "devicePlugin.runtimeClassName": "the role container_runtime makes nvidia the default runtime, or a RuntimeClass",
    "devicePlugin.createRuntimeClass": "the role container_runtime makes nvidia the default runtime, or a RuntimeClass",
}
# Settings of one node in HAMi's config.json.
HAMI_NODE = {
    "devicesplitcount": "vgpu_split_count",
    "devicememoryscaling": "vgpu_memory_scaling",
    "devicecorescaling": "vgpu_cores_scaling",
    "migstrategy": "vgpu_mig_strategy",
    "libcudaloglevel": "vgpu_log_level",
}

# Maps top-level values of NVIDIA's chart to paths in NVIDIA's configuration file.
NVIDIA_CHART_PLACES = {
    "migStrategy": ("flags", "migStrategy"),
    "failOnInitError": ("flags", "failOnInitError"),
    "nvidiaDriverRoot": ("flags", "nvidiaDriverRoot"),
    "deviceListStrategy": ("flags", "plugin", "deviceListStrategy"),
    "deviceIDStrategy": ("flags", "plugin", "deviceIDStrategy"),
    "passDeviceSpecs": ("flags", "plugin", "passDeviceSpecs"),
    "gdrcopyEnabled": ("flags", "gdrcopyEnabled"),
    "gdsEnabled": ("flags", "gdsEnabled"),
    "mofedEnabled": ("flags", "mofedEnabled"),
    "deviceDiscoveryStrategy": ("flags", "deviceDiscoveryStrategy"),
    "mps.root": ("flags", "mpsRoot"),
    "gfd.noTimestamp": ("flags", "gfd", "noTimestamp"),
    "gfd.sleepInterval": ("flags", "gfd", "sleepInterval"),
}
# Notes on settings of the chart of NVIDIA's device plugin.
NVIDIA_CHART_NOTES = {
    "devicePlugin.enabled": "the role device_plugin installs the plugin",
    "compatWithCPUManager": "set --pass-device-specs=true in device_plugin_options",
    "runtimeClassName": "the role container_runtime makes nvidia the default runtime, or a RuntimeClass",
}

# Notes on other parts that the operator installs, by the first key of the setting's path.
OPERATOR_NOTES = {
    "driver": "the role nvidia_driver installs it; see nvidia_driver_branch and nvidia_driver_version",
    "toolkit": "the roles nvidia_docker and container_runtime install and configure it",
    "devicePlugin": "the role device_plugin installs it",
    "migManager": "the role mig sets the MIG geometry of vgpu_mig_geometry",
    "mps": "the role mps runs its control daemon",
    "operator": "not carried over: this collection has no operator in the cluster; site.yml sets up the nodes",
}

# Notes on command-line flags of other device plugins that ours does not have.
FLAG_NOTES = {
    "config-file": "the role device_plugin writes its file, node.yaml, from the group's variables",
    "kubelet-socket": "if the kubelet has another folder, set --kubelet-dir in device_plugin_options",
    "node-name": "the role reads the name from the host",
    "v": "set --log-level in device_plugin_options",
}
MPS_PART = "vgpu_sharing: mps gives each client an equal part; a pod may lower its own part by this variable"
# Notes on environment variables of containers.
ENVIRONMENT_NOTES = {
    "CUDA_DISABLE_CONTROL": "works only if the group sets vgpu_disable_core_limit or the limits file allows it",
    "NVIDIA_VISIBLE_DEVICES": "the device plugin sets this variable for the runtime",
    "NVIDIA_DRIVER_CAPABILITIES": "a slice gets the capabilities compute and utility",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": MPS_PART,
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": MPS_PART,
    "DP_DISABLE_HEALTHCHECKS": "our plugin reads the same variable; set it in the unit's environment",
    "DP_ENABLE_HEALTHCHECKS": "our plugin reads the same variable; set it in the unit's environment",
}

# Resource names and labels of pods that get the note below. nvidia.com/gpu needs no note: its meaning is the same here.
ASKED = (
    "nvidia.com/gpumem", "nvidia.com/gpumem-percentage", "nvidia.com/gpucores", "nvidia.com/cores",
    "nvidia.com/priority", "aliyun.com/gpu-mem", "aliyun.com/gpu-core.percentage", "aliyun.com/gpu-count",
    "tencent.com/vcuda-core", "tencent.com/vcuda-memory",
    "tke.cloud.tencent.com/qgpu-core", "tke.cloud.tencent.com/qgpu-memory", "volcano.sh/vgpu-number",
    "volcano.sh/vgpu-memory", "volcano.sh/vgpu-memory-percentage", "volcano.sh/vgpu-cores",
)  # fmt: skip
ASKED_NOTE = (
    "keep it in the pod: it works if the group has vgpu_slice_sizing: requested and cluster.yml installed the "
    "scheduler; otherwise such a pod stays Pending"
)
# Annotations by which pods of KAI request GPUs and pods of HAMi select GPUs.
ANNOTATIONS = (
    "gpu-memory", "gpu-fraction", "gpu-fraction-num-devices", "gpu-fraction-container-name",
    "hami.io/node-scheduler-policy", "hami.io/gpu-scheduler-policy",
    "nvidia.com/use-gpuuuid", "nvidia.com/nouse-gpuuuid", "nvidia.com/use-gputype",
    "nvidia.com/nouse-gputype", "nvidia.com/numa-bind",
)  # fmt: skip
# Prefix of annotations that continue with a container's name and ".gpu-memory.limit" or ".gpu-memory.request".
ANNOTATION_PREFIX = "nvidia.com/container."
ANNOTATION_NOTE = (
    "keep it in the pod: it works if the group has vgpu_slice_sizing: requested and cluster.yml installed the "
    "scheduler; otherwise it has no effect"
)
