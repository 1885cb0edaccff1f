# SPDX-License-Identifier: Apache-2.0
"""Compares the simulated hosts' nvidia-container-runtime with NVIDIA's own program, on the same bundle and the
same specification of CDI (Container Device Interface).

NVIDIA's program is built from its Go module (tests/hosts/packages/twin, versions and digests pinned). The build needs
Go 1.22 and a reachable module proxy; without them the comparison is skipped with a message.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ROOT / "tests" / "hosts" / "packages" / "src" / "nvidia_container_runtime.py"
TWIN = ROOT / "tests" / "hosts" / "packages" / "twin"
BUILT = ROOT / ".build" / "twin" / "nvidia-container-runtime"
NEEDS_GO = (1, 22)
GPUS = ("GPU-11111111-1111-1111-1111-111111111111", "GPU-22222222-2222-2222-2222-222222222222")


@pytest.fixture(scope="module")
def nvidias() -> Path:
    go = shutil.which("go", path=os.environ.get("PATH", "") + ":/usr/local/go/bin:/usr/lib/go/bin")
    if go is None:
        pytest.skip("no go on this machine: NVIDIA's own runtime cannot be built")
    told = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, check=True).stdout
    version = tuple(int(part) for part in re.findall(r"\d+", told)[:2])
    if version < NEEDS_GO:
        pytest.skip(f"NVIDIA's own runtime needs go 1.22, this machine has {told.strip()}")
    target = "github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-container-runtime"
    BUILT.parent.mkdir(parents=True, exist_ok=True)
    built = subprocess.run(
        [go, "build", "-mod=readonly", "-buildvcs=false", "-o", str(BUILT), target],
        cwd=TWIN,
        env={**os.environ, "GOFLAGS": "", "GOTOOLCHAIN": "local"},
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode != 0 and re.search(r"dial tcp|no such host|Forbidden|Not Found|timeout", built.stderr):
        pytest.skip(f"the Go modules cannot be fetched: {built.stderr.strip().splitlines()[-1]}")
    assert built.returncode == 0, built.stderr
    return BUILT


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host's files: a CDI specification with two GPUs, the options of the runtime, and a runc that only succeeds."""

    def gpu(*nodes: str) -> dict[str, Any]:
        stand_ins = {"0": "/dev/zero", "1": "/dev/full"}
        return {"deviceNodes": [{"path": f"/dev/nvidia{minor}", "hostPath": stand_ins[minor]} for minor in nodes]}

    library, state = tmp_path / "libnvidia-ml.so.1", tmp_path / "state"
    library.write_text("")
    state.write_text("")
    spec = {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": [
            {"name": "0", "containerEdits": gpu("0")},
            {"name": GPUS[0], "containerEdits": gpu("0")},
            {"name": "1", "containerEdits": gpu("1")},
            {"name": GPUS[1], "containerEdits": gpu("1")},
            {"name": "all", "containerEdits": gpu("0", "1")},
        ],
        "containerEdits": {
            "env": ["NVIDIA_VISIBLE_DEVICES=void"],
            "deviceNodes": [{"path": "/dev/nvidiactl", "hostPath": "/dev/null"}],
            "mounts": [
                {
                    "hostPath": str(library),
                    "containerPath": "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1",
                    "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"],
                },
                {"hostPath": str(state), "containerPath": "/dev/shm/gpusim.state", "options": ["rw", "rbind"]},
            ],
        },
    }
    (tmp_path / "cdi").mkdir()
    (tmp_path / "cdi" / "nvidia.yaml").write_text(json.dumps(spec))
    runc = tmp_path / "runc"
    runc.write_text(f'#!/bin/sh\necho "$@" >"{tmp_path}/runc.words"\n')
    runc.chmod(0o755)
    options = tmp_path / "nvidia-container-runtime"
    options.mkdir()
    (options / "config.toml").write_text(
        "accept-nvidia-visible-devices-envvar-when-unprivileged = true\n"
        f'[nvidia-container-runtime]\nmode = "cdi"\nruntimes = ["{runc}"]\n'
        "[nvidia-container-runtime.modes.cdi]\n"
        f'default-kind = "nvidia.com/gpu"\nspec-dirs = ["{tmp_path}/cdi"]\n'
    )
    return tmp_path


def bundle(folder: Path, environment: list[str]) -> Path:
    folder.mkdir()
    config = {
        "ociVersion": "1.0.2",
        "process": {"args": ["sh"], "cwd": "/", "env": ["PATH=/bin", *environment], "user": {"uid": 0, "gid": 0}},
        "root": {"path": "rootfs"},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid"]},
        ],
        "linux": {"resources": {"devices": [{"allow": False, "access": "rwm"}]}},
    }
    (folder / "rootfs").mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def start(command: list[str], host: Path, folder: Path) -> tuple[int, dict[str, Any], list[str]]:
    """Creates the bundle's container; returns the exit status, its configuration, and the arguments that reached
    runc."""
    words = ["--root", "/r", "--log", str(folder / "log.json"), "--log-format", "json"]
    words += ["create", "--bundle", str(folder), "--pid-file", str(folder / "pid"), "box"]
    reached = host / "runc.words"
    reached.unlink(missing_ok=True)
    done = subprocess.run(
        [*command, *words],
        env={**os.environ, "XDG_CONFIG_HOME": str(host)},
        capture_output=True,
        text=True,
        check=False,
    )
    # Each program runs in its own folder, so the folder's name is removed before the comparison.
    heard = reached.read_text().replace(str(folder), "").split() if reached.exists() else []
    return done.returncode, json.loads((folder / "config.json").read_text()), heard


