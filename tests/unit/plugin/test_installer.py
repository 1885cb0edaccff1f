# SPDX-License-Identifier: Apache-2.0
"""Tests the installer of the device plugin's archive on a host where a killed run of site.yml left an installer that is
still at work.
"""

from __future__ import annotations

import subprocess
import sys
import time
import zipfile
from pathlib import Path

INSTALLER = Path(__file__).resolve().parents[3] / "native/plugin/tools/installer.py"


def test_second_installer_waits_for_the_first(tmp_path: Path) -> None:
    archive, root = tmp_path / "plugin.pyz", tmp_path / "root"
    with zipfile.ZipFile(archive, "w") as made:
        made.write(INSTALLER, "__main__.py")
        made.writestr("about.json", '{"version": "1"}')
        made.writestr("requirements.txt", "")
        made.writestr("wheels/README", "")
    command = [sys.executable, "-I", str(archive), "--root", str(root)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while first.poll() is None and not (root / "1").exists():
            time.sleep(0.01)
        second = subprocess.run(command, capture_output=True, text=True, check=False)
        output = first.communicate()[0]
    finally:
        first.kill()
        first.wait()
    assert (first.returncode, output) == (0, f"{root}/1 is installed\n")
    assert (second.returncode, second.stdout, second.stderr) == (0, f"{root}/1 is there\n", "")
    assert sorted(one.name for one in root.iterdir()) == ["1"]
