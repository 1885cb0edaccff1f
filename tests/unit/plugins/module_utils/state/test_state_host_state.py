# SPDX-License-Identifier: Apache-2.0
"""Tests how the state of a host is read from its files, from which the plan follows: records of roles, versions of the
library, status of the device plugin, and the proof (a fingerprint of the state for which the isolation check last
passed).
"""

from __future__ import annotations

import hashlib
import json

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.engines import docker_api
from ansible_collections.vgpu.fleet.plugins.module_utils.gpu import nvml
from ansible_collections.vgpu.fleet.plugins.module_utils.host import digest
from ansible_collections.vgpu.fleet.plugins.module_utils.host.host import Answer
from ansible_collections.vgpu.fleet.plugins.module_utils.library import versions
from ansible_collections.vgpu.fleet.plugins.module_utils.state import baseline, host_state, running_plugin
from doubles.host import host, write


@pytest.fixture
def root(tmp_path, monkeypatch):
    # NVML would read the GPUs of the machine on which the test runs, so the test replaces it.
    nothing = {"ok": False, "error": "none", "gpus": [], "lost": [], "driver_version": None}
    monkeypatch.setattr(nvml, "read", lambda: dict(nothing))
    return tmp_path


def version(root, name, spoiled=False):
    write(root, f"usr/local/lib/vgpu/{name}/libvgpu.so", "code")
    listed = {"libvgpu.so": "0" * 64 if spoiled else hashlib.sha256(b"code").hexdigest()}
    write(root, f"usr/local/lib/vgpu/{name}/manifest.json", json.dumps({"files": listed}))


def test_bare_host_has_empty_facts_and_no_error(root):
    state = host_state.read(host(root), packages=["docker.io"], files=["/etc/x"], units=["docker.service"])
    assert state["packages"] == {"docker.io": None}
    assert state["files"] == {"/etc/x": None}
    assert state["units"]["docker.service"]["present"] is False
    assert (state["records"], state["memory_mib"]) == ({}, 0)
    assert state["docker"] == {
        "config_text": None,
        "info": None,
        "containers": [],
        "kinds": {"snap": False, "podman": False, "rootless": []},
    }
    nothing = {
        "current": None,
        "real_root": "/usr/local/lib/vgpu",
        "versions": [],
        "whole": [],
        "closed": [],
        "unused": [],
    }
    assert state["vcuda"] == nothing
    assert state["plugin"] == {"current": None, "versions": [], "status": None, "conflicting_plugins": []}
    assert state["node_config"] == {"text": None, "named": {}}
    assert state["proof"] is None
    assert (state["gpus"], state["nvml"]["ok"]) == ([], False)


def test_running_containers_of_docker_are_named(root, monkeypatch):
    asked = []
    write(root, "etc/docker/daemon.json", '{"hosts": ["unix:///run/main.sock"]}')
    monkeypatch.setattr(docker_api, "containers", lambda path: asked.append(path) or ["c1", "c2"])
    for running, names in ((2, ["c1", "c2"]), (0, [])):
        monkeypatch.setattr(
            docker_api, "info", lambda path, number=running: {"ContainersRunning": number, "Path": path}
        )
        found = host_state.read(host(root))["docker"]
        assert (found["containers"], found["info"]["Path"]) == (names, str(root / "run/main.sock"))
    assert asked == [str(root / "run/main.sock")]


def test_memory_of_a_host_is_read_in_mib(root):
    write(root, "proc/meminfo", "MemTotal:       16303840 kB\nMemFree: 1 kB\n")
    assert host_state.read(host(root))["memory_mib"] == 15921


BASELINE = "/var/lib/vgpu/baseline"


# columns: content of a role's record (None: the path is a folder); expected words of the reason why it is unreadable
# ("": it is readable)
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"version": 1}', ""),
        (b'{"version": 1,', "line 1"),
        (b"", "line 1"),
        (b"[]", "a list"),
        (b"\xff\xfe{}", "utf-8"),
        (None, "Is a directory"),
    ],
)
def test_unreadable_record_has_a_reason(root, content, words):
    place = root / BASELINE[1:] / "daemon.json"
    place.parent.mkdir(parents=True)
    place.mkdir() if content is None else place.write_bytes(content)
    (place.parent / ".daemon.json.tmp").write_text("{")
    (found,) = baseline.read(host(root)).items()
    assert found[0] == f"{BASELINE}/daemon.json"
    assert (words in found[1]) if words else not found[1], found


def test_versions_of_the_library(root):
    version(root, "1")
    version(root, "2", spoiled=True)
    write(root, "usr/local/lib/vgpu/3/libvgpu.so", "no manifest")
    version(root, ".4.new")
    (root / "usr/local/lib/vgpu/current").symlink_to("1")
    found = versions.library(host(root), "/usr/local/lib/vgpu")
    assert found.pop("real_root") == "/usr/local/lib/vgpu"
    assert found == {"current": "1", "versions": ["1", "2", "3"], "whole": ["1"], "closed": [], "unused": ["2", "3"]}


def test_a_root_behind_a_link_is_resolved(root):
    version(root, "1")
    (root / "srv").mkdir()
    (root / "usr/local/lib/vgpu").rename(root / "srv/vgpu")
    (root / "usr/local/lib/vgpu").symlink_to(root / "srv/vgpu")
    found = versions.library(host(root), "/usr/local/lib/vgpu")
    assert (found["real_root"], found["whole"]) == ("/srv/vgpu", ["1"])


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (Answer(0, '{"version": "1"}', ""), {"version": "1"}),
        (Answer(1, "", "no socket"), None),
        (Answer(0, "torn", ""), None),
        (Answer(0, "[]", ""), None),
    ],
)
def test_status_of_the_device_plugin_is_read(root, answer, status):
    write(root, "usr/local/bin/vgpuctl", "program")
    assert running_plugin.status(host(root, answers={"vgpuctl": answer})) == status


@pytest.mark.parametrize(
    ("text", "proof"), [('{"fingerprint": "abc"}', "abc"), ("{}", None), ("torn", None), ("[]", None), ("", None)]
)
def test_proof_file_is_read(root, text, proof):
    write(root, "var/lib/vgpu/proof.json", text)
    assert running_plugin.proof(host(root)) == proof


STATUS = {"version": "1", "config_sha256": "c", "library": "l"}
GPUS = [{"uuid": "GPU-a"}, {"uuid": "GPU-b"}]


@pytest.mark.parametrize(
    ("status", "gpus", "driver", "same"),
    [
        (STATUS, list(reversed(GPUS)), "535", True),  # the order of the GPUs does not matter
        ({**STATUS, "pid": 7}, GPUS, "535", True),
        ({**STATUS, "version": "2"}, GPUS, "535", False),
        ({**STATUS, "config_sha256": "d"}, GPUS, "535", False),
        ({**STATUS, "library": "m"}, GPUS, "535", False),
        (STATUS, GPUS[:1], "535", False),
        (STATUS, GPUS, "550", False),
    ],
)
def test_fingerprint_of_a_proof_follows_the_running_versions(status, gpus, driver, same):
    assert (digest.fingerprint(status, gpus, driver) == digest.fingerprint(STATUS, GPUS, "535")) is same


def test_host_without_a_device_plugin_has_no_fingerprint():
    assert digest.fingerprint(None, GPUS, "535") is None
