# SPDX-License-Identifier: Apache-2.0
"""``kubectl vgpu``: nodes, GPUs and pods of a whole cluster, as the API server has them. No node is logged in to."""
