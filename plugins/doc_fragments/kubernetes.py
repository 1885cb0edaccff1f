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
  - Runs on a host that can reach the API, most often the controller.
requirements:
  - kubernetes (Python package)
options:
  kubeconfig:
    description: Kubeconfig file with the address and the credentials of the API.
    type: path
    required: true
  context:
    description: Context of the kubeconfig file. By default its current context.
    type: str
"""
