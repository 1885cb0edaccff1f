#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Documents the action of the same name in plugins/action, which runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: desired_state
short_description: Build the desired state of a host
version_added: 0.1.0
description:
  - Runs on the controller alone and makes no remote call.
  - Reads every variable whose name starts with C(vgpu_), and the variables of the roles of this collection
    that are in the play.
  - Fails for a variable that is unknown, of the wrong type or out of range. The error names the variable, the host
    group that set it, the host, and the nearest valid name.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes.info
  - vgpu.fleet.internal
seealso:
  - module: vgpu.fleet.check_variables
  - module: vgpu.fleet.host_state
  - module: vgpu.fleet.plan
"""

EXAMPLES = r"""
- name: Check the variables of every host before any host is changed
  vgpu.fleet.desired_state:
  register: host_desired
  any_errors_fatal: true
"""

RETURN = r"""
desired:
  description: The desired state of the host, the input of M(vgpu.fleet.plan).
  returned: success
  type: dict
reads:
  description: The options with which M(vgpu.fleet.host_state) reads the data that the plan compares.
  returned: success
  type: dict
"""
