# SPDX-License-Identifier: Apache-2.0
"""A fake /proc in a folder, for tests that look for processes."""

from __future__ import annotations

import subprocess
from pathlib import Path

HOST_MNT, HOST_PID = "mnt:[1]", "pid:[2]"
CONTAINER = "/kubepods.slice/pod-x/cri-1.scope"


class Proc:
    """A fake /proc. Process 1 is in the host's namespaces."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.add(1, mnt=HOST_MNT, pid=HOST_PID)

    def add(
        self,
        number: int | str,
        mnt: str = "mnt:[9]",
        pid: str = "pid:[77]",
        mounts: str = "",
        group: str = "/",
        state: str = "S",
        inner: str = "",
        name: str = "python",
        memory: str = "VmSize:\t10 kB\n",
        groups: str = "",
        task: int = 0,
        parent: int = 0,
    ) -> None:
        """Adds a process. If ``task`` is set, adds that thread of the process instead.

        ``mounts``: one word DEVICE=PATH for each file that is mounted below /dev/vgpu, such as "0:50=/ledger". DEVICE
        is the device number of the file's tmpfs, and PATH is the file's path in this tmpfs. ``inner``: the pid in the
        process's own namespace. ``group``: the process's control group. ``groups``: the whole text of /proc/PID/cgroup,
        for processes that need more than the line with ``group``.
        """
        folder = self.root / str(number)
        if task:
            folder = folder / "task" / str(task)
        (folder / "ns").mkdir(parents=True)
        (folder / "ns" / "mnt").symlink_to(mnt)
        (folder / "ns" / "pid").symlink_to(pid)
        rows = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + "".join(
            f"30 22 {one} {root} /dev/vgpu/0/x rw - tmpfs tmpfs rw\n" for one, root in _pairs(mounts)
        )
        (folder / "mountinfo").write_text(rows)
        (folder / "comm").write_text(f"{name}\n")
        (folder / "cgroup").write_text(groups or f"12:pids:/\n0::{group}\n")
        # The name in stat contains a space and a parenthesis, because processes may choose such names.
        (folder / "stat").write_text(f"{number} (a ) b) {state} {parent} " + " ".join(["0"] * 17) + " 5 0 0\n")
        (folder / "status").write_text(
            f"Name:\t{name}\nState:\t{state} (x)\n{memory}NStgid:\t{number}\t{inner or number}\n"
        )

    def end(self, number: int) -> None:
        subprocess.run(["rm", "-r", str(self.root / str(number))], check=True)


def of_slice(root: Path) -> str:
    """Creates a fake /proc. Processes 10 and 11 use a slice (a part of a GPU). Process 20 runs on the host. No process
    has the pid 30, so a test can use it as the pid of an ended process."""
    proc = Proc(root)
    for pid in (10, 11, 20):
        proc.add(pid, mnt=HOST_MNT if pid == 20 else "mnt:[9]", name=f"way-{pid}")
    return str(root)


def _pairs(text: str) -> list[list[str]]:
    return [one.split("=") for one in text.split()]
