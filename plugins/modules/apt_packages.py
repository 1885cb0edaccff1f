#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: apt_packages
short_description: Install packages with their APT source; remove them on state=absent
version_added: 0.1.0
description:
  - One remote call for a whole role installs source, key and package lists, and all packages in one transaction of apt.
  - Check mode asks apt to simulate the transaction and so names every package that it would install too. If the sources
    change or the package lists are old, it reads the lists into a separate folder. A warning names what it cannot
    predict.
  - An unreadable source that this installation does not need gives a warning.
  - Refuses a transaction that would remove a package that was not named.
  - Finishes an interrupted dpkg first, so that a second run repairs an interrupted run.
  - With a O(record), V(absent) removes what V(present) installed, dependencies included, and nothing that was installed
    before.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes
  - vgpu.fleet.attributes.group
attributes:
  check_mode:
    details: Simulates the transaction.
  diff_mode:
    details: Shows the packages and the text of the source file before and after.
options:
  packages:
    description:
      - Names, or C(name=version); a version may end in V(*).
      - C(name=@other) takes the upstream version that the package C(other) has, or gets in the same transaction.
    type: list
    elements: str
    required: true
  state:
    description: Whether the packages are installed.
    type: str
    choices: [present, absent]
    default: present
  name:
    description: Name of the source file, C(/etc/apt/sources.list.d/<name>.sources), and of the key.
    type: str
    required: true
  source:
    description: A repository for these packages. Without it, the host's own repositories are used.
    type: dict
    suboptions:
      uris:
        description: Addresses of the repository; C(file:/folder) for one on the host.
        type: list
        elements: str
        default: []
      files:
        description: Package files on the host instead of a repository; the module makes an index of them for apt.
        type: list
        elements: path
        default: []
      suites:
        description: Suites, or V(./) for a flat repository.
        type: list
        elements: str
        default: ["./"]
      components:
        description: Components; none for a flat repository.
        type: list
        elements: str
        default: []
      key:
        description: The repository's public key as armoured text, or the path of a key file on the host.
        type: str
        default: ""
      trusted:
        description: Whether to use the repository without a signature. Only for a repository on the host itself.
        type: bool
        default: false
  components:
    description:
      - Components of the distribution that are enabled if apt otherwise has no candidate for a package. They come from
        the host's own mirror, with its own key.
    type: list
    elements: str
    default: []
  stale_sources:
    description: Source files other than ours that contain one of these texts are removed before the lists are read.
    type: list
    elements: str
    default: []
  stale_keys:
    description:
      - Long ids of keys of such sources. A file that holds no other key is removed if it is in
        C(/etc/apt/trusted.gpg.d), or if only removed source files name it.
      - Key files in C(/etc/apt/trusted.gpg.d) stay if a remaining source is flat (its suite ends in a slash) and names
        no key. Such a source may be a copy of the repository, signed with these keys.
      - V(absent) restores the key files and the source files.
    type: list
    elements: str
    default: []
  may_remove:
    description: Packages that the transaction may remove, such as predecessors of the installed packages.
    type: list
    elements: str
    default: []
  refuse:
    description:
      - Patterns of packages that must not be installed as dependencies. If apt would install such a package, the module
        fails with its name and installs nothing.
      - Packages that match a pattern with C(!) before it are allowed.
    type: list
    elements: str
    default: []
  keep_files:
    description:
      - Files whose content stays unchanged by the transaction. Without this option, a purged package deletes its
        configuration files even if an administrator has edited them.
    type: list
    elements: path
    default: []
  hold:
    description:
      - Installed packages that are held at their version during upgrades of the whole system. Other packages that
        O(record) lists as held are released.
      - A package that another user holds is never changed; the module fails with its name.
    type: list
    elements: str
    default: []
  record:
    description:
      - File that records the installed packages and the moved files; O(state=absent) reverts exactly these changes.
    type: path
  optional:
    description:
      - Packages to install in addition if a repository has them, in the notation of O(packages). They are never the
        reason for a change.
    type: list
    elements: str
    default: []
  cache_valid_time:
    description:
      - Seconds after which package lists are read again before something is installed. They are also read again if a
        package is unknown, and once if the archive no longer has a file that they name.
    type: int
    default: 86400
  lock_timeout:
    description: Seconds to wait for another user of dpkg.
    type: int
    default: 300
"""

EXAMPLES = r"""
- name: Install the driver's user space from the distribution's non-free component
  vgpu.fleet.apt_packages:
    name: vgpu-nvidia-driver
    packages: [nvidia-smi, libcuda1, libnvidia-ml1]
    components: [contrib, non-free, non-free-firmware]
    record: /var/lib/vgpu/baseline/nvidia_driver.json
"""

RETURN = r"""
plan:
  description: The changes that were made, or would be made in check mode, in sentences.
  type: list
  elements: str
  returned: always
installed:
  description: The installed packages, dependencies included, with their versions.
  type: dict
  returned: always
removed:
  description: The removed packages.
  type: list
  elements: str
  returned: always
source_changed:
  description: Whether the sources of apt changed.
  type: bool
  returned: always
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.packages.apt_host import AptHost
from ..module_utils.packages.apt_set import Desired, PackageSet
from ..module_utils.packages.manager import PackageError


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "packages": {"type": "list", "elements": "str", "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "name": {"type": "str", "required": True},
            "source": {
                "type": "dict",
                "options": {
                    "uris": {"type": "list", "elements": "str", "default": []},
                    "files": {"type": "list", "elements": "path", "default": []},
                    "suites": {"type": "list", "elements": "str", "default": ["./"]},
                    "components": {"type": "list", "elements": "str", "default": []},
                    "key": {"type": "str", "default": "", "no_log": False},
                    "trusted": {"type": "bool", "default": False},
                },
                "required_one_of": [("uris", "files")],
            },
            "components": {"type": "list", "elements": "str", "default": []},
            "stale_sources": {"type": "list", "elements": "str", "default": []},
            "stale_keys": {"type": "list", "elements": "str", "default": [], "no_log": False},
            "may_remove": {"type": "list", "elements": "str", "default": []},
            "refuse": {"type": "list", "elements": "str", "default": []},
            "keep_files": {"type": "list", "elements": "path", "default": []},
            "hold": {"type": "list", "elements": "str", "default": []},
            "record": {"type": "path"},
            "optional": {"type": "list", "elements": "str", "default": []},
            "cache_valid_time": {"type": "int", "default": 86400},
            "lock_timeout": {"type": "int", "default": 300},
        },
        supports_check_mode=True,
    )
    wanted = {name: value for name, value in module.params.items() if name not in ("state", "lock_timeout")}
    packages = PackageSet(Desired(**wanted), AptHost(module.params["lock_timeout"]), module.check_mode)
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
        installed=packages.transaction.install,
        removed=packages.transaction.remove,
        source_changed=packages.source_changed,
        diff=packages.diff(),
    )


if __name__ == "__main__":
    main()
