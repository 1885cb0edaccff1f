# SPDX-License-Identifier: Apache-2.0
"""Tests the choice of whole GPUs with fast interconnects between them, by a table of cases, and how the interconnects
are read from the driver.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from types import SimpleNamespace

import grpc
import pytest
from vgpu_plugin._proto import deviceplugin_pb2 as api
from vgpu_plugin._proto import deviceplugin_pb2_grpc as rpc
from vgpu_plugin.daemon import Daemon
from vgpu_plugin.errors import BadRequest
from vgpu_plugin.node.nvml import Nvml
from vgpu_plugin.node.topology import nearest, scores

from ..conftest import FakeGpus
from ..samples import gpus, until

ORDER = list("ABCDEFGH")


def symmetric(pairs: dict[str, int]) -> dict[str, dict[str, int]]:
    out: dict[str, dict[str, int]] = {uuid: {} for uuid in ORDER}
    for (one, other), score in pairs.items():
        out[one][other] = out[other][one] = score
    return out


# The score of each pair of GPUs on two boards with four GPUs each. NVLink connects A with D and B with C by two links,
# and E with F by one link.
LINKS = symmetric(
    {
        **{one + other: 20 for half in ("ABCD", "EFGH") for one, other in itertools.combinations(half, 2)},
        **{one + other: 10 for one in "ABCD" for other in "EFGH"},
        "AD": 220,
        "BC": 220,
        "EF": 120,
    }
)
CASES = [
    # columns: the case, available GPUs, GPUs that must be chosen, the number of GPUs; the expected choice
    ("two GPUs: the pair with most links", ORDER, "", 2, "AD"),
    ("two GPUs: the next best pair", "BCEFGH", "", 2, "BC"),
    ("one link is better than none", "BEFGH", "", 2, "EF"),
    ("one GPU: a GPU without NVLink", ORDER, "", 1, "G"),
    ("four GPUs: one board", ORDER, "", 4, "ABCD"),
    ("the required GPU's best partner", ORDER, "C", 2, "BC"),
    ("all", ORDER, "", 8, "ABCDEFGH"),
    ("the required GPU is enough", ORDER, "H", 1, "H"),
    ("no known links: by index", "XYZ", "", 2, "XY"),
]


@pytest.mark.parametrize(("about", "available", "must", "size", "answer"), CASES, ids=[one[0] for one in CASES])
def test_gpus_with_the_fastest_links_are_chosen(about, available, must, size, answer):
    found = nearest(list(available), list(must), size, LINKS, ORDER)
    assert sorted(found) == sorted(answer)
    assert sorted(nearest(list(reversed(available)), list(must), size, LINKS, ORDER)) == sorted(answer)


@pytest.mark.parametrize(("available", "must", "size"), [("A", "", 2), ("A", "B", 1)])
def test_impossible_choice_of_gpus_is_refused(available, must, size):
    with pytest.raises(BadRequest):
        nearest(list(available), list(must), size, LINKS, ORDER)


def worth(names, links) -> int:
    return sum(links[a].get(b, 0) for a, b in itertools.combinations(names, 2))


@pytest.mark.parametrize(("cards", "sizes", "least"), [(8, (2, 3, 4, 5), 1.0), (16, (3,), 0.75)])
def test_choice_is_nearly_optimal(cards, sizes, least):
    """The interconnects are random. The choice must be optimal on 8 GPUs, and at least 75 % as good as the best choice
    on 16 GPUs.
    """
    choose = random.Random(7)
    order = [f"G{n:02d}" for n in range(cards)]
    for trial in range(40):
        links: dict[str, dict[str, int]] = {uuid: {} for uuid in order}
        for one, other in itertools.combinations(order, 2):
            links[one][other] = links[other][one] = choose.choice((10, 20, 30, 120, 220))
        size = sizes[trial % len(sizes)]
        best = max(worth(names, links) for names in itertools.combinations(order, size))
        assert worth(nearest(order, [], size, links, order), links) >= least * best


def test_interconnects_have_these_scores():
    found = scores({("A", "B"): 10, ("A", "C"): 50}, {("A", "B"): 2, ("B", "A"): 2}, {"B": 6, "C": 4})
    assert {uuid: dict(row) for uuid, row in found.items()} == {
        "A": {"B": 250, "C": 10},
        "B": {"A": 250, "C": 400},
        "C": {"A": 10, "B": 400},
    }


class Driver:
    """A double of the functions of nvidia-ml-py that report interconnects between GPUs."""

    NVML_NVLINK_MAX_LINKS = 18
    NVML_FEATURE_ENABLED = 1

    class NVMLError(Exception):
        pass

    # GPU → the PCI address at the other end of each of its NVLinks; None means that the link is off.
    links = {"a": ["00000000:02:00.0", None, "00000000:99:00.0"], "b": ["00000000:01:00.0"], "c": []}

    def nvmlDeviceGetHandleByIndex(self, index):
        return "abc"[index]

    def nvmlDeviceGetTopologyCommonAncestor(self, one, other):
        if "c" in (one, other):
            raise self.NVMLError
        return 20

    def nvmlDeviceGetNvLinkState(self, handle, link):
        if link >= len(self.links[handle]):
            raise self.NVMLError
        return int(self.links[handle][link] is not None)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle, link):
        return SimpleNamespace(busId=self.links[handle][link].encode())


def test_interconnects_are_read_from_the_driver():
    nvml = Nvml.__new__(Nvml)
    nvml._nvml = Driver()
    cards = [SimpleNamespace(uuid=u, index=n, pci=f"00000000:{n + 1:02x}:00.0") for n, u in enumerate("abc")]
    found = nvml._scores(cards)
    assert {uuid: dict(row) for uuid, row in found.items()} == {"a": {"b": 140}, "b": {"a": 140}}


def test_kubelet_is_offered_near_gpus(node, kubelet, running):
    cards = gpus("T4", "T4", "T4", "T4")
    far, near = cards[0].uuid, [cards[1].uuid, cards[3].uuid]
    cards = [
        dataclasses.replace(one, links=tuple((u, 100) for u in near if u != one.uuid and one.uuid in near))
        for one in cards
    ]
    node.paths.config.write_text('{"version": "v1"}')
    running(Daemon(node.setup(), lambda: FakeGpus(cards)))
    until(lambda: kubelet.state()["resources"].get("nvidia.com/gpu", {}).get("allocatable") == 4, "the GPUs")
    assert sorted(kubelet.run_pod("two", count=2)["ids"]) == sorted(near)
    with grpc.insecure_channel(f"unix:{node.paths.endpoint('nvidia.com/gpu')}") as channel:
        request = api.ContainerPreferredAllocationRequest(available_deviceIDs=[far], allocation_size=2)
        with pytest.raises(grpc.RpcError) as fault:
            rpc.DevicePluginStub(channel).GetPreferredAllocation(
                api.PreferredAllocationRequest(container_requests=[request])
            )
    assert "found 1 available GPU, expected 2 as requested" in fault.value.details()
