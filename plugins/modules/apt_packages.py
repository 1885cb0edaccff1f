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
  - Check mode asks apt to simulate the transaction and so names every package that it would install too. Where the
    sources change, or the package lists are old, it reads the lists into a folder of its own. What it cannot find out
    it says in a warning.
  - A source of the host that cannot be read and that nothing here needs is a warning.
  - Refuses a transaction that would remove a package that was not named.
  - Finishes an interrupted dpkg first, so that a second run repairs a killed one.
  - With a O(record), V(absent) removes what V(present) installed, dependencies included, and nothing that was there
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
    description: Whether the packages are there.
    type: str
    choices: [present, absent]
    default: present
  name:
    description: Name of the source file, C(/etc/apt/sources.list.d/<name>.sources), and of the key.
    type: str
    required: true
  source:
    description: A repository for these packages. Without it, the host's own are used.
    type: dict
    suboptions:
      uris:
        description: Addresses of the repository; C(file:/folder) for one on the host.
        type: list
        elements: str
        default: []
      files:
        description: Package files on the host instead of a repository; apt is given an index of them.
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
        description: Whether to use it without a signature. Only for a repository on the host itself.
        type: bool
        default: false
  components:
    description:
      - Components of the distribution that are enabled, from the host's own mirror with its own key, when apt otherwise
        has no candidate for a package.
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
      - Long ids of keys of such sources. Files that hold no other key are taken away; those in
        C(/etc/apt/trusted.gpg.d), and those that a source file taken away names and no other does.
      - Those in C(/etc/apt/trusted.gpg.d) stay where a source that is left is flat, its suite ending in a slash, and
        names no key; it may be a copy of the repository and signed with them.
      - They come back with V(absent), as the source files do.
    type: list
    elements: str
    default: []
  may_remove:
    description: Packages that the transaction may remove, such as forerunners of those installed.
    type: list
    elements: str
    default: []
  refuse:
    description:
      - Patterns of packages that must not come along. Where apt would bring one, nothing is installed and it is named.
      - What a pattern with C(!) before it matches may come.
    type: list
    elements: str
    default: []
  keep_files:
    description:
      - Files that hold the same bytes after the transaction as before it. A package that once owned a file as its
        configuration deletes it when it is purged, whatever an administrator wrote there.
    type: list
    elements: path
    default: []
  hold:
    description:
      - Packages, among those installed, that are kept at their version against upgrades of the whole system.
      - A package that somebody else holds is never changed; the module stops and names it.
    type: list
    elements: str
    default: []
  record:
    description: File that records what was installed and moved away; O(state=absent) reverts exactly that.
    type: path
  optional:
    description:
      - Packages that come along where a repository has them; as O(packages). They are never the reason for a change.
    type: list
    elements: str
    default: []
  cache_valid_time:
    description:
      - Seconds after which package lists are read again before something is installed. They are read again, too, where
        a package is unknown, and once where the archive no longer has a file that they name.
    type: int
    default: 86400
  lock_timeout:
    description: Seconds to wait for another user of dpkg.
    type: int
    default: 300
"""

EXAMPLES = r"""
- name: The driver's user space, from the distribution's non-free part
  vgpu.fleet.apt_packages:
    name: vgpu-nvidia-driver
    packages: [nvidia-smi, libcuda1, libnvidia-ml1]
    components: [contrib, non-free, non-free-firmware]
    record: /var/lib/vgpu/baseline/nvidia_driver.json
"""

RETURN = r"""
plan:
  description: What was done, or would be, in sentences.
  type: list
  elements: str
  returned: always
installed:
  description: The packages that came, dependencies included, with their versions.
  type: dict
  returned: always
removed:
  description: The packages that went.
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
