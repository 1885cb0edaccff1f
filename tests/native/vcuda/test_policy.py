# SPDX-License-Identifier: Apache-2.0
"""Tests which settings apply for each combination of limits file and environment variables: SM limit, compute policy,
priority, and others."""

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
    """A running process that prints its effective settings on request."""

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


# Columns: the content of the limits file, where None means that there is no file; the environment variables; the
# expected settings.
TABLE = [
    # --- SM limit of devices 0 and 1: a variable only lowers the limit; 0 and 100 mean no limit
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
    # --- policy: the SM limit applies never (`disable`), next to other containers (`default`) or always (`force`); a
    # variable only moves the policy towards `force`
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
    # --- priority: a variable only moves from high (0) to low (1); the default is low
    ({"priority": 0}, {}, {"priority": 0}),
    ({"priority": 0}, {PRIORITY: "0"}, {"priority": 0}),
    ({"priority": 0}, {PRIORITY: "1"}, {"priority": 1}),
    ({"priority": 1}, {PRIORITY: "0"}, {"priority": 1}),
    ({}, {}, {"priority": 1}),
    (None, {SM: "40"}, {"priority": 1}),
    (None, {SM: "40", PRIORITY: "0"}, {"priority": 0}),
    (None, {SM: "40", PRIORITY: "1"}, {"priority": 1}),
    # --- OOM killer: a variable can only enable it
    ({"oom_killer": True}, {}, {"killer": 1}),
    ({"oom_killer": True}, {KILLER: "false"}, {"killer": 1}),
    ({"oom_killer": False}, {KILLER: "true"}, {"killer": 1}),
    ({"oom_killer": False}, {KILLER: "0"}, {"killer": 0}),
    ({}, {}, {"killer": 0}),
    (None, {SM: "40", KILLER: "1"}, {"killer": 1}),
    (None, {SM: "40", KILLER: "false"}, {"killer": 0}),
    (None, {KILLER: "true"}, {"control": OFF}),
    # --- oversubscription: a variable can only disable it
    ({"oversubscribe": True}, {}, {"oversubscribe": 1}),
    ({"oversubscribe": True}, {OVERSUBSCRIBE: "true"}, {"oversubscribe": 1}),
    ({"oversubscribe": True}, {OVERSUBSCRIBE: "false"}, {"oversubscribe": 0}),
    ({"oversubscribe": False}, {OVERSUBSCRIBE: "true"}, {"oversubscribe": 0}),
    (None, {OVERSUBSCRIBE: "true"}, {"control": ON, "oversubscribe": 1}),
    (None, {OVERSUBSCRIBE: "false"}, {"control": OFF, "oversubscribe": 0}),
    # --- log level: the variable overrides the limits file
    *[({"log_level": 1}, {LEVEL: str(level)}, {"level": level}) for level in range(6)],
    ({"log_level": 4}, {}, {"level": 4}),
    (None, {SM: "40"}, {"level": 1}),
    (None, {LEVEL: "5"}, {"control": OFF, "level": 5}),
    # --- neither a limits file nor a variable
    (None, {}, {"control": OFF, "policy": DEFAULT, "priority": 1, "killer": 0, "oversubscribe": 0, "sm0": 0, "sm1": 0}),
]


@pytest.mark.parametrize(("file", "variables", "holds"), TABLE)
def test_environment_tightens_a_file_and_sets_the_limits_without_a_file(
    rules, file: dict | None, variables: dict, holds: dict
):
    one = rules(file, variables)
    found = one.ask()
    assert {key: found[key] for key in holds} == holds
    assert one.lines() == []


# Limits files whose values must stay effective if a variable is invalid.
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
def test_invalid_variable_is_logged_once_and_ignored(rules, file: dict, name: str, value: str) -> None:
    expected = rules(file, {}).ask()
    one = rules(file, {name: value})
    assert [one.ask(), one.ask()] == [expected, expected]
    assert len(one.lines()) == 1
    assert f"libvgpu.so[{one.process.pid}] error: {name}='{value}' is ignored: expected " in one.lines()[0]


def test_invalid_variable_of_a_device_falls_back_to_the_common_variable(rules) -> None:
    one = rules(None, {SM: "40", SM_0: "most"})
    assert (one.ask()["sm0"], len(one.lines())) == (40, 1)


def test_live_change_is_seen_at_the_next_read(rules) -> None:
    one = rules(LOOSE, {SM: "45"})
    assert one.ask() == dict(one.ask(), policy=DISABLE, priority=0, killer=0, oversubscribe=1, sm0=33, sm1=45)
    layouts.rewrite_limits(str(one.limits), described(dict(TIGHT, sm=(60, 7))))
    assert one.ask() == dict(one.ask(), policy=FORCE, priority=1, killer=1, oversubscribe=0, sm0=45, sm1=7)
    layouts.rewrite_limits(str(one.limits), described(LOOSE))
    assert one.ask() == dict(one.ask(), policy=DISABLE, priority=0, killer=0, oversubscribe=1, sm0=33, sm1=45)


def test_device_missing_in_the_file_has_the_common_share(rules) -> None:
    """A device that the limits file does not list still has the share that the variable for all devices sets. In
    practice no kernel runs there, because the library refuses memory on such a device."""
    one = rules({"devices": [{"uuid": "GPU-2", "memory_bytes": 1 << 30, "sm_percent": 10}]}, {SM: "40"})
    assert (one.ask()["sm0"], one.ask()["sm1"]) == (40, 40)
