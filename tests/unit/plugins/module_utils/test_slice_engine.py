# SPDX-License-Identifier: Apache-2.0
"""Which engine runs the isolation check, on hosts that are clients of a few lines; and what is taken away again."""

from __future__ import annotations

import json
import os
import stat
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils import (
    slice_containerd,
    slice_engine,
    slice_image,
    slice_runner,
)

UUID = "GPU-1"
DEAD = 2**22 + 1  # above the greatest pid of Linux
NO_NVIDIA = {"info": "print('{\"runc\":{}}')"}
LAY_OUT = slice_image.lay_out
HANGS = {"import": "time.sleep(600)"}


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Makes clients: what a command does is Python text. All answers are good ones, unless told."""
    monkeypatch.setattr(slice_engine, "ROOTS", str(tmp_path / "isolation-"))
    monkeypatch.setattr(slice_image, "pack", lambda _probe: b"tar of the host")
    monkeypatch.setattr(slice_image, "lay_out", lambda _tar, folder: Path(folder).mkdir())
    monkeypatch.setattr(slice_containerd, "EMPTY_FOLDERS", ())

    def make(**clients: dict) -> dict:
        params = {"runtime": "auto", "image": "", "cdi_folders": [str(tmp_path)]}
        params.update({name: str(tmp_path / name) for name in ("docker", "podman", "ctr", "nvidia_runtime")})
        for name, commands in clients.items():
            table = {"info": "print('{\"nvidia\":{}}')", "image": "sys.exit('No such image')", **commands}
            program = tmp_path / name
            program.write_text(
                f"#!{sys.executable} -S\nimport sys, time\nwords = ' '.join(sys.argv[1:])\n"
                f"open({str(tmp_path / 'calls')!r}, 'a').write({name!r} + ' ' + words + '\\n')\n"
                f"exec({table!r}.get(sys.argv[1], ''))\n"
            )
            program.chmod(0o755)
        return params

    return make


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []


def with_cdi(tmp_path: Path) -> None:
    spec = {"kind": "vgpu.fleet/gpu", "devices": [{"name": UUID}]}
    (tmp_path / "vgpu.json").write_text(json.dumps(spec))


def lease(**more) -> slice_engine.Lease:
    given = {"mounts": [], "words": [], "environment": {}, "devices": [], "cdi_devices": [], **more}
    return slice_engine.Lease(UUID, [0], "/probe", **given)


IMAGE = {"image": "print('[{}]')"}
OWN = slice_engine.OWN_FILES
CHOICES = [
    # about, the clients, whether NVIDIA's runtime and CDI are there, options, the runner, its image, reasons
    ("nothing", {}, False, {}, "namespace", "", 3),
    ("docker", {"docker": {}}, False, {}, "docker", OWN, 0),
    ("docker that knows no NVIDIA", {"docker": NO_NVIDIA}, False, {}, "namespace", "", 3),
    ("docker that does not answer", {"docker": {"info": "sys.exit('no daemon')"}}, False, {}, "namespace", "", 3),
    ("docker that hangs at the image", {"docker": HANGS}, False, {}, "namespace", "", 3),
    ("docker that refuses the image", {"docker": {"import": "sys.exit('full')"}}, False, {}, "namespace", "", 3),
    ("containerd", {"ctr": {}}, True, {}, "containerd", OWN, 1),
    ("containerd without NVIDIA's runtime", {"ctr": {}}, False, {}, "namespace", "", 3),
    ("podman", {"podman": {}}, True, {}, "podman", OWN, 2),
    ("podman without the plugin's CDI files", {"podman": {}}, False, {}, "namespace", "", 3),
    ("all of them", {"docker": {}, "ctr": {}, "podman": {}}, True, {}, "docker", OWN, 0),
    ("all, and docker has no NVIDIA", {"docker": NO_NVIDIA, "ctr": {}, "podman": {}}, True, {}, "containerd", OWN, 1),
    ("a namespace is wanted", {"docker": {}}, True, {"runtime": "namespace"}, "namespace", "", 0),
    ("podman is wanted", {"docker": {}, "podman": {}}, True, {"runtime": "podman"}, "podman", OWN, 0),
    ("a named image", {"docker": IMAGE}, False, {"image": "debian:12"}, "docker", "debian:12", 0),
    ("podman alone has it", {"docker": {}, "podman": IMAGE}, True, {"image": "debian:12"}, "podman", "debian:12", 2),
    ("nobody has it", {"docker": {}}, False, {"image": "debian:12"}, "namespace", "", 3),
    ("nobody has it, containerd needs none", {"docker": {}, "ctr": {}}, True, {"image": "d:1"}, "containerd", OWN, 1),
]


@pytest.mark.parametrize(
    ("about", "clients", "gpus", "options", "name", "image", "reasons"), CHOICES, ids=[one[0] for one in CHOICES]
)
def test_choice(host, tmp_path, monkeypatch, about, clients, gpus, options, name, image, reasons):
    if clients.get("docker") is HANGS:
        monkeypatch.setattr(slice_runner, "ASK_S", 0.5)  # where an answer comes late too it is the same
    params = {**host(**clients), **options}
    if gpus:
        with_cdi(tmp_path)
        Path(params["nvidia_runtime"]).write_text("")
    engines = slice_engine.Engines(params)
    runner = engines.runner(lease())
    assert (runner.name, engines.image, len(engines.reasons)) == (name, image, reasons), engines.reasons
    engines.runner(lease())
    made = [one for one in calls(tmp_path) if " import " in one]
    assert len(made) <= (2 if "hang" in about or "refuses" in about else 1), "made once for all slices"
    engines.close()
    # What was made is gone, and nobody else's is touched.
    removed = [one.split()[-1] for one in calls(tmp_path) if " rmi " in one]
    wanted = {one.split()[-1] for one in made} if image == OWN else set()
    assert set(removed) == wanted
    assert not list(tmp_path.glob("isolation-*"))


def test_runtime_that_is_asked_for_and_not_there(host):
    for runtime, client in (("docker", "docker"), ("podman", "podman"), ("containerd", "ctr")):
        with pytest.raises(slice_runner.RunnerError, match=f"runtime: {runtime} is asked for, and .*{client} does not"):
            slice_engine.Engines({**host(), "runtime": runtime}).runner(lease())


@pytest.mark.parametrize(
    ("given", "wanted"),
    [({}, UUID), ({"NVIDIA_VISIBLE_DEVICES": "void"}, UUID), ({"NVIDIA_VISIBLE_DEVICES": "x"}, "x")],
)
def test_containerd_asks_for_the_gpu(host, tmp_path, given, wanted):
    """An answer for the kubelet's CDI has no variable, or void, and nobody but the kubelet would read the rest."""
    params = host(ctr={})
    Path(params["nvidia_runtime"]).write_text("")
    runner = slice_engine.Engines(params).runner(lease(environment=given))
    command = runner._start("c1", ["true"])
    assert f"NVIDIA_VISIBLE_DEVICES={wanted}" in command
    assert command.index("c1") > command.index(params["nvidia_runtime"]) > command.index("--runc-binary")


