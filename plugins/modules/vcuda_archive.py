#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: vcuda_archive
short_description: Compile the vGPU library into an archive
version_added: 0.1.0
description:
  - Compiles the sources of the library in a separate folder and packs the result as one archive, which
    M(vgpu.fleet.vcuda_library) deploys.
  - The archive gets its name by one rename when it is complete, so an existing archive is complete and is not compiled
    again.
  - The same sources and compiler give the same bytes.
  - The name of the archive is C(vcuda-<version>-<architecture>.tar.gz).
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes.no_diff
  - vgpu.fleet.internal
options:
  folder:
    description: Folder of the archive on this host.
    type: path
    required: true
  prebuilt:
    description: Folders on this host that may hold archives which were built elsewhere.
    type: list
    elements: path
    default: []
  architectures:
    description:
      - The architectures for which archives are needed, as C(uname -m) prints them. By default the architecture of this
        host.
      - Nothing is compiled if this host's architecture is not among them.
      - Nothing is compiled if O(folder) or a folder of O(prebuilt) has the archive for this host's architecture.
    type: list
    elements: str
    default: []
  version:
    description: The version that is written into the archive's manifest.
    type: str
    required: true
  sources:
    description:
      - Folder of the sources on this host, with their C(Makefile). The module writes nothing there.
      - Without it nothing is compiled; RV(exists) shows whether the archive exists.
    type: path
"""

EXAMPLES = r"""
- name: Build the archive on the controller
  vgpu.fleet.vcuda_archive:
    folder: ~/.cache/vgpu.fleet
    version: 0.1.0-0123456789ab
    sources: native/vcuda
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
archive:
  description: Path of the archive for this host's architecture, C(~) and variables of the environment resolved.
  returned: always
  type: str
exists:
  description: Whether the archive exists after the run.
  returned: always
  type: bool
missing:
  description: The architectures among O(architectures) that have no archive after the run.
  returned: always
  type: list
  elements: str
"""

import os
import platform

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.library import build as library_build


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "folder": {"type": "path", "required": True},
            "prebuilt": {"type": "list", "elements": "path", "default": []},
            "architectures": {"type": "list", "elements": "str", "default": []},
            "version": {"type": "str", "required": True},
            "sources": {"type": "path"},
        },
        supports_check_mode=True,
    )
    params, own = module.params, platform.machine()
    version, folders = params["version"], [params["folder"], *params["prebuilt"]]
    archive = os.path.join(params["folder"], library_build.archive_name(version, own))
    needed = params["architectures"] or [own]
    missing = library_build.missing(folders, version, needed)
    if own not in missing or not params["sources"]:
        module.exit_json(changed=False, archive=archive, exists=os.path.exists(archive), missing=missing)
    if not module.check_mode:
        try:
            library_build.build(archive, version, params["sources"])
        except (library_build.BuildError, OSError) as fault:
            module.fail_json(
                msg=f"the vGPU library was not built: {fault}", archive=archive, exists=False, missing=missing
            )
        missing = library_build.missing(folders, version, needed)
    module.exit_json(changed=True, archive=archive, exists=not module.check_mode, missing=missing)


if __name__ == "__main__":
    main()
