# SPDX-License-Identifier: Apache-2.0
"""Tests a tenant who tries to change the mounts of its allocation. The containers run with a real runc and with
the mounts from a real device plugin's response. Each attempt ends in one of three ways: the kernel refuses the attempt
and the limit holds; the library refuses to create a context and states why; or the process has no library or reads
forged files, which the node's watcher (a program that checks mounts and memory of containers) must find.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from .conftest import BUILD, SLICE_MIB, RealNode

pytestmark = pytest.mark.slow

# These are Docker's capabilities, which Kubernetes' runtimes grant too.
CAPABILITIES = [
    f"CAP_{name}"
    for name in (
        *("CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP", "SETPCAP"),
        *("NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE"),
    )
]
USER = 1000
# A program that allocates all memory it can get, and prints the bytes and whether the library is in its process.
EATER = """
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
int main(void) {
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW), *context = 0;
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(cuda, "cuInit");
    int (*create)(void **, unsigned, int) = (int (*)(void **, unsigned, int))dlsym(cuda, "cuCtxCreate_v2");
    int (*alloc)(unsigned long long *, size_t) = (int (*)(unsigned long long *, size_t))dlsym(cuda, "cuMemAlloc_v2");
    unsigned long long mib = 0, pointer;
    char line[4096];
    int rc = init(0), inside = 0;
    if (rc == 0) rc = create(&context, 0, 0);
    while (rc == 0 && alloc(&pointer, 64 << 20) == 0) mib += 64;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, maps)) inside |= strstr(line, "libvgpu.so") != 0;
    printf("eaten: context %d, %llu MiB, library %s\\n", rc, mib, inside ? "in" : "out");
    return 0;
}
"""
HELD, REFUSED, OUT, FORGED = "the limit holds", "no context", "without the library", "by forged files"


@dataclass
class Result:
    text: str

    @property
    def eaten(self) -> tuple[int, int, str]:
        """The result that the allocating program printed: (result code of the context's creation, allocated MiB, "in"
        if the library was in the process, else "out").
        """
        found = re.findall(r"^eaten: context (\d+), (\d+) MiB, library (\w+)$", self.text, re.MULTILINE)
        assert len(found) == 1, self.text
        return int(found[0][0]), int(found[0][1]), found[0][2]

    @property
    def ended(self) -> str:
        rc, mib, library = self.eaten
        if library == "out":
            return OUT
        if rc:
            return REFUSED if (rc, mib) == (800, 0) else f"context {rc}"
        return HELD if SLICE_MIB - 700 < mib <= SLICE_MIB else FORGED


class Tenant:
    """A tenant that starts containers with the mounts of one allocation."""

    def __init__(self, node: RealNode, folder: Path, mounts: list[tuple[str, str, bool]]) -> None:
        self.node, self.folder, self.mounts = node, folder, mounts
        self.share = next(Path(host) for inside, host, _ro in mounts if inside == "/dev/vgpu/0")
        self.eater = folder / "eater"
        source = folder / "eater.c"
        source.write_text(EATER)
        subprocess.run(["cc", "-O1", "-o", str(self.eater), str(source), "-ldl"], check=True)
        self._count = 0

    def evil(self, folder: Path) -> Path:
        """Creates a tenant's folder of forged files: the files are valid, but their limits allow the whole GPU."""
        from vgpu_plugin._shared.abi import files as abi_files

        found = abi_files.parse_limits((self.share / "limits").read_bytes())
        devices = [{**one, "memory_bytes": 16000 << 20} for one in found["devices"]]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "limits").write_bytes(abi_files.pack_limits(abi_files.as_packed(found, devices=devices)))
        for name in ("ledger", "tenant"):
            (folder / name).touch()
        return folder

    def _root(self, image: Callable[[Path], None] | None) -> Path:
        """Creates a container's root folder. USER owns data, evil and tmp. begin() mounts this machine's programs,
        read-only."""
        root = self.folder / f"root-{self._count}"
        for name in ("usr", "etc", "tmp", "run", "data", "evil"):
            (root / name).mkdir(parents=True)
        for name in ("bin", "lib", "lib64", "sbin"):
            (root / name).symlink_to(f"usr/{name}")
        self.evil(root / "evil")
        if image is not None:
            image(root)
        for name in ("data", "evil", "tmp"):
            for path in [root / name, *(root / name).rglob("*")]:
                os.chown(path, USER, USER, follow_symlinks=False)
        return root

    def begin(
        self,
        script: str,
        user: int = 0,
        image: Callable[[Path], None] | None = None,
        volumes: tuple = (),
        read_only: bool = False,
    ) -> subprocess.Popen:
        self._count += 1
        bundle = self.folder / f"bundle-{self._count}"
        bundle.mkdir()
        subprocess.run(["runc", "spec"], cwd=bundle, check=True)
        config = json.loads((bundle / "config.json").read_text())
        state, profile = self.node.environment["GPUSIM_STATE"], self.node.environment["GPUSIM_PROFILE"]
        os.chmod(state, 0o666)  # All users may access the file, as with a real driver's device nodes.
        host = [(f"/usr/{name}", f"/usr/{name}", True) for name in ("bin", "lib", "lib64", "sbin")]
        host += [(str(BUILD), str(BUILD), True), ("/eat", str(self.eater), True)]
        host += [(state, state, False), (profile, profile, True)]
        # As in a real runtime, a folder is mounted before the folders in it.
        mounts = sorted([*host, *self.mounts, *volumes], key=lambda one: one[0].count("/"))
        config["root"] = {"path": str(self._root(image)), "readonly": read_only}
        config["mounts"] += [
            {
                "destination": inside,
                "source": source,
                "type": "bind",
                "options": ["rbind", "ro" if ro else "rw", "nosuid", "nodev"],
            }
            for inside, source, ro in mounts
        ]
        held = CAPABILITIES if user == 0 else []
        capabilities = dict.fromkeys(("bounding", "effective", "permitted"), held)
        env = ["PATH=/usr/bin:/bin:/usr/sbin", f"LD_LIBRARY_PATH={BUILD / 'gpusim'}"]
        env += [f"GPUSIM_STATE={state}", f"GPUSIM_PROFILE={profile}"]
        config["process"].update(
            terminal=False,
            user={"uid": user, "gid": user},
            args=["/bin/sh", "-c", script],
            env=env,
            capabilities=capabilities,
            noNewPrivileges=user != 0,
        )
        (bundle / "config.json").write_text(json.dumps(config))
        name = f"vgpu-test-{os.getpid()}-{self.folder.name}-{self._count}"
        command = ["runc", "run", "--bundle", str(bundle), name]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, script: str, **options: object) -> Result:
        process = self.begin(script, **options)  # type: ignore[arg-type]
        return Result(process.communicate(timeout=60)[0])


