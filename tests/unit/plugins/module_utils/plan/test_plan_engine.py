# SPDX-License-Identifier: Apache-2.0
"""Tests the plan (the changes that a run would make) of the role container_runtime for engines other than docker:
containerd, CRI-O, k3s and RKE2."""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.engines import containerd_text
from ansible_collections.vgpu.fleet.plugins.module_utils.host.digest import sha256
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import engine as plan_engine

PATH, RECORD = "/etc/containerd/config.toml", "/var/lib/vgpu/baseline/containerd.json"
CRIO = "/etc/crio/crio.conf.d/99-vgpu.conf"
WANTED = {
    "engine": "containerd",
    "containerd_config": PATH,
    "containerd_record": RECORD,
    "runtimes": {"nvidia": {"path": "/usr/bin/nvidia-container-runtime"}},
    "default_runtime": "nvidia",
    "restart": "if_idle",
    "systemd_cgroup": "auto",
}
# containerd's configuration before the role added the NVIDIA runtime
PLAIN = "version = 2\n"
SYSTEMD = containerd_text.Desired(systemd_cgroup=True)
OURS = containerd_text.merge(PLAIN, SYSTEMD)[0]
# containerd's configuration in format 3, which imports a folder, so our part can be a separate file in the folder
THREE = 'version = 3\nimports = ["/etc/containerd/conf.d/*.toml"]\n'
UP = {"present": True, "active": True, "started": 1000.0}


def state(text, unit=None, drop_in=None, package="1.6.20~ds1-1", **files):
    return {
        "containerd": {"config_text": text, "drop_in_text": drop_in},
        "units": {"containerd.service": UP if unit is None else unit},
        "files": {RECORD: {"mtime": 900.0, "sha256": "x"}, **files},
        "packages": {"containerd": package},
    }


# columns: state of the host, variables that differ; expected words of the changes, words of the error
HOSTS = [
    (state(OURS), {}, "", ""),
    (state(PLAIN), {}, "set plugins", ""),
    (state(None), {}, "write /etc/containerd/config.toml", ""),
    (state(PLAIN), {"restart": "never"}, "", "container_runtime_restart is never"),
    (state(PLAIN, unit={}), {"restart": "never"}, "set plugins", ""),
    # A run was killed after it wrote the file and before the restart of containerd.
    (state(OURS, **{RECORD: {"mtime": 2000.0}}), {}, "restart containerd.service", ""),
    # If the file has the start time of containerd, containerd has read the file.
    (state(OURS, **{RECORD: {"mtime": 1000.0}}), {}, "", ""),
    # Without a record the role wrote nothing, so containerd has read everything, no matter when it started.
    (state(OURS, unit={**UP, "started": 0.5}, **{RECORD: None}), {}, "", ""),
    (state(OURS, unit={"present": True, "active": False}), {}, "start containerd.service", ""),
    (state(OURS), {"default_runtime": "runc"}, 'default_runtime_name from "nvidia" to "runc"', ""),
    (state(PLAIN), {"runtimes": {"nvidia": {"path": "/opt/nvidia"}}}, 'BinaryName to "/opt/nvidia"', ""),
    (state(THREE, package="2.1.9-1"), {}, "write /etc/containerd/conf.d/99-vgpu.toml", ""),
    (
        state(THREE, package="2.1.9-1", drop_in=containerd_text.drop_in(THREE, SYSTEMD)),
        {},
        "",
        "",
    ),
    (state(THREE, package="1.7.24~ds1-6"), {}, "", "leave its runtimes out"),
    (state("version = 2\n[broken\n"), {}, "", "line 2"),
]


@pytest.mark.parametrize(("found", "desired", "words", "fault"), HOSTS)
def test_changes_and_errors_of_containerd(found, desired, words, fault):
    _reason, changes, errors = plan_engine.differences({**WANTED, **desired}, found)
    assert (bool(changes), bool(errors)) == (bool(words), bool(fault))
    assert words in "\n".join(changes)
    assert fault in "\n".join(errors)


def test_refusal_of_a_restart_names_the_first_change():
    _reason, _changes, (fault,) = plan_engine.differences({**WANTED, "restart": "never"}, state(PLAIN))
    key = 'plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia.runtime_type'
    assert fault.startswith(f'{PATH}: set {key} to "io.containerd.runc.v2": containerd.service must be restarted')


TEXT = containerd_text.crio(containerd_text.Desired())
DROP_INS = [
    ({}, {}, "write " + CRIO),
    ({CRIO: {"sha256": sha256(TEXT), "mtime": 900.0}}, UP, ""),
    ({CRIO: {"sha256": "other", "mtime": 900.0}}, UP, "change " + CRIO),
    ({CRIO: {"sha256": sha256(TEXT), "mtime": 2000.0}}, UP, "restart crio.service"),
    ({CRIO: {"sha256": sha256(TEXT), "mtime": 2000.0}}, {}, ""),
]


@pytest.mark.parametrize(("files", "unit", "words"), DROP_INS)
def test_drop_in_file_is_planned(files, unit, words):
    found = {"files": files, "units": {"crio.service": unit}, "packages": {}}
    wanted = {**WANTED, "engine": "crio"}
    assert plan_engine.differences(wanted, found)[1] == ([words] if words else [])
    assert plan_engine.absent(wanted, found) == ([f"remove {CRIO}"] if files else [])


# columns: version of the package containerd (None: not installed); expected reason, first change
MISSING = [(None, "packages are missing or of another version", "install containerd"), ("1", "", "")]


@pytest.mark.parametrize(("package", "reason", "first"), MISSING)
def test_a_missing_package_is_the_reason(package, reason, first):
    found = {**state(OURS, package=package), "os": {"id": "debian", "version_id": "12"}, "docker": {}}
    part = plan_engine.container_runtime({**WANTED, "state": "present", "packages": ["containerd"]}, found, {})
    assert (part.errors, part.changes[:1]) == ([], [first] if first else [])
    assert not reason or part.reason == reason
