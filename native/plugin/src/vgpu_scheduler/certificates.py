# SPDX-License-Identifier: Apache-2.0
"""The certificates of the webhook. This module creates and renews its own certificate authority and the certificates
that the authority signs.

One Secret holds them for all replicas. The authority is valid much longer than its certificates, so the API server,
which trusts the authority, needs no change when a certificate is renewed. When the authority is renewed, the bundle
contains both the new and the old one.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS, CERTIFICATE_DAYS = 3650, 90
# Certificates are valid from one hour before their creation, so that machines whose clocks are behind accept them.
SKEW = timedelta(hours=1)


class Certificates(NamedTuple):
    """The certificates and keys as PEM texts. ``bundle`` is what the API server trusts: the authority, and for some
    time its predecessor too.
    """

    authority: bytes
    authority_key: bytes
    certificate: bytes
    key: bytes
    bundle: bytes


def renewed(old: Certificates | None, names: Sequence[str], now: datetime | None = None) -> Certificates:
    """Returns the old certificates if at least a third of their validity is left and they match these names.
    Otherwise returns a new certificate; the authority stays as long as a third of its own validity is left.
    """
    now = now or datetime.now(UTC)
    authority, authority_key, bundle = _authority(old, now)
    if old is not None and authority == old.authority and _good(old, names, now):
        return old
    key = ec.generate_private_key(ec.SECP256R1())
    issuer, issuer_key = _load(authority), serialization.load_pem_private_key(authority_key, None)
    alternatives = [_alternative(name) for name in names]
    certificate = (
        _builder(names[0], issuer.subject, key, now, CERTIFICATE_DAYS)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(issuer_key, hashes.SHA256())  # type: ignore[arg-type]
    )
    return Certificates(authority, authority_key, _pem(certificate), _key_pem(key), bundle)


def refuse_broken(found: Certificates) -> None:
    """Raises ValueError or TypeError if a field is not a certificate, or not a key without password."""
    for pem in (found.authority, found.certificate):
        _load(pem)
    for pem in (found.authority_key, found.key):
        serialization.load_pem_private_key(pem, None)


def _authority(old: Certificates | None, now: datetime) -> tuple[bytes, bytes, bytes]:
    if old is not None and _fresh(old.authority, now):
        return old.authority, old.authority_key, old.bundle
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name("vgpu-scheduler authority")
    certificate = (
        _builder("vgpu-scheduler authority", subject, key, now, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return _pem(certificate), _key_pem(key), _pem(certificate) + (old.authority if old is not None else b"")


def _good(old: Certificates, names: Sequence[str], now: datetime) -> bool:
    if not _fresh(old.certificate, now):
        return False
    certificate = _load(old.certificate)
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    return list(found) == [_alternative(name) for name in names]


def _fresh(pem: bytes, now: datetime) -> bool:
    """Returns whether at least a third of the certificate's validity is left."""
    certificate = _load(pem)
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return begin <= now and end - now > (end - begin) / 3


def _builder(
    name: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + timedelta(days=days))
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _load(pem: bytes) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    kind = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption())
