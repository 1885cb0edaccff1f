# SPDX-License-Identifier: Apache-2.0
"""Tests the plan (the changes that a run would make) of the role nvidia_driver on a Debian 12 host with a T4: the
changes, the refusals, and whether a change disturbs running work.
"""

from __future__ import annotations

import json

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.driver import choice as driver_choice
from ansible_collections.vgpu.fleet.plugins.module_utils.driver import host_files
from ansible_collections.vgpu.fleet.plugins.module_utils.host.digest import sha256
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import desired
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import driver as plan_driver
from plan_samples import changed, made

NAMES = ["nvidia-smi", "libcuda1", "libnvidia-ml1", "nvidia-kernel-dkms"]
HEADERS = ["linux-headers-6.1.0-37-amd64", "linux-headers-amd64", "nvidia-persistenced"]
BLACKLIST, MEMACCT = "/etc/modprobe.d/vgpu-nouveau.conf", host_files.MEMACCT_FILE
NO_MODULES = {"kernel_module": "none"}
# a state in which the driver needs no change
GOOD = {
    "os": {
        "id": "debian",
        "id_like": "",
        "version_id": "12",
        "name": "Debian GNU/Linux 12",
        "kernel": "6.1.0-37-amd64",
        "arch": "x86_64",
    },
    "pci_gpus": [{"address": "0000:01:00.0", "device": "0x1eb8"}],
    "nvswitches": 0,
    "driver": {
        "loaded_version": "535.261.03",
        "disk_version": "535.261.03",
        "nouveau": False,
        "in_use": [],
        "secure_boot": False,
        "signing_key": None,
        "initramfs_old": False,
    },
    "nvml": {"ok": True, "error": "", "driver_version": "535.261.03"},
    "packages": {**dict.fromkeys(NAMES, "535.261.03-1"), **dict.fromkeys(HEADERS, "1")},
    "held": [*NAMES, "nvidia-persistenced"],
    "files": {BLACKLIST: {"sha256": sha256(host_files.NOUVEAU_TEXT), "mtime": 1.0}},
    "units": {"nvidia-persistenced.service": {"present": True, "enabled": True, "active": True}},
    "texts": {},
}
SILENT = {"nvml.ok": False, "nvml.error": "no driver", "driver.loaded_version": None}


def recorded(path="/record", **record):
    """Returns the fact that the role has a record with these entries, of its packages or its setup."""
    return {("texts", path): json.dumps(record)}


