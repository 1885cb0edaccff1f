# SPDX-License-Identifier: Apache-2.0
"""Check that the archives of distributions and of NVIDIA still have every package name, key and repository that the
collection's tables name. `make archives` runs this script.

apt resolves each set of packages on an empty system with its own sources and lists. This finds a name that no longer
exists, and a driver branch that installs packages of another branch. The script uses the archives of this machine's
apt, Ubuntu's archive, and NVIDIA's repositories and keys if they can be reached. It prints which of these archives were
not checked.
"""

from __future__ import annotations

import concurrent.futures
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "hosts")]

from simhosts import sources  # noqa: E402

from plugins.module_utils.driver import packages as names  # noqa: E402
from plugins.module_utils.driver import repository_keys, support  # noqa: E402
from plugins.module_utils.engines import engine_packages  # noqa: E402
from plugins.module_utils.host import distribution  # noqa: E402
from plugins.module_utils.packages import apt_keys, apt_text, pins  # noqa: E402
from plugins.module_utils.plan import plugin_python  # noqa: E402

CODENAMES = {
    "debian": {"12": "bookworm", "13": "trixie"},
    "ubuntu": {"20.04": "focal", "22.04": "jammy", "24.04": "noble", "26.04": "resolute"},
}
# Placeholder for the kernel in a package's name. The script replaces it by the newest kernel that the archive lists.
KERNEL = {release: f"{series}0-0-generic" for release, series in names.UBUNTU_KERNEL.items()}
TIMEOUT = 15
COMES_ALONG = "would also be installed"
UNSIGNED = "has no signed module for"
IMAGE = "linux-image-"


class Question(NamedTuple):
    """A set of packages that must resolve, and patterns of packages that must not be installed with it."""

    title: str
    packages: list[str]
    refused: list[str]
    branch: int = 0
    # True for the user space of a driver branch that may be retired: its packages then install those of another branch.
    # This is no fault, because the role refuses a retired branch.
    retires: bool = False
    # True for signed modules. It is no fault if the newest kernel has no signed modules, because the role then builds
    # modules by DKMS, with another set of packages.
    signed: bool = False


def systems(family: str) -> list[distribution.System]:
    """Returns each release of a family in the form that the roles detect on a host."""
    found = []
    for release in CODENAMES[family]:
        kernel = KERNEL.get(release, "")
        host = {"id": family, "version_id": release, "name": f"{family.title()} {release}", "kernel": kernel}
        system = distribution.system(host)
        if system is None:
            raise SystemExit(f"archives: {family} {release}: not in plugins/module_utils/host/distribution.py")
        found.append(system)
    return found


def questions(host: distribution.System) -> Iterator[Question]:
    """Yields every set of packages that our tables take from the archive of this release."""
    for branch in names.offered(host, "distribution") or ():
        refused = names.other_branches(host, "distribution", branch)
        if host.family == "ubuntu":
            retires = branch != support.DEFAULT_BRANCH
            yield Question(f"user space {branch}", [f"nvidia-utils-{branch}-server"], refused, branch, retires)
        for kind in ("open", "proprietary"):
            part = names.DEBIAN[host.release].get(branch) if host.family == "debian" else ""
            if support.wrong_modules(kind, branch, []) or (part and kind == "open"):
                continue
            for prebuilt in (True, False) if host.family == "ubuntu" else (False,):
                packages = names.packages(host, "distribution", branch, kind, prebuilt, "")
                built = "signed" if prebuilt else "DKMS"
                yield Question(f"driver {branch}, {kind}, {built}", packages, refused, branch, signed=prebuilt)
        if host.family == "ubuntu" and branch >= 450:
            user = f"nvidia-utils-{branch}-server"
            packages = [user, *names.fabric_manager(host, "distribution", branch, user, "")]
            yield Question(f"fabric manager {branch}", packages, refused, branch)
    for engine, packages in engine_packages.DISTRIBUTION[host.family].items():
        yield Question(engine, packages, [])
    python = plugin_python.TABLE[host.family, host.release].packages
    if python:
        yield Question("Python of the device plugin", list(python), [])


