# SPDX-License-Identifier: Apache-2.0
"""Tests the role preflight, which checks a run before it changes anything. Before any remote call the role must find
mistakes in variables, and its message must name the variable, the group and the host. After these checks the role plans
the run.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from conftest import ROOT, Run, Workplace

PREFLIGHT = {"name": "check", "ansible.builtin.import_role": {"name": "vgpu.fleet.preflight"}}
AFTER = {"name": "change", "ansible.builtin.debug": {"msg": "CHANGED A HOST"}}


def run_preflight(place: Workplace, *options: str, **variables: Any) -> Run:
    play = {"hosts": "all", "gather_facts": False, "vars": variables, "tasks": [PREFLIGHT, AFTER]}
    return place.play([play], *options)


def said(run: Run) -> str:
    """Returns the output of a run, with JSON's escaped quotes restored."""
    return run.output.replace('\\"', '"')


# columns: variables of the group t4; words that the message is expected to contain
MISTAKES = [
    ({"vgpu_split_count": 0}, ["vgpu_split_count: expected a whole number from 1"]),
    ({"vgpu_split_count": "seven"}, ['found "seven"']),
    ({"vgpu_sharing": "slicing"}, ["vgpu_sharing: expected one of vcuda"]),
    ({"vgpu_sharing": "mig"}, ["vgpu_mig_geometry: is empty; name a profile"]),
    ({"vgpu_memory_scaling": 0}, ["vgpu_memory_scaling: expected a decimal above 0"]),
    ({"vgpu_memory_scaling": -0.5}, ["found -0.5"]),
    (
        {"vgpu_devices": [{"match": {"index": 0}, "splitcount": 1}]},
        ["vgpu_devices[0].splitcount", 'did you mean "split_count"?'],
    ),
    ({"vgpu_splitcount": 3}, ['unknown variable "vgpu_splitcount"; did you mean "vgpu_split_count"?']),
    ({"vgpu_split_count": "{{ no_such_variable }}"}, ["vgpu_split_count: its template cannot be evaluated"]),
    ({"nvidia_driver_branhc": 570}, ['did you mean "nvidia_driver_branch"?']),
    ({"container_runtime_engine": "dockerd"}, ["container_runtime_engine: expected one of", 'found "dockerd"']),
    ({"device_plugin_deploy": "daemonset"}, ["device_plugin_api_kubeconfig is empty"]),
]


@pytest.mark.parametrize(("variables", "words"), MISTAKES)
def test_mistake_stops_all_hosts_before_any_remote_call(
    place: Workplace, variables: dict[str, Any], words: list[str]
) -> None:
    place.hosts({"t4": ["good-1", "bad-1"], "a100": ["good-2"]})
    place.group("t4")
    place.host("bad-1", **variables)
    run = run_preflight(place)
    assert run.code != 0
    assert run.calls == {"good-1": 0, "bad-1": 0, "good-2": 0}, run.output
    assert "CHANGED A HOST" not in run.output
    for word in [*words, "bad-1", "No host was changed."]:
        assert word in said(run)


# columns: where the value is set; how the message is expected to name that place
SETTERS = [
    (("group", "t4"), "group t4 in group_vars/t4.yml:1, 2 hosts (gpu-1, gpu-2)"),
    (("group", "gpu_nodes"), "group gpu_nodes in group_vars/gpu_nodes.yml:1, 3 hosts (gpu-3, gpu-1, gpu-2)"),
    (("group", "all"), "group all in group_vars/all.yml:1, 3 hosts (gpu-3, gpu-1, gpu-2)"),
    (("host", "gpu-1"), "host gpu-1 in host_vars/gpu-1.yml:1"),
]


