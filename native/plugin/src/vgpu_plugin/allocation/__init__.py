# SPDX-License-Identifier: Apache-2.0
"""Turns the device ids of a request into the files, mounts and limits of a container: which slices it may have, its
size, the saved record, leases for programs on this host, and the end of an allocation.
"""
