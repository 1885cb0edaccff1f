# SPDX-License-Identifier: Apache-2.0
"""Pods whose mounts conflict with our files, and pods whose mounts do not: one table for the rule in Python and the
rule in CEL at a real API server (tests/e2e/test_mount_policy.py).

Written by hand: the third word of a row is the path of ours that the refusal names, "" where the pod is admitted.
"""

from __future__ import annotations

import copy
from typing import Any

GPU = "nvidia.com/gpu"

# How a path is written, and the path of ours that it meets.
PATHS = [
    # at
    ("/dev/vgpu", "/dev/vgpu"),
    ("/etc/ld.so.preload", "/etc/ld.so.preload"),
    ("/etc/vgpu", "/etc/vgpu"),
    ("/run/vgpu", "/run/vgpu"),
    ("/usr/local/lib/vgpu", "/usr/local/lib/vgpu"),
    # below
    ("/dev/vgpu/0", "/dev/vgpu"),
    ("/dev/vgpu/0/limits", "/dev/vgpu"),
    ("/dev/vgpu/lib/libvgpu.so", "/dev/vgpu"),
    ("/dev/vgpu/nothing of ours", "/dev/vgpu"),
    ("/etc/vgpu/limits", "/etc/vgpu"),
    ("/run/vgpu/ledger", "/run/vgpu"),
    ("/etc/ld.so.preload/x", "/etc/ld.so.preload"),
    # above
    ("/", "/dev/vgpu"),
    ("/dev", "/dev/vgpu"),
    ("/etc", "/etc/ld.so.preload"),
    ("/run", "/run/vgpu"),
    ("/usr", "/usr/local/lib/vgpu"),
    ("/usr/local", "/usr/local/lib/vgpu"),
    ("/usr/local/lib", "/usr/local/lib/vgpu"),
    # the same places, written otherwise
    ("/dev/vgpu/", "/dev/vgpu"),
    ("/dev/vgpu///", "/dev/vgpu"),
    ("/dev/vgpu/.", "/dev/vgpu"),
    ("//dev//vgpu", "/dev/vgpu"),
    ("///", "/dev/vgpu"),
    ("/.", "/dev/vgpu"),
    ("/./", "/dev/vgpu"),
    (".", "/dev/vgpu"),
    ("./", "/dev/vgpu"),
    ("/./dev/./vgpu/./0", "/dev/vgpu"),
    ("/.//./dev/.//vgpu", "/dev/vgpu"),
    ("dev/vgpu", "/dev/vgpu"),
    ("./dev", "/dev/vgpu"),
    ("etc", "/etc/ld.so.preload"),
    ("/etc//vgpu/./limits", "/etc/vgpu"),
    # what is above by .. depends on links
    ("/data/../dev/vgpu", "/dev/vgpu"),
    ("/dev/shm/../vgpu", "/dev/vgpu"),
    ("/data/..", "/dev/vgpu"),
    ("..", "/dev/vgpu"),
    ("/../data", "/dev/vgpu"),
    ("/data/../data", "/dev/vgpu"),
    # others
    ("/dev/shm", ""),
    ("/dev/shm/", ""),
    ("/dev/infiniband", ""),
    ("/dev/infiniband/uverbs0", ""),
    ("/dev/termination-log", ""),
    ("/dev/vgpu0", ""),
    ("/dev/vgp", ""),
    ("/dev/vgpu.old/0", ""),
    ("/dev/vgpu\n", ""),
    ("/dev/vgpu ", ""),
    ("/dev/VGPU", ""),
    ("/dev/...", ""),
    ("/..dev/vgpu", ""),
    ("/data/..vgpu", ""),
    ("/data/dev/vgpu", ""),
    ("/data", ""),
    ("data", ""),
    ("/etc/ssl", ""),
    ("/etc/ssl/certs/ca.pem", ""),
    ("/etc/ld.so.preload.d", ""),
    ("/etc/ld.so.conf.d", ""),
    ("/etc/vgpu-scheduler", ""),
    ("/var/run/secrets/kubernetes.io/serviceaccount", ""),
    ("/run/secrets", ""),
    ("/run/nvidia", ""),
    ("/usr/local/lib/python3.11", ""),
    ("/usr/local/cuda", ""),
    ("/usr/local/lib/vgpu2", ""),
    ("/usr/lib", ""),
    ("/opt", ""),
    ("/дев/vgpu", ""),
    ("/dev/$(HOME)", ""),
    ("/*", ""),
]


