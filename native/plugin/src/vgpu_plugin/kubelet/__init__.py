# SPDX-License-Identifier: Apache-2.0
"""The kubelet's device plugin API: registration, and the calls of the service. It only translates messages; the rules
are in other packages.
"""
