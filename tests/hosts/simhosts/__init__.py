# SPDX-License-Identifier: Apache-2.0
"""Simulated GPU hosts: systemd machines in podman containers, made of the machine's own distribution."""
