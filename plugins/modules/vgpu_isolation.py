#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: vgpu_isolation
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
version_added: 0.1.0
short_description: Prove that a slice of a GPU cannot be exceeded
description:
  - Leases a free slice from the device plugin of the host, runs C(vgpu-probe) in it with exactly the mounts, the files
    and the environment that the plugin answered, and reports a verdict for each check with the figures it measured.
  - The probe is not the only witness. The module compares what the probe saw with what the plugin says the slice is,
    asks C(nvidia-smi) inside the slice, and reads on the host, from the driver, how much memory the processes of the
    slice held.
  - The ways round the library of C(docs/threat-model.md) are tried too, checks whose names begin with C(bypass-). One
    that user space cannot stop is gone once more and held until the watcher of the device plugin names it, then its
    verdict is V(detected). Where no watcher can look it is V(open), which fails nothing. One that the watcher looks at
    and does not name, and any other that is granted memory, is V(violated).
  - The lease is given back in any case. It ends by itself when the module is killed.
attributes:
  check_mode:
    support: partial
    description: Can run in check mode and return changed status prediction without modifying target.
    details:
      - In check mode nothing is leased and nothing is run; the verdict is V(not-run) and the module does not fail.
  diff_mode:
    support: none
    description: Will return details on what has changed (or possibly needs changing in check mode), when in diff mode.
    details:
      - The module changes nothing.
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
      - With V(auto) it is a container of O(image) where docker has that image, else a mount namespace.
    type: str
    choices: [auto, docker, namespace]
    default: auto
  image:
    description:
      - A local image with glibc and C(/bin/sh) for the container. Nothing is ever pulled.
    type: str
    default: ""
  timeout:
    description:
      - Seconds that the probe may take in one slice.
    type: int
    default: 120
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
        of them left out the verdict must not be V(held). A path that the answer does not have is refused.
    type: list
    elements: str
    default: []
  environment:
    description:
      - More environment for the programs in the slice. For tests.
    type: dict
    default: {}
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
  description: V(held) where every check of every slice held; V(violated) beats V(not-run).
  returned: always
  type: str
  sample: held
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
      description: V(docker) or V(namespace).
      type: str
      returned: always
    verdict:
      description: The verdict for this slice.
      type: str
      returned: always
    detail:
      description: Why nothing was run, else empty.
      type: str
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
            - V(held), V(violated), V(not-run) or, of a way round that cannot be stopped, V(detected) where the watcher
              of the node named it while it was gone, V(open) where no watcher looked.
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
    nvidia_smi:
      description: The table of C(nvidia-smi) inside the slice, empty where it is not there.
      type: str
      returned: always
