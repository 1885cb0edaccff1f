# SPDX-License-Identifier: Apache-2.0
# Different GPUs in one host, with fixed names, for tests that need to know them beforehand.
driver_version = 535.261.03
cuda_version = 12.2
clock = real

[gpu]
model = T4
uuid = GPU-5a4f1d3e-0001-4c6b-9d57-7430c1a2b3d4
pci = 00000000:3b:00.0

[gpu]
model = V100-16GB
uuid = GPU-5a4f1d3e-0002-4c6b-9d57-7430c1a2b3d4
pci = 00000000:5e:00.0

[gpu]
model = A100-80GB
uuid = GPU-5a4f1d3e-0003-4c6b-9d57-7430c1a2b3d4
pci = 00000000:af:00.0

[gpu]
model = GTX-1080-Ti
uuid = GPU-5a4f1d3e-0004-4c6b-9d57-7430c1a2b3d4
pci = 00000000:d8:00.0
memory_mib = 11178
