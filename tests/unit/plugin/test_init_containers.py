# SPDX-License-Identifier: Apache-2.0
"""Tests pods with init containers on a node. The kubelet gives the devices of an init container to the containers after
it. Whatever fits by the scheduler's count must start, on the GPUs of its plan.
"""

from __future__ import annotations

import pytest
from vgpu_kubelet_double.manager import Manager
from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_plugin._shared.pods.annotations import APP, INIT, SIDECAR, Device, Part, use_of

from . import samples
from .node_api import pod_path
from .test_lost_files import remove
from .test_requested import (  # noqa: F401  # pylint: disable=unused-import # fixtures
    RESOURCE,
    api,
    plan,
    run,
    sizes,
    start,
)

CARD = 15360


def admit(kubelet, name, containers):
    """Admits the containers of a pod as a kubelet does (devicemanager, ``Allocate``): a container takes the devices of
    the init containers before it first, a sidecar and an app keep what they take, and the plugin is asked only for the
    rest. ``containers``: name, number of GPUs and kind.
    """
    endpoint, reusable, admitted = kubelet.endpoints[RESOURCE], set(), []
    for container, count, kind in containers:
        ids = sorted(reusable)[:count]
        if len(ids) < count:
            taken = {one for held in kubelet.held for one in held.ids}
            ids = endpoint.preferred(sorted(endpoint.healthy() - taken | set(ids)), count, ids)
        admitted.append(Manager._admit(endpoint, f"uid-{name}", name, "default", container, ids))
        kubelet.held.append(admitted[-1])
        kubelet._save()
        reusable = reusable | set(ids) if kind == INIT else reusable - set(ids)
    for held in admitted:
        kubelet._start(endpoint, held)
    return admitted


def run_planned(kubelet, api, name, *parts):  # noqa: F811
    """Starts a pod with this plan, and checks that each container gets what was planned for it."""
    api.add_pod(name, f"uid-{name}", {pod_annotations.PLAN: pod_annotations.write_plan(parts)})
    admit(kubelet, name, [(one.container, len(one.devices), one.kind) for one in parts])
    check_sizes(kubelet, api, name, *parts)


def check_sizes(kubelet, api, name, *parts):  # noqa: F811
    found = [sorted(one[:2] for one in sizes(kubelet._shown(each))) for each in kubelet.held if each.pod == name]
    assert found == [sorted((one.uuid, one.memory_mib) for one in part.devices) for part in parts]
    assert pod_annotations.GIVEN not in api.objects[pod_path(name)]["metadata"]["annotations"]


def reboot_without_records(node, kubelet, start, program, thread):  # noqa: F811
    """Starts all containers again after a reboot that lost the plugin's records. So each size is decided again."""
    program.stop()
    thread.join(20)
    remove(node.paths.run_dir, node.mounter.mounted)
    node.paths.records.unlink()
    start()
    for held in kubelet.held:
        kubelet._start(kubelet.endpoints[RESOURCE], held)


# columns: kind and MiB of each container of a pod, the MiB that the scheduler counts for the pod
PODS = [
    ([(INIT, 10000), (APP, 6000)], 10000),
    ([(INIT, 10000), (APP, 2000), (APP, 4000)], 10000),
    ([(INIT, 10000), (SIDECAR, 1000), (APP, 4000)], 10000),
    ([(SIDECAR, 1000), (INIT, 10000), (APP, 4000)], 11000),
    ([(INIT, 1000), (APP, 2000), (APP, 9000)], 11000),
]


@pytest.mark.parametrize(("containers", "counts"), PODS)
def test_pod_and_its_neighbours_start(node, kubelet, api, start, containers, counts):  # noqa: F811
    node.gpus = samples.gpus("T4")
    program = start()
    uuid = node.gpus[0].uuid
    parts = [Part(f"c{n}", kind, (Device(uuid, mib, 0),)) for n, (kind, mib) in enumerate(containers)]
    assert use_of(parts)[uuid].memory_mib == counts
    rest = Part("main", APP, (Device(uuid, CARD - counts, 0),))
    run_planned(kubelet, api, "one", rest)
    run_planned(kubelet, api, "two", *parts)
    reboot_without_records(node, kubelet, start, *program)
    check_sizes(kubelet, api, "one", rest)
    check_sizes(kubelet, api, "two", *parts)
    kubelet.delete_pod("one")
    kubelet.notice()
    run_planned(kubelet, api, "three", rest)


def test_other_gpus_of_a_container_are_those_of_its_plan(node, kubelet, api, start):  # noqa: F811
    """The container must take the init container's GPU, and gets one more. The third GPU has fewer pods than the second
    one, but no memory.
    """
    node.gpus = samples.gpus("T4", "T4", "T4")
    start()
    a, b, c = (gpu.uuid for gpu in node.gpus)
    for name, uuid, mib, n in (("large", c, 14000, 0), ("small", b, 1000, 0), ("small-2", b, 1000, 1)):
        plan(api, name, (uuid, mib, 0))
        run(kubelet, name, ids=[f"{uuid}::{n}"])
    devices = Device(a, 8000, 0), Device(b, 8000, 0)
    run_planned(kubelet, api, "train", Part("init", INIT, (Device(a, 2000, 0),)), Part("main", APP, devices))
