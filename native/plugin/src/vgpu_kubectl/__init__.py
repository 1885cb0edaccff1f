# SPDX-License-Identifier: Apache-2.0
"""``kubectl vgpu``: nodes, GPUs, slices and pods of a whole cluster, by the API server. No node is logged in to."""
