# SPDX-License-Identifier: Apache-2.0
"""Tests that special variants of docker (snap, podman-docker, rootless) are recognised by the files of a host. The
standard file /etc/docker/daemon.json has no effect on them.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.engines import docker_variants
from doubles.host import host

PLAIN = {"snap": False, "podman": False, "rootless": []}
PASSWD = "root:x:0:0::/root:/bin/sh\nann:x:1000:1000::/home/ann:/bin/sh\n"
UNIT = "/home/ann/.config/systemd/user/docker.service"

# columns: files on the host; expected variants
HOSTS = [
    ([], {}),
    (["/usr/bin/docker", "/etc/docker/daemon.json"], {}),
    (["/var/snap/docker/current/config/daemon.json"], {"snap": True}),
    (["/snap/docker/current/bin/dockerd"], {"snap": True}),
    (["/usr/share/doc/podman-docker/copyright"], {"podman": True}),
    (["/run/user/1000/docker.sock"], {"rootless": ["ann"]}),
    (["/run/user/1001/docker.sock"], {"rootless": ["1001"]}),
    ([UNIT], {"rootless": ["ann"]}),
    ([UNIT, "/run/user/1000/docker.sock"], {"rootless": ["ann"]}),
    (["/run/user/1000/bus"], {}),
]


@pytest.mark.parametrize(("files", "expected"), HOSTS)
def test_variants_of_docker_are_found(tmp_path, files, expected):
    found = docker_variants.find(host(tmp_path, {**dict.fromkeys(files, ""), "etc/passwd": PASSWD}))
    assert found == {**PLAIN, **expected}


def test_standard_docker_has_no_message():
    assert docker_variants.findings(PLAIN) == ([], [])
