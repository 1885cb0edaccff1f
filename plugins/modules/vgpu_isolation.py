#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: vgpu_isolation
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
version_added: 0.1.0
short_description: Prove that a container cannot exceed its slice of a GPU
description:
  - Leases a free slice from the host's device plugin and runs C(vgpu-probe) in it, with exactly the mounts, files and
    environment of the plugin's reply. Reports a verdict for each check, with the measured figures.
  - The probe is not the only source. The module compares the probe's figures with the size that the plugin reports,
    runs C(nvidia-smi) inside the slice, and reads from the driver on the host how much memory the processes of the
    slice used.
  - The module also tries the bypasses of C(docs/threat-model.md), in checks whose names begin with C(bypass-). A bypass
    that user space cannot prevent runs again until the watcher of the device plugin names it; then its verdict is
    V(detected). Without a watcher its verdict is V(open), with which the module does not fail. The verdict is
    V(violated) for a bypass that the watcher could see and did not name, and for any other bypass that gets memory.
  - C(neighbours) passes if NVML shows only processes and memory of the container. C(graphics) is V(open) and names the
    library if a library of graphics or video can be loaded, because the memory of such a library is not charged. In a
    namespace, these libraries are the host's.
  - The share of the GPU's time is measured while other tenants may run. The check C(share-beside), which runs only if
    O(checks) names it, measures the share while the module runs a tenant in a second slice of the same GPU.
  - The check C(import-beside) leases a second free slice of the same GPU and mounts a folder of this run in both
    slices, as two pods share a volume. The probe in one slice exports memory and a pool by descriptors, and memory by a
    handle of CUDA IPC. The probe in the other slice, which is full, must not get this memory. The exporter must not
    allocate memory again that the other probe keeps on the card. If no second slice is free or no time is left, the
    verdict is V(not-run), with which the module does not fail.
  - If the device plugin reports that the driver itself enforces memory, the module reads the driver's limit of the
    container's control group (C(driver-limit)), starts the container again and reads the limit again
    (C(driver-limit-restart)). While the container waits, the module runs tenants without the library in this group. One
    tenant allocates until the driver refuses (C(driver-refuses)); two tenants do the same in groups below it
    (C(driver-limit-children)); one tenant sets the limit with the container's capabilities (C(driver-limit-root)); one
    tenant allocates memory in the name of an ended process (C(dead-creator)). C(managed-raw) is V(open), with the
    figure, if managed memory on the card is not charged. C(driver-limit-beside) fills the slice while the module reads
    the limit and the account of a second slice. A bypass that got memory is V(violated) if the sum of its group
    exceeded the hard limit.
  - The module always releases the lease. If the module is killed, the lease expires.
extends_documentation_fragment:
  - vgpu.fleet.attributes.info
  - vgpu.fleet.attributes.group
attributes:
  check_mode:
    support: partial
    details: In check mode nothing is leased and nothing is run; the verdict is V(not-run) and the module does not fail.
