# SPDX-License-Identifier: Apache-2.0
"""Tests faults of package installation. If a package cannot be installed, the message must name host and step, the host
must be unchanged, and a run after the repair must succeed.

Each test causes one fault for a real apt, runs one role, inspects the host without the role's code, repairs the fault
and runs the role again.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import INVENTORY, ROOT, Node, environment, play

HOST = "gpu-t4-1"
APT = "/opt/vgpu-demo/apt"
SPOILED = "/srv/spoiled"
BUS, ADDRESS = "/sys/bus/pci/devices", "0000:1b:00.0"
# Folders that roles write to; apt's and dpkg's caches and logs change without roles.
LOOKED_AT = "/etc /usr /opt /srv /var/lib/vgpu"


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    yield Node(HOST)


def role(name: str, folder: Path, *options: str, **variables: Any) -> subprocess.CompletedProcess[str]:
    """Runs one role on the host."""
    play = [{"hosts": HOST, "gather_facts": False, "tasks": [{"ansible.builtin.import_role": {"name": name}}]}]
    (folder / "play.yml").write_text(yaml.safe_dump(play))
    (folder / "vars.yml").write_text(yaml.safe_dump(variables))
    ansible = str(Path(sys.executable).parent / "ansible-playbook")
    return subprocess.run(
        [ansible, str(folder / "play.yml"), "-i", str(INVENTORY), "-e", f"@{folder / 'vars.yml'}", *options],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def state(node: Node) -> set[str]:
    """Returns a line for every file in the folders that roles write to, with its digest, and for the state of every
    package. A failed comparison of two sets shows the lines that differ.
    """
    files = node.shell(f"find {LOOKED_AT} -xdev -type f ! -path '*__pycache__*' -exec sha256sum {{}} + | sort -k2")
    return {*files.splitlines(), *node.run("dpkg-query", "-W", "-f", "${Package} ${Status} ${Version}\n").splitlines()}


def packages(node: Node) -> set[str]:
    lines = node.run("dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n").splitlines()
    return {line.split()[0] for line in lines if not line.endswith(" not-installed")}


def signed(node: Node, folder: Path) -> dict[str, str]:
    """Signs the repository with a key; returns the public texts of this key and of a second key."""
    keys = {}
    for name in ("right", "wrong"):
        home = folder / name
        home.mkdir(mode=0o700)
        gpg = ["gpg", "--homedir", str(home), "--batch", "--quiet", "--passphrase", "", "--pinentry-mode", "loopback"]
        subprocess.run([*gpg, "--quick-gen-key", f"{name}@example.com", "rsa2048", "sign", "never"], check=True)
        done = subprocess.run([*gpg, "--armor", "--export"], check=True, stdout=subprocess.PIPE, text=True)
        keys[name] = done.stdout
        if name == "right":
            (folder / "Release").write_text(node.read(f"{APT}/Release"))
            subprocess.run([*gpg, "--clearsign", "-o", str(folder / "InRelease"), str(folder / "Release")], check=True)
        subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=False)
    node.shell(f"rm -rf {SPOILED}; mkdir -p {SPOILED}; cp -r {APT}/. {SPOILED}/")
    node.copy(folder / "InRelease", f"{SPOILED}/InRelease")
    return keys


def repository(**more: Any) -> dict[str, Any]:
    return {"uris": [f"file:{APT}"], "suites": ["./"], "trusted": True, **more}


TOOLKIT = "vgpu.fleet.nvidia_docker"
DRIVER = "vgpu.fleet.nvidia_driver"

# columns: role, variables of the role; expected texts in the message
REFUSALS = [
    (DRIVER, {"nvidia_driver_version": "535.1-1"}, ["no version 535.1-1; there are 535."]),
    (DRIVER, {"nvidia_driver_branch": "580"}, ["has the branches 470, 535 and not 580"]),
    (DRIVER, {"nvidia_driver_version": "367.57"}, ["too old; expected 384.81 or newer"]),
    (
        DRIVER,
        {"nvidia_driver_source": "mirror", "nvidia_driver_repository": {"uris": ["http://127.0.0.1:9/x"]}},
        ["http://127.0.0.1:9/x", "The sources of apt are as they were."],
    ),
    (
        TOOLKIT,
        {"nvidia_docker_toolkit_version": "9.9.9-1", "nvidia_docker_repository": repository()},
        ["no version 9.9.9-1; there are 1.20.0-1, 1.19.1-1"],
    ),
    (
        TOOLKIT,
        {"nvidia_docker_repository": repository(uris=["file:/nowhere"])},
        ["/nowhere", "The sources of apt are as they were."],
    ),
]


@pytest.mark.parametrize(
    "name, variables, words", REFUSALS, ids=[f"{row[0][11:]}-{row[2][0][:24]}" for row in REFUSALS]
)
def test_a_missing_package_is_named_and_the_host_is_unchanged(
    node: Node, tmp_path: Path, name: str, variables: dict[str, Any], words: list[str]
) -> None:
    before = state(node)
    run = role(name, tmp_path, **variables)
    assert run.returncode == 2, run.stdout
    assert f"fatal: [{HOST}]" in run.stdout
    for word in words:
        assert word in run.stdout
    assert state(node) == before


def test_mirror_that_answers_404_is_reported(node: Node, tmp_path: Path) -> None:
    before = state(node)
    server = node.start("python3", "-m", "http.server", "8404", "--bind", "127.0.0.1", "--directory", "/opt/vgpu-demo")
    try:
        node.shell(
            "for n in $(seq 50); do python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 8404))' && "
            "break; sleep 0.1; done"
        )
        missing = repository(uris=["http://127.0.0.1:8404/nowhere"])
        run = role(TOOLKIT, tmp_path, nvidia_docker_repository=missing)
        assert run.returncode == 2, run.stdout
        assert "404" in run.stdout
        assert f"fatal: [{HOST}]" in run.stdout
        assert state(node) == before
        healed = role(TOOLKIT, tmp_path, nvidia_docker_repository=repository(uris=["http://127.0.0.1:8404/apt"]))
        assert healed.returncode == 0, healed.stdout
        assert "1.20.0-1" in node.run("dpkg-query", "-W", "nvidia-container-toolkit")
    finally:
        node.run("pkill", "-f", "http.server 8404", check=False)
        server.wait()
    back(node, tmp_path, before)


def test_wrong_signing_key_is_refused(node: Node, tmp_path: Path) -> None:
    before = state(node)
    keys = signed(node, tmp_path)
    spoiled = state(node)
    try:
        source = repository(uris=[f"file:{SPOILED}"], trusted=False)
        run = role(TOOLKIT, tmp_path, nvidia_docker_repository={**source, "key": keys["wrong"]})
        assert run.returncode == 2, run.stdout
        assert "NO_PUBKEY" in run.stdout or "not signed" in run.stdout
        assert f"fatal: [{HOST}]" in run.stdout
        assert state(node) == spoiled
        healed = role(TOOLKIT, tmp_path, nvidia_docker_repository={**source, "key": keys["right"]})
        assert healed.returncode == 0, healed.stdout
        assert "1.20.0-1" in node.run("dpkg-query", "-W", "nvidia-container-toolkit")
        role(TOOLKIT, tmp_path, nvidia_docker_state="absent", nvidia_docker_repository=repository())
    finally:
        node.shell(f"rm -rf {SPOILED}")
    assert state(node) == before


def test_old_lists_and_their_keys_are_removed_and_restored(node: Node, tmp_path: Path) -> None:
    """The role removes two stale keys: one that is valid for all sources, and one that the old list names. A key of
    another owner stays. The rollback restores list and keys."""
    before = state(node)
    keys = signed(node, tmp_path)
    lists, trusted = "/etc/apt/sources.list.d", "/etc/apt/trusted.gpg.d"
    gpg = ["gpg", "--homedir", str(tmp_path / "right"), "--batch", "--quiet"]
    done = subprocess.run([*gpg, "--with-colons", "--list-keys"], check=True, stdout=subprocess.PIPE, text=True)
    key_id = next(line.split(":")[4] for line in done.stdout.splitlines() if line.startswith("pub:"))
    (tmp_path / "old.gpg").write_bytes(subprocess.run([*gpg, "--export"], check=True, stdout=subprocess.PIPE).stdout)
    old = [f"{trusted}/nvidia-docker.gpg", "/usr/share/keyrings/nvidia-docker.gpg"]
    stale, theirs = f"{lists}/nvidia-docker.list", f"{trusted}/theirs.asc"
    try:
        for path in old:
            node.copy(tmp_path / "old.gpg", path)
        node.write(theirs, keys["wrong"])
        node.write(stale, f"deb [signed-by={old[1]}] https://nvidia.github.io/nvidia-docker/debian11/amd64 /\n")
        laid = state(node)
        more = {"nvidia_docker_repository": repository(), "__nvidia_docker_stale_keys": [key_id]}
        assert role(TOOLKIT, tmp_path, "--check", "--diff", **more).returncode == 0
        assert state(node) == laid
        run = role(TOOLKIT, tmp_path, "--diff", **more)
        assert run.returncode == 0, run.stdout
        there = node.shell(f"ls {stale} {theirs} {' '.join(old)} 2>/dev/null || true").split()
        assert there == [theirs]
        assert "changed=0 " in role(TOOLKIT, tmp_path, **more).stdout
        back(node, tmp_path, laid)
    finally:
        node.shell(f"rm -rf {SPOILED} {stale} {theirs} {' '.join(old)}")
    assert state(node) == before


def test_a_full_disk(node: Node, tmp_path: Path) -> None:
    """dpkg runs out of space during unpacking; the installed packages are recorded and removed again."""
    before = state(node)
    folder = f"/usr/lib/{node.run('gcc', '-print-multiarch', check=False).strip() or 'x86_64-linux-gnu'}/nvidia"
    node.shell(f"mkdir -p {folder}; mount -t tmpfs -o size=64k tmpfs {folder}")
    try:
        run = role(DRIVER, tmp_path)
    finally:
        node.shell(f"umount {folder}")
    assert run.returncode == 2, run.stdout
    assert "No space left on device" in run.stdout
    assert "the install of nvidia-smi" in run.stdout
    assert f"fatal: [{HOST}]" in run.stdout
    heal(node, tmp_path, before)


@contextlib.contextmanager
def card(node: Node, device: str) -> Iterator[None]:
    """Shows the host one GPU on its PCI bus, by a mount over sysfs that only this host sees."""
    place = f"{BUS}/{ADDRESS}"
    facts = {"vendor": "0x10de", "class": "0x030200", "device": device}
    words = "; ".join(f"echo {value} > {place}/{name}" for name, value in facts.items())
    node.shell(f"mount -t tmpfs tmpfs {BUS}; mkdir {place}; {words}")
    try:
        yield
    finally:
        node.shell(f"umount {BUS}")


# columns: PCI device id of the GPU, variables of the role; expected text in the message
UNDRIVEN = [
    ("0x102d", {"nvidia_driver_branch": "535"}, f"branch 535 no longer supports the Kepler GPU at {ADDRESS}"),
    ("0x2901", {"nvidia_driver_branch": "535"}, f"branch 535 is older than the Blackwell GPU at {ADDRESS}"),
    ("0x2901", {}, "no branch that drives all GPUs of this host together (Blackwell)"),
]


@pytest.mark.parametrize("device, variables, words", UNDRIVEN, ids=["too old", "too new", "no branch"])
def test_an_unsupported_gpu_is_named_before_any_install(
    node: Node, tmp_path: Path, device: str, variables: dict[str, Any], words: str
) -> None:
    before = state(node)
    with card(node, device):
        alone = role(DRIVER, tmp_path, **variables)
        # The plan, made before any role runs, reports the same error and ends the run.
        whole = play("--limit", HOST, "-e", json.dumps(variables))
    for run in (alone, whole):
        assert run.returncode == 2, run.stdout
        assert words in " ".join(run.stdout.split())
        assert f"fatal: [{HOST}]" in run.stdout
        assert state(node) == before
    assert "TASK [vgpu.fleet.nvidia_driver" not in whole.stdout
    if variables and device == UNDRIVEN[0][0]:
        # The same variables work on the host without this GPU.
        assert role(DRIVER, tmp_path, **variables).returncode == 0
        assert role(DRIVER, tmp_path, nvidia_driver_state="absent").returncode == 0
        assert state(node) == before


TOKEN = "/etc/nvidia/ClientConfigToken/client_configuration_token_vgpu.tok"
GRIDD = "nvidia-gridd.service"


def shown(node: Node, *properties: str) -> list[str]:
    words = [word for name in properties for word in ("-p", name)]
    return node.run("systemctl", "show", "--value", *words, GRIDD).split()


def test_a_vgpu_guest_gets_its_licence(node: Node, tmp_path: Path) -> None:
    """The role writes gridd.conf and the token, and starts the licence service, which reads both files. NVIDIA's
    service is in no public package, so a program that waits replaces it. No output shows the token, and the rollback
    removes the token with the other files."""
    unit = f"/etc/systemd/system/{GRIDD}"
    node.write(unit, "[Service]\nExecStart=/bin/sleep infinity\n[Install]\nWantedBy=multi-user.target\n")
    node.run("systemctl", "daemon-reload")
    before, token = state(node), tmp_path / "token"
    folders = node.shell("ls -d /etc/nvidia /etc/nvidia/* 2>/dev/null || true")
    variables = {
        "nvidia_driver_source": "mirror",
        "nvidia_driver_repository": repository(),
        "nvidia_driver_packages": ["libcuda1"],
        "nvidia_driver_vgpu_guest": True,
        "nvidia_driver_vgpu_license_server": "licences.site.example",
        "nvidia_driver_vgpu_token_file": str(token),
    }
    try:
        lacking = role(DRIVER, tmp_path, "--diff", **variables)
        assert lacking.returncode != 0 and str(token) in lacking.stdout, lacking.stdout
        assert state(node) == before
        for text in ("c2VjcmV0LW9uZQ", "c2VjcmV0LXR3bw"):
            token.write_text(text)
            said = [role(DRIVER, tmp_path, "--diff", "-vvv", *check, **variables) for check in (["--check"], [])]
            for run in said:
                assert run.returncode == 0, run.stdout
                assert text not in run.stdout, "expected no token in the output"
            assert node.read(TOKEN) == text
            assert node.run("stat", "-c", "%a %U %G", TOKEN).split() == ["600", "root", "root"]
            assert sorted(shown(node, "UnitFileState", "ActiveState")) == ["active", "enabled"]
            # The service started after the files that it reads were written.
            started = node.run(
                "systemctl", "show", "--value", "--timestamp=unix", "-p", "ExecMainStartTimestamp", GRIDD
            )
            assert int(started.strip().lstrip("@")) >= int(node.run("stat", "-c", "%Y", TOKEN))
            assert "changed=0 " in role(DRIVER, tmp_path, **variables).stdout
        conf = node.read("/etc/nvidia/gridd.conf").splitlines()
        assert conf[1:] == ["FeatureType=4", "ServerAddress=licences.site.example", "ServerPort=7070"]
        gone = role(DRIVER, tmp_path, **{**variables, "nvidia_driver_state": "absent"})
        assert gone.returncode == 0, gone.stdout
        assert state(node) == before
        assert node.shell("ls -d /etc/nvidia /etc/nvidia/* 2>/dev/null || true") == folders
        assert shown(node, "ActiveState") == ["inactive"]
    finally:
        node.run("systemctl", "disable", "--now", GRIDD, check=False)
        node.run("rm", unit)
        node.run("systemctl", "daemon-reload")


def interrupted_unpack(node: Node) -> None:
    """Simulates a power cut: a package is unpacked and not configured."""
    node.shell("cd /var/cache/apt/archives && apt-get -qq download libnvidia-ml1 2>/dev/null || true")
    node.shell(f"dpkg --unpack {APT}/pool/libnvidia-container1_1.20.0-1_*.deb")


def killed_apt(node: Node) -> None:
    """Kills apt in the middle of its transaction."""
    command = "apt-get -y install --no-install-recommends docker.io"
    process = node.start("sh", "-c", f"DEBIAN_FRONTEND=noninteractive {command}")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(("Unpacking", "Selecting")):
            break
    node.shell("for pid in $(pidof dpkg apt-get dpkg-deb); do kill -9 $pid || true; done")
    process.wait()
    time.sleep(0.5)


@pytest.mark.parametrize("spoil", [interrupted_unpack, killed_apt])
def test_a_run_repairs_an_interrupted_apt(node: Node, tmp_path: Path, spoil: Callable[[Node], None]) -> None:
    before = packages(node)
    spoil(node)
    assert node.run("dpkg", "--audit").strip(), (
        "the interruption left no unfinished package, so this test proves nothing; run it again"
    )
    run = role(DRIVER, tmp_path)
    assert run.returncode == 0, run.stdout
    assert node.run("dpkg", "--audit").strip() == ""
    assert "nvidia-smi" in node.run("dpkg-query", "-W", "-f", "${Package}\n").split()
    again = role(DRIVER, tmp_path)
    assert "changed=0" in again.stdout
    role(DRIVER, tmp_path, nvidia_driver_state="absent")
    # A killed apt has not recorded which packages it installed as dependencies, so autoremove could leave them. With a
    # containerd left here, the next test's role would find another engine.
    left = " ".join(sorted(packages(node) - before))
    node.shell(f"DEBIAN_FRONTEND=noninteractive apt-get -qq -y purge {left}")
    assert packages(node) == before


def heal(node: Node, tmp_path: Path, before: tuple[str, str]) -> None:
    """Checks that a second run of the driver's role installs the package and that the rollback restores the host."""
    assert role(DRIVER, tmp_path).returncode == 0
    assert node.run("apt-mark", "showhold").split() == ["libcuda1", "libnvidia-ml1", "nvidia-smi"]
    assert "changed=0" in role(DRIVER, tmp_path).stdout
    assert role(DRIVER, tmp_path, nvidia_driver_state="absent").returncode == 0
    assert node.run("apt-mark", "showhold").split() == []
    assert state(node) == before


def back(node: Node, tmp_path: Path, before: tuple[str, str]) -> None:
    assert role(TOOLKIT, tmp_path, nvidia_docker_state="absent", nvidia_docker_repository=repository()).returncode == 0
    assert state(node) == before


def test_package_files_are_installed_without_any_repository(node: Node, tmp_path: Path) -> None:
    """Package files in a folder become a repository; apt resolves versions and dependencies and rolls back."""
    before = state(node)
    pool = node.shell(f"ls {APT}/pool/*_1.19.1-1_*.deb {APT}/pool/nvidia-docker2_2.14.0-1_*.deb").split()
    run = role(TOOLKIT, tmp_path, nvidia_docker_files=pool, nvidia_docker_repository={})
    assert run.returncode == 0, run.stdout
    versions = node.run(
        "dpkg-query", "-W", "-f", "${Package} ${Version}\n", "nvidia-container-toolkit", "nvidia-docker2"
    )
    assert versions.split() == ["nvidia-container-toolkit", "1.19.1-1", "nvidia-docker2", "2.14.0-1"]
    assert "changed=0" in role(TOOLKIT, tmp_path, nvidia_docker_files=pool, nvidia_docker_repository={}).stdout
    back(node, tmp_path, before)
