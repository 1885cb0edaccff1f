#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: vcuda_library
short_description: Install a version of the vGPU library on a node and make it current
version_added: 0.1.0
description:
  - Unpacks an archive into a new folder below O(root) and switches the link C(current) to it, each by one rename.
  - No file of a library is ever overwritten, because running containers have it mounted.
  - The next run deletes the unfinished files of an interrupted run.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes
  - vgpu.fleet.internal
options:
  state:
    description:
      - V(present) deploys O(version) and makes it current. Other versions stay for the containers that use them.
      - V(collected) removes the versions that no process maps, no container mounts and no allocation names, except
        O(version) and the current version.
      - V(absent) removes all versions.
    type: str
    choices: [present, collected, absent]
    default: present
  version:
    description: The version. Required with O(state=present) and O(state=collected).
    type: str
  archive:
    description:
      - The archive on the node, with C(libvgpu.so), C(vgpu-probe) and C(manifest.json) at its top.
      - It is read only if the version is not installed yet.
    type: path
  checksum:
    description:
      - SHA-256 of O(archive); another file is refused. The checksum is computed from the unpacked bytes.
      - With O(source), the checksum of the controller's file.
    type: str
  source:
    description:
      - The archive on the controller, or a list of paths, of which the first existing file is sent.
      - C({arch}) in a path stands for the node's architecture, as C(uname -m) prints it.
      - The archive is sent only to a node that does not have the version.
    type: list
    elements: path
  root:
    description: Folder of the versions.
    type: path
    default: /usr/local/lib/vgpu
"""

EXAMPLES = r"""
- name: Deploy the library
  vgpu.fleet.vcuda_library:
    version: 0.1.0-0123456789ab
    source: ~/.cache/vgpu.fleet/vcuda-0.1.0-0123456789ab-{arch}.tar.gz

- name: Switch to a version that is still on the node
  vgpu.fleet.vcuda_library:
    version: 0.1.0-ba9876543210

- name: Remove versions that nothing uses any more
  vgpu.fleet.vcuda_library:
    state: collected
    version: 0.1.0-0123456789ab
"""

RETURN = r"""
actions:
  description: The changes that were made, in sentences.
  returned: always
  type: list
  elements: str
current:
  description: The version that C(current) names now, V(null) if no version is current.
  returned: always
  type: str
arch:
  description: The node's architecture, as C(uname -m) prints it.
  returned: where RV(needs_archive) is true
  type: str
needs_archive:
  description: Whether nothing was done because the node does not have the version and got no archive.
  returned: always
  type: bool
versions:
  description: The versions on the node.
  returned: always
  type: list
  elements: str
"""

import platform

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.host.host import Host
from ..module_utils.library import store as library_store
from ..module_utils.library import versions


def predict(params: dict, before: dict) -> list[str]:
    """Returns sentences on what a run would do, for check mode."""
    root, version = params["root"], params["version"]
    if params["state"] == "absent":
        return [f"would remove {root}/{one}" for one in before["versions"]]
    if params["state"] == "collected":
        return [f"would remove {root}/{one}" for one in before["unused"] if one != version]
    actions = []
    if version not in before["whole"]:
        actions.append(f"would deploy {root}/{version}")
    elif version in before["closed"]:
        actions.append(f"would let every user read {root}/{version}")
    if before["current"] != version:
        actions.append(f"would switch {root}/current to {version}")
    return actions


def predicted(params: dict, before: dict) -> dict:
    """Returns the versions that the node would have after a run, for check mode."""
    if params["state"] == "absent":
        return {"versions": [], "current": None}
    if params["state"] == "present":
        return {"versions": sorted({*before["versions"], params["version"]}), "current": params["version"]}
    gone = {one for one in before["unused"] if one != params["version"]}
    return {"versions": [one for one in before["versions"] if one not in gone], "current": before["current"]}


def shape(state: dict) -> dict:
    return {"current": state["current"], "versions": state["versions"]}


def shown(state: dict) -> str:
    return "current: {}\nversions: {}\n".format(state["current"] or "none", ", ".join(state["versions"]) or "none")


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "collected", "absent"], "default": "present"},
            "version": {"type": "str"},
            "archive": {"type": "path"},
            "checksum": {"type": "str"},
            "source": {"type": "list", "elements": "path"},
            "root": {"type": "path", "default": "/usr/local/lib/vgpu"},
        },
        required_if=[("state", "present", ("version",)), ("state", "collected", ("version",))],
        supports_check_mode=True,
    )
    params, host = module.params, Host()
    before = versions.library(host, params["root"])
    actions = predict(params, before)
    after = before
    lacks = params["state"] == "present" and params["version"] not in before["whole"]
    if lacks and not params["archive"] and not module.check_mode:
        if not params["source"]:
            module.fail_json(
                msg=f"{params['root']}/{params['version']} is missing or not complete, and no archive was given; "
                f"the node has {', '.join(before['versions']) or 'no version'}"
            )
        module.exit_json(
            changed=False, needs_archive=True, arch=platform.machine(), actions=[], diff=[], **shape(before)
        )
    if actions and not module.check_mode:
        try:
            if params["state"] == "present":
                actions = library_store.deploy(params["root"], params["version"], params["archive"], params["checksum"])
            elif params["state"] == "collected":
                actions = library_store.collect(params["root"], params["version"])
            else:
                actions = library_store.remove(params["root"])
        except (library_store.StoreError, OSError) as fault:
            module.fail_json(msg=f"{fault}")
        after = versions.library(host, params["root"])
    elif actions:
        after = predicted(params, before)
    module.exit_json(
        changed=bool(actions),
        needs_archive=False,
        actions=actions,
        **shape(after),
        diff={"before": shown(before), "after": shown(after)},
    )


if __name__ == "__main__":
    main()
