# SPDX-License-Identifier: Apache-2.0
"""The cluster side of vgpu.fleet: scheduler extender and admission webhook for the stock kube-scheduler."""
