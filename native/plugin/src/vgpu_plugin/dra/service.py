# SPDX-License-Identifier: Apache-2.0
"""The kubelet's service DRAPlugin, in the versions v1 and v1beta1, which have the same messages in two packages. It
only translates messages for claims.py, which prepares claims (Dynamic Resource Allocation).

The response contains every claim of the request, either with its devices or with an error text. The kubelet shows the
error text on the pod and tries again.
"""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

import grpc

from .._proto import dra_v1_pb2, dra_v1_pb2_grpc, dra_v1beta1_pb2, dra_v1beta1_pb2_grpc
from ..errors import PluginError
from .claims import Claims, Prepared
from .shares import Claim

# The service's versions as the registration with the kubelet names them, the newest first. The gRPC services have other
# names.
VERSIONS = ("v1.DRAPlugin", "v1beta1.DRAPlugin")
LONGEST_TEXT = 2000

log = logging.getLogger(__name__)


def add_to(server: grpc.Server, claims: Claims, pool: str) -> None:
    """Adds both versions of the service to the server. ``pool`` is the name of the pool to which the devices belong."""
    dra_v1_pb2_grpc.add_DRAPluginServicer_to_server(Service(dra_v1_pb2, claims, pool), server)
    dra_v1beta1_pb2_grpc.add_DRAPluginServicer_to_server(Service(dra_v1beta1_pb2, claims, pool), server)


class Service:
    """Implements one version of the service. ``api`` is the module with the messages of that version."""

    def __init__(self, api: ModuleType, claims: Claims, pool: str) -> None:
        self._api: Any = api
        self._claims = claims
        self._pool = pool

    def NodePrepareResources(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer = self._api.NodePrepareResourcesResponse()
        for one in request.claims:
            try:
                prepared = self._claims.prepare(Claim(one.namespace, one.name, one.uid))
                answer.claims[one.uid].devices.extend(self._device(device) for device in prepared)
            except Exception as fault:
                answer.claims[one.uid].error = _sentence("NodePrepareResources", one, fault)
        return answer

    def NodeUnprepareResources(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer = self._api.NodeUnprepareResourcesResponse()
        for one in request.claims:
            try:
                self._claims.unprepare(one.uid)
                answer.claims[one.uid].SetInParent()
            except Exception as fault:
                answer.claims[one.uid].error = _sentence("NodeUnprepareResources", one, fault)
        return answer

    def _device(self, prepared: Prepared) -> Any:
        out = self._api.Device(
            request_names=[prepared.request],
            pool_name=self._pool,
            device_name=prepared.device,
            cdi_device_ids=[prepared.cdi_id],
        )
        if prepared.share_id:
            out.share_id = prepared.share_id
        return out


def _sentence(call: str, claim: Any, fault: Exception) -> str:
    if not isinstance(fault, PluginError):
        log.error("%s failed for claim %s/%s", call, claim.namespace, claim.name, exc_info=fault)
        return f"{call} failed in the plugin: {fault!r:.500}; see its log"
    text = str(fault)
    log.warning("%s: %s", call, text)
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"
