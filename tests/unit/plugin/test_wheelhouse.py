# SPDX-License-Identifier: Apache-2.0
"""What the node programs are built with where nothing is installed: each package that is needed, pinned by digest."""

from __future__ import annotations

import importlib.util
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from .conftest import PLUGIN

SPEC = importlib.util.spec_from_file_location("wheelhouse", PLUGIN / "tools" / "wheelhouse.py")
assert SPEC is not None
assert SPEC.loader is not None
wheelhouse = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(wheelhouse)


@pytest.mark.parametrize("name", wheelhouse.BUILD_NEEDS)
def test_build_needs_are_complete_and_pinned(name):
    """pip refuses to install by digest where a package that another one requires has none."""
    blocks = dict(wheelhouse.locked_blocks(wheelhouse.LOCK))
    version = blocks[name].split("==")[1].split()[0]
    assert "--hash=sha256:" in blocks[name]
    assert metadata.version(name) == version, "the test's environment is not that of requirements/test.txt"
    required = [Requirement(line) for line in metadata.requires(name) or ()]
    needed = {one.name for one in required if one.marker is None or one.marker.evaluate({"extra": ""})}
    assert needed <= set(wheelhouse.BUILD_NEEDS)
