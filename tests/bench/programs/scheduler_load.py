# SPDX-License-Identifier: Apache-2.0
"""Measures the scheduler's extender in this process. Arguments: NODES PODS_PER_NODE CALLS [KINDS]. Prints one JSON
object.

A call is a pair of requests of the kube-scheduler for one pod, filter and prioritize, which name all nodes. Its time is
measured from the bytes of the request to the bytes of the response. After each call the pod is entered in the ledger,
the extender's record of the pods on each node, so no two calls see the same ledger. Times are processor time of this
thread, because other programs run on the machine; wall times are reported too.

KINDS is the number of different pod requests: pods of one job have equal requests. By default each pod's request
differs.

The negative control is a naive extender: at each call it sums up the pods of each node and checks GPUs one by one.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

from vgpu_plugin._shared.pods.annotations import APP, Device, NodeGpu, Part
from vgpu_scheduler import wire
from vgpu_scheduler.extender import Extender
from vgpu_scheduler.ledger import Ledger

GPUS = 8
SIZES = (1000, 2000, 3000, 5000, 8000, 12000)


def resident_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def fill(ledger: Ledger, nodes: int, pods_per_node: int, chance: random.Random) -> list[str]:
    for n in range(nodes):
        uuids = [f"GPU-58761ffe-067d-967c-{n:04d}-{gpu:012d}" for gpu in range(GPUS)]
        gpus = [NodeGpu(uuid, "NVIDIA A100-SXM4-80GB", 81920, 81920, 20, 4096, 5) for uuid in uuids]
        ledger.set_node(f"gpu-node-{n:05d}.cluster.example", gpus)
    names = list(ledger.nodes)
    for n in range(nodes * pods_per_node):
        name = names[n % nodes]
        gpu = ledger.nodes[name][(n // nodes) % GPUS]
        device = Device(gpu.uuid, chance.choice(SIZES), chance.choice((0, 0, 10)))
        ledger.hold(
            f"0e7a6a5c-3d1b-4c1e-9d8f-{n:012x}", f"team-{n % 50}/job-{n:x}", name, [Part("main", APP, (device,))]
        )
    return names


def pod(number: int, chance: random.Random) -> dict:
    limits = {
        "nvidia.com/gpu": str(chance.choice((1, 1, 1, 2))),
        "nvidia.com/gpumem": str(chance.choice(SIZES) + number),
    }
    if chance.random() < 0.5:
        limits["nvidia.com/gpucores"] = "20"
    container = {"name": "main", "image": "example.com/train:1", "resources": {"limits": limits, "requests": limits}}
    annotations = {"nvidia.com/use-gputype": "A100"} if chance.random() < 0.2 else {}
    metadata = {"name": f"new-{number}", "namespace": "default", "uid": f"new-{number}", "annotations": annotations}
    return {"metadata": metadata, "spec": {"schedulerName": "vgpu-scheduler", "containers": [container]}}


def control(ledger: Ledger, need: int, cores: int) -> int:
    """Sums up each GPU's usage from all pods, and returns the number of nodes that have a GPU with room for the pod."""
    used: dict[str, dict[str, list[int]]] = {name: {} for name in ledger.nodes}
    for _uid, held in ledger.held_by():
        for uuid, memory, percent, slots in held.uses:
            one = used[held.node].setdefault(uuid, [0, 0, 0])
            one[0] += memory
            one[1] += percent
            one[2] += slots
    fits = 0
    for name, gpus in ledger.nodes.items():
        for gpu in gpus:
            memory, percent, slots = used[name].get(gpu.uuid, (0, 0, 0))
            if need <= gpu.capacity_mib - memory and cores <= 100 - percent and slots < gpu.slots:
                fits += 1
                break
    return fits


def main() -> None:
    nodes, pods_per_node, calls, *rest = (int(word) for word in sys.argv[1:])
    kinds = rest[0] if rest else calls
    chance = random.Random(nodes)
    ledger = Ledger()
    extender = Extender(ledger, None)  # type: ignore[arg-type]
    names = fill(ledger, nodes, pods_per_node, chance)
    decode = wire.msgspec.json.Decoder(wire.ExtenderArgs).decode
    took, wall, fits = [], [], 0
    for number in range(calls):
        made = pod(number, chance) if kinds == calls else pod(number % kinds, random.Random(number % kinds))
        made["metadata"]["uid"] = f"new-{number}"
        asked = json.dumps({"Pod": made, "Nodes": None, "NodeNames": names}).encode()
        began, began_wall = time.thread_time(), time.perf_counter()
        answer = extender.filter(decode(asked))
        wire.encode(answer)
        passed = time.thread_time() - began, time.perf_counter() - began_wall
        ranked = json.dumps({"Pod": made, "Nodes": None, "NodeNames": answer.NodeNames}).encode()
        began, began_wall = time.thread_time(), time.perf_counter()
        wire.encode(extender.prioritize(decode(ranked)))
        took.append((passed[0] + time.thread_time() - began) * 1000)
        wall.append((passed[1] + time.perf_counter() - began_wall) * 1000)
        fits += len(answer.NodeNames or [])
        if answer.NodeNames:
            name = chance.choice(answer.NodeNames)
            ledger.hold(made["metadata"]["uid"], "default/new", name, ledger.place(extender._read(made), name))
    plain = []
    for _each in range(3):
        began = time.thread_time()
        control(ledger, 5000, 20)
        plain.append((time.thread_time() - began) * 1000)
    took.sort()
    wall.sort()
    found = {"p50": took[calls // 2], "p99": took[int(calls * 0.99)], "wall_p50": wall[calls // 2]}
    found |= {"wall_p99": wall[int(calls * 0.99)], "control": min(plain), "memory_mib": resident_mib()}
    print(json.dumps({**found, "fits": fits / calls, "oversold": len(ledger.oversold())}))


if __name__ == "__main__":
    main()
