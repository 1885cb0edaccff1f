# SPDX-License-Identifier: Apache-2.0
"""Tests which GPUs NVML shows to a process. If the host's profile requires device nodes, NVML shows those GPUs whose
device nodes the process has. CUDA_VISIBLE_DEVICES never matters."""

from __future__ import annotations

import os

import pytest

# Columns: the device nodes in a container; expected: the GPUs that NVML shows there.
NODES = [
    ("", []),
    ("nvidia0", [0]),
    ("nvidia1", [1]),
    ("nvidia0 nvidia1", [0, 1]),
    ("nvidia2 nvidia0 nvidiactl", [0, 2]),
]


@pytest.mark.skipif(os.geteuid() != 0, reason="making a private /dev needs root")
@pytest.mark.parametrize(("nodes", "shown"), NODES, ids=[row[0] or "none" for row in NODES])
def test_device_nodes_decide_which_gpus_are_shown(make_host, nodes, shown):
    host = make_host("a100-80x4", device_nodes="require")
    # This script runs a command with a private /dev that has only the named device nodes. The host's state file is not
    # in /dev, so it stays usable.
    script = (
        "mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 && mknod -m 666 /dev/urandom c 1 9 && "
        f'for node in {nodes}; do mknod -m 666 /dev/$node c 1 3; done; exec "$@"'
    )
    calls = ["nvmlDeviceGetCount()", "[nvmlDeviceGetMinorNumber(gpu(i)) for i in range(nvmlDeviceGetCount())]"]
    answers = host.nvml(*calls, prefix=("unshare", "-m", "sh", "-c", script, "sh"))
    assert answers == [len(shown), shown]


@pytest.mark.parametrize("value", ["", "0", "1", "-1", "GPU-none"])
def test_nvml_ignores_cuda_visible_devices(mixed, value):
    mixed.environment["CUDA_VISIBLE_DEVICES"] = value
    assert mixed.nvml("nvmlDeviceGetCount()") == [4]
