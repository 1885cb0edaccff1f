# SPDX-License-Identifier: Apache-2.0
# Four A100 of 80 GB with MIG: the demo's host gpu-a100-1.
driver_version = 535.261.03
cuda_version = 12.2
device_nodes = require

[gpu]
model = A100-80GB
count = 4
