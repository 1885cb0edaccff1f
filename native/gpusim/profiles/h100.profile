# SPDX-License-Identifier: Apache-2.0
# Eight H100 of 80 GB, as in one server.
driver_version = 535.261.03
cuda_version = 12.2

[gpu]
model = H100-80GB
count = 8
