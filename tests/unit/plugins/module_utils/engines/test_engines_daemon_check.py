# SPDX-License-Identifier: Apache-2.0
"""Tests our check of daemon.json. It must find files with which dockerd does not start, or which dockerd silently
ignores, although `dockerd --validate` accepts them.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.engines import daemon_check, daemon_json

STOCK = ["/usr/sbin/dockerd", "-H", "fd://", "--containerd=/run/containerd/containerd.sock"]
NVIDIA = {"nvidia": {"path": "/usr/bin/nvidia-container-runtime"}}

# columns: content of daemon.json, command line of dockerd; expected words of each problem ([]: the file is valid)
CASES = [
    ({}, STOCK, []),
    ({"default-runtime": "nvidia", "runtimes": NVIDIA, "default-shm-size": "2G"}, STOCK, []),
    ({"default-runtime": "runc"}, STOCK, []),
    ({"default-runtime": "io.containerd.kata.v2"}, STOCK, []),
    ({"runtimes": {"kata": {"runtimeType": "io.containerd.kata.v2", "options": {}}}}, STOCK, []),
    ({"default-shm-size": "2G\n"}, STOCK, ["default-shm-size"]),
    ({"default-shm-size": "67108864", "features": {"cdi": True}}, STOCK, []),
    # dockerd does not start with a number: "invalid size".
    ({"default-shm-size": 67108864}, STOCK, ["must be a size"]),
    ({"exec-opts": ["native.cgroupdriver=systemd"]}, STOCK, []),
    ({"default-runtime": "nvidia"}, STOCK, ['"default-runtime" is "nvidia", which "runtimes" does not define']),
    ({"default-runtime": "nvidia", "runtimes": {"Nvidia": {"path": "/x"}}}, (), ["defined: Nvidia, runc"]),
    ({"runtimes": {"runc": {"path": "/usr/bin/runc"}}}, STOCK, ["reserved"]),
    ({"runtimes": {"x": {}}}, STOCK, ['exactly one of "path" and "runtimeType"']),
    ({"runtimes": {"x": {"path": "/x", "runtimeType": "io.x"}}}, STOCK, ["exactly one of"]),
    ({"runtimes": {"x": {"runtimeType": "io.x", "runtimeArgs": ["-v"]}}}, STOCK, ['"runtimeArgs" need a "path"']),
    ({"runtimes": {"x": {"path": "/x", "args": ["-v"]}}}, STOCK, ['the key is "runtimeArgs"']),
    ({"runtimes": {"x": "/x"}}, STOCK, ["must be an object"]),
    ({"runtimes": {"x": {"path": "/nowhere"}}}, STOCK, ["no program"]),
    ({"runtimes": []}, STOCK, ['"runtimes" must be an object']),
    ({"default-runtime": 1}, STOCK, ["must be a string"]),
    ({"default-shm-size": "2 GB of it"}, STOCK, ["must be a size"]),
    ({"default-shm-size": True}, STOCK, ["must be a size"]),
    ({"features": {"cdi": "true"}}, STOCK, ["true or false"]),
    ({"exec-opts": ["native.cgroupdriver=wrong"]}, STOCK, ["systemd or cgroupfs"]),
    ({"hosts": ["unix:///x"]}, STOCK, ['"hosts" is in the file and on']),
    ({"hosts": ["tcp://127.0.0.1:2375", "unix:///x"]}, ["dockerd"], []),
    ({"hosts": ["tcp://127.0.0.1:2375"]}, ["dockerd"], ['tcp://127.0.0.1:2375; add "unix:///run/docker.sock"']),
    ({}, ["dockerd", "-H", "tcp://[::1]:2376"], ['tcp://[::1]:2376; add "unix:///run/docker.sock"']),
    ({"containerd": "/run/containerd/containerd.sock"}, STOCK, ['"containerd" is in the file']),
    ({"labels": ["a=b"]}, ["dockerd", "--label", "a=b"], ['"labels"']),
    ({"debug": True}, ["dockerd", "-D"], ['"debug"']),
    ({"data-root": "/d"}, ["dockerd", "-g/d"], ['"data-root"']),
    ({"runtimes": NVIDIA}, ["dockerd", "--add-runtime", "x=/x"], []),
    ({"default-runtime": "nvidia", "runtimes": NVIDIA}, ["dockerd", "--default-runtime=nvidia"], ['"default-runtime"']),
]


@pytest.mark.parametrize(("document", "argv", "words"), CASES)
def test_problems_of_a_file_are_found(document: dict, argv: list, words: list) -> None:
    found = daemon_check.problems(document, argv, lambda path: path != "/nowhere")
    assert len(found) == len(words), found
    for problem, word in zip(found, words):
        assert word in problem


# columns: command line of dockerd; expected keys that it sets, with their values. dockerd does not start if such a key
# is also in daemon.json.
FLAGS = [
    (STOCK, {"hosts": ["fd://"], "containerd": ["/run/containerd/containerd.sock"]}),
    (["dockerd", "--live-restore", "--mtu", "1400"], {"live-restore": [""], "mtu": ["1400"]}),
    (["dockerd", "-Hfd://", "-H=tcp://x"], {"hosts": ["fd://", "tcp://x"]}),
    (["dockerd", "--log-opt", "a=b", "--log-opt=c=d"], {"log-opts": ["a=b", "c=d"]}),
    ([], {}),
]


@pytest.mark.parametrize(("argv", "expected"), FLAGS)
def test_keys_that_the_command_line_sets(argv: list, expected: dict) -> None:
    assert daemon_json.flag_values(argv) == expected


# columns: text of daemon.json (None: no file), command line of dockerd; expected socket on which the daemon answers
SOCKETS = [
    (None, STOCK, "/run/docker.sock"),
    ("{", [], "/run/docker.sock"),
    ('{"hosts": ["unix:///run/docker-main.sock"]}', ["dockerd"], "/run/docker-main.sock"),
    ('{"hosts": ["tcp://0.0.0.0:2376", "unix:///a", "fd://"]}', ["dockerd"], "/a"),
    ("{}", ["dockerd", "--host=unix:///b"], "/b"),
    ('{"hosts": ["unix://"]}', ["dockerd"], "/run/docker.sock"),
    ('{"hosts": ["tcp://0.0.0.0:2376"]}', ["dockerd"], ""),
]


@pytest.mark.parametrize(("text", "argv", "path"), SOCKETS)
def test_socket_of_the_daemon(text: str | None, argv: list, path: str) -> None:
    assert daemon_json.socket_of(text, argv) == path
