# SPDX-License-Identifier: Apache-2.0
"""Filters that turn a repository variable into the option of a package module. They run on the controller.

The .yml files of this folder document the filters.
"""

from __future__ import annotations

from ansible_collections.vgpu.fleet.plugins.module_utils.packages import repository


class FilterModule:
    def filters(self):
        return {"repository_for_apt": repository.for_apt, "repository_for_rpm": repository.for_rpm}
