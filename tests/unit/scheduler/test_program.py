# SPDX-License-Identifier: Apache-2.0
"""Tests the scheduler as a whole program: its configuration files, its sockets and its shutdown."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
import ssl
import subprocess
import sys

import aiohttp
import pytest
import yaml
from aiohttp import web
from doubles.kube_api import KubeApi, write_kubeconfig
from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_plugin.node import kube_access
from vgpu_scheduler import api, main, settings

from .conftest import ROOT, SITE
from .samples import node

HOOK = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/vgpu-scheduler"


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


async def eventually(ask, seconds=60.0):
    end = asyncio.get_running_loop().time() + seconds
    while True:
        try:
            return await ask()
        except (aiohttp.ClientError, AssertionError, KeyError):
            assert asyncio.get_running_loop().time() < end
            await asyncio.sleep(0.1)


def test_program_serves_extender_and_webhook_and_drains_at_sigterm(tmp_path):
    async def go():
        async with KubeApi() as double, aiohttp.ClientSession() as session:
            double.put(HOOK, {"metadata": {"name": "x"}, "webhooks": [{"name": "a"}]})
            gpus = pod_annotations.write_gpus(node("n0", 2))
            double.put("/api/v1/nodes/n0", {"metadata": {"name": "n0", "annotations": {pod_annotations.GPUS: gpus}}})
            inner, outer = free_port(), free_port()
            (tmp_path / "config.yaml").write_text("plain: default\ndefaultMemoryMiB: 700\n")
            command = ["--kubeconfig", str(write_kubeconfig(tmp_path / "kubeconfig", double.url)), "--lease="]
            command += ["--config", str(tmp_path / "config.yaml"), "--names=127.0.0.1"]
            command += [f"--extender=127.0.0.1:{inner}", f"--webhook=127.0.0.1:{outer}", "--drain-seconds=3"]
            program = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "vgpu_scheduler.main",
                *command,
                env={**os.environ, "PYTHONPATH": f"{ROOT / 'native/plugin/src'}:{SITE}"},
            )
            try:

                async def ready():
                    async with session.get(f"http://127.0.0.1:{inner}/readyz") as answer:
                        assert answer.status == 200

                await eventually(ready)
                pod = {
                    "metadata": {"name": "a", "uid": "u"},
                    "spec": {"containers": [{"name": "m", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]},
                }
                body = json.dumps({"Pod": pod, "NodeNames": ["n0", "n1"]})
                async with session.post(f"http://127.0.0.1:{inner}/filter", data=body) as answer:
                    assert (await answer.json())["NodeNames"] == ["n0"]

                async def trusted():
                    return double.objects[HOOK]["webhooks"][0]["clientConfig"]["caBundle"]

                bundle = base64.b64decode(await eventually(trusted)).decode()
                context = ssl.create_default_context(cadata=bundle)
                review = json.dumps({"request": {"uid": "9", "object": pod}})

                async def reviewed():
                    # The API server appends its timeout to the path of the webhook.
                    url = f"https://127.0.0.1:{outer}/mutate?timeout=5s"
                    async with session.post(url, data=review, ssl=context) as answer:
                        return await answer.json()

                response = (await eventually(reviewed))["response"]
                assert response["allowed"] and b"vgpu-scheduler" in base64.b64decode(response["patch"])
                program.send_signal(signal.SIGTERM)

                async def refused():
                    async with session.get(f"https://127.0.0.1:{outer}/readyz", ssl=context) as answer:
                        assert (answer.status, await answer.text()) == (503, "this replica is shutting down\n")

                await eventually(refused)
                # Callers that do not know of the shutdown yet must still get a response. They call another replica next
                # time.
                url = f"https://127.0.0.1:{outer}/mutate?timeout=5s"
                async with session.post(url, data=review, ssl=context) as answer:
                    assert (await answer.json())["response"]["allowed"]
                    assert answer.headers["Connection"] == "close"
                assert await asyncio.wait_for(program.wait(), 30) == 0
            finally:
                if program.returncode is None:
                    program.kill()
                    await program.wait()

    asyncio.run(go())


# columns: content of the configuration file; expected settings, expected words of the error (None if the file is valid)
FILES = [
    ({}, {}, None),
    ({"defaultMemoryMiB": 0, "plain": "slice", "nodePolicy": "spread"}, {"plain": "slice"}, None),
    ({"resourceNames": {"count": "example.com/gpu"}}, {"gpu": "example.com/gpu"}, None),
    ({"defaultMemory": 5}, {}, 'unknown key "defaultMemory"; did you mean "defaultMemoryMiB"'),
    ({"plain": "hole"}, {}, 'did you mean "whole"'),
    ({"defaultCores": 101}, {}, "from 0 to 100"),
    ({"runtimeHandlers": ["kata-qemu"]}, {}, None),
    ({"runtimeHandlers": ["Kata"]}, {}, "runtimeHandlers[0]: expected a handler of a RuntimeClass"),
    ({"tooManyGpus": "wait"}, {}, None),
    ({"claims": True}, {}, None),
    ({"claims": "dra"}, {}, "expected true or false"),
    ({"tooManyGpus": "wat"}, {}, 'did you mean "wait"'),
    ({"gpuPolicy": "least"}, {}, "one of binpack, spread, topology"),
    ({"resourceNames": {"count": "nvidia.com/gpumem"}}, {}, "two resources have the same name"),
    ([], {}, "expected a mapping"),
]


@pytest.mark.parametrize(("document", "config", "fault"), FILES)
def test_configuration_file_is_read_or_refused(tmp_path, document, config, fault):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    if fault:
        if document == []:
            path.write_text("- 1\n")
        with pytest.raises(settings.SettingsError) as raised:
            settings.load(path)
        assert fault in str(raised.value) and str(path) in str(raised.value)
    else:
        assert settings.load(path).runtime_handlers == tuple(document.get("runtimeHandlers", ()))
        assert settings.load(path).claims is document.get("claims", False)
        assert settings.load(path).too_many == document.get("tooManyGpus", "refuse")
        assert settings.load(path).config == settings.Config()._replace(**config, **defaults(document))


def defaults(document):
    return {"default_memory_mib": document["defaultMemoryMiB"]} if "defaultMemoryMiB" in document else {}


class Server:
    """A server that responds to every call and records the caller's token."""

    def __init__(self, tls=None):
        self.shown = []
        self.tls = tls

    async def __aenter__(self):
        async def handle(request):
            self.shown.append(request.headers.get("Authorization", ""))
            return web.json_response({})

        application = web.Application()
        application.router.add_route("*", "/{path:.*}", handle)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self.tls)
        await site.start()
        scheme = "https" if self.tls else "http"
        self.url = f"{scheme}://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_about):
        await self._runner.cleanup()


