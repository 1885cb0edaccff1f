# SPDX-License-Identifier: Apache-2.0
"""Documentation of the options by which a module connects to the Kubernetes API."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
attributes:
  action_group:
    description: Use C(group/vgpu.fleet.kube) in C(module_defaults) to set O(kubeconfig) and O(context) once.
    support: full
    membership:
      - vgpu.fleet.kube
notes:
  - Runs where the API can be reached, most often on the controller.
requirements:
  - kubernetes (Python package)
options:
  kubeconfig:
    description: File that says how the API is reached.
    type: path
    required: true
  context:
    description: Context of that file; its current one where this is left out.
    type: str
"""
