# SPDX-License-Identifier: Apache-2.0
"""Makes the Helm chart and the Kustomize base of the objects that plugins/module_utils/kube describes."""
