# SPDX-License-Identifier: Apache-2.0
"""Creates scripts that replace the clients of docker, podman and containerd. Also defines ids of ended runs of the
isolation check (attempts to exceed the limits on a node), so that tests can make leftovers of such runs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Callable

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.host import run_id
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import (
    containerd as isolation_containerd,
)
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import (
    image as isolation_image,
)
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import (
    leftovers,
)

# A run id is <pid>.<start time of the process>.<digits of the boot id>. OURS is the id of this process; the other three
# are ids of ended runs. BEFORE and FORMER have the pid of this process, so only the other parts of the id show that
# their runs have ended.
OURS = run_id.own()
DEAD = f"{2**22 + 1}.7.{OURS.split('.')[2]}"  # DEAD has a pid above the maximum of Linux.
BEFORE = f"{os.getpid()}.{OURS.split('.')[1]}.000000000000"  # BEFORE is a run of an earlier boot.
FORMER = f"{os.getpid()}.1.{OURS.split('.')[2]}"  # FORMER is a run of an earlier process of this boot.


def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict]:
    """Returns a function that writes client scripts and returns module parameters that name these scripts.

    Each keyword is a client. Its value maps each subcommand to the Python code that the script runs for it. Any other
    subcommand succeeds.
    """
    monkeypatch.setattr(leftovers, "ROOTS", str(tmp_path / "isolation-"))
    monkeypatch.setattr(leftovers, "RECORDS", str(tmp_path / "state" / "check-"))
    monkeypatch.setattr(leftovers, "IN_USE", {one: str(tmp_path / f"{one}*in-use") for one in ("docker", "podman")})
    monkeypatch.setattr(isolation_image, "pack", lambda _probe: b"tar of the host")
    monkeypatch.setattr(isolation_image, "lay_out", lambda _tar, folder: Path(folder).mkdir())
    monkeypatch.setattr(isolation_containerd, "EMPTY_FOLDERS", ())

    def make(**clients: dict) -> dict:
        params = {"runtime": "auto", "image": "", "cdi_folders": [str(tmp_path)]}
        params.update({name: str(tmp_path / name) for name in ("docker", "podman", "ctr", "nvidia_runtime")})
        for name, commands in clients.items():
            table = {"info": "print('{\"nvidia\":{}}')", "image": "sys.exit('No such image')", **commands}
            program = tmp_path / name
            program.write_text(
                f"#!{sys.executable} -S\nimport sys, time\nwords = ' '.join(sys.argv[1:])\n"
                f"open({str(tmp_path / 'calls')!r}, 'a').write({name!r} + ' ' + words + '\\n')\n"
                f"exec({table!r}.get(sys.argv[1], ''))\n"
            )
            program.chmod(0o755)
        return params

    return make


def record(engine: str = "docker", mark: str = DEAD) -> str:
    """Writes the record that an isolation check leaves if it is killed while it uses an engine; returns the record's
    path."""
    path = Path(f"{leftovers.RECORDS}{engine}-{mark}")
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    return str(path)


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []
