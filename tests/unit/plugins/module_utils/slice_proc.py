# SPDX-License-Identifier: Apache-2.0
"""A folder laid out as /proc, of processes in a slice and beside it."""

from __future__ import annotations

from pathlib import Path


def lay_out(tmp_path: Path) -> str:
    """Processes 10 and 11 in the slice, 20 on the host, 30 gone."""
    for pid, name in ((10, "mnt:[1]"), (11, "mnt:[1]"), (20, "mnt:[2]")):
        (tmp_path / str(pid) / "ns").mkdir(parents=True)
        (tmp_path / str(pid) / "ns" / "mnt").symlink_to(name)
        (tmp_path / str(pid) / "comm").write_text(f"way-{pid}\n")
    return str(tmp_path)
