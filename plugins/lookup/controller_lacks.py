# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: controller_lacks
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
version_added: 0.1.0
short_description: List what this controller needs for the hosts and does not have
description:
  - Internal to the roles preflight and scheduler, which refuse such a controller before any host is read.
  - An archive that exists in one of the folders needs no program to build it.
extends_documentation_fragment:
  - vgpu.fleet.internal
options:
  library:
    description: Version of the library to compile on this controller. Empty if none.
    type: str
    default: ""
  library_folders:
    description: Folders that may hold archives of the library.
    type: list
    elements: str
    default: []
  plugin:
    description: Version of the device plugin to pack on this controller. Empty if none.
    type: str
    default: ""
  plugin_folders:
    description: Folders that may hold wheels or archives of the device plugin.
    type: list
    elements: str
    default: []
  image:
    description: Version of the device plugin whose image this controller builds. Empty if none.
    type: str
    default: ""
  image_builder:
    description: Engine that builds the image.
    type: str
    default: podman
  image_base:
    description: Base image of the image. If empty, mmdebstrap makes a Debian root.
    type: str
    default: ""
  program:
    description: Version of the scheduler whose image this controller builds. Empty if none.
    type: str
    default: ""
  program_folders:
    description: Folders that may hold wheels of the scheduler.
    type: list
    elements: str
    default: []
  program_cache:
    description: Folder that may hold archives of the scheduler.
    type: str
    default: ""
  program_python:
    description: Version of the Python in the scheduler's image.
    type: str
    default: "3.11"
  program_arch:
    description: Architecture of the scheduler's image, as C(uname -m) prints it.
    type: str
    default: x86_64
  program_image:
    description: File of the built image of the scheduler.
    type: str
    default: ""
  kubeconfigs:
    description: Kubeconfig files of the controller by which the Kubernetes API is called.
    type: list
    elements: str
    default: []
  kubernetes_python:
    description: Interpreter on the controller that runs the modules. Empty if unknown.
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
  description: A sentence for each missing item, with the remedies.
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
from ansible_collections.vgpu.fleet.plugins.plugin_utils.controller import built, lacks, packer

# Headers that the library includes. A host that has a compiler but lacks these headers cannot compile the library.
HEADERS = "#include <dlfcn.h>\n#include <stdio.h>\n"


def compiles() -> bool:
    """Returns True if the compiler finds the headers of the C library."""
    command = ["cc", "-E", "-x", "c", "-"]
    return subprocess.run(command, input=HEADERS.encode(), capture_output=True, check=False).returncode == 0


def library(version: str, folders: list[str]) -> list[str]:
    """Returns a sentence that names the programs that the controller lacks to compile libvgpu.so. Returns no sentence
    if an archive of the library exists.
    """
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
        "prebuilt/; or set vcuda_build_host to a host that has make and a C compiler"
    ]


def plugin(version: str, folders: list[str]) -> list[str]:
    """Returns a sentence that names what the controller lacks to make the device plugin's archive. Returns no sentence
    if the archive or its wheels exist.
    """
    if not version or built(
        folders,
        f"vgpu_fleet_plugin-{glob.escape(version.replace('-', '+', 1))}-*.whl",
        f"vgpu-plugin-{glob.escape(version)}-*.pyz",
    ):
        return []
    missing = packer()
    if not missing:
        return []
    return [
        f"the device plugin {version}: expected {missing} for {sys.executable}, found none. Install it; or "
        "install an artefact with prebuilt wheels (make artefact); or set device_plugin_prebuilt to a folder with its "
        "prebuilt/"
    ]


def scheduler(version: str, folders: list[str], cache: str, python: str, arch: str) -> list[str]:
    """Returns a sentence that names what the controller lacks to make the scheduler's archive for an image with this
    Python.
    """
    missing = lacks("vgpu-scheduler", version, python, arch, folders, cache) if version else ""
    if not missing:
        return []
    return [
        f"the scheduler {version} for Python {python} on {arch}: expected {missing} for {sys.executable}, found none. "
        "Install it; or install an artefact with the scheduler's wheels (make artefact); or set scheduler_prebuilt to "
        "a folder with its prebuilt/scheduler/; or set scheduler_image to an image that the nodes can pull"
    ]


# Maps the prefix of a role's variables to the program that the role's image holds, and to what a user can do instead of
# building that image.
IMAGES = {
    "device_plugin": (
        "the device plugin",
        "set device_plugin_image to an image that the nodes can pull, and device_plugin_image_build to false",
    ),
    "scheduler": ("the scheduler", "set scheduler_image to an image that the nodes can pull"),
}


def image(version: str, there: bool, builder: str, base: str, role: str = "device_plugin") -> list[str]:
    """Returns a sentence that names the programs that the controller lacks to build a role's image. Returns no sentence
    if the image's file exists (``there``).
    """
    if not version or there:
        return []
    missing = [name for name in (builder, *(() if base else ("mmdebstrap",))) if shutil.which(name) is None]
    if not missing:
        return []
    named = "" if base else f"; or set {role}_image_base to an image with python3-venv, which needs no mmdebstrap"
    what, way = IMAGES[role]
    return [
        f"the image of {what} {version}: expected {', '.join(missing)} on this controller, found none. "
        f"Install it{named}; or {way}"
    ]


def kubernetes(files: list[str], python: str) -> list[str]:
    """Returns sentences about missing kubeconfig files and a missing Python package kubernetes."""
    found = [
        f"{file}: no such file here; set vgpu_kubeconfig to a kubeconfig file of the controller"
        for file in files
        if not os.path.exists(os.path.expanduser(file))
    ]
    if files and not imports("kubernetes", python):
        found.append(
            f"the Kubernetes API: expected the Python package kubernetes for {python}, found none. Install it "
            f"({python} -m pip install kubernetes); or leave vgpu_kubeconfig empty if no cluster is to be queried"
        )
    return found


def imports(name: str, python: str) -> bool:
    """Returns True if a Python interpreter has a package.

    Also returns True if there is no such interpreter, because the task that uses it fails with a clearer error.
    """
    if python == sys.executable:
        return importlib.util.find_spec(name) is not None
    if not python or shutil.which(python) is None:
        return True
    # The option -I hides packages that pip installed for this user. Ansible modules do find these packages, so the
    # script adds their folder again.
    script = f"import site; site.addsitedir(site.getusersitepackages()); import {name}"
    return subprocess.run([python, "-I", "-c", script], capture_output=True, check=False).returncode == 0


class LookupModule(LookupBase):
    def run(self, terms, variables=None, **kwargs):
        self.set_options(var_options=variables, direct=kwargs)
        option = self.get_option
        builder, base = option("image_builder"), option("image_base")
        found = library(option("library"), option("library_folders"))
        found += plugin(option("plugin"), option("plugin_folders"))
        there = built(option("plugin_folders"), f"image-{glob.escape(option('image'))}.tar")
        found += image(option("image"), there, builder, base)
        wanted = [option(f"program_{name}") for name in ("folders", "cache", "python", "arch")]
        found += scheduler(option("program"), *wanted)
        there = os.path.exists(os.path.expanduser(option("program_image")))
        found += image(option("program"), there, builder, base, "scheduler")
        return found + kubernetes(option("kubeconfigs"), option("kubernetes_python"))
