# SPDX-License-Identifier: Apache-2.0
"""Tests the folder that two probes share. A probe is the program that the isolation check runs in a slice (a part of a
GPU) to try to exceed the limits. In this folder the probes of two slices exchange an exported memory handle. The folder
must exist only during the check, and the folder of a killed run must be removed.
"""

from __future__ import annotations

import os
import stat

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.host import run_id
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import pair as isolation_pair
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation.runner import RunnerError

DEAD = f"beside-{2**22 + 1}.1.{'0' * 12}"  # larger than any pid of Linux


@pytest.mark.parametrize("fails", [False, True])
def test_shared_folder_exists_during_the_check(tmp_path, fails):
    (tmp_path / DEAD).mkdir()
    (tmp_path / DEAD / "socket").write_text("")
    try:
        with isolation_pair.meeting(str(tmp_path)) as mount:
            (made,) = tmp_path.iterdir()
            assert made.name == f"beside-{run_id.own()}"
            assert (mount.container_path, mount.host_path, mount.read_only) == ("/dev/vgpu-beside", str(made), False)
            assert stat.S_IMODE(made.stat().st_mode) == 0o777, "containers of any user can write"
            (made / "socket").write_text("")
            assert isolation_pair.left_behind(str(tmp_path)) == [], "the check is running"
            if fails:
                raise ValueError("the probe was ended")
    except ValueError:
        assert fails
    assert list(tmp_path.iterdir()) == []


def test_folders_of_others_stay(tmp_path):
    for name in (DEAD, f"beside-{run_id.own()}", "beside-the-point", "allocations"):
        (tmp_path / name).mkdir()
    assert isolation_pair.left_behind(str(tmp_path)) == [str(tmp_path / DEAD)]
    assert isolation_pair.clean_up(str(tmp_path)) == [str(tmp_path / DEAD)]
    assert isolation_pair.clean_up(str(tmp_path)) == []
    assert len(os.listdir(tmp_path)) == 3


def test_folder_that_cannot_be_created_is_named(tmp_path):
    with pytest.raises(RunnerError, match=r"nowhere/beside-.*No such file"), isolation_pair.meeting(
        str(tmp_path / "nowhere")
    ):
        pass
