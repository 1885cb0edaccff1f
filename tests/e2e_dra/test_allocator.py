# SPDX-License-Identifier: Apache-2.0
"""Checks the project's ResourceSlices and DeviceClasses with the code of Kubernetes 1.36.

A Go program runs the API server's validation and the scheduler's allocator, which reports the GPU that a ResourceClaim
gets. The tests need neither a cluster nor the box (the namespaces of tests/e2e). Go builds the program once.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULE = ROOT / "tests/e2e/kube/1.36"
sys.path += [str(ROOT / "tests/unit/plugin"), str(ROOT / "plugins")]

import samples  # noqa: E402
from module_utils.kube import dra_manifests  # noqa: E402
from vgpu_plugin._shared.config.sharing import pieces_for  # noqa: E402
from vgpu_plugin.dra.devices import NodeView, slices_of  # noqa: E402
from vgpu_plugin.dra.publish import slice_name  # noqa: E402
from vgpu_plugin.dra.shares import Claim, shares_of  # noqa: E402
from vgpu_plugin.node.gpus import Driver, Gpu, MigDevice  # noqa: E402

# Configurations of the driver. MIXED: MIG instances are devices of their own.
EQUAL = {"sharing": {"vcuda": {"splitCount": 7}}}
SHARED = {"sharing": {"vcuda": {"splitCount": 4, "coresScaling": "1"}}}
REQUESTED = {"sharing": {"vcuda": {"splitCount": 7, "sliceSizing": "requested"}}}
SLICED = {"sharing": {"timeSlicing": {"resources": [{"name": "nvidia.com/gpu", "replicas": 4}]}}}
WHOLE: dict[str, Any] = {"sharing": {}}
MIXED: dict[str, Any] = {"flags": {"migStrategy": "mixed"}, "sharing": {}}
FIRST, SECOND = "gpu-00000000", "gpu-00000001"


@pytest.fixture(scope="session")
def program() -> Path:
    """Builds the program unless it exists for the digest of its source and modules. Returns its path."""
    sources = [MODULE / "allocator/main.go", MODULE / "go.mod", MODULE / "go.sum"]
    digest = hashlib.sha256(b"".join(one.read_bytes() for one in sources)).hexdigest()[:12]
    out = ROOT / ".build" / f"allocator-{digest}"
    if not out.exists():
        version = next(line.split()[1] for line in sources[1].read_text().splitlines() if line.startswith("go "))
        script = [str(MODULE.parent / "go.sh"), version.rpartition(".")[0]]
        go = subprocess.run(script, stdout=subprocess.PIPE, text=True, check=True).stdout.strip().splitlines()[-1]
        build = {"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly", "GOTOOLCHAIN": "local"}
        command = [go, "build", "-p", "2", "-trimpath", "-o", f"{out}.part", "./allocator"]
        subprocess.run(command, cwd=MODULE, env={**os.environ, **build}, check=True)
        Path(f"{out}.part").rename(out)
    return out


def objects(config: dict[str, Any], gpus: list[Gpu] | None = None, **more: Any) -> list[dict[str, Any]]:
    """Returns the ResourceSlices that our driver sends for a node with two T4."""
    gpus = samples.gpus("T4", "T4", numa=(0, 1)) if gpus is None else gpus
    pieces, _findings = pieces_for([gpu.facts() for gpu in gpus], config)
    driver = Driver("535.261.03", (12, 2), {gpu.uuid: (7, 5) for gpu in gpus})
    made = slices_of(NodeView("n1", tuple(gpus), tuple(pieces), config, driver, **more))
    return [
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": slice_name("n1", n)},
            "spec": {**spec, "pool": {**spec["pool"], "generation": 1}},
        }
        for n, spec in enumerate(made)
    ]


def claim(*capacities: dict[str, str], count: int = 1, of: str = "vgpu") -> dict[str, Any]:
    """Returns a claim with one request per capacity."""
    asked = [
        {
            "name": f"r{n}",
            "exactly": {
                "deviceClassName": of,
                "allocationMode": "ExactCount",
                "count": count,
                **({"capacity": {"requests": one}} if one else {}),
            },
        }
        for n, one in enumerate(capacities)
    ]
    metadata = {"name": "c", "namespace": "default", "uid": "u"}
    spec = {"devices": {"requests": asked}}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": metadata, "spec": spec}


def ask(program: Path, slices: list[dict[str, Any]], *claims: dict[str, Any]) -> dict[str, Any]:
    question = {"slices": slices, "classes": dra_manifests.classes("nvidia.com/gpu"), "claims": list(claims)}
    done = subprocess.run([program], input=json.dumps(question), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def mig_gpus(count: int, parts: int = 7) -> list[Gpu]:
    (gpu,) = samples.gpus("A100-80GB")
    return [
        replace(
            gpu,
            index=n,
            uuid=f"GPU-{n:08d}-1",
            mig_enabled=True,
            mig=tuple(MigDevice(k, f"MIG-{n:04d}{k:04d}-1", "1g.10gb", 9728) for k in range(parts)),
        )
        for n in range(count)
    ]


UUIDS = [gpu.uuid for gpu in samples.gpus("T4", "T4")]
UNHEALTHY: dict[str, Any] = {"unhealthy": {UUIDS[0]: "Xid 79"}, "moving": frozenset({UUIDS[0]})}
VALID: dict[str, tuple[dict[str, Any], list[Gpu] | None, dict[str, Any]]] = {
    "equal slices": (EQUAL, None, {}),
    "equal slices with a share of the compute time": (SHARED, None, {}),
    "requested sizes": (REQUESTED, None, {}),
    "oversold memory": ({"sharing": {"vcuda": {"splitCount": 3, "memoryScaling": "1.7"}}}, None, {}),
    "requested sizes, one claim per GPU": (
        {"sharing": {"vcuda": {"splitCount": 1, "sliceSizing": "requested"}}},
        None,
        {},
    ),
    "time-slicing": (SLICED, None, {}),
    "unshared GPUs": (WHOLE, None, {}),
    "MIG on 16 GPUs": (MIXED, mig_gpus(16), {}),
    "taints": (REQUESTED, None, UNHEALTHY),
    "no GPU": (EQUAL, [], {}),
}


@pytest.mark.parametrize("name", VALID)
def test_slices_and_classes_are_valid(program: Path, name: str) -> None:
    config, gpus, more = VALID[name]
    assert ask(program, objects(config, gpus, **more), claim({}))["invalid"] == []


def test_the_program_reports_an_invalid_slice(program: Path) -> None:
    slices = objects(REQUESTED)
    slices[0]["spec"]["devices"][0]["allowMultipleAllocations"] = False
    assert any("requestPolicy" in one for one in ask(program, slices)["invalid"])


HALF = {"memory": "7200Mi", "cores": "50"}
# columns: the case, configuration of the driver, the claims; expected devices of each claim (None means that the claim
# does not fit)
CHOICES: list[tuple[str, dict[str, Any], list[dict[str, Any]], list[list[str] | None]]] = [
    (
        "claims fill the first GPU before the second",
        REQUESTED,
        [claim(HALF)] * 5,
        [[FIRST], [FIRST], [SECOND], [SECOND], None],
    ),
    (
        "claims fill the memory to the MiB",
        REQUESTED,
        [claim({"memory": "14400Mi"}), claim({"memory": "14400Mi"}), claim({"memory": "1Mi"})],
        [[FIRST], [SECOND], None],
    ),
    ("a claim needs 1 MiB more than a GPU has", REQUESTED, [claim({"memory": "14401Mi"})], [None]),
    (
        "a second claim of 60 percent needs another GPU",
        REQUESTED,
        [claim({"memory": "1Mi", "cores": "60"})] * 3,
        [[FIRST], [SECOND], None],
    ),
    ("a time-sliced GPU has four slots", SLICED, [claim({})] * 9, [[FIRST]] * 4 + [[SECOND]] * 4 + [None]),
    ("equal slices", EQUAL, [claim({})] * 15, [[FIRST]] * 7 + [[SECOND]] * 7 + [None]),
    ("equal slices with a share of the compute time", SHARED, [claim({})] * 9, [[FIRST]] * 4 + [[SECOND]] * 4 + [None]),
    ("a claim needs more than an equal slice", EQUAL, [claim({"memory": "4Gi"})], [None]),
    ("unshared GPUs", WHOLE, [claim({})] * 3, [[FIRST], [SECOND], None]),
    (
        "two devices of one request are two GPUs",
        REQUESTED,
        [claim(HALF, count=2), claim(HALF, count=3)],
        [[FIRST, SECOND], None],
    ),
    ("two requests may get the same GPU", REQUESTED, [claim(HALF, HALF)], [[FIRST, FIRST]]),
    ("no device of the class vgpu-mig", REQUESTED, [claim({}, of="vgpu-mig")], [None]),
]


@pytest.mark.parametrize(("config", "claims", "devices"), [one[1:] for one in CHOICES], ids=[one[0] for one in CHOICES])
def test_each_claim_gets_the_expected_devices(program: Path, config: dict, claims: list, devices: list) -> None:
    found = ask(program, objects(config), *claims)
    assert found["invalid"] == []
    assert [one and [part["device"] for part in one] for one in found["allocations"]] == devices


def test_a_tainted_gpu_gets_no_new_claim(program: Path) -> None:
    found = ask(program, objects(REQUESTED, **UNHEALTHY), claim({"memory": "1Gi"}))
    assert [part["device"] for part in found["allocations"][0]] == [SECOND]


def test_each_mig_instance_gets_one_claim(program: Path) -> None:
    found = ask(program, objects(MIXED, mig_gpus(1, parts=2)), *[claim({}, of="vgpu-mig")] * 3, claim({}))
    assert [one and len(one) for one in found["allocations"]] == [1, 1, None, None]


# columns: the requested capacity; the expected consumed capacity (MiB, percent of the SMs). The GPU is split into seven
# slices (parts).
CONSUMED = [
    ({}, (2194, 14)),
    ({"memory": "4Gi", "cores": "30"}, (4096, 30)),
    ({"memory": "1500500Ki"}, (1466, 14)),
    ({"memory": "1"}, (1, 14)),
    ({"cores": "1"}, (2194, 1)),
]


@pytest.mark.parametrize(("asked", "consumed"), CONSUMED)
def test_the_driver_reads_what_the_claim_consumed(program: Path, asked: dict, consumed: tuple) -> None:
    """The driver reads from the allocator's result exactly the memory and percent that the claim consumed."""
    ((part,),) = ask(program, objects(REQUESTED), claim(asked))["allocations"]
    result = {
        "driver": "gpu.vgpu.fleet",
        "pool": "n1",
        "request": part["request"],
        "device": part["device"],
        "shareID": "s",
        "consumedCapacity": part["consumed"],
    }
    found = {"metadata": {"uid": "u"}, "status": {"allocation": {"devices": {"results": [result]}}}}
    ((one,),) = (share.parts for share in shares_of(Claim("default", "c", "u"), found, "n1"))
    assert (one.memory_mib, one.cores) == consumed
