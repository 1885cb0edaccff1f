# SPDX-License-Identifier: Apache-2.0
"""The ways in which a container receives its GPUs: CDI, volume mounts and environment variables."""
