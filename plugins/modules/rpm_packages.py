#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: rpm_packages
short_description: Install packages with their RPM repository; remove them on state=absent
version_added: 0.1.0
description:
  - What M(vgpu.fleet.apt_packages) is for apt, by the command lines of dnf or zypper, namely repository, key, module
    stream and one transaction for exactly the versions that were asked for, up or down.
  - A repository that cannot be read, a key that does not match or a version that does not exist leaves the host as it
    was, and the message names it.
  - With a O(record), V(absent) removes what V(present) installed, dependencies included, its locks, keys and
    repository, and nothing that was there before.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes
  - vgpu.fleet.attributes.group
attributes:
  check_mode:
    details: Says what would be done; of a repository that is not there yet no versions are known.
  diff_mode:
    details: Shows the packages and the text of the repository files before and after.
options:
  packages:
    description:
      - Names, or C(name=version). A version may be whole, or without epoch and release, and may hold V(*).
      - C(name=@other) takes the version that the package C(other) has, or gets in the same transaction.
    type: list
    elements: str
    required: true
  manager:
    description: The package manager of the host; V(auto) is zypper on a system of SUSE and dnf on any other.
    type: str
    choices: [auto, dnf, zypper]
    default: auto
  state:
    description: Whether the packages are there.
    type: str
    choices: [present, absent]
    default: present
  name:
    description: Name of the repository, its file and its key.
    type: str
    required: true
  source:
    description: A repository for these packages. Without it, the host's own are used.
    type: dict
    suboptions:
      baseurl:
        description: Its address.
        type: str
        required: true
      key:
        description:
          - Its public key as armoured text, its address, or the path of a file on the host. Empty checks nothing.
        type: str
        default: ""
      gpgcheck:
        description: Whether the packages are signed with it.
        type: bool
        default: true
      repo_gpgcheck:
        description: Whether the index is signed with it.
        type: bool
        default: false
      priority:
        description: Its priority; a lower number goes before the others.
        type: int
  files:
    description: Package files on the host instead of a repository. Their signatures are not checked.
    type: list
    elements: path
    default: []
  module_stream:
    description: A module of dnf and the stream of it to enable, V(name:stream).
    type: str
    default: ""
  stale_sources:
    description: Repository files other than ours that contain one of these texts are removed first.
    type: list
    elements: str
    default: []
  hold:
    description:
      - Names or patterns of packages that are locked at their version, with dnf by its plugin, which is installed.
      - What a pattern with C(!) before it matches is not locked.
      - A package that somebody else locked is never changed; the module stops and names it.
    type: list
    elements: str
    default: []
  record:
    description: File that records what was installed and changed; O(state=absent) reverts exactly that.
    type: path
  optional:
    description:
      - Packages that come along where a repository has them; as O(packages). They are never the reason for a change.
    type: list
    elements: str
    default: []
  lock_timeout:
    description: Seconds that zypper waits for another one; dnf waits until the other has ended.
    type: int
    default: 300
"""

EXAMPLES = r"""
- name: The toolkit at one version
  vgpu.fleet.rpm_packages:
    manager: dnf
    name: vgpu-nvidia-docker
    packages: [nvidia-container-toolkit=1.18.0-1, libnvidia-container1=@nvidia-container-toolkit]
    source:
      baseurl: https://mirror.example.com/libnvidia-container/stable/rpm/x86_64
      key: https://mirror.example.com/libnvidia-container/gpgkey
      gpgcheck: false
      repo_gpgcheck: true
    record: /var/lib/vgpu/baseline/nvidia_docker.json
"""

RETURN = r"""
plan:
  description: What was done, or would be, in sentences.
  type: list
  elements: str
  returned: always
installed:
  description: The packages that came or changed, dependencies included, with their versions.
  type: dict
  returned: always
removed:
  description: The packages that went.
  type: list
  elements: str
  returned: always
source_changed:
  description: Whether a repository file or key changed.
  type: bool
  returned: always
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.packages.manager import PackageError
from ..module_utils.packages.rpm_host import RpmHost
from ..module_utils.packages.rpm_set import Desired, PackageSet


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "packages": {"type": "list", "elements": "str", "required": True},
            "manager": {"type": "str", "choices": ["auto", "dnf", "zypper"], "default": "auto"},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "name": {"type": "str", "required": True},
            "source": {
                "type": "dict",
                "options": {
                    "baseurl": {"type": "str", "required": True},
                    "key": {"type": "str", "default": "", "no_log": False},
                    "gpgcheck": {"type": "bool", "default": True},
                    "repo_gpgcheck": {"type": "bool", "default": False},
                    "priority": {"type": "int"},
                },
            },
            "files": {"type": "list", "elements": "path", "default": []},
            "module_stream": {"type": "str", "default": ""},
            "stale_sources": {"type": "list", "elements": "str", "default": []},
            "hold": {"type": "list", "elements": "str", "default": []},
            "record": {"type": "path"},
            "optional": {"type": "list", "elements": "str", "default": []},
            "lock_timeout": {"type": "int", "default": 300},
        },
        supports_check_mode=True,
    )
    wanted = {name: value for name, value in module.params.items() if name not in ("state", "lock_timeout", "manager")}
    host = RpmHost(module.params["manager"], module.params["lock_timeout"])
    packages = PackageSet(Desired(**wanted), host, module.check_mode)
    try:
        if module.params["state"] == "present":
            packages.present()
        else:
            packages.absent()
    except (PackageError, OSError) as fault:
        module.fail_json(msg=f"{module.params['name']}: {fault}", plan=packages.plan)
    for warning in packages.warnings:
        module.warn(warning)
    module.exit_json(
        changed=packages.changed,
        plan=packages.plan,
        installed=packages.installed,
        removed=packages.removed,
        source_changed=packages.source_changed,
        diff=packages.diff(),
    )


if __name__ == "__main__":
    main()
