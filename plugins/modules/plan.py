#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Documents the action of the same name in plugins/action, which runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: plan
short_description: Plan the changes from the state of a host to its desired state
version_added: 0.1.0
description:
  - Reads the host by M(vgpu.fleet.host_state), in one remote call, and compares its state with its desired state from
    M(vgpu.fleet.check_variables).
  - Returns ordered steps, each with its role, its reason, its changes, and whether it disturbs running work.
  - Fails if this host alone cannot be changed, for example because its F(daemon.json) cannot be read.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes.info
  - vgpu.fleet.internal
options:
  checked:
    description:
      - Name of the variable with the registered result of M(vgpu.fleet.check_variables), called with
        O(vgpu.fleet.check_variables#module:desired).
    type: str
    required: true
  groups:
    description: Groups of the inventory in memory to which the host is added. An empty name adds it to no group.
    type: dict
    suboptions:
      changed:
        description: Name of the group of hosts whose plan has a step.
        type: str
      unchanged:
        description: Name of the group of hosts whose plan is empty.
        type: str
seealso:
  - module: vgpu.fleet.check_variables
  - module: vgpu.fleet.desired_state
  - module: vgpu.fleet.host_state
"""

EXAMPLES = r"""
- name: Check the variables of all hosts
  vgpu.fleet.check_variables:
    desired: true
  register: fleet_checked
  run_once: true

- name: Read the host and plan
  vgpu.fleet.plan:
    checked: fleet_checked
  register: host_plan

- name: Show the plan
  ansible.builtin.debug:
    msg: "{{ host_plan.faults or host_plan.text }}"
"""

RETURN = r"""
steps:
  description: The steps in their order.
  returned: success
  type: list
  elements: dict
  contains:
    role:
      description: Role that makes the step's changes.
      type: str
      returned: always
    reason:
      description: Why the step is needed.
      type: str
      returned: always
    changes:
      description: The changes of the step, in sentences.
      type: list
      elements: str
      returned: always
    disturbs:
      description: Whether the step disturbs running work.
      type: bool
      returned: always
  sample:
    - role: vcuda
      reason: the library is not current
      changes:
        - deploy /usr/local/lib/vgpu/0.1.0-0123456789ab
        - switch current from nothing to 0.1.0-0123456789ab
      disturbs: false
roles:
  description: Names of the roles of the steps.
  returned: success
  type: list
  elements: str
faults:
  description:
    - Mistakes in the variables that only the GPUs of the host show, else empty. If there is a mistake, RV(text) is
      empty, and only warnings are returned.
  returned: always
  type: list
  elements: str
state:
  description:
    - Parts of the host's state that later roles need; C(node), C(os), C(kubelet_engine) of M(vgpu.fleet.host_state).
  returned: success
  type: dict
disturbs:
  description: Whether any step disturbs running work.
  returned: success
  type: bool
outside:
  description:
    - Holders of slices that a drain of a Kubernetes node does not move.
    - Containers of docker and podman by name, and programs of C(vgpuctl exec).
  returned: always
  type: list
  elements: str
  sample: ["docker web"]
allocation:
  description: A line on claims (Dynamic Resource Allocation), empty if pods get GPUs by the device plugin.
  returned: success
  type: str
node_yaml:
  description: The desired content of the node's configuration file.
  returned: success
  type: str
text:
  description: The plan as lines to show.
  returned: success
  type: list
  elements: str
"""
