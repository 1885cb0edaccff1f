#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: docker_daemon
short_description: Manage keys in daemon.json and reload dockerd
version_added: 0.1.0
description:
  - Merges keys into C(daemon.json). All other keys keep their text, order and indentation; owner, mode and a symbolic
    link stay.
  - A file that is not valid JSON is never touched; the error names line and column.
  - The new text is checked first, by the module and, if the daemon supports it, by C(dockerd --validate).
  - The running daemon is reloaded by SIGHUP if that is enough, else restarted, and must then show the new values. If it
    does not, the module restores the former file, makes the daemon apply it, and fails.
  - The next run repairs a run that was interrupted between the write and the reload, even if the file is already as
    desired.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes
  - vgpu.fleet.attributes.group
attributes:
  diff_mode:
    details: Shows the text of the file before and after.
options:
  path:
    description: The file.
    type: path
    default: /etc/docker/daemon.json
  settings:
    description:
      - The keys to set. Objects are merged key by key, every other value is replaced.
      - With a O(record), a key that an earlier run set and that is no longer among the keys gets its former value
        again, unless another user has changed it.
      - With O(state=absent), the keys to remove if they still have this value.
    type: dict
    default: {}
  remove:
    description:
      - Keys to remove, whatever their value. A string names a top-level key; a list of strings is the path to a nested
        key.
    type: list
    elements: raw
    default: []
  state:
    description:
      - V(absent) reverts V(present). With a O(record), the former file is restored byte for byte if no other user has
        changed the file since; a file that did not exist is removed. Keys that other users have changed stay unchanged.
    type: str
    choices: [present, absent]
    default: present
  record:
    description: File that records the former values. Without it, O(state=absent) does not restore them.
    type: path
  validate:
    description: Whether to also run C(dockerd --validate), if this daemon supports it.
    type: bool
    default: true
  backup:
    description: Whether to keep a dated copy of the file next to it before it is changed.
    type: bool
    default: false
  apply:
    description:
      - V(auto) makes the running daemon apply the file. It starts an installed daemon that does not run, and enables a
        daemon that would not start at boot.
      - V(none) only writes the file.
    type: str
    choices: [auto, none]
    default: auto
  restart:
    description:
      - What to do if a reload is not enough.
      - V(if_idle) restarts if no container runs or C(live-restore) keeps the containers alive, and otherwise fails
        before anything is written; V(always) restarts; V(never) fails before anything is written.
    type: str
    choices: [if_idle, always, never]
    default: if_idle
  planned_programs:
    description:
      - Programs that an earlier task of the same run installs.
      - In check mode, where that task installed nothing, the module does not warn that such a program is missing.
        Otherwise the option has no effect.
    type: list
    elements: path
    default: []
  service:
    description: The daemon's systemd service.
    type: str
    default: docker
  timeout:
    description: Seconds to wait until the daemon shows the new values.
    type: int
    default: 60
"""

EXAMPLES = r"""
- name: Make NVIDIA's runtime the default of docker
  vgpu.fleet.docker_daemon:
    settings:
      default-runtime: nvidia
      default-shm-size: 2G
      runtimes:
        nvidia:
          path: /usr/bin/nvidia-container-runtime
    record: /var/lib/vgpu/baseline/daemon.json

- name: Restore the former configuration of docker
  vgpu.fleet.docker_daemon:
    state: absent
    record: /var/lib/vgpu/baseline/daemon.json
"""

RETURN = r"""
plan:
  description: The changes that were made, or would be made in check mode, in sentences.
  type: list
  elements: str
  returned: always
changes:
  description: All changed keys.
  type: list
  elements: dict
  returned: always
  contains:
    path:
      description: The path to the key.
      type: list
      elements: str
    action:
      description: One of V(add), V(change), V(remove).
      type: str
    before:
      description: The value before.
      type: raw
    after:
      description: The value after.
      type: raw
    apply:
      description: How a running daemon applies the change, V(reload) or V(restart).
      type: str