# columns: facts that differ from GOOD, variables nvidia_driver_* that differ from the defaults; expected changes, words
# of the error, whether running work is disturbed
ROWS = [
    ({}, {}, [], "", False),
    ({"packages.libcuda1": None}, {}, ["install libcuda1"], "", False),
    ({"packages.nvidia-smi": "535.1-1"}, {}, [], "", False),  # No version is requested, so any version is right.
    ({"held": []}, {}, [f"hold {name}" for name in sorted([*NAMES, "nvidia-persistenced"])], "", False),
    ({"held": []}, {"hold": False}, [], "", False),
    # The role releases the packages that it held, and leaves the others to their administrator.
    (
        {"held": [*NAMES, "linux-image-amd64"], **recorded(holds=["libcuda1", "nvidia-smi", "nvidia-persistenced"])},
        {"hold": False},
        ["release libcuda1", "release nvidia-smi"],
        "",
        False,
    ),
    (recorded(holds=[*NAMES, "nvidia-persistenced"]), {}, [], "", False),
    ({("files", BLACKLIST): None}, {}, [f"write {BLACKLIST}"], "", False),
    ({("files", BLACKLIST): {"sha256": "x"}}, {}, [f"change {BLACKLIST}"], "", False),
    # A file of the kernel modules that the role wrote and no longer needs. If a run was killed after it removed the
    # file, the initramfs still has the file.
    (
        {("files", MEMACCT): {"sha256": "x"}, **recorded("/setup", files={MEMACCT: None, BLACKLIST: None})},
        {},
        [f"remove {MEMACCT}"],
        "",
        False,
    ),
    (
        {("files", MEMACCT): {"sha256": "x"}, **recorded("/setup", files={MEMACCT: "theirs"})},
        {},
        [f"change {MEMACCT}"],
        "",
        False,
    ),
    (
        recorded("/setup", files={MEMACCT: None}),
        {},
        [f"rebuild the initramfs, which may still have {MEMACCT} of the role"],
        "",
        False,
    ),
    ({("files", MEMACCT): {"sha256": "x"}}, {}, [], "", False),
    ({("files", MEMACCT): {"sha256": "x"}, **recorded("/setup", files={MEMACCT: None})}, NO_MODULES, [], "", False),
    (
        {"driver.initramfs_old": True},
        {},
        ["rebuild the initramfs, which is older than the file that blocks nouveau"],
        "",
        False,
    ),
    (
        {("units", "nvidia-persistenced.service", "active"): False},
        {},
        ["enable and start nvidia-persistenced.service"],
        "",
        False,
    ),
    ({("units", "nvidia-persistenced.service", "active"): False}, {"persistenced": False}, [], "", False),
    # A new version of the driver: its modules are reloaded if no process uses the old ones; otherwise the host must
    # reboot.
    (
        {},
        {"version": "535.300.01-1"},
        [f"change {name} from 535.261.03-1 to 535.300.01-1" for name in NAMES] + ["reload the kernel modules"],
        "",
        True,
    ),
    (
        {"driver.in_use": ["python3 (41)"]},
        {"version": "535.300.01-1", "reboot": "if_required"},
        [f"change {name} from 535.261.03-1 to 535.300.01-1" for name in NAMES]
        + ["reboot, for driver 535.261.03 is loaded and in use by python3 (41)"],
        "",
        True,
    ),
    (
        {"driver.in_use": ["python3 (41)"]},
        {"version": "535.300.01-1"},
        [f"change {name} from 535.261.03-1 to 535.300.01-1" for name in NAMES],
        "nvidia_driver_reboot is never",
        True,
    ),
    # The packages are installed, but the kernel module is not loaded.
    (SILENT, {}, ["load the kernel modules"], "", False),
    (SILENT, {"kernel_module": "none"}, [], "", False),
    ({**SILENT, "driver.loaded_version": "535.1"}, {}, ["reload the kernel modules"], "", False),
    (
        {**SILENT, "driver.nouveau": True},
        {},
        [],
        "on a host that may be rebooted, or write 'blacklist nouveau' to /etc/modprobe.d",
        False,
    ),
    (
        {**SILENT, "driver.nouveau": True},
        {"reboot": "if_required"},
        ["reboot, for nouveau uses the GPUs and cannot be unloaded, because the console uses it"],
        "",
        True,
    ),
    # With reboot "always" even a small change leads to a reboot, so it disturbs running work and the node is drained.
    (
        {"held": NAMES},
        {"reboot": "always"},
        ["hold nvidia-persistenced", "reboot, for nvidia_driver_reboot is always"],
        "",
        True,
    ),
    ({"held": NAMES}, {"reboot": "if_required"}, ["hold nvidia-persistenced"], "", False),
    ({}, {"reboot": "always"}, [], "", False),
    (
        {**SILENT, "driver.nouveau": True},
        {"reboot": "always"},
        ["reboot, for nouveau uses the GPUs and cannot be unloaded, because the console uses it"],
        "",
        True,
    ),
    # These hosts are refused before a package is installed.
    ({"pci_gpus": [{"address": "0000:01:00.0", "device": "0x2901"}]}, {}, [], "Blackwell", False),
    ({"driver.secure_boot": True}, {}, [], "Secure Boot is on", False),
    ({}, {"source": "present"}, [], "", False),
]


@pytest.mark.parametrize(("state", "wanted", "changes", "fault", "disturbs"), ROWS)
def test_changes_of_the_driver(state, wanted, changes, fault, disturbs):
    whole = {
        **desired.INPUTS["nvidia_driver"],
        "kernel_module": "auto",
        "state": "present",
        "record": "/record",
        "setup_record": "/setup",
        **wanted,
    }
    found = plan_driver.nvidia_driver(whole, changed(GOOD, state), {})
    assert list(found.changes) == changes
    assert (fault in " | ".join(found.errors)) if fault else not found.errors
    assert found.disturbs is disturbs
    packages = [text for text in changes if text.startswith("install ") or " from 535" in text]
    reason = "driver packages are missing or of another version"
    assert not changes or found.reason == (reason if packages else "the driver is installed but not active as desired")


