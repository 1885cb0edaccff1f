# SPDX-License-Identifier: Apache-2.0
"""Tests which container engine runs the isolation check (attempts to exceed the limits of a slice, a part of a GPU) on
a host, and which files and images the check removes afterwards. Small programs replace the clients of the engines
(docker, ctr, podman).
"""

from __future__ import annotations

import json
import os
import tarfile
from io import BytesIO
from pathlib import Path

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.host.mount_namespace import Mount
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import (
    engines as isolation_engines,
)
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import (
    image as isolation_image,
)
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import (
    leftovers,
)
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import (
    runner as isolation_runner,
)
from doubles.engines import BEFORE, DEAD, FORMER, OURS, calls, clients, record

UUID = "GPU-1"
NO_NVIDIA = {"info": "print('{\"runc\":{}}')"}
LAY_OUT = isolation_image.lay_out
HANGS = {"import": "time.sleep(600)"}


@pytest.fixture
def host(tmp_path, monkeypatch):
    return clients(tmp_path, monkeypatch)


def with_cdi(tmp_path: Path) -> None:
    spec = {"kind": "vgpu.fleet/gpu", "devices": [{"name": UUID}]}
    (tmp_path / "vgpu.json").write_text(json.dumps(spec))


def lease(**more) -> isolation_engines.Lease:
    given = {"mounts": [], "words": [], "environment": {}, "devices": [], "cdi_devices": [], **more}
    return isolation_engines.Lease(UUID, [0], "/probe", **given)


IMAGE = {"image": "print('[{}]')"}
OWN = isolation_engines.OWN_FILES
CHOICES = [
    # columns: label, replaced clients with the behaviour of their commands, whether the NVIDIA runtime and CDI files
    # exist, options of the module; expected runner, its image, number of reasons why an engine was not used
    ("no engine", {}, False, {}, "namespace", "", 3),
    ("docker", {"docker": {}}, False, {}, "docker", OWN, 0),
    ("docker without NVIDIA's runtime", {"docker": NO_NVIDIA}, False, {}, "namespace", "", 3),
    ("docker that does not respond", {"docker": {"info": "sys.exit('no daemon')"}}, False, {}, "namespace", "", 3),
    ("docker that hangs at the image import", {"docker": HANGS}, False, {}, "namespace", "", 3),
    ("docker that refuses the image import", {"docker": {"import": "sys.exit('full')"}}, False, {}, "namespace", "", 3),
    ("containerd", {"ctr": {}}, True, {}, "containerd", OWN, 1),
    ("containerd without NVIDIA's runtime", {"ctr": {}}, False, {}, "namespace", "", 3),
    ("podman", {"podman": {}}, True, {}, "podman", OWN, 2),
    ("podman without the plugin's CDI files", {"podman": {}}, False, {}, "namespace", "", 3),
    ("docker, containerd and podman", {"docker": {}, "ctr": {}, "podman": {}}, True, {}, "docker", OWN, 0),
    (
        "all three, docker without NVIDIA's runtime",
        {"docker": NO_NVIDIA, "ctr": {}, "podman": {}},
        True,
        {},
        "containerd",
        OWN,
        1,
    ),
    ("namespace configured", {"docker": {}}, True, {"runtime": "namespace"}, "namespace", "", 0),
    ("podman configured", {"docker": {}, "podman": {}}, True, {"runtime": "podman"}, "podman", OWN, 0),
    ("image configured, docker has it", {"docker": IMAGE}, False, {"image": "debian:12"}, "docker", "debian:12", 0),
    (
        "image configured, only podman has it",
        {"docker": {}, "podman": IMAGE},
        True,
        {"image": "debian:12"},
        "podman",
        "debian:12",
        2,
    ),
    ("image configured, no engine has it", {"docker": {}}, False, {"image": "debian:12"}, "namespace", "", 3),
    # Containerd has no images here, so it ignores the option and uses the host's own files.
    (
        "image configured, containerd needs none",
        {"docker": {}, "ctr": {}},
        True,
        {"image": "d:1"},
        "containerd",
        OWN,
        1,
    ),
]


