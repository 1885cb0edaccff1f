# SPDX-License-Identifier: Apache-2.0
# Two T4 (15360 MiB): the demo's host gpu-t4-1. Every key of the format is explained in ../README.md.
driver_version = 535.261.03
cuda_version = 12.2
device_nodes = require      # a container with one /dev/nvidia<minor> sees that GPU alone

[gpu]
model = T4
count = 2
