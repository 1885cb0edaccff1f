# SPDX-License-Identifier: Apache-2.0
"""Runs vgpu-arbiter for test slices (parts of a GPU). vgpu-arbiter gives the containers of a GPU their turns. It reads
the folders of a node, so this module creates such folders and links the slices' files into them."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any, Sequence

from .host import Host, Slice, layouts


class Arbiter:
    """Runs vgpu-arbiter during a with block. Each slice gets two files: in the tenant page it reports its work, in the
    GPU page it reads when it may use the GPU. The pages stay after the block."""

    def __init__(self, host: Host, slices: Sequence[Slice]) -> None:
        self._host = host
        self._run = host.folder / f"run-{os.getpid()}-{time.monotonic_ns()}"
        for one in slices:
            self._lay_out(one)
        self._process: subprocess.Popen | None = None

    def _lay_out(self, one: Slice) -> None:
        """Creates the pages next to the ledger (file of charged memory). Links all files into a folder of the node."""
        node = self._run / "allocations" / one.folder.name
        (node / "rw").mkdir(parents=True)
        uuid = self._host.uuid
        pages: dict[str, bytes] = {
            "tenant": layouts.pack_tenant_page([uuid], one.folder.name),
            "gpu-" + uuid: layouts.pack_gpu_page(uuid, one.folder.name),
        }
        for name, content in pages.items():
            (one.folder / name).write_bytes(content)
        places = {"limits": "limits", "ledger": "rw/ledger", "tenant": "rw/tenant", "gpu-" + uuid: "gpu-" + uuid}
        for name, place in places.items():
            os.link(one.folder / name, node / place)

    def __enter__(self) -> Arbiter:
        log = (self._run / "arbiter.log").open("wb")
        command = [str(self._host.arbiter), "--run", str(self._run)]
        self._process = subprocess.Popen(command, env=self._host.base_env, stdout=log, stderr=log)
        until = time.monotonic() + 10
        while not self.status().get("arbiter"):
            if time.monotonic() > until or self._process.poll() is not None:
                words = Path(log.name).read_text(errors="replace")[-300:]
                self.__exit__()
                raise RuntimeError(f"vgpu-arbiter did not start: {words}")
            time.sleep(0.05)
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._process and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def status(self) -> dict[str, Any]:
        """Returns the content of the pages as vgpu-arbiter --json-status prints it."""
        text = self._host.run(self._host.arbiter, "--run", self._run, "--json-status")
        return dict(json.loads(text))