def received(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the parts of a configuration that define the container's GPU access; the order of independent entries
    is ignored."""
    linux = config["linux"]
    return {
        "env": sorted(config["process"]["env"]),
        "mounts": sorted(
            (one["destination"], one["source"], sorted(one.get("options", []))) for one in config["mounts"]
        ),
        "devices": sorted((one["path"], one["type"], one["major"], one["minor"]) for one in linux.get("devices", [])),
        "rules": sorted(json.dumps(one, sort_keys=True) for one in linux["resources"]["devices"]),
        "hooks": config.get("hooks", {}),
    }


# columns: the container's environment; its expected device nodes (None means that it must not start)
CASES = [
    ([f"NVIDIA_VISIBLE_DEVICES={GPUS[1]}"], ["/dev/nvidia1", "/dev/nvidiactl"]),
    (["NVIDIA_VISIBLE_DEVICES=0"], ["/dev/nvidia0", "/dev/nvidiactl"]),
    ([f"NVIDIA_VISIBLE_DEVICES={GPUS[1]},0"], ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"]),
    (["NVIDIA_VISIBLE_DEVICES=all"], ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"]),
    (["NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=1"], ["/dev/nvidia1", "/dev/nvidiactl"]),
    (["NVIDIA_VISIBLE_DEVICES=void"], []),
    (["NVIDIA_VISIBLE_DEVICES="], []),
    ([], []),
    (["NVIDIA_VISIBLE_DEVICES=GPU-nosuch"], None),
    (["NVIDIA_VISIBLE_DEVICES=0,7"], None),
]


# Only the simulated runtime is tested with "none". NVIDIA's documentation says "no GPU", but in this mode NVIDIA's
# program looks for a CDI device named "none" and fails.
NONE = (["NVIDIA_VISIBLE_DEVICES=none"], [])


@pytest.mark.parametrize(("environment", "nodes"), [*CASES, NONE])
def test_simulated_runtime_injects_the_requested_gpus(
    host: Path, environment: list[str], nodes: list[str] | None
) -> None:
    code, config, heard = start([sys.executable, str(OURS)], host, bundle(host / "ours", environment))
    assert (code == 0) is (nodes is not None)
    assert bool(heard) is (nodes is not None)
    assert [device[0] for device in received(config)["devices"]] == (nodes or [])


def with_mount(folder: Path, source: str, destination: str) -> Path:
    path = bundle(folder, ["NVIDIA_VISIBLE_DEVICES=void"]) / "config.json"
    config = json.loads(path.read_text())
    config["mounts"].append({"destination": destination, "source": source, "type": "bind", "options": ["ro", "rbind"]})
    path.write_text(json.dumps(config))
    return folder


def test_container_with_the_driver_gets_the_simulated_hosts_profile_and_state(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vgpuctl run mounts the driver's libraries and requests nothing of this runtime. A real driver needs no more, but
    the simulated one finds its GPUs only by two files of the host."""
    profile, state = host / "host.profile", host / "state"
    profile.write_text("[gpu]\n")
    monkeypatch.setenv("GPUSIM_PROFILE", str(profile))
    monkeypatch.setenv("GPUSIM_STATE", str(state))
    library = "/usr/lib/x86_64-linux-gnu/libcuda.so.1"
    code, config, _heard = start([sys.executable, str(OURS)], host, with_mount(host / "slice", library, library))
    assert code == 0
    found = {one["destination"]: one["options"][0] for one in config["mounts"] if one["source"].startswith(str(host))}
    assert found == {str(profile): "ro", str(state): "rw"}

    # A mount that the user made at the same path stays, and a container without the driver gets nothing.
    own = with_mount(host / "own", library, library)
    text = (own / "config.json").read_text().replace('"destination": "/proc"', f'"destination": "{state}"')
    (own / "config.json").write_text(text)
    mounts = start([sys.executable, str(OURS)], host, own)[1]["mounts"]
    assert [one["source"] for one in mounts if one["destination"] == str(state)] == ["proc"]
    other = with_mount(host / "other", "/etc/hostname", "/etc/hostname")
    before = json.loads((other / "config.json").read_text())
    assert start([sys.executable, str(OURS)], host, other)[1] == before


@pytest.mark.parametrize(("environment", "nodes"), CASES)
def test_simulated_runtime_equals_nvidias(
    nvidias: Path, host: Path, environment: list[str], nodes: list[str] | None
) -> None:
    ours = start([sys.executable, str(OURS)], host, bundle(host / "ours", environment))
    theirs = start([str(nvidias)], host, bundle(host / "theirs", environment))
    assert (ours[0] == 0) == (theirs[0] == 0)
    assert ours[2] == theirs[2]
    assert received(ours[1]) == received(theirs[1])
