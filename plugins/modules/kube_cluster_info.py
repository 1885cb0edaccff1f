#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kube_cluster_info
short_description: Check that a cluster's nodes are ready for the vgpu-scheduler
version_added: 0.1.0
description:
  - Reads the Node objects of GPU hosts. Fails with a line for each host that the cluster does not know, or that
    C(site.yml) did not set up for pods that request their sizes.
  - Returns the commands by which the hosts of O(loads) load an image into the engine that their kubelet reports.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes.info
  - vgpu.fleet.kubernetes
  - vgpu.fleet.internal
options:
  hosts:
    description: Names of the GPU hosts, each with the name of its node.
    type: dict
    default: {}
  loads:
    description: Names of the hosts on which images are loaded, each with the name of its node.
    type: dict
    default: {}
  arch:
    description: Architecture of the image that is built, as C(uname -m) prints it.
    type: str
    default: x86_64
  repository:
    description: Image of the scheduler without its tag.
    type: str
    default: localhost/vgpu-scheduler
  images:
    description: Images to find and load. C(KUBERNETES) in them stands for the version of the API server.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Check the nodes
  vgpu.fleet.kube_cluster_info:
    kubeconfig: ~/.kube/config
    hosts: {gpu-1.example.com: gpu-1}
  delegate_to: localhost
"""

RETURN = r"""
kubernetes:
  description: Version of the API server.
  returned: always
  type: str
images:
  description: O(images) with the version filled in.
  returned: always
  type: list
  elements: str
loads:
  description: The node, the engine and the command lines of each host of O(loads).
  returned: always
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.kube import apply as kube_apply
from ..module_utils.kube import client as kube_client
from ..module_utils.kube import cluster_nodes

VERSION = "KUBERNETES"


def run(module: AnsibleModule, api: kube_client.Api) -> dict:
    params = module.params
    tag = "v{}.{}.{}".format(*kube_apply.numbers(api.get("/version") or {}))
    images = [one.replace(VERSION, tag) for one in params["images"]]
    nodes = {one["metadata"]["name"]: one for one in api.list("/api/v1/nodes")}
    loads, faults = cluster_nodes.loading(nodes, params["loads"], params["arch"], params["repository"], images)
    faults = cluster_nodes.faults(nodes, params["hosts"]) + faults
    if faults:
        module.fail_json(msg="\n".join(["The cluster was not changed.", *dict.fromkeys(faults)]))
    return {"changed": False, "kubernetes": tag, "images": images, "loads": loads}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "kubeconfig": {"type": "path", "required": True},
            "context": {"type": "str"},
            "hosts": {"type": "dict", "default": {}},
            "loads": {"type": "dict", "default": {}},
            "arch": {"type": "str", "default": "x86_64"},
            "repository": {"type": "str", "default": "localhost/vgpu-scheduler"},
            "images": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    kube_client.answer(module, run)


if __name__ == "__main__":
    main()