LISTED = [
    # about, the tag's pid, repository, whether it goes
    ("of a run that is dead", DEAD, slice_engine.REPOSITORY, True),
    ("of a run that lives", os.getpid(), slice_engine.REPOSITORY, False),
    ("of somebody else", DEAD, "localhost/vgpu-isolation-of-theirs", False),
    ("of nobody's pid", "latest", slice_engine.REPOSITORY, False),
]


@pytest.mark.parametrize(("about", "pid", "repository", "goes"), LISTED, ids=[one[0] for one in LISTED])
@pytest.mark.parametrize("labels", ["a=b,vgpu.isolation={}", "map[vgpu.isolation:{} x:y]"], ids=["docker", "podman"])
def test_sweep(host, tmp_path, about, pid, repository, goes, labels):
    theirs = repository != slice_engine.REPOSITORY
    listed = labels.format("no-pid" if theirs else pid)
    params = host(docker={"ps": f"print('c7 {listed}')", "image": f"print('{repository}:{pid}-9')"})
    wanted = ["c7", f"{repository}:{pid}-9"] if goes else []
    assert slice_engine.left_behind(params) == wanted
    assert not [one for one in calls(tmp_path) if " rm" in one], "a look removes nothing"
    assert slice_engine.sweep(params) == (wanted, [])
    done = [one for one in calls(tmp_path) if " rm" in one]
    assert done == (["docker rm --force c7", f"docker rmi {repository}:{pid}-9"] if goes else [])


def test_sweep_that_is_refused(host):
    """What stays is no change, and is named."""
    image = f"{slice_engine.REPOSITORY}:{DEAD}-9"
    answers = {"ps": f"print('c7 vgpu.isolation={DEAD}')", "image": f"print('{image}')"}
    assert slice_engine.sweep(host(docker={**answers, "rmi": "sys.exit('in use')"})) == (["c7"], [image])
    assert slice_engine.sweep(host(docker={**answers, "rm": "sys.exit('stuck')"})) == ([image], ["c7"])


