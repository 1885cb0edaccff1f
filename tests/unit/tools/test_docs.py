# SPDX-License-Identifier: Apache-2.0
"""Pages that are made from a table are as fresh as the table."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_page_of_variables_is_fresh() -> None:
    spec = importlib.util.spec_from_file_location("docs_tool", ROOT / "tools" / "docs.py")
    assert spec and spec.loader
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert (ROOT / "docs" / "variables.md").read_text() == tool.page(), "docs/variables.md is old: run `make docs`"
