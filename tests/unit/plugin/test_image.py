# SPDX-License-Identifier: Apache-2.0
"""Which images a new build of an image takes away, with a program in the engine's place that keeps names and ids."""

from __future__ import annotations

import importlib.util
import json
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TAG, BASE = "localhost/vgpu-device-plugin:1", "localhost/base:1"
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


FORMER = {
    "no image of the name": ({}, set()),
    "an image of this name alone": ({"old": [TAG]}, set()),
    "an image that has another name": ({"old": [TAG, "localhost/kept:1"]}, {"old"}),
    "an image of another name": ({"old": ["localhost/other:1"]}, {"old"}),
}


@pytest.mark.parametrize("there", FORMER)
def test_a_new_image_takes_away_what_is_left_without_a_name(tool, tmp_path, there):
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
