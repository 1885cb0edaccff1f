# SPDX-License-Identifier: Apache-2.0
"""Runs the dashboards' own queries on a real Prometheus that has an hour of the exporters' metrics. Every panel must
show data, and the pictures in the docs must match the results."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("vgpu_dashboard_pictures", ROOT / "tools" / "dashboard_pictures.py")
assert spec is not None and spec.loader is not None
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)

pytestmark = pytest.mark.skipif(not shutil.which("prometheus"), reason="Prometheus is Debian's package prometheus")


@pytest.fixture(scope="module")
def answers():
    return tool.answers()


@pytest.mark.parametrize("made", tool.dashboards.DASHBOARDS, ids=lambda one: one.file)
def test_every_panel_query_returns_series(answers, made):
    with tool.prometheus() as address:
        empty = [
            f"{panel.title}: {expr}"
            for panel in made.panels
            for expr, legend in panel.queries
            if not tool.lines_of(address, expr, legend)
        ]
    assert empty == []


@pytest.mark.parametrize("made", tool.dashboards.DASHBOARDS, ids=lambda one: one.file)
def test_panel_legends_are_unique(answers, made):
    """A panel's legend must distinguish two replicas or two nodes, or its query must sum them."""
    for panel, lines in zip(made.panels, answers[made.file], strict=True):
        names = [name for name, _points in lines]
        assert sorted(set(names)) == sorted(names), panel.title


@pytest.mark.parametrize("made", tool.dashboards.DASHBOARDS, ids=lambda one: one.file)
def test_pictures_match_the_query_results(answers, made):
    """Compares the number of lines and the panels' titles, but no numbers, because their last digits may differ between
    releases of Prometheus.
    """
    picture = (ROOT / "docs" / tool.name_of(made)).read_text()
    again = tool.picture(made, answers[made.file])
    assert len(again.splitlines()) == len(picture.splitlines()), (
        "run `.build/venv/bin/python tools/dashboard_pictures.py`"
    )
    for panel in made.panels:
        assert tool.escape(panel.title) in picture
