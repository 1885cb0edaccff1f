# SPDX-License-Identifier: Apache-2.0
"""Sets NVIDIA's runtime in the text of a containerd configuration, of versions 1, 2 and 3. No I/O.

In containerd 1.6 and 1.7 a drop-in file for the CRI plugin replaces the plugin's whole section, with cgroup driver,
sandbox image and CNI folders. So for these versions our keys are written into the main file. From 2.0 on containerd
merges files key by key. So if the main file imports a folder, a separate file in that folder holds our keys, in the
format version of the main file.
"""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple

from ..text import toml_text

# Maps the version of the file's format to the table with the CRI plugin's keys.
SECTIONS = {
    1: "plugins.cri",
    2: 'plugins."io.containerd.grpc.v1.cri"',
    3: 'plugins."io.containerd.cri.v1.runtime"',
}
DROP_IN = "99-vgpu.toml"
TEMPLATE_LINE = re.compile(r"^\s*\{\{.*\}\}\s*$")


class ConfigError(Exception):
    """A configuration that cannot be changed; the text says what was found and what to do."""


class Desired(NamedTuple):
    """Describes a runtime by name and absolute path of its program. ``default``: whether containers that name no
    runtime use it.
    """

    name: str = "nvidia"
    path: str = "/usr/bin/nvidia-container-runtime"
    default: bool = True
    # None: use the value that the file has for runc.
    systemd_cgroup: bool | None = None


def _get(text: str, key: str) -> str | None:
    """Returns the value of a key as it is written in the file. ``text``: the file, which may be a Go template."""
    return toml_text.get(hide_template(text)[0], key)


def _plain(text: str, key: str) -> str:
    """Returns the value of a key without its quotes, empty if the key is not set."""
    return (_get(text, key) or "").strip("\"'")


def version_of(text: str) -> int:
    """Returns the format version that a file names. A file without a version has version 1."""
    written = _get(text, "version")
    if written is None:
        return 1
    if written not in ("1", "2", "3"):
        raise ConfigError(
            f"version: expected 1, 2 or 3, found {written}; this version of containerd's file is not known"
        )
    return int(written)


def fresh(daemon: tuple[int, ...], desired: Desired) -> str:
    """Returns the text of a new main file, in the daemon's own file version."""
    version = 3 if daemon >= (2,) else 2
    text = f"version = {version}\n"
    if desired.systemd_cgroup is None:
        return text
    return toml_text.merge(text, _runc(f"{SECTIONS[version]}.containerd.runtimes.runc", desired.systemd_cgroup))[0]


def systemd_cgroup(given: Any, kubelet: Any, text: str | None) -> bool | None:
    """Returns whether the runtime uses systemd's cgroup driver; None means the value that the file has for runc.
    ``given``: ``auto``, ``true`` or ``false``; ``kubelet``: ``kubelet_engine`` of host_state. ``auto`` means the driver
    of the running kubelet. If no kubelet runs and the file has no value for runc, ``auto`` means systemd, the default
    of kubeadm.
    """
    if str(given).lower() != "auto":
        return str(given).lower() in ("true", "yes", "on", "1")
    driver = (kubelet or {}).get("cgroup_driver")
    if driver:
        return bool(driver == "systemd")
    silent = text is None or _runc_cgroup(text) is None
    return True if silent and not kubelet else None


def _runc_cgroup(text: str, version: int | None = None) -> bool | None:
    written = _get(text, SECTIONS[version or version_of(text)] + ".containerd.runtimes.runc.options.SystemdCgroup")
    return None if written is None else written == "true"


def problems(text: str, daemon: tuple[int, ...]) -> list[str]:
    """Returns the reasons why this version of containerd would not apply the file as desired."""
    version, shown, found = version_of(text), ".".join(map(str, daemon)), []
    if daemon and version == 3 and daemon < (2,):
        found.append(
            f"the file has version 3, and containerd {shown} would leave its runtimes out without a word; write it "
            "in version 2 (containerd config default)"
        )
    if daemon >= (2,) and version == 1:
        found.append(
            f"the file has version 1, and containerd {shown} discards the runtimes of this version; rewrite it in "
            "version 2 or 3 (containerd config migrate)"
        )
    if re.search(r"""["'](io\.containerd\.grpc\.v1\.)?cri["']""", _get(text, "disabled_plugins") or ""):
        found.append('disabled_plugins names "cri", so no kubelet can use this containerd; remove it from the list')
    return found


