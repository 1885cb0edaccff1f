# SPDX-License-Identifier: Apache-2.0
"""Tests the tool that builds container images: which old images a new build removes. A script that stores image names
and ids replaces the engine.
"""

from __future__ import annotations

import importlib.util
import json
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TAG, BASE = "localhost/vgpu-device-plugin:1", "localhost/base:1"
# A double of the container engine. It stores its images in a file: id → names.
ENGINE = """#!/usr/bin/env python
import json, pathlib, sys
names = pathlib.Path(__file__).with_name("names.json")
images = json.loads(names.read_text())
words = sys.argv[1:]
if words[:2] == ["image", "inspect"]:
    one = next((key for key, tags in images.items() if words[4] == key or words[4] in tags), None)
    if one is None:
        sys.exit(1)
    print({"{{.Id}}": one, "{{len .RepoTags}}": len(images[one])}[words[3]])
elif words[:2] == ["image", "rm"]:
    if len(images[words[2]]) > 1:
        sys.exit("it has several names")
    del images[words[2]]
elif words[0] == "build":
    tag = words[words.index("-t") + 1]
    images = {key: [one for one in tags if one != tag] for key, tags in images.items()}
    images["new"] = [tag]
elif words[0] == "save":
    pathlib.Path(words[2]).write_text("image")
names.write_text(json.dumps(images))
"""


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("image", ROOT / "native/plugin/tools/image.py")
    out = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(out)
    return out


# The case → (the images before the build as id → names, the old ids that are expected to remain after the build).
FORMER = {
    "no image of the name": ({}, set()),
    "an image of this name alone": ({"old": [TAG]}, set()),
    "an image that has another name": ({"old": [TAG, "localhost/kept:1"]}, {"old"}),
    "an image of another name": ({"old": ["localhost/other:1"]}, {"old"}),
}


@pytest.mark.parametrize("there", FORMER)
def test_new_image_removes_unnamed_old_images(tool, tmp_path, there):
    images, stay = FORMER[there]
    engine = tmp_path / "engine"
    engine.write_text(ENGINE)
    engine.chmod(0o755)
    names = tmp_path / "names.json"
    names.write_text(json.dumps(images))
    archive = tmp_path / "vgpu-plugin.pyz"
    with zipfile.ZipFile(archive, "w") as content:
        content.writestr("about.json", json.dumps({"name": "vgpu-plugin", "version": "1"}))
    assert tool.make(archive, TAG, tmp_path / "image.tar", str(engine), BASE)
    assert set(json.loads(names.read_text())) == {"new", *stay}


def built(tool, tmp_path, **extras):
    """Builds an image; every call uses the same archive. Returns (whether an image was built, the arguments of each
    call of the engine's command ``save``).
    """
    engine = tmp_path / "podman"
    engine.write_text(
        ENGINE.replace(
            "words = sys.argv[1:]",
            "words = sys.argv[1:]\nnames.with_name('said').open('a').write(json.dumps(words) + '\\n')",
        ).replace("pathlib.Path(words[2])", 'pathlib.Path(words[words.index("-o") + 1])')
    )
    engine.chmod(0o755)
    said = tmp_path / "said"
    said.write_text("")
    names = tmp_path / "names.json"
    if not names.exists():
        names.write_text("{}")
    archive = tmp_path / "vgpu-plugin.pyz"
    if not archive.exists():
        with zipfile.ZipFile(archive, "w") as content:
            content.writestr("about.json", json.dumps({"name": "vgpu-plugin", "version": "1"}))
    made = tool.make(archive, TAG, tmp_path / "image.tar", str(engine), BASE, tool.Extras(**extras))
    words = [json.loads(line) for line in said.read_text().splitlines()]
    return made, [one[1:] for one in words if one[0] == "save"]


def test_second_archive_has_the_oci_format(tool, tmp_path):
    oci = tmp_path / "image.oci.tar"
    made, saved = built(tool, tmp_path, oci=oci)
    assert made and oci.exists()
    assert saved == [["-o", f"{tmp_path}/image.tar.part", TAG], ["--format=oci-archive", "-o", f"{oci}.part", TAG]]
    assert built(tool, tmp_path, oci=oci) == (False, [])
    oci.unlink()
    made, _saved = built(tool, tmp_path, oci=oci)
    assert made and oci.exists()


def test_new_library_makes_a_new_image(tool, tmp_path):
    library = tmp_path / "vcuda-1-x86_64.tar.gz"
    library.write_text("one")
    assert built(tool, tmp_path)[0]
    assert built(tool, tmp_path, library=library)[0]
    assert not built(tool, tmp_path, library=library)[0]
    library.write_text("two")
    assert built(tool, tmp_path, library=library)[0]


def test_docker_writes_no_oci_archive(tool, tmp_path):
    archive = tmp_path / "vgpu-plugin.pyz"
    with zipfile.ZipFile(archive, "w") as content:
        content.writestr("about.json", json.dumps({"name": "vgpu-plugin", "version": "1"}))
    with pytest.raises(tool.ImageError, match="use --engine podman"):
        tool.make(archive, TAG, tmp_path / "image.tar", "docker", BASE, tool.Extras(oci=tmp_path / "x"))
