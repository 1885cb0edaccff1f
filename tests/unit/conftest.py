# SPDX-License-Identifier: Apache-2.0
"""Lets plain pytest import the collection by its real name; under ansible-test it can already be imported."""

from __future__ import annotations

import sys
from pathlib import Path

COLLECTIONS = Path(__file__).resolve().parents[2] / ".build" / "collections"

if COLLECTIONS.is_dir() and str(COLLECTIONS) not in sys.path:
    sys.path.insert(0, str(COLLECTIONS))