@pytest.fixture
def tenant(node: RealNode, tmp_path: Path) -> Iterator[Tenant]:
    if shutil.which("runc") is None:
        pytest.skip("runc is not installed")
    answer = node.kubelet.run_pod("one")["answer"]
    mounts = [(one["container_path"], one["host_path"], one["read_only"]) for one in answer["mounts"]]
    folder = tmp_path / "tenant"
    folder.mkdir()
    yield Tenant(node, folder, mounts)


@pytest.mark.parametrize("read_only", [False, True], ids=["writable root", "read-only root"])
@pytest.mark.parametrize("user", [0, USER])
def test_unmodified_program_gets_its_slice(tenant: Tenant, user: int, read_only: bool) -> None:
    result = tenant.run("/eat", user=user, read_only=read_only)
    assert result.ended == HELD, result.text


def replaced(path: str) -> str:
    """Returns shell text that moves a folder away and creates the tenant's folder in its place."""
    return f"mv {path} {path}.o && mkdir {path} && cp /evil/* {path}/"


# Attempts by root with Docker's capabilities. columns: the case; the shell command; expected error of the kernel;
# expected result of a program that starts afterwards; expected message of the library
MOVES = [
    ("replace the root of the shares", replaced("/dev/vgpu"), "busy", HELD, ""),
    ("replace the share", replaced("/dev/vgpu/0"), "busy|Read-only", HELD, ""),
    ("replace the library's folder", replaced("/dev/vgpu/lib"), "busy|Read-only", HELD, ""),
    ("create a share", "mkdir /dev/vgpu/1", "Read-only", HELD, ""),
    ("rename the preload file", "mv /etc/ld.so.preload /etc/o", "busy", HELD, ""),
    ("rename the ledger", "mv /dev/vgpu/0/ledger /dev/vgpu/0/o", "busy|Read-only", HELD, ""),
    ("rename /dev", "mv /dev /o", "busy", HELD, ""),
    ("create a file in the share", "touch /dev/vgpu/0/new", "Read-only", HELD, ""),
    ("remove the limits", "rm -f /dev/vgpu/0/limits", "Read-only", HELD, ""),
    ("overwrite the limits", "cp /evil/limits /dev/vgpu/0/limits", "Read-only", HELD, ""),
    ("rename the limits", "mv /dev/vgpu/0/limits /dev/vgpu/0/o", "Read-only", HELD, ""),
    ("remove the ledger", "rm -f /dev/vgpu/0/ledger", "busy|Read-only", HELD, ""),
    ("create a file in the library's folder", "touch /dev/vgpu/lib/new", "Read-only", HELD, ""),
    ("remove the library", "rm -f /dev/vgpu/lib/libvgpu.so", "Read-only", HELD, ""),
    ("rename the library", "mv /dev/vgpu/lib/libvgpu.so /dev/vgpu/lib/o", "Read-only", HELD, ""),
    ("mount over the share", "mount --bind /evil /dev/vgpu/0", "denied|permitted|permission", HELD, ""),
    ("unmount the share", "umount /dev/vgpu/0", "denied|permitted|superuser", HELD, ""),
    # The loader reads its preload list from /etc only; that folder belongs to the container.
    ("replace /etc", "mv /etc /o && mkdir /etc", "", OUT, ""),
]