options:
  per:
    description:
      - Whether one slice of each GPU or one slice of the host is checked.
    type: str
    choices: [gpu, host]
    default: gpu
  uuids:
    description:
      - The only GPUs to check. Empty means all GPUs of the host.
    type: list
    elements: str
    default: []
  checks:
    description:
      - Names of the checks to run. Empty means all.
    type: list
    elements: str
    default: []
  runtime:
    description:
      - Where the probe runs.
      - V(auto) means a container of the first engine of the host that can pass a GPU, in the order docker, containerd,
        podman, else a mount namespace. Docker needs its runtime C(nvidia), containerd the program
        C(nvidia-container-runtime), podman the CDI files of the device plugin.
    type: str
    choices: [auto, docker, podman, containerd, namespace]
    default: auto
  image:
    description:
      - A local image of docker or podman with glibc and C(/bin/sh) for the container. Nothing is ever pulled.
      - If it is empty, and always with containerd, the container's root is made of the host's own files, a shell and
        glibc. This image or folder exists only during the run.
    type: str
    default: ""
  timeout:
    description:
      - Seconds that the probe may take in one slice.
    type: int
    default: 120
  duration:
    description:
      - Seconds that the checks of a slice may take. V(0) means no limit.
      - The checks of the limit itself always run to their end. Bypasses and C(import-beside) are left out, with the
        verdict V(not-run), if they have not begun by then. An open bypass that the watcher had no time to name stays
        V(open). The reason is in RV(results[].checks[].detail), and RV(results[].left_out) has the names of these
        checks.
    type: int
    default: 20
  fail_on:
    description:
      - Verdicts that make the module fail.
    type: list
    elements: str
    choices: [violated, not-run]
    default: [violated, not-run]
  omit_mounts:
    description:
      - Container paths of mounts that are removed from the plugin's reply. This is for tests of the check itself;
        without a mount the verdict must not be V(passed). A path that the reply does not have is refused.
    type: list
    elements: str
    default: []
  environment:
    description:
      - Additional environment variables for the programs in the slice. For tests.
    type: dict
    default: {}
  state:
    description:
      - V(absent) checks nothing. It removes the containers, images and folders that an interrupted check left at the
        engines; a later check does the same. It also removes objects that a former version of this collection left,
        identified by pid and age, if docker runs or podman has a storage.
    type: str
    choices: [present, absent]
    default: present
  vgpuctl:
    description:
      - Path of the program that calls the device plugin.
    type: path
    default: /usr/local/bin/vgpuctl
  socket:
    description:
      - Path of the socket of the device plugin.
    type: path
    default: /run/vgpu/plugin.sock
  docker:
    description:
      - Path of the docker client.
    type: path
    default: /usr/bin/docker
  podman:
    description:
      - Path of podman.
    type: path
    default: /usr/bin/podman
  ctr:
    description:
      - Path of containerd's client.
    type: path
    default: /usr/bin/ctr
  nvidia_runtime:
    description:
      - Path of the runtime that passes GPUs to containers of containerd.
    type: path
    default: /usr/bin/nvidia-container-runtime
  cgroup_root:
    description:
      - Mount point of version 2 of control groups, for limits that the driver itself enforces.
    type: path
    default: /sys/fs/cgroup
  cdi_folders:
    description:
      - Folders of the CDI files that podman reads.
    type: list
    elements: path
    default: [/etc/cdi, /var/run/cdi]
  nvidia_smi:
    description:
      - Name or path of nvidia-smi inside the slice.
    type: str
    default: nvidia-smi
notes:
  - If no slice is free, the verdict is V(not-run), which does not count as passed.
seealso:
  - module: vgpu.fleet.vgpu_capacity_info
"""

EXAMPLES = r"""
- name: Prove the isolation of one slice of each GPU
  vgpu.fleet.vgpu_isolation:

- name: Prove the isolation in a container of a local image, and do not fail if every slice is in use
  vgpu.fleet.vgpu_isolation:
    runtime: docker
    image: localhost/debian:12
    fail_on:
      - violated
"""

RETURN = r"""
verdict:
  description: V(passed) if every check of every slice passed; V(violated) has precedence over V(not-run).
  returned: always
  type: str
  sample: passed
