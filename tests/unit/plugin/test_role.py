# SPDX-License-Identifier: Apache-2.0
"""Tests when the role device_plugin restarts the program that it installs (the device plugin), and which options it
gives the program. The test evaluates the role's own expressions on facts of a host.
"""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import jinja2
import pytest
import yaml
from vgpu_plugin._shared.config import variables as schema
from vgpu_plugin.main import parser

from .conftest import ROOT

UNIT, UNIT_FILE = "vgpu-device-plugin.service", "/etc/systemd/system/vgpu-device-plugin.service"
# These strings stand for the content of the two configuration files.
NODE_YAML, BIG_YAML = "the text of node.yaml", "the text of configs/big.yaml"
TASK = "Restart the program with the changes"


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# Facts of a host that is in the desired state: the program was started at 1000 s, and its unit file was written before,
# at 900 s.
AT_REST: dict[str, Any] = {
    "__device_plugin_unit": UNIT,
    "__device_plugin_unit_path": UNIT_FILE,
    "device_plugin_version": "1.0-a",
    "__device_plugin_switched": {"changed": False},
    "__device_plugin_written": {"written": []},
    "__device_plugin_config_path": "/etc/vgpu/node.yaml",
    "__device_plugin_files": {"/etc/vgpu/node.yaml": NODE_YAML, "/etc/vgpu/configs/big.yaml": BIG_YAML},
    "__device_plugin_found": {
        "state": {
            "plugin": {"status": {"version": "1.0-a", "config_sha256": sha256(NODE_YAML)}},
            "units": {UNIT: {"active": True, "stale": False, "started": 1000.0}},
            "files": {UNIT_FILE: {"mtime": 900.0}},
        }
    },
}
# A node label has selected another configuration than node.yaml, and the program has applied it.
BIG = {"version": "1.0-a", "config_path": "/etc/vgpu/configs/big.yaml", "config_sha256": sha256(BIG_YAML)}
STATE = ("__device_plugin_found", "state")
ROWS = [
    # columns: the case, the path of the fact that it changes, the fact's new value; whether a restart of the program is
    # expected. "killed": before the restart an earlier run of the role was killed, after it had written the unit file,
    # reloaded systemd, switched the version or written the configuration.
    ("finished host", (), None, False),
    ("this run switched the version", ("__device_plugin_switched", "changed"), True, True),
    ("this run wrote the unit", ("__device_plugin_written", "written"), [UNIT_FILE], True),
    ("this run wrote the configuration", ("__device_plugin_written", "written"), ["/etc/vgpu/node.yaml"], True),
    ("the driver was replaced under the program", (*STATE, "units", UNIT, "old_driver"), True, True),
    ("killed after the unit was written", (*STATE, "units", UNIT, "stale"), True, True),
    ("killed after the reload", (*STATE, "files", UNIT_FILE, "mtime"), 1000.5, True),
    ("the unit was never started", (*STATE, "units", UNIT, "started"), None, True),
    ("killed after the switch", (*STATE, "plugin", "status", "version"), "0.9-b", True),
    ("killed after the configuration", (*STATE, "plugin", "status", "config_sha256"), "0" * 64, True),
    ("a named configuration is active", (*STATE, "plugin", "status"), BIG, False),
    (
        "the named configuration's text changed",
        (*STATE, "plugin", "status"),
        {**BIG, "config_sha256": sha256(NODE_YAML)},
        True,
    ),
    (
        "the named configuration was removed",
        (*STATE, "plugin", "status"),
        {**BIG, "config_path": "/etc/vgpu/configs/x.yaml"},
        True,
    ),
    ("the program does not answer", (*STATE, "plugin", "status"), None, True),
    ("the unit file cannot be read", (*STATE, "files", UNIT_FILE), None, False),
]
# The cases in which systemd must reload its units. In all other cases it must not, because a reload removes GPUs from
# containers of NVIDIA's legacy mode.
RELOADED = {"this run wrote the unit", "killed after the unit was written"}


