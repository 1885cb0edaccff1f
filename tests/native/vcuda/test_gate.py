# SPDX-License-Identifier: Apache-2.0
"""Figures that take long to be read hold no allocation up for longer than milliseconds, and readers that come one after
the other hold it up no longer than one does.
"""

from __future__ import annotations

import subprocess

from conftest import SOURCES, Host, compile_program


def test_an_allocation_goes_on_where_nvml_does_not_answer(host: Host) -> None:
    program = compile_program(host.folder, "gate", "gate.c", str(SOURCES / "account/gate.c"), flags=("-lpthread",))
    done = subprocess.run([program], env=host.env(preload=False), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
