# SPDX-License-Identifier: Apache-2.0
# Two inference cards. hostctl replaces driver_version by the version of the host's nvidia-smi.
driver_version = 535
cuda_version = 12.2
device_nodes = require

[gpu]
model = T4
count = 2
