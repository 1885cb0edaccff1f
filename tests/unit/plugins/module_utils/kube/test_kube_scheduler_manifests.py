# SPDX-License-Identifier: Apache-2.0
"""Tests the Kubernetes objects of the scheduler: a kube-scheduler with our extender (the HTTP service that it calls for
pods with GPUs), and webhooks that change and check pods. A dialect is the set of resource names by which one project,
such as HAMi, requests parts of GPUs. tests/e2e_scheduler applies the objects to a real API server.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.kube import (
    plan_policy,
    scheduler_desired,
    scheduler_manifests,
    scheduler_webhooks,
)
from ansible_collections.vgpu.fleet.plugins.module_utils.kube.scheduler_desired import Desired
from ansible_collections.vgpu.fleet.plugins.module_utils.pods import (
    annotations as pod_annotations,
)
from ansible_collections.vgpu.fleet.plugins.module_utils.pods import burst, fractions
from ansible_collections.vgpu.fleet.plugins.module_utils.pods import (
    resizes as pod_resizes,
)
from ansible_collections.vgpu.fleet.plugins.module_utils.pods import (
    resources as pod_resources,
)

DESIRED = Desired("registry.example/vgpu-scheduler:1", "registry.example/kube-scheduler:v1.34.2")


PLANS = scheduler_desired.ANNOTATIONS


def made(desired=DESIRED):
    return {(one["kind"], one["metadata"]["name"]): one for one in scheduler_manifests.manifests(desired)}


def test_every_object_has_its_namespace_and_label():
    found = made()
    assert len(found) == len(scheduler_manifests.manifests(DESIRED))
    for (kind, _name), one in found.items():
        cluster = kind.startswith(("Cluster", "Validating", "Mutating"))
        assert ("namespace" in one["metadata"]) != cluster, kind
    assert json.loads(json.dumps(list(found.values())))


def test_every_resource_of_every_dialect_is_in_both_configurations():
    config = pod_resources.Config()
    names = {config.gpu, config.shared, config.memory, config.memory_percentage, config.cores, config.cores_also}
    names |= {config.priority, pod_resources.GPU_MEM, pod_resources.GPU_CORE}
    names |= {pod_resources.VCUDA_CORE, pod_resources.VCUDA_MEMORY, pod_resources.QGPU_CORE, pod_resources.QGPU_MEMORY}
    names |= {pod_resources.VOLCANO, pod_resources.VOLCANO_MEMORY, pod_resources.VOLCANO_PERCENTAGE}
    names |= {pod_resources.VOLCANO_CORES}
    assert set(scheduler_desired.resource_names({})) == names
    managed = scheduler_manifests.extender({})["managedResources"]
    assert {one["name"] for one in managed} == names
    # A node advertises only the number of GPUs. The kube-scheduler must ignore the other resources, because it would
    # find them on no node.
    assert [one["name"] for one in managed if not one["ignoredByScheduler"]] == [config.gpu]
    asking = (*fractions.ASKING, burst.REQUEST)
    assert asking == scheduler_desired.ASKING and scheduler_desired.NOT_OF == fractions.KAI_SCHEDULER
    condition = scheduler_webhooks.gpu_condition({})
    assert all(f"'{name}' in object.metadata.annotations" in condition for name in asking)
    assert f"object.metadata.annotations.exists(k, k.startsWith('{fractions.OF_CONTAINER}'))" in condition
    ours = {pod_annotations.PLAN, pod_annotations.GIVEN, pod_resizes.RESIZED, pod_resizes.FORMER}
    assert set(scheduler_desired.ANNOTATIONS) == ours
    assert scheduler_desired.RESIZE == pod_resizes.RESIZE


def test_names_of_the_configuration_reach_extender_and_webhook():
    config = {"resourceNames": {"count": "example.com/gpu", "memory": "example.com/mem"}}
    names = [one["name"] for one in scheduler_manifests.extender(config)["managedResources"]]
    assert names[:3] == ["example.com/gpu", "example.com/gpu.shared", "example.com/mem"]
    condition = scheduler_webhooks.gpu_condition(config)
    assert "k == 'example.com/mem'" in condition and "k == 'example.com/gpu'" in condition


POLICIES = [(True, True, "Fail"), (True, False, "Ignore"), (False, True, "Ignore"), (False, False, "Ignore")]


@pytest.mark.parametrize(("conditions", "closed", "policy"), POLICIES)
def test_webhooks_fail_closed_only_with_match_conditions(conditions, closed, policy):
    found = made(DESIRED._replace(match_conditions=conditions, fail_closed=closed, policies=False))
    for kind in ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"):
        for hook in found[kind, "vgpu-scheduler"]["webhooks"]:
            words_alone = hook["name"] in ("plans.vgpu.fleet", "resizes.vgpu.fleet")
            assert hook["failurePolicy"] == ("Ignore" if words_alone else policy)
            assert ("matchConditions" in hook) == conditions
            if hook["name"] == "resizes.vgpu.fleet":
                # This webhook must get the pods whose resize request changed, and no other pods.
                assert hook["rules"][0]["operations"] == ["UPDATE"] and "objectSelector" not in hook
                assert hook["matchConditions"][0]["expression"].count("vgpu.fleet/resize'") == 4
                continue
            if "plans." in hook["name"]:
                # A pod that is created with a plan (the annotation with its allocated devices) could take devices of
                # others, so no label may exempt it from this webhook. A CREATE request has no oldObject, so
                # the condition of its webhook must not use oldObject.
                assert "objectSelector" not in hook and "namespaceSelector" not in hook
                created = hook["rules"][0]["operations"] == ["CREATE"]
                assert not conditions or ("oldObject" in hook["matchConditions"][0]["expression"]) != created
                assert hook["rules"][0]["resources"] == (["pods"] if created else ["pods", "pods/status"])
                continue
            keys = [one["key"] for one in hook["objectSelector"]["matchExpressions"]]
            assert keys == list(scheduler_desired.IGNORE_LABELS)


def test_plans_are_guarded_by_the_policy_or_else_by_the_webhook():
    for policies in (True, False):
        found = made(DESIRED._replace(policies=policies))
        hooks = [one["name"] for one in found["ValidatingWebhookConfiguration", "vgpu-scheduler"]["webhooks"]]
        assert ("plans.vgpu.fleet" in hooks and "new-plans.vgpu.fleet" in hooks) != policies
        assert (("ValidatingAdmissionPolicy", plan_policy.NAME) in found) == policies
        assert (("ValidatingAdmissionPolicyBinding", plan_policy.NAME) in found) == policies


def test_policy_of_plans_names_its_writers_and_every_write_operation():
    desired = DESIRED._replace(namespace="gpu", may_give=("giver",))
    policy = made(desired)["ValidatingAdmissionPolicy", plan_policy.NAME]
    rules = policy["spec"]["matchConstraints"]["resourceRules"]
    assert {(operation, one) for rule in rules for operation in rule["operations"] for one in rule["resources"]} == {
        *(("CREATE", one) for one in ("pods", "pods/binding", "bindings")),
        *(("UPDATE", one) for one in ("pods", "pods/status", "pods/resize", "pods/ephemeralcontainers")),
    }
    assert set(policy["spec"]["matchConstraints"]) == {"resourceRules"} and policy["spec"]["failurePolicy"] == "Fail"
    by_name = {
        name: one["expression"]
        for one in policy["spec"]["validations"]
        for name in PLANS
        if f'"{name}"' in one["expression"]
    }
    scheduler, both = (
        json.dumps(users)
        for users in (
            ["system:serviceaccount:gpu:vgpu-scheduler"],
            ["system:serviceaccount:gpu:vgpu-scheduler", "giver"],
        )
    )
    for name, users in zip(PLANS, (scheduler, both, scheduler, both), strict=True):
        assert by_name[name].startswith(f"request.userInfo.username in {users} ||"), name
    assert pod_resizes.RESIZE not in by_name
    # The promised memory of a pod (the part of its limit that it always gets) may be set only when the pod itself is
    # created, not by its Binding, and never changed.
    (fixed,) = [one for one in policy["spec"]["validations"] if f'"{burst.REQUEST}"' in one["expression"]]
    assert fixed["expression"].startswith('(oldObject == null && request.kind.kind == "Pod") || ')
    assert burst.REQUEST in policy["spec"]["matchConditions"][0]["expression"]
    binding = made(desired)["ValidatingAdmissionPolicyBinding", plan_policy.NAME]["spec"]
    assert binding == {"policyName": plan_policy.NAME, "validationActions": ["Deny"]}


def test_no_other_file_gives_an_account_rights():
    """Only these files give rights to service accounts. If this test finds another file, add a test of its rights like
    test_rights.py (scheduler, device plugin) or test_dra_rights.py (claims)."""
    root = Path(scheduler_manifests.__file__).parents[3]
    files = [path for folder in ("plugins", "roles", "playbooks") for path in (root / folder).rglob("*.*")]
    kinds = ("ClusterRole", "RoleBinding")
    found = {
        path.name for path in files if path.suffix in (".py", ".yml", ".j2") and any(map(path.read_text().count, kinds))
    }
    assert found == {"scheduler_manifests.py", "device_plugin_manifests.py", "dra_manifests.py"}


def test_rights_that_read_or_change_one_object_name_it():
    """A rule that reads or changes single objects must name them. tests/unit/scheduler/test_rights.py shows that the
    program needs exactly these rights."""
    for rule in [*made()["ClusterRole", "vgpu-scheduler"]["rules"], *made()["Role", "vgpu-scheduler"]["rules"]]:
        # Without names the program could read other owners' Secrets and change other owners' webhooks.
        if rule["resources"] != ["pods"] and {"update", "get"} & set(rule["verbs"]):
            assert rule["resourceNames"], rule


def test_scheduler_may_update_only_its_two_election_leases():
    rules = made()["Role", "vgpu-scheduler"]["rules"]
    named = [rule for rule in rules if rule["resources"] == ["leases"] and "update" in rule["verbs"]]
    assert [rule["resourceNames"] for rule in named] == [["vgpu-scheduler", "vgpu-scheduler-extender"]]
    removed = [(one["kind"], one["metadata"]) for one in scheduler_manifests.leases(DESIRED)]
    assert removed == [
        ("Lease", {"name": name, "namespace": "kube-system"}) for name in ("vgpu-scheduler", "vgpu-scheduler-extender")
    ]


@pytest.mark.parametrize(("log_format", "option"), [("text", False), ("json", True)])
def test_log_format(log_format, option):
    """The variable for the log format sets an option of the scheduler's container."""
    found = made(DESIRED._replace(log_format=log_format))
    ours = found["Deployment", "vgpu-scheduler"]["spec"]["template"]["spec"]["containers"][0]
    assert ("--log-format=json" in ours["command"]) is option


