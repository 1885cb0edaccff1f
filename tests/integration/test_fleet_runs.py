# SPDX-License-Identifier: Apache-2.0
"""Runs site.yml and upgrade.yml completely, on hosts whose modules return results from a table. Checks the output and
which plays and roles run for each host. The runs do not use this repository's ansible.cfg."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from doubles.fleet import ROOT, SPOILED, STOPS, Fleet, Run

# One task of preflight and of each tested role. A task of a role runs only if the role has something to change.
READ = "vgpu.fleet.preflight : Read the host and plan"
DEPLOYED = "vgpu.fleet.vcuda : Write the unit of the arbiter"
PLUGIN = "vgpu.fleet.device_plugin : Switch to the version"
PROVEN = "vgpu.fleet.verify : Record the state that isolation was proven for"


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return Fleet(tmp_path_factory.mktemp("table"), 2)


@pytest.fixture
def fleet(tmp_path: Path, table: Fleet) -> Fleet:
    """A fleet of two groups, in the inventory's order: gpu-0001 and gpu-0003, then gpu-0002 and gpu-0004."""
    return Fleet(tmp_path / "fleet", 4, table)


def hosts_of(run: Run, task: str) -> set[str]:
    """Returns the hosts that ran a task, whatever its result."""
    parts = re.split(r"^(?:TASK|PLAY) ", run.output, flags=re.MULTILINE)
    return {
        host
        for part in parts
        if part.startswith(f"[{task}]")
        for host in re.findall(r"^(?:ok|changed|fatal): \[(\S+?)[\] ]", part, re.MULTILINE)
    }


# Maximum number of skipped tasks in a first run with docker and systemd.
MOST_SKIPPED = 33
NAMES = {f"gpu-000{number}" for number in range(1, 5)}


# The expected number of tasks per host. The first host runs two more, which work for all hosts.
@pytest.mark.parametrize(("playbook", "tasks"), [("site.yml", 4), ("upgrade.yml", 2)])
@pytest.mark.parametrize("options", [[], ["--check"]])
def test_run_without_changes_runs_few_tasks_and_skips_none(
    fleet: Fleet, playbook: str, tasks: int, options: list[str]
) -> None:
    run = fleet.run(playbook, "done", *options)
    assert run.code == 0, run.output
    assert set(run.counts) == NAMES
    for host, counts in run.counts.items():
        assert (counts["changed"], counts["skipped"]) == (0, 0), run.output
        assert run.tasks(host) == tasks + 2 * (host == "gpu-0001"), run.output
    assert "skipping: [" not in run.output


def test_a_first_run_skips_few_tasks(fleet: Fleet) -> None:
    """A skipped task costs the controller as much as a task that runs."""
    run = fleet.run("site.yml", "bare")
    assert run.code == 0, run.output
    assert {counts["skipped"] for counts in run.counts.values()} <= set(range(MOST_SKIPPED + 1)), run.counts


# columns: the playbook, the kind (state) of all hosts (doubles/fleet.py)
RUNS = [
    ("site.yml", "done"),
    ("site.yml", "bare"),
    ("upgrade.yml", "behind"),
    ("verify.yml", "done"),
    ("report.yml", "done"),
    ("teardown.yml", "done"),
]


@pytest.mark.parametrize("playbook, kind", RUNS)
def test_ansible_prints_no_warning_of_its_own(fleet: Fleet, playbook: str, kind: str) -> None:
    run = fleet.run(playbook, kind, "-e", f"report_dir={fleet.folder}/report")
    assert run.code == 0, run.output
    said = re.findall(r"^\[(?:WARNING|DEPRECATION WARNING|ERROR)\]: (.*)", run.output, re.MULTILINE)
    ours = [one for one in said if "vgpu_memory_scaling: above 1" in one]
    # report.yml checks no variables, so it prints no warning. In the other playbooks our own warning shows that the
    # test would find one.
    assert (said, bool(ours)) == (ours, playbook != "report.yml"), run.output


