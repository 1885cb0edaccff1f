# SPDX-License-Identifier: Apache-2.0
"""Pods with and without mounts that conflict with the files by which this project limits containers. A rule
refuses such pods. One table tests both forms of the rule: in Python, and in CEL at a real API server
(tests/e2e/test_mount_policy.py). The expected values are written by hand.
"""

from __future__ import annotations

import copy
from typing import Any

GPU = "nvidia.com/gpu"

# columns: the pod's mount path; the product's path with which it is expected to conflict ("" means no conflict)
PATHS = [
    # These paths equal a product path.
    ("/dev/vgpu", "/dev/vgpu"),
    ("/etc/ld.so.preload", "/etc/ld.so.preload"),
    ("/etc/vgpu", "/etc/vgpu"),
    ("/run/vgpu", "/run/vgpu"),
    ("/usr/local/lib/vgpu", "/usr/local/lib/vgpu"),
    # These paths are below a product path.
    ("/dev/vgpu/0", "/dev/vgpu"),
    ("/dev/vgpu/0/limits", "/dev/vgpu"),
    ("/dev/vgpu/lib/libvgpu.so", "/dev/vgpu"),
    ("/dev/vgpu/nothing of ours", "/dev/vgpu"),
    ("/etc/vgpu/limits", "/etc/vgpu"),
    ("/run/vgpu/ledger", "/run/vgpu"),
    ("/etc/ld.so.preload/x", "/etc/ld.so.preload"),
    # These paths are above a product path.
    ("/", "/dev/vgpu"),
    ("/dev", "/dev/vgpu"),
    ("/etc", "/etc/ld.so.preload"),
    ("/run", "/run/vgpu"),
    ("/usr", "/usr/local/lib/vgpu"),
    ("/usr/local", "/usr/local/lib/vgpu"),
    ("/usr/local/lib", "/usr/local/lib/vgpu"),
    # These are the same paths in other spellings.
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
    # Paths with ".." are refused, because their target depends on symlinks.
    ("/data/../dev/vgpu", "/dev/vgpu"),
    ("/dev/shm/../vgpu", "/dev/vgpu"),
    ("/data/..", "/dev/vgpu"),
    ("..", "/dev/vgpu"),
    ("/../data", "/dev/vgpu"),
    ("/data/../data", "/dev/vgpu"),
    # These paths conflict with no product path.
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
    """Returns a container as the API server accepts it. Every mount uses the volume ``data``."""
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

# columns: the case, the pod; the pod's expected conflicts as (container, mount path, product path)
PODS = [
    ("no container requests a GPU", pod(container("main", None, "/dev/vgpu")), []),
    ("another resource", pod(container("main", {"cpu": "1", "example.com/gpu": "1"}, "/dev/vgpu")), []),
    ("a container with a GPU and no mounts", pod(container("main", ASKS)), []),
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
        "an init container without a GPU",
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
        "a subPath does not count as a path",
        pod(container("main", ASKS, volumeMounts=[{"name": "data", "subPath": "dev/vgpu", "mountPath": "/data"}])),
        [],
    ),
    ("a block device", pod(container("main", ASKS, **BLOCK)), [("main", "/dev/vgpu/0", "/dev/vgpu")]),
    ("a block device at another path", pod(container("main", ASKS, **PLAIN)), []),
    (
        "a termination message path",
        pod(container("main", ASKS, terminationMessagePath="/etc/ld.so.preload")),
        [("main", "/etc/ld.so.preload", "/etc/ld.so.preload")],
    ),
    (
        "the default termination message path",
        pod(container("main", ASKS, terminationMessagePath="/dev/termination-log")),
        [],
    ),
]
PODS += [
    (f"mountPath {path!r}", pod(container("main", ASKS, path)), [("main", path, guarded)] if guarded else [])
    for path, guarded in PATHS
]


def pods() -> list[tuple[str, dict[str, Any], list[tuple[str, str, str]]]]:
    """Returns a copy of the table, for a test that changes its pods."""
    return copy.deepcopy(PODS)