@pytest.mark.parametrize(
    ("about", "clients", "gpus", "options", "name", "image", "reasons"), CHOICES, ids=[one[0] for one in CHOICES]
)
def test_engine_is_chosen_from_the_clients_of_the_host(
    host, tmp_path, monkeypatch, about, clients, gpus, options, name, image, reasons
):
    if clients.get("docker") is HANGS:
        # A client that answers late counts as hung; a short limit keeps the test fast.
        monkeypatch.setattr(isolation_runner, "ASK_S", 0.5)
    params = {**host(**clients), **options}
    if gpus:
        with_cdi(tmp_path)
        Path(params["nvidia_runtime"]).write_text("")
    engines = isolation_engines.Engines(params)
    runner = engines.runner(lease())
    assert (runner.name, engines.image, len(engines.reasons)) == (name, image, reasons), engines.reasons
    engines.runner(lease())
    made = [one for one in calls(tmp_path) if " import " in one]
    assert len(made) <= (2 if "refuses" in about else 1), "expected one import of the image for all slices"
    engines.close()
    assert not [one for one in calls(tmp_path) if one.startswith(("docker ps", "podman ps"))] or image != OWN
    # Only the image that this run imported is removed.
    removed = [one.split()[-1] for one in calls(tmp_path) if " rmi " in one]
    wanted = {one.split()[-1] for one in made} if image == OWN else set()
    assert set(removed) == wanted
    assert not list(tmp_path.glob("isolation-*"))
    hung = [leftovers.record("docker")] if "hang" in about else []
    assert [str(one) for one in tmp_path.glob("state/check-*")] == hung, "the record of possible leftovers stays"


def test_missing_configured_runtime_is_an_error(host):
    for runtime, client in (("docker", "docker"), ("podman", "podman"), ("containerd", "ctr")):
        with pytest.raises(
            isolation_runner.RunnerError, match=f"runtime: {runtime} is requested, and .*{client} does not"
        ):
            isolation_engines.Engines({**host(), "runtime": runtime}).runner(lease())


@pytest.mark.parametrize(
    ("given", "wanted"),
    [({}, UUID), ({"NVIDIA_VISIBLE_DEVICES": "void"}, UUID), ({"NVIDIA_VISIBLE_DEVICES": "x"}, "x")],
)
def test_containerd_container_names_the_gpu(host, tmp_path, given, wanted):
    """For CDI, the device plugin's response sets NVIDIA_VISIBLE_DEVICES to void or leaves it out. It names the GPU in a
    part that only a kubelet reads. So the check must name the GPU itself."""
    params = host(ctr={})
    Path(params["nvidia_runtime"]).write_text("")
    runner = isolation_engines.Engines(params).runner(lease(environment=given))
    command = runner._start("c1", ["true"])
    assert f"NVIDIA_VISIBLE_DEVICES={wanted}" in command
    assert command.index("c1") > command.index(params["nvidia_runtime"]) > command.index("--runc-binary")


WORD = Mount("/var/run/nvidia-container-devices/GPU-1", "/dev/null", False)
GIVEN = [
    # columns: label, client; expected: whether its command mounts the path by which the NVIDIA runtime recognises a
    # GPU. Podman does not use this runtime, so the mount would only put /dev/null into the container.
    ("docker, whose runtime reads the mount", "docker", True),
    ("containerd, whose runtime reads the mount", "ctr", True),
    ("podman, which would mount a file", "podman", False),
]


@pytest.mark.parametrize(("about", "client", "word"), GIVEN, ids=[one[0] for one in GIVEN])
def test_container_has_the_image_and_mounts_of_its_engine(host, tmp_path, about, client, word):
    params = host(**{client: {}})
    Path(params["nvidia_runtime"]).write_text("")
    with_cdi(tmp_path)
    runner = isolation_engines.Engines(params).runner(lease(words=[WORD]))
    made = f"{leftovers.ROOTS}{OURS}" if client == "ctr" else f"{leftovers.REPOSITORY}:{OURS}-"
    assert (runner._root if client == "ctr" else runner._image).startswith(made)
    assert bool([one for one in runner._options if WORD.container_path in one]) == word
    assert ("vgpu.fleet/gpu=GPU-1" in runner._options) == (client == "podman")