def test_plan_and_report_are_printed_as_lines(fleet: Fleet) -> None:
    run = fleet.run("site.yml", "behind")
    lines = [line.strip().rstrip(",") for line in run.output.splitlines()]
    for line in ('"1. vcuda: the library is not current"', '"2. verify: the plan changes the host"'):
        assert lines.count(line) == 4, run.output
    results = [
        line
        for line in lines
        if re.match(r'"gpu-000\d  nvidia.com/gpu: \d+ advertised by the kubelet, \d+ expected', line)
    ]
    assert len(results) == 4, run.output
    assert not [line for line in lines if "15360" in line and "SM %" in line]
    assert "\\n" not in run.output


def test_option_v_shows_the_tables(fleet: Fleet) -> None:
    run = fleet.run("site.yml", "done", "-v")
    lines = [line.strip().rstrip(",") for line in run.output.splitlines()]
    assert sum(line.startswith('"    0  Tesla T4       15360') for line in lines) == 4, run.output


def test_role_runs_only_on_hosts_with_a_step(fleet: Fleet) -> None:
    fleet.host("gpu-0002", table_kind="behind")
    fleet.host("gpu-0003", table_kind="bare")
    run = fleet.run("site.yml", "")
    assert run.code == 0, run.output
    assert hosts_of(run, DEPLOYED) == {"gpu-0002", "gpu-0003"}
    assert hosts_of(run, PLUGIN) == {"gpu-0003"}
    assert hosts_of(run, PROVEN) == {"gpu-0002", "gpu-0003"}
    assert hosts_of(run, "vgpu.fleet.preflight : Stop if a step is still needed") == {"gpu-0002", "gpu-0003"}
    assert {host: run.tasks(host) <= 10 for host in NAMES} == {
        "gpu-0001": True,
        "gpu-0002": False,
        "gpu-0003": False,
        "gpu-0004": True,
    }
    again = fleet.again("site.yml")
    assert (again.code, {one["changed"] for one in again.counts.values()}) == (0, {0}), again.output


def test_check_mode_verifies_only_hosts_without_changes(fleet: Fleet) -> None:
    fleet.host("gpu-0002", table_kind="behind")
    run = fleet.run("site.yml", "", "--check")
    assert run.code == 0, run.output
    assert hosts_of(run, DEPLOYED) == {"gpu-0002"}
    compare = "vgpu.fleet.verify : Compare the advertised slices with the expected slices"
    assert hosts_of(run, compare) == NAMES - {"gpu-0002"}
    upgrade = fleet.run("upgrade.yml", "", "--check")
    assert upgrade.code == 0, upgrade.output
    assert hosts_of(upgrade, "vgpu.fleet.upgrade : Save the rollback point") == set()


@pytest.mark.parametrize("playbook", ["site.yml", "upgrade.yml"])
def test_limit_option_selects_the_hosts(fleet: Fleet, playbook: str) -> None:
    run = fleet.run(playbook, "behind", "--limit", "gpu-0003,gpu-0004")
    assert run.code == 0, run.output
    assert set(run.counts) - {"localhost"} == {"gpu-0003", "gpu-0004"}
    assert hosts_of(run, DEPLOYED) == {"gpu-0003", "gpu-0004"}


@pytest.mark.parametrize("pattern", ["t4:!gpu-0003", "gpu-0001,gpu-0002", "t4:t4_oversold:!gpu-0002"])
def test_configured_host_pattern_selects_the_hosts(fleet: Fleet, pattern: str) -> None:
    expected = {"t4:!gpu-0003": {"gpu-0001"}, "gpu-0001,gpu-0002": {"gpu-0001", "gpu-0002"}}
    fleet.host("gpu-0001", table_kind="behind")
    run = fleet.run("site.yml", "", "-e", f"site_hosts={pattern}")
    assert run.code == 0, run.output
    assert set(run.counts) == expected.get(pattern, {"gpu-0001", "gpu-0003", "gpu-0004"})
    assert hosts_of(run, DEPLOYED) == {"gpu-0001"}


