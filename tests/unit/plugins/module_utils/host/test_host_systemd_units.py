# SPDX-License-Identifier: Apache-2.0
"""Tests which systemd units are started again after the GPUs of a host changed (for example by
MIG, which divides a GPU). Running services and enabled one-shot services must start again, because they know only the
former GPUs.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.gpu import mig_unit
from ansible_collections.vgpu.fleet.plugins.module_utils.host.host import Answer
from ansible_collections.vgpu.fleet.plugins.module_utils.host.systemd_units import UnitFiles

# columns: systemd's properties of the unit; expected systemctl verb. try-restart restarts a unit only if it is active,
# so it would skip a one-shot unit, which is not active after it ended.
UNITS = [
    ("Type=oneshot\nUnitFileState=enabled\n", "restart"),
    ("Type=oneshot\nUnitFileState=disabled\n", "try-restart"),  # the administrator disabled it
    ("Type=notify\nUnitFileState=enabled\n", "try-restart"),
    ("Type=simple\nUnitFileState=\n", "try-restart"),  # the unit does not exist
]


@pytest.mark.parametrize(("shown", "verb"), UNITS)
@pytest.mark.parametrize(("rc", "faults"), [(0, 0), (5, 0), (1, 1)])
def test_units_that_know_the_former_gpus_run_again(shown, verb, rc, faults):
    calls = []

    def run(argv):
        calls.append(" ".join(argv))
        return Answer(0, shown, "") if argv[1] == "show" else Answer(rc, "", "failed")

    said = UnitFiles("vgpu-mig.service", run=run).try_restart(["nvidia-cdi-refresh.service"])
    assert calls[1:] == [f"systemctl {verb} nvidia-cdi-refresh.service"]
    assert len(said) == faults


def test_mig_at_boot_starts_an_enabled_cdi_refresh_again():
    """At boot, nvidia-cdi-refresh may have ended before vgpu-mig changed the GPUs. So vgpu-mig starts it again, if it
    is enabled."""
    (line,) = [one for one in mig_unit.UNIT_TEXT.splitlines() if one.startswith("ExecStartPost=")]
    assert "one=nvidia-cdi-refresh.service;" in line and "try-restart" not in line
    # In a unit file, $$ gives the shell a single dollar sign; systemd would expand a single one itself.
    assert line.index("is-enabled $$one") < line.index("&&") < line.index("restart $$one")