# columns: whether the role has a record of its changes, whether the driver works; expected changes, whether running
# work is disturbed
ABSENT = [
    (True, True, ["revert the changes recorded in /r"], True),
    (True, False, ["revert the changes recorded in /r"], False),
    (False, True, [], False),
]


@pytest.mark.parametrize(("record", "works", "changes", "disturbs"), ABSENT)
def test_removal_of_the_driver_disturbs_only_if_it_changes_a_driver_that_works(record, works, changes, disturbs):
    whole = {**desired.INPUTS["nvidia_driver"], "state": "absent", "record": "/r"}
    state = changed(GOOD, {"nvml.ok": works, "files": {"/r": {}} if record else {}})
    found = plan_driver.nvidia_driver(whole, state, {})
    assert (found.changes, found.disturbs) == (changes, disturbs)


TOKEN, GRIDD = host_files.TOKEN_FILE, "nvidia-gridd.service"
GUEST = {
    "source": "file",
    "files": ["/srv/nvidia-linux-grid-535_535_amd64.deb"],
    "kernel_module": "none",
    "hold": False,
    "vgpu_guest": True,
    "vgpu_token_sha256": sha256("token"),
}
THERE = {
    "packages.nvidia-linux-grid-535": "535",
    ("files", host_files.GRIDD_FILE): {
        "sha256": sha256(host_files.gridd_conf(driver_choice.DEFAULTS)),
        "mtime": 1.0,
    },
    ("files", TOKEN): {"sha256": sha256("token"), "mode": "0600", "mtime": 2.0},
    ("units", GRIDD): {"present": True, "enabled": True, "active": True, "started": 3.0},
}
# columns: facts of a vGPU guest (a virtual machine with an NVIDIA vGPU) that differ from THERE, variables that differ
# from GUEST; expected changes
GUESTS = [
    ({}, {}, []),
    ({("files", TOKEN): None}, {}, [f"write {TOKEN}"]),
    ({("files", TOKEN): None}, {"vgpu_token_sha256": ""}, []),
    (
        {("files", TOKEN): None},
        {"vgpu_guest": False, "source": "distribution", "files": [], "packages": ["libcuda1"]},
        [],
    ),
    ({("files", TOKEN, "sha256"): sha256("another")}, {}, [f"change {TOKEN}"]),
    ({("files", TOKEN, "mode"): "0644"}, {}, [f"change the mode of {TOKEN} from 0644 to 0600"]),
    ({("files", TOKEN, "mtime"): 4.0}, {}, [f"restart {GRIDD}, which has not read {TOKEN}"]),
    # One restart reads both files, so it is listed once.
    (
        {("files", TOKEN, "mtime"): 4.0, ("files", host_files.GRIDD_FILE, "mtime"): 4.0},
        {},
        [f"restart {GRIDD}, which has not read {host_files.GRIDD_FILE}"],
    ),
    ({("files", host_files.GRIDD_FILE): None}, {}, [f"write {host_files.GRIDD_FILE}"]),
    ({("units", GRIDD, "active"): False}, {}, [f"enable and start {GRIDD}"]),
]


@pytest.mark.parametrize(("state", "wanted", "changes"), GUESTS)
def test_a_vgpu_guest(state, wanted, changes):
    whole = {**desired.INPUTS["nvidia_driver"], "state": "present", **GUEST, **wanted}
    found = plan_driver.nvidia_driver(whole, changed(changed(GOOD, THERE), state), {})
    assert (list(found.changes), found.errors) == (changes, [])
    reads = desired.reads({"roles": {"nvidia_driver": whole}})
    assert (TOKEN in reads["files"]) is whole["vgpu_guest"]