def test_token_file_of_a_kubeconfig_is_read_for_each_call(tmp_path):
    async def run():
        async with Server() as server:
            path = write_kubeconfig(tmp_path / "config", server.url, {"tokenFile": "token"})
            async with api.Api(kube_access.read(str(path))) as client:
                for token in ("one", "two"):
                    (tmp_path / "token").write_text(token + "\n")
                    await client.pod("default", "a")
            return server.shown

    assert asyncio.run(run()) == ["Bearer one", "Bearer two"]


def test_certificate_is_checked_against_the_kubeconfigs_server_name(tmp_path):
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    command = [
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=x", "-addext", "subjectAltName=DNS:api.x"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)

    async def ask(**cluster):
        async with Server(tls) as server:
            known = {"certificate-authority": str(certificate), **cluster}
            path = write_kubeconfig(tmp_path / "config", {"server": server.url, **known}, {"token": "a"})
            async with api.Api(kube_access.read(str(path))) as client:
                await client.pod("default", "a")

    asyncio.run(ask(**{"tls-server-name": "api.x"}))
    with pytest.raises(api.Unknown, match="CERTIFICATE_VERIFY_FAILED"):
        asyncio.run(ask())


def test_program_ends_and_names_an_unusable_kubeconfig(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["vgpu-scheduler", "--kubeconfig", str(tmp_path / "nothing")])
    assert main.main() == 1
    assert f"{tmp_path / 'nothing'}: No such file" in capsys.readouterr().err