"""

import json
import os
import subprocess
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.vgpu.fleet.plugins.module_utils import isolation, slice_outside, slice_watch
from ansible_collections.vgpu.fleet.plugins.module_utils.mount_namespace import Mount
from ansible_collections.vgpu.fleet.plugins.module_utils.slice_runner import (
    DockerRunner,
    NamespaceRunner,
    RunnerError,
    docker_at_hand,
)

LIBRARY = "/usr/local/lib/vgpu/libvgpu.so"
# Where the probe appears in the slice; no workload ever gets it.
PROBE = "/usr/local/lib/vgpu/vgpu-probe"
NO_FREE_SLICE = 3
# A fill that is held so long is hit by a look also on a busy host, where looks come seconds apart.
HOLD_MS = 3000
# What is read of the answers of vgpuctl.
KEYS = {
    "status": frozenset(("gpus", "slices")),
    "watch": frozenset(("findings", "looks", "looks_to_name", "interval_s", "fault")),
    "lease": frozenset(("allocation", "ids", "envs", "mounts", "devices", "cdi_devices")),
}
QUERY = ["--query-gpu=uuid,memory.total", "--format=csv,noheader,nounits"]


class PluginError(Exception):
    """The device plugin did not do what was asked; ``rc`` is the exit status of vgpuctl."""

    def __init__(self, rc: int, message: str) -> None:
        self.rc = rc
        super().__init__(message)


class Plugin:
    """The device plugin of this host, through vgpuctl."""

    def __init__(self, program: str, socket: str) -> None:
        self._command = [program, "--socket", socket]

    def ask(self, *arguments: str) -> dict[str, Any]:
        try:
            done = subprocess.run(
                [*self._command, *arguments, "--json"], capture_output=True, text=True, timeout=60, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as fault:
            raise PluginError(
                1, f"{self._command[0]} {arguments[0]}: {fault}; the role device_plugin installs it"
            ) from None
        if done.returncode != 0:
            raise PluginError(
                done.returncode, done.stderr.strip() or f"vgpuctl {arguments[0]} ended with {done.returncode}"
            )
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or not KEYS.get(arguments[0], frozenset()) <= set(answer):
            said = " ".join((done.stdout + " " + done.stderr).split())[:200] or "nothing"
            raise PluginError(
                1, f"{self._command[0]} {arguments[0]} answered {said}, expected a JSON object; is it vgpuctl?"
            )
        return answer


class BadOption(Exception):
    """An option asks for what is not there."""


class SliceCheck:
    """One leased slice, looked at from all sides."""

    def __init__(self, module: AnsibleModule, plugin: Plugin, lease: dict[str, Any], status: dict[str, Any]) -> None:
        self._plugin = plugin
        self._params = module.params
        self._lease = lease
        self.slice = next(one for one in status["slices"] if one["id"] == lease["ids"][0])
        gpu = next(one for one in status["gpus"] if one["uuid"] == self.slice["uuid"])
        self._minors = [gpu["minor"]]
        self._expected = isolation.Expected(self.slice["uuid"], self.slice["memory_mib"])
        every = [Mount(one["container_path"], one["host_path"], one["read_only"]) for one in lease["mounts"]]
        # A mount of /dev/null is a word to the NVIDIA runtime, which names a GPU, and no file for the process.
        self._promised = [one for one in every if one.host_path != "/dev/null"]
        self._words = [one for one in every if one.host_path == "/dev/null"]
        paths = [one.container_path for one in self._promised]
        strangers = [one for one in self._params["omit_mounts"] if one not in paths]
        if strangers:
            raise BadOption(
                f"omit_mounts: {', '.join(strangers)} is not mounted; the plugin's answer has {', '.join(paths)}"
            )
        self._mounts = [one for one in self._promised if one.container_path not in self._params["omit_mounts"]]
        self.runner = self._choose_runner()
        self.smi_table = ""

    def _choose_runner(self) -> Any:
        params = self._params
        environment = dict(self._lease["envs"], **{name: str(value) for name, value in params["environment"].items()})
        reason = docker_at_hand(params["docker"], params["image"]) if params["runtime"] != "namespace" else "not wanted"
        if params["runtime"] == "docker" and reason:
            raise RunnerError(f"runtime: docker is asked for, and {reason}")
        mounts = [*self._mounts, self._probe_mount()]
        if reason:
            return NamespaceRunner(mounts, self._minors, environment)
        lease = self._lease
        mounts += self._words
        return DockerRunner(
            params["docker"], params["image"], mounts, environment, lease["devices"], lease["cdi_devices"]
        )

    def _probe_mount(self) -> Mount:
        folders = [os.path.dirname(one.host_path) for one in self._promised if one.container_path == LIBRARY]
        if not folders:
            raise RunnerError(f"the answer of the plugin mounts no {LIBRARY}; the GPU is not shared by vcuda")
        return Mount(PROBE, os.path.join(folders[0], os.path.basename(PROBE)), True)

    def run(self) -> list[dict[str, Any]]:
        asked = [name for name in self._params["checks"] if name not in isolation.OWN]
        ways = [name for name in asked if name.startswith(isolation.BYPASS)]
        wanted = [name for name in asked if name not in ways] or (["totals"] if ways else list(isolation.PROBE_CHECKS))
        checks = self._run_probe(wanted)
        checks += self._try_ways_round(ways if asked else list(isolation.PROBE_BYPASSES))
        checks.append(self._run_nvidia_smi())
        named = self._params["checks"]
        return [one for one in checks if not named or one["name"] in [*named, "probe"]]

    def _run_probe(self, wanted: list[str]) -> list[dict[str, Any]]:
        seen: dict[str, Any] = {"missing": None}
        watch = slice_outside.watch(self._expected.uuid)

        def before_start(pid: int) -> None:
            seen["missing"] = slice_outside.missing_mounts(pid, self._promised)

        def while_running(pid: int) -> None:
            if watch is not None:
                watch.look(pid)

        # The lease is long enough for one more run of the probe after this.
        deadline = time.monotonic() + self._params["timeout"]
        argv = [PROBE, "--json", "--checks", ",".join(wanted)]
        outcome = self.runner.run(argv, float(self._params["timeout"]), before_start, while_running)
        checks = [isolation.of_mounts(seen["missing"], [one.container_path for one in self._promised])]
        checks += isolation.of_probe(outcome.rc, outcome.out, outcome.err, outcome.timed_out, self._expected, wanted)
        filled = isolation.filled(checks)
        if watch is None:
            checks.append(isolation.of_outside(None, 0, "the host has no libnvidia-ml.so.1", self._expected, filled))
        else:
            checks += self._fill_until_seen(watch, filled, while_running, deadline)
            watch.close()
            checks.append(isolation.of_outside(watch.most_bytes, watch.looks, watch.fault, self._expected, filled))
        return checks

    def _fill_until_seen(self, watch: Any, filled: int, look: Any, deadline: float) -> list[dict[str, Any]]:
        """Fills the slice once more and holds it, where no look hit a fill: one may be over between two looks. Answers
        what that fill found violated.
        """
        blind = watch.most_bytes is None or not filled
        if blind or isolation.seen(watch.most_bytes, filled) or time.monotonic() > deadline:
            return []
        names = isolation.FILLS[:1]
        argv = [PROBE, "--json", "--checks", ",".join(names), "--hold", str(HOLD_MS)]
        outcome = self.runner.run(argv, float(self._params["timeout"]), while_running=look)
        checks = isolation.of_probe(outcome.rc, outcome.out, outcome.err, outcome.timed_out, self._expected, names)
        return [one for one in checks if one["verdict"] == isolation.VIOLATED]

    def _try_ways_round(self, ways: list[str]) -> list[dict[str, Any]]:
        if not ways:
            return []
        argv = [PROBE, "--json", "--checks", ",".join(ways)]
        outcome = self.runner.run(argv, float(self._params["timeout"]))
        checks = isolation.of_probe(outcome.rc, outcome.out, outcome.err, outcome.timed_out, self._expected, ways)
        mine = [one for one in checks if one["name"] in ways or one["name"] == "probe"]
        return [self._watch(one) if one["verdict"] == isolation.OPEN else one for one in mine]

    def _watch(self, one: dict[str, Any]) -> dict[str, Any]:
        """Goes a way round that is open once more, and holds what it gets until the node's watcher names it."""
        witness = slice_watch.Witness(self._ask_watcher, self._lease["allocation"])
        if witness.absent:
            return isolation.of_watcher(one, None, 0, 1, witness.absent)
        argv = [PROBE, "--json", "--checks", one["name"], "--hold", str(int(witness.hold_s * 1000))]
        try:
            self.runner.run(argv, float(self._params["timeout"]), while_running=witness.look)
        except slice_watch.Named as named:
            return isolation.of_watcher(one, named.seconds, witness.looks, witness.needed, "", named.text)
        return isolation.of_watcher(one, None, witness.looks, witness.needed, witness.fault)

    def _ask_watcher(self) -> dict[str, Any] | None:
        try:
            return self._plugin.ask("watch")
        except PluginError:
            return None

    def _run_nvidia_smi(self) -> dict[str, Any]:
        program = self._params["nvidia_smi"]
        outcome = self.runner.run([program, *QUERY], float(self._params["timeout"]))
        if outcome.rc == 0:
            self.smi_table = self.runner.run([program], float(self._params["timeout"])).out
        return isolation.of_nvidia_smi(outcome.rc, outcome.out, outcome.err, self._expected)


