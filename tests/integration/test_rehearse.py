# SPDX-License-Identifier: Apache-2.0
"""Tests playbooks/rehearse.yml, which tries playbooks on simulated hosts before real ones (a rehearsal). Stand-ins
replace the programs that the playbook calls. The tests check the order of the calls, the inventory of each call, and
that the simulated hosts are removed after every outcome.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
# A stand-in logs each call on one line (program and arguments), and fails if the call matches `FAIL`. It also logs the
# name of the task that the rehearsal printed last.
STUB = """#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLS"
sed -n 's/^TASK \\[\\(.*\\)\\] .*/\\1/p' "$OUTPUT" | tail -n 1 >>"$CALLS.announced"
case "$0 $*" in *"$FAIL"*) echo "it broke" >&2; exit 3 ;; esac
case "$0 $*" in *ansible-playbook*) echo "PLAY RECAP: changed=$CHANGED" ;; esac
"""


@dataclass
class Place:
    folder: Path
    inventory: Path

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def rehearse(self, *more: str, fail: str = "no output", changed: int = 0) -> subprocess.CompletedProcess[str]:
        stubs = self.folder / "stubs"
        environment = {
            "PATH": f"{stubs}:{BIN}:{os.environ['PATH']}",
            "CALLS": str(self.folder / "calls"),
            "OUTPUT": str(self.folder / "output"),
            "FAIL": fail,
            "CHANGED": str(changed),
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".build" / "collections"),
        }
        given = {"__rehearse_root": str(self.folder), "__rehearse_environment": environment}
        command = ["ansible-playbook", str(ROOT / "playbooks" / "rehearse.yml"), "-i", str(self.inventory)]
        own = {key: environment[key] for key in ("ANSIBLE_CONFIG", "ANSIBLE_COLLECTIONS_PATH")}
        with open(self.folder / "output", "w") as output:
            done = subprocess.run(
                [str(BIN / command[0]), *command[1:], "-e", json.dumps(given), *more],
                cwd=ROOT,
                env={**os.environ, **own, **settings_of_make()},
                stdout=output,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        text = (self.folder / "output").read_text()
        return subprocess.CompletedProcess(done.args, done.returncode, text, done.stderr)


def settings_of_make() -> dict[str, str]:
    """Returns the environment variables that `make rehearse` sets for ansible-playbook."""
    shown = subprocess.run(
        ["make", "-n", "rehearse", "INVENTORY=mine"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    line = next(one for one in shown.stdout.splitlines() if "rehearse.yml" in one)
    return dict(re.findall(r"(ANSIBLE_\w+)=(\S+)", line))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    (tmp_path / "tests" / "hosts").mkdir(parents=True)
    for path in (
        stubs / "make",
        stubs / "ansible-playbook",
        *((tmp_path / "tests/hosts" / n) for n in ("hostctl", "payload.sh")),
    ):
        path.write_text(STUB)
        path.chmod(0o755)
    (stubs / "ansible-inventory").symlink_to(BIN / "ansible-inventory")
    (tmp_path / ".build" / "rehearse" / "report").mkdir(parents=True)
    (tmp_path / ".build" / "rehearse" / "report" / "fleet.md").write_text("# the page\n")
    inventory = tmp_path / "mine"
    (inventory / "group_vars").mkdir(parents=True)
    hosts = {"t4": {"hosts": {"a.example.com": {"ansible_host": "192.0.2.7"}, "b.example.com": {}}}}
    (inventory / "hosts.yml").write_text(yaml.safe_dump({"all": {"children": {"gpu_nodes": {"children": hosts}}}}))
    group = {
        "rehearse_gpus": [{"model": "T4", "count": 2}],
        "vgpu_split_count": 7,
        "verify_kubeconfig": "/real/cluster",
    }
    (inventory / "group_vars" / "t4.yml").write_text(yaml.safe_dump(group))
    return Place(tmp_path, inventory)


def test_installed_collection_is_not_built_and_not_changed(place: Place) -> None:
    """ansible-galaxy writes the file MANIFEST.json into an installed collection. A rehearsal is refused there, because
    its build output would be among the collection's files."""
    (place.folder / "MANIFEST.json").write_text("{}")
    shutil.rmtree(place.folder / ".build")
    done = place.rehearse()
    assert done.returncode != 0
    said = " ".join(done.stdout.split())
    assert f"{place.folder} is an installed collection" in said and "expected a checkout" in said, done.stdout
    assert place.calls() == [] and not (place.folder / ".build").exists()


