# SPDX-License-Identifier: Apache-2.0
"""Tests the webhook's certificates: creation, reuse, renewal, trust by the CA bundle, and one Secret
for all replicas.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from datetime import UTC, datetime, timedelta

import aiohttp
import pytest
from aiohttp import web
from doubles.kube_api import KubeApi
from vgpu_plugin.node.kube_access import Access
from vgpu_scheduler import certificates, tls
from vgpu_scheduler.api import Api, ApiError
from vgpu_scheduler.tls import Tls

NAMES = ["vgpu-scheduler.kube-system.svc", "127.0.0.1"]
NOW = datetime.now(UTC)
SECRET = "/api/v1/namespaces/kube-system/secrets/vgpu-scheduler-tls"
HOOK = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/vgpu-scheduler"

AGES = [
    # columns: age of the certificate in days; expected: whether the certificate is renewed, whether the authority is
    # renewed
    (0, False, False),
    (59, False, False),
    (61, True, False),
    (2400, True, False),
    (2500, True, True),
    (4000, True, True),
    (-1, True, True),
]


@pytest.mark.parametrize(("days", "certificate", "authority"), AGES)
def test_certificate_is_renewed_after_two_thirds_of_its_lifetime(days, certificate, authority):
    old = certificates.renewed(None, NAMES, NOW)
    new = certificates.renewed(old, NAMES, NOW + timedelta(days=days))
    assert (new.certificate != old.certificate, new.authority != old.authority) == (certificate, authority)
    if authority:
        assert new.bundle == new.authority + old.authority, "clients still trust the old authority"


def test_changed_names_renew_the_certificate():
    old = certificates.renewed(None, NAMES, NOW)
    assert certificates.renewed(old, NAMES[:1], NOW).certificate != old.certificate


def test_replicas_share_one_secret_and_clients_trust_the_bundle():
    async def go():
        async with KubeApi() as double, Api(Access(double.url)) as api:
            double.put(HOOK, {"metadata": {"name": "x"}, "webhooks": [{"name": "a"}, {"name": "b"}]})
            replicas = [Tls(api, "kube-system/vgpu-scheduler-tls", NAMES, ["vgpu-scheduler"]) for _each in range(3)]
            await asyncio.gather(*(one.keep() for one in replicas))
            assert len({one._now for one in replicas}) == 1
            assert double.count("POST", "secrets") <= 3
            bundles = {one["clientConfig"]["caBundle"] for one in double.objects[HOOK]["webhooks"]}
            (bundle,) = bundles
            writes = len([call for call in double.calls if call[0] != "GET"])
            await replicas[0].keep()
            assert len([call for call in double.calls if call[0] != "GET"]) == writes, "a second check writes nothing"

            async def hello(_request):
                return web.Response(text="hello")

            app = web.Application()
            app.router.add_get("/", hello)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=replicas[0].context).start()
            url = f"https://127.0.0.1:{runner.addresses[0][1]}/"
            trusting = ssl.create_default_context(cadata=base64.b64decode(bundle).decode())
            for context, fine in ((trusting, True), (ssl.create_default_context(), False)):
                async with aiohttp.ClientSession() as session:
                    try:
                        async with session.get(url, ssl=context) as answer:
                            assert await answer.text() == "hello" and fine
                    except aiohttp.ClientConnectorCertificateError:
                        assert not fine
            await runner.cleanup()

    asyncio.run(go())


@pytest.mark.parametrize("broken", ["", "bm8gY2VydGlmaWNhdGU=", None])
def test_secret_without_a_certificate_is_replaced(broken):
    async def go():
        async with KubeApi() as double, Api(Access(double.url)) as api:
            data = {} if broken is None else dict.fromkeys(tls.FIELDS, broken)
            double.put(SECRET, {"metadata": {"name": "vgpu-scheduler-tls"}, "data": data})
            one = Tls(api, "kube-system/vgpu-scheduler-tls", NAMES, [])
            await one.keep()
            assert tls.read(double.objects[SECRET]) == one._now != None  # noqa: E711 compares three values

    asyncio.run(go())


@pytest.mark.parametrize("field", ["ca.crt", "ca.key"])
def test_secret_with_a_broken_authority_is_replaced(field):
    async def go():
        async with KubeApi() as double, Api(Access(double.url)) as api:
            await Tls(api, "kube-system/vgpu-scheduler-tls", NAMES, []).keep()
            stored = double.objects[SECRET]
            double.put(SECRET, dict(stored, data=dict(stored["data"], **{field: "bm8gY2VydGlmaWNhdGU="})))
            one = Tls(api, "kube-system/vgpu-scheduler-tls", NAMES, [])
            await one.keep()
            assert tls.read(double.objects[SECRET]) == one._now != None  # noqa: E711 compares three values

    asyncio.run(go())


def test_missing_right_to_the_secret_is_an_error():
    async def go():
        async with KubeApi() as double, Api(Access(double.url)) as api:
            double.fault = lambda _method, _path: 403
            with pytest.raises(ApiError, match="403"):
                await Tls(api, "kube-system/x", NAMES, []).keep()

    asyncio.run(go())
