# SPDX-License-Identifier: Apache-2.0
"""Tests that the generated pages of variables are current, and that the files of each role that list its variables
(defaults, argument specification, documentation) agree.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
spec = importlib.util.spec_from_file_location("vgpu_variables_tool", ROOT / "tools" / "variables.py")
assert spec and spec.loader
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


@pytest.mark.parametrize("page", sorted(tool.PAGES))
def test_generated_page_is_current(page: str) -> None:
    assert (ROOT / page).read_text() == tool.PAGES[page](), (
        f"{page} is outdated: run `.build/venv/bin/python tools/variables.py`"
    )


@pytest.mark.parametrize("role", tool.roles(ROOT))
def test_defaults_and_specification_name_the_same_variables(role: str) -> None:
    """A variable with a default but without a specification would never be validated and would be on no page."""
    options, defaults = tool.options_of(ROOT, role), tool.defaults_of(ROOT, role)
    assert sorted(set(defaults) - set(options)) == []
    for name, option in options.items():
        if "default" in option and name in defaults and "{{" not in str(defaults[name]):
            assert option["default"] == defaults[name], f"{role}: {name}: expected equal defaults in both files"


@pytest.mark.parametrize("role", tool.roles(ROOT))
def test_every_variable_is_documented(role: str) -> None:
    assert [name for name, option in tool.options_of(ROOT, role).items() if not option.get("description")] == []


def names_in(path: Path) -> set[str]:
    return set(yaml.safe_load(path.read_text()) or {})


@pytest.mark.parametrize("role", tool.roles(ROOT))
def test_prefix_marks_internal_variables(role: str) -> None:
    """Users set public variables, which must not begin with "_". A user's value for a variable in vars/main.yml would
    have no effect, so these variables must begin with "__" and the name of the role."""
    public = set(tool.options_of(ROOT, role)) | set(tool.defaults_of(ROOT, role))
    assert sorted(name for name in public if name.startswith("_")) == []
    vars_file = ROOT / "roles" / role / "vars/main.yml"
    inner = names_in(vars_file) if vars_file.exists() else set()
    assert sorted(name for name in inner if not name.startswith(f"__{role}_")) == []


def inner_names_set(folder: Path) -> list[str]:
    """Returns the internal variables that the files of an inventory set, as "file: name"."""
    found = []
    for path in sorted(path for kind in ("*.yml", "*.yaml", "*.ini") for path in folder.rglob(kind)):
        for name in re.findall(r"(?<!\w)__[a-z]\w*(?=\s*[:=])", re.sub(r"(?m)#.*$", "", path.read_text())):
            found.append(f"{path.relative_to(folder)}: {name}")
    return found


def test_no_example_sets_an_internal_variable(tmp_path: Path) -> None:
    assert inner_names_set(ROOT / "inventories") == []
    (tmp_path / "hosts.ini").write_text("a __mig_record=/r\n")
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars/a.yml").write_text("# __no: 1\nmig_boot: '{{ __this }}'\n__mps_root: /r\n")
    assert inner_names_set(tmp_path) == ["group_vars/a.yml: __mps_root", "hosts.ini: __mig_record"]


# Users do not set these variables. Roles set them as facts for playbooks and later tasks.
RESULTS = {"preflight_plan", "verify_facts", "verify_report"}


@pytest.mark.parametrize("role", tool.roles(ROOT))
def test_role_uses_only_specified_variables(role: str) -> None:
    """Every variable that a role uses must have a specification, because a user cannot know and set it otherwise."""
    used = set()
    for path in [*ROOT.glob(f"roles/{role}/*/*.yml"), *ROOT.glob(f"roles/{role}/templates/*")]:
        text = re.sub(r"(?m)#.*$", "", path.read_text())
        text = re.sub(r"vgpu\.fleet\.\w+|\w+\.(yml|json|py|j2)\b|'[^'\n]*'|/[\w./-]+", " ", text)
        used |= set(re.findall(rf"(?<![\w./-]){role}_[a-z0-9_]+", text))
    known = set(tool.options_of(ROOT, role)) | RESULTS
    assert used & known, "expected variables in the roles, found none"
    assert sorted(used - known) == []


@pytest.mark.parametrize("role", tool.roles(ROOT))
def test_options_without_a_default_are_required(role: str) -> None:
    """A variable that is optional and has no default would be undefined when the role uses it."""
    defaults = tool.defaults_of(ROOT, role)
    optional = {"site_hosts", "upgrade_serial"}  # The playbooks set the defaults of these options.
    for name, option in tool.options_of(ROOT, role).items():
        assert option.get("required") or name in defaults or name in optional, name


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(ROOT.glob("roles/*/tasks/*.yml")) if re.search(r"_packages:$", path.read_text(), re.M)],
    ids=lambda path: f"{path.parts[-3]}-{path.stem}",
)
def test_package_tasks_pass_the_proxy(path: Path) -> None:
    """A task that installs packages must pass the proxy variables. Otherwise it fails in a network in which archives
    are reached only by a proxy."""
    for task in yaml.safe_load(path.read_text()):
        module = task.get("vgpu.fleet.apt_packages") or task.get("vgpu.fleet.rpm_packages")
        if module and module.get("state") != "absent":
            assert task.get("environment") == "{{ vgpu_package_environment | default({}) }}", task["name"]


# columns: text with Ansible's markup; expected text in Markdown
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("V(absent) removes it", "`absent` removes it"),
        ("see O(vcuda_archive) and M(vgpu.fleet.plan)", "see `vcuda_archive` and `vgpu.fleet.plan`"),
        ("P(vgpu.fleet.node_yaml#filter)", "`vgpu.fleet.node_yaml`"),
        ("a GPU (or V(none))", "a GPU (or `none`)"),
        ("L(the page,https://example.com/a)", "[the page](https://example.com/a)"),
        ("C(f(x\\)) twice", "`f(x)` twice"),
        ("CUDA(tm) stays", "CUDA(tm) stays"),
    ],
)
def test_ansible_markup_becomes_markdown(text: str, shown: str) -> None:
    assert tool.markup(text) == shown


def test_a_role_shows_type_default_and_choices(tmp_path: Path) -> None:
    meta, defaults = tmp_path / "roles/x/meta", tmp_path / "roles/x/defaults"
    meta.mkdir(parents=True)
    defaults.mkdir()
    (meta / "argument_specs.yml").write_text(
        "argument_specs: {main: {short_description: X, options: {"
        "x_state: {description: [Which., V(a) or b], choices: [a, b], default: a},"
        "x_list: {description: A list., type: list, elements: str},"
        "x_key: {description: A key., required: true}}}}"
    )
    (defaults / "main.yml").write_text('x_state: a\nx_list: "{{ omit }}"\n')
    assert list(tool.role_rows(tmp_path, "x")) == [
        "| `x_state` | str | `a` | Which. `a` or b. One of `a`, `b`. |\n",
        "| `x_list` | list of str | computed | A list. |\n",
        "| `x_key` | str | required | A key. |\n",
    ]
