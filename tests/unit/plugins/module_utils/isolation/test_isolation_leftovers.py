# SPDX-License-Identifier: Apache-2.0
"""Tests which leftovers of killed isolation checks (containers, images, root folders) are removed and which are kept.
Their names contain the run id of the check, which shows whether that run has ended. A check that uses an engine also
writes a record with the engine and the run id.
"""

from __future__ import annotations

import os
import time
from datetime import datetime, timezone

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.host import run_id
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import leftovers
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import runner as isolation_runner
from doubles.engines import BEFORE, DEAD, FORMER, OURS, calls, clients, record


@pytest.fixture
def host(tmp_path, monkeypatch):
    return clients(tmp_path, monkeypatch)


LISTED = [
    # columns: label, run id in the image's tag and the container's label, repository of the image; expected: whether
    # image and container are removed
    ("image of an ended run", DEAD, leftovers.REPOSITORY, True),
    ("image from before a reboot, pid in use again", BEFORE, leftovers.REPOSITORY, True),
    ("image of a run whose pid was reused", FORMER, leftovers.REPOSITORY, True),
    ("image of a running check", OURS, leftovers.REPOSITORY, False),
    ("image of another program", DEAD, "localhost/vgpu-isolation-of-theirs", False),
    ("tag without a run id", "latest", leftovers.REPOSITORY, False),
]


@pytest.mark.parametrize(("about", "mark", "repository", "goes"), LISTED, ids=[one[0] for one in LISTED])
@pytest.mark.parametrize("labels", ["a=b,vgpu.isolation={}", "map[vgpu.isolation:{} x:y]"], ids=["docker", "podman"])
def test_container_and_image_of_an_ended_run_are_removed(host, tmp_path, about, mark, repository, goes, labels):
    theirs = repository != leftovers.REPOSITORY
    listed = labels.format("no-mark" if theirs else mark)
    params = host(docker={"ps": f"print('c7 {listed}')", "image": f"print('{repository}:{mark}-9')"})
    of_dead = record()
    wanted = ["c7", f"{repository}:{mark}-9"] if goes else []
    assert leftovers.left_behind(params) == [*wanted, of_dead]
    assert not [one for one in calls(tmp_path) if " rm" in one], "expected left_behind to remove nothing"
    assert os.path.exists(of_dead)
    assert leftovers.clean_up(params) == ([*wanted, of_dead], [])
    done = [one for one in calls(tmp_path) if " rm" in one]
    assert done == (["docker rm --force c7", f"docker rmi {repository}:{mark}-9"] if goes else [])
    assert leftovers.left_behind(params) == []


GONE = "4194305"  # larger than any pid of Linux
LATELY = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S +0000 UTC")
LONG_AGO = "2020-01-01 12:00:00 +0100 CET"
PODMAN_AGO = "2020-01-01 12:00:00.123456789 +0000 UTC"
MY_PID = str(os.getpid())
MADE = {LATELY: time.time_ns(), LONG_AGO: 1577876400 * 10**9, PODMAN_AGO: 1577880000 * 10**9}
FORMER_ROWS = [
    # columns: label, pid as the run id in label and tag, creation time; expected: whether container and image are
    # removed
    ("pid without a process", GONE, LATELY, True),
    ("reused pid, docker's time format", MY_PID, LONG_AGO, True),
    ("reused pid, podman's time format", MY_PID, PODMAN_AGO, True),
    ("running check of a former version", MY_PID, LATELY, False),
    ("pid in use, time unknown", MY_PID, "", False),
]


@pytest.mark.parametrize(("about", "mark", "made", "goes"), FORMER_ROWS, ids=[one[0] for one in FORMER_ROWS])
@pytest.mark.parametrize(
    ("engine", "labels"), [("docker", "a=b,vgpu.isolation={}"), ("podman", "map[vgpu.isolation:{} x:y]")]
)
def test_clean_up_of_former_versions(host, tmp_path, about, mark, made, goes, engine, labels):
    """In former versions a run id was only a pid, and no record was written. So engines that the host uses are searched
    without a record."""
    image = f"{leftovers.REPOSITORY}:{mark}-{MADE.get(made, 'x')}"
    listed = f"c7 {made} {labels.format(mark)}"
    params = host(**{engine: {"ps": f"print({listed!r})", "image": f"print({image!r})"}})
    assert leftovers.clean_up(params) == ([], []), "an unused engine is not called"
    assert not calls(tmp_path)
    (tmp_path / f"{engine}-in-use").write_text("")
    wanted = ["c7", image] if goes else []
    assert leftovers.left_behind(params) == wanted
    assert not [one for one in calls(tmp_path) if " rm" in one], "left_behind removes nothing"
    assert leftovers.clean_up(params) == (wanted, [])
    done = [one for one in calls(tmp_path) if " rm" in one]
    assert done == ([f"{engine} rm --force c7", f"{engine} rmi {image}"] if goes else [])