@pytest.mark.parametrize("names", [(), ("monitoring",), ("b", "a")])
def test_metrics_are_served_only_to_configured_namespaces(names):
    found = made(DESIRED._replace(metrics_namespaces=names))
    ours = found["Deployment", "vgpu-scheduler"]["spec"]["template"]["spec"]["containers"][0]
    assert ("--metrics=:9411" in ours["command"]) is bool(names)
    assert [one["containerPort"] for one in ours["ports"]] == [8443, *([9411] if names else [])]
    kube = found["Deployment", "vgpu-scheduler"]["spec"]["template"]["spec"]["containers"][1]
    assert [one["containerPort"] for one in kube["ports"]] == [10259]
    policy = found["NetworkPolicy", "vgpu-scheduler"]["spec"]
    pods = found["Deployment", "vgpu-scheduler"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= pods.items()
    assert policy["policyTypes"] == ["Ingress"]
    rules = {port["port"]: rule.get("from") for rule in policy["ingress"] for port in rule["ports"]}
    assert rules.pop(8443) is None
    assert set(rules) == ({9411, 10259} if names else set())
    if not names:
        return
    assert rules[9411] == rules[10259]
    (selector,) = rules[9411]
    (who,) = selector["namespaceSelector"]["matchExpressions"]
    assert (who["key"], who["operator"], set(who["values"])) == ("kubernetes.io/metadata.name", "In", set(names))


def test_kube_scheduler_that_hangs_is_started_again():
    """The kubelet restarts a kube-scheduler that hangs, by a probe at the address of the pod. At that address the
    kube-scheduler serves nothing but its health to every client."""
    (_ours, kube) = made()["Deployment", "vgpu-scheduler"]["spec"]["template"]["spec"]["containers"]
    assert kube["livenessProbe"]["httpGet"] == {"scheme": "HTTPS", "port": 10259, "path": "/healthz"}
    assert "readinessProbe" not in kube, "the webhook in this pod must serve without the kube-scheduler"
    assert not [word for word in kube["command"] if word.startswith("--bind-address")]


def test_options_name_the_users_that_may_write_allocations():
    def options(desired):
        (ours, _kube) = made(desired)["Deployment", "vgpu-scheduler"]["spec"]["template"]["spec"]["containers"]
        return [one for one in ours["command"] if one.startswith(("--may", "--lease"))]

    account = "system:serviceaccount:kube-system:vgpu-scheduler"
    assert options(DESIRED) == ["--lease=kube-system/vgpu-scheduler-extender", f"--may-write={account}"]
    assert options(DESIRED._replace(may_give=("a", "b")))[-1] == "--may-give=a,b"


def test_pending_pods_are_retried_if_the_kube_scheduler_has_the_option():
    def command(desired):
        (_ours, kube) = made(desired)["Deployment", "vgpu-scheduler"]["spec"]["template"]["spec"]["containers"]
        return kube["command"]

    option = "--pod-max-in-unschedulable-pods-duration=60s"
    assert option in command(DESIRED) and option not in command(DESIRED._replace(wakes=False))


def test_changed_configuration_changes_the_pod_template():
    def digest(desired):
        return made(desired)["Deployment", "vgpu-scheduler"]["spec"]["template"]["metadata"]["annotations"]

    assert digest(DESIRED) == digest(DESIRED._replace(replicas=3))
    assert digest(DESIRED) != digest(DESIRED._replace(config={"plain": "slice"}))


def test_rolling_restart_keeps_both_replicas_available():
    spec = made()["Deployment", "vgpu-scheduler"]["spec"]
    assert spec["replicas"] == 2 and spec["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    for container in spec["template"]["spec"]["containers"]:
        assert container["securityContext"]["readOnlyRootFilesystem"]


# columns: label vgpu.fleet/allocation of the namespace (None: no label); expected paths of the webhook for its pods if
# the allocation by claims (ResourceClaims) is off, and if it is on
NAMESPACES = [
    (None, ["/mutate"], ["/mutate"]),
    ("extender", ["/mutate"], ["/mutate"]),
    ("dra", ["/mutate"], ["/mutate/dra"]),
    ("claims", ["/mutate"], ["/mutate", "/mutate/unknown"]),
]


def selected(expressions, labels):
    """Returns whether a selector matches labels, as in the API server: NotIn also matches objects without the label."""
    holds = {
        "In": lambda one: labels.get(one["key"]) in one["values"],
        "NotIn": lambda one: labels.get(one["key"]) not in one["values"],
        "Exists": lambda one: one["key"] in labels,
    }
    return all(holds[one["operator"]](one) for one in expressions)


@pytest.mark.parametrize(("label", "without", "with_claims"), NAMESPACES)
def test_path_of_the_webhook_follows_the_label_of_the_namespace(label, without, with_claims):
    labels = {} if label is None else {"vgpu.fleet/allocation": label}
    for config, expected in (({}, without), ({"claims": True}, with_claims)):
        hooks = made(DESIRED._replace(config=config))["MutatingWebhookConfiguration", "vgpu-scheduler"]["webhooks"]
        assert len({one["name"] for one in hooks}) == len(hooks)
        assert {(one["sideEffects"], one["failurePolicy"]) for one in hooks} == {("None", "Fail")}
        found = [one for one in hooks if selected(one["namespaceSelector"]["matchExpressions"], labels)]
        assert [one["clientConfig"]["service"]["path"] for one in found] == expected
