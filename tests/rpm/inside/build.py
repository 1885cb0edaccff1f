# SPDX-License-Identifier: Apache-2.0
"""Runs inside the root of make_root.sh. Makes two signing keys, all packages of TABLE, and their repositories in /srv.

The packages have only names, versions and dependencies, which are those of NVIDIA's CUDA repository and of the
container toolkit. As in NVIDIA's repositories, RHEL's versions have an epoch, and on SLES the version of the kernel
module contains the kernel's version. Only the dnf plugin versionlock has content, taken from Debian's package.
"""

import os
import shutil
import subprocess
from pathlib import Path

WORK = Path("/root/inside")
SRV = Path("/srv")
DRIVERS = ("570.195.03", "580.95.05", "580.105.08")
TOOLKITS = ("1.17.8", "1.18.0")
SAME = "= EVR"
PLUGINS = "/usr/lib/python3/dist-packages"
UNPACKED = "/opt/dnf-plugins-core"

# repository → (versions, release, epoch, package → requirements)
TABLE = {
    "cuda-el": (
        DRIVERS,
        "1.el9",
        "3",
        {
            "nvidia-driver-cuda-libs": [],
            "nvidia-driver-cuda": [f"nvidia-driver-cuda-libs {SAME}"],
            "kmod-nvidia-open-dkms": [],
            "kmod-nvidia-latest-dkms": [],
            "nvidia-persistenced": [],
        },
    ),
    "cuda-el/fabric": (DRIVERS, "1", "", {"nvidia-fabric-manager": [], "libnvidia-nscq": []}),
    "cuda-sles": (
        DRIVERS,
        "1",
        "",
        {
            "nvidia-compute-G06": [],
            "nvidia-common-G06": [],
            "nvidia-compute-utils-G06": [f"nvidia-compute-G06 {SAME}", f"nvidia-common-G06 {SAME}"],
            "nvidia-persistenced": [],
        },
    ),
    "cuda-sles/module": (
        [f"{version}_k6.4.0_150600.21" for version in DRIVERS],
        "1",
        "",
        {"nvidia-open-driver-G06-signed-cuda-kmp-default": []},
    ),
    "toolkit": (
        TOOLKITS,
        "1",
        "",
        {
            "libnvidia-container1": [],
            "libnvidia-container-tools": [f"libnvidia-container1 {SAME}"],
            "nvidia-container-toolkit-base": [],
            "nvidia-container-toolkit": [f"nvidia-container-toolkit-base {SAME}", "libnvidia-container-tools >= EVR"],
        },
    ),
    "toolkit/docker": (["2.14.0"], "1", "", {"nvidia-docker2": ["nvidia-container-toolkit >= 1.13.0"]}),
    # These packages have the names of those in Docker's own repositories.
    "docker-ce": (
        ["28.5.1"],
        "1.el9",
        "3",
        {"docker-ce-cli": [], "containerd.io": [], "docker-ce": ["docker-ce-cli", "containerd.io"]},
    ),
    # The distribution's packages: kernel headers, which the role installs with the driver; ``theirs``, a package
    # of the user that depends on the toolkit.
    "base": (
        ["1.0"],
        "1.el9",
        "",
        {"kernel-devel": [], "kernel-headers": [], "theirs": ["libnvidia-container1"]},
    ),
    "base/engine": (["1.7.27"], "1", "", {"containerd": [], "docker": ["containerd"]}),
    "base/lock": (["4.3.1"], "1.el9", "", {"python3-dnf-plugin-versionlock": []}),
    "rocky": (["9.4"], "1", "", {"rocky-release": []}),
    "sles": (["15.6"], "1", "", {"sles-release": []}),
}
LOCK_FILES = f"""%install
mkdir -p %{{buildroot}}/etc/dnf/plugins %{{buildroot}}{PLUGINS}/dnf-plugins
cp {UNPACKED}/etc/dnf/plugins/versionlock.* %{{buildroot}}/etc/dnf/plugins/
cp {UNPACKED}{PLUGINS}/dnf-plugins/versionlock.py %{{buildroot}}{PLUGINS}/dnf-plugins/
cp -r {UNPACKED}{PLUGINS}/dnfpluginscore %{{buildroot}}{PLUGINS}/
"""
LOCK_CONTENT = f"""%config(noreplace) /etc/dnf/plugins/versionlock.*
{PLUGINS}/dnf-plugins
{PLUGINS}/dnfpluginscore
"""


# Streams of the dnf module nvidia-driver. Each stream has one branch of the driver and one kind of kernel module.
STREAMS = [(branch, kind) for branch in ("570", "580") for kind in ("dkms", "open")]


