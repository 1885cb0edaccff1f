# SPDX-License-Identifier: Apache-2.0
"""Tests the module mps_daemon in check mode on a host whose driver or MPS package would be installed only by the real
run.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.gpu import mps
from ansible_collections.vgpu.fleet.plugins.module_utils.host.systemd_units import UnitFiles
from ansible_collections.vgpu.fleet.plugins.modules import mps_daemon

T4 = {
    "index": 0,
    "uuid": "GPU-0",
    "model": "T4",
    "memory_mib": 15360,
    "compute_capability": "7.5",
    "mig_enabled": False,
}
DRIVER = {"ok": True, "error": "", "gpus": [T4], "cuda_version": "12.2"}
NONE = {"ok": False, "error": "libnvidia-ml.so.1 is missing", "gpus": [], "cuda_version": None}


class Left(Exception):
    """The module ended; ``args`` are the word ``exit`` or ``fail`` and the result."""


def run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, check_mode: bool, found: dict[str, Any]
) -> tuple[str, dict[str, Any], list[str]]:
    """Returns how the module ended, its result and its warnings. The host has no control daemon of MPS."""

    def leave(how: str) -> Any:
        def left(**result: Any) -> None:
            raise Left(how, result)

        return left

    warnings: list[str] = []
    options = {"replicas": 2, "mps_root": mps.ROOT, "resource": mps.RESOURCE, "exclusive": True, "state": "present"}
    double = SimpleNamespace(
        check_mode=check_mode,
        params=options,
        warn=warnings.append,
        fail_json=leave("fail"),
        exit_json=leave("exit"),
    )
    monkeypatch.setattr(mps_daemon, "AnsibleModule", lambda **_spec: double)
    monkeypatch.setattr(mps_daemon.nvml, "read", lambda: found)
    monkeypatch.setattr(mps_daemon, "CONTROL", str(tmp_path / "none"))
    answer = SimpleNamespace(rc=0, out="", err="")
    monkeypatch.setattr(
        mps_daemon, "UnitFiles", lambda unit, check: UnitFiles(unit, check, str(tmp_path), lambda _argv: answer)
    )
    with pytest.raises(Left) as left:
        mps_daemon.main()
    return (*left.value.args, warnings)


# columns: check mode, what NVML answers; how the module ends, words of its message or warning
@pytest.mark.parametrize(
    ("check_mode", "found", "end", "words"),
    [
        (True, NONE, "exit", "libnvidia-ml.so.1 is missing"),
        (False, NONE, "fail", "libnvidia-ml.so.1 is missing"),
        (True, DRIVER, "exit", "none is missing"),
        (False, DRIVER, "fail", "none is missing"),
        (True, {**DRIVER, "gpus": []}, "fail", "NVML lists no GPU"),
    ],
)
def test_check_mode_predicts_the_daemon_before_its_packages_are_installed(
    monkeypatch, tmp_path, check_mode, found, end, words
):
    how, result, warnings = run(monkeypatch, tmp_path, check_mode, found)
    assert how == end
    assert words in (result["msg"] if end == "fail" else " ".join(warnings))
    if end == "exit":
        assert result["changed"] is True and any(mps.UNIT in line for line in result["plan"])
    assert list(tmp_path.iterdir()) == []
