#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Runs a command in the box, a set of namespaces with all programs of a Kubernetes cluster: ``run.py pytest
tests/e2e``, ``run.py bash``.

First fetches and builds missing programs (tests/e2e/README.md). Needs root and ``make native``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from kubebox import box, programs


def main() -> int:
    command = sys.argv[1:] or ["bash"]
    try:
        found = programs.find()
        return box.run_in(command, {**os.environ, programs.VARIABLE: found.to_json()})
    except (programs.MissingProgram, PermissionError) as fault:
        print(f"tests/e2e/run.py: {fault}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