SPECS = [
    # columns: label, CDI files on the host; expected: whether podman gets the GPU
    ("CDI file of the plugin", [{"kind": "vgpu.fleet/gpu", "devices": [{"name": "GPU-0"}, {"name": UUID}]}], True),
    (
        "CDI files of the plugin and of NVIDIA",
        [{"kind": "nvidia.com/gpu"}, {"kind": "vgpu.fleet/gpu", "devices": [{"name": UUID}]}],
        True,
    ),
    ("CDI file of other GPUs", [{"kind": "vgpu.fleet/gpu", "devices": [{"name": "GPU-0"}]}], False),
    ("NVIDIA's CDI file of this GPU", [{"kind": "nvidia.com/gpu", "devices": [{"name": UUID}]}], False),
    ("invalid CDI files", [[], "", {"kind": "vgpu.fleet/gpu"}], False),
]


@pytest.mark.parametrize(("about", "specs", "found"), SPECS, ids=[one[0] for one in SPECS])
def test_device_of_podman(tmp_path, about, specs, found):
    for number, one in enumerate(specs):
        (tmp_path / f"{number}.json").write_text(json.dumps(one))
    folders = [str(tmp_path / "none"), str(tmp_path)]
    if found:
        assert isolation_engines.cdi_device(UUID, folders) == "vgpu.fleet/gpu=GPU-1"
    else:
        with pytest.raises(isolation_runner.RunnerError, match="so podman passes no GPU"):
            isolation_engines.cdi_device(UUID, folders)


def test_check_calls_no_engine_for_former_versions(host, tmp_path):
    """A check has only a few seconds, so it does not search for leftovers of former versions. Only a clean-up does."""
    (tmp_path / "docker-in-use").write_text("")
    engines = isolation_engines.Engines(host(docker={}))
    engines.runner(lease())
    assert not [one for one in calls(tmp_path) if one.startswith(("docker ps", "docker image ls"))]
    engines.close()


@pytest.mark.parametrize("image", ["", "debian:12"])
def test_later_check_removes_the_leftovers(host, tmp_path, image):
    """Before the first container of a check starts, the leftovers of killed runs are removed once, also if an image is
    configured."""
    params = host(
        docker={"image": "print('[{}]') if 'inspect' in words else None", "ps": f"print('c7 vgpu.isolation={DEAD}')"}
    )
    of_dead = record()
    engines = isolation_engines.Engines({**params, "image": image})
    for _slice in range(2):
        engines.runner(lease())
    done = [one.split()[1:] for one in calls(tmp_path)]
    assert [one for one in done if one[0] == "rm"] == [["rm", "--force", "c7"]]
    assert not os.path.exists(of_dead)


# columns: case, behaviour of docker's commands at the end of the run; expected: whether the record of the run stays
@pytest.mark.parametrize(
    ("about", "commands", "stays"),
    [
        ("all was removed", {}, False),
        ("a container of a named image stays", {"ps": "print('c9')"}, True),
        ("the daemon is off by now", {"ps": "sys.exit('no daemon')"}, True),
    ],
)
def test_record_of_a_named_image(host, tmp_path, about, commands, stays):
    """A record of the run is written before its first container and removed when nothing of the run is left. A later
    run searches for leftovers by this record."""
    engines = isolation_engines.Engines({**host(docker={**IMAGE, **commands}), "image": "debian:12"})
    engines.runner(lease())
    mine = leftovers.record("docker")
    assert os.path.exists(mine)
    engines.close()
    assert os.path.exists(mine) == stays


def test_own_image_that_the_engine_keeps(host):
    engines = isolation_engines.Engines(host(docker={"rmi": "sys.exit('in use')"}))
    engines.runner(lease())
    engines.close()
    assert os.path.exists(leftovers.record("docker"))


HUNG = [
    # columns: label, behaviour of docker's commands, options of the module; expected command at which docker hangs
    ("docker info hangs", {"info": "time.sleep(600)"}, {}, "info"),
    ("image import hangs", HANGS, {}, "import"),
    ("inspection of a configured image hangs", {"image": "time.sleep(600)"}, {"image": "debian:12"}, "image"),
]