def check_slice(module: AnsibleModule, plugin: Plugin, uuid: str) -> dict[str, Any]:
    """Leases, checks and releases one slice; ``uuid`` is empty for a slice of any GPU."""
    result: dict[str, Any] = {
        "uuid": uuid,
        "slice": "",
        "memory_mib": 0,
        "runtime": "",
        "verdict": isolation.NOT_RUN,
        "detail": "",
        "checks": [],
        "nvidia_smi": "",
    }
    # The probe, a fill and ways round that are held, and nvidia-smi twice; 3600 is the plugin's longest.
    ttl = min(5 * module.params["timeout"] + 60, 3600)
    arguments = ["lease", "--ttl", str(ttl)] + (["--uuid", uuid] if uuid else [])
    try:
        lease = plugin.ask(*arguments)
    except PluginError as fault:
        if fault.rc != NO_FREE_SLICE:
            raise
        return dict(result, detail=str(fault))
    try:
        one = SliceCheck(module, plugin, lease, plugin.ask("status"))
        result.update(
            uuid=one.slice["uuid"], slice=one.slice["id"], memory_mib=one.slice["memory_mib"], runtime=one.runner.name
        )
        checks = one.run()
        result.update(checks=checks, verdict=isolation.overall(checks), nvidia_smi=one.smi_table)
    except RunnerError as fault:
        result.update(detail=str(fault))
    finally:
        try:
            plugin.ask("release", lease["allocation"])
        except PluginError as fault:
            module.warn(f"the lease {lease['allocation']} was not given back and will end by itself: {fault}")
    return result


