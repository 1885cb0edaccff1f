# SPDX-License-Identifier: Apache-2.0
"""Tests that the package declares every module that its programs import, so that `pip install native/plugin` installs
everything that a command needs.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
import tomllib

PLUGIN = Path(__file__).resolve().parents[3] / "native" / "plugin"
# Name of the imported module → name of the distribution, if they differ.
NAMES = {"grpc": "grpcio", "google": "protobuf", "pynvml": "nvidia-ml-py", "yaml": "pyyaml"}
OWN = {"vgpu_plugin", "vgpu_scheduler", "vgpu_kubectl", "vgpu_kubelet_double"}


def imported(source: str) -> set[str]:
    """Returns the distributions that a file imports; imports inside functions count too."""
    found = set()
    for one in ast.walk(ast.parse(source)):
        if isinstance(one, ast.Import):
            found |= {name.name.partition(".")[0] for name in one.names}
        elif isinstance(one, ast.ImportFrom) and not one.level:
            found.add(str(one.module).partition(".")[0])
    return {NAMES.get(one, one) for one in found - set(sys.stdlib_module_names) - OWN}


def declared() -> dict[str, set[str]]:
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    lists = {"vgpu_plugin": project["dependencies"]}
    lists["vgpu_scheduler"] = [*project["dependencies"], *project["optional-dependencies"]["scheduler"]]
    return {name: {re.split(r"[<>=~\[ ]", one)[0] for one in words} for name, words in lists.items()}


def imported_by(package: str) -> set[str]:
    found = set()
    for path in (PLUGIN / "src" / package).rglob("*.py"):
        if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
            found |= imported(path.read_text())
    assert found, f"{package}: expected imports, found none"
    return found


@pytest.mark.parametrize("package", ["vgpu_plugin", "vgpu_scheduler"])
def test_every_import_is_declared(package: str) -> None:
    assert imported_by(package) - declared()[package] == set()


@pytest.mark.parametrize(("package", "file"), [("vgpu_plugin", "plugin.in"), ("vgpu_scheduler", "scheduler.in")])
def test_every_pinned_package_is_imported(package: str, file: str) -> None:
    lines = (PLUGIN.parents[1] / "requirements" / file).read_text().splitlines()
    assert {line for line in lines if line and line[0] not in "#-"} - imported_by(package) == set()


def test_import_inside_a_function_is_found() -> None:
    assert imported("import os\ndef f():\n    import yaml\n    from grpc import aio\n") == {"pyyaml", "grpcio"}
