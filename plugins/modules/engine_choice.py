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
  - Decides which engine V(auto) means on this host. It is the engine of the running kubelet, else an installed engine,
    else docker.
  - Reads the host's distribution, the installed engines and their packages, and decides which packages to install.
  - An engine that is already installed stays unchanged.
  - Fails before anything is installed if the engine is missing and the system has no package of it.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes.info
  - vgpu.fleet.internal
options:
  desired:
    description:
      - The variables C(engine), C(packages), C(repository), C(runtimes), C(default_runtime) and the records of the role
        C(container_runtime), without its prefix.
    type: dict
    default: {}
  state:
    description: V(absent) only returns the package manager, and never fails.
    type: str
    choices: [present, absent]
    default: present
seealso:
  - module: vgpu.fleet.driver_choice
  - module: vgpu.fleet.host_state
"""

EXAMPLES = r"""
- name: Choose the packages that install docker on this host
  vgpu.fleet.engine_choice:
    desired:
      engine: docker
  register: engine
"""

RETURN = r"""
choice:
  description: The changes that the role makes.
  returned: success
  type: dict
  contains:
    engine:
      description: The engine that V(auto) means on this host, else the named engine.
      type: str
      returned: always
    engines:
      description:
        - The engine; with V(absent) and V(auto), each engine that the collection has configured.
      type: list
      elements: str
      returned: always
    drop_in:
      description:
        - The collection's file for CRI-O, k3s or RKE2, with C(engine), C(path) and C(text); empty for other engines.
      type: dict
      returned: always
    manager:
      description: V(apt), V(dnf) or V(zypper).
      type: str
      returned: always
    packages:
      description: Names, or C(name=version); empty if the engine is installed.
      type: list
      elements: str
      returned: always
    components:
      description: Components of the distribution that apt may need for them.
      type: list
      elements: str
      returned: always
    refusal:
      description: Why the engine cannot be installed, only with V(absent); otherwise the module fails with this text.
      type: str
      returned: always
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.engines import engine_auto, engine_packages, kubelet_engine
from ..module_utils.host.host import Host
from ..module_utils.kube import version as kube_version
from ..module_utils.packages.pins import name_of


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "desired": {"type": "dict", "default": {}},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    wanted, present = {**engine_packages.DEFAULTS, **module.params["desired"]}, module.params["state"] == "present"
    host = Host()
    kubelet = kube_version.of_host(host)
    records = [wanted["packages_record"], *(wanted[name] for name in engine_auto.RECORDS.values())]
    paths = [*filter(None, records), *engine_auto.files(wanted["engine"])]
    state: dict[str, Any] = {
        "os": host.os_release(),
        "units": host.units([*engine_packages.UNITS.values(), *engine_auto.units(wanted["engine"])]),
        "packages": host.packages([name_of(package) for package in engine_packages.names(wanted)]),
        "files": {path: host.file(path) for path in paths},
        "kubelet": kubelet,
        "kubelet_engine": kubelet_engine.read(host, kubelet),
    }
    found = engine_auto.resolve(wanted, state).name
    engines = [found] if present else engine_auto.configured(wanted, state["files"])
    if found in engine_auto.DROP_INS and found not in engines:
        # Name the engine even if its file is gone, because an interrupted earlier run may have removed the file without
        # a restart of the engine.
        engines.append(found)
    choice = engine_packages.choose(state, {**wanted, "engine": found})
    # An engine that is not the kubelet's is an error of the plan, so here only the failed choice of an engine is one.
    faults = [
        *filter(None, [choice.refusal]),
        *kubelet_engine.findings(state["kubelet_engine"], wanted["engine"], True)[0],
    ]
    if faults and present:
        module.fail_json(msg=f"nothing was changed: {faults[0]}")
    drop_ins = [engine for engine in engines if engine in engine_auto.DROP_INS]
    drop_in: dict[str, str] = {}
    if drop_ins:
        path, text = engine_auto.drop_in(drop_ins[0], wanted)
        drop_in = {"engine": drop_ins[0], "path": path, "text": text}
    module.exit_json(
        changed=False, choice={**choice._asdict(), "engine": found, "engines": engines, "drop_in": drop_in}
    )


if __name__ == "__main__":
    main()
