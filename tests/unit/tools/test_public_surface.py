# SPDX-License-Identifier: Apache-2.0
"""Tests which parts of the collection are public: public modules are in the action group vgpu and in docs/modules.md,
and all other modules, filters and lookups are marked as internal.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
spec = importlib.util.spec_from_file_location("vgpu_variables_tool", ROOT / "tools" / "variables.py")
assert spec and spec.loader
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)

# The public modules. Users rely on them, so a name may be removed from this list only in a major release.
PUBLIC = {
    "apt_packages",
    "containerd_config",
    "docker_daemon",
    "gpu_info",
    "kube_node",
    "mig_geometry",
    "mps_daemon",
    "rpm_packages",
    "time_slice",
    "toolkit_config",
    "vgpu_capacity_info",
    "vgpu_isolation",
}
MODULES = sorted(path.stem for path in ROOT.glob("plugins/modules/*.py"))
INTERNAL = "vgpu.fleet.internal"
GROUPS = yaml.safe_load((ROOT / "meta/runtime.yml").read_text())["action_groups"]


def about_module(name: str) -> dict[str, Any]:
    return dict(tool.documentation(ROOT / "plugins/modules" / f"{name}.py"))


def about_plugin(path: Path) -> dict[str, Any]:
    """Returns the documentation of a filter or a lookup."""
    if path.suffix == ".yml":
        return dict(yaml.safe_load(path.read_text())["DOCUMENTATION"])
    found = re.search(r'^DOCUMENTATION = r"""(.*?)"""', path.read_text(), re.M | re.S)
    assert found, path
    return dict(yaml.safe_load(found[1]))


def test_group_has_each_public_module() -> None:
    assert sorted(GROUPS["vgpu"]) == sorted(PUBLIC)


def test_api_group_has_each_module_with_its_options() -> None:
    """The action group passes its defaults, such as ``kubeconfig``, to each of its modules. A module without this
    option would fail."""
    takes = [one for one in MODULES if "vgpu.fleet.kubernetes" in about_module(one)["extends_documentation_fragment"]]
    assert sorted(GROUPS["kube"]) == takes
    assert takes == [one for one in MODULES if '"kubeconfig": {' in (ROOT / f"plugins/modules/{one}.py").read_text()]


@pytest.mark.parametrize("name", MODULES)
def test_module_documents_its_groups(name: str) -> None:
    member = (about_module(name).get("attributes") or {}).get("action_group", {}).get("membership", [])
    assert sorted(member) == sorted(f"vgpu.fleet.{one}" for one, names in GROUPS.items() if name in names)


@pytest.mark.parametrize("name", MODULES)
def test_module_is_public_or_marked_internal(name: str) -> None:
    assert (INTERNAL in about_module(name)["extends_documentation_fragment"]) == (name not in PUBLIC)


@pytest.mark.parametrize(
    "path",
    [*sorted(ROOT.glob("plugins/filter/*.yml")), *sorted(ROOT.glob("plugins/lookup/*.py"))],
    ids=lambda one: one.stem,
)
def test_filters_and_lookups_are_marked_internal(path: Path) -> None:
    assert INTERNAL in about_plugin(path).get("extends_documentation_fragment", [])


def test_the_page_shows_public_modules_first() -> None:
    public, internal = (ROOT / "docs/modules.md").read_text().split("\n## Internal\n")
    shown = [set(re.findall(r"^\| \[`(\w+)`\]", part, re.M)) for part in (public, internal)]
    assert shown == [PUBLIC, set(MODULES) - PUBLIC]


PLUMBING = re.compile(r"_(record|text|path|(?<!mem_)unit|list|load|sha256)$")  # mem_unit (a unit of memory) is public


def test_implementation_variables_are_not_public() -> None:
    """A role writes records, units, texts and paths by its own rules, and computes digests. Variables for them must be
    internal, because a user's value would break the role."""
    public = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/variables.md").read_text(), re.M)
    assert len(public) > 100 and [name for name in public if PLUMBING.search(name)] == []


def texts(path: Path) -> set[str]:
    """Returns the string literals of a program without its docstrings."""
    tree = ast.parse(path.read_text())
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef)
    alone = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, holders) and isinstance(node.body[0], ast.Expr)
    }
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone
    }


def test_no_message_names_a_playbook_file() -> None:
    """A user who installed the collection starts vgpu.fleet.site. Messages must not name playbooks/, because this user
    has no such folder."""
    folders = ("plugins/action", "plugins/module_utils", "plugins/plugin_utils", "native/plugin/src")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    found = {path.name: text for path in paths for text in texts(path) if re.search(r"playbooks/\w+\.yml", text)}
    assert paths and not found


def given_to_roles(tasks: Any) -> Iterator[tuple[str, str]]:
    """Yields (role, variable) for each variable that a playbook passes to a role with include_role or import_role."""
    for task in tasks or []:
        for name in ("ansible.builtin.include_role", "ansible.builtin.import_role"):
            if name in task:
                yield from ((task[name]["name"].rpartition(".")[2], one) for one in task.get("vars") or {})
        for part in ("tasks", "pre_tasks", "post_tasks", "block", "rescue", "always"):
            yield from given_to_roles(task.get(part))


def test_no_playbook_overrides_a_roles_own_variable() -> None:
    """A variable that a playbook passes would override the role's own value of vars/main.yml in all tasks of the
    role."""
    given = {
        (role, name)
        for path in (ROOT / "playbooks").rglob("*.yml")
        for role, name in given_to_roles(yaml.safe_load(path.read_text()))
    }
    assert ("device_plugin", "__device_plugin_desired_by") in given, "expected passed variables, found none"
    own = {role: yaml.safe_load(path.read_text()) for role, _name in given for path in vars_of(role)}
    assert not [(role, name) for role, name in given if name in (own.get(role) or {})]


def vars_of(role: str) -> list[Path]:
    return [path for path in (ROOT / "roles" / role / "vars" / "main.yml",) if path.exists()]
