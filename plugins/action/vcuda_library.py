# SPDX-License-Identifier: Apache-2.0
"""Controller side of vgpu.fleet.vcuda_library: sends the archive only to a host that lacks the version."""

from __future__ import annotations

import os
from hashlib import sha256
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.hashing import secure_hash

MODULE = "vgpu.fleet.vcuda_library"


class ActionModule(ActionBase):
    # A folder on the host is made only where the archive is sent.
    TRANSFERS_FILES = False

    def run(self, tmp: Any = None, task_vars: Any = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        source = arguments.get("source")
        found: dict[str, Any] = self._execute_module(MODULE, arguments, task_vars=task_vars)
        if not (source and found.get("needs_archive")):
            return found
        if not os.path.isfile(source):
            return {"failed": True, "msg": f"{source}: no such archive on the controller; the task build makes it"}
        folder = self._connection._shell.tmpdir or self._make_tmp_path()
        place = self._connection._shell.join_path(folder, os.path.basename(source))
        self._transfer_file(source, place)
        self._fixup_perms2((folder, place))
        arguments.update(archive=place, checksum=secure_hash(source, hash_func=sha256))
        return self._execute_module(MODULE, arguments, task_vars=task_vars)
