# SPDX-License-Identifier: Apache-2.0
"""Tests the tables of fixed faults in docs/gates.md. The faults were found by installing the collection, by damaging
finished hosts, by tests with a hostile driver (a simulated driver with unusual behaviour), and by a review of the
cluster code.

Each row names the tests that fail without the fix. Every fault must have one row, and every named test must exist. This
file also has two tests that fit into no other file.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from test_threat_model import functions, rows

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "gates.md"
# Header of a table's first column → names that must be in this column.
TABLES = {
    "fault": [f"F{number}" for number in range(1, 15)],
    "day 2": [f"F{number}" for number in range(1, 13)],
    "hostile driver": [*(f"F{number}" for number in range(1, 11)), "§2", "§3", "§4", "§5", "§6"],
    "cluster": [f"F{number}" for number in range(1, 11)],
    "promise": ["F6", "F8", "F11"],
}


def wrong(text: str, head: str = "fault") -> list[str]:
    """Returns the faults in one table of the page: missing rows, rows without tests, and tests that do not exist."""
    table = rows(text, [head, "what was wrong", "tests"])
    found = [f"{name}: expected one row" for name in TABLES[head] if [row[0] for row in table].count(name) != 1]
    for row in table:
        tests = re.findall(r"`([^`]+)`", row[2])
        found += [f"{row[0]}: no test"] * (not tests)
        for name in tests:
            path, _colons, function = name.partition("::")
            found += [f"{row[0]}: {name} is not a test"] * (
                not function.startswith("test_") or function not in functions(path)
            )
    return found


@pytest.mark.parametrize("head", TABLES)
def test_every_fault_has_existing_tests(head: str) -> None:
    assert wrong(PAGE.read_text(), head) == []


# columns: pattern in docs/gates.md, its replacement; expected words of the fault, which the check must find after the
# replacement
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (r"(?m)^\| F8 .*\n", "", "F8: expected one row"),
        (r"::test_refusals`", "::test_refusal`", "is not a test"),
        (r"`tests/unit/plugins/module_utils/driver/test_driver_choice.py::test_refusals`", "none", "F8: no test"),
        (r"test_driver_choice.py::", "test_driver_choices.py::", "is not a test"),
        (r"(?m)^\| §4 .*\n", "", "§4: expected one row"),
        (r"test_loader.py::", "test_loaders.py::", "F1: tests/native/vcuda/test_loaders.py::"),
    ],
)
def test_incomplete_fault_tables_are_found(old: str, new: str, said: str) -> None:
    changed = re.sub(old, new, PAGE.read_text())
    assert changed != PAGE.read_text()
    assert any(said in one for head in TABLES for one in wrong(changed, head))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # nvidia_driver_hold_kernel must be false, because a kernel on hold would get no security updates.
        ("nvidia_driver_hold_kernel", False),
        ("nvidia_driver_prebuilt", "auto"),
        # container_runtime_engine must be "auto", so that a host without a kubelet can get one later.
        # nvidia_docker_package must be "auto", because nvidia-docker2 has had no release since 2023.
        ("container_runtime_engine", "auto"),
        ("container_runtime_systemd_cgroup", "auto"),
        ("nvidia_docker_package", "auto"),
    ],
)
def test_default_has_the_agreed_value(name: str, value: object) -> None:
    (found,) = [
        defaults[name]
        for path in ROOT.glob("roles/*/defaults/main.yml")
        if name in (defaults := yaml.safe_load(path.read_text()))
    ]
    assert found == value


def test_ansible_core_without_origins_of_values_is_supported() -> None:
    """ansible-core before 2.19 lacks a module that tells where a value was set. Messages then have no file and line,
    but nothing fails."""
    script = (
        # These modules are imported first, because in newer releases they need the module that the next line hides.
        "import ansible.inventory.helpers, ansible.utils.vars, ansible.vars.plugins\n"
        "sys.modules['ansible._internal._datatag._tags'] = None\n"
        "from ansible_collections.vgpu.fleet.plugins.plugin_utils import variable_source as one\n"
        "print(repr(one.place_of('x')), one.Source('group t4', one.place_of('x')))\n"
    )
    path = f"import sys; sys.path.insert(0, {str(ROOT / '.build/collections')!r})\n"
    done = subprocess.run([sys.executable, "-c", path + script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "'' group t4\n"), done.stderr
    needed = yaml.safe_load((ROOT / "meta/runtime.yml").read_text())["requires_ansible"]
    assert needed == ">=2.16.0"
