# SPDX-License-Identifier: Apache-2.0
"""Tests the planned changes of the NVIDIA container toolkit's configuration file, and the warnings about settings by
which a container gets every GPU or none.
"""

from __future__ import annotations

import json

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import desired, plan
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import toolkit as plan_toolkit
from plan_samples import CONVERGED, VARIABLES

PATH = "/etc/nvidia-container-runtime/config.toml"
KEYS = {"accept-nvidia-visible-devices-as-volume-mounts": True}
# columns: text of the file (None: no file); expected changes, words of the error
ROWS = [
    ("accept-nvidia-visible-devices-as-volume-mounts = true\n", [], ""),
    (
        "#accept-nvidia-visible-devices-as-volume-mounts = false\n",
        [f"{PATH}: set accept-nvidia-visible-devices-as-volume-mounts to true"],
        "",
    ),
    (None, [f"{PATH}: set accept-nvidia-visible-devices-as-volume-mounts to true"], ""),
    ("x = \n[t\n", [], f"{PATH}: line"),
]


@pytest.mark.parametrize(("text", "changes", "fault"), ROWS)
def test_the_plan_names_each_key(text, changes, fault):
    wanted = desired.collect({**VARIABLES, "nvidia_docker_config": KEYS})
    assert PATH in desired.reads(wanted)["texts"]
    made = plan.make_plan(wanted, {**CONVERGED, "texts": {PATH: text}})
    steps = [step for step in made["steps"] if step["role"] == "nvidia_docker"]
    assert [line for step in steps for line in step["changes"]] == changes
    assert (fault in "".join(made["errors"])) if fault else not made["errors"]


# columns: version of the toolkit's package (None: missing), text of the file; expected reason
REASONS = [
    (None, None, "packages are missing or of another version"),
    (None, "accept-nvidia-visible-devices-as-volume-mounts = true\n", "packages are missing or of another version"),
    ("1.20", None, f"{PATH} differs"),
]


@pytest.mark.parametrize(("package", "text", "reason"), REASONS)
def test_missing_packages_are_the_first_reason(package, text, reason):
    wanted = desired.collect({**VARIABLES, **TOOLKIT, "nvidia_docker_config": KEYS})
    packages = {**CONVERGED["packages"], "nvidia-container-toolkit": package}
    made = plan.make_plan(wanted, {**CONVERGED, "texts": {PATH: text}, "packages": packages})
    assert [step["reason"] for step in made["steps"] if step["role"] == "nvidia_docker"] == [reason]


TOOLKIT = {"nvidia_docker_packages": ["nvidia-container-toolkit=*"], "container_runtime_packages": []}
WHERE = "install nvidia-docker2 if a repository has it"
COMES = "install nvidia-container-toolkit"
# columns: nvidia_docker_package, engine, whether the toolkit is installed; expected changes
BROUGHT = [
    ("auto", "docker", False, [COMES, WHERE]),
    ("auto", "containerd", False, [COMES]),
    ("auto", "auto", False, [COMES, WHERE]),
    ("nvidia-container-toolkit", "docker", False, [COMES]),
    # nvidia-docker2 is optional; if no repository has it, it must not appear in the plan of every run.
    ("auto", "docker", True, []),
]


@pytest.mark.parametrize(("package", "engine", "there", "changes"), BROUGHT)
def test_nvidia_docker2_is_installed_only_with_docker(package, engine, there, changes):
    variables = {**VARIABLES, **TOOLKIT, "nvidia_docker_package": package, "container_runtime_engine": engine}
    packages = {**CONVERGED["packages"], "nvidia-docker2": None, "nvidia-container-toolkit": "1.20" if there else None}
    made = plan.make_plan(desired.collect(variables), {**CONVERGED, "texts": {PATH: None}, "packages": packages})
    steps = [step for step in made["steps"] if step["role"] == "nvidia_docker"]
    assert [line for step in steps for line in step["changes"]] == changes


RECORD = VARIABLES["__nvidia_docker_record"]
# columns: nvidia_docker_hold, held packages, packages that the role held; expected changes
HOLDS = [
    (True, [], [], ["hold nvidia-docker2"]),
    (True, ["nvidia-docker2"], ["nvidia-docker2"], []),
    (False, ["nvidia-docker2"], [], []),
    (False, ["nvidia-docker2"], ["nvidia-docker2"], ["release nvidia-docker2"]),
    (False, [], ["nvidia-docker2"], []),
]


@pytest.mark.parametrize(("hold", "held", "ours", "changes"), HOLDS)
def test_holds_of_the_toolkit(hold, held, ours, changes):
    wanted = desired.collect({**VARIABLES, "nvidia_docker_hold": hold})
    assert RECORD in desired.reads(wanted)["texts"]
    texts = {PATH: None, RECORD: json.dumps({"holds": ours})}
    steps = plan.make_plan(wanted, {**CONVERGED, "texts": texts, "held": held})["steps"]
    assert [(step["reason"], step["changes"]) for step in steps if step["role"] == "nvidia_docker"] == (
        [("packages are not held as desired", changes)] if changes else []
    )


