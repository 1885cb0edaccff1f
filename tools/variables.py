# SPDX-License-Identifier: Apache-2.0
"""Write docs/variables.md and docs/modules.md from the tables that the collection itself uses.

Group variables come from plugins/module_utils/config/variables.py, role variables from the role's
meta/argument_specs.yml and defaults/main.yml, modules from their own documentation. The pages therefore cannot differ
from the checks.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent

HEAD = """\
# Variables

`make docs` writes this page from the tables of the code: do not edit the page.

## Of a host group

Set these variables in `group_vars/<group>.yml`. Their table is in `plugins/module_utils/config/variables.py`.

Every variable on this page is checked before any host is read. An unknown name that has the prefix of these variables
or resembles one of them is an error, which names the nearest variable. `vgpu_other_names` exempts names.

| variable | default | expected | meaning |
|---|---|---|---|
"""

ROLES = """
## Of a role

Set these variables in `group_vars` too, or with `-e`. They come from each role's `meta/argument_specs.yml` and
`defaults/main.yml`; the role's README shows their use. A "computed" default is an expression in `defaults/main.yml`.

This page lists the public variables, which an operator may have a reason to set. All other variables of a role
(records, units, texts and paths of its files) begin with `__`, are in its `vars/main.yml`, and may change in any
release.
"""

ROLE_TABLE = "| variable | type | default | meaning |\n|---|---|---|---|\n"

MODULES = """\
# Modules

`make docs` writes this page. It also builds a page for each module in `.build/docs/html`, with all options and return
values; `ansible-doc vgpu.fleet.<name>` shows the same in a terminal.

## Public

Your own playbooks may call these modules. For `module_defaults` they are the group `vgpu.fleet.vgpu`. The group
`vgpu.fleet.kube` has all modules with the options `kubeconfig` and `context`.

"""

INTERNAL = """
## Internal

Only the roles of this collection call these modules. Options and results may change in any release; the same applies
to all filters and lookups of the collection.

"""

MODULE_TABLE = """\
| module | what it does | check mode | diff |
|---|---|---|---|
"""

# Ansible's markup: option, value, constant, environment variable, module, plugin, return value, bold, italic.
MARKUP = re.compile(r"\b(?:O|V|C|E|M|P|RV|B|I)\(((?:[^()\\]|\\.|\([^()]*\))*)\)")
LINK = re.compile(r"\b(?:U\(([^()]+)\)|L\(([^(),]+),\s*([^()]+)\))")


def variables_page(root: Path = ROOT) -> str:
    """Returns the text of docs/variables.md."""
    sys.path.insert(0, str(root))
    from plugins.module_utils.config import variables as schema

    rows = [
        f"| `{name}` | {_default(variable.default)} | {_cell(variable.kind.expected)} | {_cell(variable.about)} |"
        for name, variable in schema.VARIABLES.items()
    ]
    text = HEAD + "\n".join(rows) + "\n" + ROLES
    for role in roles(root):
        text += f"\n### [{role}](../roles/{role}/README.md)\n\n"
        text += _cell(markup(spec_of(root, role)[main_entry(root, role)]["short_description"])) + ".\n\n"
        text += ROLE_TABLE + "".join(role_rows(root, role))
    return text


def roles(root: Path) -> list[str]:
    return sorted(path.parent.parent.name for path in root.glob("roles/*/meta/argument_specs.yml"))


def spec_of(root: Path, role: str) -> dict[str, Any]:
    """Returns the entry points of a role by name, from its meta/argument_specs.yml."""
    text = (root / "roles" / role / "meta/argument_specs.yml").read_text()
    return dict(yaml.safe_load(text)["argument_specs"])


def main_entry(root: Path, role: str) -> str:
    spec = spec_of(root, role)
    return "main" if "main" in spec else next(iter(spec))


def options_of(root: Path, role: str) -> dict[str, Any]:
    """Returns the options of all entry points of a role, each once."""
    found: dict[str, Any] = {}
    for entry in spec_of(root, role).values():
        found.update(entry.get("options") or {})
    return found


def defaults_of(root: Path, role: str) -> dict[str, Any]:
    path = root / "roles" / role / "defaults/main.yml"
    return dict((yaml.safe_load(path.read_text()) or {}) if path.exists() else {})


def role_rows(root: Path, role: str) -> Iterable[str]:
    given = defaults_of(root, role)
    for name, option in options_of(root, role).items():
        kind = option.get("type", "str")
        if option.get("elements"):
            kind += f" of {option['elements']}"
        about = option.get("description") or []
        words = " ".join(markup(line) for line in ([about] if isinstance(about, str) else about))
        if option.get("choices"):
            words = words.rstrip(". ") + ". One of " + ", ".join(f"`{one}`" for one in option["choices"]) + "."
        if option.get("required"):
            default = "required"
        elif name in given:
            default = _role_default(given[name])
        else:
            default = _role_default(option["default"]) if "default" in option else "none"
        yield f"| `{name}` | {kind} | {default} | {_cell(words)} |\n"


def _role_default(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if "{{" in text or "\n" in text.strip():
        return "computed"
    if value in ("", None, [], {}):
        return "empty"
    return f"`{_cell(text)}`"


def markup(text: str) -> str:
    """Converts Ansible's documentation markup to Markdown."""
    text = LINK.sub(lambda found: f"<{found[1]}>" if found[1] else f"[{found[2]}]({found[3]})", text)
    return MARKUP.sub(lambda found: "`" + found[1].replace("\\", "").partition("#")[0] + "`", text)