class Archive:
    """apt on an empty system of one release. ``folder`` holds its sources, lists and status."""

    def __init__(self, folder: Path, lines: list[str]) -> None:
        self.folder = folder
        self.kernel = ""
        for part in ("lists/partial", "parts", "cache/archives/partial", "preferences"):
            (folder / part).mkdir(parents=True)
        (folder / "status").touch()
        (folder / "sources.list").write_text("\n".join(lines) + "\n")
        values = {
            "Dir::State::lists": folder / "lists",
            "Dir::State::status": folder / "status",
            "Dir::State::extended_states": folder / "extended_states",
            "Dir::Cache": folder / "cache",
            # Set apt's two caches. Container images disable them, and without them each call of apt parses all lists
            # again.
            "Dir::Cache::pkgcache": folder / "cache" / "pkgcache.bin",
            "Dir::Cache::srcpkgcache": folder / "cache" / "srcpkgcache.bin",
            "Acquire::Languages": "none",
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled": "false",
            "Acquire::http::Timeout": TIMEOUT,
            "Acquire::https::Timeout": TIMEOUT,
            "Dir::Etc::SourceList": folder / "sources.list",
            "Dir::Etc::SourceParts": folder / "parts",
            "Dir::Etc::PreferencesParts": folder / "preferences",
            "Dir::Etc::Preferences": folder / "pins",
            "APT::Architecture": "amd64",
            "APT::Architectures": "amd64",
            "APT::Update::Error-Mode": "any",
        }
        self.options = [word for name, value in values.items() for word in ("-o", f"{name}={value}")]

    def run(self, *words: str) -> tuple[int, str]:
        done = subprocess.run(
            [words[0], *self.options, *words[1:]],
            check=False,
            capture_output=True,
            text=True,
            env={"LC_ALL": "C.UTF-8"},
        )
        return done.returncode, done.stdout + done.stderr

    def update(self) -> str:
        """Downloads the package lists; returns apt's error lines, or an empty text."""
        code, text = self.run("apt-get", "-q", "update")
        return "" if code == 0 else "\n".join(line for line in text.splitlines() if line.startswith(("E:", "W:")))

    def newest_kernel(self, host: distribution.System) -> str:
        """Returns the newest kernel of the release's own series, as ``uname -r`` prints it."""
        series = names.UBUNTU_KERNEL[host.release]
        pattern = re.compile(rf"{IMAGE}({re.escape(series)}0-(\d+)-generic)\Z")
        listed = map(pattern.match, self.run("apt-cache", "pkgnames", IMAGE)[1].splitlines())
        found = {int(one.group(2)): one.group(1) for one in listed if one}
        return found[max(found)] if found else host.kernel

    def ask(self, question: Question, host: distribution.System) -> str:
        """Returns the fault of a set of packages; empty if the set resolves without refused packages."""
        wanted = [self.of_a_kernel(package, host) for package in question.packages]
        listed = [pins.split_pin(one)[0] for one in wanted]
        policy = apt_text.parse_policy(self.run("apt-cache", "policy", *listed)[1])
        resolved = apt_text.same_version(wanted, policy)
        missing = apt_text.unavailable(resolved, policy)
        if missing and question.signed and any(names.PREBUILT in one for one in missing):
            return f"{UNSIGNED} {self.kernel}"
        if missing:
            return "; ".join(missing)
        words = [apt_text.resolve(one, policy) for one in resolved]
        # Pins the versions of dependencies too, as the role does.
        (self.folder / "pins").write_text(apt_text.preferences(words))
        code, text = self.run("apt-get", "-q", "-y", "--no-install-recommends", "--simulate", "install", *words)
        if code != 0:
            return " ".join(text.split())[-300:]
        brought = pins.matching(apt_text.parse_simulation(text).install, question.refused) if question.refused else []
        return f"{', '.join(brought)} {COMES_ALONG}" if brought else ""

    def of_a_kernel(self, package: str, host: distribution.System) -> str:
        """Returns the package name with the placeholder kernel replaced by the release's newest kernel."""
        name = pins.split_pin(package)[0]
        if not host.kernel or not name.endswith(f"-{host.kernel}"):
            return package
        self.kernel = self.kernel or self.newest_kernel(host)
        return name[: -len(host.kernel)] + self.kernel


