# SPDX-License-Identifier: Apache-2.0
"""Tests what users and Prometheus see of the device plugin: usage of containers, metrics, node labels and vgpuctl."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import struct
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from vgpu_kubelet_double import podresources as double
from vgpu_kubelet_double.manager import Manager
from vgpu_plugin._shared.abi import files as abi_files
from vgpu_plugin._shared.config import sharing
from vgpu_plugin.assembly import Extras
from vgpu_plugin.ctl import main as ctl
from vgpu_plugin.ctl import top as ctl_top
from vgpu_plugin.daemon import Daemon
from vgpu_plugin.node import podresources
from vgpu_plugin.node.gpus import Driver, MigDevice
from vgpu_plugin.offer.preference import preferred
from vgpu_plugin.reconcile import labels
from vgpu_plugin.watch import usage
from vgpu_plugin.watch.finding import Finding, State
from vgpu_plugin.watch.rule import Suspicion

from .conftest import FakeGpus
from .samples import gpus, until

MIB = 1 << 20


@pytest.fixture
def kubelet(node):
    manager = Manager(node.paths.kubelet_dir)
    manager.start()
    server = double.serve(manager, node.paths.pod_resources)
    yield manager
    server.stop(grace=0)
    manager.stop()


@pytest.fixture
def daemon(node, kubelet, running):
    node.configure(splitCount=4, coresScaling="2")
    source = FakeGpus(node.gpus)
    out = Daemon(node.setup(Extras("127.0.0.1:0")), lambda: source)
    out.source = source
    running(out)
    until(lambda: kubelet.state()["resources"].get("nvidia.com/gpu", {}).get("allocatable") == 8, "the slices")
    return out


def vgpuctl(node, capsys, *arguments: str) -> str:
    assert ctl.main(["--socket", str(node.paths.admin_socket), *arguments]) == 0
    return capsys.readouterr().out


def tenant(pod, used: int, context: int, device_ns: int) -> int:
    """Simulates a process of a container: writes the two files in which the container reports its usage (ledger and
    tenant page), and locks the process's slot in the ledger. Returns the open descriptor; closing it unlocks the slot.
    """
    mounts = {one["container_path"]: one["host_path"] for one in pod["answer"]["mounts"]}
    descriptor = os.open(mounts["/dev/vgpu/0/ledger"], os.O_RDWR)
    lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, abi_files.fields.LEDGER_ALIVE_BASE, 1, 0)
    fcntl.fcntl(descriptor, 37, lock)  # 37 is the constant F_OFD_SETLK.
    fields, base = abi_files.fields.LEDGER_SLOT_FIELDS, abi_files.fields.LEDGER_SLOT_OFFSET
    for name, value in (("used", used), ("context", context)):
        os.pwrite(descriptor, struct.pack("<Q", value), base + fields[name][0])
    os.pwrite(descriptor, struct.pack("<I", 4711), base + fields["pid"][0])
    with open(mounts["/dev/vgpu/0/tenant"], "r+b") as page:
        for name, value in (("used_ns", device_ns), ("throttled_ns", 3 * device_ns)):
            page.seek(abi_files.fields.TENANT_FIELDS["devices"][0] + abi_files.fields.TENANT_DEVICE_FIELDS[name][0])
            page.write(struct.pack("<Q", value))
    return descriptor


def samples(text: str) -> dict[str, list]:
    """Returns name → samples, read by the parser of prometheus_client, which rejects invalid text."""
    found: dict[str, list] = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            found.setdefault(one.name, []).append(one)
    return found


def test_container_has_these_metrics(node, kubelet, daemon, capsys):
    pod = kubelet.run_pod("train", namespace="ml", ids=[f"{node.gpus[1].uuid}::2"])
    descriptor = tenant(pod, 1000 * MIB, 200 * MIB, 2_500_000_000)
    found = samples(vgpuctl(node, capsys, "metrics"))
    os.close(descriptor)
    (used,) = found["vgpu_container_memory_used_bytes"]
    assert used.value == 1200 * MIB
    assert {key: used.labels[key] for key in ("namespace", "pod", "container", "uuid")} == {
        "namespace": "ml",
        "pod": "train",
        "container": "main",
        "uuid": node.gpus[1].uuid,
    }
    values = {name: [one.value for one in rows] for name, rows in found.items() if name.startswith("vgpu_container")}
    assert values == {
        "vgpu_container_memory_limit_bytes": [3840 * MIB],
        "vgpu_container_memory_promised_bytes": [3840 * MIB],
        "vgpu_container_memory_burst_limit_bytes": [3840 * MIB],
        "vgpu_container_memory_used_bytes": [1200 * MIB],
        "vgpu_container_memory_context_bytes": [200 * MIB],
        "vgpu_container_processes": [1],
        "vgpu_container_share_limit_ratio": [0.5],
        "vgpu_container_device_seconds_total": [2.5],
        "vgpu_container_throttled_seconds_total": [7.5],
        "vgpu_container_active": [0],
        "vgpu_container_throttled": [0],
        "vgpu_container_memory_violations_total": [0],
    }
    assert [one.value for one in found["vgpu_slice_in_use"]] == [0, 0, 0, 0, 0, 0, 1, 0]
    assert [one.value for one in found["vgpu_gpu_healthy"]] == [1, 1]
    assert found["vgpu_plugin_registered"][0].value == 1
    assert [one.value for one in found["vgpu_plugin_allocations"]] == [1, 0, 0, 0]


WAITS = [
    # columns: the container's balance of compute time; seconds since it last requested the GPU; seconds since it was
    # last throttled; expected value of "active"; expected value of "throttled"
    (0, 0.0, 99.0, 1, 0),
    (-5, 0.0, 99.0, 1, 1),
    (5, 0.0, 0.0, 1, 1),
    (-5, 9.0, 9.0, 0, 0),
    (-5, -9.0, 9.0, 0, 0),  # A time in the future is ignored.
]


@pytest.mark.parametrize(("balance", "wanted", "waited", "active", "throttled"), WAITS)
def test_active_and_throttled_containers(
    node, kubelet, daemon, capsys, monkeypatch, balance, wanted, waited, active, throttled
):
    pod = kubelet.run_pod("train")
    page = next(one["host_path"] for one in pod["answer"]["mounts"] if one["container_path"] == "/dev/vgpu/0/tenant")
    base, fields = abi_files.fields.TENANT_FIELDS["devices"][0], abi_files.fields.TENANT_DEVICE_FIELDS
    now = time.monotonic_ns()
    with open(page, "r+b") as stream:
        for name, form, value in (
            ("balance_ns", "<q", balance),
            ("active_ns", "<Q", now - int(wanted * 1e9)),
            ("waiting_ns", "<Q", now - int(waited * 1e9)),
        ):
            stream.seek(base + fields[name][0])
            stream.write(struct.pack(form, value))
    if wanted == 0:  # On a busy machine the check may come so late that the time no longer counts as recent.
        monkeypatch.setattr(usage, "RECENT_NS", 60_000_000_000)
    found = samples(vgpuctl(node, capsys, "metrics"))
    assert [found[f"vgpu_container_{one}"][0].value for one in ("active", "throttled")] == [active, throttled]


def test_each_crossing_of_the_limit_is_counted():
    one = usage.Usage("a", "kubelet", usage.NOBODY, (), "GPU-a", 100, 0, 0, 1, 1.0, -1.0, 0.0)
    seen = usage.Violations()
    rows = [(100, 0), (101, 1), (150, 1), (100, 1), (101, 2)]
    for used, expected in rows:
        (found,) = seen.seen([dataclasses.replace(one, memory_used=used)], watched())
        assert found.violations == expected
    unlimited = dataclasses.replace(one, memory_limit=0, memory_used=1)
    assert [found.violations for found in usage.Violations().seen([unlimited], watched())] == [0]
    seen.seen([], watched())  # The plugin forgets the count of an ended allocation.
    assert [found.violations for found in seen.seen([one], watched())] == [0]


def watched(*reasons: str) -> State:
    """Returns a state of the watcher, the part of the plugin that looks for bypasses, with findings about allocation
    a."""
    findings = [Finding("a", "kubelet", "GPU-a", Suspicion(reason, ()), 2, 1.0, 2.0) for reason in reasons]
    return State("report", 2.0, 9, "", tuple(findings), (), {}, {}, shown={("a", "GPU-a"): 200})


@pytest.mark.parametrize(
    ("reason", "count"), [("no-slot", 1), ("more-memory", 1), ("more-time", 0), ("foreign-mount", 0)]
)
def test_memory_finding_of_the_watcher_is_a_violation(reason, count):
    """If a container bypasses the library, its ledger does not show the memory, so the watcher's finding counts as a
    violation of the limit.
    """
    one = usage.Usage("a", "kubelet", usage.NOBODY, (), "GPU-a", 100, 0, 0, 1, 1.0, -1.0, 0.0)
    seen = usage.Violations()
    for _poll in range(3):
        (found,) = seen.seen([one], watched(reason))
        assert (found.violations, found.memory_driver) == (count, 200)


def test_violation_reaches_the_metrics(node, kubelet, daemon, capsys):
    descriptor = tenant(kubelet.run_pod("train"), 3841 * MIB, 0, 0)
    (one,) = samples(vgpuctl(node, capsys, "metrics"))["vgpu_container_memory_violations_total"]
    os.close(descriptor)
    assert one.value == 1


@pytest.mark.parametrize(("used", "devices"), [(2**64 - 1, 1), (2**63, 1), (MIB, 0)])
def test_broken_tenant_data_does_not_hide_other_tenants(node, kubelet, daemon, capsys, used, devices):
    first, liar = (kubelet.run_pod(name, ids=[f"{node.gpus[n].uuid}::0"]) for n, name in enumerate(("first", "liar")))
    held = [tenant(first, MIB, 0, 1), tenant(liar, used, used, 1)]
    os.pwrite(held[1], struct.pack("<I", devices), abi_files.fields.LEDGER_FIELDS["device_count"][0])
    found = samples(vgpuctl(node, capsys, "metrics"))
    for descriptor in held:
        os.close(descriptor)
    assert {one.labels["pod"]: one.value for one in found["vgpu_container_memory_used_bytes"]}["first"] == MIB


def test_memory_of_a_dead_process_is_not_shown(node, kubelet, daemon, capsys):
    pod = kubelet.run_pod("train")
    os.close(tenant(pod, 1000 * MIB, 0, 0))
    (used,) = samples(vgpuctl(node, capsys, "metrics"))["vgpu_container_memory_used_bytes"]
    assert used.value == 0


def test_labels_end_with_their_allocation(node, kubelet, daemon, capsys, monkeypatch):
    monkeypatch.setattr("vgpu_plugin.allocation.collector.GRACE_S", 0.0)
    monkeypatch.setattr("vgpu_plugin.daemon.HOUSEKEEPING_S", 0.05)
    kubelet.run_pod("train")
    assert len(samples(vgpuctl(node, capsys, "metrics"))["vgpu_container_processes"]) == 1
    kubelet.delete_pod("train")
    until(lambda: "vgpu_container_processes" not in samples(vgpuctl(node, capsys, "metrics")), "the end of the labels")


def test_metrics_are_served_by_http(node, kubelet, running):
    from vgpu_plugin.admin.metrics_server import Server

    server = Server("127.0.0.1:0", lambda: 'a{b="c"} 1\n')
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=20) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert answer.read() == b'a{b="c"} 1\n'
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/", timeout=20)
    finally:
        server.stop()


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:x", "no.such.host.invalid:9410"])
def test_invalid_metrics_address_is_fatal(node, address):
    from vgpu_plugin.errors import Fatal

    node.configure()
    daemon = Daemon(node.setup(Extras(address)), lambda: FakeGpus(node.gpus))
    with pytest.raises(Fatal, match="metrics cannot be served on"):
        daemon.run()


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "ä"])
def test_label_values_are_escaped(name):
    from vgpu_plugin.admin import metrics

    status = {
        "gpus": [{"index": 0, "uuid": "GPU-0", "model": name, "memory_mib": 1, "healthy": True}],
        "slices": [],
        "registered": False,
        "warnings": [],
        "allocations": [],
        "version": "1",
        "config_sha256": "",
        "library": "",
        "config_name": "",
        "config_fault": "",
        "mounts_unchecked": 0,
    }
    (one,) = samples(metrics.text(status, []))["vgpu_gpu_healthy"]
    assert one.labels["model"] == name


def test_podresources_service_names_the_pod_of_a_slice(node, kubelet, daemon):
    pod = kubelet.run_pod("train", namespace="ml")
    assert podresources.holders(node.paths.pod_resources) == {pod["ids"][0]: ("ml", "train", "main")}
    assert podresources.holders(node.paths.pod_resources.with_name("nobody")) is None


def test_vgpuctl_shows_usage_slices_and_explanations(node, kubelet, daemon, capsys):
    pod = kubelet.run_pod("train", namespace="ml", ids=[f"{node.gpus[0].uuid}::1"])
    descriptor = tenant(pod, 1920 * MIB, 0, 0)
    row = vgpuctl(node, capsys, "top", "--once", "--interval", "0.1").splitlines()[1].split()
    os.close(descriptor)
    assert row == ["0", "ml/train/main", "1920", "3840", "50", "50", "-", "0", "-", "1", "in", "ledger"]
    rows = vgpuctl(node, capsys, "slices").splitlines()
    assert len(rows) == 9
    first, second = (row.split() for row in rows[1:3])
    assert first == ["0", "free", "3840", "50", "vcuda", "-", f"{node.gpus[0].uuid}::0"]
    assert second == ["0", "in", "use", "3840", "50", "vcuda", "ml/train/main", f"{node.gpus[0].uuid}::1"]
    said = vgpuctl(node, capsys, "explain", f"{node.gpus[0].uuid}::1")
    assert "one of 4 slices (15360 MiB in total) of a GPU with 15360 MiB" in said
    assert "held by allocation" in said
    daemon.source.xids.put((node.gpus[1].uuid, 79))
    until(lambda: "is unhealthy: Xid 79" in vgpuctl(node, capsys, "explain", "1"), "the reason")
    assert "unhealthy" not in vgpuctl(node, capsys, "explain", "0")
    assert ctl.main(["--socket", str(node.paths.admin_socket), "explain", "7"]) == 1
    assert "this node has no GPU or slice 7" in capsys.readouterr().err
    assert "containers get their GPU by envvar" in vgpuctl(node, capsys, "explain")


@pytest.mark.parametrize(("then", "seconds", "got"), [(4.0, 2.0, "25"), (None, 2.0, "-"), (9.0, 2.0, "0")])
def test_top_shows_the_granted_compute_share(then, seconds, got):
    usage = {
        "pod": "",
        "kind": "lease",
        "allocation": "a",
        "uuid": "u",
        "memory_limit": 0,
        "memory_used": 0,
        "share_limit": 0.3,
        "share_granted": 0.6,
        "device_seconds": 4.5,
        "processes": 1,
    }
    before = {("a", "u"): then} if then is not None else {}
    row = ctl_top.top([usage], before, seconds).splitlines()[1].split()
    assert row == ["u", "(lease", "a)", "0", "-", "-", "30", "60", got, "-", "1", "in", "ledger"]


# ---- labels of the node

T4 = Driver("535.261.03", (12, 2), {gpu.uuid: (7, 5) for gpu in gpus("T4", "T4")})


def labelled(found, config, driver=T4, timestamp=None) -> dict[str, str]:
    pieces, findings = sharing.pieces_for([gpu.facts() for gpu in found], config)
    assert findings == []
    strategy = sharing.mig_strategy(config)
    out = labels.labels(found, pieces, driver, "PowerEdge R750 (x)", strategy, timestamp)
    return {name.removeprefix("nvidia.com/"): value for name, value in out.items()}


def slicing(**more):
    return {"sharing": {"timeSlicing": {"resources": [{"name": "nvidia.com/gpu", "replicas": 4}], **more}}}


LABELS = [
    ({}, {"gpu.product": "NVIDIA-T4", "gpu.replicas": "1", "gpu.sharing-strategy": "none", "gpu.count": "2"}),
    (slicing(), {"gpu.product": "NVIDIA-T4-SHARED", "gpu.replicas": "4", "gpu.sharing-strategy": "time-slicing"}),
    (slicing(renameByDefault=True), {"gpu.product": "NVIDIA-T4", "gpu.replicas": "4"}),
    (
        {"sharing": {"mps": {"resources": [{"name": "nvidia.com/gpu", "replicas": 4}]}}},
        {"gpu.sharing-strategy": "mps", "mps.capable": "true"},
    ),
    ({"sharing": {"vcuda": {"splitCount": 7}}}, {"gpu.product": "NVIDIA-T4-SHARED", "gpu.replicas": "7"}),
    (
        {},
        {
            "cuda.driver.major": "535",
            "cuda.driver.minor": "261",
            "cuda.driver.rev": "03",
            "cuda.driver-version.full": "535.261.03",
            "cuda.driver-version.revision": "03",
            "cuda.runtime.major": "12",
            "cuda.runtime-version.full": "12.2",
            "gpu.machine": "PowerEdge-R750-x",
            "gpu.memory": "15360",
            "gpu.family": "turing",
            "gpu.compute.major": "7",
            "gpu.compute.minor": "5",
            "gpu.mode": "compute",
            "mig.capable": "false",
            "vgpu.present": "false",
        },
    ),
]


@pytest.mark.parametrize(("config", "wanted"), LABELS)
def test_node_labels_describe_the_gpus(config, wanted):
    found = labelled(gpus("T4", "T4"), config)
    assert {name: found.get(name) for name in wanted} == wanted
    assert "mig.strategy" not in found


@pytest.mark.parametrize(
    ("compute", "name"),
    [
        ((3, 7), "kepler"),
        ((6, 1), "pascal"),
        ((7, 0), "volta"),
        ((7, 5), "turing"),
        ((8, 0), "ampere"),
        ((8, 9), "ada-lovelace"),
        ((9, 0), "hopper"),
        ((10, 0), "blackwell"),
        ((12, 0), "blackwell"),
        ((13, 0), "rubin"),
        ((0, 0), "undefined"),
    ],
)
def test_family_of_a_compute_capability(compute, name):
    assert labels.family(compute) == name


def with_mig(gpu, *profiles):
    devices = tuple(
        MigDevice(n, f"MIG-{gpu.index}-{n}", one, 9728, attributes=(("memory", 9728), ("multiprocessors", 14)))
        for n, one in enumerate(profiles)
    )
    return dataclasses.replace(gpu, mig_enabled=True, mig=devices)


def test_node_labels_describe_mig_devices():
    cards = gpus("A100-80GB", "A100-80GB")
    mixed = [with_mig(cards[0], "1g.10gb", "1g.10gb", "2g.20gb"), cards[1]]
    driver = Driver("535.1", (12, 2), {gpu.uuid: (8, 0) for gpu in cards})
    found = labelled(mixed, {"flags": {"migStrategy": "mixed"}}, driver)
    assert {name: found[name] for name in found if name.startswith(("mig", "gpu.product"))} == {
        "mig.capable": "true",
        "mig.strategy": "mixed",
        "mig-1g.10gb.product": "NVIDIA-A100-80GB-MIG-1g.10gb",
        "mig-1g.10gb.count": "2",
        "mig-1g.10gb.replicas": "1",
        "mig-1g.10gb.sharing-strategy": "none",
        "mig-1g.10gb.memory": "9728",
        "mig-1g.10gb.multiprocessors": "14",
        "mig-2g.20gb.product": "NVIDIA-A100-80GB-MIG-2g.20gb",
        "mig-2g.20gb.count": "1",
        "mig-2g.20gb.replicas": "1",
        "mig-2g.20gb.sharing-strategy": "none",
        "mig-2g.20gb.memory": "9728",
        "mig-2g.20gb.multiprocessors": "14",
        "gpu.product": "NVIDIA-A100-80GB",
    }
    single = [with_mig(one, "1g.10gb") for one in cards]
    found = labelled(single, {"flags": {"migStrategy": "single"}}, driver)
    assert (found["gpu.product"], found["gpu.count"], found["gpu.memory"]) == (
        "NVIDIA-A100-80GB-MIG-1g.10gb",
        "2",
        "9728",
    )


def test_feature_file_is_written_if_a_label_changes(tmp_path):
    path = tmp_path / "features.d" / "gfd"
    assert labels.write(path, {"nvidia.com/gpu.count": "2", "nvidia.com/gfd.timestamp": "1"})
    assert path.read_text() == "nvidia.com/gfd.timestamp=1\nnvidia.com/gpu.count=2\n"
    assert not labels.write(path, {"nvidia.com/gpu.count": "2", "nvidia.com/gfd.timestamp": "2"})
    assert labels.write(path, {"nvidia.com/gpu.count": "3"})
    assert [one.name for one in path.parent.iterdir()] == ["gfd"]


def test_daemon_writes_labels(node, kubelet, running, tmp_path):
    path = tmp_path / "gfd"
    flags = {"gfd": {"outputFile": str(path), "noTimestamp": True}}
    config = node.configure(splitCount=3).config
    node.paths.config.write_text(json.dumps({**config, "flags": flags}))
    running(Daemon(node.setup(Extras(labels=True)), lambda: FakeGpus(node.gpus)))
    until(path.exists, "the feature file")
    rows = dict(line.split("=") for line in path.read_text().splitlines())
    assert (rows["nvidia.com/gpu.replicas"], rows["nvidia.com/gpu.count"]) == ("3", "2")


# ---- preferred allocation


@pytest.mark.parametrize(("packed", "wanted"), [(False, ["b::0"]), (True, ["a::1"])])
def test_packed_takes_the_most_used_gpu(packed, wanted):
    available = ["a::1", "a::2", "b::0", "b::1", "b::2"]
    assert preferred(available, [], 1, {"a": 3, "b": 3}, ["a", "b"], packed) == wanted


@pytest.mark.parametrize("theirs", [[], ["features.d/theirs"], ["theirs"]])
def test_feature_file_is_removed_with_its_empty_folders(tmp_path, theirs):
    file = tmp_path / "kubernetes" / "node-feature-discovery" / "features.d" / "gfd"
    labels.write(file, {"nvidia.com/gpu.count": "2"})
    for name in theirs:
        (file.parents[1] / name).write_text("theirs")
    labels.leave(file)
    left = sorted(str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*") if one.is_file())
    assert left == [f"kubernetes/node-feature-discovery/{name}" for name in theirs]
    assert theirs or list(tmp_path.iterdir()) == []
    labels.leave(file)
