# SPDX-License-Identifier: Apache-2.0
"""Tests the contracts of import-linter, by which a lower layer of the code must not import an upper layer. The tests
add forbidden imports, which lint-imports must refuse.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCES = {
    "module_utils": "plugins",
    "vgpu_plugin": "native/plugin/src",
    "vgpu_scheduler": "native/plugin/src",
    "vgpu_kubectl": "native/plugin/src",
}


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    """Runs lint-imports on the packages in the folder ``tree``."""
    program = Path(sys.executable).with_name("lint-imports")
    argv = [str(program), "--config", str(ROOT / ".importlinter"), "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    return subprocess.run(argv, cwd=tree, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("packages")
    for name, folder in SOURCES.items():
        shutil.copytree(ROOT / folder / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tree


def test_every_contract_holds(copy: Path) -> None:
    done = lint(copy)
    assert done.returncode == 0, done.stdout
    assert "3 kept, 0 broken" in done.stdout


# columns: file of a lower layer, import of an upper layer that is added to it; expected words of the broken contract
@pytest.mark.parametrize(
    ("file", "line", "finding"),
    [
        ("module_utils/host/files.py", "from ..plan import plan", "module_utils.host is not allowed to import"),
        ("module_utils/abi/files.py", "from ..host import files", "module_utils.abi is not allowed to import"),
        ("module_utils/new/one.py", "", "module_utils.new"),
        ("vgpu_plugin/node/clock.py", "from ..offer import pool", "vgpu_plugin.node is not allowed to import"),
        ("vgpu_plugin/errors.py", "from . import daemon", "vgpu_plugin.errors is not allowed to import"),
        ("vgpu_plugin/node/paths.py", "import vgpu_scheduler.wire", "vgpu_plugin is not allowed to import"),
    ],
)
def test_upward_import_is_refused(copy: Path, file: str, line: str, finding: str) -> None:
    path = copy / file
    before = path.read_text() if path.exists() else None
    path.parent.mkdir(exist_ok=True)
    path.write_text((before or "") + f"\n{line}\n")
    try:
        done = lint(copy)
    finally:
        if before is None:
            shutil.rmtree(path.parent)
        else:
            path.write_text(before)
    assert done.returncode == 1, done.stdout
    assert finding in " ".join(done.stdout.split()), done.stdout
