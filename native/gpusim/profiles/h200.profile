# SPDX-License-Identifier: Apache-2.0
# Eight H200; the driver branch of Debian 13.
driver_version = 550.163.01
cuda_version = 12.4

[gpu]
model = H200
count = 8
