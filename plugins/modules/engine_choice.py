#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_choice
short_description: Choose the packages of a host's container engine
version_added: 0.1.0
description:
  - Reads the host's distribution, whether docker or containerd is there, and their packages, and decides which to
    install.
  - An engine that is installed already is used as it is.
  - Fails, before anything is installed, where the engine is not there and the system has no package of it.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes.info
options:
  desired:
    description:
      - The variables C(engine), C(packages), C(repository) and C(packages_record) of the role C(container_runtime),
        without its prefix.
    type: dict
    default: {}
  state:
    description: V(absent) only asks for the package manager, and never fails.
    type: str
    choices: [present, absent]
    default: present
seealso:
  - module: vgpu.fleet.driver_choice
  - module: vgpu.fleet.host_state
"""

EXAMPLES = r"""
- name: Which packages would bring docker to this host?
  vgpu.fleet.engine_choice:
    desired:
      engine: docker
  register: engine
"""

RETURN = r"""
choice:
  description: What the role carries out.
  returned: success
  type: dict
  contains:
    manager:
      description: V(apt), V(dnf) or V(zypper).
      type: str
      returned: always
    packages:
      description: Names, or C(name=version); none where the engine is there.
      type: list
      elements: str
      returned: always
    components:
      description: Components of the distribution that apt may need for them.
      type: list
      elements: str
      returned: always
    refusal:
      description: Why the engine cannot be had, with V(absent) alone; otherwise the module fails with it.
      type: str
      returned: always
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.engines import engine_packages
from ..module_utils.host.host import Host
from ..module_utils.packages.pins import name_of


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "desired": {"type": "dict", "default": {}},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    wanted = {**engine_packages.DEFAULTS, **module.params["desired"]}
    host = Host()
    record = wanted["packages_record"]
    state = {
        "os": host.os_release(),
        "units": host.units(sorted(engine_packages.UNITS.values())),
        "packages": host.packages([name_of(package) for package in engine_packages.names(wanted)]),
        "files": {record: host.file(record)} if record else {},
    }
    choice = engine_packages.choose(state, wanted)
    if choice.refusal and module.params["state"] == "present":
        module.fail_json(msg=f"nothing was changed: {choice.refusal}")
    module.exit_json(changed=False, choice=choice._asdict())


if __name__ == "__main__":
    main()
