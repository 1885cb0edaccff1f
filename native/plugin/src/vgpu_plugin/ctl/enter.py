# SPDX-License-Identifier: Apache-2.0
"""Runs a program in a slice (part of a GPU), in a mount namespace of its own. This is the second half of ``vgpuctl
exec``. It is a separate process, because the threads of gRPC do not survive a fork. It gets the mounts as an argument,
because standard input belongs to the terminal.
"""

from __future__ import annotations

import json
import os
import sys

from .._shared.host.mount_namespace import Mount, Namespace, NamespaceError, gpu_nodes


def main() -> int:
    wanted = json.loads(sys.argv[1])
    command = sys.argv[2:]
    folder = os.getcwd()
    try:
        namespace = Namespace()
        namespace.enter()
        namespace.lay_out([Mount(*one) for one in wanted["mounts"]], gpu_nodes(wanted["minors"]))
        os.chdir(folder)
    except (NamespaceError, OSError) as fault:
        print(f"vgpuctl: the files of the slice cannot be mounted: {fault}", file=sys.stderr)
        return 126
    try:
        os.execvpe(command[0], command, {**os.environ, **wanted["envs"]})
    except OSError as fault:
        print(f"vgpuctl: {command[0]}: {fault.strerror}", file=sys.stderr)
    return 127


if __name__ == "__main__":
    sys.exit(main())