def modules() -> str:
    """Returns the modulemd document: it lists the packages of each stream for dnf."""
    _versions, release, epoch, packages = TABLE["cuda-el"]
    text = ""
    for branch, kind in STREAMS:
        text += "---\ndocument: modulemd\nversion: 2\ndata:\n  name: nvidia-driver\n"
        text += f"  stream: {branch}-{kind}\n  version: 20251121\n  context: 0a1b2c3d\n  arch: x86_64\n"
        text += "  summary: Stand-in\n  description: Stand-in for a test.\n  license:\n    module: [MIT]\n"
        text += "  artifacts:\n    rpms:\n"
        for version in DRIVERS:
            for name in packages:
                other = "kmod-nvidia-" + ("latest-dkms" if kind == "open" else "open-dkms")
                if version.startswith(branch) and name != other:
                    text += f"      - {name}-{epoch}:{version}-{release}.x86_64\n"
    return text


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=WORK, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-3000:]}")


def tags(version: str, release: str, epoch: str) -> str:
    return f"Version: {version}\nRelease: {release}\n" + (f"Epoch: {epoch}\n" if epoch else "")


def spec(place: str, version: str) -> str:
    """Returns the spec file that builds all packages of one row of TABLE."""
    _versions, release, epoch, packages = TABLE[place]
    common = "Summary: Stand-in\nLicense: Apache-2.0\n"
    text = f"Name: {place.replace('/', '-')}-source\n{common}{tags(version, release, epoch)}"
    text += "BuildArch: x86_64\nAutoReqProv: no\n%description\nStand-in for a test.\n"
    for name, needs in packages.items():
        text += f"%package -n {name}\nSummary: Stand-in\nAutoReqProv: no\n"
        evr = (f"{epoch}:" if epoch else "") + f"{version}-{release}"
        text += "".join(f"Requires: {need.replace('EVR', evr)}\n" for need in needs)
        if name.endswith("-release"):
            text += f"Provides: system-release = {version}\n"
            text += f"Provides: system-release(releasever) = {version.partition('.')[0]}\n"
        text += f"%description -n {name}\nStand-in for a test.\n"
    text += LOCK_FILES if place == "base/lock" else ""
    for name in packages:
        text += f"%files -n {name}\n" + (LOCK_CONTENT if place == "base/lock" else "")
    return text


def sign_index(repository: Path, who: str) -> None:
    index = repository / "repodata" / "repomd.xml"
    index.with_name("repomd.xml.asc").unlink(missing_ok=True)
    run("gpg", "--batch", "--quiet", "--local-user", who, "--armor", "--detach-sign", str(index))


def main() -> None:
    os.environ.update(HOME="/root", GNUPGHOME="/root/gnupg", PATH="/usr/sbin:/usr/bin:/sbin:/bin")
    Path("/root/gnupg").mkdir(mode=0o700)
    (SRV / "keys").mkdir(parents=True)
    run("rpm", "--initdb")
    for who in ("vendor", "stranger"):
        mail = f"{who} <{who}@example.com>"
        run("gpg", "--batch", "--quiet", "--passphrase", "", "--quick-generate-key", mail, "rsa2048", "sign", "never")
        run("gpg", "--batch", "--armor", "--output", f"/srv/keys/{who}.asc", "--export", who)
    for place, (versions, *_rest) in TABLE.items():
        folder = SRV / place.partition("/")[0]
        for version in versions:
            (WORK / "one.spec").write_text(spec(place, version))
            name = "_rpmfilename %%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm"
            run("rpmbuild", "--quiet", "-bb", "--define", f"_rpmdir {folder}", "--define", name, "one.spec")
    # As in the real repositories, each driver and Docker package is signed. For the toolkit only the index is signed.
    by_package = [SRV / name for name in ("cuda-el", "cuda-sles", "docker-ce")]
    signed = [str(path) for folder in by_package for path in sorted(folder.glob("*.rpm"))]
    run("rpmsign", "--define", "_gpg_name vendor", "--define", "__gpg /usr/bin/gpg", "--addsign", *signed)
    for name in {place.partition("/")[0] for place in TABLE}:
        run("createrepo_c", "--quiet", str(SRV / name))
    (WORK / "modules.yaml").write_text(modules())
    run("modifyrepo_c", "--mdtype=modules", "modules.yaml", "/srv/cuda-el/repodata")
    sign_index(SRV / "toolkit", "vendor")
    # A copy of the toolkit repository, signed with another key. As in real repositories, the key is next to the index.
    shutil.copytree(SRV / "toolkit", SRV / "toolkit-stranger")
    sign_index(SRV / "toolkit-stranger", "stranger")
    shutil.copy(SRV / "keys" / "stranger.asc", SRV / "toolkit-stranger" / "repodata" / "repomd.xml.key")
    shutil.rmtree("/root/rpmbuild", ignore_errors=True)
    run("gpgconf", "--kill", "all")


main()