applied:
  description: The action on the daemon, done or predicted; V(none), V(reload), V(restart) or V(start).
  type: str
  returned: always
restart_keys:
  description: The keys that needed a restart.
  type: list
  elements: str
  returned: always
running_containers:
  description: The containers that ran when the daemon was about to be restarted.
  type: list
  elements: str
  returned: always
backup_file:
  description: The dated copy.
  type: str
  returned: when O(backup=true) and the file was changed
line:
  description: The line of the fault in the file, counted from 1.
  type: int
  returned: when the file is not valid JSON
column:
  description: The column of the fault in the file, counted from 1.
  type: int
  returned: when the file is not valid JSON
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.engines import daemon_json
from ..module_utils.engines.daemon_apply import Applier, ApplyError, Options
from ..module_utils.engines.docker_host import DockerHost, DockerHostError
from ..module_utils.host.files import read_bytes


def removals(module: AnsibleModule) -> list[tuple[str, ...]]:
    """Returns the key paths of the option ``remove`` as tuples; fails the module on an item that is no key path."""
    paths = []
    for item in module.params["remove"]:
        path = (item,) if isinstance(item, str) else tuple(item) if isinstance(item, list) else ()
        if not path or not all(isinstance(key, str) and key for key in path):
            module.fail_json(msg=f"remove: expected a key or a list of keys, found {item!r}")
        paths.append(path)
    return paths


def socket_of(path: str, argv: list[str]) -> str:
    return daemon_json.socket_of(daemon_json.decode(read_bytes(path)), argv)


def result_of(applier: Applier) -> dict[str, Any]:
    return {
        "changed": applier.before != applier.after or applier.applied != "none" or applier.enable,
        "plan": applier.plan(),
        "changes": [{**change._asdict(), "path": list(change.path)} for change in applier.changes],
        "applied": applier.applied,
        "restart_keys": applier.restart_keys,
        "running_containers": applier.containers,
        "diff": {
            "before_header": applier.options.path,
            "after_header": applier.options.path,
            "before": applier.before or "",
            "after": applier.after or "",
        },
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "default": "/etc/docker/daemon.json"},
            "settings": {"type": "dict", "default": {}},
            "remove": {"type": "list", "elements": "raw", "default": []},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "record": {"type": "path"},
            "validate": {"type": "bool", "default": True},
            "backup": {"type": "bool", "default": False},
            "apply": {"type": "str", "choices": ["auto", "none"], "default": "auto"},
            "restart": {"type": "str", "choices": ["if_idle", "always", "never"], "default": "if_idle"},
            "planned_programs": {"type": "list", "elements": "path", "default": []},
            "service": {"type": "str", "default": "docker"},
            "timeout": {"type": "int", "default": 60},
        },
        supports_check_mode=True,
    )
    options = Options(
        path=module.params["path"],
        settings=module.params["settings"],
        remove=removals(module),
        absent=module.params["state"] == "absent",
        record=module.params["record"],
        validate=module.params["validate"],
        touch_daemon=module.params["apply"] == "auto",
        restart=module.params["restart"],
        timeout=float(module.params["timeout"]),
        check_mode=module.check_mode,
        planned_programs=module.params["planned_programs"],
    )
    applier = Applier(options, DockerHost(module.params["service"], lambda argv: socket_of(options.path, argv)))
    extra: dict[str, Any] = {}
    try:
        applier.prepare()
        if not module.check_mode:
            if module.params["backup"] and applier.changes and applier.before is not None:
                extra["backup_file"] = module.backup_local(applier.target)
            applier.carry_out()
    except daemon_json.DaemonJsonError as fault:
        module.fail_json(msg=f"{options.path}: {fault}", line=fault.line, column=fault.column)
    except (ApplyError, DockerHostError, OSError) as fault:
        module.fail_json(msg=f"{options.path}: {fault}", restored=applier.restored, **extra)
    for warning in applier.warnings:
        module.warn(warning)
    module.exit_json(**result_of(applier), **extra)


if __name__ == "__main__":
    main()