# columns: value of --tags; roles that are expected to run
@pytest.mark.parametrize(
    "tags, roles",
    [
        ("device_plugin", {"device_plugin"}),
        ("vcuda,device_plugin", {"vcuda", "device_plugin"}),
        ("container_runtime,verify", {"container_runtime", "verify"}),
    ],
)
def test_tags_are_names_of_roles(fleet: Fleet, tags: str, roles: set[str]) -> None:
    run = fleet.run("site.yml", "bare", "--tags", tags)
    assert run.code == 0, run.output
    found = set(re.findall(r"^TASK \[vgpu\.fleet\.(\w+) :", run.output, re.MULTILINE))
    assert found == {"preflight"} | roles


# columns: value of --tags; whether the run stops; expected words of the output. Each host needs every role.
@pytest.mark.parametrize(
    "tags, stops, words",
    [
        ("device-plugin", True, 'unknown tag "device-plugin"; did you mean "device_plugin"?'),
        ("vcuda,verfy", True, 'unknown tag "verfy"; did you mean "verify"?'),
        # A tag that is near to no role may be one of the user's own playbook, so it is no error.
        ("mine", False, "--tags mine selects none of these steps"),
        ("verify", False, ""),
        ("vcuda", False, ""),
    ],
)
def test_tags_that_select_no_step_are_named(fleet: Fleet, tags: str, stops: bool, words: str) -> None:
    run = fleet.run("site.yml", "bare", "--check", "--tags", tags)
    assert (run.code != 0) is stops, run.output
    assert words in run.output
    assert words or "selects none" not in run.output


def test_failed_host_stops_no_other(fleet: Fleet) -> None:
    """Host gpu-0001 is the first host with a change, and gpu-0003 is the only host with the step at which it fails."""
    fleet.host("gpu-0001", table_kind="behind", table_dies_at="vcuda_library")
    fleet.host("gpu-0003", table_kind="bare", table_dies_at="docker_daemon")
    fleet.host("gpu-0002", table_kind="behind")
    run = fleet.run("site.yml", "")
    assert run.code != 0
    assert {host: counts["unreachable"] for host, counts in run.counts.items() if host in NAMES} == {
        "gpu-0001": 1,
        "gpu-0002": 0,
        "gpu-0003": 1,
        "gpu-0004": 0,
    }
    assert hosts_of(run, PROVEN) == {"gpu-0002"}
    assert "gpu-0004  nvidia.com/gpu: 14 advertised" in run.output


def test_other_hosts_are_verified_after_the_only_host_with_a_step_fails(fleet: Fleet) -> None:
    fleet.host("gpu-0001", table_kind="behind", table_dies_at="vcuda_library")
    run = fleet.run("site.yml", "")
    assert run.code != 0
    for host in NAMES - {"gpu-0001"}:
        assert f"{host}  nvidia.com/gpu: 14 advertised" in run.output


# columns: value of upgrade_serial; expected hosts of each batch
@pytest.mark.parametrize(
    "serial, deployed",
    [
        ([1, "100%"], ["gpu-0001", "gpu-0002 gpu-0003"]),
        ([2], ["gpu-0001 gpu-0003", "gpu-0002"]),
    ],
)
def test_upgrade_runs_in_batches_of_hosts_with_a_step(fleet: Fleet, serial: list[object], deployed: list[str]) -> None:
    for name in ("gpu-0001", "gpu-0002", "gpu-0003"):
        fleet.host(name, table_kind="behind")
    run = fleet.run("upgrade.yml", "", "-e", json.dumps({"upgrade_serial": serial}))
    assert run.code == 0, run.output
    parts = run.output.split(f"TASK [{DEPLOYED}]")[1:]
    batches = [
        " ".join(sorted(re.findall(r"^(?:ok|changed): \[(\S+)\]", part.split("TASK [")[0], re.M))) for part in parts
    ]
    assert batches == deployed
    assert run.tasks("gpu-0004") <= 10