# columns: record of the role on the host, which lists the services that a reload stopped; expected changes
RECORDS = [
    ({"stopped": ["nvidia-dcgm.service"]}, ["start nvidia-dcgm.service, which an interrupted run had stopped"]),
    ({"stopped": []}, []),
    ({"files": {}}, []),
]


@pytest.mark.parametrize(("record", "changes"), RECORDS)
def test_service_stopped_by_a_killed_reload_is_a_change(record, changes):
    wanted = {**desired.INPUTS["nvidia_driver"], "kernel_module": "auto", "state": "present", "setup_record": "/r"}
    state = {**GOOD, "texts": {"/r": json.dumps(record)}}
    assert plan_driver.nvidia_driver(wanted, state, {}).changes == changes
    assert plan_driver.nvidia_driver(wanted, {**GOOD, "texts": {"/r": None}}, {}).changes == []
    assert plan_driver.nvidia_driver(wanted, {**GOOD, "texts": {"/r": "torn"}}, {}).changes == []


USER_SPACE = {"nvidia-utils-535-server": "535.261.03-0ubuntu1"}
NSCQ, FABRIC = {"libnvidia-nscq-535": "535.261.03-1"}, {"nvidia-fabricmanager-535": "535.216.01-1"}
# columns: installed packages on a host with NVSwitches; expected changes of the fabric manager and of libnvidia-nscq,
# which both must have the version of the driver's user space
FOLLOWERS = [
    ({**USER_SPACE, **NSCQ, **FABRIC}, ["change nvidia-fabricmanager-535 from 535.216.01-1 to 535.261.03*"]),
    ({**USER_SPACE, **NSCQ}, ["install nvidia-fabricmanager-535 535.261.03*"]),
    # The version of the user space is not known yet.
    ({}, ["install nvidia-fabricmanager-535", "install libnvidia-nscq-535"]),
]


@pytest.mark.parametrize(("packages", "expected"), FOLLOWERS)
def test_packages_of_nvswitches_follow_the_version_of_the_driver(packages, expected):
    ubuntu = {"os.id": "ubuntu", "os.version_id": "22.04", "os.kernel": "5.15.0-153-generic"}
    state = changed(GOOD, {**ubuntu, "nvswitches": 6, "packages": packages})
    whole = {
        **desired.INPUTS["nvidia_driver"],
        "kernel_module": "auto",
        "state": "present",
        "branch": "535",
        "hold": False,
    }
    changes = plan_driver.nvidia_driver(whole, state, {}).changes
    assert sorted(text for text in changes if "fabricmanager" in text or "nscq" in text) == sorted(expected)


# columns: processes that use the driver, nvidia_driver_reboot; expected last change, words of the error. The host runs
# Ubuntu, whose package names contain the branch, so a change of the branch installs packages of other names.
BRANCHES = [
    ([], "never", "reload the kernel modules", ""),
    (["python3 (41)"], "if_required", "reboot, for driver 535.261.03 is loaded and in use by python3 (41)", ""),
    (["python3 (41)"], "never", "", "535.261.03 is loaded and in use by python3 (41); this needs a reboot"),
]


@pytest.mark.parametrize(("users", "policy", "last", "fault"), BRANCHES)
def test_another_branch_disturbs_even_with_other_package_names(users, policy, last, fault):
    there = {"nvidia-utils-535-server": "535.261.03-0ubuntu1", "libnvidia-compute-535-server": "535.261.03-0ubuntu1"}
    state = changed(GOOD, {**UBUNTU, "packages": there, "driver.in_use": users})
    whole = {**desired.INPUTS["nvidia_driver"], "kernel_module": "auto", "state": "present", "reboot": policy}
    found = plan_driver.nvidia_driver({**whole, "branch": "580"}, state, {})
    assert "install nvidia-utils-580-server" in found.changes
    assert (fault in " | ".join(found.errors)) if fault else (found.changes[-1], found.errors) == (last, [])
    assert found.disturbs
    if not fault:
        wanted = {"nvidia_driver_packages": [], "nvidia_driver_branch": "580", "nvidia_driver_reboot": policy}
        wanted["nvidia_driver_kernel_module"] = "auto"
        facts = {key: state[key] for key in ("packages", "driver", "pci_gpus", "nvswitches")}
        whole_plan = made(wanted, {**facts, "os": {**state["os"], "root": "true"}})
        assert whole_plan["roles"][0] == "nvidia_driver" and "device_plugin" in whole_plan["roles"], (
            "expected a restart of the plugin, which uses the old driver"
        )
    same = plan_driver.nvidia_driver({**whole, "branch": "535"}, state, {})
    assert (same.disturbs, same.errors) == (False, []), "expected no disturbance if the branch stays"


