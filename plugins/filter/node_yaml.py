# SPDX-License-Identifier: Apache-2.0
"""Filter that renders node.yaml. It runs on the controller; node_yaml.yml documents it."""

from __future__ import annotations

from ansible_collections.vgpu.fleet.plugins.module_utils.config import node_config


class FilterModule:
    def filters(self):
        return {"node_yaml": node_config.dump}
