# SPDX-License-Identifier: Apache-2.0
"""SM limit, policy, priority, OOM killer, oversubscription, log level: file and environment, as a truth table."""

from __future__ import annotations

import subprocess
from pathlib import Path

import layouts
import pytest
from conftest import ROOT, compile_program

pytestmark = pytest.mark.own_build

UUIDS = ["GPU-00000000-0000-0000-0000-000000000000", "MIG-11111111-1111-1111-1111-111111111111"]
DEFAULT, FORCE, DISABLE = (layouts.fields.CORE_POLICIES[name] for name in ("default", "force", "disable"))
OFF, ON = 0, 1
SM, SM_0, SM_1 = "CUDA_DEVICE_SM_LIMIT", "CUDA_DEVICE_SM_LIMIT_0", "CUDA_DEVICE_SM_LIMIT_1"
POLICY, PRIORITY = "GPU_CORE_UTILIZATION_POLICY", "CUDA_TASK_PRIORITY"
KILLER, OVERSUBSCRIBE, LEVEL = "ACTIVE_OOM_KILLER", "CUDA_OVERSUBSCRIBE", "LIBCUDA_LOG_LEVEL"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = [
        str(ROOT / f"native/vcuda/src/limits/{name}.c")
        for name in ("limits", "limits_file", "shares", "share_folder", "env", "log")
    ]
    return compile_program(tmp_path_factory.mktemp("policy"), "policy", "policy.c", *sources)


class Rules:
    """A running process that prints the settings that it applies now."""

    def __init__(self, program: Path, folder: Path, file: dict | None, variables: dict) -> None:
        env = {name: value for name, value in variables.items() if value is not None}
        if file is not None:
            self.limits = folder / "limits"
            self.limits.write_bytes(layouts.pack_limits(described(file)))
            env["VGPU_LIMITS_FILE"] = str(self.limits)
        self.errors = folder / "stderr"
        with self.errors.open("wb") as stderr:
            self.process = subprocess.Popen(
                [program, *UUIDS], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
            )

    def ask(self) -> dict:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        names = ("control", "policy", "priority", "killer", "oversubscribe", "level", "sm0", "sm1")
        return dict(zip(names, (int(word) for word in self.process.stdout.readline().split())))

    def lines(self) -> list:
        return self.errors.read_text().splitlines()


def described(file: dict) -> dict:
    percents = file.get("sm", (0, 0))
    devices = [{"uuid": u, "memory_bytes": 1 << 30, "sm_percent": percent} for u, percent in zip(UUIDS, percents)]
    return dict({"allocation": "t", "devices": devices}, **{key: value for key, value in file.items() if key != "sm"})


@pytest.fixture
def rules(program: Path, tmp_path: Path):
    started = []

    def start(file: dict | None, variables: dict) -> Rules:
        started.append(Rules(program, tmp_path, file, variables))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


# columns: limits file (None: no file), variables, effective settings
TABLE = [
    # --- the SM limit of devices 0 and 1: lowered, never raised; 0 and 100 are no limit
    ({"sm": (33, 50)}, {}, {"sm0": 33, "sm1": 50}),
    ({"sm": (0, 100)}, {}, {"sm0": 0, "sm1": 0}),
    ({"sm": (33, 50)}, {SM: "40"}, {"sm0": 33, "sm1": 40}),
    ({"sm": (33, 0)}, {SM: "40"}, {"sm0": 33, "sm1": 40}),
    ({"sm": (33, 50)}, {SM: "0"}, {"sm0": 33, "sm1": 50}),
    ({"sm": (33, 50)}, {SM: "100"}, {"sm0": 33, "sm1": 50}),
    ({"sm": (33, 50)}, {SM_1: "10"}, {"sm0": 33, "sm1": 10}),
    ({"sm": (33, 50)}, {SM: "20", SM_1: "30"}, {"sm0": 20, "sm1": 30}),
    ({"sm": (33, 50)}, {SM_0: "1"}, {"sm0": 1, "sm1": 50}),
    (None, {SM: "40"}, {"control": ON, "sm0": 40, "sm1": 40}),
    (None, {SM_1: "40"}, {"control": ON, "sm0": 0, "sm1": 40}),
    (None, {SM: "40", SM_0: "0"}, {"control": ON, "sm0": 0, "sm1": 40}),
    (None, {SM: "40", SM_0: "60"}, {"control": ON, "sm0": 60, "sm1": 40}),
    (None, {SM: "0"}, {"control": OFF, "sm0": 0, "sm1": 0}),
    # --- the policy: disable → default → force
    *[
        ({"core_policy": file}, {POLICY: variable}, {"policy": holds})
        for file, variable, holds in [
            ("disable", None, DISABLE),
            ("disable", "disable", DISABLE),
            ("disable", "default", DEFAULT),
            ("disable", "force", FORCE),
            ("default", None, DEFAULT),
            ("default", "disable", DEFAULT),
            ("default", "default", DEFAULT),
            ("default", "FORCE", FORCE),
            ("force", None, FORCE),
            ("force", "Disable", FORCE),
            ("force", "default", FORCE),
        ]
    ],
    (None, {SM: "40"}, {"policy": DEFAULT}),
    (None, {SM: "40", POLICY: "force"}, {"policy": FORCE}),
    (None, {SM: "40", POLICY: "disable"}, {"policy": DISABLE}),
    (None, {POLICY: "force"}, {"control": OFF}),
    # --- the priority: 0 high → 1 low; low where nobody says anything
    ({"priority": 0}, {}, {"priority": 0}),
    ({"priority": 0}, {PRIORITY: "0"}, {"priority": 0}),
    ({"priority": 0}, {PRIORITY: "1"}, {"priority": 1}),
    ({"priority": 1}, {PRIORITY: "0"}, {"priority": 1}),
    ({}, {}, {"priority": 1}),
    (None, {SM: "40"}, {"priority": 1}),
    (None, {SM: "40", PRIORITY: "0"}, {"priority": 0}),
    (None, {SM: "40", PRIORITY: "1"}, {"priority": 1}),
    # --- the OOM killer: only on
    ({"oom_killer": True}, {}, {"killer": 1}),
    ({"oom_killer": True}, {KILLER: "false"}, {"killer": 1}),
    ({"oom_killer": False}, {KILLER: "true"}, {"killer": 1}),
    ({"oom_killer": False}, {KILLER: "0"}, {"killer": 0}),
    ({}, {}, {"killer": 0}),
    (None, {SM: "40", KILLER: "1"}, {"killer": 1}),
    (None, {SM: "40", KILLER: "false"}, {"killer": 0}),
    (None, {KILLER: "true"}, {"control": OFF}),
    # --- oversubscription: only off
    ({"oversubscribe": True}, {}, {"oversubscribe": 1}),
    ({"oversubscribe": True}, {OVERSUBSCRIBE: "true"}, {"oversubscribe": 1}),
    ({"oversubscribe": True}, {OVERSUBSCRIBE: "false"}, {"oversubscribe": 0}),
    ({"oversubscribe": False}, {OVERSUBSCRIBE: "true"}, {"oversubscribe": 0}),
    (None, {OVERSUBSCRIBE: "true"}, {"control": ON, "oversubscribe": 1}),
    (None, {OVERSUBSCRIBE: "false"}, {"control": OFF, "oversubscribe": 0}),
    # --- the log level is no limit: the variable wins
    *[({"log_level": 1}, {LEVEL: str(level)}, {"level": level}) for level in range(6)],
    ({"log_level": 4}, {}, {"level": 4}),
    (None, {SM: "40"}, {"level": 1}),
    (None, {LEVEL: "5"}, {"control": OFF, "level": 5}),
    # --- nothing at all
    (None, {}, {"control": OFF, "policy": DEFAULT, "priority": 1, "killer": 0, "oversubscribe": 0, "sm0": 0, "sm1": 0}),
]