@pytest.mark.parametrize("chosen", [{"branch": "580"}, {"version": "580.95.05-0ubuntu1"}, {}])
def test_another_branch_disturbs_however_it_was_chosen(chosen):
    """If neither branch nor version is set, the role chooses the newest branch that supports the GPUs."""
    there = {"nvidia-utils-535-server": "535.261.03-0ubuntu1", "libnvidia-compute-535-server": "535.261.03-0ubuntu1"}
    state = changed(GOOD, {**UBUNTU, "packages": there, "driver.in_use": []})
    whole = {**desired.INPUTS["nvidia_driver"], "kernel_module": "auto", "state": "present", "reboot": "never"}
    found = plan_driver.nvidia_driver({**whole, **chosen}, state, {})
    assert (found.disturbs, found.errors) == (True, [])


# columns: a line of the plan; expected: whether this change replaces the running driver by another version
REPLACES = [
    ("change nvidia-smi from 535.1 to 535.2", True),
    ("change kmod-nvidia-open-dkms from 3:580.1-1 to 590.*", True),
    ("change kernel-devel from 5.14.0-570 to 5.14.0-427", False),
    ("change /etc/nvidia/gridd.conf", False),
    (f"change the mode of {host_files.TOKEN_FILE} from 0744 to 0600", False),
    ("install nvidia-smi", False),
]


@pytest.mark.parametrize(("change", "told"), REPLACES)
def test_changes_that_replace_the_running_driver(change, told):
    assert plan_driver.replaces(change) is told


# A driver of another branch runs and is in use, and packages are missing. Their installation must not disturb running
# work. columns: facts that differ, by which packages are missing; variables that differ; expected changes
OF_ANOTHER_BRANCH = [
    ({("packages", "nvidia-persistenced"): None}, {}, ["install nvidia-persistenced"]),
    ({("packages", HEADERS[0]): None}, {}, [f"install {HEADERS[0]}"]),  # The kernel was upgraded.
    # our-driver may depend on nvidia-utils-550.
    (
        {"packages": {"our-driver": "1", "nvidia-utils-550": "550.90.07-1"}},
        {"packages": ["our-driver", "nvtop"]},
        ["install nvtop"],
    ),
]


@pytest.mark.parametrize(("state", "wanted", "changes"), OF_ANOTHER_BRANCH)
def test_missing_packages_next_to_another_branch_disturb_nothing(state, wanted, changes):
    runs = dict.fromkeys(["driver.loaded_version", "driver.disk_version", "nvml.driver_version"], "550.90.07")
    whole = {**desired.INPUTS["nvidia_driver"], "kernel_module": "auto", "state": "present", "hold": False, **wanted}
    found = plan_driver.nvidia_driver(whole, changed(GOOD, {**runs, "driver.in_use": ["python3 (41)"], **state}), {})
    assert (list(found.changes), found.errors, found.disturbs, found.warnings) == (changes, [], False, [])


# columns: version of the running driver, variables that differ; expected words of the warning. The host has NVIDIA's
# repository, whose newest branch for Debian 12 is 580.
UNNAMED = [
    ("590.44.01", {}, 'to keep 590.44.01, set nvidia_driver_branch: "590"'),
    ("575.57.08", {}, 'to keep 575.57.08, set nvidia_driver_branch: "575"'),
    ("590.44.01", {"branch": "580"}, ""),
    ("590.44.01", {"branch": "590"}, ""),
    ("580.95.05", {}, ""),
]


