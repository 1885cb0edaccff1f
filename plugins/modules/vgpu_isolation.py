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
  - Leases a free slice from the device plugin of the host, runs C(vgpu-probe) in it with exactly the mounts, the files
    and the environment that the plugin answered, and reports a verdict for each check with the figures it measured.
  - The probe is not trusted alone. The module compares what the probe saw with what the plugin says the slice is,
    asks C(nvidia-smi) inside the slice, and reads on the host, from the driver, how much memory the processes of the
    slice used.
  - The module tries the bypasses of C(docs/threat-model.md) too, checks whose names begin with C(bypass-). One that
    user space cannot prevent runs again until the watcher of the device plugin names it; then its verdict is
    V(detected). Without a watcher it is V(open), which fails nothing. One that the watcher could see and did not name,
    and any other that is granted memory, is V(violated).
  - C(neighbours) passes where NVML shows only processes and memory of the container. C(graphics) is V(open) where a
    library of graphics or video can be loaded, and names it, for its memory is not charged; in a namespace those
    libraries are the host's.
  - The share of the GPU's time is measured while other tenants may run. The check C(share-beside), which runs only
    where O(checks) names it, measures it while a tenant of our own runs in a second slice of that GPU.
  - The check C(import-beside) leases a second free slice of that GPU and mounts a folder of this run in both, as two
    pods share a volume. The probe in one slice exports memory and a pool by descriptors, and memory by a handle of
    CUDA IPC. The probe in the other, whose slice is full, must not get them; nor may the exporter allocate again what
    the other keeps on the card. Where no second slice is free, or no time is left, it is V(not-run), which fails
    nothing.
  - Where the device plugin says that the driver itself enforces memory, the module asks the driver for the limit of the
    container's control group (C(driver-limit)), starts the container again and asks again (C(driver-limit-restart)),
    and puts processes of its own, which no library limits, into that group while the container waits. One takes all
    that it gets (C(driver-refuses)), two do in groups below it (C(driver-limit-children)), one sets the limit with the
    container's capabilities (C(driver-limit-root)), one takes memory in the name of a process that is gone
    (C(dead-creator)). C(managed-raw) is V(open), with the figure, where managed memory came to the card uncharged.
    C(driver-limit-beside) fills the slice while the limit and the account of a second one are read. A bypass that was
    granted memory is V(violated) where the sum of its group passed the hard limit.
  - The module always releases the lease. The lease expires when the module is killed.
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
      - Check these GPUs alone. Empty means all GPUs of the host.
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
      - With V(auto) it is a container of the first engine of the host that can hand a GPU in, docker, containerd or
        podman, else a mount namespace. Docker needs its runtime C(nvidia), containerd the program
        C(nvidia-container-runtime), podman the CDI files of the device plugin.
    type: str
    choices: [auto, docker, podman, containerd, namespace]
    default: auto
  image:
    description:
      - A local image of docker or podman with glibc and C(/bin/sh) for the container. Nothing is ever pulled.
      - Where it is empty, and always with containerd, the container is of the host's own files, a shell and glibc. The
        image, or the folder, of them is made for the run and removed with it.
    type: str
    default: ""
  timeout:
    description:
      - Seconds that the probe may take in one slice.
    type: int
    default: 120
  duration:
    description:
      - Seconds that a slice may take, and with them a GPU. V(0) is no bound.
      - The checks of the limit itself are always run to their end. Bypasses, and C(import-beside), that
        have not begun by then are left out with the verdict V(not-run); what is open and could no longer be shown to
        the watcher stays V(open). Both say so in their RV(results[].checks[].detail), and RV(results[].left_out) names
        them.
    type: int
    default: 20
  fail_on:
    description:
      - Verdicts with which the module fails.
    type: list
    elements: str
    choices: [violated, not-run]
    default: [violated, not-run]
  omit_mounts:
    description:
      - Container paths of mounts that are left out of the answer of the plugin. For tests of the check itself; with any
        of them left out the verdict must not be V(passed). A path that the answer does not have is refused.
    type: list
    elements: str
    default: []
  environment:
    description:
      - More environment for the programs in the slice. For tests.
    type: dict
    default: {}
  state:
    description:
      - With V(absent) nothing is checked. What a killed check left at the engines, its containers, its image
        and its folders, is removed. A later check does the same. What a former version of this collection left is
        removed too, by its pid and its age, where docker runs and where podman has a storage.
    type: str
    choices: [present, absent]
    default: present
  vgpuctl:
    description:
      - Path of the program that talks to the device plugin.
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
      - Path of the runtime that hands GPUs to containers of containerd.
    type: path
    default: /usr/bin/nvidia-container-runtime
  cgroup_root:
    description:
      - Where version 2 of control groups is mounted, for limits that the driver itself enforces.
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
  - No free slice gives the verdict V(not-run), which is not a pass.
