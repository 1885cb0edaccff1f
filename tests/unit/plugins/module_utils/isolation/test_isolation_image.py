# SPDX-License-Identifier: Apache-2.0
"""Tests the root folder in which the isolation check runs its probe (a program that tries to exceed the limits). The
folder is built from files of the host, so that the check needs no image from a registry.
"""

from __future__ import annotations

import os
import stat
import tarfile
from io import BytesIO
from pathlib import Path

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import image as isolation_image


def test_root_has_the_probe_its_libraries_and_a_shell(tmp_path):
    """The root folder has the probe (the test program), the libraries that the loader lists, and a working shell.
    Packing it twice gives the same bytes."""
    tar = isolation_image.pack("/bin/true")
    assert tar == isolation_image.pack("/bin/true")
    with tarfile.open(fileobj=BytesIO(tar)) as source:
        names = source.getnames()
    assert len(names) == len(set(names))
    assert not [one for one in names if one.startswith("/") or ".." in one.split("/")]
    root = tmp_path / "root"
    isolation_image.lay_out(tar, str(root))
    assert stat.S_IMODE((root / "tmp").stat().st_mode) == 0o1777
    shell = root / os.path.realpath("/bin").lstrip("/") / "sh"
    assert shell.read_bytes() == Path("/bin/sh").read_bytes()
    texts = [one.name for one in (root / "etc").iterdir()]
    assert set(texts) <= {"passwd", "group", "debian_version"}, "expected no file that identifies the host"
    if os.geteuid() == 0:
        pid = os.fork()
        if pid == 0:
            os.chroot(root)
            os.execv("/bin/sh", ["sh", "-c", "exit 7"])
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_loader_lies_where_the_libraries_do_too():
    """For a separate library namespace (dlmopen), glibc searches for the loader in the folder of the libraries. If the
    loader were missing there, a bypass by dlmopen would fail for this reason alone, and the check of the bypass would
    prove nothing."""
    paths = isolation_image.paths_of(["/bin/true"])
    libc = next(one for one in paths if os.path.basename(one) == "libc.so.6")
    beside = set(os.listdir(os.path.dirname(libc)))
    names = [os.path.basename(one) for one in isolation_image.needed_by("/bin/true")]
    loaders = {one for one in names if one.startswith("ld-") and one in beside}
    assert loaders, "this machine's loader is in the folder of its libc"
    assert {os.path.join(os.path.dirname(libc), one) for one in loaders} <= set(paths)


def test_missing_program_is_an_error(tmp_path):
    with pytest.raises(isolation_image.ImageError, match="program does not list its libraries"):
        isolation_image.needed_by(str(tmp_path / "program"))


def test_program_of_another_libc_is_refused(monkeypatch):
    monkeypatch.setattr(isolation_image, "GLIBC", ("libc.musl.so.1",))
    with pytest.raises(
        isolation_image.ImageError, match="/bin/true is not linked with glibc; its loader reported 'linux-vdso"
    ):
        isolation_image.needed_by("/bin/true")