def lines_of(host: distribution.System, machine: tuple, keys: Path) -> list[str]:
    """Returns apt's source lines for a release, from this machine's mirrors or Ubuntu's archive.

    Raises SourcesError if this machine knows no mirror of the release.
    """
    own, found, _options = machine
    codename = CODENAMES[host.family][host.release]
    if own.id == host.family:
        length = len(own.codename)
        moved = [sources.Source(one.uri, codename + one.suite[length:], one.signed_by) for one in found]
    elif host.family == "ubuntu":
        mirror = sources.ubuntu_mirror()
        key = str(sources.ubuntu_keyring(mirror, keys))
        moved = [sources.Source(mirror, codename + pocket, key) for pocket in ("", "-updates", "-security")]
    else:
        raise sources.SourcesError(f"this machine runs {own.id} and has no mirror of {host.family}")
    return [one.line(sources.COMPONENTS[host.family]) for one in moved]


def asked(host: distribution.System, machine: tuple, keys: Path, folder: Path) -> tuple[list[str], list[str], str]:
    """Returns three values: the titles of the sets that resolve, the faults of the other sets, and why the archive
    could not be read (empty if it could).
    """
    try:
        folder.mkdir()
        archive = Archive(folder, lines_of(host, machine, keys))
    except sources.SourcesError as error:
        return [], [], str(error)
    said = archive.update()
    if said:
        return [], [], said.splitlines()[-1]
    right: list[str] = []
    faults: list[str] = []
    retired: set[int] = set()
    for question in questions(host):
        if question.branch in retired:
            continue
        fault = archive.ask(question, host)
        if fault and question.retires and fault.endswith(COMES_ALONG):
            retired.add(question.branch)
            print(f"{host.name}: branch {question.branch} is retired ({fault}); the role refuses it", flush=True)
        elif fault.startswith(UNSIGNED):
            print(f"{host.name}: {question.title}: {fault}; the role builds the modules by DKMS", flush=True)
        elif fault:
            faults.append(f"{host.name}: {question.title}: {fault}")
        else:
            right.append(question.title)
    return right, faults, ""


def fetch(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=TIMEOUT) as answer:
        return bytes(answer.read())


def of_nvidia(name: str, key: repository_keys.Key, addresses: list[str]) -> tuple[list[str], str]:
    """Returns two values: the faults of one NVIDIA repository and its key, and why it could not be read (empty if it
    could). The last of ``addresses`` is the key's URL.
    """
    try:
        got = [fetch(address) for address in addresses]
    except urllib.error.HTTPError as error:
        return [f"{name}: {error.url}: {error}"], ""
    except OSError as error:
        return [], f"{name}: {error}"
    fault = repository_keys.mismatch(apt_keys.fingerprints(got[-1]), key.fingerprint)
    return ([f"{name}: {addresses[-1]}: {fault}"] if fault else []), ""


def repositories() -> Iterator[tuple[str, repository_keys.Key, list[str]]]:
    for name, key in repository_keys.CUDA.items():
        base = f"{names.CUDA}/{name}/x86_64/"
        index = "InRelease" if name.startswith(("debian", "ubuntu")) else "repodata/repomd.xml"
        yield name, key, [base + index, base + key.file]
    toolkit = "https://nvidia.github.io/libnvidia-container/"
    yield "container toolkit", repository_keys.TOOLKIT, [f"{toolkit}stable/deb/amd64/InRelease", f"{toolkit}gpgkey"]


def main() -> int:
    faults, unasked, answered = [], ["RHEL, Rocky and SLES: this machine has no sources of their archives"], 0
    machine = sources.read_machine()
    with tempfile.TemporaryDirectory(prefix="vgpu-archives-", dir="/var/tmp") as folder:
        # apt downloads as the user _apt, who must be able to enter the folder.
        Path(folder).chmod(0o755)
        for host in [*systems("debian"), *systems("ubuntu")]:
            right, wrong, why = asked(host, machine, Path(folder) / "keys", Path(folder) / host.release)
            if why:
                unasked.append(f"{host.name}: {why}")
                continue
            answered += 1
            faults += wrong
            print(f"{host.name}: {len(right)} sets of packages resolve, {len(wrong)} do not", flush=True)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for (name, _key, _addresses), (wrong, why) in zip(
            repositories(), pool.map(lambda one: of_nvidia(*one), repositories()), strict=True
        ):
            faults += wrong
            unasked += [why] if why else []
            if not why and not wrong:
                print(f"{name}: repository and key are available")
    for line in unasked:
        print(f"not checked: {line}")
    for line in faults:
        print(f"WRONG: {line}")
    if not answered:
        print("WRONG: no archive could be read; set a mirror in this machine's apt sources or in VGPU_UBUNTU_MIRROR")
    return 1 if faults or not answered else 0


if __name__ == "__main__":
    sys.exit(main())
