# SPDX-License-Identifier: Apache-2.0
"""Puts the scheduler and what it imports on the path: its pinned packages have an environment of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = ROOT / ".build" / "scheduler"
SITE = ENVIRONMENT / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"

command = [ROOT / "tools/venv.sh", ENVIRONMENT, ROOT / "requirements/scheduler.txt", sys.executable]
subprocess.run(command, check=True)
for folder in (str(ROOT / "native" / "plugin" / "src"), str(SITE)):
    if folder not in sys.path:
        sys.path.append(folder)