@pytest.mark.parametrize(("setter", "words"), SETTERS)
def test_message_names_the_source_of_the_value_and_the_hosts(
    place: Workplace, setter: tuple[str, str], words: str
) -> None:
    place.hosts({"t4": ["gpu-1", "gpu-2"], "a100": ["gpu-3"]})
    kind, name = setter
    (place.group if kind == "group" else place.host)(name, vgpu_split_count=0)
    output = said(run_preflight(place))
    assert output.count(f"{words}: vgpu_split_count: expected a whole number") == 1, output


def test_message_names_the_group_with_precedence(place: Workplace) -> None:
    place.hosts({"t4": ["gpu-1"]})
    place.group("all", vgpu_split_count=2)
    place.group("t4", vgpu_split_count=0)
    assert "group t4 in group_vars/t4.yml:1, 1 host (gpu-1): vgpu_split_count" in said(run_preflight(place))


# columns: variables of each group, variables of host gpu-1; whether the message is expected to warn of a conflict
CONTESTED = [
    ({"t4": {"vgpu_split_count": 7}, "a100": {"vgpu_split_count": 4}}, {}, True),
    # Two groups that set the same value, or different variables, do not conflict.
    ({"t4": {"vgpu_split_count": 4}, "a100": {"vgpu_split_count": 4}}, {}, False),
    ({"t4": {"vgpu_split_count": 7}, "a100": {"vgpu_cores_scaling": 1}}, {}, False),
    # A child group, a host or a priority overrides a group, so there is no conflict.
    ({"t4": {"vgpu_split_count": 7}, "gpu_nodes": {"vgpu_split_count": 4}}, {}, False),
    ({"t4": {"vgpu_split_count": 7}, "all": {"vgpu_split_count": 4}}, {}, False),
    ({"t4": {"vgpu_split_count": 7}, "a100": {"vgpu_split_count": 4}}, {"vgpu_split_count": 2}, False),
    ({"t4": {"vgpu_split_count": 7, "ansible_group_priority": 9}, "a100": {"vgpu_split_count": 4}}, {}, False),
    ({"t4": {"port": 7}, "a100": {"port": 4}}, {}, False),
]


@pytest.mark.parametrize(("groups", "own", "warned"), CONTESTED)
def test_two_groups_that_disagree_on_a_host_are_a_warning(
    place: Workplace, groups: dict[str, Any], own: dict[str, Any], warned: bool
) -> None:
    place.hosts({"t4": ["gpu-1", "gpu-2"], "a100": ["gpu-1", "gpu-3"]})
    priority = groups.get("t4", {}).pop("ansible_group_priority", None)
    if priority:
        # Ansible reads the priority only from the inventory.
        place.write("more.yml", f"t4:\n  vars:\n    ansible_group_priority: {priority}\n")
    for name, variables in groups.items():
        place.group(name, **variables)
    place.host("gpu-1", **own)
    output = said(run_preflight(place, *(["-i", "more.yml"] if priority else [])))
    words = "group t4 in group_vars/t4.yml:1, 1 host (gpu-1): vgpu_split_count: is 7 here and 4 by group a100 in"
    found = " ".join(output.split())
    assert (f"{words} group_vars/a100.yml:1" in found) == ("by group" in found) == warned, output


def test_a_password_of_a_proxy_that_two_groups_disagree_on_is_not_shown(place: Workplace) -> None:
    place.hosts({"t4": ["gpu-1"], "a100": ["gpu-1"]})
    for group in ("t4", "a100"):
        place.group(group, vgpu_package_environment={"https_proxy": f"http://me:secret-{group}@127.0.0.1:1"})
    found = " ".join(said(run_preflight(place)).split())
    assert "vgpu_package_environment: has another value by group a100" in found
    assert "secret" not in found


INI = """\
[t4]
gpu-1 nvidia_driver_source=cudaa ansible_connection=local
[t4:vars]
vgpu_split_count=0
"""


def test_a_value_of_an_ini_inventory_is_found(place: Workplace) -> None:
    place.hosts({})
    place.write("hosts.ini", INI)
    output = said(run_preflight(place, "-i", "hosts.ini"))
    assert "host gpu-1 in hosts.ini:2: nvidia_driver_source: expected one of" in output
    assert "group t4 in hosts.ini:4, 1 host (gpu-1): vgpu_split_count: expected" in output