def sentence(result: dict[str, Any]) -> str:
    """What a person needs of a slice that is not proven."""
    where = result["slice"] or result["uuid"] or "this host"
    faults = [
        "{name} {verdict}: expected {expected} {unit}, found {found} {detail}".format(**one).replace("  ", " ").strip()
        for one in result["checks"]
        if one["verdict"] == isolation.VIOLATED
        or (one["verdict"] == isolation.NOT_RUN and not isolation.optional(one["name"]))
    ]
    return f"isolation of {where}: {result['verdict']}; {'; '.join(faults) or result['detail']}"


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "per": {"type": "str", "choices": ["gpu", "host"], "default": "gpu"},
            "uuids": {"type": "list", "elements": "str", "default": []},
            "checks": {"type": "list", "elements": "str", "default": []},
            "runtime": {"type": "str", "choices": ["auto", "docker", "namespace"], "default": "auto"},
            "image": {"type": "str", "default": ""},
            "timeout": {"type": "int", "default": 120},
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
            "nvidia_smi": {"type": "str", "default": "nvidia-smi"},
        },
        supports_check_mode=True,
    )
    if module.check_mode:
        module.exit_json(changed=False, verdict=isolation.NOT_RUN, results=[])
    plugin = Plugin(module.params["vgpuctl"], module.params["socket"])
    results: list[dict[str, Any]] = []
    try:
        known = [one["uuid"] for one in plugin.ask("status")["gpus"]]
        chosen = module.params["uuids"] or known
        strangers = [one for one in chosen if one not in known]
        if strangers:
            module.fail_json(msg=f"the host has no GPU {strangers[0]}; it has {', '.join(known)}")
        if module.params["per"] == "host":
            chosen = module.params["uuids"][:1] or [""]
        results = [check_slice(module, plugin, uuid) for uuid in chosen]
    except (PluginError, BadOption) as fault:
        module.fail_json(msg=str(fault), verdict=isolation.NOT_RUN, results=results)
    verdict = isolation.worst([one["verdict"] for one in results])
    answer = {"changed": False, "verdict": verdict, "results": results}
    if verdict in module.params["fail_on"]:
        said = [sentence(one) for one in results if one["verdict"] != isolation.HELD]
        module.fail_json(msg="\n".join(said) or "nothing was checked", **answer)
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
