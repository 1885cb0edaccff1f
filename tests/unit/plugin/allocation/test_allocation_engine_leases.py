# SPDX-License-Identifier: Apache-2.0
"""Tests the leases of docker and podman containers. A lease is a slice of a GPU that the plugin withholds from the
kubelet for such a container. The tests check a lease's size and number of GPUs, and that it lasts as long as its
container.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from vgpu_plugin._shared.abi import files as abi_files
from vgpu_plugin.allocation.engine_lists import EngineLists
from vgpu_plugin.allocation.leases import Leases, Terms
from vgpu_plugin.allocation.limit_devices import AtMost
from vgpu_plugin.errors import BadRequest, NoFreeSlice

from ..samples import gpus

MIB = 1 << 20
DOCKER = Terms("container", "docker", "docker")


class Engines:
    """Replaces the engines' list of containers. None means that the engine does not respond."""

    def __init__(self) -> None:
        self.shown: dict[str, str] | None = {}
        self.asked = 0

    def leases(self, engines):
        self.asked += 1
        return {} if self.shown is None else {one: dict(self.shown) for one in set(engines)}


def leases_of(node, parts, engines=None) -> Leases:
    pool, allocator, _files = parts
    out = Leases(allocator, pool, node.paths.checkpoint, lambda: False, node.clock, engines or Engines())
    out.restore()
    return out


def limits_of(node, allocation: str) -> list[tuple[int, int]]:
    """Returns (bytes, percent) of each GPU from the container's limits file."""
    found = abi_files.parse_limits((node.paths.allocations / allocation / "limits").read_bytes())
    return [(one["memory_bytes"], one["sm_percent"]) for one in found["devices"]]


SIZES = [
    (AtMost(), (3840 * MIB, 25)),
    (AtMost(1 << 30, 0), (1 << 30, 25)),
    (AtMost(0, 10), (3840 * MIB, 10)),
    (AtMost(3840 * MIB, 25), (3840 * MIB, 25)),
]


@pytest.mark.parametrize(("at_most", "limits"), SIZES)
def test_lease_is_at_most_the_requested_size(node, at_most, limits):
    answer = leases_of(node, node.parts(splitCount=4, coresScaling="1")).lease(terms=replace(DOCKER, at_most=at_most))
    assert limits_of(node, answer.allocation) == [limits]


@pytest.mark.parametrize("at_most", [AtMost(3841 * MIB), AtMost(0, 26)])
def test_request_larger_than_any_slice_is_refused(node, at_most):
    leases = leases_of(node, node.parts(splitCount=4, coresScaling="1"))
    with pytest.raises(NoFreeSlice, match="the largest has 3840 MiB and 25 % of the SMs; request less"):
        leases.lease(terms=replace(DOCKER, at_most=at_most))


def test_larger_gpu_is_chosen_if_needed(node):
    node.gpus[:] = gpus("T4", "A100-80GB")
    terms = replace(DOCKER, at_most=AtMost(5000 * MIB))
    (one,) = leases_of(node, node.parts(splitCount=4)).lease(terms=terms).slice_ids
    assert one.startswith(node.gpus[1].uuid)


def test_lease_of_two_gpus_has_a_slice_of_each(node):
    parts = node.parts(splitCount=2)
    leases = leases_of(node, parts)
    answer = leases.lease(terms=replace(DOCKER, gpus=2))
    assert {one.partition("::")[0] for one in answer.slice_ids} == {gpu.uuid for gpu in node.gpus}
    assert len(limits_of(node, answer.allocation)) == 2
    with pytest.raises(NoFreeSlice, match="3 GPUs with a free slice are requested; too few of this node's 2 have one"):
        leases.lease(terms=replace(DOCKER, gpus=3))
    # The slices that the failed request had already taken are offered again.
    assert {offer.slice.id for offer in parts[0].offers()[1] if offer.healthy} == {
        one.id for one in parts[0].slices
    } - set(answer.slice_ids)


# columns: the requested GPU ("" means any GPU), invalid terms of a lease; expected words of the error
BAD = [
    ("", Terms("kubelet"), "a lease of kind"),
    ("", Terms("container", "x"), "docker or podman only for container"),
    ("", Terms("container", "x", "lxc"), "docker or podman only for container"),
    ("", Terms("exec", "x", "docker"), "docker or podman only for container"),
    ("", replace(DOCKER, gpus=0), "expected 1 or more"),
    ("GPU", replace(DOCKER, gpus=2), "1 if a GPU is named"),
    ("", replace(DOCKER, at_most=AtMost(-1)), "expected bytes"),
    ("", replace(DOCKER, at_most=AtMost(0, 101)), "percent from 1 to 100"),
]


@pytest.mark.parametrize(("uuid", "terms", "sentence"), BAD)
def test_invalid_lease_terms_are_refused(node, uuid, terms, sentence):
    with pytest.raises(BadRequest, match=sentence):
        leases_of(node, node.parts()).lease(node.gpus[0].uuid if uuid else "", terms=terms)