@pytest.mark.parametrize(("file", "variables", "holds"), TABLE)
def test_the_environment_only_tightens_a_file_and_rules_alone(rules, file: dict | None, variables: dict, holds: dict):
    one = rules(file, variables)
    found = one.ask()
    assert {key: found[key] for key in holds} == holds
    assert one.lines() == []


# What is in force while a variable is nonsense: the file, or the value of a variable that is not.
TIGHT = {"sm": (33, 50), "core_policy": "force", "priority": 1, "oom_killer": True, "oversubscribe": False}
LOOSE = {"sm": (33, 50), "core_policy": "disable", "priority": 0, "oom_killer": False, "oversubscribe": True}
NONSENSE = {
    SM: ["", "-1", "101", "33%", "1e1", "0x10", " 20", "9999999999", "half"],
    SM_1: ["", "200", "all"],
    POLICY: ["", "forced", "none", "1", "default "],
    PRIORITY: ["", "2", "-1", "high"],
    KILLER: ["2", "maybe", "tru"],
    OVERSUBSCRIBE: ["2", "maybe", "tru"],
    LEVEL: ["", "6", "-1", "debug"],
    "CUDA_DISABLE_CONTROL": ["2", "please"],
}


@pytest.mark.parametrize("file", [TIGHT, LOOSE], ids=["tight", "loose"])
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in NONSENSE.items() for value in values])
def test_nonsense_is_one_line_and_changes_nothing(rules, file: dict, name: str, value: str) -> None:
    expected = rules(file, {}).ask()
    one = rules(file, {name: value})
    assert [one.ask(), one.ask()] == [expected, expected]
    assert len(one.lines()) == 1
    assert f"libvgpu.so[{one.process.pid}] error: {name}='{value}' is ignored: expected " in one.lines()[0]


def test_nonsense_for_one_device_leaves_it_what_holds_for_all(rules) -> None:
    one = rules(None, {SM: "40", SM_0: "most"})
    assert (one.ask()["sm0"], len(one.lines())) == (40, 1)


def test_a_live_change_is_seen_at_the_next_look(rules) -> None:
    one = rules(LOOSE, {SM: "45"})
    assert one.ask() == dict(one.ask(), policy=DISABLE, priority=0, killer=0, oversubscribe=1, sm0=33, sm1=45)
    layouts.rewrite_limits(str(one.limits), described(dict(TIGHT, sm=(60, 7))))
    assert one.ask() == dict(one.ask(), policy=FORCE, priority=1, killer=1, oversubscribe=0, sm0=45, sm1=7)
    layouts.rewrite_limits(str(one.limits), described(LOOSE))
    assert one.ask() == dict(one.ask(), policy=DISABLE, priority=0, killer=0, oversubscribe=1, sm0=33, sm1=45)


def test_a_device_that_the_file_does_not_name_has_no_share_of_its_own(rules) -> None:
    """Its memory is refused, so nothing runs there; the variable for all devices holds all the same."""
    one = rules({"devices": [{"uuid": "GPU-2", "memory_bytes": 1 << 30, "sm_percent": 10}]}, {SM: "40"})
    assert (one.ask()["sm0"], one.ask()["sm1"]) == (40, 40)
