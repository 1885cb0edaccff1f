# SPDX-License-Identifier: Apache-2.0
"""Filters that format the results of the verify role. They run on the controller; the .yml files of this folder
document them.
"""

from __future__ import annotations

from ansible_collections.vgpu.fleet.plugins.module_utils.capacity import tables


class FilterModule:
    def filters(self):
        return {
            "host_report": tables.host_report,
            "isolation_brief": tables.isolation_brief,
            "isolation_faults": tables.isolation_faults,
            "with_kubernetes": tables.with_kubernetes,
        }
