# SPDX-License-Identifier: Apache-2.0
"""Node programs of vgpu.fleet: the device plugin and its command line tool vgpuctl."""

from pathlib import Path

_VERSION_FILE = Path(__file__).with_name("VERSION")


def version() -> str:
    """Returns the version of the wheel (also the folder under /opt/vgpu/plugin); ``source`` in a checkout."""
    return _VERSION_FILE.read_text().strip() if _VERSION_FILE.exists() else "source"
