# SPDX-License-Identifier: Apache-2.0
"""Tests `make archives`, which asks the package archives whether the packages that our roles install exist and fit
together. Real apt runs on small test repositories.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def archives() -> ModuleType:
    sys.path[:0] = [str(ROOT / "tools")]
    import archives as found

    return found


def test_archives_are_queried_for_every_branch_engine_and_python(archives: ModuleType) -> None:
    for family, tables in (("debian", archives.names.DEBIAN), ("ubuntu", archives.names.UBUNTU_SERVER)):
        for host in archives.systems(family):
            asked = list(archives.questions(host))
            assert {one.branch for one in asked if one.branch} == {*tables[host.release]}
            named = {name.partition("=")[0] for one in asked for name in one.packages}
            assert {"docker.io", "containerd"} <= named
            assert {*archives.plugin_python.TABLE[family, host.release].packages} <= named
    assert {name for name, _key, _addresses in archives.repositories()} == {
        *archives.repository_keys.CUDA,
        "container toolkit",
    }


KERNELS = {f"linux-image-{version}-generic": "" for version in ("6.8.0-7", "6.8.0-11", "6.11.0-20")}

# columns: packages of the archive with their dependencies, packages to install, patterns of packages that must not be
# installed; expected words of the fault ("": none)
ANSWERS = [
    ({"a": "b", "b": ""}, ["a"], [], ""),
    ({"a": "b", "b": ""}, ["a"], ["b*"], "b would also be installed"),
    ({"a": "nosuch"}, ["a"], [], "nosuch"),
    ({"a": ""}, ["a", "c"], [], "c: no repository"),
    (
        KERNELS | {"a-6.8.0-7-generic": "", "a-6.8.0-11-generic": ""},
        ["a-{kernel}"],
        ["a-*"],
        "a-6.8.0-11-generic would",
    ),
    (KERNELS | {"a-6.8.0-7-generic": ""}, ["a-{kernel}"], [], "a-6.8.0-11-generic: no repository"),
]


@pytest.mark.parametrize(("there", "wanted", "refused", "words"), ANSWERS)
def test_unresolvable_package_sets_are_faults(
    archives: ModuleType, tmp_path: Path, there: dict[str, str], wanted: list, refused: list, words: str
) -> None:
    folder = tmp_path / "archive"
    folder.mkdir()
    stanza = (
        "Package: {}\nVersion: 1-1\nArchitecture: all\nMaintainer: x\nFilename: ./{}.deb\nSize: 1\n{}Description: x\n"
    )
    texts = [stanza.format(name, name, f"Depends: {more}\n" if more else "") for name, more in there.items()]
    (folder / "Packages").write_text("\n".join(texts))
    host = next(one for one in archives.systems("ubuntu") if one.release == "24.04")
    archive = archives.Archive(tmp_path / "apt", [f"deb [trusted=yes] file:{folder} ./"])
    assert archive.update() == ""
    packages = [one.format(kernel=host.kernel) for one in wanted]
    fault = archive.ask(archives.Question("one", packages, refused), host)
    assert (words in fault) if words else not fault


def test_unreachable_repository_is_skipped(archives: ModuleType) -> None:
    key = archives.repository_keys.TOOLKIT
    faults, why = archives.of_nvidia("one", key, ["http://127.0.0.1:9/x"])
    assert not faults and why.startswith("one: ")
