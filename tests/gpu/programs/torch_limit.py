# SPDX-License-Identifier: Apache-2.0
"""Runs inside a slice and lets PyTorch allocate up to the limit and beyond. Prints "full" and waits for a line of
input, so that a test can read the GPU's usage from outside. Then prints one line of JSON. With an argument it only
measures the time of PyTorch's first use."""

import json
import sys
import time

import torch


def graph_is_right():
    source = torch.ones(1 << 20, device="cuda")
    target = torch.zeros(1 << 20, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _unused in range(3):
            target.copy_(source * 2 + 1)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        target.copy_(source * 2 + 1)
    source.fill_(3.0)
    graph.replay()
    torch.cuda.synchronize()
    return bool((target == 7).all().item())


def main():
    if torch.version.cuda is None or not torch.cuda.is_available():
        print(json.dumps({"skipped": "this torch has no CUDA here"}))
        return
    found = {"torch": torch.__version__, "cuda": torch.version.cuda, "error": "none"}
    began = time.monotonic()
    one = torch.ones(1024, 1024, device="cuda")
    found["first_sum"] = float((one @ one).sum().item())
    torch.nn.functional.softmax(torch.randn(512, 512, device="cuda"), dim=-1).sum().item()
    found["first_use_seconds"] = round(time.monotonic() - began, 3)
    del one
    torch.cuda.empty_cache()
    if sys.argv[1:]:
        print(json.dumps(found))
        return
    found["free"], found["total"] = torch.cuda.mem_get_info()
    held = []
    try:
        while True:
            held.append(torch.full((64 << 18,), 1.0, device="cuda"))
    except RuntimeError as error:
        found["error"] = type(error).__name__
        found["message"] = str(error)[:300]
    found["allocated"] = torch.cuda.memory_allocated() or sum(one.numel() * 4 for one in held)
    print("full", flush=True)
    sys.stdin.readline()
    found["sums_right"] = all(one[:1024].sum().item() == 1024 for one in held[:4])
    held.clear()
    torch.cuda.empty_cache()
    left = torch.randn(2048, 2048, device="cuda", dtype=torch.float64)
    right = torch.randn(2048, 2048, device="cuda", dtype=torch.float64)
    there = (left @ right).cpu()
    found["product"] = bool(torch.allclose(there, left.cpu() @ right.cpu()))
    try:
        found["graph"] = graph_is_right()
    except RuntimeError as error:
        found["graph"] = str(error)[:300]
    again = torch.full((64 << 18,), 2.0, device="cuda")
    found["again"] = bool(again[-1].item() == 2.0)
    print(json.dumps(found))


main()
