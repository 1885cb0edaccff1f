# SPDX-License-Identifier: Apache-2.0
"""Calls the Kubernetes API with the library ``kubernetes``, for modules on a machine that reaches the API server."""

from __future__ import annotations

import json
import os
import traceback
from typing import Any, Callable, Sequence

from ansible.module_utils.basic import AnsibleModule, missing_required_lib

MISSING = ""
try:
    from kubernetes import config
    from kubernetes.client.exceptions import ApiException
    from kubernetes.config.config_exception import ConfigException
    from kubernetes.dynamic import DynamicClient
    from urllib3.exceptions import HTTPError
except ImportError:
    MISSING = traceback.format_exc()

# Seconds to wait for one reply of the API server.
ANSWER = 30
# Maximum number of a list's objects in one reply. So the API server sends a long list in several short replies.
PAGE = 500
# HTTP statuses if the user may not read or write an object, or if its namespace is missing. After any other status of a
# dry run the write may still succeed, because a webhook of another product may refuse only dry runs.
REFUSALS = (401, 403, 404)
MANAGER = "vgpu.fleet"


class Api:
    """Calls the API server by path. It uses the dynamic client's method ``request``, which all versions of the library
    have. The client's discovery of kinds is disabled, because it calls the API server twice and caches the replies in a
    file in /tmp.
    """

    def __init__(self, kubeconfig: str, context: str | None) -> None:
        self.client = DynamicClient(config.new_client_from_config(kubeconfig, context), discoverer=lambda *_: None)

    def _call(
        self, method: str, path: str, body: dict | None = None, kind: str = "", query: dict | None = None
    ) -> dict:
        params: dict = {"query_params": [*(query or {}).items()], "_request_timeout": ANSWER}
        if kind:
            params["content_type"] = kind
        found = self.client.request(method, path, body=body, serialize=False, **params)
        return json.loads(found.data)

    def get(self, path: str, refusals: Sequence[int] = ()) -> dict | None:
        """Returns the object, None if it does not exist, or an empty mapping if the API server replies with one of the
        HTTP statuses ``refusals``. Raises ApiException.
        """
        try:
            return self._call("GET", path)
        except ApiException as fault:
            if fault.status == 404:
                return None
            if fault.status in refusals:
                return {}
            raise

    def list(self, path: str, **query: str) -> list[dict]:
        """Returns the objects of all pages."""
        found: list[dict] = []
        more: dict[str, str] = {}
        while True:
            page = self._call("GET", path, query={"limit": str(PAGE), **query, **more})
            found += page.get("items") or []
            more = {"continue": page.get("metadata", {}).get("continue") or ""}
            if not more["continue"]:
                return found

    def post(self, path: str, body: dict, refusals: Sequence[int] = ()) -> int:
        """Creates an object. Returns the HTTP status: 201, or one of ``refusals``. Raises
        ApiException for any other.
        """
        try:
            self._call("POST", path, body, "application/json")
        except ApiException as fault:
            if fault.status in refusals:
                return fault.status
            raise
        return 201

    def apply(self, path: str, body: dict, dry_run: bool) -> dict:
        query = {"fieldManager": MANAGER, "force": "true"}
        if dry_run:
            query["dryRun"] = "All"
        return self._call("PATCH", path, body, "application/apply-patch+yaml", query)

    def refusal(self, path: str, body: dict) -> str:
        """Returns the server's message if this user may not read or apply an object; empty if the user may.

        Makes a dry run and changes nothing. If the object grants rights, the server also checks that this user has
        these rights.
        """
        try:
            self.get(path)
            self.apply(path, body, dry_run=True)
        except ApiException as fault:
            if fault.status in REFUSALS:
                return message_of(fault)
        return ""

    def trial(self, path: str, body: dict) -> tuple[int, dict | str]:
        """Creates an object in a dry run. Returns (201, the object as it would be) or (HTTP status, reason)."""
        try:
            return 201, self._call("POST", path, body, "application/json", {"dryRun": "All"})
        except ApiException as fault:
            return fault.status, message_of(fault)

    def patch(self, path: str, body: dict) -> dict:
        return self._call("PATCH", path, body, "application/strategic-merge-patch+json")

    def delete(self, path: str, version: str = "") -> None:
        """Deletes an object. ``version``: the resourceVersion that it must have."""
        body = {"preconditions": {"resourceVersion": version}} if version else None
        try:
            self._call("DELETE", path, body, "application/json" if version else "")
        except ApiException as fault:
            if fault.status != 404:
                raise


def message_of(fault: Any) -> str:
    """Returns the server's own sentence, else the reason of the HTTP status."""
    try:
        return str(json.loads(fault.body or "")["message"])
    except (ValueError, KeyError, TypeError):
        return str(fault.reason)


def answer(module: AnsibleModule, run: Callable[[Any, Any], dict], fail: Callable[[str], None] | None = None) -> None:
    """Ends the Ansible module with the result of ``run(module, api)``; on a failure calls ``fail`` with a sentence
    about it.
    """
    if MISSING:
        module.fail_json(msg=missing_required_lib("kubernetes"), exception=MISSING)
    params = module.params
    fail = fail or (lambda sentence: module.fail_json(msg=sentence))
    if not os.path.exists(params["kubeconfig"]):
        fail(f"{params['kubeconfig']}: no such file here; set vgpu_kubeconfig to a kubeconfig file of the controller")
    try:
        result = run(module, Api(params["kubeconfig"], params["context"]))
    except ApiException as fault:
        fail(f"the API server answered {fault.status}: {message_of(fault)}; check the rights of this user")
    except (ConfigException, OSError) as fault:
        fail(f"{params['kubeconfig']}: {fault}; give a kubeconfig that kubectl can use")
    except HTTPError as fault:
        test = f"try `kubectl --kubeconfig {params['kubeconfig']} get nodes` on the controller"
        fail(f"the API server of {params['kubeconfig']} cannot be reached: {fault}; {test}")
    except ValueError as fault:
        fail(f"the API server of {params['kubeconfig']}: {fault}")
    module.exit_json(**result)


def diff(changes: Any) -> list[dict[str, Any]]:
    """Returns the changes of kube_apply as a diff in Ansible's form."""
    return [
        {"before_header": one.title, "after_header": one.title, "before": one.before or {}, "after": one.after or {}}
        for one in changes
    ]
