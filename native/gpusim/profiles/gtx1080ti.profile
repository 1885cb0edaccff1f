# SPDX-License-Identifier: Apache-2.0
# Two GTX 1080 Ti (11178 MiB): consumer boards, no ECC, a fan of their own.
driver_version = 535.261.03
cuda_version = 12.2

[gpu]
model = GTX-1080-Ti
count = 2
