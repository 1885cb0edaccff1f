# SPDX-License-Identifier: Apache-2.0
"""Tests the plan (the roles to run, with their changes) of hosts with Rocky and SLES: a bare host, a host with Docker's
own packages, a host that needs no change, and a host whose driver version changes.
"""

from __future__ import annotations

import copy
import json

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.driver import choice as driver_choice
from ansible_collections.vgpu.fleet.plugins.module_utils.engines import engine_packages
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import desired, plan
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import driver as plan_driver
from plan_samples import BARE, CONVERGED, RUNNING, VARIABLES

# operating systems, as the facts of a host describe them
ROCKY = {
    "id": "rocky",
    "id_like": "rhel centos fedora",
    "version_id": "9.4",
    "name": "Rocky Linux 9.4 (Blue Onyx)",
    "arch": "x86_64",
    "kernel": "5.14.0-427.13.1.el9_4.x86_64",
    "root": "true",
}
SLES = {**ROCKY, "id": "sles", "id_like": "suse", "version_id": "15.6", "name": "SUSE Linux Enterprise Server 15 SP6"}
CENTOS_7 = {**ROCKY, "id": "centos", "id_like": "rhel fedora", "version_id": "7", "name": "CentOS Linux 7 (Core)"}
# The lists of driver and engine packages are empty, so the system decides which packages are installed. The driver's
# packages come from the CUDA repository.
ROLES = {
    **VARIABLES,
    "nvidia_driver_packages": [],
    "nvidia_driver_source": "cuda",
    "nvidia_driver_version": "580.95.05",
    "nvidia_docker_packages": ["nvidia-docker2=*", "nvidia-container-toolkit=1.17.8-1"],
    "container_runtime_packages": [],
}
MIRROR = {"container_runtime_repository": {"baseurl": "https://mirror.example.com/docker-ce", "key": "/k.asc"}}
DOCKER = {"docker.service": dict(RUNNING)}
# Only the packages that the plan names; a real driver has their dependencies too.
PACKAGES = {
    "rocky": {"nvidia-driver-cuda": "580.95.05-1.el9"},
    "sles": {"nvidia-compute-G06": "580.95.05-1", "nvidia-compute-utils-G06": "580.95.05-1"},
}


def planned(system, state, variables=None):
    host = copy.deepcopy({**CONVERGED, **state, "os": system})
    host["driver"] = {**host["driver"], "secure_boot": None}
    return plan.make_plan(desired.collect({**ROLES, **(variables or {})}), host)


def installs(made):
    changes = [change for step in made["steps"] for change in step["changes"]]
    return [change.split()[1] for change in changes if change.startswith("install ") and "/" not in change]


@pytest.mark.parametrize(
    ("system", "variables", "engine"),
    [(ROCKY, MIRROR, engine_packages.REPOSITORY["docker"]), (SLES, {}, ["docker"]), (SLES, MIRROR, None)],
)
def test_a_bare_host_gets_every_role(system, variables, engine):
    made = planned(system, BARE, variables)
    assert made["errors"] == []
    roles = ["nvidia_driver", "nvidia_docker", "container_runtime", "vcuda", "device_plugin", "verify"]
    assert made["roles"] == roles
    expected = [*PACKAGES[system["id"]], *(engine or engine_packages.REPOSITORY["docker"])]
    assert set(installs(made)) >= set(expected)


def test_bare_host_without_an_engine_package_is_an_error():
    made = planned(ROCKY, BARE)
    assert len(made["errors"]) == 1
    assert "container_runtime: Rocky Linux 9.4 (Blue Onyx) has no package of docker" in made["errors"][0]
    assert "container_runtime" not in made["roles"]


def test_dockers_own_engine_is_used_as_it_is():
    made = planned(ROCKY, {**BARE, "units": DOCKER})
    assert made["errors"] == []
    assert not {"docker", "docker.io", "docker-ce"} & set(installs(made))
    step = next(step for step in made["steps"] if step["role"] == "container_runtime")
    assert all("daemon.json" in change for change in step["changes"])


def as_wanted(system):
    packages = {**PACKAGES[system["id"]], "nvidia-docker2": "2.14.0-1", "nvidia-container-toolkit": "1.17.8-1"}
    return {**CONVERGED, "packages": packages}


@pytest.mark.parametrize("system", [ROCKY, SLES])
def test_converged_host_has_an_empty_plan(system):
    """rpm reports each version with a release, which the requested version does not contain. Both must count as
    equal."""
    made = planned(system, as_wanted(system))
    assert (made["steps"], made["errors"]) == ([], [])


@pytest.mark.parametrize("system", [ROCKY, SLES])
def test_locks_that_are_no_longer_desired_are_released(system):
    locks = [*PACKAGES[system["id"]], "nvidia-other-libs"]
    state = {**as_wanted(system), "texts": {"/record": json.dumps({"locks": locks})}}
    changes = [
        planned(system, state, {"__nvidia_driver_record": "/record", "nvidia_driver_hold": hold})["steps"]
        for hold in (True, False)
    ]
    # dnf locks by patterns, zypper by names.
    kept = [] if system is ROCKY else ["release nvidia-other-libs"]
    assert [change for step in changes[0] for change in step["changes"]] == kept
    assert [change for step in changes[1] for change in step["changes"]] == [f"release {name}" for name in locks]