def test_the_result_of_a_rollback_is_the_first_line(fleet: Fleet) -> None:
    fleet.host("gpu-0002", table_kind="unproven")
    run = fleet.run("upgrade.yml", "")
    assert run.code != 0
    failed = run.output.split("TASK [vgpu.fleet.upgrade : Stop if the upgrade failed]")[1]
    (result,) = re.findall(r"^fatal: \[gpu-0002\]: FAILED! => (\{.*\})$", failed, re.MULTILINE)
    said = json.loads(result)["msg"].splitlines()
    assert said[:2] == [
        "gpu-0002: the host is back at library 0.0.1-old and device plugin 0.0.1-plug and advertises all its slices.",
        "It was not upgraded: Stop if isolation is not proven: Isolation is not proven on this host:",
    ]
    assert said[2:4] == [
        "slice GPU-0::1: limit-exact is violated: expected 5 bytes, found 6 bytes",
        "slice GPU-0::1: 1 checks not run",
    ]


def test_failed_host_stops_later_batches(fleet: Fleet) -> None:
    for name in NAMES:
        fleet.host(name, table_kind="behind", **({"table_dies_at": "vcuda_library"} if name == "gpu-0003" else {}))
    run = fleet.run("upgrade.yml", "", "-e", "upgrade_serial=2")
    assert run.code != 0
    assert hosts_of(run, PROVEN) == {"gpu-0001"}
    assert hosts_of(run, "vgpu.fleet.upgrade : Save the rollback point") == {"gpu-0001", "gpu-0003"}


@pytest.mark.parametrize("playbook", ["site.yml", "upgrade.yml"])
@pytest.mark.parametrize("options", [[], ["--limit", "gpu-0001,gpu-0004"], ["--tags", "vcuda"]])
def test_a_wrong_variable_of_one_host_stops_all(fleet: Fleet, playbook: str, options: list[str]) -> None:
    fleet.host("gpu-0004", vgpu_split_count=0)
    run = fleet.run(playbook, "behind", *options)
    assert run.code != 0
    assert "vgpu_split_count: expected a whole number from 1" in run.output
    assert f"TASK [{READ}]" not in run.output
    assert {counts["changed"] for counts in run.counts.values()} == {0}


@pytest.mark.parametrize("playbook", ["site.yml", "upgrade.yml"])
def test_a_variable_that_the_gpus_of_one_host_contradict_stops_all(fleet: Fleet, playbook: str) -> None:
    fleet.host("gpu-0004", vgpu_devices=[{"match": {"index": 7}, "split_count": 1}])
    run = fleet.run(playbook, "behind")
    assert run.code != 0
    assert hosts_of(run, READ) == NAMES
    assert re.search(
        r"^host gpu-0004 \(group \w+\), set by host gpu-0004 in .*: vgpu_devices.*index 7", run.output, re.MULTILINE
    ), run.output
    assert "Error while resolving" not in run.output
    assert {counts["changed"] for counts in run.counts.values()} == {0}
    assert "Save the rollback point" not in run.output


@pytest.mark.parametrize("options", [[], ["--check"]])
# columns: kind (state) of host gpu-0002 (doubles/fleet.py); expected text of the message
@pytest.mark.parametrize("kind, words", [("spoiled", SPOILED), ("busy", STOPS), ("claimed", "have the claims work/c")])
def test_teardown_is_refused_before_its_first_change(fleet: Fleet, kind: str, words: str, options: list[str]) -> None:
    fleet.host("gpu-0002", table_kind=kind)
    run = fleet.run("teardown.yml", "", *options)
    assert run.code != 0
    assert words in run.output
    assert {host: one["failed"] for host, one in run.counts.items()} == {
        host: int(host == "gpu-0002") for host in NAMES
    }
    removed = "vgpu.fleet.device_plugin : Remove the configuration"
    assert hosts_of(run, removed) == NAMES - {"gpu-0002"}, run.output


