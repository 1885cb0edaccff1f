# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: source_version
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
version_added: 0.1.0
short_description: Version of what is built from sources of this collection
description:
  - Returns the version of the collection, a dash, and 12 hexadecimal digits of the digest of the sources named.
  - The same sources give the same version on every controller; a change of any source byte gives another one.
  - It reads files of the controller alone, so that a role knows which version it wants without a remote call.
extends_documentation_fragment:
  - vgpu.fleet.internal
options:
  _terms:
    description: Files or folders below the root of the collection. What a build leaves there does not count.
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

# What builds and tests leave between sources.
LEAVINGS = re.compile(r"(^|/)(__pycache__|build|dist|\.[^/]*|[^/]*\.egg-info)(/|$)|\.(pyc|o|so|a|md)$")


def collection_version(root: str) -> str:
    """The version in galaxy.yml of a checkout, or in the manifest of an installed collection."""
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
    """The files below the terms, relative to the root, sorted."""
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
    """One digest over names and contents; lengths are in it, so that no two trees read the same."""
    total = hashlib.sha256()
    for path in paths:
        with open(os.path.join(root, path), "rb") as stream:
            content = stream.read()
        total.update(f"{path}\0{len(content)}\0".encode())
        total.update(content)
    return total.hexdigest()


def settled(folder: str, key: str, compute: Callable[[], str]) -> str:
    """The version that this run settled on: computed by the first worker that asks, read by all others.

    Sources that are edited while a playbook runs would otherwise be one version in one task and another in the next.
    ``folder`` is the temporary folder that all processes of a run share and that ends with it.
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