results:
  description: One entry for each requested slice.
  returned: always
  type: list
  elements: dict
  contains:
    uuid:
      description: UUID of the GPU, empty if no slice was free on any GPU.
      type: str
      returned: always
    slice:
      description: Id of the slice.
      type: str
      returned: always
    memory_mib:
      description: Memory of the slice, as the device plugin reports it.
      type: int
      returned: always
    runtime:
      description: V(docker), V(containerd), V(podman) or V(namespace).
      type: str
      returned: always
    image:
      description:
        - Source of the container's root, the name of an image or C(the host's own files); empty in a namespace.
      type: str
      returned: always
    passed_over:
      description: Why the engines with precedence over RV(results[].runtime) were not used.
      type: list
      elements: str
      returned: always
    verdict:
      description: The verdict for this slice.
      type: str
      returned: always
    detail:
      description: Why no check ran, else empty.
      type: str
      returned: always
    seconds:
      description: How long the slice was leased.
      type: float
      returned: always
      sample: 9.7
    left_out:
      description:
        - Names of checks that did not run, or that the watcher had no time to name, because O(duration) had passed.
      type: list
      elements: str
      returned: always
    checks:
      description: The checks with their figures.
      type: list
      elements: dict
      returned: always
      contains:
        name:
          description: Name of the check.
          type: str
          returned: always
        verdict:
          description:
            - V(passed), V(violated) or V(not-run). A bypass that cannot be prevented is V(detected) if the node's
              watcher named it while it ran, and V(open) if no watcher polled. C(graphics) is also V(open) if libraries
              of graphics or video exist.
          type: str
          returned: always
        expected:
          description: The expected value.
          type: str
          returned: always
        found:
          description: The found value.
          type: str
          returned: always
        unit:
          description: Unit of the figures.
          type: str
          returned: always
        detail:
          description: Further explanation of the verdict.
          type: str
          returned: always
        left_out:
          description: Whether the check did not run because the time was over.
          type: bool
          returned: always
    nvidia_smi:
      description: The table of C(nvidia-smi) inside the slice, empty if the program is missing.
      type: str
      returned: always
