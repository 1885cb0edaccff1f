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
  - Compiles the sources of the library in a folder of its own and packs the result as one archive, which
    M(vgpu.fleet.vcuda_library) deploys.
  - The archive appears by one rename when it is whole, so an existing one is complete, and nothing is compiled.
  - The same sources and compiler give the same bytes.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes.no_diff
options:
  archive:
    description: Where the archive is, or is to be, on this host.
    type: path
    required: true
  version:
    description: The version that is written into the archive's manifest.
    type: str
    required: true
  sources:
    description:
      - Folder of the sources on this host, with their C(Makefile). Nothing is written in it.
      - Without it nothing is compiled; RV(exists) says whether the archive is there.
    type: path
"""

EXAMPLES = r"""
- name: Build once on the controller
  vgpu.fleet.vcuda_archive:
    archive: ~/.cache/vgpu.fleet/vcuda-0.1.0-0123456789ab.tar.gz
    version: 0.1.0-0123456789ab
    sources: native/vcuda
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
archive:
  description: Its path, C(~) and variables of the environment resolved on this host.
  returned: always
  type: str
exists:
  description: Whether the archive is there now.
  returned: always
  type: bool
"""

import os

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.library import build as library_build


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "archive": {"type": "path", "required": True},
            "version": {"type": "str", "required": True},
            "sources": {"type": "path"},
        },
        supports_check_mode=True,
    )
    archive, sources = module.params["archive"], module.params["sources"]
    there = os.path.exists(archive)
    if there or not sources:
        module.exit_json(changed=False, archive=archive, exists=there)
    if not module.check_mode:
        try:
            library_build.build(archive, module.params["version"], sources)
        except (library_build.BuildError, OSError) as fault:
            module.fail_json(msg=f"the vGPU library was not built: {fault}", archive=archive, exists=False)
    module.exit_json(changed=True, archive=archive, exists=not module.check_mode)


if __name__ == "__main__":
    main()
