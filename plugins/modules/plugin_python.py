#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: plugin_python
short_description: Find the Python of a host for the device plugin
version_added: 0.1.0
description:
  - Chooses the Python for the device plugin and the packages of the distribution that install it, and checks whether
    they are installed.
  - Returns in RV(refusal) why no Python is suitable; the caller decides whether that stops the play.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes.info
  - vgpu.fleet.internal
options:
  python:
    description: Path of a Python, or V(auto) for the distribution's Python that is new enough.
    type: str
    default: auto
  packages:
    description: Packages of the Python, or V(auto).
    type: list
    elements: str
    default: [auto]
  exists:
    description: Files to check for existence.
    type: list
    elements: path
    default: []
"""

EXAMPLES = r"""
- name: Find the host's Python
  vgpu.fleet.plugin_python:
  register: python
"""

RETURN = r"""
python:
  description: Path of the Python; empty if the distribution has none that is new enough.
  returned: always
  type: str
packages:
  description: The packages that install the Python.
  returned: always
  type: list
  elements: str
missing:
  description: The packages among RV(packages) that are not installed.
  returned: always
  type: list
  elements: str
components:
  description: Components of the distribution that have the packages, in addition to its main component.
  returned: always
  type: list
  elements: str
manager:
  description: V(apt) or V(rpm).
  returned: always
  type: str
version:
  description:
    - Version of the Python, such as C(3.12). If it is not installed yet, the version that the packages install; empty
      if unknown.
  returned: always
  type: str
arch:
  description: Architecture of the host.
  returned: always
  type: str
to_go_on_with:
  description:
    - Another Python of the host, for the remaining tasks of a play that removes RV(packages). Returned only if this
      module itself runs on RV(python) and RV(python) is not C(/usr/bin/python3). Empty otherwise, and if the host has
      no other Python.
  returned: always
  type: str
exists:
  description: For each file of O(exists), whether it exists.
  returned: always
  type: dict
refusal:
  description: Why no Python is suitable; empty if one is suitable, or will be after the installation of the packages.
  returned: always
  type: str
"""

import os
import sys

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.host import distribution
from ..module_utils.host.host import Host
from ..module_utils.plan import plugin_python

VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


def version_of(host: Host, python: str) -> str:
    """Returns the version that a Python interpreter prints, such as 3.11; empty if the interpreter does not run."""
    said = host.run([python, "-I", "-c", VERSION])
    return said.out.strip() if said.rc == 0 else ""


def to_go_on_with(host: Host, choice: plugin_python.Choice) -> str:
    if choice.python == plugin_python.SYSTEM_PYTHON or not sys.executable:
        return ""
    candidates = [path for path in plugin_python.CANDIDATES if os.path.exists(path)]
    real = {path: os.path.realpath(path) for path in [*candidates, choice.python, sys.executable]}
    if real[sys.executable] != real[choice.python]:
        return ""
    versions = {path: version_of(host, path) for path in candidates}
    return plugin_python.to_go_on_with(choice, sys.executable, real, versions)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "python": {"type": "str", "default": plugin_python.AUTO},
            "packages": {"type": "list", "elements": "str", "default": [plugin_python.AUTO]},
            "exists": {"type": "list", "elements": "path", "default": []},
        },
        supports_check_mode=True,
    )
    host = Host()
    system = host.os_release()
    choice = plugin_python.choose(system, module.params["python"], module.params["packages"])
    missing = plugin_python.missing(choice, host.packages(choice.packages))
    version = None
    if choice.python:
        version = version_of(host, choice.python)
    # An interpreter from a package that is not yet installed has no version to check.
    refusal = plugin_python.refusal(system, choice, (version or None) if missing else version)
    module.exit_json(
        changed=False,
        python=choice.python,
        packages=choice.packages,
        missing=missing,
        components=distribution.community(system),
        manager="apt" if os.path.exists("/var/lib/dpkg/status") else "rpm",
        version=version or choice.version,
        arch=system["arch"],
        to_go_on_with=to_go_on_with(host, choice),
        exists={path: os.path.exists(path) for path in module.params["exists"]},
        refusal=refusal,
    )


if __name__ == "__main__":
    main()
