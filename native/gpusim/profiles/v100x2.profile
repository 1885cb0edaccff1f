# SPDX-License-Identifier: Apache-2.0
# Two V100 of 16 GB (16160 MiB): the demo's host gpu-v100-1.
driver_version = 535.261.03
cuda_version = 12.2
device_nodes = require

[gpu]
model = V100-16GB
count = 2