def test_missing_connection_plugin_is_named_before_anything_is_built(place: Place) -> None:
    program = place.folder / "stubs" / "ansible-doc"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    done = place.rehearse()
    assert done.returncode != 0
    assert "expected the connection plugin containers.podman.podman" in " ".join(done.stdout.split()), done.stdout
    assert place.calls() == []


def test_a_rehearsal_calls_its_programs_in_order(place: Place) -> None:
    done = place.rehearse()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a.example.com stands for a.example.com, b.example.com" in done.stdout
    names = [line.split()[:2] for line in place.calls()]
    assert [one[0] for one in names] == [
        *("make", "hostctl", "payload.sh", "hostctl"),
        *["ansible-playbook"] * 4,
        "hostctl",
    ]
    calls = place.calls()
    assert calls[3] == (
        "hostctl up --project rehearse --host=a.example.com "
        f"--profile={place.folder}/.build/rehearse/profiles/a.example.com.profile"
    )
    assert [Path(line.split()[1]).name for line in calls[4:8]] == ["site.yml", "site.yml", "verify.yml", "report.yml"]
    assert all("--limit=a.example.com" in line.split() for line in calls[4:8])
    assert calls[8] == "hostctl down --project rehearse"
    assert "model = T4\ncount = 2" in (place.folder / ".build/rehearse/profiles/a.example.com.profile").read_text()


# The steps that take seconds or minutes, in order: beginnings of the lines that announce them.
STEPS = [
    "Build tools, library and simulated driver",
    "Build the image of the hosts",
    "Build the packages and the container image of the hosts",
    "Start the simulated hosts",
    "Run on the simulated hosts site.yml",
    "Run on the simulated hosts site.yml again",
    "Run on the simulated hosts verify.yml",
    "Run on the simulated hosts report.yml",
    "Remove the simulated hosts",
]


def test_each_slow_step_is_announced_with_its_usual_duration(place: Place) -> None:
    done = place.rehearse()
    assert done.returncode == 0, done.stdout + done.stderr
    announced = re.findall(r"^TASK \[(.+?) \(usually (.+?)\)\]", done.stdout, re.M)
    assert [name for name, _duration in announced] == STEPS, done.stdout
    assert [one for _name, one in announced if not re.search(r"\d (seconds?|minutes?)", one)] == []


def test_each_slow_step_is_announced_before_it_runs(place: Place) -> None:
    """Ansible may print the name of a task only with its result. That would be no announcement."""
    assert place.rehearse().returncode == 0
    printed = (place.folder / "calls.announced").read_text().splitlines()
    assert [re.sub(r" \(usually .*", "", one) for one in printed] == STEPS


def test_failure_names_the_step_without_its_duration(place: Place) -> None:
    done = place.rehearse(fail="hostctl up")
    assert "Start the simulated hosts: non-zero return code" in " ".join(done.stdout.split()), done.stdout


