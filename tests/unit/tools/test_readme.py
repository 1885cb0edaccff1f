# SPDX-License-Identifier: Apache-2.0
"""Tests README.md against the code: its inventories pass the check of the variables, and its numbers and the names of
playbooks are current.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import verdicts
from ansible_collections.vgpu.fleet.plugins.plugin_utils.variable_check import Check, Mistake

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", README, re.M | re.S)
SIZING = (ROOT / "docs" / "sizing.md").read_text()


class HostVars:
    """Replaces Ansible's hostvars of one host with the part that the check uses."""

    _inventory = None

    def __init__(self, variables: dict[str, Any]) -> None:
        self.variables = variables

    def raw_get(self, _host: str) -> dict[str, Any]:
        return dict(self.variables)


def mistakes(variables: dict[str, Any]) -> list[Mistake]:
    one = Check({**variables, "hostvars": HostVars(variables), "inventory_hostname": "h"}, DataLoader(), None)
    return one.mistakes(one.kin(["h"]))


def inventories() -> list[dict[str, Any]]:
    """Returns the variables of each inventory in the README. The first block is complete; each other block adds to the
    first."""
    first = yaml.safe_load(BLOCKS[0])["all"]["children"]["gpu_nodes"]["vars"]
    return [first, *({**first, **yaml.safe_load(block)} for block in BLOCKS[1:])]


def test_there_are_three_inventories() -> None:
    engines = [one.get("container_runtime_engine", "auto") for one in inventories()]
    assert engines == ["auto", "auto", "k3s"]


@pytest.mark.parametrize("number", range(3))
def test_inventories_pass_the_check(number: int) -> None:
    variables = inventories()[number]
    assert mistakes(variables) == []
    assert mistakes({**variables, "vgpu_split_count": "seven"}), "expected the check to find a mistake"


def test_number_of_bypasses_is_current() -> None:
    assert f"in {len(verdicts.PROBE_BYPASSES)} ways" in README
    assert f"| {len(verdicts.PROBE_BYPASSES)} bypasses are tried" in README


def test_every_named_playbook_exists() -> None:
    named = set(re.findall(r"\bvgpu\.fleet\.(\w+)", README))
    assert {"site", "report", "teardown"} <= named
    assert [one for one in named if not (ROOT / "playbooks" / f"{one}.yml").exists()] == []


def test_slice_sizes_in_sizing_page_are_correct() -> None:
    """The sizes of slices (parts of a GPU) in docs/sizing.md are computed again from the split count K, the memory
    scaling S and the cores scaling C, by integer arithmetic and without the code of the product."""
    rows = re.findall(r"^\| (\d+) \| (\d+) \| ([\d.]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", SIZING, re.M)
    assert len(rows) >= 5
    for memory, split, scaling, cores, count, each, percent in rows:
        tenths = int(scaling.replace(".", ""))
        assert int(count) == 2 * int(split)
        assert int(each) == int(memory) * tenths // (10 * int(split))
        assert int(percent) == min(100, 100 * int(cores) // int(split))


SHAPE = ["Use", "Behaviour", "Variables", "Undo", "Tried", "Code"]


@pytest.mark.parametrize("path", sorted(ROOT.glob("roles/*/README.md")), ids=lambda one: one.parent.name)
def test_role_readmes_have_the_same_sections(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    assert re.findall(r"^# (\w+)$", text, re.M) == [path.parent.name]
    assert re.findall(r"^## (.+)$", text, re.M) == SHAPE
    assert f"`ansible-doc -t role vgpu.fleet.{path.parent.name}`" in text