def keys(text: str, desired: Desired, version: int | None = None) -> dict[str, toml_text.Value]:
    """Returns the keys that the collection sets, with their values."""
    base = SECTIONS[version or version_of(text)] + ".containerd"
    runtime = f"{base}.runtimes.{desired.name}"
    wanted: dict[str, toml_text.Value] = {
        f"{runtime}.runtime_type": "io.containerd.runc.v2",
        f"{runtime}.options.BinaryName": desired.path,
    }
    # The cgroup driver must equal the kubelet's; the value for runc is known to work on this host.
    cgroup = desired.systemd_cgroup
    if cgroup is None:
        cgroup = _runc_cgroup(text, version)
    if cgroup is not None:
        wanted[f"{runtime}.options.SystemdCgroup"] = cgroup
    default = _plain(text, f"{base}.default_runtime_name")
    if desired.default:
        wanted[f"{base}.default_runtime_name"] = desired.name
    elif default == desired.name:
        wanted[f"{base}.default_runtime_name"] = "runc"
    if (
        not desired.default
        and default in ("", "runc", desired.name)
        and not _plain(text, f"{base}.runtimes.runc.runtime_type")
    ):
        # In containerd 1.x the first runtime in the file replaces containerd's own list of runtimes. Without a
        # definition of the default runtime containerd starts without its CRI plugin.
        wanted.update(_runc(f"{base}.runtimes.runc", cgroup))
    return wanted


def _runc(runtime: str, systemd_cgroup: bool | None) -> dict[str, toml_text.Value]:
    """Returns the keys that define runc. It gets the same cgroup driver as NVIDIA's runtime, because either may start a
    pod that names its runtime.
    """
    cgroup = {} if systemd_cgroup is None else {f"{runtime}.options.SystemdCgroup": systemd_cgroup}
    return {f"{runtime}.runtime_type": "io.containerd.runc.v2", **cgroup}


def imported_folder(text: str) -> str | None:
    """Returns a folder of which the file imports every .toml file, None if there is no such folder."""
    try:
        globs = re.findall(r"""["']([^"']+)["']""", _get(text, "imports") or "")
    except toml_text.TomlError:
        return None
    folders = [os.path.dirname(one) for one in globs if one.startswith("/") and os.path.basename(one) == "*.toml"]
    return folders[0] if folders else None


def place(path: str, text: str) -> str:
    """Returns the file for the collection's keys: the main file, or a file of the collection in a folder that the main
    file imports.
    """
    folder = imported_folder(text) if version_of(text) == 3 else None
    return os.path.join(folder, DROP_IN) if folder else path


def merge(text: str, desired: Desired) -> tuple[str, list[str]]:
    """Returns the main file's text with our keys, and the changes. All other bytes stay unchanged."""
    hidden, lines = hide_template(text)
    if any('template "base"' in line for line in lines.values()):
        raise ConfigError(
            "this template includes the base template of k3s or RKE2, which has NVIDIA's runtime if that is installed; "
            "set  default-runtime in config.yaml.d instead"
        )
    try:
        merged, changes = toml_text.merge(hidden, keys(hidden, desired))
    except toml_text.TomlError as fault:
        raise ConfigError(str(fault)) from None
    return show_template(merged, lines), changes


def drop_in(main: str, desired: Desired) -> str:
    """Returns the text of the collection's own file in the imported folder, in the main file's version."""
    return toml_text.merge(f"version = {version_of(main)}\n", keys(main, desired))[0]


def hide_template(text: str) -> tuple[str, dict[str, str]]:
    """Returns a Go template with its command lines replaced by comments, and a map from each comment to its line."""
    lines: dict[str, str] = {}
    out = []
    for number, line in enumerate(text.split("\n")):
        if TEMPLATE_LINE.match(line):
            mark = f"# template line {number}"
            lines[mark] = line
            line = mark
        out.append(line)
    return "\n".join(out), lines


def show_template(text: str, lines: dict[str, str]) -> str:
    return "\n".join(lines.get(line, line) for line in text.split("\n"))