def test_a_value_of_a_yaml_inventory_is_found(place: Workplace) -> None:
    place.hosts({})
    place.write("more.yml", "t4:\n  vars:\n    vgpu_split_count: 0\n  hosts:\n    gpu-1:\n      vgpu_log_level: 9\n")
    output = said(run_preflight(place, "-i", "more.yml"))
    assert "group t4 in more.yml:3, 1 host (gpu-1): vgpu_split_count: expected" in output
    assert "host gpu-1 in more.yml:6: vgpu_log_level: expected" in output


# columns: options of ansible-playbook; expected text of the message
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-e", "vgpu_split_count=0"], "the command line, 2 hosts (gpu-1, gpu-2): vgpu_split_count"),
        (["-e", '{"vgpu_split_count": 0}'], "the command line, 2 hosts (gpu-1, gpu-2): vgpu_split_count"),
        (["-e", "@more.yml"], "the command line in more.yml:2, 2 hosts (gpu-1, gpu-2): vgpu_split_count"),
        (["-e", "nvidia_driver_branhc=570"], 'did you mean "nvidia_driver_branch"?'),
    ],
)
def test_message_names_the_command_line(place: Workplace, options: list[str], words: str) -> None:
    place.hosts({"t4": ["gpu-1", "gpu-2"]})
    place.group("t4", vgpu_split_count=2)
    place.write("more.yml", "# more\nvgpu_split_count: 0\n")
    assert words in said(run_preflight(place, *options))


def test_message_names_the_play(place: Workplace) -> None:
    place.hosts({"t4": ["gpu-1", "gpu-2"]})
    place.host("gpu-2", vgpu_log_level=2)
    output = said(run_preflight(place, vgpu_log_level=9))
    assert re.search(r"the play in play.yml:[0-9]+, 2 hosts \(gpu-1, gpu-2\): vgpu_log_level: expected", output), output


def test_every_option_at_once_is_named_with_its_line(place: Workplace) -> None:
    """One file sets a wrong value for each variable of each role's specification; the message must name each variable's
    line."""
    wrong = {}
    for path in sorted(ROOT.glob("roles/*/meta/argument_specs.yml")):
        for entry in yaml.safe_load(path.read_text())["argument_specs"].values():
            for name, option in (entry.get("options") or {}).items():
                wrong[name] = "wrong" if option.get("type") in ("bool", "int", "list", "dict") else {"no": "text"}
    place.hosts({"t4": ["gpu-1"], "a100": ["gpu-2"]})
    lines = yaml.safe_dump(wrong, default_flow_style=True, width=10**9)[1:-2].split(", ")
    assert len(lines) == len(wrong) > 100
    place.write("group_vars/t4.yml", "\n".join(lines) + "\n")
    run = run_preflight(place)
    assert run.calls == {"gpu-1": 0, "gpu-2": 0}
    output = said(run)
    for number, line in enumerate(lines, start=1):
        name = line.partition(":")[0]
        assert f"group t4 in group_vars/t4.yml:{number}, 1 host (gpu-1): {name}: expected" in output
    assert f"The variables hold {len(wrong)} mistakes. No host was changed." in output
    assert "KeyError" not in output
    assert "Traceback" not in output


def test_a_mistake_of_the_last_batch_stops_the_first(place: Workplace) -> None:
    place.hosts({"t4": ["gpu-1", "gpu-2", "gpu-3"]})
    place.host("gpu-3", device_plugin_deplyo="daemonset")
    play = {"hosts": "all", "serial": 1, "gather_facts": False, "tasks": [PREFLIGHT, AFTER]}
    run = place.play([play])
    assert run.code != 0
    assert set(run.calls.values()) == {0}
    assert "host gpu-3 in host_vars/gpu-3.yml:1: device_plugin_deplyo: unknown variable" in said(run)


