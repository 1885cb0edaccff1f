# SPDX-License-Identifier: Apache-2.0
"""Makes the files of a service that runs NVIDIA's MPS control daemon. Also computes the limits of each client, and how
many clients a GPU takes. No I/O.

Names and paths are those that NVIDIA's device plugin expects below its ``mpsRoot``. A memory limit of MPS applies to
each process, not to each container. MPS isolates the memory of clients but not their faults: a fatal fault of one
client ends all clients of its server.
"""

from __future__ import annotations

from typing import Any, Sequence

ROOT = "/run/nvidia/mps"
UNIT = "vgpu-mps.service"
UNIT_PATH = "/etc/systemd/system/" + UNIT
START_PATH = "/usr/local/lib/vgpu-mps/limits"
RESOURCE = "nvidia.com/gpu"


def client_cap(compute_capability: str | None, cuda_version: str | None) -> int:
    """Returns how many client contexts a GPU takes: 16 before Volta, 48 from Volta on, 60 with CUDA 13.1 and later.

    Source: NVIDIA's MPS page. From Volta on, the number depends only on the driver's CUDA version.
    """
    capability = _numbers(compute_capability)
    if capability and capability < (7, 0):
        return 16
    return 60 if _numbers(cuda_version) >= (13, 1) else 48


def _numbers(version: str | None) -> tuple[int, ...]:
    parts = str(version or "").split(".")
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()


def refusals(gpus: Sequence[dict[str, Any]], replicas: int, cuda_version: str | None) -> list[str]:
    """Returns why MPS cannot share these GPUs among so many clients."""
    said = []
    volta = [gpu for gpu in gpus if _numbers(gpu["compute_capability"]) >= (7, 0)]
    for gpu in gpus:
        name = f"GPU {gpu['index']} ({gpu['model']})"
        capability = _numbers(gpu["compute_capability"])
        cap = client_cap(gpu["compute_capability"], cuda_version)
        if gpu["mig_enabled"]:
            said.append(f"{name} has MIG enabled, and MPS cannot share a node's GPUs together with MIG; switch MIG off")
        elif capability and capability < (3, 5):
            said.append(f"{name} has compute capability {gpu['compute_capability']}; MPS needs 3.5 or newer")
        elif replicas > cap:
            said.append(f"{name} takes at most {cap} clients of MPS, not {replicas}; lower vgpu_split_count")
    if volta and len(volta) != len(gpus):
        said.append(
            "a server of MPS drives either GPUs before Volta or GPUs from Volta on, and this host has both; share "
            "them another way"
        )
    return said


def limits(gpus: Sequence[dict[str, Any]], replicas: int) -> list[str]:
    """Returns the commands for the control daemon: an equal part of each GPU's memory and threads for each client.

    GPUs before Volta support no limits.
    """
    commands = []
    for gpu in gpus:
        if _numbers(gpu["compute_capability"]) >= (7, 0):
            commands.append(f"set_default_device_pinned_mem_limit {gpu['index']} {gpu['memory_mib'] // replicas}M")
    if commands:
        commands.append(f"set_default_active_thread_percentage {max(100 // replicas, 1)}")
    return commands


def files(
    gpus: Sequence[dict[str, Any]], replicas: int, root: str = ROOT, resource: str = RESOURCE, exclusive: bool = True
) -> dict[str, str]:
    """Returns the text of every file of the service, by path. ``exclusive``: only the MPS server may use the GPUs."""
    pipe, log = f"{root}/{resource}/pipe", f"{root}/{resource}/log"
    uuids = ",".join(gpu["uuid"] for gpu in gpus)
    mode = [f"ExecStartPre=/usr/bin/nvidia-smi -i {gpu['uuid']} -c EXCLUSIVE_PROCESS" for gpu in gpus]
    back = [f"ExecStopPost=-/usr/bin/nvidia-smi -i {gpu['uuid']} -c DEFAULT" for gpu in gpus]
    unit = [
        "# Managed by vgpu.fleet.",
        "[Unit]",
        "Description=Control daemon of NVIDIA MPS (vgpu.fleet)",
        "After=nvidia-persistenced.service nvidia-fabricmanager.service",
        "Before=vgpu-device-plugin.service",
        "",
        "[Service]",
        "Type=simple",
        f"Environment=CUDA_MPS_PIPE_DIRECTORY={pipe} CUDA_MPS_LOG_DIRECTORY={log}",
        # Name GPUs by UUID, because the daemon numbers only the GPUs that it sees, so its indexes may differ from the
        # host's.
        f"Environment=CUDA_VISIBLE_DEVICES={uuids}",
        f"ExecStartPre=/bin/mkdir -p {pipe} {log} {root}/shm",
        # Containers of MPS clients share this folder as their /dev/shm, with the options of a container's own /dev/shm.
        f"ExecStartPre=-/bin/mount -t tmpfs -o mode=1777,size=1g,nosuid,nodev,noexec vgpu-mps {root}/shm",
        *(mode if exclusive else []),
        "ExecStart=/usr/bin/nvidia-cuda-mps-control -f",
        f"ExecStartPost=/bin/sh {START_PATH}",
        "ExecStop=/bin/sh -c 'echo quit -t 10 | /usr/bin/nvidia-cuda-mps-control'",
        *(back if exclusive else []),
        f"ExecStopPost=-/bin/umount {root}/shm",
        "Restart=on-failure",
        "RestartSec=5",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
        "",
    ]
    return {UNIT_PATH: "\n".join(unit), START_PATH: start_script(limits(gpus, replicas))}


def start_script(commands: Sequence[str]) -> str:
    """Returns the script that waits for the daemon and sends it the limits. If the daemon refuses a limit, the script
    fails and the service stops, so that clients never run without a limit.
    """
    lines = [
        "# Managed by vgpu.fleet. Limits of every client, given to the control daemon once it answers.",
        "set -eu",
        "tries=0",
        "until echo get_default_active_thread_percentage | /usr/bin/nvidia-cuda-mps-control >/dev/null 2>&1; do",
        "    tries=$((tries + 1))",
        '    [ "$tries" -lt 50 ] || { echo "nvidia-cuda-mps-control gives no answer" >&2; exit 1; }',
        "    sleep 0.2",
        "done",
        "tell() {",
        '    answer=$(echo "$1" | /usr/bin/nvidia-cuda-mps-control 2>&1)',
        '    case $answer in *[Ee]rror* | *[Ii]nvalid* | *"not "*) echo "$1: $answer" >&2; exit 1 ;; esac',
        "}",
    ]
    return "\n".join([*lines, *(f'tell "{command}"' for command in commands), ""])
