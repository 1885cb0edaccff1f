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
  - Checks every variable that starts with C(vgpu_), every variable of the roles of this collection, and every probable
    typing error (a name very near to such a name). It checks the inventory, the play and the command line.
  - Fails for an unknown name, a value of the wrong type, a value that is not one of the choices or is out of range, and
    values that do not fit each other. The error names each mistake once, with the variable, its setter, file and line,
    and the hosts.
  - A template that needs facts of the host is not checked here, but by the role that uses it.
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
      - Whether the desired states are also returned, for M(vgpu.fleet.desired_state). Templates of variables that the
        plan compares must then be evaluable at this time.
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
  description: With O(desired), the desired states. Hosts with equal variables share one.
  returned: success
  type: list
  elements: dict
kinds:
  description: With O(desired), maps each host to the index of its state in RV(states).
  returned: success
  type: dict
kubeconfigs:
  description: Kubeconfig files on the controller that the hosts' variables name, without duplicates.
  returned: success
  type: list
  elements: str
"""