# columns: the case; the engine's successive responses, each with the seconds that pass before it ("web" is the running
# container, None means no response); whether the lease is expected to exist afterwards
LIVES = [
    ("the container runs for long", [("web", 10), ("web", 100000)], True),
    ("the container never appeared, its start time is not over", [("", 10), ("", 10), ("", 10)], True),
    ("the container never appeared", [("", 10), ("", 10000)], False),
    ("the container was removed", [("web", 10), ("", 10), ("", 10)], False),
    ("compose made the container again", [("web", 10), ("", 10), ("web", 10), ("", 10)], True),
    ("docker does not answer", [("web", 10), (None, 10), (None, 100000), (None, 10)], True),
    ("docker did not answer in between", [("web", 10), ("", 10), (None, 10), ("", 10)], False),
]


@pytest.mark.parametrize(("_name", "looks", "there"), LIVES, ids=[row[0] for row in LIVES])
def test_lease_lasts_as_long_as_the_container(node, _name, looks, there):
    parts, engines = node.parts(), Engines()
    leases = leases_of(node, parts, engines)
    answer = leases.lease(ttl_s=3600, terms=DOCKER)
    for name, seconds in looks:
        node.clock.seconds += seconds
        engines.shown = None if name is None else ({answer.allocation: name} if name else {})
        leases.follow()
        leases.expire()
    assert bool(parts[1].records.all()) is there
    assert parts[2].present() == ([answer.allocation] if there else [])
    healthy = {offer.slice.id for offer in parts[0].offers()[1] if offer.healthy}
    assert (answer.slice_ids[0] in healthy) is not there


def test_holder_is_named_after_the_container(node):
    parts, engines = node.parts(), Engines()
    leases = leases_of(node, parts, engines)
    answer = leases.lease(terms=DOCKER)
    engines.shown = {answer.allocation: "web"}
    leases.follow()
    (record,) = parts[1].records.all()
    assert (record.holder, leases.seconds_left(record)) == ("docker web", 0)


@pytest.mark.parametrize("seen", [True, False])
def test_reboot(node, seen):
    """A reboot empties /run. A container from before the reboot must find its files as soon as its engine starts it."""
    parts, engines = node.parts(), Engines()
    leases = leases_of(node, parts, engines)
    answer = leases.lease(terms=DOCKER)
    if seen:
        engines.shown = {answer.allocation: "web"}
        leases.follow()
    parts[2].remove(answer.allocation)
    node.mounter.mounted.clear()
    node.clock.boot, node.clock.seconds = "boot-b", 5.0
    parts = node.parts()
    engines.shown = None  # docker does not answer yet, because it starts later.
    leases = leases_of(node, parts, engines)
    leases.follow()
    leases.expire()
    assert parts[2].present() == ([answer.allocation] if seen else [])
    if not seen:
        return
    assert all((node.paths.allocations / answer.allocation / name).exists() for name in ("ro/limits", "rw/ledger"))
    assert answer.slice_ids[0] not in {offer.slice.id for offer in parts[0].offers()[1] if offer.healthy}
    # A later restart of the plugin in the same boot keeps the files, because the container may already run.
    made = (node.paths.allocations / answer.allocation / "rw/ledger").stat().st_ino
    parts = node.parts()
    leases_of(node, parts, engines)
    assert (node.paths.allocations / answer.allocation / "rw/ledger").stat().st_ino == made


def test_lease_without_a_container_queries_no_engine(node):
    parts, engines = node.parts(), Engines()
    leases = leases_of(node, parts, engines)
    leases.lease()
    leases.follow()
    assert len(parts[1].records.all()) == 1


# Container lists as printed by docker 20.10, docker 28 and podman 4.3.
LISTS = [
    ("web\tvgpu.fleet/lease=00ff00ff00ff00ff\n", {"00ff00ff00ff00ff": "web"}),
    ("web\ta=b,vgpu.fleet/lease=00ff00ff00ff00ff,c=d\n", {"00ff00ff00ff00ff": "web"}),
    ("web\tmap[a:b vgpu.fleet/lease:00ff00ff00ff00ff]\n", {"00ff00ff00ff00ff": "web"}),
    ("a\tvgpu.fleet/lease=aa\nb\tvgpu.fleet/lease=bb\n", {"aa": "a", "bb": "b"}),
    ("", {}),
    (None, None),
]


@pytest.mark.parametrize(("output", "leases"), LISTS)
def test_container_list_of_an_engine_is_parsed(tmp_path, output, leases):
    pid = tmp_path / "docker.pid"
    lists = EngineLists(lambda _words: output, pid)
    assert lists.leases(["docker"]) == {}  # No docker command runs, because it could start a stopped daemon.
    pid.touch()
    assert lists.leases(["docker", "docker"]) == ({} if leases is None else {"docker": leases})
    assert lists.leases(["podman"]) == ({} if leases is None else {"podman": leases})
    assert lists.leases(["lxc", ""]) == {}