def modules_page(root: Path = ROOT) -> str:
    """Returns the text of docs/modules.md."""
    public = set(yaml.safe_load((root / "meta/runtime.yml").read_text())["action_groups"]["vgpu"])
    paths = sorted((root / "plugins/modules").glob("*.py"))
    shown = [path for path in paths if path.stem in public]
    inner = [path for path in paths if path.stem not in public]
    return MODULES + MODULE_TABLE + module_rows(shown) + INTERNAL + MODULE_TABLE + module_rows(inner)


def module_rows(paths: Iterable[Path]) -> str:
    rows = []
    for path in paths:
        about = documentation(path)
        attributes = about.get("attributes") or {}
        modes = [str((attributes.get(mode) or {}).get("support", "?")) for mode in ("check_mode", "diff_mode")]
        words = _cell(markup(about["short_description"]))
        rows.append(f"| [`{path.stem}`](../plugins/modules/{path.name}) | {words} | {modes[0]} | {modes[1]} |")
    return "\n".join(rows) + "\n"


def documentation(path: Path) -> dict[str, Any]:
    """Returns a module's documentation with the attributes of its fragments. Raises ValueError if it has none."""
    about = _text_of(path, "DOCUMENTATION")
    fragments = path.parents[1] / "doc_fragments"
    for named in about.get("extends_documentation_fragment", []):
        _namespace, _collection, file, *part = named.split(".")
        shared = _text_of(fragments / f"{file}.py", (part or ["documentation"])[0].upper())
        own = about.get("attributes") or {}
        for mode, facts in (shared.get("attributes") or {}).items():
            own[mode] = {**facts, **own.get(mode, {})}
        about["attributes"] = own
    return about


def _text_of(path: Path, name: str) -> dict[str, Any]:
    """Parses the YAML text that a Python file assigns to ``name``, inside or outside a class."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign) and any(getattr(one, "id", "") == name for one in node.targets):
            return dict(yaml.safe_load(ast.literal_eval(node.value)))
    raise ValueError(f"{path}: expected an assignment of {name}, found none")


def _default(value: object) -> str:
    return "unset" if value is None else f"`{json.dumps(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PAGES = {"docs/variables.md": variables_page, "docs/modules.md": modules_page}

if __name__ == "__main__":
    for page, make in PAGES.items():
        (ROOT / page).write_text(make())
