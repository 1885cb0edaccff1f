# SPDX-License-Identifier: Apache-2.0
"""Tests how the device plugin connects to the API server: by kubeconfig files, tokens and certificates."""

from __future__ import annotations

import base64
import json
import ssl
import subprocess

import pytest
from doubles.kube_api import write_kubeconfig
from vgpu_plugin.errors import Fatal
from vgpu_plugin.node import kube_access, kube_api

from ..node_api import NODE, NodeApi


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """Returns a self-signed certificate for 127.0.0.1, and a certificate of another authority."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("server", "stranger"):
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
                *("-keyout", folder / f"{name}.key", "-out", folder / f"{name}.crt", "-days", "2"),
                *("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"),
            ],
            check=True,
            capture_output=True,
        )
    return folder


@pytest.fixture
def server(authority):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / "server.crt", authority / "server.key")
    with NodeApi(token="secret", tls=context) as double:
        yield double


def reached(tmp_path, cluster, user):
    path = write_kubeconfig(tmp_path / "config", cluster, user)
    return kube_api.Api(kube_access.read(str(path))).get(NODE)["metadata"]["name"]


def test_known_authority_by_file_and_by_data(tmp_path, authority, server):
    (tmp_path / "token").write_text("secret\n")
    ca = authority / "server.crt"
    for cluster in (
        {"certificate-authority": str(ca)},
        {"certificate-authority-data": base64.b64encode(ca.read_bytes()).decode()},
        {"insecure-skip-tls-verify": True},
    ):
        for user in ({"token": "secret"}, {"tokenFile": "token"}):
            assert reached(tmp_path, {"server": server.url, **cluster}, user) == "node-1"


def test_unknown_certificate_authority_is_refused(tmp_path, authority, server):
    for cluster in ({"certificate-authority": str(authority / "stranger.crt")}, {}):
        with pytest.raises(kube_api.ApiError, match="CERTIFICATE_VERIFY_FAILED"):
            reached(tmp_path, {"server": server.url, **cluster}, {"token": "secret"})
    with pytest.raises(kube_api.ApiError, match="CERTIFICATE_VERIFY_FAILED"):
        cluster = {"certificate-authority": str(authority / "server.crt"), "tls-server-name": "elsewhere"}
        reached(tmp_path, {"server": server.url, **cluster}, {"token": "secret"})


def test_token_is_read_again_for_each_call(tmp_path, authority, server):
    token = tmp_path / "token"
    token.write_text("old")
    cluster = {"server": server.url, "certificate-authority": str(authority / "server.crt")}
    path = write_kubeconfig(tmp_path / "config", cluster, {"tokenFile": "token"})
    api = kube_api.Api(kube_access.read(str(path)))
    with pytest.raises(kube_api.ApiError, match="401: Unauthorized"):
        api.get(NODE)
    token.write_text("secret")
    assert api.get(NODE)["kind"] == "Node"


def test_client_certificate_is_sent(tmp_path, authority):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / "server.crt", authority / "server.key")
    context.load_verify_locations(authority / "stranger.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    with NodeApi(tls=context) as double:
        cluster = {"server": double.url, "certificate-authority": str(authority / "server.crt")}
        files = {"client-certificate": authority / "stranger.crt", "client-key": authority / "stranger.key"}
        assert reached(tmp_path, cluster, {key: str(path) for key, path in files.items()}) == "node-1"
        data = {f"{key}-data": base64.b64encode(path.read_bytes()).decode() for key, path in files.items()}
        assert reached(tmp_path, cluster, data) == "node-1"
        with pytest.raises(kube_api.ApiError):
            reached(tmp_path, cluster, {"token": "secret"})


def test_service_account_of_a_pod(tmp_path, authority, server, monkeypatch):
    (tmp_path / "token").write_text("secret")
    (tmp_path / "ca.crt").write_bytes((authority / "server.crt").read_bytes())
    host, port = server.url.removeprefix("https://").split(":")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    assert kube_api.Api(kube_access.read("in-cluster", tmp_path)).get(NODE)["kind"] == "Node"
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    with pytest.raises(Fatal, match="KUBERNETES_SERVICE_HOST is missing, so this program does not run in a pod"):
        kube_access.read("in-cluster", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "::1")
    assert kube_access.read("in-cluster", tmp_path).server == f"https://[::1]:{port}"
    (tmp_path / "token").unlink()
    with pytest.raises(Fatal, match="token is missing, so this program does not run in a pod"):
        kube_access.read("in-cluster", tmp_path)


CONFIG = {
    "current-context": "here",
    "contexts": [{"name": "here", "context": {"cluster": "c"}}],
    "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
}
# columns: an invalid kubeconfig file; expected words of the error
FAULTS = [
    ("{", "not a kubeconfig file"),
    ("[]", 'contexts: no entry named "None"'),
    ({**CONFIG, "current-context": "there"}, 'contexts: no entry named "there"'),
    ({**CONFIG, "clusters": []}, 'clusters: no entry named "c"'),
    ({**CONFIG, "clusters": [{"name": "c", "cluster": {"server": "127.0.0.1:1"}}]}, "expected https://host:port"),
    (
        {
            **CONFIG,
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": {"exec": {"command": "aws"}}}],
        },
        "exec is not supported here",
    ),
    (
        {**CONFIG, "clusters": [{"name": "c", "cluster": {"server": "https://h", "certificate-authority-data": "%"}}]},
        "not base64",
    ),
]


@pytest.mark.parametrize(("config", "words"), FAULTS, ids=[one[1] for one in FAULTS])
def test_invalid_kubeconfig_error_names_the_place(tmp_path, config, words):
    path = tmp_path / "config"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(Fatal, match=words) as fault:
        kube_access.read(str(path))
    assert str(path) in str(fault.value)


def test_unreachable_server_or_missing_kubeconfig_is_an_error(tmp_path):
    with pytest.raises(kube_api.ApiError, match=r"127\.0\.0\.1:1: .*refused"):
        reached(tmp_path, {"server": "http://127.0.0.1:1"}, None)
    with pytest.raises(Fatal, match="No such file"):
        kube_access.read(str(tmp_path / "nothing"))