@pytest.mark.parametrize(("runs", "wanted", "words"), UNNAMED)
def test_warning_for_an_unset_branch_names_the_variable(runs, wanted, words):
    packages = dict.fromkeys(["nvidia-driver-cuda", "nvidia-kernel-open-dkms", *HEADERS], f"{runs}-1")
    versions = dict.fromkeys(["driver.loaded_version", "driver.disk_version", "nvml.driver_version"], runs)
    state = changed(GOOD, {**versions, "packages": packages, "driver.in_use": ["python3 (41)"]})
    whole = {**desired.INPUTS["nvidia_driver"], "kernel_module": "auto", "state": "present", "hold": False}
    found = plan_driver.nvidia_driver({**whole, "source": "cuda", "reboot": "if_required", **wanted}, state, {})
    assert words in " ".join(found.warnings) and bool(found.warnings) is bool(words)
    assert found.disturbs is (f"{wanted.get('branch', '580')}." not in runs)


# columns: installed packages on Ubuntu, other facts that differ; expected words of the warning
CUDA_REPOSITORY = {"nvidia-utils-580": "580.95.05-0ubuntu1", "libnvidia-compute-580": "580.95.05-0ubuntu1"}
OF_OTHERS = [
    (
        CUDA_REPOSITORY,
        {},
        "was installed by libnvidia-compute-580, nvidia-utils-580; to keep it, set nvidia_driver_source: present",
    ),
    (CUDA_REPOSITORY, {"nvml.ok": False}, ""),  # No driver runs.
    (CUDA_REPOSITORY, {("files", "/record"): {"sha256": "x"}}, ""),  # Our own interrupted run installed the driver.
    ({"nvidia-utils-580-server": "580.95.05-0ubuntu1"}, {}, ""),
    ({"nvidia-container-toolkit": "1.18.0-1", "nvidia-utils-580": None}, {}, ""),
]


@pytest.mark.parametrize(("packages", "more", "words"), OF_OTHERS)
def test_warning_for_a_driver_of_others_names_the_variable_to_keep_it(packages, more, words):
    state = changed(GOOD, {**UBUNTU, "packages": packages, "nvml.driver_version": "580.95.05", **more})
    state = changed(state, {"driver.loaded_version": "580.95.05", "driver.disk_version": "580.95.05"})
    whole = {**desired.INPUTS["nvidia_driver"], "kernel_module": "auto", "state": "present", "record": "/record"}
    found = plan_driver.nvidia_driver(whole, state, {})
    assert any(text.startswith("install ") for text in found.changes)
    assert words in " ".join(found.warnings) and bool(found.warnings) is bool(words)


# Ubuntu with all packages of branch 535. columns: version of the running driver, packages or files that are missing,
# kind of kernel modules; expected words of the warning
RETIRED = [
    ("535.261.03", {}, "auto", ""),
    ("580.178.04", {}, "auto", "branch 535 is requested and installed, but driver 580.178.04 runs"),
    ("580.178.04", {"packages.nvidia-utils-535-server": None}, "auto", ""),
    ("580.178.04", {("files", host_files.PERSISTENCE_FILE): None}, "auto", ""),
    ("580.178.04", {}, "none", ""),  # the role does not manage the module
]


@pytest.mark.parametrize(("runs", "lacking", "kind", "words"), RETIRED)
def test_packages_that_installed_another_branch_are_a_warning(runs, lacking, kind, words):
    whole = {
        **desired.INPUTS["nvidia_driver"],
        "kernel_module": kind,
        "state": "present",
        "branch": "535",
        "hold": False,
    }
    state = changed(GOOD, {**UBUNTU, "driver.loaded_version": runs, "driver.disk_version": runs})
    names = driver_choice.choose(state, whole).packages
    state = changed(changed(state, {"packages": dict.fromkeys(names, "535.309.01-0ubuntu0.24.04.2")}), lacking)
    found = plan_driver.nvidia_driver(whole, state, {})
    assert words in " ".join(found.warnings) and bool(found.warnings) is bool(words)


