# SPDX-License-Identifier: Apache-2.0
"""The files of a node's configuration and their texts. Controller only; documented in the .yml file next to it."""

from __future__ import annotations

from ansible_collections.vgpu.fleet.plugins.module_utils.config import node_config


class FilterModule:
    def filters(self):
        return {"node_files": node_files}


def node_files(desired, config_path=node_config.PATH):
    """Path → text: node.yaml, and the configurations that a node label may choose."""
    files = {config_path: node_config.dump(desired["node_config"])}
    for name, config in sorted((desired.get("node_configs") or {}).items()):
        files[node_config.config_file(config_path, name)] = node_config.dump(config)
    return files