@pytest.mark.parametrize(("about", "does", "says", "ends", "line"), MOVES, ids=[one[0] for one in MOVES])
def test_root_of_the_container_cannot_replace_the_limits(
    tenant: Tenant, about: str, does: str, says: str, ends: str, line: str
) -> None:
    result = tenant.run(f"({does}) 2>&1 && echo done; /eat")
    assert (result.ended, "done\n" in result.text) == (ends, not says), result.text
    assert re.search(says, result.text), result.text
    assert not line or f"no context is created: {line}" in result.text, result.text


def planted(*links: str) -> Callable[[Path], None]:
    """Returns a function that adds links to an image's root. The links point to folders that user 1000 may change."""

    def image(root: Path) -> None:
        for link in links:
            place = root / link.lstrip("/")
            target = root / "data" / link.strip("/").replace("/", "-")
            target.mkdir(parents=True, exist_ok=True)
            if place.is_dir():
                place.rmdir()
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(f"/data/{target.name}")

    return image


# Attempts by user 1000 without capabilities, in an image that the tenant made. columns: the case; links in the image;
# the shell command; expected result of a program that starts afterwards
PLANTS = [
    ("paths of former versions", ["/etc/vgpu", "/run/vgpu"], replaced("/data/etc-vgpu"), HELD),
    ("/dev/vgpu", ["/dev/vgpu"], "ls /data/dev-vgpu | grep . && " + replaced("/data/dev-vgpu"), HELD),
    ("/dev", ["/dev"], "ls /data/dev | grep . && mv /data/dev /data/o", HELD),
    # The plugin mounts no folder over /etc, where the loader reads its preload list.
    ("/etc", ["/etc"], "mv /data/etc /data/o && mkdir /data/etc", OUT),
]


@pytest.mark.parametrize(("about", "links", "does", "ends"), PLANTS, ids=[one[0] for one in PLANTS])
def test_links_in_an_image_cannot_replace_the_limits(
    tenant: Tenant, about: str, links: list[str], does: str, ends: str
) -> None:
    result = tenant.run(f"({does}) 2>&1; /eat", user=USER, image=planted(*links))
    if about == "/dev" and "eaten" not in result.text:
        return  # runc refused to start the container.
    assert result.ended == ends, result.text


# Volumes of a pod, mounted after the plugin's mounts in order of depth. columns: the case, path in the container, file
# of the tenant ("" means the folder), whether the volume is read-only; expected message of the library
VOLUMES = [
    (
        "volume over the limits",
        "/dev/vgpu/0/limits",
        "limits",
        True,
        "/dev/vgpu/0/limits: another file is mounted on it",
    ),
    (
        "volume over the share",
        "/dev/vgpu/0",
        "",
        False,
        "/dev/vgpu/0/limits: its folder /dev/vgpu/0 is mounted writable",
    ),
    ("volume over the ledger", "/dev/vgpu/0/ledger", "ledger", False, "/dev/vgpu/0/ledger: it is empty"),
    (
        "writable volume over the root of the shares",
        "/dev/vgpu",
        "",
        False,
        "/dev/vgpu/0/limits: its folder /dev/vgpu is none that the node mounted",
    ),
]


@pytest.mark.parametrize(("about", "inside", "name", "ro", "line"), VOLUMES, ids=[one[0] for one in VOLUMES])
@pytest.mark.parametrize("user", [0, USER])
def test_volume_over_our_files_gets_no_context(
    tenant: Tenant, tmp_path: Path, user: int, about: str, inside: str, name: str, ro: bool, line: str
) -> None:
    """If a volume of the pod covers files of its slice, the library creates no context."""
    volume = tenant.evil(tmp_path / "volume")
    for place in ("0", "lib"):
        (volume / place).mkdir()
    os.chown(volume, USER, USER)
    os.chmod(volume / "ledger", 0o666)
    result = tenant.run("/eat", user=user, volumes=((inside, str(volume / name), ro),))
    assert result.ended == REFUSED, result.text
    assert line in result.text