DROP_IN, PERSISTENCED = host_files.PERSISTENCE_FILE, "nvidia-persistenced.service"
UBUNTU = {
    "os.id": "ubuntu",
    "os.version_id": "24.04",
    "os.kernel": "6.8.0-84-generic",
    ("files", DROP_IN): {"sha256": sha256(host_files.PERSISTENCE_TEXT), "mtime": 1.0},
    ("units", PERSISTENCED): {"present": True, "enabled": True, "active": True, "started": 2.0},
}
# columns: the difference in nvidia-persistenced's drop-in on Ubuntu; expected changes that name the service
DROP_INS = [
    ({}, []),
    ({("files", DROP_IN): None}, [f"write {DROP_IN}"]),
    ({("files", DROP_IN, "mtime"): 3.0}, [f"restart {PERSISTENCED}, which has not read {DROP_IN}"]),
]


def test_old_initramfs_is_rebuilt_next_to_an_unrelated_change():
    whole = {**desired.INPUTS["nvidia_driver"], "kernel_module": "auto", "state": "present"}
    state = changed(GOOD, {**UBUNTU, ("files", DROP_IN): None, "driver.initramfs_old": True})
    changes = plan_driver.nvidia_driver(whole, state, {}).changes
    assert f"write {DROP_IN}" in changes and any(text.startswith("rebuild the initramfs") for text in changes)


@pytest.mark.parametrize(("state", "changes"), DROP_INS)
def test_persistence_mode_on_ubuntu(state, changes):
    whole = {**desired.INPUTS["nvidia_driver"], "kernel_module": "auto", "state": "present"}
    found = plan_driver.nvidia_driver(whole, changed(changed(GOOD, UBUNTU), state), {})
    assert [text for text in found.changes if "persistenced" in text] == changes


def test_hold_covers_only_installed_kernel_packages_of_ubuntu():
    there = {"linux-generic": "6.8.0-84.84", "linux-image-generic": "6.8.0-84.84", "linux-image-6.8.0-84-generic": "1"}
    state = changed(GOOD, {**UBUNTU, "packages": there})
    whole = {**desired.INPUTS["nvidia_driver"], "kernel_module": "auto", "state": "present", "hold_kernel": True}
    changes = plan_driver.nvidia_driver(whole, state, {}).changes
    assert [text for text in changes if text.startswith("hold ")] == ["hold linux-generic", "hold linux-image-generic"]
    state = changed(state, {"held": [*there], **recorded(holds=["linux-generic", "linux-image-generic"])})
    changes = plan_driver.nvidia_driver({**whole, "record": "/record", "hold_kernel": False}, state, {}).changes
    assert [text for text in changes if text.startswith("release ")] == [
        "release linux-generic",
        "release linux-image-generic",
    ]


def test_plan_reads_everything_that_the_driver_choice_may_name():
    roles = {"nvidia_driver_state": "present", "nvidia_driver_kernel_module": "auto"}
    roles |= {"__nvidia_driver_record": "/record", "__nvidia_driver_setup_record": "/r"}
    options = desired.reads(desired.collect(roles))
    assert set(driver_choice.UNITS) <= set(options["units"])
    assert set(host_files.FILES) <= set(options["files"])
    assert "*nvidia*" in options["packages"]
    assert options["texts"] == ["/record", "/r"]


SMI_GONE = "nvidia-smi is missing, though its package nvidia-smi is installed; install it again: apt-get install"


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"driver.smi": True}, False),
        ({"driver.smi": False}, True),
        ({"driver.smi": False, "packages.nvidia-smi": None}, False),  # the plan installs the package
        ({"driver.smi": False, "packages": {"libcuda1": "535.261.03-1"}}, False),
    ],
)
def test_removed_nvidia_smi_is_a_warning(state, said):
    """The package database still lists the deleted program."""
    assert any(SMI_GONE in one for one in made(state=state)["warnings"]) is said


def test_of_two_packages_with_nvidia_smi_the_first_by_name_is_named():
    state = {"driver.smi": False, "packages.nvidia-driver-cuda": "535.1-1"}
    assert any("its package nvidia-driver-cuda is installed" in one for one in made(state=state)["warnings"])
