# SPDX-License-Identifier: Apache-2.0
"""Filter that renders a node's configuration files. It runs on the controller; node_files.yml documents it."""

from __future__ import annotations

from ansible_collections.vgpu.fleet.plugins.module_utils.config import node_config


class FilterModule:
    def filters(self):
        return {"node_files": node_files}


def node_files(desired, config_path=node_config.PATH):
    """Maps path to text of node.yaml and of each configuration that a node label may choose."""
    files = {config_path: node_config.dump(desired["node_config"])}
    for name, config in sorted((desired.get("node_configs") or {}).items()):
        files[node_config.config_file(config_path, name)] = node_config.dump(config)
    return files
