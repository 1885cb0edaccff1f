# SPDX-License-Identifier: Apache-2.0
"""The folder where two slices meet: it exists only during the meeting, and a killed run's folder is removed."""

from __future__ import annotations

import os
import stat

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.host import run_id
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import pair as isolation_pair
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation.runner import RunnerError

DEAD = f"beside-{2**22 + 1}.1.{'0' * 12}"  # a pid that no kernel assigns


@pytest.mark.parametrize("fails", [False, True])
def test_a_folder_is_there_while_two_meet(tmp_path, fails):
    (tmp_path / DEAD).mkdir()
    (tmp_path / DEAD / "socket").write_text("")
    try:
        with isolation_pair.meeting(str(tmp_path)) as mount:
            (made,) = tmp_path.iterdir()
            assert made.name == f"beside-{run_id.own()}"
            assert (mount.container_path, mount.host_path, mount.read_only) == ("/dev/vgpu-beside", str(made), False)
            assert stat.S_IMODE(made.stat().st_mode) == 0o777, "whoever the containers' users are"
            (made / "socket").write_text("")
            assert isolation_pair.left_behind(str(tmp_path)) == [], "its run lives"
            if fails:
                raise ValueError("the probe was ended")
    except ValueError:
        assert fails
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_stays(tmp_path):
    for name in (DEAD, f"beside-{run_id.own()}", "beside-the-point", "allocations"):
        (tmp_path / name).mkdir()
    assert isolation_pair.left_behind(str(tmp_path)) == [str(tmp_path / DEAD)]
    assert isolation_pair.clean_up(str(tmp_path)) == [str(tmp_path / DEAD)]
    assert isolation_pair.clean_up(str(tmp_path)) == []
    assert len(os.listdir(tmp_path)) == 3


def test_no_folder_is_said_with_its_name(tmp_path):
    with pytest.raises(RunnerError, match=r"nowhere/beside-.*No such file"), isolation_pair.meeting(
        str(tmp_path / "nowhere")
    ):
        pass
