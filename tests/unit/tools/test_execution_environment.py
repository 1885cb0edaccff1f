# SPDX-License-Identifier: Apache-2.0
"""Tests that the definition of the execution environment (a container image with Ansible) installs this version of the
collection, and all packages that the collection imports on a controller.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
# These packages are not listed, because they are dependencies of ansible-core or kubernetes.
BROUGHT = {"ansible", "ansible_collections", "yaml", "jinja2", "urllib3"}


def load(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_execution_environment_has_this_version() -> None:
    galaxy, wanted = load("galaxy.yml"), load("execution-environment.yml")
    archive = "{namespace}-{name}-{version}.tar.gz".format(**galaxy)
    assert wanted["version"] == 3
    assert [one["name"] for one in wanted["dependencies"]["galaxy"]["collections"]] == [f"files/{archive}"]
    assert [Path(one["src"]).name for one in wanted["additional_build_files"]] == [archive]


def test_ansible_core_matches_the_collections_requirement() -> None:
    least = load("meta/runtime.yml")["requires_ansible"].split(".0")[0]
    assert load("execution-environment.yml")["dependencies"]["ansible_core"]["package_pip"].startswith(
        f"ansible-core{least}"
    )


@pytest.mark.parametrize("kind", ["python", "system"])
def test_named_files_exist(kind: str) -> None:
    assert (ROOT / load("meta/execution-environment.yml")["dependencies"][kind]).exists()


def imports(path: Path) -> set[str]:
    """Returns the top-level packages of a file's absolute imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").partition(".")[0])
    return found


def test_every_import_of_a_plugin_is_listed() -> None:
    listed = set(re.findall(r"^([a-z]\w*)", (ROOT / "meta/ee-requirements.txt").read_text(), re.M))
    found = set().union(*(imports(path) for path in ROOT.glob("plugins/**/*.py")))
    assert found - sys.stdlib_module_names - BROUGHT == listed
