# SPDX-License-Identifier: Apache-2.0
"""The program itself: its files, its sockets, its end."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
import ssl
import sys

import aiohttp
import pytest
import yaml
from doubles.kube_api import KubeApi, write_kubeconfig
from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_scheduler import api, settings

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


def test_the_program_serves_both_and_ends_at_sigterm(tmp_path):
    async def go():
        async with KubeApi() as double, aiohttp.ClientSession() as session:
            double.put(HOOK, {"metadata": {"name": "x"}, "webhooks": [{"name": "a"}]})
            gpus = pod_annotations.write_gpus(node("n0", 2))
            double.put("/api/v1/nodes/n0", {"metadata": {"name": "n0", "annotations": {pod_annotations.GPUS: gpus}}})
            inner, outer = free_port(), free_port()
            (tmp_path / "config.yaml").write_text("plain: default\ndefaultMemoryMiB: 700\n")
            command = ["--kubeconfig", str(write_kubeconfig(tmp_path / "kubeconfig", double.url)), "--lease="]
            command += ["--config", str(tmp_path / "config.yaml"), "--names=127.0.0.1"]
            command += [f"--extender=127.0.0.1:{inner}", f"--webhook=127.0.0.1:{outer}"]
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
                    # The API server puts its timeout behind the path.
                    url = f"https://127.0.0.1:{outer}/mutate?timeout=5s"
                    async with session.post(url, data=review, ssl=context) as answer:
                        return await answer.json()

                response = (await eventually(reviewed))["response"]
                assert response["allowed"] and b"vgpu-scheduler" in base64.b64decode(response["patch"])
                program.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(program.wait(), 30) == 0
            finally:
                if program.returncode is None:
                    program.kill()
                    await program.wait()

    asyncio.run(go())


FILES = [
    ({}, {}, None),
    ({"defaultMemoryMiB": 0, "plain": "slice", "nodePolicy": "spread"}, {"plain": "slice"}, None),
    ({"resourceNames": {"count": "example.com/gpu"}}, {"gpu": "example.com/gpu"}, None),
    ({"defaultMemory": 5}, {}, 'unknown key "defaultMemory"; did you mean "defaultMemoryMiB"'),
    ({"plain": "hole"}, {}, 'did you mean "whole"'),
    ({"defaultCores": 101}, {}, "from 0 to 100"),
    ({"gpuPolicy": "least"}, {}, "one of binpack, spread, topology"),
    ({"resourceNames": {"count": "nvidia.com/gpumem"}}, {}, "two resources have one name"),
    ([], {}, "expected a mapping"),
]


@pytest.mark.parametrize(("document", "config", "fault"), FILES)
def test_configuration_files(tmp_path, document, config, fault):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    if fault:
        if document == []:
            path.write_text("- 1\n")
        with pytest.raises(settings.SettingsError) as raised:
            settings.load(path)
        assert fault in str(raised.value) and str(path) in str(raised.value)
    else:
        assert settings.load(path).config == settings.Config()._replace(**config, **defaults(document))


def defaults(document):
    return {"default_memory_mib": document["defaultMemoryMiB"]} if "defaultMemoryMiB" in document else {}


@pytest.mark.parametrize("text", ["", "{}", "current-context: a", "- 1", "a: b: c", "\x00"])
def test_kubeconfigs_that_are_none(tmp_path, text):
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(api.ApiError, match="is no kubeconfig"):
        api.from_kubeconfig(path)
    with pytest.raises(api.ApiError, match="is no kubeconfig"):
        api.from_kubeconfig(tmp_path / "nothing")


def test_a_token_file_is_read_again_when_it_changes(tmp_path):
    path = tmp_path / "token"
    path.write_text("one\n")
    access = api.Access("http://x", token_file=path)
    assert access.headers() == {"Authorization": "Bearer one"}
    path.write_text("two\n")
    os.utime(path, (1, 1))
    assert access.headers() == {"Authorization": "Bearer two"}
