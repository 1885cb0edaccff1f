# SPDX-License-Identifier: Apache-2.0
"""Run a command in a slice of this host's GPU, without a device plugin or containers.

    in_slice.py --memory-mib 12288 --sm 50 -- python3 tests/gpu/workloads/run.py --label slice --out results
    in_slice.py --memory-mib 6144 --oversold 10240 -- python3 …

The slice has the files and the environment of a container, but no mounts. So the run shows what libvgpu.so costs and
limits, but nothing isolates the command. On a node that ``site.yml`` has prepared, use ``vgpuctl exec`` instead. The
exit status is that of the command, or 2 if there is no slice.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Iterator

sys.path.insert(0, str(Path(__file__).resolve().parent))

import check
from gpucheck import arbiter, host, report


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--memory-mib", type=int, required=True, help="memory of the slice")
    parser.add_argument("--sm", type=int, default=100, metavar="PERCENT", help="share of the SMs (default: no limit)")
    parser.add_argument("--policy", default="force", choices=sorted(host.layouts.fields.CORE_POLICIES))
    parser.add_argument("--arbiter", action="store_true", help="run vgpu-arbiter too, which balances compute time")
    parser.add_argument(
        "--oversold",
        type=int,
        metavar="FREE_MIB",
        help="let the slice use host memory, and fill the GPU except for FREE_MIB (at least --memory-mib)",
    )
    parser.add_argument("--gpu", type=int, default=0, metavar="INDEX", help="number of the GPU in NVML's order")
    parser.add_argument("--library", type=Path, help="use this libvgpu.so instead of building one")
    parser.add_argument("--folder", type=Path, default=host.ROOT / ".build/gpu-check/slice", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(words)
    if given.memory_mib < 1 or not 1 <= given.sm <= 100:
        parser.error("expected --memory-mib of at least 1 and --sm from 1 to 100")
    # The slice's host memory is managed memory. More of it than the GPU has free may hang the GPU.
    # So FREE_MIB must be at least the slice's memory.
    if given.oversold is not None and given.oversold < given.memory_mib:
        parser.error(f"--oversold {given.oversold}: expected at least --memory-mib {given.memory_mib}")
    given.folder = given.folder.resolve()
    given.library = given.library and given.library.resolve()
    return given


@contextlib.contextmanager
def filled(here: host.Host, free: int) -> Iterator[None]:
    """Lets a process without the library allocate memory during the block, until only ``free`` bytes are free."""
    with host.Hand(here) as hand:
        hand.start()
        size = here.card.memory()["free"] - free
        if size > 0:
            # The process, which runs the program hand.c, keeps the memory until the end of the with block.
            hand.must(f"get alloc {size // host.MIB * host.MIB}")
        yield


def main(words: list[str] | None = None) -> int:
    given = arguments(words)
    missing = check.prepare(given)
    if missing:
        print(f"in_slice: {missing}", file=sys.stderr)
        return 2
    with contextlib.ExitStack() as stack:
        try:
            here = host.Host(given.folder, given.library, given.gpu)
            one = here.slice(
                given.memory_mib * host.MIB, sm=given.sm, policy=given.policy, oversubscribe=given.oversold is not None
            )
            if given.arbiter:
                stack.enter_context(arbiter.Arbiter(here, [one]))
            if given.oversold is not None:
                stack.enter_context(filled(here, given.oversold * host.MIB))
        except (report.Skip, RuntimeError, OSError) as fault:
            print(f"in_slice: {fault}", file=sys.stderr)
            return 2
        return subprocess.run(given.command, env=one.env(), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
