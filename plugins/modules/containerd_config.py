#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: containerd_config
short_description: Configure NVIDIA's runtime in containerd and restart it
version_added: 0.1.0
description:
  - Sets the keys of one runtime in the configuration of containerd, of version 1, 2 or 3. Every other key, its order
    and all comments stay.
  - If the file has version 3 and imports a folder, the keys go into a separate file in that folder. Older versions of
    containerd would replace the whole section of the CRI plugin by such a file.
  - Before the module writes the file, the output of C(containerd config dump) must show the runtime.
  - If containerd does not start with the new file, the module restores the former file, restarts containerd, and fails.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes
  - vgpu.fleet.attributes.group
attributes:
  diff_mode:
    details: Shows the text of the file before and after.
options:
  path:
    description: The main file.
    type: path
    default: /etc/containerd/config.toml
  name:
    description: Name of the runtime.
    type: str
    default: nvidia
  runtime:
    description: Absolute path of the runtime's program.
    type: path
    default: /usr/bin/nvidia-container-runtime
  default:
    description:
      - Whether containers that name no runtime get this one. Otherwise pods need a RuntimeClass.
      - V(false) sets the default runtime to runc if it is this runtime, and leaves another default runtime unchanged.
    type: bool
    default: true
  systemd_cgroup:
    description:
      - Whether the runtime uses systemd's cgroup driver. The value must match the kubelet's cgroup driver.
      - V(auto) takes the value of the running kubelet, else the value that the file has for runc. If no kubelet runs
        and the file has no value, it means V(true), the default of kubeadm.
    type: raw
    default: auto
  state:
    description: V(absent) reverts V(present), byte for byte if the file was not edited since.
    type: str
    choices: [present, absent]
    default: present
  record:
    description: File that records the former state; O(state=absent) restores it.
    type: path
  apply:
    description: V(auto) restarts a containerd that has not read the file, V(none) only writes the file.
    type: str
    choices: [auto, none]
    default: auto
  restart:
    description: Whether a running containerd may be restarted. V(never) fails before anything is written.
    type: str
    choices: [always, never]
    default: always
  service:
    description: The systemd service.
    type: str
    default: containerd
  timeout:
    description: Seconds that a restart may take.
    type: int
    default: 60
"""

EXAMPLES = r"""
- name: Make NVIDIA's runtime the default of containerd
  vgpu.fleet.containerd_config:
    record: /var/lib/vgpu/baseline/containerd.json

- name: Restore the former configuration of containerd
  vgpu.fleet.containerd_config:
    state: absent
    record: /var/lib/vgpu/baseline/containerd.json
"""

RETURN = r"""
plan:
  description: The changes that were made, or would be made in check mode, in sentences.
  type: list
  elements: str
  returned: always
target:
  description: The file that contains the keys.
  type: str
  returned: always
applied:
  description: The action on the daemon, done or predicted; V(none), V(restart) or V(start).
  type: str
  returned: always
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.engines import kubelet_engine
from ..module_utils.engines.containerd_apply import Applier, Options, text_of
from ..module_utils.engines.containerd_text import ConfigError, Desired, systemd_cgroup
from ..module_utils.host.host import Host
from ..module_utils.text.toml_text import TomlError


def cgroup_driver(params: dict[str, Any]) -> bool | None:
    """Returns whether the runtime must use systemd cgroups. With state ``absent`` the value does not matter."""
    if params["state"] == "absent":
        return True
    return systemd_cgroup(params["systemd_cgroup"], kubelet_engine.read(Host(), None), text_of(params["path"]))


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "default": "/etc/containerd/config.toml"},
            "name": {"type": "str", "default": "nvidia"},
            "runtime": {"type": "path", "default": "/usr/bin/nvidia-container-runtime"},
            "default": {"type": "bool", "default": True},
            "systemd_cgroup": {"type": "raw", "default": "auto"},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "record": {"type": "path"},
            "apply": {"type": "str", "choices": ["auto", "none"], "default": "auto"},
            "restart": {"type": "str", "choices": ["always", "never"], "default": "always"},
            "service": {"type": "str", "default": "containerd"},
            "timeout": {"type": "int", "default": 60},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        cgroup = cgroup_driver(params)
    except (ConfigError, TomlError) as fault:
        module.fail_json(msg=f"{params['path']}: {fault}", target=params["path"])
    options = Options(
        path=params["path"],
        desired=Desired(params["name"], params["runtime"], params["default"], cgroup),
        absent=params["state"] == "absent",
        record=params["record"],
        service=params["service"],
        restart=params["restart"],
        apply=params["apply"] == "auto",
        timeout=float(params["timeout"]),
    )
    applier = Applier(options)
    try:
        applier.prepare(module.check_mode)
        if not module.check_mode:
            applier.carry_out()
    except (ConfigError, TomlError, OSError) as fault:
        module.fail_json(msg=f"{params['path']}: {fault}", target=applier.target)
    for text in applier.warnings:
        module.warn(text)
    module.exit_json(
        changed=bool(applier.edits) or applier.applied != "none",
        plan=applier.plan(),
        target=applier.target,
        applied=applier.applied,
        diff=[
            {"before_header": path, "after_header": path, "before": before or "", "after": after or ""}
            for path, before, after in applier.edits
        ],
    )


if __name__ == "__main__":
    main()
