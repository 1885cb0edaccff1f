# SPDX-License-Identifier: Apache-2.0
"""A slow read of NVML's figures delays an allocation for milliseconds at most, and readers that come one after
the other hold it up no longer than one does.
"""

from __future__ import annotations

import subprocess

from conftest import SOURCES, Host, compile_program


def test_an_allocation_goes_on_where_nvml_does_not_answer(host: Host) -> None:
    program = compile_program(host.folder, "gate", "gate.c", str(SOURCES / "account/gate.c"), flags=("-lpthread",))
    done = subprocess.run([program], env=host.env(preload=False), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
