# SPDX-License-Identifier: Apache-2.0
"""Tests pods that request a GPU by a dialect (the resource names of a GPU-sharing project) and get ResourceClaims, with
real Kubernetes programs. The project's webhook runs with the rights of its service account. The stock scheduler places
the pods; the project's own kube-scheduler with its extender does not run, because such pods must not need it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import API, CLAIMS, PLUGIN
from kubebox import pods
from kubebox.api import ApiError
from kubebox.cluster import SERVER, Cluster
from kubebox.gpunode import MIB, GpuNode
from kubebox.process import Service, until
from vgpu_plugin._shared.kube import scheduler_manifests
from vgpu_plugin._shared.kube.scheduler_desired import NAME, Desired

ROOT = PLUGIN.parents[1]
FILL = ("fill", "take", "1")
NAMESPACE = "/api/v1/namespaces/default"
HOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
PORT = 18449
WORDS = "label the pod vgpu.fleet/allocation: extender"


@pytest.fixture(scope="module")
def webhook(started: tuple[Cluster, GpuNode]) -> Iterator[Service]:
    cluster = started[0]
    user = f"/O=system:serviceaccounts/CN=system:serviceaccount:kube-system:{NAME}"
    kubeconfig = cluster.authority.kubeconfig(NAME, SERVER, user)
    config = {"claims": True}
    desired = Desired("image", "image", config=config, webhook_url=f"https://127.0.0.1:{PORT}")
    made = [
        one
        for one in scheduler_manifests.manifests(desired)
        if one["kind"] in ("ServiceAccount", "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
        or "Role" in one["kind"]
    ]
    for one in made:
        cluster.api.call("PATCH", f"{path_of(one)}?fieldManager=e2e&force=true", one, "application/apply-patch+yaml")
    written = cluster.folder / "claims.yaml"
    written.write_text("claims: true\n")
    environment = ROOT / ".build" / "scheduler"
    subprocess.run(
        [ROOT / "tools/venv.sh", environment, ROOT / "requirements/scheduler.txt", sys.executable], check=True
    )
    program = [str(environment / "bin/python"), "-m", "vgpu_scheduler.main", "--kubeconfig", str(kubeconfig)]
    program += ["--config", str(written), "--extender=127.0.0.1:18848", f"--webhook=127.0.0.1:{PORT}"]
    program += ["--lease=", "--names=127.0.0.1"]
    paths = {"PYTHONPATH": str(ROOT / "native/plugin/src")}
    service = Service("vgpu-scheduler", program, cluster.logs, paths)
    service.start()

    def trusted() -> bool:
        hooks = cluster.api.get(f"{HOOKS}/{NAME}")["webhooks"]
        return all(one["clientConfig"].get("caBundle") for one in hooks)

    until(trusted, f"caBundle in the configuration of each webhook; the webhook's log:\n{service.tail(20)}")
    yield service
    service.stop()
    for one in made:
        cluster.api.delete(path_of(one))


def path_of(one: dict[str, Any]) -> str:
    group, kind = one["apiVersion"], one["kind"].lower() + "s"
    base = f"/apis/{group}" if "/" in group else f"/api/{group}"
    namespace = one["metadata"].get("namespace")
    return f"{base}/namespaces/{namespace}/{kind}/{one['metadata']['name']}".replace("/namespaces/None", "")


@pytest.fixture
def labelled(cluster: Cluster, webhook: Service) -> Iterator[Callable[[str | None], None]]:
    """``labelled("dra")`` sets the namespace's label and waits until admission of pods uses it."""

    def label(value: str | None) -> None:
        cluster.api.patch(NAMESPACE, {"metadata": {"labels": {"vgpu.fleet/allocation": value}}})
        # The API server learns labels of namespaces by a watch, so admission uses the new label a moment later.
        until(lambda: seen(cluster) == value, f"admission that uses the label {value}")

    yield label
    label(None)


def seen(cluster: Cluster) -> str | None:
    """Returns the label that admission uses now, as the admission of a pod in a dry run shows.

    The only other label that the tests set is "claims", an invalid value, which admission refuses.
    """
    try:
        made = cluster.api.create(f"{NAMESPACE}/pods?dryRun=All", asking("probe", gpumem="1"))
    except ApiError as fault:
        assert "is neither dra nor extender" in str(fault), fault
        return "claims"
    return "dra" if made["spec"].get("resourceClaims") else None


def asking(name: str, labels: dict[str, str] | None = None, **limits: str) -> dict[str, Any]:
    container = pods.container([pods.WORKER, *FILL], slices=0)
    container["resources"] = {"limits": {f"nvidia.com/{key}": value for key, value in limits.items()}}
    made = pods.manifest(name, container)
    made["metadata"]["labels"] = labels or {}
    return made


