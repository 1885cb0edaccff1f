# SPDX-License-Identifier: Apache-2.0
"""Tests which Python runs the device plugin on a host. A table of systems or the variable device_plugin_python selects
it. The plan (made before a run changes anything) refuses a Python that is too old or missing. Also tests the Python of
MIG's boot program, and the Python on which a play continues when it removes the plugin's.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.gpu import mig_host, mig_unit
from ansible_collections.vgpu.fleet.plugins.module_utils.host import distribution
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import modes as plan_modes
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import plugin_python
from plan_samples import made
from test_plan_modes import AS_WANTED, WANTED

SYSTEM = "/usr/bin/python3"


def host(name: str, version: str = "", like: str = "") -> dict[str, str]:
    return {"id": name, "version_id": version, "id_like": like, "name": f"{name} {version}".strip()}


# columns: system; expected Python of the plugin (3.11 or newer), packages that install it, Python of the boot program
# for MIG, which needs only 3.8
SYSTEMS = [
    (host("debian", "12"), SYSTEM, ["python3-venv"], SYSTEM),
    (host("debian", "13"), SYSTEM, ["python3-venv"], SYSTEM),
    (host("ubuntu", "24.04", "debian"), SYSTEM, ["python3-venv"], SYSTEM),
    (host("ubuntu", "22.04", "debian"), "/usr/bin/python3.11", ["python3.11", "python3.11-venv"], SYSTEM),
    (host("ubuntu", "20.04", "debian"), "", [], SYSTEM),
    (host("rocky", "8.10"), "/usr/bin/python3.12", ["python3.12"], "/usr/bin/python3.12"),
    (host("rhel", "9.4"), "/usr/bin/python3.12", ["python3.12"], SYSTEM),
    (host("almalinux", "10.0"), SYSTEM, ["python3"], SYSTEM),
    (host("sles", "15.6"), "/usr/bin/python3.11", ["python311"], "/usr/bin/python3.11"),
    # systems that are not in the table
    (host("linuxmint", "22", "ubuntu debian"), SYSTEM, ["python3-venv"], SYSTEM),
    (host("debian"), SYSTEM, ["python3-venv"], SYSTEM),
    (host("fedora", "42"), SYSTEM, [], SYSTEM),
    (host(""), SYSTEM, [], SYSTEM),
]


@pytest.mark.parametrize(("system", "python", "packages", "small"), SYSTEMS, ids=lambda one: str(one)[:40])
def test_each_system_has_its_python(system, python, packages, small):
    choice = plugin_python.choose(system)
    assert (choice.python, choice.packages) == (python, packages)
    assert plugin_python.small_program(system) == small
    assert plugin_python.small_program(system, "/opt/python") == "/opt/python"
    # Packages must be queried before the system is known, so that query must include the packages of every system.
    assert set(packages) <= set(plugin_python.may_need("auto"))
    assert distribution.community(system) == (["universe"] if system["id"] == "ubuntu" else [])


def test_every_system_that_gets_a_driver_is_in_the_table():
    known = {("debian", one) for one in distribution.DEBIAN}
    known |= {("ubuntu", one) for one in distribution.UBUNTU}
    known |= {("el", one) for one in ("8", "9", "10")} | {("sles", "15")}
    assert set(plugin_python.TABLE) == known


def test_versions_of_the_table_meet_the_requirement_of_the_plugin():
    for (family, release), row in plugin_python.TABLE.items():
        choice = plugin_python.Choice(row.python, list(row.packages), row.version)
        refused = plugin_python.refusal(host(family, release), choice, row.version or None)
        assert bool(refused) is ((family, release) == ("ubuntu", "20.04")), refused


@pytest.mark.parametrize(
    ("python", "packages", "chosen", "names"),
    [
        ("auto", "auto", "/usr/bin/python3.11", ["python3.11", "python3.11-venv"]),
        ("auto", ["auto"], "/usr/bin/python3.11", ["python3.11", "python3.11-venv"]),
        ("auto", ["my-python"], "/usr/bin/python3.11", ["my-python"]),
        ("auto", [], "/usr/bin/python3.11", []),
        ("/usr/bin/python3.11", "auto", "/usr/bin/python3.11", ["python3.11", "python3.11-venv"]),
        ("/opt/python", "auto", "/opt/python", []),
        ("/opt/python", ["my-python"], "/opt/python", ["my-python"]),
    ],
)
def test_configured_interpreter_is_selected(python, packages, chosen, names):
    choice = plugin_python.choose(host("ubuntu", "22.04"), python, packages)
    assert (choice.python, choice.packages) == (chosen, names)
    # The version is known only for the Python in the table.
    assert choice.version == ("3.11" if chosen == "/usr/bin/python3.11" else "")
    assert plugin_python.may_need(packages) == (
        plugin_python.EVERY_PACKAGE if packages in ("auto", ["auto"]) else packages
    )


# columns: system, device_plugin_python, version of that interpreter (None: unknown, "": it does not exist); expected
# words of the refusal ("": accepted)
@pytest.mark.parametrize(
    ("system", "python", "version", "said"),
    [
        (host("ubuntu", "22.04"), "auto", None, ""),
        (host("ubuntu", "22.04"), "auto", "3.11", ""),
        (host("ubuntu", "22.04"), "/usr/bin/python3", "3.10", "/usr/bin/python3 is Python 3.10"),
        (host("ubuntu", "20.04"), "auto", None, "ubuntu 20.04 has none in its repositories"),
        ({"id": "ubuntu", "version_id": "20.04"}, "auto", None, "and ubuntu has none in its repositories"),
        ({}, "", None, "and this system has none in its repositories"),
        (host("ubuntu", "20.04"), "/opt/python", "3.12", ""),
        (host("ubuntu", "20.04"), "/opt/python", "", "/opt/python is missing or does not run"),
        (host("linuxmint", "20", "ubuntu"), "auto", "3.8", "/usr/bin/python3 is Python 3.8"),
        (host("debian", "13"), "auto", "3.13", ""),
        (host("debian", "99"), "auto", "4.0", ""),
    ],
)
def test_unsuitable_python_is_refused_with_a_remedy(system, python, version, said):
    text = plugin_python.refusal(system, plugin_python.choose(system, python), version)
    assert said in text
    assert bool(text) is bool(said)
    assert not text or ("3.11 or newer" in text and "name it in device_plugin_python" in text)


@pytest.mark.parametrize(
    ("found", "missing"),
    [
        ({}, ["python3.11", "python3.11-venv"]),
        ({"python3.11": "3.11.0~rc1", "python3.11-venv": None}, ["python3.11-venv"]),
        ({"python3.11": "3.11.0~rc1", "python3.11-venv": "3.11.0~rc1"}, []),
    ],
)
def test_missing_packages_of_the_python(found, missing):
    assert plugin_python.missing(plugin_python.choose(host("ubuntu", "22.04")), found) == missing


NEWER, OWN = "/usr/bin/python3.11", "/usr/bin/python3.10"
LINKS = {SYSTEM: OWN, "/opt/venv/bin/python": NEWER}
EVERY = {SYSTEM: "3.10", OWN: "3.10", NEWER: "3.11"}


# A play that uninstalls the plugin removes the packages of the plugin's Python. If that Python runs the play's modules,
# the play must continue with another. Columns: device_plugin_python, Python that runs the modules, links, versions of
# the Pythons; expected other Python ("": not needed, or there is none).
@pytest.mark.parametrize(
    ("named", "running", "links", "versions", "goes_on"),
    [
        ("auto", NEWER, LINKS, EVERY, SYSTEM),
        ("auto", "/opt/venv/bin/python", LINKS, EVERY, SYSTEM),
        ("auto", SYSTEM, LINKS, EVERY, ""),
        ("auto", OWN, LINKS, EVERY, ""),
        # The packages for /usr/bin/python3 only add venv, so this interpreter stays.
        (SYSTEM, SYSTEM, LINKS, EVERY, ""),
        # The system's Python is no replacement: it is too old for the modules, or a link to the removed Python.
        ("auto", NEWER, {}, {SYSTEM: "3.6", "/usr/bin/python3.9": "3.9"}, "/usr/bin/python3.9"),
        ("auto", NEWER, {SYSTEM: NEWER}, {SYSTEM: "3.11", "/usr/bin/python3.8": "3.8"}, "/usr/bin/python3.8"),
        ("auto", NEWER, {}, {SYSTEM: "3.6", NEWER: "3.11"}, ""),
        ("auto", NEWER, {}, {SYSTEM: "3.7", NEWER: "3.11"}, ""),
    ],
)
def test_play_continues_with_a_python_that_stays(named, running, links, versions, goes_on):
    choice = plugin_python.choose(host("ubuntu", "22.04"), named)
    assert plugin_python.to_go_on_with(choice, running, links, versions) == goes_on


JAMMY, FOCAL = host("ubuntu", "22.04", "debian"), host("ubuntu", "20.04", "debian")
RECORD = "/var/lib/vgpu/baseline/device_plugin.json"


@pytest.mark.parametrize(
    ("system", "variables", "differs", "steps", "refused"),
    [
        (JAMMY, {}, {"plugin.versions": []}, ["install python3.11", "install python3.11-venv"], ""),
        (JAMMY, {"device_plugin_packages": []}, {"plugin.versions": []}, [], ""),
        # The plugin is already installed, and it runs on the Python with which it was installed.
        (JAMMY, {}, {}, [], ""),
        (FOCAL, {}, {}, [], ""),
        (FOCAL, {}, {"plugin.versions": []}, [], "device_plugin_python"),
        (FOCAL, {"device_plugin_python": "/opt/python"}, {"plugin.versions": []}, [], ""),
        (FOCAL, {"device_plugin_state": "absent"}, {}, [], ""),
    ],
)
def test_the_plan_names_packages_and_refuses_before_a_host_is_changed(system, variables, differs, steps, refused):
    whole = made(variables, {"os": {**system, "root": "true"}, **differs})
    told = [change for step in whole["steps"] if step["role"] == "device_plugin" for change in step["changes"]]
    assert [change for change in told if "python" in change] == steps
    assert any(refused in text for text in whole["errors"]) if refused else whole["errors"] == []


@pytest.mark.parametrize(("there", "expected"), [({"sha256": "x", "mtime": 1.0}, True), (None, False)])
def test_absent_reverts_the_recorded_packages(there, expected):
    variables = {"device_plugin_state": "absent", "__device_plugin_packages_record": RECORD}
    whole = made(variables, {("files", RECORD): there})
    changes = [change for step in whole["steps"] if step["role"] == "device_plugin" for change in step["changes"]]
    assert (f"revert the changes recorded in {RECORD}" in changes) is expected


@pytest.mark.parametrize(
    ("system", "python", "changes"),
    [(host("debian", "12"), "auto", 0), (host("rocky", "8.9"), "auto", 1), (host("debian", "12"), "/opt/python", 1)],
)
def test_the_unit_of_mig_runs_on_a_python_that_is_new_enough(system, python, changes):
    wanted = {"state": "present", "geometry": WANTED, "boot": True, "python": python, "record": ""}
    # The files on the disk name /usr/bin/python3, so a different Python means one change.
    assert len(plan_modes.mig(wanted, {**AS_WANTED, "os": system}, {}).changes) == changes
    chosen = plugin_python.small_program(system, python)
    assert chosen in mig_unit.files(WANTED, chosen)[mig_unit.UNIT_PATH]


# columns: mode of the interpreter's file (None: no such file); expected words of the fault ("": none)
@pytest.mark.parametrize(("mode", "words"), [(0o755, ""), (0o644, "is missing"), (None, "name a Python 3.8 or newer")])
def test_missing_python_of_the_mig_unit_is_reported_before_the_boot(tmp_path, mode, words):
    """On RHEL 8 and SLES 15 the boot program of MIG needs the Python of the device plugin. A play without the role
    device_plugin does not install it, so the fault must be reported before the next boot."""
    python = plugin_python.small_program({"id": "rhel", "version_id": "8.10", "name": "RHEL 8.10"})
    assert python == "/usr/bin/python3.12"
    if mode is not None:
        (tmp_path / "usr/bin").mkdir(parents=True)
        (tmp_path / python[1:]).touch(mode)
    said = mig_host.MigHost(root=str(tmp_path)).without_python(python)
    assert words in " ".join(said) and bool(said) is bool(words)
    files = mig_unit.files({"1g.10gb": 7}, python)
    assert f"ExecStart={python} " in files[mig_unit.UNIT_PATH]


def test_every_python_of_the_artefact_is_searched():
    """The artefact (the collection with its wheels) is for Python 3.11 to 3.14. The search goes down to 3.8, because
    the modules of a play need no newer Python."""
    found = [path.removeprefix("/usr/bin/") for path in plugin_python.CANDIDATES]
    assert " ".join(found) == ("python3 python3.14 python3.13 python3.12 python3.11 python3.10 python3.9 python3.8")
