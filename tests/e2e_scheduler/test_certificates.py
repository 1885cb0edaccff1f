# SPDX-License-Identifier: Apache-2.0
"""Tests that the scheduler's programs renew the webhook's certificate in a running cluster, and that admission
continues meanwhile."""

from __future__ import annotations

import base64
import ssl
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from kubebox.api import ApiError
from kubebox.process import until

ROOT = Path(__file__).resolve().parents[2]
SECRET = "/api/v1/namespaces/kube-system/secrets/vgpu-scheduler-tls"
GPU, MEM = "nvidia.com/gpu", "nvidia.com/gpumem"
# Less than a third of the ninety days is left, so the certificate must be renewed.
AGE, LEFT = 70, 20


def shown(fleet):
    """Returns (serial number, end) of the certificate that each program serves."""
    found = []
    for one in fleet.replicas:
        pem = ssl.get_server_certificate(("127.0.0.1", one.webhook))
        command = ["openssl", "x509", "-noout", "-serial", "-enddate"]
        said = subprocess.run(command, input=pem, capture_output=True, text=True, check=True).stdout.split("\n")
        end = datetime.strptime(said[1].partition("=")[2], "%b %d %H:%M:%S %Y %Z").replace(tzinfo=UTC)
        found.append((said[0], end))
    return found


def aged(data):
    """Returns a nearly expired certificate of the same authority for the same name."""
    sys.path.append(str(next((ROOT / ".build/scheduler/lib").iterdir()) / "site-packages"))
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    old, authority = (x509.load_pem_x509_certificate(base64.b64decode(data[name])) for name in ("tls.crt", "ca.crt"))
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    made = (
        x509.CertificateBuilder()
        .subject_name(old.subject)
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=AGE))
        .not_valid_after(now + timedelta(days=LEFT))
        .add_extension(names.value, names.critical)
        .sign(serialization.load_pem_private_key(base64.b64decode(data["ca.key"]), None), hashes.SHA256())
    )
    plain = serialization.NoEncryption(), serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return {
        "tls.crt": base64.b64encode(made.public_bytes(serialization.Encoding.PEM)).decode(),
        "tls.key": base64.b64encode(key.private_bytes(plain[1], plain[2], plain[0])).decode(),
    }


def test_a_nearly_expired_certificate_is_renewed_without_a_gap(fleet):
    fleet.node("a")
    before = shown(fleet)
    assert before[0] == before[1], f"expected the same certificate from both programs, found {before}"
    fleet.api.patch(SECRET, {"data": aged(fleet.api.get(SECRET)["data"])})
    refused, tried = [], 0

    def new():
        nonlocal tried
        tried += 1
        try:
            fleet.pod(f"p{tried}", {GPU: 1, MEM: 10})
        except ApiError as fault:
            refused.append(str(fault))
        now = shown(fleet)
        return now if now[0] == now[1] != before[0] else None

    # Each program checks the certificate once a minute.
    (_serial, end), _other = until(new, "new certificate served by both programs", 180, 1.0)
    assert end - datetime.now(UTC) > timedelta(days=85)
    assert refused == [] and tried > 1
    with pytest.raises(ApiError, match="expected a whole number"):
        fleet.pod("wrong", {GPU: 1, MEM: 0})