def test_a_pod_in_a_labelled_namespace_gets_a_claim(
    cluster: Cluster, node: GpuNode, labelled: Callable[[str | None], None]
) -> None:
    labelled("dra")
    one = pods.create(cluster, asking("one", gpumem="3000", gpucores="30")).wait_running()
    assert int(one.wait_log(r"^total (\d+)$")[1]) == 3000 * MIB
    assert one.wait_log(r"^took 1: (\d+)$")[1] == "2"
    spec = cluster.api.get(f"{NAMESPACE}/pods/one")["spec"]
    assert spec["schedulerName"] == "default-scheduler" and "nvidia.com" not in str(spec["containers"][0]["resources"])
    (claim,) = cluster.api.get(CLAIMS)["items"]
    assert spec["resourceClaims"] == [{"name": "vgpu-main", "resourceClaimName": claim["metadata"]["name"]}]
    (result,) = claim["status"]["allocation"]["devices"]["results"]
    assert result["consumedCapacity"] == {"memory": "3000Mi", "cores": "30", "slots": "1"}
    # A second pod with the same request gets a claim of its own. This time the pod has the label, not the namespace.
    labelled(None)
    other = pods.create(cluster, asking("other", {"vgpu.fleet/allocation": "dra"}, gpumem="3000", gpucores="30"))
    other.wait_running()
    assert int(other.wait_log(r"^total (\d+)$")[1]) == 3000 * MIB
    assert len(cluster.api.get(CLAIMS)["items"]) == 2
    one.delete()
    until(
        lambda: len(cluster.api.get(CLAIMS)["items"]) == 1,
        "deletion of one of the two claims, after pod one was deleted",
    )


def test_the_claim_of_an_ended_pod_is_deleted(
    cluster: Cluster, node: GpuNode, labelled: Callable[[str | None], None]
) -> None:
    """The object of an ended pod stays, for example in a Job, but its claim is deleted."""
    labelled("dra")
    made = asking("one", gpumem="3000", gpucores="30")
    made["spec"]["containers"][0]["command"] = [pods.WORKER, "crash"]
    made["spec"]["restartPolicy"] = "Never"
    pods.create(cluster, made)
    until(lambda: phase(cluster, "one") in ("Succeeded", "Failed"), "end of pod one")
    until(lambda: not cluster.api.get(CLAIMS)["items"], "deletion of the claim of pod one")
    assert phase(cluster, "one")


def phase(cluster: Cluster, name: str) -> str:
    return cluster.api.get(f"{NAMESPACE}/pods/{name}")["status"]["phase"]


def test_a_pod_chooses_its_gpu_by_uuid_and_model(
    cluster: Cluster, node: GpuNode, labelled: Callable[[str | None], None]
) -> None:
    """The API server accepts the claim's CEL expressions, and the scheduler evaluates them on the published devices."""
    labelled("dra")
    slices = cluster.api.get(f"{API}/resourceslices")["items"]
    found = [one for part in slices for one in part["spec"]["devices"]]
    last = found[-1]
    made = asking("one", gpumem="1000", gpucores="10")
    made["metadata"]["annotations"] = {
        "nvidia.com/use-gpuuuid": last["attributes"]["uuid"]["string"],
        "nvidia.com/nouse-gpuuuid": "GPU-none",
        "nvidia.com/use-gputype": "T4,A100",
        "nvidia.com/nouse-gputype": 'V"100',
    }
    pods.create(cluster, made).wait_running()
    (claim,) = cluster.api.get(CLAIMS)["items"]
    (result,) = claim["status"]["allocation"]["devices"]["results"]
    assert result["device"] == last["name"]


# columns: resource limits of the pod, label of the namespace; expected text of the refusal
REFUSED = [
    ({"gpumem-percentage": "50"}, "dra", WORDS),
    ({"gpu": "1"}, "dra", WORDS),
    ({"gpumem": "3000"}, "claims", "is neither dra nor extender"),
]


@pytest.mark.parametrize(("limits", "label", "words"), REFUSED)
def test_requests_without_an_equivalent_claim_are_refused(
    cluster: Cluster,
    labelled: Callable[[str | None], None],
    limits: dict[str, str],
    label: str,
    words: str,
) -> None:
    labelled(label)
    with pytest.raises(ApiError, match=words):
        cluster.api.create(f"{NAMESPACE}/pods", asking("one", **limits))


def test_a_claim_that_a_tenant_wrote_is_not_used(
    cluster: Cluster, labelled: Callable[[str | None], None], webhook: Service
) -> None:
    """If an annotation names another owner's claim, the pod waits with that reason and the claim stays unchanged."""
    labelled("dra")
    dry = cluster.api.create(f"{NAMESPACE}/pods?dryRun=All", asking("one", gpumem="2000", gpucores="20"))
    assert cluster.api.get(CLAIMS)["items"] == [], "expected no claim after a dry run"
    spec = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "none"}}]}}
    body = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "own"}, "spec": spec}
    before = cluster.api.create(CLAIMS, body)
    forged = pods.manifest("forged", pods.container([pods.WORKER], slices=0))
    said = json.loads(dry["metadata"]["annotations"]["vgpu.fleet/claims"])
    said["claims"] = {"own": [1, 1000, 10], "made": [1, 1000, 10]}
    forged["metadata"]["labels"] = {"vgpu.fleet/claims": "wanted"}
    forged["metadata"]["annotations"] = {"vgpu.fleet/claims": json.dumps(said)}
    forged["spec"]["resourceClaims"] = [{"name": name, "resourceClaimName": name} for name in said["claims"]]
    cluster.api.create(f"{NAMESPACE}/pods", forged)

    def told() -> list[str]:
        events = cluster.api.get("/api/v1/namespaces/default/events")["items"]
        return [one["message"] for one in events if one["reason"] == "GpuClaimRefused"]

    until(told, f"event GpuClaimRefused; the webhook's log:\n{webhook.tail(20)}")
    assert "ResourceClaim default/own: expected no claim or a claim of this pod, found another owner" in told()[0]
    assert cluster.api.get(f"{CLAIMS}/own")["metadata"]["uid"] == before["metadata"]["uid"]
    assert phase(cluster, "forged") == "Pending"