NO_VALUE = [
    # columns: label, line of `docker ps` about a container; expected: whether the container is removed
    ("old container, one label", f"c7 {LONG_AGO} vgpu.isolation=", True),
    ("old container, several labels", f"c7 {LONG_AGO} vgpu.isolation=,a=b", True),
    ("old container of podman", f"c7 {PODMAN_AGO} map[vgpu.isolation: x:y]", True),
    ("new container", f"c7 {LATELY} vgpu.isolation=,a=b", False),
    ("container without a time", "c7 vgpu.isolation=", False),
    ("label with another value", f"c7 {LONG_AGO} vgpu.isolation=of-mine", False),
]


@pytest.mark.parametrize(("about", "line", "goes"), NO_VALUE, ids=[one[0] for one in NO_VALUE])
def test_clean_up_of_containers_without_a_run_id(host, tmp_path, about, line, goes):
    """The first version used a named image, and its containers have the label without a run id. Only old containers are
    removed, because a new one may belong to a running check."""
    (tmp_path / "docker-in-use").write_text("")
    params = host(docker={"ps": f"print({line!r})", "image": ""})
    assert leftovers.clean_up(params) == (["c7"] if goes else [], [])


@pytest.mark.parametrize("ps", ["time.sleep(600)", "sys.exit('no daemon')"], ids=["hangs", "is off"])
def test_unresponsive_engine_without_a_record_is_no_warning(host, tmp_path, monkeypatch, ps):
    monkeypatch.setattr(isolation_runner, "ASK_S", 0.5)
    (tmp_path / "docker-in-use").write_text("")
    params = host(docker={"ps": ps})
    assert leftovers.clean_up(params) == ([], [])
    assert leftovers.left_behind(params) == []


# columns: label, pid in the folder's name, time of the last boot; expected: whether the folder is removed
@pytest.mark.parametrize(
    ("about", "pid", "booted", "goes"),
    [
        ("pid without a process", GONE, time.time(), True),
        ("running check", MY_PID, 1.0, False),
        ("reused pid", MY_PID, time.time() + 3600, True),
    ],
    ids=["pid without a process", "running check", "reused pid"],
)
def test_clean_up_of_roots_of_former_versions(host, tmp_path, monkeypatch, about, pid, booted, goes):
    monkeypatch.setattr(run_id, "_booted", lambda _proc: booted)
    folder = tmp_path / f"isolation-{pid}"
    folder.mkdir()
    (tmp_path / "isolation-").mkdir()  # no run id, so it must stay
    names = f"print('vgpu-isolation-{pid}-1\\nvgpu-isolation-1-1') if 'containers list' in words else None"
    params = host(ctr={"--namespace": names})
    assert leftovers.clean_up(params) == ([str(folder)] if goes else [], [])
    deleted = [one.split()[-1] for one in calls(tmp_path) if "containers delete" in one]
    assert deleted == ([f"vgpu-isolation-{pid}-1"] if goes else [])
    assert folder.exists() is not goes
    assert (tmp_path / "isolation-").exists()


def test_start_of_a_check_does_not_call_the_engine(host, tmp_path):
    """At the start of a check, only engines with a record are searched for leftovers, because each call of an engine
    takes time."""
    (tmp_path / "docker-in-use").write_text("")
    leftovers.begin("docker", host(docker={"image": ""})["docker"])
    assert calls(tmp_path) == []
    assert os.path.exists(leftovers.record("docker"))


def test_root_removed_between_two_listings_is_no_fault(host, tmp_path, monkeypatch):
    """A folder may disappear between the two listings of a clean-up, because a running check removes its own folder."""
    dead = tmp_path / f"isolation-{DEAD}"
    dead.mkdir()
    found = leftovers.glob.glob
    gone = str(tmp_path / f"isolation-{GONE}")
    monkeypatch.setattr(
        leftovers.glob, "glob", lambda path: [gone, *found(path)] if "isolation-" in path else found(path)
    )
    assert leftovers.clean_up(host()) == ([str(dead)], [])


