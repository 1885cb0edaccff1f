# SPDX-License-Identifier: Apache-2.0
"""Creates, replaces and removes single files, links and folders of allocations (slices of containers). Something else
may be at their paths: a killed program leaves a half-written file, a container engine creates a folder for a missing
file, and a container may create files itself. New files are never written through a link, and have their final mode and
SELinux label.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterable

# Type of the function that sets the SELinux label of an open file. The label lets confined containers use the file.
Label = Callable[[int], None]


def is_place(path: str, content: Iterable[str] = ()) -> bool:
    """Returns whether a path is a folder of this program's user that every user may enter, with exactly the entries
    ``content``.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    return (
        stat.S_ISDIR(found.st_mode)
        and (found.st_uid, stat.S_IMODE(found.st_mode)) == (os.geteuid(), 0o755)
        and set(os.listdir(path)) == set(content)
    )


def remove(path: str) -> None:
    """Removes a folder with its content, a file or a link. A missing path is no error."""
    try:
        os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except IsADirectoryError:
        shutil.rmtree(path)


def link(target: str, name: str) -> None:
    """Creates the hard link ``name`` to a file, and replaces any other file of that name."""
    try:
        os.link(target, name)
    except FileExistsError:
        if not same_file(target, name):
            remove(name)
            os.link(target, name)


def mount_point(path: str, label: Label | None) -> None:
    """Creates an empty file as a mount point. Its mode does not matter, because the mount hides it. Raises
    FileExistsError.
    """
    if label is None:
        os.mknod(path, stat.S_IFREG | 0o444)
    else:
        write(path, b"", 0o444, label)


def same_file(one: str, other: str) -> bool:
    try:
        return os.path.samestat(os.lstat(one), os.lstat(other))
    except FileNotFoundError:
        return False


def has_content(path: str, data: bytes) -> bool:
    try:
        with open(path, "rb") as stream:
            return stream.read() == data
    except (FileNotFoundError, IsADirectoryError):
        return False


def label_folder(folder: str, label: Label) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        label(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: str) -> bool:
    """Creates a folder that has mode 0700 from the start. Returns False if the folder existed."""
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        return False
    return True


def replace(path: str, data: bytes, mode: int, label: Label | None, size: int | None = None) -> None:
    """Replaces a file with a new file. A container that has the old file mapped keeps the old content. ``size`` is the
    size of the new file, in which all bytes after ``data`` are zero.
    """
    fresh = path + ".new"
    try:
        write(fresh, data, mode, label, size)
    except FileExistsError:  # A killed program left the file, or a tenant created it.
        remove(fresh)
        write(fresh, data, mode, label, size)
    try:
        os.replace(fresh, path)
    # A container engine created a folder at this path, because it started a container before the files existed.
    except IsADirectoryError:
        remove(path)
        os.replace(fresh, path)


def write(path: str, data: bytes, mode: int, label: Label | None, size: int | None = None) -> None:
    """Writes a new file. Raises FileExistsError if the file exists."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        if size is not None:
            os.ftruncate(descriptor, size)
        # The mode is set by a separate call, because os.open would clear the bits of the process's umask.
        if mode != 0o600:
            os.fchmod(descriptor, mode)
        if label is not None:
            label(descriptor)
    finally:
        os.close(descriptor)