@pytest.mark.parametrize("system", [ROCKY, SLES])
def test_another_version_is_a_change_of_every_package(system):
    made = planned(system, as_wanted(system), {"nvidia_driver_version": "580.105.08"})
    assert made["roles"][0] == "nvidia_driver"
    changes = [change for change in made["steps"][0]["changes"] if change.startswith("change ")]
    assert len(changes) == len(PACKAGES[system["id"]])
    assert all("580.105.08" in change for change in changes)


# columns: nvidia_driver_version for an installed 3:580.95.05-1.el9; expected: whether it is another version
EPOCHS = [("3:580.95.05-1.el9", False), ("580.95.05", False), ("580.*", False), ("2:580.95.05-1.el9", True)]


@pytest.mark.parametrize(("version", "other"), EPOCHS)
def test_version_with_an_epoch(version, other):
    packages = {**as_wanted(ROCKY)["packages"], "nvidia-driver-cuda": "3:580.95.05-1.el9"}
    steps = planned(ROCKY, {**CONVERGED, "packages": packages}, {"nvidia_driver_version": version})["steps"]
    assert ("change nvidia-driver-cuda from" in str(steps)) is other


# columns: nvidia_driver_branch; expected packages that change. Driver 580.95.05 is installed.
BRANCHES = [("580", []), ("570", ["nvidia-driver-cuda"])]


@pytest.mark.parametrize(("branch", "names"), BRANCHES)
@pytest.mark.parametrize("release", ["8.10", "9.4", "10.0"])
def test_another_branch_is_a_change_also_where_a_stream_holds_the_branches(release, branch, names):
    variables = {"nvidia_driver_version": "", "nvidia_driver_branch": branch}
    made = planned({**ROCKY, "version_id": release}, as_wanted(ROCKY), variables)
    changes = [change for step in made["steps"] for change in step["changes"] if change.startswith("change ")]
    assert changes == [f"change {name} from 580.95.05-1.el9 to {branch}.*" for name in names]
    assert (made["errors"], made["disturbs"]) == ([], bool(names))


def test_headers_beside_those_of_another_kernel_disturb_no_driver():
    """rpm keeps several versions of the kernel headers, so new headers do not replace the old ones. Their installation
    does not disturb the driver in use."""
    packages = dict.fromkeys(["nvidia-driver-cuda", "kmod-nvidia-open-dkms"], "3:580.95.05-1.el9")
    packages.update({"kernel-devel": "5.14.0-570.12.1.el9_6", "kernel-headers": "1", "nvidia-persistenced": "1"})
    variables = {**desired.INPUTS["nvidia_driver"], "state": "present", "source": "cuda", "kernel_module": "auto"}
    state = copy.deepcopy({**CONVERGED, "os": ROCKY, "packages": packages})
    runs = {"loaded_version": "580.95.05", "disk_version": "580.95.05", "in_use": ["python3 (41)"], "headers": False}
    state["driver"].update(runs, secure_boot=None)
    state["pci_gpus"] = [{"address": "0000:01:00.0", "device": "0x1eb8"}]
    found = plan_driver.nvidia_driver(variables, state, {})
    assert "change kernel-devel from 5.14.0-570.12.1.el9_6 to 5.14.0-427.13.1.el9_4" in found.changes
    assert (found.errors, found.disturbs) == ([], False)
    state["packages"].update({"nvidia-docker2": "2.14.0-1", "nvidia-container-toolkit": "1.17.8-1"})
    roles = {**ROLES, "nvidia_driver_version": "", "nvidia_driver_kernel_module": "auto"}
    assert plan.make_plan(desired.collect(roles), state)["roles"] == ["nvidia_driver", "verify"], (
        "no plugin is restarted"
    )


def test_unsupported_release_is_refused_with_the_supported_releases():
    errors = planned(CENTOS_7, BARE)["errors"]
    assert "CentOS Linux 7 (Core) is not supported; supported systems: Debian 12 and 13" in errors[0]
    assert "RHEL and Rocky 8 to 10" in errors[0]


def test_plan_reads_every_package_that_it_compares():
    read = desired.reads(desired.collect(ROLES))["packages"]
    assert set(read) >= {"docker.io", "docker-ce", "containerd.io", "nvidia-docker2"}
    assert set(read) >= set(driver_choice.PACKAGE_PATTERNS)
    assert len(read) == len(set(read))


@pytest.mark.parametrize(("mode", "told"), [("enforcing", True), ("permissive", False), ("", False)])
def test_untested_selinux_mode_is_a_warning(mode, told):
    made = planned({**ROCKY, "selinux": mode}, as_wanted(ROCKY))
    assert [plan.CONFINED] * told == made["warnings"]
    assert made["errors"] == []
