# SPDX-License-Identifier: Apache-2.0
"""A connection plugin that needs no host: it finds the name of the module that Ansible sends and returns the module's
result from a table.

The controller works as usual up to the connection: templates, the build of the module's archive, the worker.
``VGPU_TABLE`` names a JSON file: ``{kind-group: {module: answer}}``, with the kinds of tests/doubles/fleet.py.
``VGPU_TABLE_NOTES`` is a folder where a changed host writes a file with its name; from then on its kind is ``done``.
"""

from __future__ import annotations

import json
import os
import re

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.connection import ConnectionBase

DOCUMENTATION = """
    name: table
    short_description: answer modules from a table
    description: see the module text
    extends_documentation_fragment:
        - connection_pipelining
    options:
        host_kind:
            description: Which part of the table answers for this host.
            default: done
            vars:
                - name: table_kind
        host_group:
            description: Group of the host, the other part of the name of its table.
            default: ""
            vars:
                - name: table_group
        dies_at:
            description: Name of the module at which the host stops to answer, for good.
            default: ""
            vars:
                - name: table_dies_at
"""

# The module's name in the wrapper of its archive. Each release of ansible-core writes the name in another form.
MODULE = re.compile(rb"""(?:ansible_module|_module_name|module_name)\s*=\s*['"]([\w.]+)['"]|AnsiballZ_(\w+)\.py""")
# If the module ``command`` runs one of these programs, the table has a separate result for the program.
PROGRAMS = ("vgpuctl", "wheelhouse")
# A host of this kind still fails the isolation check after the upgrade.
FAILING = "unproven"
# After a run of this module the host counts as being in the desired state.
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
        if not found:  # a command of Ansible that creates a folder or sets a mode, without a module
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
