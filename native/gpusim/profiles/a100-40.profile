# SPDX-License-Identifier: Apache-2.0
# One A100 of 40 GB with MIG.
driver_version = 535.261.03
cuda_version = 12.2

[gpu]
model = A100-40GB
