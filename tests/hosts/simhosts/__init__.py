# SPDX-License-Identifier: Apache-2.0
"""Makes simulated GPU hosts: podman containers that run systemd and a simulated NVIDIA driver, made of the distribution
of this machine or of another release."""
