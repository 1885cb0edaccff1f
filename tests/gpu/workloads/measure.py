# SPDX-License-Identifier: Apache-2.0
"""Run one row in this process, and print one line of JSON: ``measure.py ID [--smoke] [--seconds S]``.

A row is one workload: a model, inference or training, and a batch. Each row runs in a new process, so that its memory
or a crash does not affect other rows. The program waits for the GPU after each step, so that throttling is visible in
each step and not only at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from typing import Any, Callable

import table

WARM_UP = 5  # Warm-up steps, in which algorithms are chosen and pools are filled.
LEAST_STEPS, MOST_STEPS = 5, 10000


def measure(row: table.Row, device_name: str, seconds: float, half: bool = False) -> dict[str, Any]:
    """Returns the figures of one row. Raises torch's exceptions; main() reports out of memory as ``table.FULL``."""
    import models
    import torch

    device = torch.device(device_name)
    torch.manual_seed(0)
    model = models.BUILD[row.model]().to(device)
    data = models.inputs(row, device)
    autocast = torch.autocast(device.type, torch.float16 if device.type == "cuda" else torch.bfloat16, enabled=half)
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    if row.kind == table.TRAINING:
        wanted = models.targets(row, device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        model.train()

        def step() -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            with autocast:
                loss = torch.nn.functional.cross_entropy(model(data), wanted)
            loss.backward()
            optimizer.step()
            return loss

    else:
        model.eval()

        def step() -> torch.Tensor:
            with torch.inference_mode(), autocast:
                return model(data)

    for _number in range(WARM_UP if device.type == "cuda" else 1):
        last = step()
    wait()
    lengths: list[float] = []
    while (sum(lengths) < seconds or len(lengths) < LEAST_STEPS) and len(lengths) < MOST_STEPS:
        began = time.perf_counter()
        last = step()
        wait()
        lengths.append(time.perf_counter() - began)
    if not bool(torch.isfinite(last).all()):
        return {"status": "failed: the result is not finite"}
    found = summary(row, lengths)
    found["shape"] = list(last.shape)
    if device.type == "cuda":
        found["peak_mib"] = torch.cuda.max_memory_reserved() >> 20
    return found


def summary(row: table.Row, lengths: list[float]) -> dict[str, Any]:
    """Returns the row's figures. ``lengths`` are the durations of its steps in seconds."""
    ordered = sorted(lengths)
    return {
        "status": table.DONE,
        "items_per_s": row.batch * len(lengths) / sum(lengths),
        "steps": len(lengths),
        "median_step_ms": 1000 * statistics.median(ordered),
        "p95_step_ms": 1000 * ordered[math.ceil(0.95 * len(ordered)) - 1],
    }


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("id")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    return parser.parse_args(words)


def main() -> int:
    given = arguments()
    row = table.chosen(given.id)[0]
    try:
        found = measure(table.smaller(row) if given.smoke else row, given.device, given.seconds, given.half)
    except RuntimeError as error:
        # torch.cuda.OutOfMemoryError is a RuntimeError; cuDNN and cuBLAS raise RuntimeErrors with other texts.
        text = str(error)
        full = "out of memory" in text.lower() or "ALLOC_FAILED" in text
        found = {"status": table.FULL if full else f"failed: {text.splitlines()[0][:300]}"}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
