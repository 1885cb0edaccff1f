#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: toolkit_config
short_description: Manage keys in the configuration of NVIDIA's container toolkit
version_added: 0.1.0
description:
  - Sets keys of a TOML file. Comments, order, foreign keys, mode and owner survive; the file is replaced in one step.
  - A file that cannot be read as TOML stays unchanged; the error names the line.
  - Running containers are not affected; the runtime reads its file when a container is created.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes
  - vgpu.fleet.attributes.group
attributes:
  diff_mode:
    details: Shows the text before and after.
options:
  path:
    description: The file. A missing file is created.
    type: path
    default: /etc/nvidia-container-runtime/config.toml
  settings:
    description: Values by dotted key, such as C(nvidia-container-cli.no-cgroups).
    type: dict
    default: {}
  state:
    description: V(absent) restores the former value of each key that was set and not changed since.
    type: str
    choices: [present, absent]
    default: present
  record:
    description: File that records the former values of the keys; O(state=absent) restores them.
    type: path
"""

EXAMPLES = r"""
- name: Refuse GPUs to containers that request them by environment
  vgpu.fleet.toolkit_config:
    settings:
      accept-nvidia-visible-devices-envvar-when-unprivileged: false
      accept-nvidia-visible-devices-as-volume-mounts: true
    record: /var/lib/vgpu/baseline/nvidia_docker_config.json
"""

RETURN = r"""
plan:
  description: The changes that were made, or would be made in check mode, in sentences.
  type: list
  elements: str
  returned: always
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.engines.toolkit_file import TomlFile
from ..module_utils.text.toml_text import TomlError


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "default": "/etc/nvidia-container-runtime/config.toml"},
            "settings": {"type": "dict", "default": {}},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "record": {"type": "path"},
        },
        supports_check_mode=True,
    )
    run = TomlFile(module.params["path"], module.params["record"], module.check_mode)
    try:
        if module.params["state"] == "present":
            run.present(module.params["settings"])
        else:
            run.absent()
    except (TomlError, OSError) as fault:
        module.fail_json(msg=f"{module.params['path']}: {fault}")
    title = module.params["path"]
    diff = {"before_header": title, "after_header": title, "before": run.before or "", "after": run.after or ""}
    module.exit_json(changed=run.before != run.after, plan=run.plan, diff=diff)


if __name__ == "__main__":
    main()
