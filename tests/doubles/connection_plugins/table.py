# SPDX-License-Identifier: Apache-2.0
"""A connection plugin that simulates a host: it reads which module Ansible sends and returns a result from a table.

Everything before the connection is real: templates, the build of the module's archive, the worker process.
``VGPU_TABLE`` names the table, a JSON file: ``{"<kind>-<group>": {"<module>": <result>}}``; tests/doubles/fleet.py has
the kinds of hosts. ``VGPU_TABLE_NOTES`` names a folder. When a play has changed a host, the plugin writes a file with
the host's name there; from then on the kind of this host is ``done``.
"""

from __future__ import annotations

import json
import os
import re

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.connection import ConnectionBase

DOCUMENTATION = """
    name: table
    short_description: returns results of modules from a table
    description: The text at the top of this file describes the plugin.
    extends_documentation_fragment:
        - connection_pipelining
    options:
        host_kind:
            description: Kind of the host. The table is searched for the key KIND-GROUP.
            default: done
            vars:
                - name: table_kind
        host_group:
            description: Group of the host, the second part of that key.
            default: ""
            vars:
                - name: table_group
        dies_at:
            description: Name of a module. From its first run on, no connection to the host succeeds.
            default: ""
            vars:
                - name: table_dies_at
"""

# The module's name in the wrapper of its archive. The form of the name differs between releases of ansible-core.
MODULE = re.compile(rb"""(?:ansible_module|_module_name|module_name)\s*=\s*['"]([\w.]+)['"]|AnsiballZ_(\w+)\.py""")
# If the module ``command`` runs one of these programs, the table has a separate result for the program.
PROGRAMS = ("vgpuctl", "wheelhouse")
# A host of this kind fails the isolation check, which tries to exceed the limits, even after the upgrade. So it never
# becomes ``done``.
FAILING = "unproven"
# After a run of this module the kind of the host is ``done``.
LAST = "systemd_service"


class Connection(ConnectionBase):
    transport = "table"
    has_pipelining = True

    def _connect(self):
        self._connected = True
        return self

    def close(self) -> None:
        self._connected = False

    def exec_command(self, cmd, in_data=None, sudoable=True):
        super().exec_command(cmd, in_data=in_data, sudoable=sudoable)
        sent = in_data or cmd.encode()
        found = MODULE.search(sent)
        if not found:  # A command of Ansible itself, not a module: it creates a folder or sets a mode.
            return 0, b"/tmp/table\n", b""
        module = next(word for word in found.groups() if word).decode().rpartition(".")[2]
        program = next((word for word in PROGRAMS if module == "command" and word.encode() in sent), "")
        return 0, json.dumps(self._answer(module, f"command {program}" if program else module)).encode(), b""

    def _answer(self, module: str, key: str) -> dict:
        host = str(self._play_context.remote_addr)
        note = os.path.join(os.environ["VGPU_TABLE_NOTES"], host)
        if self.get_option("dies_at") == module or os.path.exists(note + ".dead"):
            with open(note + ".dead", "w", encoding="utf-8"):
                raise AnsibleConnectionFailure(f"{host} is down")
        kind = "done" if os.path.exists(note) else self.get_option("host_kind")
        with open(os.environ["VGPU_TABLE"], encoding="utf-8") as stream:
            answers = json.load(stream).get(f"{kind}-{self.get_option('host_group')}", {})
        if module == LAST and kind != FAILING:
            with open(note, "w", encoding="utf-8"):
                pass
        return answers.get(key, {"changed": True})

    def put_file(self, in_path, out_path) -> None:
        super().put_file(in_path, out_path)

    def fetch_file(self, in_path, out_path) -> None:
        super().fetch_file(in_path, out_path)