def test_a_value_that_needs_facts_is_left_to_its_role(place: Workplace) -> None:
    place.hosts({"t4": ["gpu-1"]})
    place.group("t4", device_plugin_node_name="{{ ansible_facts.nodename }}")
    run = run_preflight(place)
    assert run.code == 0, run.output
    assert run.calls == {"gpu-1": 1}


def test_a_role_that_runs_after_changes_does_not_claim_that_there_were_none(place: Workplace) -> None:
    place.hosts({"t4": ["gpu-1"]})
    place.group("t4", vgpu_split_count=0)
    desired = {"name": "later", "vgpu.fleet.desired_state": {}}
    run = place.play([{"hosts": "all", "gather_facts": False, "tasks": [AFTER, desired]}])
    assert "The variables of this host hold 1 mistake." in run.output
    assert "No host was changed" not in run.output


@pytest.mark.parametrize(
    "left_out", [[], [dict(PREFLIGHT, when=False)]], ids=["without preflight", "after a skipped preflight"]
)
def test_verify_checks_the_variables_without_preflight(place: Workplace, left_out: list[dict[str, Any]]) -> None:
    """If the role preflight did not run, the role verify checks the variables too. Without this check, verify would
    compare the host with the host's own file and not with the group's setting."""
    place.hosts({"t4": ["gpu-1"]})
    place.group("t4", vgpu_split_count=0)
    verify = {"name": "Verify", "ansible.builtin.import_role": {"name": "vgpu.fleet.verify"}}
    run = place.play([{"hosts": "all", "gather_facts": False, "tasks": [*left_out, verify]}])
    assert run.code != 0
    assert "The variables of this host hold 1 mistake." in run.output, run.output
    assert run.calls == {"gpu-1": 0}


def test_all_mistakes_of_a_host_are_reported_together(place: Workplace) -> None:
    place.hosts({"t4": ["gpu-1"]})
    place.group("t4", vgpu_split_count=0, vgpu_sharing="x", vgpu_verfy="always")
    output = said(run_preflight(place))
    assert "3 mistakes" in output
    assert 'did you mean "vgpu_verify"?' in output


def test_a_host_without_mistakes_is_read_once_and_planned(place: Workplace) -> None:
    place.hosts({"t4": ["gpu-1"], "a100": ["gpu-2"]})
    place.group("t4", vgpu_split_count=7)
    # This play only simulates the role vcuda; no host has this version.
    run = run_preflight(place, vcuda_state="present", vcuda_version="9.9.9-x", vcuda_root=str(place.folder / "none"))
    assert run.code == 0, run.output
    assert run.calls == {"gpu-1": 1, "gpu-2": 1}
    assert f"deploy {place.folder}/none/9.9.9-x" in run.output
    assert run.output.count("CHANGED A HOST") == 2


ENVIRONMENT = "accept-nvidia-visible-devices-envvar-when-unprivileged"
# columns: nvidia_docker_config of the group, words of the warning
TOOLKIT = [
    ({"accept-nvidia-visible-devices-as-volume-mounts": True}, "expected false, found unset, which means true, in"),
    ({ENVIRONMENT: True}, "expected false, found true in"),
    ({ENVIRONMENT: False, "accept-nvidia-visible-devices-as-volume-mounts": True}, ""),
    (None, ""),
]


