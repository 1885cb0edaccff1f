# SPDX-License-Identifier: Apache-2.0
"""A repository as the modules for packages take it. Controller only; documented in the .yml files next to it."""

from __future__ import annotations

from ansible_collections.vgpu.fleet.plugins.module_utils.packages import repository


class FilterModule:
    def filters(self):
        return {"repository_for_apt": repository.for_apt, "repository_for_rpm": repository.for_rpm}
