# SPDX-License-Identifier: Apache-2.0
"""From device ids to a container's files: admission, sizes, records, leases, and their end."""