"""

import os
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import pair as isolation_pair
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import verdicts
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation.check import (
    BadOption,
    Plugin,
    PluginError,
    SliceCheck,
)
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation.engines import RUNTIMES, Engines
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation.leftovers import clean_up, left_behind
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation.runner import RunnerError

NO_FREE_SLICE = 3
# The greatest number of program runs in one slice. Each run may last the full timeout, and the lease must outlast all
# of them; otherwise a pod would get a slice that a check is still filling. The runs: the probe, a run that fills the
# slice, nvidia-smi twice, nvidia-ml-py, the bypasses (ways past the library) that must be prevented, the bypasses that
# may be open (one by one in a small slice), the compute share next to a busy second slice, and the import check. If the
# driver enforces the limit, there are three more runs, but at most one for all open bypasses.
MOST_RUNS = 8 + len(verdicts.MAY_BE_OPEN)


def check_slice(module: AnsibleModule, plugin: Plugin, uuid: str, engines: Engines) -> dict[str, Any]:
    """Leases, checks and releases one slice; ``uuid`` is empty for a slice of any GPU."""
    result: dict[str, Any] = {
        "uuid": uuid,
        "slice": "",
        "memory_mib": 0,
        "runtime": "",
        "image": "",
        "passed_over": [],
        "verdict": verdicts.NOT_RUN,
        "detail": "",
        "seconds": 0.0,
        "left_out": [],
        "checks": [],
        "nvidia_smi": "",
    }
    # The device plugin grants leases of at most 3600 seconds.
    ttl = min(MOST_RUNS * module.params["timeout"] + 60, 3600)
    arguments = ["lease", "--ttl", str(ttl)] + (["--uuid", uuid] if uuid else [])
    try:
        lease = plugin.ask(*arguments)
    except PluginError as fault:
        if fault.rc != NO_FREE_SLICE:
            raise
        return dict(result, detail=str(fault))
    begun = time.monotonic()
    try:
        one = SliceCheck(module.params, plugin, lease, plugin.ask("status"), engines)
        result.update(
            uuid=one.slice["uuid"],
            slice=one.slice["id"],
            memory_mib=one.slice["memory_mib"],
            runtime=one.runner.name,
            image=engines.image,
            passed_over=engines.reasons,
        )
        checks = one.run()
        result.update(left_out=one.left_out, checks=checks, verdict=verdicts.overall(checks), nvidia_smi=one.smi_table)
    except RunnerError as fault:
        engines.heed(fault)
        result.update(detail=str(fault))
    finally:
        try:
            plugin.ask("release", lease["allocation"])
        except PluginError as fault:
            module.warn(f"the lease {lease['allocation']} was not released and will expire: {fault}")
    result["seconds"] = round(time.monotonic() - begun, 1)
    return result


def sentence(result: dict[str, Any]) -> str:
    """Returns one sentence for the operator: why the isolation of a slice is not proven."""
    where = result["slice"] or result["uuid"] or "this host"
    faults = [
        "{name} {verdict}: expected {expected} {unit}, found {found} {detail}".format(**one).replace("  ", " ").strip()
        for one in result["checks"]
        if one["verdict"] == verdicts.VIOLATED
        or (one["verdict"] == verdicts.NOT_RUN and not verdicts.optional(one["name"]))
    ]
    return f"isolation of {where}: {result['verdict']}; {'; '.join(faults) or result['detail']}"


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "per": {"type": "str", "choices": ["gpu", "host"], "default": "gpu"},
            "uuids": {"type": "list", "elements": "str", "default": []},
            "checks": {"type": "list", "elements": "str", "default": []},
            "runtime": {"type": "str", "choices": list(RUNTIMES), "default": "auto"},
            "image": {"type": "str", "default": ""},
            "timeout": {"type": "int", "default": 120},
            "duration": {"type": "int", "default": 20},
            "fail_on": {
                "type": "list",
                "elements": "str",
                "choices": ["violated", "not-run"],
                "default": ["violated", "not-run"],
            },
            "omit_mounts": {"type": "list", "elements": "str", "default": []},
            "environment": {"type": "dict", "default": {}},
            "vgpuctl": {"type": "path", "default": "/usr/local/bin/vgpuctl"},
            "socket": {"type": "path", "default": "/run/vgpu/plugin.sock"},
            "docker": {"type": "path", "default": "/usr/bin/docker"},
            "podman": {"type": "path", "default": "/usr/bin/podman"},
            "ctr": {"type": "path", "default": "/usr/bin/ctr"},
            "nvidia_runtime": {"type": "path", "default": "/usr/bin/nvidia-container-runtime"},
            "cgroup_root": {"type": "path", "default": "/sys/fs/cgroup"},
            "cdi_folders": {"type": "list", "elements": "path", "default": ["/etc/cdi", "/var/run/cdi"]},
            "nvidia_smi": {"type": "str", "default": "nvidia-smi"},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    if module.params["state"] == "absent":
        found, stays = (left_behind(module.params), []) if module.check_mode else clean_up(module.params)
        run_folder = os.path.dirname(module.params["socket"])
        found += isolation_pair.left_behind(run_folder) if module.check_mode else isolation_pair.clean_up(run_folder)
        if stays:
            module.warn(
                f"leftovers of an interrupted check could not be removed: {', '.join(stays)}; does their engine answer?"
            )
        module.exit_json(changed=bool(found), verdict=verdicts.NOT_RUN, results=[])
    if module.check_mode:
        module.exit_json(changed=False, verdict=verdicts.NOT_RUN, results=[])
    if module.params["duration"] < 0:
        module.fail_json(msg=f"duration: expected seconds, or 0 for no bound, found {module.params['duration']}")
    plugin = Plugin(module.params["vgpuctl"], module.params["socket"])
    results: list[dict[str, Any]] = []
    engines = Engines(module.params)
    try:
        known = [one["uuid"] for one in plugin.ask("status")["gpus"]]
        chosen = module.params["uuids"] or known
        strangers = [one for one in chosen if one not in known]
        if strangers:
            module.fail_json(msg=f"the host has no GPU {strangers[0]}; it has {', '.join(known)}")
        if module.params["per"] == "host":
            chosen = module.params["uuids"][:1] or [""]
        results = [check_slice(module, plugin, uuid, engines) for uuid in chosen]
    except (PluginError, BadOption) as fault:
        module.fail_json(msg=str(fault), verdict=verdicts.NOT_RUN, results=results)
    finally:
        engines.close()
    verdict = verdicts.worst([one["verdict"] for one in results])
    answer = {"changed": False, "verdict": verdict, "results": results}
    if verdict in module.params["fail_on"]:
        said = [sentence(one) for one in results if one["verdict"] != verdicts.PASSED]
        module.fail_json(msg="\n".join(said) or "nothing was checked", **answer)
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
