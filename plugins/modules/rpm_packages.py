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
  - Works like M(vgpu.fleet.apt_packages), by the command lines of dnf or zypper. It sets up repository, key and module
    stream, and installs exactly the requested versions, newer or older, in one transaction.
  - If a repository cannot be read, a key does not match or a version does not exist, the module fails with its name and
    leaves the host unchanged.
  - With a O(record), V(absent) removes what V(present) installed, dependencies included, its locks, keys and
    repository, and nothing that was installed before.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes
  - vgpu.fleet.attributes.group
attributes:
  check_mode:
    details: Predicts the changes. The versions in a repository that is not set up yet are unknown.
  diff_mode:
    details: Shows the packages and the text of the repository files before and after.
options:
  packages:
    description:
      - Names, or C(name=version). A version may be complete, or without epoch and release, and may contain V(*).
      - C(name=@other) takes the version that the package C(other) has, or gets in the same transaction.
    type: list
    elements: str
    required: true
  manager:
    description: The package manager of the host; V(auto) means zypper on a system of SUSE and dnf on any other system.
    type: str
    choices: [auto, dnf, zypper]
    default: auto
  state:
    description: Whether the packages are installed.
    type: str
    choices: [present, absent]
    default: present
  name:
    description: Name of the repository, its file and its key.
    type: str
    required: true
  source:
    description: A repository for these packages. Without it, the host's own repositories are used.
    type: dict
    suboptions:
      baseurl:
        description: Address of the repository.
        type: str
        required: true
      key:
        description:
          - Public key of the repository as armoured text, its address, or the path of a file on the host. If empty,
            signatures are not checked.
        type: str
        default: ""
      gpgcheck:
        description: Whether the packages are signed with the key.
        type: bool
        default: true
      repo_gpgcheck:
        description: Whether the index is signed with the key.
        type: bool
        default: false
      priority:
        description: Priority of the repository; a lower number has precedence.
        type: int
  files:
    description: Package files on the host instead of a repository. Their signatures are not checked.
    type: list
    elements: path
    default: []
  module_stream:
    description: A module of dnf and its stream to enable, as V(name:stream).
    type: str
    default: ""
  stale_sources:
    description: Repository files other than ours that contain one of these texts are removed first.
    type: list
    elements: str
    default: []
  hold:
    description:
      - Names or patterns of packages that are locked at their version. For dnf, the module installs the versionlock
        plugin.
      - Packages that match a pattern with C(!) before it are not locked.
      - Other packages that O(record) lists as locked are released.
      - A package that another user locked is never changed; the module fails with its name.
    type: list
    elements: str
    default: []
  record:
    description: File that records the installations and changes; O(state=absent) reverts exactly these.
    type: path
  optional:
    description:
      - Packages to install in addition if a repository has them, in the notation of O(packages). They are never the
        reason for a change.
    type: list
    elements: str
    default: []
  lock_timeout:
    description: Seconds that zypper waits for another zypper; dnf waits until another dnf has ended.
    type: int
    default: 300
"""

EXAMPLES = r"""
- name: Install the toolkit in one version
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
  description: The changes that were made, or would be made in check mode, in sentences.
  type: list
  elements: str
  returned: always
installed:
  description: The installed or changed packages, dependencies included, with their versions.
  type: dict
  returned: always
removed:
  description: The removed packages.
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
