# SPDX-License-Identifier: Apache-2.0
"""Run as ``checked.py FILE SHA256 COMMAND...``: executes COMMAND as root only if FILE is the file that the controller
sent.

The process that checks owner, mode and digest executes the command itself, because a user could change the file between
two tasks of a play. Only the user who runs this program may own FILE and its folder or write to them.
"""

import hashlib
import os
import stat
import sys


def refusal(path: str, expected: str) -> str:
    """Returns why the command must not run on the file; empty if it may run."""
    folder = os.lstat(os.path.dirname(path))
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as stream:
        file = os.fstat(stream.fileno())
        for name, found in ((os.path.dirname(path), folder), (path, file)):
            if found.st_uid != os.geteuid() or found.st_mode & 0o022:
                expected_owner = f"expected owner uid {os.geteuid()} and no write permission for others"
                return f"{name}: {expected_owner}, found uid {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}"
        if not stat.S_ISDIR(folder.st_mode) or not stat.S_ISREG(file.st_mode):
            return f"{path}: expected a regular file in a directory that is no link"
        digest = hashlib.sha256()
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    found_digest = digest.hexdigest()
    return (
        ""
        if found_digest == expected
        else f"{path}: expected SHA-256 {expected}, found {found_digest}; run the play again"
    )


def main(path: str, expected: str, *command: str) -> None:
    try:
        reason = refusal(path, expected)
    except OSError as fault:
        reason = f"{fault}; run the play again"
    if reason:
        sys.exit(reason)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
