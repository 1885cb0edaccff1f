# SPDX-License-Identifier: Apache-2.0
"""Filters that make the results of the verify role readable. Controller only; documented in the .yml files beside."""

from __future__ import annotations

from ansible_collections.vgpu.fleet.plugins.module_utils import report


class FilterModule:
    def filters(self):
        return {
            "host_report": report.host_report,
            "isolation_brief": report.isolation_brief,
            "isolation_faults": report.isolation_faults,
            "with_kubernetes": report.with_kubernetes,
        }
