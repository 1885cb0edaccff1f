# SPDX-License-Identifier: Apache-2.0
"""How a container receives its GPUs: CDI, volume mounts, environment."""