def container(name: str = "main", limits: Any = None, *paths: str, **more: Any) -> dict[str, Any]:
    """As the API server takes one: every mount is of the volume ``data``."""
    made: dict[str, Any] = {"name": name, "image": "localhost/any:1", **more}
    if limits:
        made["resources"] = {"limits": dict(limits)}
    if paths:
        made["volumeMounts"] = [{"name": "data", "mountPath": path} for path in paths]
    return made


def pod(*containers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    volumes = [
        {"name": "data", "emptyDir": {}},
        {"name": "map", "configMap": {"name": "any"}},
        {"name": "block", "persistentVolumeClaim": {"claimName": "any"}},
    ]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "asks"},
        "spec": {"containers": list(containers), "volumes": volumes, **spec},
    }


ASKS = {GPU: "1"}
MAP = {"name": "map", "subPath": "limits"}
BLOCK = {"volumeDevices": [{"name": "block", "devicePath": "/dev/vgpu/0"}]}
PLAIN = {"volumeDevices": [{"name": "block", "devicePath": "/dev/xvda"}]}

# What the pod is like, the pod, its (container, path, path of ours).
PODS = [
    ("no container asks", pod(container("main", None, "/dev/vgpu")), []),
    ("another resource", pod(container("main", {"cpu": "1", "example.com/gpu": "1"}, "/dev/vgpu")), []),
    ("asks and mounts nothing", pod(container("main", ASKS)), []),
    ("a sidecar's own mounts", pod(container("main", ASKS, "/data"), container("side", None, "/dev", "/etc/vgpu")), []),
    (
        "a volume that a sidecar shares",
        pod(container("main", ASKS, "/dev/vgpu"), container("side", None, "/data")),
        [("main", "/dev/vgpu", "/dev/vgpu")],
    ),
    (
        "several mounts of several containers",
        pod(container("a", ASKS, "/data", "/etc/vgpu", "/dev"), container("b", ASKS, "/etc/ld.so.preload")),
        [
            ("a", "/etc/vgpu", "/etc/vgpu"),
            ("a", "/dev", "/dev/vgpu"),
            ("b", "/etc/ld.so.preload", "/etc/ld.so.preload"),
        ],
    ),
    (
        "an init container",
        pod(container("main"), initContainers=[container("first", ASKS, "/dev/vgpu/0")]),
        [("first", "/dev/vgpu/0", "/dev/vgpu")],
    ),
    (
        "an init container that asks for none",
        pod(container("main", ASKS), initContainers=[container("i", None, "/")]),
        [],
    ),
    (
        "memory alone",
        pod(container("main", {"nvidia.com/gpumem": "100"}, "/etc/vgpu")),
        [("main", "/etc/vgpu", "/etc/vgpu")],
    ),
    (
        "another dialect",
        pod(container("main", {"aliyun.com/gpu-mem": "1"}, "/etc/vgpu")),
        [("main", "/etc/vgpu", "/etc/vgpu")],
    ),
    (
        "a file of a ConfigMap",
        pod(container("main", ASKS, volumeMounts=[{**MAP, "mountPath": "/etc/vgpu/limits"}])),
        [("main", "/etc/vgpu/limits", "/etc/vgpu")],
    ),
    (
        "a subPath is no place",
        pod(container("main", ASKS, volumeMounts=[{"name": "data", "subPath": "dev/vgpu", "mountPath": "/data"}])),
        [],
    ),
    ("a block device", pod(container("main", ASKS, **BLOCK)), [("main", "/dev/vgpu/0", "/dev/vgpu")]),
    ("a block device elsewhere", pod(container("main", ASKS, **PLAIN)), []),
    (
        "the file of the termination message",
        pod(container("main", ASKS, terminationMessagePath="/etc/ld.so.preload")),
        [("main", "/etc/ld.so.preload", "/etc/ld.so.preload")],
    ),
    ("its default place", pod(container("main", ASKS, terminationMessagePath="/dev/termination-log")), []),
]
PODS += [
    (f"mountPath {path!r}", pod(container("main", ASKS, path)), [("main", path, guarded)] if guarded else [])
    for path, guarded in PATHS
]


def pods() -> list[tuple[str, dict[str, Any], list[tuple[str, str, str]]]]:
    """The table, for a test that changes its pods."""
    return copy.deepcopy(PODS)
