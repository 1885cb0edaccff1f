# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: targets
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
version_added: 0.1.0
short_description: Pattern of a playbook's hosts; fails if no host of the inventory matches it
description:
  - Internal to the playbooks of this collection. Ansible ends a play without hosts with exit status 0, so a check that
    checks no host would pass.
extends_documentation_fragment:
  - vgpu.fleet.internal
options:
  _terms:
    description: The pattern, or several of them. One pattern may itself be a list.
    required: true
"""

EXAMPLES = r"""
- name: Prove capacity and isolation
  hosts: "{{ query('vgpu.fleet.targets', site_hosts | default('gpu_nodes')) }}"
"""

RETURN = r"""
_raw:
  description: The same patterns as a flat list. If no host matches them and C(--limit), the lookup fails.
  type: list
  elements: str
"""

import functools
import gc
import os

from ansible.errors import AnsibleError
from ansible.inventory.manager import split_host_pattern
from ansible.plugins.loader import lookup_loader
from ansible.plugins.lookup import LookupBase


@functools.cache
def freeze_in_forks():
    """Makes the garbage collector of each process that Ansible forks ignore the objects of the parent process.

    Ansible forks a process for each task and host. Without this, the collector of each process would write to all these
    objects, so the kernel would copy their memory pages. The parent's own collector goes on as usual.
    """
    os.register_at_fork(after_in_child=gc.freeze)


class LookupModule(LookupBase):
    def run(self, terms, variables=None, **kwargs):
        freeze_in_forks()
        variables = variables or {}
        patterns = [one for term in terms for one in (term if isinstance(term, (list, tuple)) else [term])]
        found = self._hosts(patterns, variables)
        limit = str(variables.get("ansible_limit") or "")
        # A limit with "@" names a file of host names, which only Ansible reads, so such a limit is not checked.
        if limit and "@" not in limit:
            first = [] if split_host_pattern(limit)[0][:1] not in ("!", "&") else ["all"]
            found &= self._hosts(first + split_host_pattern(limit), variables)
        if not found:
            groups = sorted(name for name, hosts in (variables.get("groups") or {}).items() if hosts)
            limited = f" with --limit {limit}" if limit else ""
            raise AnsibleError(
                f"no host matches {', '.join(patterns)}{limited}, so nothing was done; expected hosts in that group, "
                f"found hosts in {', '.join(groups) or 'no group'}. Use this group name in the inventory, name another "
                "group with -e site_hosts=GROUP, or name the inventory with -i"
            )
        return patterns

    def _hosts(self, patterns, variables):
        names = lookup_loader.get("ansible.builtin.inventory_hostnames", loader=self._loader, templar=self._templar)
        return set(names.run([",".join(patterns)], variables))