def test_rehearsal_overrides_the_inventory_and_its_files(place: Place) -> None:
    """The test lets Ansible read the same inventory sources in the same order as the rehearsal's child processes do.
    The variables of the rehearsal must override those of the user's inventory."""
    assert place.rehearse().returncode == 0
    line = place.calls()[4]
    sources = [word for word in line.split() if word.startswith("--inventory=")]
    assert len(sources) == 2
    assert sources[0].endswith("/mine")
    shown = subprocess.run(
        [str(BIN / "ansible-inventory"), "--host", "a.example.com", *sources],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    found = json.loads(shown.stdout)
    assert (found["ansible_host"], found["ansible_connection"]) == (
        "vgpu-rehearse-a.example.com",
        "containers.podman.podman",
    )
    assert (found["verify_kubeconfig"], found["vgpu_split_count"]) == ("", 7)


# columns: part of the call that fails; expected text of the output
@pytest.mark.parametrize(
    ("fail", "words"),
    [
        ("hostctl up", "Start the simulated hosts"),
        ("verify.yml", "Run on the simulated hosts verify.yml"),
        ("report.yml", "it broke"),
    ],
)
def test_hosts_are_removed_after_every_failure(place: Place, fail: str, words: str) -> None:
    done = place.rehearse(fail=fail)
    assert done.returncode != 0
    assert words in done.stdout
    assert "it broke" in done.stdout
    assert place.calls()[-1] == "hostctl down --project rehearse"
    assert fail in place.calls()[-2]  # No program except the removal ran after the failure.


def test_second_run_that_changes_something_is_a_fault(place: Place) -> None:
    done = place.rehearse(changed=1)
    assert done.returncode != 0
    assert "Run on the simulated hosts site.yml again" in done.stdout
    assert not [line for line in place.calls() if "verify.yml" in line]
    assert place.calls()[-1] == "hostctl down --project rehearse"


def test_hosts_may_be_kept_and_removed_later(place: Place) -> None:
    assert place.rehearse("-e", "rehearse_keep=true").returncode == 0
    assert "down" not in place.calls()[-1]
    done = place.rehearse("-e", "rehearse_state=absent")
    assert done.returncode == 0, done.stdout
    assert place.calls()[-1] == "hostctl down --project rehearse"


# columns: the case, variables of the group; expected text of the message
BAD = [
    ("no GPUs declared", {"vgpu_split_count": 7}, "host a.example.com: rehearse_gpus: expected a list"),
    ("an unknown model", {"rehearse_gpus": [{"model": "V100-16G"}]}, "did you mean V100-16GB?"),
    (
        "a wrong value",
        {"rehearse_gpus": [{"model": "T4"}], "vgpu_split_count": "many"},
        "vgpu_split_count: expected a whole number",
    ),
    ("a misspelt name", {"rehearse_gpus": [{"model": "T4"}], "vgpu_split_cuont": 7}, "unknown variable"),
]


@pytest.mark.parametrize(("about", "group", "words"), BAD)
def test_incomplete_inventory_starts_nothing(place: Place, about: str, group: dict, words: str) -> None:
    (place.inventory / "group_vars" / "t4.yml").write_text(yaml.safe_dump(group))
    done = place.rehearse()
    assert done.returncode != 0
    assert words in done.stdout
    assert place.calls() == []


def test_host_that_could_be_real_starts_nothing(place: Place) -> None:
    """If Ansible reads another inventory source after the rehearsal's, this source may give a host its real address.
    The rehearsal must then start nothing."""
    late = place.folder / "stubs" / "ansible-inventory"
    late.unlink()
    late.write_text(
        f"#!{sys.executable}\nimport json, subprocess, sys\n"
        f"shown = json.loads(subprocess.check_output(['{BIN / 'ansible-inventory'}', *sys.argv[1:]]))\n"
        "shown['_meta']['hostvars']['a.example.com']['ansible_host'] = '192.0.2.7'\nprint(json.dumps(shown))\n"
    )
    late.chmod(0o755)
    done = place.rehearse()
    assert done.returncode != 0
    assert "ansible_host: expected 'vgpu-rehearse-a.example.com', found '192.0.2.7'" in done.stdout
    assert not [line for line in place.calls() if "ansible-playbook" in line or " up " in line]


def test_a_group_without_hosts_is_refused(place: Place) -> None:
    done = place.rehearse("-e", "site_hosts=nobody")
    assert done.returncode != 0
    assert "no host matches nobody" in done.stdout + done.stderr


def test_files_of_an_earlier_rehearsal_are_not_hosts(place: Place) -> None:
    assert place.rehearse().returncode == 0
    left = place.folder / ".build/rehearse/inventory/host_vars/gone.json"
    left.write_text("{}")
    assert place.rehearse().returncode == 0
    assert not left.exists()
    shutil.rmtree(place.folder / ".build/rehearse")
