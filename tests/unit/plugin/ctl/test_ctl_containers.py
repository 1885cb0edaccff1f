# SPDX-License-Identifier: Apache-2.0
"""Tests vgpuctl run, which leases a slice of a GPU and starts a docker or podman container with this slice. The tests
check the arguments for the engine and the release of the slice. With CDI the engine itself reads from a file what to
add for a device; without CDI vgpuctl passes each mount and device. The engine is a double.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from vgpu_plugin.ctl import containers
from vgpu_plugin.ctl import main as ctl
from vgpu_plugin.daemon import Daemon

from ..conftest import FakeGpus
from ..samples import until

# The double of the engine is a shell script. It records its arguments and represents a container by a file that is
# named after the container's lease.
ENGINE = """\
#!/bin/sh
cd {folder}
case "$1" in
info) [ -e down ] && exit 1; cat info 2>/dev/null; exit 0 ;;
version) cat version 2>/dev/null ;;
compose) [ ! -e no-plugin ]; exit ;;
ps) for one in containers/*; do [ -e "$one" ] && echo "${{one##*/}}"; done; exit 0 ;;
rm) shift 2; for one; do rm -f "containers/$one"; done ;;
run)
    printf '%s\\n' "$@" > told
    lease=$(sed -n 's,^vgpu.fleet/lease=,,p' told)
    [ -e refuses ] && exit 125
    : > "containers/$lease"
    [ -e stays ] || [ -e exits ] || exec sleep 1000
    [ -e stays ] || rm "containers/$lease"
    exit $(cat exits 2>/dev/null) ;;
