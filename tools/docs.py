# SPDX-License-Identifier: Apache-2.0
"""Write docs/variables.md from the table of variables, so that the page and the check cannot differ."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "variables.md"

HEAD = """\
# Variables of a host group

Set them in `group_vars/<group>.yml`. Any other variable that starts with `vgpu_` is an error that names the nearest
valid one. The table is made by `make docs` from `plugins/module_utils/schema.py`.

| variable | default | expected | meaning |
|---|---|---|---|
"""

TAIL = """
## Not in this version

`preflight` refuses these with a sentence, before any host is changed:

| variable | value |
|---|---|
"""


def page() -> str:
    """The text of docs/variables.md."""
    sys.path.insert(0, str(ROOT))
    from plugins.module_utils import schema

    rows = [
        f"| `{name}` | {_default(variable.default)} | {_cell(variable.kind.expected)} | {_cell(variable.about)} |"
        for name, variable in schema.VARIABLES.items()
    ]
    refused = [f"| `{name}` | {_values(values)} |" for name, values, _way_out in schema.UNAVAILABLE]
    return HEAD + "\n".join(rows) + "\n" + (TAIL + "\n".join(refused) + "\n" if refused else "")


def _default(value: object) -> str:
    return "unset" if value is None else f"`{json.dumps(value)}`"


def _values(values: tuple[object, ...]) -> str:
    return ", ".join(f"`{value if isinstance(value, str) else json.dumps(value)}`" for value in values)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