def test_sweep_of_containerd(host, tmp_path):
    dead, alive = tmp_path / f"isolation-{DEAD}", tmp_path / f"isolation-{os.getpid()}"
    theirs = tmp_path / "isolation-notes"
    for one in (dead, alive, theirs):
        one.mkdir()
    names = f"print('vgpu-isolation-{DEAD}-1\\nvgpu-isolation-1-2\\nthe-container-of-{DEAD}-1')"
    params = host(ctr={"--namespace": f"{names} if 'containers list' in words else None"})
    assert slice_engine.sweep(params) == ([str(dead)], [])
    assert (dead.exists(), alive.exists(), theirs.exists()) == (False, True, True)
    deleted = [one for one in calls(tmp_path) if "containers delete" in one]
    assert [one.split()[-1] for one in deleted] == [f"vgpu-isolation-{DEAD}-1"], "pid 1 lives, and one is theirs"


@pytest.mark.parametrize("image", ["", "debian:12"])
def test_a_later_check_sweeps(host, tmp_path, image):
    """Of a named image too; once, and before a container of its own."""
    params = host(docker={**IMAGE, "ps": f"print('c7 vgpu.isolation={DEAD}')"})
    engines = slice_engine.Engines({**params, "image": image})
    for _slice in range(2):
        engines.runner(lease())
    done = [one.split()[1:] for one in calls(tmp_path)]
    assert [one for one in done if one[0] == "rm"] == [["rm", "--force", "c7"]]


def test_root_that_cannot_be_laid_out(host, tmp_path, monkeypatch):
    """A full disk: the next slice is not run in what is there of a root, nor is it left."""
    params = host(ctr={})
    Path(params["nvidia_runtime"]).write_text("")
    monkeypatch.setattr(slice_image, "lay_out", LAY_OUT)
    monkeypatch.setattr(slice_image, "pack", lambda _probe: that_does_not_fit())
    engines = slice_engine.Engines(params)
    for _slice in range(2):
        assert engines.runner(lease()).name == "namespace", engines.reasons
        assert not list(tmp_path.glob("isolation-*"))
    engines.close()


def that_does_not_fit() -> bytes:
    """A tar whose one file needs a folder where a file is."""
    stream = BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as out:
        for name in ("a", "a/b"):
            out.addfile(tarfile.TarInfo(name))
    return stream.getvalue()


def test_root_of_a_killed_run_that_had_our_pid(host, tmp_path):
    params = host(ctr={})
    Path(params["nvidia_runtime"]).write_text("")
    folder = tmp_path / f"isolation-{os.getpid()}"
    folder.mkdir()
    (folder / "old").write_text("")
    engines = slice_engine.Engines(params)
    assert engines.runner(lease()).name == "containerd", engines.reasons
    assert not (folder / "old").exists()
    engines.close()
    assert not folder.exists()


# ---- the root itself


def test_root_of_this_machine(tmp_path):
    """Of what the host's own loader says; the same bytes twice; a shell runs in it, and nothing else is there."""
    tar = slice_image.pack("/bin/true")
    assert tar == slice_image.pack("/bin/true")
    with tarfile.open(fileobj=BytesIO(tar)) as source:
        names = source.getnames()
    assert len(names) == len(set(names))
    assert not [one for one in names if one.startswith("/") or ".." in one.split("/")]
    root = tmp_path / "root"
    slice_image.lay_out(tar, str(root))
    assert stat.S_IMODE((root / "tmp").stat().st_mode) == 0o1777
    shell = root / os.path.realpath("/bin").lstrip("/") / "sh"
    assert shell.read_bytes() == Path("/bin/sh").read_bytes()
    texts = [one.name for one in (root / "etc").iterdir()]
    assert set(texts) <= {"passwd", "group", "debian_version"}, "no file of the host that says anything of it"
    if os.geteuid() == 0:
        pid = os.fork()
        if pid == 0:
            os.chroot(root)
            os.execv("/bin/sh", ["sh", "-c", "exit 7"])
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_program_that_is_none(tmp_path):
    with pytest.raises(slice_image.ImageError, match="program cannot be asked for its libraries"):
        slice_image.needed_by(str(tmp_path / "program"))


def test_program_of_another_libc(monkeypatch):
    monkeypatch.setattr(slice_image, "GLIBC", ("libc.musl.so.1",))
    with pytest.raises(slice_image.ImageError, match="/bin/true is not linked with glibc; its loader said 'linux-vdso"):
        slice_image.needed_by("/bin/true")
