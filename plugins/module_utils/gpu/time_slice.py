# SPDX-License-Identifier: Apache-2.0
"""Makes the unit that sets the driver's time slice between processes on a GPU at every boot. No I/O.

The driver forgets the time slice when it is unloaded. So a unit sets the time slice, and stopping the unit restores the
default. The unit calls nvidia-smi, because NVML has no public call for this.
"""

from __future__ import annotations

UNIT = "vgpu-time-slice.service"
UNIT_PATH = "/etc/systemd/system/" + UNIT
# Maps each time slice to the number that nvidia-smi compute-policy uses for it.
SLICES = {"default": 0, "short": 1, "medium": 2, "long": 3}


def files(name: str) -> dict[str, str]:
    """Returns the unit of a time slice, by path. ``name``: a key of SLICES."""
    number = SLICES[name]
    text = f"""\
# Managed by vgpu.fleet.
[Unit]
Description=Time slice of the GPUs: {name} (vgpu.fleet)
After=nvidia-persistenced.service
Before=vgpu-device-plugin.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/nvidia-smi compute-policy --set-timeslice={number}
ExecStop=-/usr/bin/nvidia-smi compute-policy --set-timeslice=0

[Install]
WantedBy=multi-user.target
"""
    return {UNIT_PATH: text}
