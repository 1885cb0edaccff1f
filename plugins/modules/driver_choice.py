#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: driver_choice
short_description: Choose the NVIDIA driver of a host
version_added: 0.1.0
description:
  - Reads the host's distribution, GPUs on the PCI bus, kernel, Secure Boot, NVSwitches and the installed driver, and
    decides packages, repository, kernel modules, files, services and whether a reboot is needed.
  - Fails, before anything is installed, with every reason why the desired state cannot work on this host.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes.info
  - vgpu.fleet.internal
options:
  desired:
    description:
      - The variables of the role C(nvidia_driver) without their prefix. Variables that are left out have the role's
        defaults.
    type: dict
    default: {}
seealso:
  - module: vgpu.fleet.driver_setup
  - module: vgpu.fleet.host_state
"""

EXAMPLES = r"""
- name: Choose a driver for this host from NVIDIA's CUDA repository
  vgpu.fleet.driver_choice:
    desired:
      source: cuda
      branch: "580"
  register: driver
"""

RETURN = r"""
choice:
  description: The changes that the role makes.
  returned: success
  type: dict
  contains:
    branch:
      description: Branch of the driver, V(null) if only the packages determine it.
      type: int
      returned: always
    kernel_module:
      description: V(open), V(proprietary) or V(none).
      type: str
      returned: always
    manager:
      description: V(apt), V(dnf) or V(zypper).
      type: str
      returned: always
    packages:
      description: Names, or C(name=version), C(name=*) and C(name=@other).
      type: list
      elements: str
      returned: always
    repository:
      description: The repository of the packages, empty if the host's own repositories have them.
      type: dict
      returned: always
    holds:
      description: Packages that are held at their version.
      type: list
      elements: str
      returned: always
    refuse:
      description: Patterns of packages that must not be installed as dependencies, such as packages of another branch.
      type: list
      elements: str
      returned: always
    files:
      description: Text of the files that the role writes in addition to the packages, by path.
      type: dict
      returned: always
    services:
      description: Units that are enabled and started.
      type: list
      elements: str
      returned: always
    reboot:
      description: Why a reboot is needed, empty if none is needed.
      type: str
      returned: always
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.driver import choice as driver_choice
from ..module_utils.driver import facts as driver_facts
from ..module_utils.gpu import nvml
from ..module_utils.host.host import Host


def main() -> None:
    module = AnsibleModule(argument_spec={"desired": {"type": "dict", "default": {}}}, supports_check_mode=True)
    host = Host()
    found = nvml.read()
    found.pop("gpus")
    state = {
        "os": host.os_release(),
        "pci_gpus": host.pci_gpus(),
        "nvswitches": driver_facts.nvswitches(host),
        "driver": driver_facts.read(host),
        "nvml": found,
        "packages": host.packages([driver_choice.SUBNET_MANAGER]),
    }
    choice = driver_choice.choose(state, module.params["desired"])
    for warning in choice.warnings:
        module.warn(warning)
    if choice.refusals:
        said = "\n- ".join(choice.refusals)
        module.fail_json(msg=f"the requested driver does not fit this host; nothing was changed:\n- {said}")
    module.exit_json(changed=False, choice=choice._asdict())


if __name__ == "__main__":
    main()