@pytest.mark.parametrize("options", [[], ["--check"]])
# columns: value of upgrade_drain_roles; whether the run is expected to be refused
@pytest.mark.parametrize("drained, refused", [(["nvidia_driver"], True), ([], False)])
def test_upgrade_names_containers_that_no_drain_moves_before_its_first_change(
    fleet: Fleet, drained: list[str], refused: bool, options: list[str]
) -> None:
    """A docker container uses a slice, and a new driver would disturb its card."""
    more: dict[str, Any] = {"nvidia_driver_packages": ["nvidia-smi=2.0", "libcuda1"], "upgrade_drain_roles": drained}
    kubeconfig = fleet.folder / "kubeconfig"
    kubeconfig.write_text("{}")
    # The run first looks for the kubeconfig and the Python package of the cluster's API.
    more |= {"upgrade_kubeconfig": str(kubeconfig), "ansible_python_interpreter": sys.executable}
    fleet.host("gpu-0002", table_kind="held")
    run = fleet.run("upgrade.yml", "", "-e", json.dumps(more), "--limit", "gpu-0002", *options)
    assert (
        "warning: nvidia_driver: this step ends containers that no drain moves: docker web; stop them first"
    ) in run.output, run.output
    asked = "and a drain does not move docker web; stop them"
    assert (asked in " ".join(run.output.split())) is refused, run.output
    if refused:
        assert run.code != 0 and run.counts["gpu-0002"]["changed"] == 0, run.output


MOST_CALLS_OF_A_REPORT = 3


# columns: options of the playbook, whether isolation is checked
@pytest.mark.parametrize("options, checked", [([], False), (["-e", "report_isolation=run"], True)])
def test_report_calls_a_host_at_most_three_times_and_checks_isolation_on_request(
    fleet: Fleet, options: list[str], checked: bool
) -> None:
    counts = fleet.folder / "calls.json"
    counting = {
        "ANSIBLE_CALLBACK_PLUGINS": str(ROOT / "tests" / "callback_plugins"),
        "ANSIBLE_CALLBACKS_ENABLED": "remote_calls",
        "VGPU_REMOTE_CALLS": str(counts),
    }
    run = fleet.run("report.yml", "done", "-e", f"report_dir={fleet.folder}/report", *options, **counting)
    assert run.code == 0, run.output
    assert hosts_of(run, "vgpu.fleet.verify : Check isolation in a free slice (usually 20 to 80 seconds)") == (
        NAMES if checked else set()
    )
    rows = [json.loads(line) for line in Path(f"{counts}.log").read_text().splitlines()]
    # The controller writes the pages, in tasks of a host that are delegated to localhost.
    found = {(row["host"], row["call"]) for row in rows if row["target"] != "localhost"}
    calls = {name: sum(host == name for host, _call in found) for name in NAMES}
    # Without this check an empty count would pass.
    assert set(calls) == NAMES and min(calls.values()) >= 2
    assert checked or max(calls.values()) <= MOST_CALLS_OF_A_REPORT, calls


def test_teardown_of_other_roles_does_not_call_docker(fleet: Fleet) -> None:
    run = fleet.run("teardown.yml", "busy", "-e", '{"teardown_roles": ["device_plugin"]}')
    assert run.code == 0, run.output


def test_fault_of_one_host_stops_only_that_host(fleet: Fleet) -> None:
    fleet.host("gpu-0001", table_kind="broken")
    fleet.host("gpu-0002", table_kind="behind")
    run = fleet.run("site.yml", "")
    assert run.code != 0
    assert {host: counts["failed"] for host, counts in run.counts.items() if host in NAMES} == {
        "gpu-0001": 1,
        "gpu-0002": 0,
        "gpu-0003": 0,
        "gpu-0004": 0,
    }
    assert hosts_of(run, PROVEN) == {"gpu-0002"}