@pytest.mark.parametrize(("about", "commands", "options", "word"), HUNG, ids=[one[0] for one in HUNG])
def test_engine_that_hung_is_not_asked_again(host, tmp_path, monkeypatch, about, commands, options, word):
    """If docker hangs, each call waits a minute for it. So docker is called for the first GPU only, and the reports of
    the later GPUs say that docker was skipped."""
    monkeypatch.setattr(isolation_runner, "ASK_S", 0.5)
    engines = isolation_engines.Engines({**host(docker=commands), **options})
    said = []
    for _gpu in range(3):
        assert engines.runner(lease()).name == "namespace"
        said.append(engines.reasons[0])
    engines.close()
    asked = [one.split()[1] for one in calls(tmp_path)]
    assert (asked.count(word), asked[-1]) == (1, word), asked
    assert [one.endswith("this run does not ask it again") for one in said] == [False, True, True]
    assert all(f"docker {word}" in one and "systemctl status docker" in one for one in said)


def test_engine_that_hangs_during_a_check_is_skipped_later(host, tmp_path):
    engines = isolation_engines.Engines(host(docker={}))
    assert engines.runner(lease()).name == "docker"
    engines.heed(isolation_runner.RunnerError("the image needs /bin/sh"))
    assert engines.runner(lease()).name == "docker", "this fault does not mark the engine as hung"
    engines.heed(isolation_runner.EngineHangs(str(tmp_path / "docker"), "docker create did not answer"))
    asked = len(calls(tmp_path))
    assert engines.runner(lease()).name == "namespace"
    engines.close()
    assert len(calls(tmp_path)) == asked
    assert os.path.exists(leftovers.record("docker")), "the next run removes the image"


def test_root_that_cannot_be_laid_out(host, tmp_path, monkeypatch):
    """If the disk is full while the root folder of a container is unpacked, the incomplete folder is removed and not
    used for the next slice."""
    params = host(ctr={})
    Path(params["nvidia_runtime"]).write_text("")
    monkeypatch.setattr(isolation_image, "lay_out", LAY_OUT)
    monkeypatch.setattr(isolation_image, "pack", lambda _probe: that_does_not_fit())
    engines = isolation_engines.Engines(params)
    for _slice in range(2):
        assert engines.runner(lease()).name == "namespace", engines.reasons
        assert not list(tmp_path.glob("isolation-*"))
    engines.close()


def that_does_not_fit() -> bytes:
    """Returns a tar archive that cannot be unpacked, because "a" is a file and "a/b" needs a folder "a"."""
    stream = BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as out:
        for name in ("a", "a/b"):
            out.addfile(tarfile.TarInfo(name))
    return stream.getvalue()


@pytest.mark.parametrize("mark", [BEFORE, FORMER], ids=["before a reboot", "of this boot"])
def test_root_of_a_killed_run_that_had_our_pid(host, tmp_path, mark):
    params = host(ctr={})
    Path(params["nvidia_runtime"]).write_text("")
    folder = tmp_path / f"isolation-{mark}"
    folder.mkdir()
    (folder / "old").write_text("")
    engines = isolation_engines.Engines(params)
    assert engines.runner(lease()).name == "containerd", engines.reasons
    assert not folder.exists()
    assert [one.name for one in tmp_path.glob("isolation-*")] == [f"isolation-{OURS}"]
    engines.close()
    assert not list(tmp_path.glob("isolation-*"))


@pytest.mark.parametrize("listed", ["time.sleep(600)", "sys.exit('no daemon')"], ids=["hangs", "is off"])
def test_root_stays_if_containerd_may_still_use_it(host, tmp_path, monkeypatch, listed):
    monkeypatch.setattr(isolation_runner, "ASK_S", 0.5)
    params = host(ctr={"--namespace": f"{listed} if 'list' in words else None"})
    Path(params["nvidia_runtime"]).write_text("")
    engines = isolation_engines.Engines(params)
    assert engines.runner(lease()).name == "containerd", engines.reasons
    engines.close()
    assert [one.name for one in tmp_path.glob("isolation-*")] == [f"isolation-{OURS}"], (
        "expected the folder to stay for the next run"
    )
