#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: host_state
short_description: Read the state of a GPU host in one call
version_added: 0.1.0
description:
  - Reads GPUs, packages, files, systemd units, Docker, the vGPU library and the device plugin of a host, in
    one remote call.
  - M(vgpu.fleet.plan) compares the result with the host's desired state.
  - Missing parts are V(null) or empty; the module never fails because of a host's state.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes.info
  - vgpu.fleet.internal
options:
  packages:
    description: Packages whose installed version is read, from the status file of dpkg or from rpm.
    type: list
    elements: str
    default: []
  files:
    description: Files whose digest, mode and time of change are read.
    type: list
    elements: path
    default: []
  texts:
    description: Files whose text is read.
    type: list
    elements: path
    default: []
  units:
    description: Systemd units whose state is read.
    type: list
    elements: str
    default: []
  docker_config:
    description: Configuration file of the Docker daemon.
    type: path
    default: /etc/docker/daemon.json
  node_config:
    description: Configuration file of the node.
    type: path
    default: /etc/vgpu/node.yaml
  library_root:
    description: Folder of the versions of the vGPU library.
    type: path
    default: /usr/local/lib/vgpu
  plugin_root:
    description: Folder of the versions of the device plugin.
    type: path
    default: /opt/vgpu/plugin
  containerd_config:
    description: Main configuration file of containerd.
    type: path
    default: /etc/containerd/config.toml
  mig:
    description: Whether MIG modes, profiles and instances of the GPUs are read.
    type: bool
    default: false
  root:
    description: Root folder below which files are read. The GPUs are always those of the running host.
    type: path
    default: /
seealso:
  - module: vgpu.fleet.check_variables
  - module: vgpu.fleet.plan
  - module: vgpu.fleet.gpu_info
"""

EXAMPLES = r"""
- name: Read the host
  vgpu.fleet.host_state:
    packages: [docker.io, nvidia-smi]
    units: [docker.service, vgpu-device-plugin.service]
  register: host_state
"""

RETURN = r"""
state:
  description: The state of the host.
  returned: always
  type: dict
  contains:
    os:
      description: Distribution, architecture, kernel and Python.
      type: dict
      returned: always
    node:
      description: Name by which a kubelet registers the host unless configured otherwise.
      type: str
      returned: always
    kubelet:
      description: Major and minor version of the host's kubelet, V(null) if it has none.
      type: list
      elements: int
      returned: always
    kubelet_engine:
      description:
        - The engine with which the running kubelet starts containers (C(engine), one of V(docker), V(containerd),
          V(crio), V(k3s), V(rke2), or empty) and its socket (C(endpoint)); V(null) if no kubelet runs.
      type: dict
      returned: always
    oci_runtime:
      description:
        - The engine that starts the host's containers (C(engine)) and its runtime (C(runtime), such as V(runc) or
          V(crun)); each is empty if unknown.
      type: dict
      returned: always
    gpus:
      description: GPUs in NVML's order, as M(vgpu.fleet.gpu_info) returns them.
      type: list
      elements: dict
      returned: always
    nvml:
      description:
        - Whether NVML answers (C(ok)), why not (C(error)), the version of the driver, and the lost GPUs.
      type: dict
      returned: always
    pci_gpus:
      description: NVIDIA's GPUs on the PCI bus, known before a driver is installed.
      type: list
      elements: dict
      returned: always
    memory_mib:
      description: All memory of the host in MiB, V(0) if the kernel does not report it.
      type: int
      returned: always
    nvswitches:
      description: How many NVSwitches the host has.
      type: int
      returned: always
    driver:
      description:
        - Versions of the loaded kernel module and of the module on disk, whether nouveau is loaded, the processes that
          use the driver, Secure Boot, and other installations of a driver on the host.
      type: dict
      returned: always
    packages:
      description:
        - Version of each requested package, V(null) if it is not installed; a pattern adds all matching packages.
      type: dict
      returned: always
    held:
      description: Packages that dpkg holds at their version.
      type: list
      elements: str
      returned: always
    texts:
      description: Text of each requested file, V(null) if it is absent.
      type: dict
      returned: always
    files:
      description: Digest, mode and time of change of each requested file, V(null) if it is absent.
      type: dict
      returned: always
    units:
      description:
        - State of each requested unit, namely whether it is C(present), C(masked), C(enabled), C(active), C(failed),
          whether its file is newer than what systemd read (C(stale)), when it was C(started), and its command line and
          program (C(argv), C(exe)).
      type: dict
      returned: always
    docker:
      description:
        - Text of the configuration file (C(config_text)), the information of the running daemon (C(info)), the names of
          its running containers (C(containers)), and whether docker is a snap, podman's replacement, or rootless for
          some users (C(kinds)).
      type: dict
      returned: always
    containerd:
      description:
        - Text of containerd's file (C(config_text)), and of the collection's file in a folder that it imports
          (C(drop_in_text)).
      type: dict
      returned: always
    vcuda:
      description: Versions of the vGPU library, the versions whose files are complete, and the current version.
      type: dict
      returned: always
    plugin:
      description: Versions of the device plugin, the current version, and the status of the running plugin.
      type: dict
      returned: always
    node_config:
      description: Text of the configuration file of the node.
      type: dict
      returned: always
    mig:
      description: MIG modes, profiles, instances and processes of the GPUs, V(null) if they were not requested.
      type: dict
      returned: always
    records:
      description:
        - Path of each record of former settings in C(/var/lib/vgpu/baseline), and a sentence if it cannot be read, else
          an empty text.
      type: dict
      returned: always
    proof:
      description: Fingerprint of the state for which isolation was last proven, V(null) if it was never proven.
      type: str
      returned: always
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.host.host import Host
from ..module_utils.state import host_state


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "packages": {"type": "list", "elements": "str", "default": []},
            "files": {"type": "list", "elements": "path", "default": []},
            "texts": {"type": "list", "elements": "path", "default": []},
            "units": {"type": "list", "elements": "str", "default": []},
            "docker_config": {"type": "path", "default": "/etc/docker/daemon.json"},
            "node_config": {"type": "path", "default": "/etc/vgpu/node.yaml"},
            "library_root": {"type": "path", "default": "/usr/local/lib/vgpu"},
            "plugin_root": {"type": "path", "default": "/opt/vgpu/plugin"},
            "containerd_config": {"type": "path", "default": "/etc/containerd/config.toml"},
            "mig": {"type": "bool", "default": False},
            "root": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    options = dict(module.params)
    host = Host(options.pop("root"))
    module.exit_json(changed=False, state=host_state.read(host, **options))


if __name__ == "__main__":
    main()