ENVIRONMENT = "accept-nvidia-visible-devices-envvar-when-unprivileged"
MOUNTS = "accept-nvidia-visible-devices-as-volume-mounts"
BOTH = {MOUNTS: True, ENVIRONMENT: False}
# the file as NVIDIA ships it: both keys are commented out and show their defaults
SHIPPED = f"#{MOUNTS} = false\n#{ENVIRONMENT} = true\n[nvidia-container-cli]\nload-kmods = true\n"
SAFE = f"{MOUNTS} = true\n{ENVIRONMENT} = false\n"
# Warnings as (variable to change, words of the warning).
LEAK = (
    "nvidia_docker_config." + ENVIRONMENT,
    ("NVIDIA_VISIBLE_DEVICES gets every GPU, without a limit; set it to false"),
)
BY_HANDOVER = ("vgpu_handover", "without a limit; vgpu_handover: envvar needs this value; set vgpu_handover to auto")
NO_ENVIRONMENT = ("nvidia_docker_config." + ENVIRONMENT, "expected true, found false in")
NO_MOUNTS = ("nvidia_docker_config." + MOUNTS, "expected true, found unset, which means false, in")
NO_GPU = ("nvidia_docker_config." + MOUNTS, "by CDI, pods start without their GPU; set it to true")
# columns: nvidia_docker_config, text of the toolkit's file (None: no file), other variables; expected warnings
WARNED = [
    (BOTH, SHIPPED, {}, []),
    (BOTH, None, {}, []),
    (BOTH, f"{MOUNTS} = false\n{ENVIRONMENT} = true\n", {}, []),
    ({**BOTH, "supported-driver-capabilities": "compute,utility"}, SHIPPED, {}, []),
    # nvidia_docker_config replaces its whole default, so neither of the two keys is set.
    ({"supported-driver-capabilities": "compute,utility"}, SHIPPED, {}, [LEAK]),
    ({"supported-driver-capabilities": "compute,utility"}, SAFE, {}, []),
    ({}, SHIPPED, {}, [LEAK]),
    ({}, None, {}, [LEAK]),
    ({}, SAFE, {}, []),
    ({MOUNTS: True}, SHIPPED, {}, [LEAK]),
    ({MOUNTS: True, ENVIRONMENT: True}, SAFE, {}, [LEAK]),
    ({MOUNTS: False, ENVIRONMENT: True}, SAFE, {}, [LEAK]),
    ({ENVIRONMENT: "false"}, SHIPPED, {}, [(LEAK[0], 'expected false, found "false" in')]),
    ({ENVIRONMENT: False}, SHIPPED, {}, [NO_GPU]),
    ({**BOTH, MOUNTS: False}, SAFE, {}, [(NO_GPU[0], "expected true, found false in")]),
    # With CDI, the toolkit reads neither key.
    ({ENVIRONMENT: False}, SHIPPED, {"vgpu_handover": "cdi-cri"}, []),
    ({ENVIRONMENT: False}, SHIPPED, {"vgpu_handover": "cdi-annotations"}, []),
    ({}, SHIPPED, {"vgpu_handover": "cdi-cri"}, [LEAK]),
    ({ENVIRONMENT: False}, SHIPPED, {"vgpu_handover": "volume-mounts"}, [NO_MOUNTS]),
    ({}, SHIPPED, {"vgpu_handover": "volume-mounts"}, [LEAK, NO_MOUNTS]),
    (BOTH, SHIPPED, {"vgpu_handover": "volume-mounts"}, []),
    ({**BOTH, ENVIRONMENT: True}, SHIPPED, {"vgpu_handover": "envvar"}, [BY_HANDOVER]),
    ({}, SHIPPED, {"vgpu_handover": "envvar"}, [BY_HANDOVER]),
    (BOTH, SHIPPED, {"vgpu_handover": "envvar"}, [NO_ENVIRONMENT]),
    # No warning, because the group does not share by vcuda, or the toolkit is not managed by its role.
    ({}, SHIPPED, {"vgpu_sharing": "time-slicing"}, []),
    ({}, SHIPPED, {"vgpu_sharing": "none"}, []),
    ({}, SHIPPED, {"nvidia_docker_state": "absent"}, []),
    ({}, SHIPPED, {"nvidia_docker_state": None}, []),
    # The plan reports an invalid file as an error elsewhere, so there is no second message.
    (BOTH, "x = \n[t\n", {}, []),
]


@pytest.mark.parametrize(("keys", "text", "variables", "expected"), WARNED)
def test_toolkit_settings_that_expose_gpus_are_warnings(keys, text, variables, expected):
    wanted = desired.collect({**VARIABLES, "nvidia_docker_config": keys, **variables})
    found = plan_toolkit.check(wanted, {**CONVERGED, "texts": {PATH: text}})
    assert [finding.path for finding in found] == [path for path, _words in expected]
    assert [finding.level for finding in found] == ["warning"] * len(expected)
    for finding, (_path, words) in zip(found, expected):
        assert words in finding.message
        assert PATH in finding.message


# columns: nvidia_docker_config, sharing mode; expected: whether the plan needs the text of the toolkit's file
READS = [({}, "vcuda", True), (KEYS, "vcuda", True), ({}, "none", False), (KEYS, "none", True)]


@pytest.mark.parametrize(("keys", "mode", "read"), READS)
def test_toolkit_file_is_read_only_if_compared(keys, mode, read):
    wanted = desired.collect({**VARIABLES, "nvidia_docker_config": keys, "vgpu_sharing": mode})
    assert (PATH in desired.reads(wanted)["texts"]) is read