def undo(text: str, record: dict[str, Any], desired: Desired) -> str | None:
    """Returns the text without our changes. ``record``: ``former``, the text before our first change; ``ours``, the
    text that we wrote last; ``exact``, whether ``ours`` has no edits of others.

    If nobody has edited the file, the result is exactly ``former``. Else only our keys are removed, and each key that
    had a value before our change gets that value again.
    """
    former, ours = record["former"], record["ours"]
    # Version 0.2.0 did not record whether the file had been edited between its runs, so its records are not exact.
    if record.get("exact") and text == ours:
        return former
    text, lines = hide_template(text)
    # Every key that a run may have set, whatever is desired now. Our definition of runc stays in a file of others, who
    # may use it.
    desired = desired._replace(default=True, systemd_cgroup=True)
    # The section of our keys differs between the texts if `containerd config migrate` changed the file's version.
    for key, written, first in zip(keys(text, desired), keys(ours, desired), keys(former or "", desired)):
        if not _plain(text, key) or _plain(text, key) != _plain(ours, written):
            continue
        before = _get(former or "", first)
        text = toml_text.remove(text, key) if before is None else toml_text.put(text, key, before)
    base = f"{SECTIONS[version_of(text)]}.containerd"
    if not _plain(text, f"{base}.runtimes.{desired.name}.runtime_type"):
        text = without_table(text, f"{base}.runtimes.{desired.name}")
        if _plain(text, f"{base}.default_runtime_name") == desired.name:
            text = toml_text.remove(text, f"{base}.default_runtime_name")
    if former is None and _has_only_ours(text, ours, f"{base}.runtimes.runc"):
        return None
    return show_template(text, lines)


def _has_only_ours(text: str, ours: str, runc: str) -> bool:
    """Returns True if a file without NVIDIA's runtime has only its version and keys of runc that we wrote."""
    written, path = toml_text.scan(hide_template(ours)[0]).entries, toml_text.split_key(runc)
    return all(
        key == ("version",) or (key[: len(path)] == path and key in written and written[key].value == one.value)
        for key, one in toml_text.scan(text).entries.items()
    )


def without_table(text: str, table: str) -> str:
    """Removes the table of a runtime with all its keys: containerd does not start with a runtime that has no type."""
    found, path = toml_text.scan(text), toml_text.split_key(table)
    spans = [(one.first, one.last + 1) for key, one in found.entries.items() if key[: len(path)] == path]
    spans += [(one[0], one[0] + 1) for key, one in found.tables.items() if key[: len(path)] == path]
    lines = text.split("\n")
    for first, end in sorted(spans, reverse=True):
        del lines[first:end]
        while 0 < first < len(lines) and not lines[first].strip() and not lines[first - 1].strip():
            del lines[first]
    return "\n".join(lines)


def missing(dump: str, desired: Desired) -> list[str]:
    """Returns the parts of the desired state that are missing in the output of ``containerd config dump``, whatever the
    format version of the output.
    """
    found: dict[tuple[str, ...], Any] = {key: entry.value for key, entry in toml_text.scan(dump).entries.items()}

    def value(*tail: str) -> str | None:
        return next((text for key, text in found.items() if key[0] == "plugins" and key[-len(tail) :] == tail), None)

    rows: list[tuple[tuple[str, ...], str]] = [
        (("containerd", "runtimes", desired.name, "options", "BinaryName"), desired.path)
    ]
    if desired.default:
        rows.append((("containerd", "default_runtime_name"), desired.name))
    if desired.systemd_cgroup is not None:
        cgroup = ("containerd", "runtimes", desired.name, "options", "SystemdCgroup")
        rows.append((cgroup, str(desired.systemd_cgroup).lower()))
    return [
        "{}: expected {}, containerd would use {}".format(".".join(tail), expected, value(*tail) or "nothing")
        for tail, expected in rows
        if (value(*tail) or "").strip("\"'") != expected
    ]


def crio(desired: Desired) -> str:
    """Returns the text of a drop-in file of CRI-O. CRI-O merges it with its other files table by table."""
    head = "# Written by the role vgpu.fleet.container_runtime; changes are overwritten.\n"
    default = f'[crio.runtime]\ndefault_runtime = "{desired.name}"\n\n' if desired.default else ""
    return (
        head
        + default
        + f'[crio.runtime.runtimes.{desired.name}]\nruntime_path = "{desired.path}"\nruntime_type = "oci"\n'
    )


def rancher(desired: Desired) -> str:
    """Returns the text of a drop-in file of k3s or RKE2. At their start, both find NVIDIA's program themselves and name
    its runtime nvidia.
    """
    head = "# Written by the role vgpu.fleet.container_runtime; changes are overwritten.\n"
    return head + (f"default-runtime: {desired.name}\n" if desired.default else "")