esac
"""
SPEC = {
    "kind": "vgpu.fleet/gpu",
    "containerEdits": {
        "env": ["NVIDIA_VISIBLE_DEVICES=void", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"],
        "deviceNodes": [{"path": "/dev/nvidiactl"}],
        "mounts": [
            {"containerPath": "/lib/libcuda.so.1", "hostPath": "/host/libcuda.so.535", "options": ["ro", "bind"]}
        ],
    },
}


@pytest.fixture
def engine(node, tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "engine"
    (folder / "containers").mkdir(parents=True)
    for name in ("docker", "podman"):
        (folder / name).write_text(ENGINE.format(folder=folder))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    devices = [
        {"name": gpu.uuid, "containerEdits": {"deviceNodes": [{"path": f"/dev/nvidia{gpu.minor}", "hostPath": "/x"}]}}
        for gpu in node.gpus
    ]
    (tmp_path / "cdi-of-test").mkdir()
    path = tmp_path / "cdi-of-test" / "vgpu-vgpu.fleet-gpu.json"
    path.write_text(json.dumps({**SPEC, "devices": devices}))
    return folder


@pytest.fixture
def daemon(node, kubelet, running):
    node.configure(splitCount=4)
    running(Daemon(node.setup(), lambda: FakeGpus(node.gpus)))
    until(lambda: kubelet.state()["resources"].get("nvidia.com/gpu", {}).get("allocatable") == 8, "the slices")


@pytest.fixture(autouse=True)
def own_signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def words(node, tmp_path, *more: str) -> list[str]:
    return ["--socket", str(node.paths.admin_socket), "run", "--cdi-dir", str(tmp_path / "cdi-of-test"), *more]


def allocations(node, capsys) -> list[dict]:
    capsys.readouterr()
    assert ctl.main(["--socket", str(node.paths.admin_socket), "status", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["allocations"]


def told(engine: Path) -> list[str]:
    return (engine / "told").read_text().splitlines()


def after(option: str, said: list[str]) -> list[str]:
    return [said[n + 1] for n, one in enumerate(said) if one == option]


def test_engine_without_cdi_gets_mounts_and_devices(node, daemon, engine, tmp_path, capsys):
    (engine / "exits").write_text("7")
    assert ctl.main(words(node, tmp_path, "--", "-v", "/data:/data", "image", "train")) == 7
    said = told(engine)
    assert said[:2] == ["run", "--rm"] and said[-4:] == ["-v", "/data:/data", "image", "train"]
    mounts = after("--mount", said)
    assert "type=bind,source=/host/libcuda.so.535,target=/lib/libcuda.so.1,readonly" in mounts
    targets = {one.partition("target=")[2] for one in mounts}
    assert targets >= {
        "/dev/vgpu,readonly",
        "/dev/vgpu/0,readonly",
        "/dev/vgpu/0/ledger",
        "/etc/ld.so.preload,readonly",
    }
    # If this variable named a GPU, NVIDIA's runtime would add the files of the whole GPU. So its value is "void".
    assert "NVIDIA_VISIBLE_DEVICES=void" in after("--env", said)
    minors = {f"/x:/dev/nvidia{gpu.minor}" for gpu in node.gpus}
    nodes = after("--device", said)
    assert len(nodes) == 2 and "/dev/nvidiactl:/dev/nvidiactl" in nodes and set(nodes) & minors
    assert allocations(node, capsys) == []


@pytest.mark.parametrize(
    ("name", "file", "text", "by_name"),
    [
        ("docker", "info", '["{cdi}"]', True),
        ("docker", "info", "[]", False),
        ("docker", "info", "null", False),
        ("docker", "info", "", False),
        ("docker", "info", '["/etc/cdi"]', False),
        ("podman", "version", "4.3.1", True),
        ("podman", "version", "5.0.0", True),
        ("podman", "version", "3.4.4", False),
        ("podman", "version", "4.2.0", False),
    ],
)
def test_engine_with_cdi_gets_a_device_name(node, daemon, engine, tmp_path, monkeypatch, name, file, text, by_name):
    monkeypatch.setattr(containers, "PODMAN_FOLDERS", (str(tmp_path / "cdi-of-test"),))
    (engine / "exits").write_text("0")
    (engine / file).write_text(text.format(cdi=tmp_path / "cdi-of-test"))
    assert ctl.main(words(node, tmp_path, "--engine", name, "--gpus", "2", "--", "image")) == 0
    names = {f"vgpu.fleet/gpu={gpu.uuid}" for gpu in node.gpus}
    devices = set(after("--device", told(engine)))
    assert (devices == names) if by_name else (len(devices) == 3 and not devices & names)


@pytest.mark.parametrize(
    ("options", "removed", "detached"),
    [
        (["--", "image"], True, False),
        (["--detach", "--", "image"], False, True),
        (["--", "--restart", "always", "image"], False, False),
        (["--", "--restart=always", "image"], False, False),
        (["--", "--rm", "image"], True, False),
    ],
)
def test_container_is_removed_at_its_end_by_default(node, daemon, engine, tmp_path, options, removed, detached):
    (engine / "exits").write_text("0")
    assert ctl.main(words(node, tmp_path, *options)) == 0
    said = told(engine)
    assert (said.count("--rm"), "--detach" in said) == (int(removed), detached)


def test_detached_container_keeps_its_slices(node, daemon, engine, tmp_path, capsys):
    (engine / "stays").touch()
    (engine / "exits").write_text("0")
    assert ctl.main(words(node, tmp_path, "--detach", "--memory", "1Gi", "--cores", "5", "--", "image")) == 0
    (one,) = allocations(node, capsys)
    assert (one["kind"], one["holder"]) == ("container", "docker")
    assert [each.name for each in (engine / "containers").iterdir()] == [one["id"]]


@pytest.mark.parametrize(("left", "status"), [(False, 125), (True, 127)])
def test_failed_container_start_releases_its_slices(node, daemon, engine, tmp_path, capsys, left, status):
    (engine / ("stays" if left else "refuses")).touch()
    (engine / "exits").write_text("127")
    assert ctl.main(words(node, tmp_path, "--detach", "--", "image")) == status
    assert (allocations(node, capsys), list((engine / "containers").iterdir())) == ([], [])


def test_missing_engine_or_driver_is_an_error(node, daemon, engine, tmp_path, capsys):
    (tmp_path / "cdi-of-test" / "vgpu-vgpu.fleet-gpu.json").unlink()
    assert ctl.main(words(node, tmp_path, "--", "image")) == 1
    assert "does not exist: the plugin found no libcuda.so.1" in capsys.readouterr().err
    (engine / "down").touch()
    assert ctl.main(words(node, tmp_path, "--", "image")) == 1
    assert "docker and podman cannot be used" in capsys.readouterr().err
    assert allocations(node, capsys) == []


@pytest.mark.parametrize(
    ("plugin", "standalone", "says"),
    [("2.26.1", "", True), ("", "1.29.2", False), ("2.26.1", "1.29.2", True), ("", "2.26.1", True), ("", "", True)],
)
def test_service_of_compose(node, daemon, engine, tmp_path, capsys, plugin, standalone, says):
    """Covers the option create_host_path of a mount. Without this option, docker compose 2 makes a folder in place of a
    missing file. docker-compose 1.29 makes none, and it does not know the option.
    """
    if not plugin:
        (engine / "no-plugin").touch()
    if standalone:
        (engine / "docker-compose").write_text(f"#!/bin/sh\necho {standalone}\n")
        (engine / "docker-compose").chmod(0o755)
    assert ctl.main(words(node, tmp_path, "--compose", "trainer")) == 0
    service = json.loads(capsys.readouterr().out)["services"]["trainer"]
    (one,) = allocations(node, capsys)
    assert service["labels"] == {"vgpu.fleet/lease": one["id"]}
    assert service["environment"]["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert {"/dev/vgpu/0", "/lib/libcuda.so.1"} <= {each["target"] for each in service["volumes"]}
    assert [each.get("bind") for each in service["volumes"]] == [
        {"create_host_path": False} if says else None for _one in service["volumes"]
    ]
    assert "/dev/nvidiactl:/dev/nvidiactl" in service["devices"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_the_container_and_frees_the_slice(node, daemon, engine, tmp_path, capsys, number):
    code = f"import sys; sys.path[:0] = {sys.path!r}; from vgpu_plugin.ctl.main import main; sys.exit(main())"
    # The parent process of the tests may ignore SIGHUP, so env restores the default. A preexec_fn is no alternative: it
    # would fork among the threads of gRPC and sometimes hang.
    hears = ["env", "--default-signal=HUP"]
    with subprocess.Popen([*hears, sys.executable, "-c", code, *words(node, tmp_path, "--", "image")]) as one:
        until(lambda: any((engine / "containers").iterdir()), "the container")
        # Removing the file simulates the end of a container that was started with --rm.
        next((engine / "containers").iterdir()).unlink()
        until(lambda: Path(f"/proc/{one.pid}/task/{one.pid}/children").read_text().strip(), "the engine's command")
        os.kill(one.pid, number)
        assert one.wait(60) == 128 + number
    assert allocations(node, capsys) == []
