# SPDX-License-Identifier: Apache-2.0
"""Controller side of vgpu.fleet.vcuda_library, which installs a version of libvgpu.so from an archive. Sends the
archive to a host only if the host does not have that version.
"""

from __future__ import annotations

import os
from hashlib import sha256
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.hashing import secure_hash

MODULE = "vgpu.fleet.vcuda_library"


class ActionModule(ActionBase):
    # False: ansible-core makes no temporary folder on the host in advance, which would cost a remote call. run() makes
    # the folder only if it sends the archive.
    TRANSFERS_FILES = False

    def run(self, tmp: Any = None, task_vars: Any = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        given = arguments.get("source") or []
        sources = [os.path.expanduser(str(one)) for one in (given if isinstance(given, (list, tuple)) else [given])]
        found: dict[str, Any] = self._execute_module(MODULE, arguments, task_vars=task_vars)
        if not (sources and found.get("needs_archive")):
            return found
        paths = [one.replace("{arch}", found["arch"]) for one in sources]
        source = next((path for path in paths if os.path.isfile(path)), None)
        if source is None:
            return {"failed": True, "msg": no_archive(found["arch"], paths)}
        folder = self._connection._shell.tmpdir or self._make_tmp_path()
        place = self._connection._shell.join_path(folder, os.path.basename(source))
        self._transfer_file(source, place)
        self._fixup_perms2((folder, place))
        arguments.update(archive=place, checksum=secure_hash(source, hash_func=sha256))
        return self._execute_module(MODULE, arguments, task_vars=task_vars)


def no_archive(arch: str, paths: list[str]) -> str:
    return (
        f"no archive of libvgpu.so for {arch}: expected one of {', '.join(paths)} on the controller, found none. "
        f"Set vcuda_build_host to a host of {arch} that has make and a C compiler, or vcuda_prebuilt to a folder with "
        "the archive"
    )
