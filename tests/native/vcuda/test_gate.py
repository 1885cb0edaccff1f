# SPDX-License-Identifier: Apache-2.0
"""While the library compares its charges with NVML's figures, allocations wait at a gate. If NVML is slow, an
allocation must still wait only a few milliseconds. Several consecutive comparisons must not delay an allocation longer
than a single comparison."""

from __future__ import annotations

import subprocess

from conftest import SOURCES, Host, compile_program


def test_allocation_continues_while_nvml_does_not_respond(host: Host) -> None:
    program = compile_program(host.folder, "gate", "gate.c", str(SOURCES / "account/gate.c"), flags=("-lpthread",))
    done = subprocess.run([program], env=host.env(preload=False), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
