# SPDX-License-Identifier: Apache-2.0
"""Tests the wait for the scheduler's Deployment: when it counts as running, the reason if it does not, and the dry run
of a pod that shows whether the webhook sends pods to the scheduler.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.kube import rollout

DONE = {"replicas": 2, "updatedReplicas": 2, "readyReplicas": 2, "availableReplicas": 2, "observedGeneration": 3}


def deployment(**status):
    return {"metadata": {"generation": 3}, "spec": {"replicas": 2}, "status": {**DONE, **status}}


@pytest.mark.parametrize(
    ("found", "done"),
    [
        (None, False),
        (deployment(), True),
        (deployment(observedGeneration=2), False),
        (deployment(updatedReplicas=1), False),
        (deployment(readyReplicas=1), False),
        (deployment(replicas=3), False),
        ({"metadata": {"generation": 1}, "spec": {"replicas": 0}, "status": {"observedGeneration": 1}}, True),
        ({"metadata": {"generation": 1}, "spec": {}, "status": {}}, False),
    ],
)
def test_rollout_is_complete_by_its_status(found, done):
    assert rollout.is_done(found) == done


def pod(conditions=(), containers=(), **metadata):
    status = {"phase": "Pending", "conditions": list(conditions), "containerStatuses": list(containers)}
    return {"metadata": {"name": "p", **metadata}, "status": status}


READY = {"type": "Ready", "status": "True"}
# the condition of a pod that fits on no node
NO_NODE = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
PULLS = {
    "name": "c",
    "image": "i:1",
    "ready": False,
    "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no"}},
}
CRASH = {
    "name": "c",
    "image": "i:1",
    "state": {"waiting": {"reason": "CrashLoopBackOff"}},
}


# columns: pod of the Deployment; expected reasons why it is not ready
@pytest.mark.parametrize(
    ("one", "lines"),
    [
        (pod([READY]), []),
        (pod([NO_NODE], deletionTimestamp="now"), []),
        (pod([NO_NODE]), ["pod p has no node: 0/3 nodes are available"]),
        (pod([], [PULLS]), ["pod p: container c (i:1) ImagePullBackOff no"]),
        (pod([], [CRASH]), ["pod p: container c (i:1) CrashLoopBackOff"]),
        (
            pod([], [{"name": "c", "image": "i:1", "state": {"running": {}}}]),
            ["pod p: container c (i:1) runs and is not ready"],
        ),
        (pod(), ["pod p: Pending"]),
    ],
)
def test_reason_of_an_incomplete_rollout(one, lines):
    assert rollout.reasons([one]) == lines


class Api:
    """An API server with prepared answers. The last answer is repeated. Its clock advances only while the code
    waits."""

    def __init__(self, deployments=(), pods=(), trials=()):
        self.deployments, self.pods, self.trials, self.now = list(deployments), list(pods), list(trials), 0.0

    def get(self, _path):
        return self.deployments.pop(0) if len(self.deployments) > 1 else self.deployments[0]

    def list(self, _path, **_query):
        return self.pods.pop(0) if len(self.pods) > 1 else self.pods[0]

    def trial(self, _path, body):
        assert body["spec"]["containers"][0]["resources"]["limits"] == {"x/mem": "1"}
        return self.trials.pop(0) if len(self.trials) > 1 else self.trials[0]

    def sleep(self, seconds):
        self.now += seconds

    def clock(self):
        return self.now


# columns: successive answers about the Deployment, successive answers about its pods; expected reasons why it does not
# run, seconds of waiting (at most 20)
@pytest.mark.parametrize(
    ("deployments", "pods", "said", "waited"),
    [
        ([deployment()], [[]], [], 0),
        ([deployment(readyReplicas=0), deployment(readyReplicas=1), deployment()], [[pod()]], [], 2),
        ([deployment(readyReplicas=0)], [[pod([NO_NODE])]], ["pod p has no node: 0/3 nodes are available"], 20),
        # A scheduler pod that is being deleted may still schedule other pods, so the code waits for its end. If its
        # node is gone, it never ends. So this wait has a limit, and reaching the limit is no fault.
        ([deployment()], [[pod(deletionTimestamp="now")], [pod(deletionTimestamp="now")], []], [], 2),
        ([deployment()], [[pod(deletionTimestamp="now")]], [], 20),
        # No wait, because more time does not make the image available.
        ([deployment(readyReplicas=0)], [[pod([], [PULLS])]], ["pod p: container c (i:1) ImagePullBackOff no"], 0),
        (
            [deployment(replicas=0)],
            [[]],
            ["no pod of the Deployment was created; is the controller manager of the cluster running?"],
            20,
        ),
    ],
)
def test_rollout_waits_until_its_limit(deployments, pods, said, waited):
    api = Api(deployments, pods)
    assert rollout.wait(api, "d", "p", "s", 20, api.sleep, api.clock) == said
    assert api.now == waited


def taken(name):
    return 201, {"spec": {"schedulerName": name}}


# Answers of the API server (status, message) to the dry run of a pod. CLOSED: the API server cannot call the webhook.
# QUOTA: the webhook refuses the pod. RIGHTS: the user may not create pods.
CLOSED = (500, 'Internal error occurred: failed calling webhook "pods.vgpu.fleet": x509')
QUOTA = (403, 'admission webhook "pods.vgpu.fleet" denied the request: over')
RIGHTS = (403, "pods is forbidden")


# columns: successive answers to the dry run; expected words of the fault, words of the doubt (the reason why nothing
# was tested), seconds of waiting
@pytest.mark.parametrize(
    ("trials", "fault", "doubt", "waited"),
    [
        ([taken("ours")], "", "", 0),
        ([CLOSED, CLOSED, taken("ours")], "", "", 2),
        ([CLOSED], "failed calling webhook", "", 10),
        ([taken("default-scheduler")], "expected schedulerName ours, found default-scheduler", "", 10),
        ([RIGHTS], "", "pods is forbidden", 0),
        ([QUOTA], "denied the request", "", 10),
    ],
)
def test_pods_reach_the_scheduler(trials, fault, doubt, waited):
    api = Api(trials=trials)
    found = rollout.admission(api, "x/mem", "ours", 10, api.sleep, api.clock)
    assert (fault in found[0], doubt in found[1]) == (True, True) and bool(found[0]) == bool(fault)
    assert bool(found[1]) == bool(doubt) and api.now == waited
