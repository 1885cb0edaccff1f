# SPDX-License-Identifier: Apache-2.0
"""Makes the package of ``kubectl vgpu`` importable for the tests of this folder."""

from __future__ import annotations

import sys
from pathlib import Path

SOURCES = str(Path(__file__).resolve().parents[3] / "native" / "plugin" / "src")
if SOURCES not in sys.path:
    sys.path.append(SOURCES)
