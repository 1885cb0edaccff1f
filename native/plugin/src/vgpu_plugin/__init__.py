# SPDX-License-Identifier: Apache-2.0
"""The Python programs that run on a node with vgpu.fleet: the device plugin and its command line tool vgpuctl."""

from pathlib import Path

_VERSION_FILE = Path(__file__).with_name("VERSION")


def version() -> str:
    """Returns the version of the installed wheel, which is also the name of its folder under /opt/vgpu/plugin. Returns
    ``source`` in a checkout of the repository.
    """
    return _VERSION_FILE.read_text().strip() if _VERSION_FILE.exists() else "source"