seealso:
  - module: vgpu.fleet.vgpu_capacity_info
"""

EXAMPLES = r"""
- name: Prove the isolation of one slice of each GPU
  vgpu.fleet.vgpu_isolation:

- name: Prove it in a container of a local image, and go on where every slice is busy
  vgpu.fleet.vgpu_isolation:
    runtime: docker
    image: localhost/debian:12
    fail_on:
      - violated
"""

RETURN = r"""
verdict:
  description: V(passed) where every check of every slice passed; V(violated) beats V(not-run).
  returned: always
  type: str
  sample: passed
results:
  description: One entry for each slice that was asked for.
  returned: always
  type: list
  elements: dict
  contains:
    uuid:
      description: UUID of the GPU, empty where no slice was free on any GPU.
      type: str
      returned: always
    slice:
      description: Id of the slice.
      type: str
      returned: always
    memory_mib:
      description: Memory of the slice by the device plugin.
      type: int
      returned: always
    runtime:
      description: V(docker), V(containerd), V(podman) or V(namespace).
      type: str
      returned: always
    image:
      description: What the container was of, the name of an image or C(the host's own files); empty in a namespace.
      type: str
      returned: always
    passed_over:
      description: Why the engines that come before RV(results[].runtime) were not taken.
      type: list
      elements: str
      returned: always
    verdict:
      description: The verdict for this slice.
      type: str
      returned: always
    detail:
      description: Why nothing was run, else empty.
      type: str
      returned: always
    seconds:
      description: How long the slice was leased.
      type: float
      returned: always
      sample: 9.7
    left_out:
      description: Names of checks that were not tried, or not shown to the watcher, because O(duration) had passed.
      type: list
      elements: str
      returned: always
    checks:
      description: Every check with its figures.
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
            - V(passed), V(violated) or V(not-run). A bypass that cannot be prevented is V(detected) where the watcher
              of the node named it while it ran, and V(open) where no watcher polled. C(graphics) is V(open) too, where
              libraries of graphics or video are there.
          type: str
          returned: always
        expected:
          description: What must be found.
          type: str
          returned: always
        found:
          description: What was found.
          type: str
          returned: always
        unit:
          description: Unit of the figures.
          type: str
          returned: always
        detail:
          description: What a person needs to understand the verdict.
          type: str
          returned: always
        left_out:
          description: Whether it was not run for want of time.
          type: bool
          returned: always
    nvidia_smi:
      description: The table of C(nvidia-smi) inside the slice, empty where it is not there.
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
# Most runs in one slice, each of which may last the full timeout: the probe, a fill, nvidia-smi twice, nvidia-ml-py,
# the bypasses that must be prevented, the open bypasses (one by one in a small slice), the share next to another
# tenant, the import check. If the driver enforces the limit, there are three more runs but at most one for all open
# bypasses. The lease must outlast all runs: otherwise a pod would get a slice that a check is still filling.
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
            module.warn(f"the lease {lease['allocation']} was not given back and will end by itself: {fault}")
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
            module.warn(f"what a killed check left could not be removed: {', '.join(stays)}; does its engine answer?")
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