@pytest.mark.parametrize(("keys", "words"), TOOLKIT)
def test_toolkit_that_exposes_every_gpu_is_a_warning(place: Workplace, keys: dict[str, Any] | None, words: str) -> None:
    place.hosts({"t4": ["gpu-1"]})
    place.group("t4", vgpu_sharing="vcuda", **({} if keys is None else {"nvidia_docker_config": keys}))
    role = {"role": "vgpu.fleet.nvidia_docker", "tags": ["never"]}
    given = {"nvidia_docker_packages": []}
    inner = f"__nvidia_docker_config_path={place.folder / 'no-such.toml'}"
    play = {"hosts": "all", "gather_facts": False, "vars": given, "roles": [role], "tasks": [PREFLIGHT, AFTER]}
    run = place.play([play], "--skip-tags", "never", "-e", inner)
    assert run.code == 0, run.output
    assert run.output.count("CHANGED A HOST") == 1
    told = " ".join(run.output.split())
    line = f"host gpu-1 (group t4), set by group t4 in group_vars/t4.yml:1: nvidia_docker_config.{ENVIRONMENT}: {words}"
    assert (line in told) is bool(words), run.output
    assert ("NVIDIA_VISIBLE_DEVICES gets every GPU" in told) is bool(words)


TOKEN = "nvidia_driver_vgpu_token_file"


# columns: variables of the host, whether the token file is read
@pytest.mark.parametrize(
    ("variables", "read"),
    [
        ({"nvidia_driver_vgpu_guest": True}, True),
        ({"nvidia_driver_vgpu_guest": False}, False),
        ({"nvidia_driver_vgpu_guest": True, "nvidia_driver_state": "absent"}, False),
    ],
)
def test_licence_token_is_read_only_by_the_host_that_copies_it(
    place: Workplace, variables: dict[str, Any], read: bool
) -> None:
    """A run that removes the driver must not need the token file, which may have been deleted."""
    place.hosts({"t4": ["gpu-1"]})
    # The play includes the role only for its defaults.
    role = {"role": "vgpu.fleet.nvidia_driver", "tags": ["never"]}
    given = {TOKEN: str(place.folder / "no-such-token"), "nvidia_driver_source": "file", **variables}
    given["nvidia_driver_files"] = ["/driver.deb"]
    play = {"hosts": "all", "gather_facts": False, "vars": given, "roles": [role], "tasks": [PREFLIGHT]}
    run = place.play([play], "--skip-tags", "never")
    assert ("nvidia_driver_vgpu_token_sha256: its template cannot be evaluated" in run.output) is read, run.output
    assert run.calls["gpu-1"] == (0 if read else 1)


# columns: variables of the group, whether the run is refused
@pytest.mark.parametrize(
    ("variables", "refused"),
    [
        ({}, True),
        ({"vcuda_build_host": "gpu-2"}, False),
        ({"vcuda_state": "absent"}, False),
        ({"vgpu_sharing": "mps"}, False),
        ({"prebuilt": True}, False),
    ],
)
def test_a_controller_that_cannot_compile_is_refused_before_any_host_is_read(
    place: Workplace, monkeypatch: pytest.MonkeyPatch, variables: dict[str, Any], refused: bool
) -> None:
    programs, folder = place.folder / "bin", place.folder / "prebuilt"
    programs.mkdir()
    folder.mkdir()
    for name in ("sh", "env", "mkdir", "rm", "chmod", "echo", "sleep"):
        (programs / name).symlink_to(f"/bin/{name}" if name != "env" else "/usr/bin/env")
    monkeypatch.setenv("PATH", str(programs))
    given = {"vcuda_version": "9.9.9-x", "vcuda_root": str(place.folder / "lib"), "vcuda_cache": str(place.folder)}
    if variables.get("prebuilt"):
        (folder / "vcuda-9.9.9-x-x86_64.tar.gz").write_bytes(b"")
        variables = {"vcuda_prebuilt": str(folder)}
    place.hosts({"t4": ["gpu-1", "gpu-2"]})
    place.group("t4", **{"vgpu_sharing": "vcuda", **given, **variables})
    role = {"role": "vgpu.fleet.vcuda", "tags": ["never"]}
    play = {"hosts": "all", "gather_facts": False, "roles": [role], "tasks": [PREFLIGHT]}
    run = place.play([play], "--skip-tags", "never")
    assert (run.calls["gpu-1"] == 0) is refused, run.output
    assert ("expected make, cc on this controller" in run.output) is refused, run.output


