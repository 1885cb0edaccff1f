# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: controller_lacks
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
version_added: 0.1.0
short_description: Programs that this controller would need to build for the hosts and does not have
description:
  - Internal to the role preflight, which refuses such a controller before any host is read.
  - What lies built in one of the folders needs no program.
extends_documentation_fragment:
  - vgpu.fleet.internal
options:
  library:
    description: Version of the library that is compiled on this controller. Empty where none is.
    type: str
    default: ""
  library_folders:
    description: Folders that may hold archives of the library.
    type: list
    elements: str
    default: []
  plugin:
    description: Version of the device plugin that is packed on this controller. Empty where none is.
    type: str
    default: ""
  plugin_folders:
    description: Folders that may hold wheels or archives of the device plugin.
    type: list
    elements: str
    default: []
  image:
    description: Version of the device plugin whose image is built on this controller. Empty where none is.
    type: str
    default: ""
  image_builder:
    description: Engine that builds the image.
    type: str
    default: podman
  image_base:
    description: Image that it is built on. Empty makes a Debian root by mmdebstrap.
    type: str
    default: ""
"""

EXAMPLES = r"""
- name: Show what is missing to compile the library
  ansible.builtin.debug:
    msg: "{{ query('vgpu.fleet.controller_lacks', library='0.1.0-0123456789ab', library_folders=['/var/cache/vgpu']) }}"
"""

RETURN = r"""
_raw:
  description: A sentence for each that cannot be built, with the ways out.
  type: list
  elements: str
"""

import glob
import importlib.util
import os
import shutil
import subprocess
import sys

from ansible.plugins.lookup import LookupBase

# Included by the library; without them a compiler is there and compiles nothing.
HEADERS = "#include <dlfcn.h>\n#include <stdio.h>\n"


def built(folders: list[str], *patterns: str) -> bool:
    """Whether one of the folders has a file of one of the patterns."""
    places = [os.path.join(glob.escape(os.path.expanduser(folder)), one) for folder in folders for one in patterns]
    return any(glob.glob(place) for place in places)


def compiles() -> bool:
    """Whether the compiler finds the headers of the C library."""
    command = ["cc", "-E", "-x", "c", "-"]
    return subprocess.run(command, input=HEADERS.encode(), capture_output=True, check=False).returncode == 0


def library(version: str, folders: list[str]) -> list[str]:
    """What is missing to compile the library."""
    if not version or built(folders, f"vcuda-{glob.escape(version)}-*.tar.gz"):
        return []
    missing = [name for name in ("make", "cc") if shutil.which(name) is None]
    if not missing and not compiles():
        missing = ["the headers of the C library (libc6-dev, glibc-devel)"]
    if not missing:
        return []
    return [
        f"the vGPU library {version}: expected {', '.join(missing)} on this controller, found none. Install it; or "
        "install an artefact with prebuilt libraries (make artefact); or set vcuda_prebuilt to a folder with its "
        "prebuilt/; or set vcuda_build_host to a host that compiles"
    ]


def plugin(version: str, folders: list[str]) -> list[str]:
    """What is missing to make the device plugin's archive."""
    if not version or built(
        folders,
        f"vgpu_fleet_plugin-{glob.escape(version.replace('-', '+', 1))}-*.whl",
        f"vgpu-plugin-{glob.escape(version)}-*.pyz",
    ):
        return []
    missing = []
    if not any(importlib.util.find_spec(name) for name in ("pip", "ensurepip")):
        missing.append("pip, or the module ensurepip (package python3-venv)")
    if sys.version_info < (3, 11):
        missing.append("Python 3.11 or newer")
    if not missing:
        return []
    return [
        f"the device plugin {version}: expected {', '.join(missing)} for {sys.executable}, found none. Install it; or "
        "install an artefact with prebuilt wheels (make artefact); or set device_plugin_prebuilt to a folder with its "
        "prebuilt/"
    ]


def image(version: str, folders: list[str], builder: str, base: str) -> list[str]:
    """What is missing to build the device plugin's image."""
    if not version or built(folders, f"image-{glob.escape(version)}.tar"):
        return []
    missing = [name for name in (builder, *(() if base else ("mmdebstrap",))) if shutil.which(name) is None]
    if not missing:
        return []
    named = "" if base else "; or set device_plugin_image_base to an image with python3-venv, which needs no mmdebstrap"
    return [
        f"the image of the device plugin {version}: expected {', '.join(missing)} on this controller, found none. "
        f"Install it{named}; or name an image that the nodes pull in device_plugin_image, and set "
        "device_plugin_image_build to false"
    ]


class LookupModule(LookupBase):
    def run(self, terms, variables=None, **kwargs):
        self.set_options(var_options=variables, direct=kwargs)
        option = self.get_option
        found = library(option("library"), option("library_folders"))
        found += plugin(option("plugin"), option("plugin_folders"))
        return found + image(option("image"), option("plugin_folders"), option("image_builder"), option("image_base"))
