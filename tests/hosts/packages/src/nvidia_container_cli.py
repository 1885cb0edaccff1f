# SPDX-License-Identifier: Apache-2.0
"""Replaces NVIDIA's nvidia-container-cli on the simulated hosts: prints its version and, with ``list``, the files that
a container with all GPUs receives.

NVIDIA's program also injects GPUs into containers in its legacy mode; on these hosts the runtime does that by CDI.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

VERSION = "@VERSION@"
SPECIFICATION = Path("/var/run/cdi/nvidia.yaml")


def main(words: list[str]) -> int:
    if words in (["--version"], ["-V"]):
        print(f"cli-version: {VERSION}\nlib-version: {VERSION}\nbuild: stand-in for simulated hosts")
        return 0
    if words == ["list"]:
        try:
            spec = json.loads(SPECIFICATION.read_text())
        except (OSError, ValueError) as fault:
            print(f"nvidia-container-cli: {SPECIFICATION}: {fault}; run: nvidia-ctk cdi generate", file=sys.stderr)
            return 1
        every = next(device for device in spec["devices"] if device["name"] == "all")
        for edits in (spec["containerEdits"], every["containerEdits"]):
            for node in edits.get("deviceNodes", []):
                print(node["path"])
            for mount in edits.get("mounts", []):
                print(mount["hostPath"])
        return 0
    print("nvidia-container-cli: this stand-in supports only --version and list; CDI injects the GPUs", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
