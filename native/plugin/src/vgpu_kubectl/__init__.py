# SPDX-License-Identifier: Apache-2.0
"""``kubectl vgpu``: shows nodes, GPUs, slices and pods of a whole cluster, using the API server only."""
