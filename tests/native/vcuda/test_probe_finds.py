# SPDX-License-Identifier: Apache-2.0
"""vgpu-probe checks in a container that the library enforces its limits. Here it runs with libraries that have a
deliberate defect, and its check for this defect must fail."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import PROBE, ROOT, Host, sources_of

pytestmark = pytest.mark.slow

FITS = "bool fits = total <= limit && bytes <= limit - total;"
ALLOCATED = "    CUresult status = REAL(cuMemAlloc_v2)(pointer, bytes);\n"
CREDITED = "!USUAL(counters_uncharged(counters, ACCOUNT_USED, block.bytes))"
TAKEN = "uint64_t unlocked = 0;"
LOADER = "object_at((void *)&vgpu_dlsym_entry, &self) ? object_symbol(&self, name) : NULL;"
# This replacement code sleeps between the check of the limit and the charge, so that a race always happens.
WINDOW = (
    "counters.h",
    FITS,
    f'extern int usleep(unsigned) __attribute__((visibility("default"))); {FITS} usleep(200);',
)
BEYOND = "now.own > known ? now.own - known : 0"
CREDIT = "ledger_uncharge(leaving->block.device, ACCOUNT_CONTEXT, leaving->block.bytes);"

MANAGED = "ENTER(cuMemAllocManaged, (pointer, bytes, flags));"
PASSED = "return REAL(cuMemAllocManaged)(pointer, bytes, flags);"
POOLED = "ENTER(symbol, arguments);"
SHARE = "unsigned percent = limits_sm_percent("
ADMITTED = "    mark_used();\n    return CUDA_SUCCESS;"
TIGHTER = "(alone || policy_tightness(asked) > policy_tightness(snapshot->policy))"
SMALLER = "if (asked > 0 && (unsigned)asked < percent)"
ALLOCATORS = "every-allocator"

# The probe's checks that each test runs. The check of the compute share takes seconds on each GPU, so only the tests
# that expect it to fail run it.
CHECKS = [
    "totals",
    "visible-devices",
    "limit-exact",
    ALLOCATORS,
    "four-processes",
    "dlsym-route",
    "getprocaddress-route",
    "freed",
]

# Keys: defects. Values: source file, original code, replacement code, checks that must fail.
MUTANTS = {
    "no defect": ("counters.h", FITS, FITS, set()),
    "limit raised by one byte": ("counters.h", FITS, "limit++; " + FITS, {"limit-exact", "four-processes"}),
    "no lock around check and charge": ("counters.h", TAKEN, "if (1) return true; " + TAKEN, {"four-processes"}),
    "free not credited": ("memory.c", CREDITED, "0", {"freed"}),
    "managed memory uncharged": ("memory.c", MANAGED, MANAGED + PASSED, {ALLOCATORS}),
    "pool allocation always refused": ("async.c", POOLED, POOLED + " return CUDA_ERROR_OUT_OF_MEMORY;", {ALLOCATORS}),
    "destroyed context not credited": ("context.c", CREDIT, ";", {"freed"}),
    "unseen context uncharged": ("unaccounted.c", BEYOND, "0", {"private-context"}),
    # The check with one process does not find this defect, because there the library adds the missing charge later,
    # from the usage that NVML reports for the process.
    "allocation uncharged after the check": (
        "memory.c",
        ALLOCATED,
        ALLOCATED
        + "    ledger_uncharge(device->ledger, ACCOUNT_USED, bytes);\n"
        + "    if (!status) { counters_leave(counters); return 0; }\n",
        {"four-processes", "freed"},
    ),
    "graph memory uncharged": ("graph_memory.c", ADMITTED, ADMITTED.replace("mark_used();", ""), {ALLOCATORS}),
    "capture uncharged": ("async.c", "return graph_memory_captured(control);", "return CUDA_SUCCESS;", {ALLOCATORS}),
    "environment loosens the policy": ("limits.c", TIGHTER, TIGHTER.replace(" > ", " != "), {"share"}),
    "environment raises the share": ("limits.c", SMALLER, "if (asked > 0)", {"share"}),
    "share not limited": ("limiter.c", SHARE, SHARE.replace("= limits", "= 0 * limits"), {"share"}),
    "dlsym not replaced": ("route.c", LOADER, "NULL; (void)self;", {"dlsym-route"}),
    "dlvsym not exported": ("libvgpu.map", "        dlvsym;\n", "", {"dlsym-route"}),
}  # fmt: skip


def broken(folder: Path, name: str, old: str, new: str, *more: tuple[str, str, str]) -> Path:
    source = folder / "vcuda"
    shutil.copytree(ROOT / "native/vcuda", source)
    for file, before, after in ((name, old, new), *more):
        (path,) = (source / "src").rglob(file)
        assert before in path.read_text(), f"{file} no longer has the code that the defect replaces: {before}"
        path.write_text(path.read_text().replace(before, after, 1))
    command = [
        os.environ.get("CC", "cc"),
        "-O1",
        "-w",
        "-std=c11",
        "-D_GNU_SOURCE",
        "-fPIC",
        "-fvisibility=hidden",
        "-shared",
    ]
    command += [
        f"-I{source}/include",
        f"-I{source}/src",
        f"-Wl,--version-script={source}/src/libvgpu.map",
        "-Wl,-Bsymbolic",
        "-Wl,-z,nodelete",
    ]
    subprocess.run(
        [*command, *sources_of(source / "src"), "-o", folder / "libvgpu.so"], check=True, stderr=subprocess.PIPE
    )
    return folder / "libvgpu.so"


@pytest.mark.parametrize("mutant", MUTANTS)
def test_probe_finds_the_defect(host: Host, tmp_path: Path, mutant: str) -> None:
    name, old, new, expected = MUTANTS[mutant]
    # With the policy "force" the share also limits a container that uses the GPU alone, as this test's container does.
    host.write_limits(core_policy="force")
    library = broken(tmp_path, name, old, new, *([WINDOW] if mutant == "no lock around check and charge" else []))
    env = host.env(preload=False, LD_PRELOAD=str(library))
    done = subprocess.run(
        [PROBE, "--json", "--checks", ",".join([*CHECKS, *expected])],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )
    found = {one["name"] for one in json.loads(done.stdout)["checks"] if one["verdict"] == "violated"}
    assert expected <= found, done.stdout
    assert bool(found) == bool(expected)
