# SPDX-License-Identifier: Apache-2.0
"""The probe's ways round: with LD_PRELOAD alone, which a tenant can take off, those that take it off are red.

Real slices, where the same ways are held, are in tests/integration/device_plugin/test_isolation.py.
"""

from __future__ import annotations

import json
import subprocess

import pytest
from conftest import MIB, OK, PRELOAD, PROBE, Host
from test_files import FORCED, container
from test_probe import run, verdicts
from test_probe_finds import broken

# By LD_PRELOAD, files at other places than a slice's.
WITHOUT_MOUNTS = {
    "bypass-path": "held",
    "bypass-copy": "held",
    "bypass-namespace": "open",
    "bypass-symbol-table": "open",
    "bypass-no-preload": "violated",
    "bypass-other-preload": "violated",
    "bypass-own-limits": "violated",
    "bypass-setuid": "violated",
    "bypass-other-libcuda": "violated",
    "bypass-more-devices": "held",
    "bypass-own-files": "not-run",
    "bypass-descriptors": "held",
    "bypass-ledger-emptied": "not-run",
    "bypass-ledger-spoiled": "not-run",
    "bypass-ledger-lie": "not-run",
}


def test_a_preload_that_the_tenant_can_take_off(host: Host) -> None:
    status, report = run(host, "--checks", ",".join(WITHOUT_MOUNTS))
    assert verdicts(report) == WITHOUT_MOUNTS, report
    assert status == 1
    assert host.on_card() == host.charged() == 0, "an attempt left something behind"


def test_a_library_that_leaves_dlsym_alone(host: Host, tmp_path) -> None:
    library = broken(tmp_path, "libvgpu.map", "        dlsym;\n", "")
    names = ["bypass-path", "bypass-copy"]
    environment = host.env(LD_PRELOAD=str(library))
    done = subprocess.run(
        [PROBE, "--json", "--checks", ",".join(names)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.count('"verdict":"violated"') == 2, done.stdout


@pytest.mark.parametrize("name", ["bypass-path", "bypass-descriptors"])
def test_without_the_library_nothing_is_held(host: Host, name: str) -> None:
    environment = {key: value for key, value in host.env().items() if key != "LD_PRELOAD"}
    done = subprocess.run(
        [PROBE, "--checks", name], env=environment, stdout=subprocess.PIPE, text=True, timeout=300, check=False
    )
    assert done.returncode != 0, done.stdout


SPOILING = ["bypass-ledger-emptied", "bypass-ledger-spoiled", "bypass-ledger-lie"]


def test_a_ledger_in_use_is_left_alone(host: Host) -> None:
    """An emptied file ends with SIGBUS whoever touches its mapping: the container's own work, where that goes on."""

    def spoiled(folder: str) -> dict:
        environment = dict(host.driver_env)
        command = [*container(host, PRELOAD, folder=folder), PROBE, "--json", "--checks", ",".join(SPOILING)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=300, check=False)
        return {one["name"]: (one["verdict"], one["detail"]) for one in json.loads(done.stdout)["checks"]}

    at_work = host.puppet(wrapper=container(host, PRELOAD), **FORCED).start()
    at_work.get("alloc", 100 * MIB)
    found = spoiled("beside")
    assert [verdict for verdict, _why in found.values()] == ["not-run"] * 3, found
    assert all("another process" in why for _verdict, why in found.values()), found
    assert at_work.result("alloc 50 4096") == OK
    assert host.charged() == host.on_card() > 100 * MIB
    at_work.end()
    assert [verdict for verdict, _why in spoiled("alone").values()] == ["held", "held", "open"]
