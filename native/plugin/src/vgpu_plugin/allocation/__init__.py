# SPDX-License-Identifier: Apache-2.0
"""Turns the device ids of a request into the files, mounts and limits of a container. The modules decide which slices
(parts of GPUs) a container may have and of which size, and save this allocation as a record. They also lease slices to
programs on this host, and end allocations.
"""
