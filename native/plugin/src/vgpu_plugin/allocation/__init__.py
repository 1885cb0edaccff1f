# SPDX-License-Identifier: Apache-2.0
"""Turns device ids into a container's files: admission, sizes, records, leases, and the end of allocations."""
