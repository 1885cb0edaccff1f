# SPDX-License-Identifier: Apache-2.0
"""Tests burst memory: a pod's memory limit may exceed its promised (guaranteed) memory. The tests run the whole program
with doubles of the API server and the kubelet, and check the limits files on disk and the values that users see.
"""

from __future__ import annotations

import json

import pytest
from vgpu_kubelet_double.manager import PodError
from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_plugin._shared.pods.annotations import APP, Device, Part
from vgpu_plugin.ctl import main as ctl

from .node_api import pod_path
from .samples import until
from .test_requested import api, plan, run, sizes, start  # noqa: F401  # pylint: disable=unused-import # fixtures
from .test_resize import annotations, grant, hold, is_done, quick  # noqa: F401  # pylint: disable=unused-import # fixtures

CARD = 15360


def said(node, capsys, *words):
    capsys.readouterr()
    status = ctl.main(["--socket", str(node.paths.admin_socket), *words])
    return status, capsys.readouterr().out


def test_pod_bursts_and_returns_memory(node, kubelet, api, start):  # noqa: F811
    start()
    first = node.gpus[0].uuid
    plan(api, "quiet", (first, 3000, 20))
    quiet = run(kubelet, "quiet", ids=[f"{first}::0"])
    plan(api, "bursts", (first, 2000, 20, 20000))
    bursts = run(kubelet, "bursts", ids=[f"{first}::1"])
    assert sizes(bursts) == [(first, CARD - 3000, 20)]
    end = hold(bursts, 9000)
    plan(api, "comes", (first, 5000, 20))
    with pytest.raises(PodError, match=r"1640 MiB of GPU .* are promised to it, but still used"):
        run(kubelet, "comes", ids=[f"{first}::2"])
    assert sizes(bursts) == [(first, 9000, 20)]
    end()
    kubelet.restart_container("comes")
    found = {one["pod"]: sizes(one) for one in kubelet.state()["pods"]}
    assert found == {
        "quiet": [(first, 3000, 20)],
        "bursts": [(first, CARD - 8000, 20)],
        "comes": [(first, 5000, 20)],
    }
    assert sizes(quiet) == [(first, 3000, 20)]
    kubelet.delete_pod("comes")
    api.remove(pod_path("comes"))
    until(lambda: sizes(bursts) == [(first, CARD - 3000, 20)], "the memory of the ended pod")


def test_cores_are_resized_by_grant_and_by_root_and_the_promise_stays(node, kubelet, api, start, capsys):  # noqa: F811
    """The scheduler (by a grant on the pod) and root (by vgpuctl resize) may change the cores of a pod with burst
    memory. Root may not change its memory."""
    start()
    first = node.gpus[0].uuid
    plan(api, "bursts", (first, 2000, 20, 4000))
    pod = run(kubelet, "bursts")
    grant(api, "bursts", (first, 2000, 50, 4000))
    until(lambda: is_done(api, "bursts"), "the node's confirmation")
    assert sizes(pod) == [(first, 6000, 50)]
    status, out = said(node, capsys, "resize", "default/bursts", "--cores", "30", "--json")
    assert status == 0, out
    assert pod_annotations.read_annotations(annotations(api, "bursts")) == (
        Part("main", APP, (Device(first, 2000, 30, 4000),)),
    )
    status, out = said(node, capsys, "resize", "default/bursts", "--memory", "3000Mi", "--json")
    assert (status, json.loads(out)["code"]) == (1, "FAILED_PRECONDITION") and "from 2000 to 6000 MiB" in out
    assert sizes(pod) == [(first, 6000, 30)]


def test_restart_keeps_promise_and_limit(node, kubelet, api, start):  # noqa: F811
    one, thread = start()
    first = node.gpus[0].uuid
    plan(api, "bursts", (first, 2000, 20, 20000))
    pod = run(kubelet, "bursts", ids=[f"{first}::1"])
    one.stop()
    thread.join(20)
    start()
    assert sizes(pod) == [(first, CARD, 20)]
    plan(api, "comes", (first, 13360, 20))
    assert sizes(run(kubelet, "comes", ids=[f"{first}::2"])) == [(first, 13360, 20)]
    assert sizes(pod) == [(first, 2000, 20)]


def test_vgpuctl_and_metrics_show_promise_and_limit(node, kubelet, api, start, capsys):  # noqa: F811
    start()
    first = node.gpus[0].uuid
    plan(api, "quiet", (first, 3000, 20))
    run(kubelet, "quiet", ids=[f"{first}::0"])
    plan(api, "bursts", (first, 2000, 20, 6000))
    run(kubelet, "bursts", ids=[f"{first}::1"])
    words = "default/bursts/main: 2000 MiB of GPU 0 are promised; the limit is 8000 MiB now, and at most 8000 MiB"
    for command in (("top", "--once", "--interval", "0.1"), ("slices",)):
        status, out = said(node, capsys, *command)
        assert status == 0 and out.count("are promised") == 1 and words in out, out
    rows = json.loads(said(node, capsys, "slices", "--json")[1])["slices"]
    mine = {one["held_by"]: (one["promised_mib"], one["memory_mib"], one["most_mib"]) for one in rows if one["held_by"]}
    assert mine == {"default/quiet/main": (3000, 3000, 3000), "default/bursts/main": (2000, 8000, 8000)}
    text = said(node, capsys, "metrics")[1]
    for name, mib in (("limit", 8000), ("promised", 2000), ("burst_limit", 8000)):
        lines = [one for one in text.splitlines() if one.startswith(f"vgpu_container_memory_{name}_bytes{{")]
        (line,) = [one for one in lines if 'pod="bursts"' in one]
        assert float(line.split()[-1]) == mib << 20
