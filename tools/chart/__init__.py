# SPDX-License-Identifier: Apache-2.0
"""Generates the Helm chart and the Kustomize bases from the objects that plugins/module_utils/kube describes."""
