# SPDX-License-Identifier: Apache-2.0
"""Tests that roles and playbooks pass each boolean variable through the filter bool.

``-e verify_strict=false`` and an inventory in the INI format give texts. The check of the variables accepts such a text
as a boolean, but a template takes every text that is not empty as true.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Iterator

import pytest
import yaml
from ansible_collections.vgpu.fleet.plugins.module_utils.config import options
from ansible_collections.vgpu.fleet.plugins.module_utils.config import variables as schema
from ansible_collections.vgpu.fleet.plugins.module_utils.config.kinds import Bool
from ansible_collections.vgpu.fleet.plugins.plugin_utils import role_tables

ROOT = Path(__file__).resolve().parents[3]
KINDS = {**role_tables.kinds(), **{name: variable.kind for name, variable in schema.VARIABLES.items()}}
BOOLEANS = sorted(
    name
    for name, kind in KINDS.items()
    # The module that gets container_runtime_systemd_cgroup reads texts itself.
    if name != "container_runtime_systemd_cgroup" and (isinstance(kind, Bool) or kind is options.AUTO_OR_FLAG)
)
# The word `auto` of such a variable is compared as it is.
USE = re.compile(
    rf"(?<![\w.'])(?:{'|'.join(BOOLEANS)})\b(?!\s*(?:(?:\|\s*default\([^)]*\)\s*)?\|\s*bool\b|==\s*'auto'|is defined))"
)
TEMPLATE = re.compile(r"\{[{%].*?[}%]\}", re.DOTALL)
# Keys whose values are expressions without braces.
CONDITIONS = ("when", "that", "failed_when", "changed_when", "until")


def expressions(value: Any, bare: bool = False) -> Iterator[str]:
    """Yields the expressions within a value of YAML. ``bare``: the whole text is one expression."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from expressions(item, key in CONDITIONS)
    elif isinstance(value, list):
        for item in value:
            yield from expressions(item, bare)
    elif isinstance(value, str):
        yield from [value] if bare else TEMPLATE.findall(value)


def wrong(value: Any) -> list[str]:
    """Returns the boolean variables that an expression uses without the filter bool."""
    return [found for expression in expressions(value) for found in USE.findall(expression)]


# columns: a task or a variable; the boolean variables that lack the filter
@pytest.mark.parametrize(
    ("value", "names"),
    [
        ({"when": "verify_strict | bool and x"}, []),
        ({"when": ["x", "not verify_strict"]}, ["verify_strict"]),
        ({"assert": {"that": "ok or not verify_strict", "fail_msg": "verify_strict is set"}}, ["verify_strict"]),
        ({"vars": {"verify_strict": "{{ verify_show }}"}}, ["verify_show"]),
        ({"labels": "{{ vgpu_labels | default(true) | bool }}"}, []),
        ({"prebuilt": "{{ nvidia_driver_prebuilt }}"}, ["nvidia_driver_prebuilt"]),
        ({"prebuilt": "{{ 'auto' if nvidia_driver_prebuilt == 'auto' else nvidia_driver_prebuilt | bool }}"}, []),
        ("{% if verify_usage %}x{% endif %}", ["verify_usage"]),
        ("verify_usage", []),
    ],
)
def test_boolean_variable_without_the_filter_is_found(value: Any, names: list[str]) -> None:
    assert wrong(value) == names


def test_all_boolean_variables_pass_through_the_filter() -> None:
    files = [path for folder in ("roles", "playbooks") for path in sorted(ROOT.glob(f"{folder}/**/*.yml"))]
    texts = {path: yaml.safe_load(path.read_text()) for path in files if path.parent.name != "meta"}
    texts.update((path, path.read_text()) for path in ROOT.glob("roles/*/templates/*"))
    found = {str(path.relative_to(ROOT)): wrong(text) for path, text in texts.items()}
    assert len(BOOLEANS) > 20 and len(texts) > 100
    assert {path: names for path, names in found.items() if names} == {}