# columns: what the other container does, its shell command
SIDECARS = [
    ("renames the share", "mv {0}/0 {0}/o && mkdir {0}/0 && cp /evil/* {0}/0/"),
    ("links the share", "mv {0}/0 {0}/o && ln -s o {0}/0"),
    ("removes the share", "rmdir {0}/0 && mkdir {0}/0 && cp /evil/* {0}/0/"),
]


@pytest.mark.parametrize("read_only", [False, True], ids=["writable volume", "read-only volume"])
@pytest.mark.parametrize(("about", "does"), SIDECARS, ids=[one[0] for one in SIDECARS])
def test_volume_shared_with_another_container_gets_no_context(
    tenant: Tenant, tmp_path: Path, about: str, does: str, read_only: bool
) -> None:
    """An emptyDir at /dev/vgpu contains our mounts, on folders that the other container can move."""
    shared = tmp_path / "shared"
    for folder in (shared, shared / "0", shared / "lib"):
        folder.mkdir()
        os.chown(folder, USER, USER)
    script = "echo ready; while ! [ -e /dev/vgpu/go ]; do sleep 0.05; done; /eat"
    ours = tenant.begin(script, user=USER, volumes=(("/dev/vgpu", str(shared), read_only),))
    assert ours.stdout is not None
    assert ours.stdout.readline() == "ready\n"
    mounts, tenant.mounts = tenant.mounts, []
    try:
        other = tenant.run(f"({does.format('/x')}) 2>&1; touch /x/go", user=USER, volumes=(("/x", str(shared), False),))
    finally:
        tenant.mounts = mounts
        (shared / "go").touch()
        result = Result(ours.communicate(timeout=60)[0])
    assert other.text == ""
    assert result.ended == REFUSED, result.text
    assert "no context is created: /dev/vgpu/0/limits: its folder /dev/vgpu" in result.text


# Mounts by user 1000 in a new user namespace. The test is skipped if the machine refuses user namespaces. Columns:
# case, shell command, result of a program started afterwards.
NAMESPACES = [
    ("mount a file over the limits", "mount --bind /evil/limits /dev/vgpu/0/limits", REFUSED),
    ("mount a folder over the share", "mount --bind /evil /dev/vgpu/0", REFUSED),
    ("mount over the preload file", "mount --bind /dev/null /etc/ld.so.preload", OUT),
    (
        "mounts equal to the node's, with forged files",
        "mount -t tmpfs none /data && cp /evil/* /data && mount --bind /dev/vgpu/0/ledger /data/ledger "
        "&& mount --rbind /data /dev/vgpu/0 && mount -o remount,bind,ro /dev/vgpu/0",
        FORGED,
    ),
]


@pytest.mark.parametrize(("about", "does", "ends"), NAMESPACES, ids=[one[0] for one in NAMESPACES])
def test_mounts_in_an_own_namespace(tenant: Tenant, about: str, does: str, ends: str) -> None:
    result = tenant.run(f"unshare -Urm sh -c '({does}) 2>&1 && echo done; /eat' || /eat", user=USER)
    if "done\n" not in result.text:
        assert "unshare" in result.text, result.text
        pytest.skip("no user namespace in a container of this machine")
    assert result.ended == ends, result.text


def test_old_allocate_response_has_all_its_files(tenant: Tenant, node: RealNode) -> None:
    """After the upgrade a container of a former release, which mounted single files, starts again with the kubelet's
    stored Allocate response and the former library.
    """
    folder = tenant.share.parent
    uuid = node.vgpuctl("status")["gpus"][0]["uuid"]
    old = [
        ("/usr/local/lib/vgpu/libvgpu.so", str(node.folder / "lib/0.1.0-aaaaaaaaaaaa/libvgpu.so"), True),
        ("/etc/ld.so.preload", str(folder / "ld.so.preload"), True),
        ("/etc/vgpu/limits", str(folder / "limits"), True),
        ("/run/vgpu/ledger", str(folder / "rw/ledger"), False),
        ("/run/vgpu/tenant", str(folder / "rw/tenant"), False),
        (f"/run/vgpu/gpu-{uuid}", str(folder / f"gpu-{uuid}"), True),
    ]
    for _again in range(2):
        assert [host for _inside, host, _ro in old if not Path(host).exists()] == []
        assert (folder / "ld.so.preload").read_text() == "/usr/local/lib/vgpu/libvgpu.so\n"
        assert (folder / "limits").samefile(folder / "ro/limits")
        node.kubelet.restart_container("one")
    # This version's library knows only the new paths, so the container gets no context, not the whole card.
    tenant.mounts = old
    result = tenant.run("/eat")
    assert result.ended == REFUSED, result.text