def tasks(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [inner for one in found for inner in [one, *tasks(one.get("block", []))]]


@pytest.fixture(scope="module")
def task() -> dict[str, Any]:
    text = (ROOT / "roles" / "device_plugin" / "tasks" / "run.yml").read_text()
    (task,) = [one for one in tasks(yaml.safe_load(text)) if one["name"] == TASK]
    assert "__device_plugin_stale" in task["when"]
    return task


@pytest.mark.parametrize(("about", "where", "there", "restarted"), ROWS, ids=[one[0] for one in ROWS])
def test_program_restarts_only_in_these_cases(task, about, where, there, restarted):
    host = copy.deepcopy(AT_REST)
    if where:
        parent = host
        for key in where[:-1]:
            parent = parent[key]
        parent[where[-1]] = there
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    environment.tests["changed"] = lambda result: result["changed"]
    environment.filters["hash"] = lambda text, name: hashlib.new(name, text.encode()).hexdigest()

    def value(expression: str) -> Any:
        rule = expression.strip().removeprefix("{{").removesuffix("}}")
        return environment.compile_expression(rule, undefined_to_none=False)(**host)

    for name in ("__device_plugin_runs", "__device_plugin_service", "__device_plugin_unit_file"):
        host[name] = value(task["vars"][name])
    assert bool(value(task["vars"]["__device_plugin_stale"])) is restarted
    assert bool(value(task["ansible.builtin.systemd_service"]["daemon_reload"])) is (about in RELOADED)


METRICS = [
    # columns: the variable vgpu_metrics_listen (None means not set), the variable device_plugin_options; the expected
    # options of the program
    (None, [], [f"--metrics-listen={schema.VARIABLES['vgpu_metrics_listen'].default}"]),
    (":9410", [], ["--metrics-listen=:9410"]),
    ("", [], []),
    ("", ["--log-level=debug"], ["--log-level=debug"]),
    # A user may still set this option in device_plugin_options: if an option is given twice, the program takes the
    # last.
    (None, ["--metrics-listen=:1"], ["--metrics-listen=127.0.0.1:9410", "--metrics-listen=:1"]),
]


def options_of(**host: Any) -> list[str]:
    """Returns the program's options as the role's expressions compute them."""
    variables = yaml.safe_load((ROOT / "roles" / "device_plugin" / "vars" / "main.yml").read_text())
    environment = jinja2.Environment()
    environment.filters["bool"] = bool
    host = {"device_plugin_options": [], "device_plugin_deploy": "systemd", "device_plugin_kubeconfig": "", **host}
    for name in ("metrics", "labels", "taint", "options"):
        name = f"__device_plugin_{name}"
        rule = variables[name].strip().removeprefix("{{").removesuffix("}}")
        host[name] = environment.compile_expression(rule)(**host)
    return list(host["__device_plugin_options"])


@pytest.mark.parametrize(("address", "options", "expected"), METRICS)
def test_options_of_the_program(address, options, expected):
    more = {} if address is None else {"vgpu_metrics_listen": address}
    assert options_of(device_plugin_options=options, **more) == expected
    given = parser().parse_args(expected)
    assert given.metrics_listen == (expected[-1].partition("metrics-listen=")[2] if address != "" else "")


WITH_LABELS = [
    ({}, False),
    ({"device_plugin_kubeconfig": "/etc/kubernetes/kubelet.conf"}, True),
    ({"device_plugin_deploy": "daemonset"}, True),
    ({"device_plugin_deploy": "daemonset", "vgpu_labels": False}, False),
    ({"device_plugin_kubeconfig": "/k", "vgpu_labels": False}, False),
]


@pytest.mark.parametrize(("host", "expected"), WITH_LABELS)
def test_labels_of_the_node(host, expected):
    options = options_of(vgpu_metrics_listen="", **host)
    assert options == (["--node-labels"] if expected else [])
    assert parser().parse_args(options).node_labels is expected
    assert schema.VARIABLES["vgpu_labels"].default is True


TAINTS = [
    ({"device_plugin_deploy": "daemonset"}, "none"),
    ({"device_plugin_deploy": "daemonset", "vgpu_unhealthy_taint": "any"}, "any"),
    ({"device_plugin_kubeconfig": "/k", "vgpu_unhealthy_taint": "all"}, "all"),
    ({"vgpu_unhealthy_taint": "any"}, "none"),  # This host has no credentials for the API server.
]


@pytest.mark.parametrize(("host", "expected"), TAINTS)
def test_taint_of_the_node(host, expected):
    options = options_of(vgpu_metrics_listen="", vgpu_labels=False, **host)
    assert options == ([f"--unhealthy-taint={expected}"] if expected != "none" else [])
    assert parser().parse_args(options).unhealthy_taint == expected
    assert schema.VARIABLES["vgpu_unhealthy_taint"].default == "none"


ADDRESSES = [
    *((one, True) for one in ("127.0.0.1:9410", ":9410", "[::1]:9410", "localhost:9410", "")),
    *((one, False) for one in ("9410", "127.0.0.1", "127.0.0.1:x", "::1:9410", "127.0.0.1:9410 ", "http://x:9410")),
    # The greatest port is 65535.
    *((f":{port}", True) for port in (1, 9999, 10000, 59999, 60000, 64999, 65499, 65529, 65535)),
    *((f":{port}", False) for port in (65536, 65540, 65600, 66000, 70000, 94100, 100000)),
    ("[::1]:65536", False),
]


@pytest.mark.parametrize(("address", "right"), ADDRESSES)
def test_address_is_checked_before_any_host_is_read(address, right):
    findings: list[Any] = []
    schema.read({"vgpu_metrics_listen": address}, findings)
    assert (findings == []) is right
