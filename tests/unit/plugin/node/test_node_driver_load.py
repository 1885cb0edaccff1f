# SPDX-License-Identifier: Apache-2.0
"""Tests how the device plugin detects that the kernel driver was loaded again, which clears the
driver's memory limits.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from vgpu_plugin.node.driver_load import DriverLoad


class Host:
    """A host's sysfs folder of the kernel module. Removed folders are kept under another name, because in sysfs a new
    folder never reuses an old inode.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.lost, self.loads = root, 0, 0

    def load(self, version: str = "615.71.09") -> None:
        self.unload()
        folder = self.root / "module" / "nvidia"
        folder.mkdir(parents=True)
        (folder / "version").write_text(version)

    def unload(self) -> None:
        folder = self.root / "module" / "nvidia"
        if folder.is_dir():
            self.loads += 1
            folder.rename(self.root / f"former-{self.loads}")

    def lose(self) -> None:
        self.lost += 1

    def nothing(self) -> None:
        pass


# Each row has successive pairs: an event; expected: whether the plugin then detects that the driver was loaded again.
STORIES = [
    ([("nothing", False), ("nothing", False)]),
    ([("load", True), ("nothing", False), ("load", True)]),
    ([("unload", False), ("load", True), ("nothing", False)]),
    ([("lose", True), ("nothing", False), ("lose", True)]),
]


@pytest.mark.parametrize("story", STORIES)
def test_driver_reload_is_detected(tmp_path: Path, story: list[tuple[str, bool]]) -> None:
    host = Host(tmp_path)
    host.load()
    load = DriverLoad(tmp_path, lambda: host.lost)
    for word, expected in story:
        getattr(host, word)()
        assert load.again() is expected, word


def test_lost_limits_show_a_reload_without_sysfs(tmp_path: Path) -> None:
    """If the module has another name or sysfs is not visible, the plugin detects the reload by the limits that are
    lost.
    """
    host = Host(tmp_path)
    load = DriverLoad(tmp_path, lambda: host.lost)
    assert not load.again()
    host.lose()
    assert load.again()
    assert not load.again()