RECORDED = [
    # columns: label, record of a run as (engine, run id); expected clients that a clean-up calls
    ("no record", None, set()),
    ("record of an ended run", ("podman", DEAD), {"podman"}),
    ("record from before a reboot", ("docker", BEFORE), {"docker"}),
    ("record of a running check", ("docker", OURS), set()),
]


@pytest.mark.parametrize(("about", "left", "asked"), RECORDED, ids=[one[0] for one in RECORDED])
def test_clean_up_calls_only_engines_with_a_record(host, tmp_path, about, left, asked):
    """A clean-up calls only the engines in records, because for example a first call of podman creates its storage on
    the host."""
    params = host(docker={"image": ""}, podman={"image": ""}, ctr={})
    if left:
        record(*left)
    leftovers.left_behind(params)
    leftovers.clean_up(params)
    assert {one.split()[0] for one in calls(tmp_path)} == asked


def test_leftovers_of_an_uninstalled_engine_are_removed(host, tmp_path):
    (tmp_path / f"isolation-{DEAD}").mkdir()
    left = [str(tmp_path / f"isolation-{DEAD}"), record("podman")]
    assert leftovers.clean_up(host()) == (left, [])
    assert not [one for one in left if os.path.exists(one)]


def test_clean_up_that_is_refused(host):
    """A leftover that cannot be removed is reported as a fault and not as a change. The record stays, so the next
    clean-up tries again."""
    image = f"{leftovers.REPOSITORY}:{DEAD}-9"
    answers = {"ps": f"print('c7 vgpu.isolation={DEAD}')", "image": f"print('{image}')"}
    of_dead = record()
    assert leftovers.clean_up(host(docker={**answers, "rmi": "sys.exit('in use')"})) == (["c7"], [image])
    assert leftovers.clean_up(host(docker={**answers, "rm": "sys.exit('stuck')"})) == ([image], ["c7"])
    assert os.path.exists(of_dead)


@pytest.mark.parametrize("ps", ["time.sleep(600)", "sys.exit('no daemon')"], ids=["hangs", "is off"])
def test_clean_up_of_an_engine_that_does_not_answer(host, tmp_path, monkeypatch, ps):
    """A hung engine is called only once, and its record stays for a later clean-up. The leftovers of other engines are
    removed."""
    monkeypatch.setattr(isolation_runner, "ASK_S", 0.5)
    params = host(docker={"ps": ps}, podman={"image": ""})
    docker, podman = record("docker"), record("podman")
    assert leftovers.left_behind(params) == [docker, podman]
    gone, (stays,) = leftovers.clean_up(params)
    assert gone == [podman]
    assert stays.startswith(f"{docker} (docker ps")
    assert os.path.exists(docker)
    assert [one.split()[1] for one in calls(tmp_path) if one.startswith("docker")] == ["ps", "ps"]


@pytest.mark.parametrize("answers", [True, False])
def test_clean_up_of_containerd(host, tmp_path, answers):
    dead, alive = tmp_path / f"isolation-{DEAD}", tmp_path / f"isolation-{OURS}"
    theirs = tmp_path / "isolation-notes"
    for one in (dead, alive, theirs):
        one.mkdir()
    one_of_init = f"1.{run_id._start_of('1', '/proc')}.{OURS.split('.')[2]}"
    names = f"print('vgpu-isolation-{DEAD}-1\\nvgpu-isolation-{one_of_init}-2\\nthe-container-of-{DEAD}-1')"
    listed = names if answers else "sys.exit('no daemon')"
    params = host(ctr={"--namespace": f"{listed} if 'containers list' in words else None"})
    assert leftovers.clean_up(params) == (([str(dead)], []) if answers else ([], [str(dead)]))
    assert (dead.exists(), alive.exists(), theirs.exists()) == (not answers, True, True)
    deleted = [one for one in calls(tmp_path) if "containers delete" in one]
    wanted = [f"vgpu-isolation-{DEAD}-1"] if answers else []
    assert [one.split()[-1] for one in deleted] == wanted, "pid 1 is running, and one container is of another program"
