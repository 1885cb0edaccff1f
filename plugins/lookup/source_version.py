# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: source_version
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
version_added: 0.1.0
short_description: Version of a program that is built from sources of this collection
description:
  - Returns the version of the collection, a dash, and 12 hexadecimal digits of the digest of the named sources.
  - The same sources give the same version on every controller; a change of any source byte gives another version.
  - It reads only files of the controller, so a role knows the desired version without a remote call.
extends_documentation_fragment:
  - vgpu.fleet.internal
options:
  _terms:
    description: Files or folders below the root of the collection. Build artefacts there do not count.
    type: list
    elements: str
    required: true
"""

EXAMPLES = r"""
- name: Show the version of the library that these sources give
  ansible.builtin.debug:
    msg: "{{ lookup('vgpu.fleet.source_version', 'native/vcuda') }}"
"""

RETURN = r"""
_raw:
  description: The version.
  type: list
  elements: str
"""

import contextlib
import hashlib
import json
import os
import re
from typing import Callable

from ansible import constants as C
from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# Files that are no sources: documentation, and files that builds and tests leave among the sources.
LEAVINGS = re.compile(r"(^|/)(__pycache__|build|dist|\.[^/]*|[^/]*\.egg-info)(/|$)|\.(pyc|o|so|a|md)$")


def collection_version(root: str) -> str:
    """Returns the version in galaxy.yml of a checkout, or in the manifest of an installed collection."""
    try:
        with open(os.path.join(root, "MANIFEST.json"), encoding="utf-8") as stream:
            return str(json.load(stream)["collection_info"]["version"])
    except OSError:
        pass
    with open(os.path.join(root, "galaxy.yml"), encoding="utf-8") as stream:
        found = re.search(r"^version:\s*(\S+)", stream.read(), re.MULTILINE)
    if not found:
        raise AnsibleLookupError(f"{root}/galaxy.yml names no version")
    return found.group(1)


def sources(root: str, terms: list[str]) -> list[str]:
    """Returns the files that the terms name, and those in the folders that they name, without build artefacts. The
    paths are relative to the root and sorted.
    """
    found = set()
    for term in terms:
        start = os.path.join(root, term)
        if os.path.isfile(start):
            found.add(term)
        elif not os.path.isdir(start):
            raise AnsibleLookupError(f'the collection has no "{term}" (looked in {root})')
        for folder, _folders, names in os.walk(start):
            for name in names:
                path = os.path.relpath(os.path.join(folder, name), root)
                if not LEAVINGS.search(path.replace(os.sep, "/")):
                    found.add(path)
    return sorted(found)


def digest(root: str, paths: list[str]) -> str:
    """Returns one SHA-256 over names, lengths and contents. Without the lengths, two different trees could give the
    same digest.
    """
    total = hashlib.sha256()
    for path in paths:
        with open(os.path.join(root, path), "rb") as stream:
            content = stream.read()
        total.update(f"{path}\0{len(content)}\0".encode())
        total.update(content)
    return total.hexdigest()


def settled(folder: str, key: str, compute: Callable[[], str]) -> str:
    """Returns the version that all tasks of this run use. The first worker process computes it and writes it to a file,
    and all others read that file. Otherwise two tasks could see different versions if a user edits the sources during
    the run. ``folder`` is the temporary folder that all processes of a run share; Ansible deletes it at the end of the
    run.
    """
    path = os.path.join(folder, "source_version-" + hashlib.sha256(key.encode()).hexdigest()[:16])
    if not os.path.exists(path):
        fresh = f"{path}.{os.getpid()}"
        with open(fresh, "w", encoding="utf-8") as stream:
            stream.write(compute())
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)
        os.unlink(fresh)
    with open(path, encoding="utf-8") as stream:
        return stream.read()


class LookupModule(LookupBase):
    def run(self, terms, variables=None, **kwargs):
        self.set_options(var_options=variables, direct=kwargs)
        names = [str(term) for term in terms]

        def compute() -> str:
            return f"{collection_version(ROOT)}-{digest(ROOT, sources(ROOT, names))[:12]}"

        return [settled(C.DEFAULT_LOCAL_TMP, "\0".join([ROOT, *names]), compute)]
