#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: rollback_point
short_description: Save or remove the rollback point of a node
version_added: 0.1.0
description:
  - Records on the node the current versions of the library and the device plugin, and the texts of their
    configurations and units.
  - The rollback point of an interrupted upgrade stays unchanged until a newer state is proven, so that the next upgrade
    rolls back to the state before the interrupted upgrade.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes.no_diff
  - vgpu.fleet.internal
options:
  state:
    description:
      - V(kept) saves the rollback point, V(forgotten) removes it after the upgrade is proven or rolled back.
    type: str
    choices: [kept, forgotten]
    default: kept
  library_root:
    description: Folder of the library's versions.
    type: path
    default: /usr/local/lib/vgpu
  plugin_root:
    description: Folder of the device plugin's versions.
    type: path
    default: /opt/vgpu/plugin
  node_config:
    description: Configuration of the node.
    type: path
    default: /etc/vgpu/node.yaml
  daemonset:
    description: Settings with which the host's DaemonSet was last applied; if empty, they are not saved.
    type: path
    default: ""
  units:
    description: Unit files whose texts are kept.
    type: list
    elements: path
    default: []
"""

EXAMPLES = r"""
- name: Save the rollback point
  vgpu.fleet.rollback_point:
    units: [/etc/systemd/system/vgpu-device-plugin.service]
  register: kept
"""

RETURN = r"""
point:
  description:
    - Versions (C(library), C(plugin)) and texts (C(node_config), and by path C(units), the named configurations
      C(configs) and C(daemonset)). V(null) means absent. If C(configs) is V(null) or C(daemonset) is empty, the version
      of the collection that made the record did not save it.
  returned: with O(state=kept)
  type: dict
resumed:
  description: Whether the rollback point is that of an earlier, interrupted upgrade.
  returned: with O(state=kept)
  type: bool
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.host.host import Host
from ..module_utils.state import rollback


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["kept", "forgotten"], "default": "kept"},
            "library_root": {"type": "path", "default": "/usr/local/lib/vgpu"},
            "plugin_root": {"type": "path", "default": "/opt/vgpu/plugin"},
            "node_config": {"type": "path", "default": "/etc/vgpu/node.yaml"},
            "daemonset": {"type": "path", "default": ""},
            "units": {"type": "list", "elements": "path", "default": []},
        },
        supports_check_mode=True,
    )
    wanted, host = dict(module.params), Host()
    if wanted.pop("state") == "forgotten":
        module.exit_json(changed=rollback.delete(host, module.check_mode))
    try:
        point, resumed = rollback.persist(host, check_mode=module.check_mode, **wanted)
    except OSError as fault:
        module.fail_json(msg=f"{rollback.PATH} cannot be written, and without it no rollback is possible: {fault}")
    module.exit_json(changed=not resumed, point=point, resumed=resumed)


if __name__ == "__main__":
    main()
