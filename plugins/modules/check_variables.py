#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Documents the action of the same name in plugins/action, which runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: check_variables
short_description: Check the variables of all hosts before any host is changed
version_added: 0.1.0
description:
  - Runs on the controller alone and makes no remote call. Run it once for a play, with C(run_once).
  - Checks every variable that starts with C(vgpu_), every variable of the roles of this collection, and every name
    that differs by a letter from one of them, wherever it is set, in the inventory, in a play or on the command line.
  - A name that is unknown, a value of the wrong type, none of the choices or out of range, and values that do not fit
    each other are a failure. It names the variable, who set it, file and line, and the hosts, once for each mistake.
  - A template that needs facts of the host is left to the role that uses it.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes.info
  - vgpu.fleet.internal
options:
  hosts:
    description: Names of the hosts. By default all hosts of the play, also those of later batches.
    type: list
    elements: str
  desired:
    description:
      - Whether the desired states are returned too, for M(vgpu.fleet.desired_state). A template of a variable that
        the plan compares must be one that can be evaluated now.
    type: bool
    default: false
seealso:
  - module: vgpu.fleet.desired_state
"""

EXAMPLES = r"""
- name: Check the variables of every host
  vgpu.fleet.check_variables:
  run_once: true
"""

RETURN = r"""
mistakes:
  description: One line for each mistake.
  returned: failure
  type: list
  elements: str
states:
  description: A desired state for each kind of host, with O(desired).
  returned: success
  type: list
  elements: dict
kinds:
  description: The place of each host's state in RV(states).
  returned: success
  type: dict
kubeconfigs:
  description: Kubeconfig files of the controller that the variables of the hosts name, each once.
  returned: success
  type: list
  elements: str
"""
