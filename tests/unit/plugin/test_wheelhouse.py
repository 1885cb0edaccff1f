# SPDX-License-Identifier: Apache-2.0
"""Tests the build of the archives that install the node programs: on a machine without installed build tools, and from
folders of wheels without a network.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from .conftest import PLUGIN

SPEC = importlib.util.spec_from_file_location("wheelhouse", PLUGIN / "tools" / "wheelhouse.py")
assert SPEC is not None
assert SPEC.loader is not None
wheelhouse = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(wheelhouse)


@pytest.mark.parametrize("name", wheelhouse.BUILD_NEEDS)
def test_build_needs_are_complete_and_pinned(name):
    """If pip checks digests, it refuses an installation in which any package lacks a version or a digest. This includes
    the packages that others need."""
    blocks = dict(wheelhouse.locked_blocks(wheelhouse.LOCK))
    version = blocks[name].split("==")[1].split()[0]
    assert "--hash=sha256:" in blocks[name]
    assert metadata.version(name) == version, "the test's environment is not that of requirements/test.txt"
    required = [Requirement(line) for line in metadata.requires(name) or ()]
    needed = {one.name for one in required if one.marker is None or one.marker.evaluate({"extra": ""})}
    assert needed <= set(wheelhouse.BUILD_NEEDS)


# columns: the wheel's name, the host's Python, the host's architecture; whether the wheel is expected to fit
FITTING = [
    ("grpcio-1-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", "3.11", "x86_64", True),
    ("grpcio-1-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", "3.12", "x86_64", False),
    ("grpcio-1-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", "3.11", "aarch64", False),
    ("protobuf-7-cp310-abi3-manylinux2014_aarch64.whl", "3.13", "aarch64", True),
    ("protobuf-7-cp312-abi3-manylinux2014_aarch64.whl", "3.11", "aarch64", False),
    ("protobuf-7-cp310-abi3-manylinux2014_aarch64.whl", "3.13", "x86_64", False),
    ("nvidia_ml_py-13-py3-none-any.whl", "3.14", "aarch64", True),
    ("six-1-py2.py3-none-any.whl", "3.11", "x86_64", True),
    ("old-1-py2-none-any.whl", "3.11", "x86_64", False),
    ("made-1-py3-none-macosx_11_0_arm64.whl", "3.11", "aarch64", False),
]


@pytest.mark.parametrize(("wheel", "python", "arch", "fits"), FITTING)
def test_fitting_wheels_are_chosen_by_name(wheel: str, python: str, arch: str, fits: bool) -> None:
    assert wheelhouse.fits(wheel, wheelhouse.Wanted("vgpu-plugin", "1.0-a", python, arch)) is fits


OWN = "vgpu_fleet_plugin-1.0+a-py3-none-any.whl"
WHEELS = {
    "one_two-1.5-cp311-cp311-manylinux2014_x86_64.whl": b"one",
    "three-2-py3-none-any.whl": b"three",
    OWN: b"ours",
}


def unasked(name: str) -> Callable[..., None]:
    def fail(*_arguments: object) -> None:
        raise RuntimeError(name)

    return fail


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a folder that has every wheel of a lock file with two packages, and the project's own wheel."""
    lock = tmp_path / "lock.txt"
    digest = {name: hashlib.sha256(content).hexdigest() for name, content in WHEELS.items()}
    one, three, _ours = digest.values()
    lock.write_text(f"one-two==1.5 \\\n    --hash=sha256:{one}\nthree==2 \\\n    --hash=sha256:{three}\n")
    monkeypatch.setattr(wheelhouse, "REQUIREMENTS", lock)
    # No test may call pip or a compiler: such a call raises an error that names it.
    for name in ("download", "build_wheels"):
        monkeypatch.setattr(wheelhouse, name, unasked(name))
    made = tmp_path / "wheels"
    made.mkdir()
    for name, content in WHEELS.items():
        (made / name).write_bytes(content)
    return made


def archive(folder: Path, python: str = "3.11", version: str = "1.0-a", name: str = "vgpu-plugin") -> str:
    """Makes an archive from the folder; returns the error, or "" on success."""
    wanted = wheelhouse.Wanted(name, version, python, "x86_64")
    try:
        wheelhouse.make(folder.parent / "out", wanted, [folder.parent / "none", folder])
    except RuntimeError as fault:
        return str(fault)
    return ""


def test_archive_from_a_folder_with_all_wheels_needs_no_pip_or_compiler(folder: Path) -> None:
    assert archive(folder) == ""


@pytest.mark.parametrize(
    ("missing", "options", "asked"),
    [
        ("three-2-py3-none-any.whl", {}, "download"),
        (OWN, {}, "build_wheels"),
        ("", {"python": "3.12"}, "download"),
        ("", {"version": "1.0-b"}, "build_wheels"),
        # The folder has only the plugin's own wheel, so the archive of another program needs a build.
        ("", {"name": "vgpu-kubelet-double"}, "build_wheels"),
    ],
)
def test_missing_wheels_are_downloaded_or_built(
    folder: Path, missing: str, options: dict[str, str], asked: str
) -> None:
    if missing:
        (folder / missing).unlink()
    assert archive(folder, **options) == asked


def test_schedulers_archive_is_made_from_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheelhouse, "OF_SCHEDULER", wheelhouse.REQUIREMENTS)
    assert archive(folder, name="vgpu-scheduler") == ""


# A lock file whose lines have environment markers. They must be evaluated for the host's Python, not for the Python
# that reads the lock file.
LOCKED = """\
cffi==2.1 ; platform_python_implementation != 'PyPy' \\
    --hash=sha256:00
numpy==2.4 ; python_full_version < '3.12' \\
    --hash=sha256:11 \\
    --hash=sha256:12
numpy==2.5 ; python_full_version >= '3.12' and implementation_name != 'PyPy' \\
    --hash=sha256:22
    # via something
typing-extensions==4 ; python_full_version < '3.13' \\
    --hash=sha256:33
yaml==6 \\
    --hash=sha256:44
"""


@pytest.mark.parametrize(
    ("python", "needed"),
    [
        ("3.11", ["cffi==2.1", "numpy==2.4", "typing-extensions==4", "yaml==6"]),
        ("3.12", ["cffi==2.1", "numpy==2.5", "typing-extensions==4", "yaml==6"]),
        ("3.13", ["cffi==2.1", "numpy==2.5", "yaml==6"]),
    ],
)
def test_markers_are_evaluated_for_the_hosts_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str, needed: list[str]
) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text(LOCKED)
    monkeypatch.setattr(wheelhouse, "REQUIREMENTS", lock)
    found = wheelhouse.needed_blocks(wheelhouse.Wanted("vgpu-plugin", "1.0-a", python, "x86_64"))
    assert [block.split(" ")[0] for _name, block in found] == needed
    assert all(";" not in block and "--hash=sha256:" in block for _name, block in found)
    assert "2.4" not in needed[1] or found[1][1].count("--hash") == 2


def test_unsupported_marker_is_refused() -> None:
    with pytest.raises(wheelhouse.WheelhouseError, match="sys_platform"):
        wheelhouse.holds("sys_platform == 'win32'", "3.11")


def test_locks_have_supported_markers_only() -> None:
    for name in ("vgpu-plugin", "vgpu-scheduler"):
        assert wheelhouse.needed_blocks(wheelhouse.Wanted(name, "1.0-a", "3.11", "x86_64"))


def test_wheel_with_a_wrong_digest_is_not_used(folder: Path) -> None:
    (folder / "three-2-py3-none-any.whl").write_bytes(b"another")
    assert archive(folder) == "download"