# columns: variables of the group, whether the run is refused
@pytest.mark.parametrize(
    ("variables", "refused"),
    [
        ({}, True),
        ({"device_plugin_image_build": False}, False),
        ({"device_plugin_deploy": "systemd"}, False),
        ({"device_plugin_state": "absent"}, False),
    ],
)
def test_a_controller_that_cannot_build_an_image_is_refused_before_any_host_is_read(
    place: Workplace, monkeypatch: pytest.MonkeyPatch, variables: dict[str, Any], refused: bool
) -> None:
    programs = place.folder / "bin"
    programs.mkdir()
    for name in ("sh", "env", "mkdir", "rm", "chmod", "echo", "sleep"):
        (programs / name).symlink_to(f"/bin/{name}" if name != "env" else "/usr/bin/env")
    monkeypatch.setenv("PATH", str(programs))
    given = {
        "device_plugin_deploy": "daemonset",
        "vgpu_kubeconfig": str(place.folder / "kubeconfig"),
        "device_plugin_version": "9.9.9-x",
    }
    place.write("kubeconfig", "")
    place.hosts({"t4": ["gpu-1", "gpu-2"]})
    place.group("t4", **{**given, "device_plugin_cache": str(place.folder), **variables})
    role = {"role": "vgpu.fleet.device_plugin", "tags": ["never"]}
    play = {"hosts": "all", "gather_facts": False, "roles": [role], "tasks": [PREFLIGHT]}
    run = place.play([play], "--skip-tags", "never")
    assert (run.calls["gpu-1"] == 0) is refused, run.output
    assert ("expected podman, mmdebstrap on this controller" in run.output) is refused, run.output


@pytest.mark.parametrize("tasks", ["main", "check"])
# columns: files that these variables of group t4 name (python: the controller's), text of the refusal (empty: accepted)
@pytest.mark.parametrize(
    ("variables", "refused"),
    [
        ({}, ""),
        ({"vgpu_kubeconfig": "none"}, "none: no such file here; set vgpu_kubeconfig"),
        ({"vgpu_kubeconfig": "there"}, ""),
        ({"vgpu_kubeconfig": "there", "verify_kubeconfig": "none"}, "none: no such file here"),
        ({"vgpu_kubeconfig": "there", "python": "bare"}, "expected the Python package kubernetes for"),
    ],
)
def test_a_controller_that_cannot_call_a_cluster_is_refused_before_any_host_is_read(
    place: Workplace, tasks: str, variables: dict[str, Any], refused: str
) -> None:
    """The second group names the cluster, so the first host alone does not show it."""
    place.write("there", "")
    place.write("bare", "#!/bin/sh\nexit 1\n")
    (place.folder / "bare").chmod(0o755)
    given = dict(variables)
    python = given.pop("python", "")
    place.hosts({"a100": ["gpu-1"], "t4": ["gpu-2"]})
    place.group("t4", **{name: str(place.folder / file) for name, file in given.items()})
    if python:
        inventory = yaml.safe_load((place.folder / "hosts.yml").read_text())
        of_localhost = {"ansible_connection": "local", "ansible_python_interpreter": str(place.folder / python)}
        inventory["all"] = {"hosts": {"localhost": of_localhost}}
        place.write("hosts.yml", inventory)
    role = {"name": "Check", "ansible.builtin.import_role": {"name": "vgpu.fleet.preflight", "tasks_from": tasks}}
    ping = {"name": "Read the host", "ansible.builtin.ping": None}
    play = {"hosts": "gpu_nodes", "gather_facts": False, "tasks": [role, ping]}
    run = place.play([play])
    assert (run.code != 0) is bool(refused), run.output
    assert refused in " ".join(run.output.split())
    assert (run.calls.get("gpu-1", 0) == 0) is bool(refused), run.output
