# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: repository_key
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
version_added: 0.1.0
short_description: Public key of a package repository, compared with its fingerprint
description:
  - Returns the armoured text of a key. It is read from O(place) if set, else from the files of this collection, else
    from its URL.
  - Fails if the fingerprint of the key is not O(fingerprint).
  - Internal. The roles use it for their repositories.
extends_documentation_fragment:
  - vgpu.fleet.internal
options:
  _terms:
    description: URLs of keys.
    type: list
    elements: str
    required: true
  fingerprint:
    description: The fingerprint that every key must have; if empty, the fingerprint is not compared.
    type: str
    default: ""
  place:
    description:
      - A file or folder on the controller, or a URL, from which the key is read instead of its owner's URL.
    type: str
    default: ""
"""

EXAMPLES = r"""
- name: Show a key
  ansible.builtin.debug:
    msg: "{{ lookup('vgpu.fleet.repository_key', 'https://repo.example.com/key.asc') }}"
"""

RETURN = r"""
_raw:
  description: The texts of the keys.
  type: list
  elements: str
"""

from typing import Any

from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase
from ansible_collections.vgpu.fleet.plugins.plugin_utils.repository_key import KeyFault, read


class LookupModule(LookupBase):
    def run(self, terms: list[str], variables: Any = None, **kwargs: Any) -> list[str]:
        self.set_options(var_options=variables, direct=kwargs)
        try:
            return [read(str(term), self.get_option("fingerprint"), self.get_option("place")) for term in terms]
        except KeyFault as fault:
            raise AnsibleLookupError(str(fault)) from None
