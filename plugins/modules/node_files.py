#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: node_files
short_description: Write several text files of a node in one call
version_added: 0.1.0
description:
  - Writes each file that differs, by a rename, and creates missing folders.
  - Several files need only one remote call.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes
  - vgpu.fleet.internal
options:
  files:
    description:
      - Path of each file and its whole text.
      - An existing file keeps its owner and mode; a new file belongs to root and has mode 0644.
    type: dict
    required: true
  exact:
    description:
      - Patterns, such as C(/etc/vgpu/configs/*.yaml). Files that match a pattern and are not in O(files) are removed.
    type: list
    elements: path
    default: []
"""

EXAMPLES = r"""
- name: Write the configuration and the unit of a service
  vgpu.fleet.node_files:
    files:
      /etc/vgpu/node.yaml: "{{ text }}"
      /etc/systemd/system/vgpu-device-plugin.service: "{{ unit }}"
"""

RETURN = r"""
written:
  description: The written files; in check mode, the files that would be written.
  returned: always
  type: list
  elements: str
removed:
  description: The removed files; in check mode, the files that would be removed.
  returned: always
  type: list
  elements: str
"""

import glob
import os

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.host.files import read_bytes, write_bytes


def shown(content: bytes | None) -> str:
    return (content or b"").decode("utf-8", "replace")


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "files": {"type": "dict", "required": True},
            "exact": {"type": "list", "elements": "path", "default": []},
        },
        supports_check_mode=True,
    )
    wanted: dict[str, bytes | None] = {}
    for path, text in module.params["files"].items():
        if not path.startswith("/") or not isinstance(text, str):
            module.fail_json(msg=f"files: expected absolute paths with texts, found {path!r}: {type(text).__name__}")
        wanted[path] = text.encode("utf-8")
    for pattern in module.params["exact"]:
        wanted.update({path: None for path in sorted(glob.glob(pattern)) if path not in wanted})
    before = {path: read_bytes(path) for path in wanted}
    changed = [path for path, content in wanted.items() if before[path] != content]
    for path in changed if not module.check_mode else []:
        content = wanted[path]
        try:
            if content is None:
                os.unlink(path)
            else:
                write_bytes(path, content)
        except OSError as fault:
            module.fail_json(msg=f"{path} cannot be changed: {fault}")
    diff = [
        {
            "before_header": path,
            "after_header": path,
            "before": shown(before[path]),
            "after": shown(wanted[path]),
        }
        for path in changed
    ]
    written = [path for path in changed if wanted[path] is not None]
    removed = [path for path in changed if wanted[path] is None]
    module.exit_json(changed=bool(changed), written=written, removed=removed, diff=diff)


if __name__ == "__main__":
    main()
