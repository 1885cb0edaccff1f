# SPDX-License-Identifier: Apache-2.0
"""Reads and merges Docker's daemon.json key by key. Finds whether a change needs a reload or a restart, and which keys
the running daemon has not applied.

The functions work on text and data and do no I/O. The module docker_daemon applies their results to a host, and the
plan predicts changes with them. json_text.py changes the text, so all other keys keep their bytes. daemon_record.py
reverts changes.
"""

from __future__ import annotations

from typing import Any, Iterable, NamedTuple, Sequence

from ..text import json_text
from ..text.json_text import JsonTextError, Path, same

BOM = "\ufeff"

# Keys that dockerd reloads on SIGHUP. All others are read at start only. After the removal of a top-level key a reload
# keeps its old value, so such a removal needs a restart.
RELOADABLE = frozenset(
    (
        "authorization-plugins",
        "debug",
        "default-cgroupns-mode",
        "default-ipc-mode",
        "default-runtime",
        "default-shm-size",
        "features",
        "insecure-registries",
        "labels",
        "live-restore",
        "max-concurrent-downloads",
        "max-concurrent-uploads",
        "max-download-attempts",
        "network-diagnostic-port",
        "registry-mirrors",
        "runtimes",
        "shutdown-timeout",
    )
)
# Features that the daemon registers only at its start, although it reloads the map of features. A change of such a
# feature needs a restart.
START_FEATURES = frozenset(("cdi", "containerd-snapshotter"))
# Runtimes that a daemon has without configuration.
BUILTIN_RUNTIMES = frozenset(
    ("runc", "io.containerd.runc.v1", "io.containerd.runc.v2", "io.containerd.runtime.v1.linux")
)

# This marker file is created before daemon.json is written, and is removed when the daemon has applied daemon.json. It
# shows the next run an interrupted change even if the daemon does not report the key (such as default-shm-size). It is
# in /run, because a reboot applies daemon.json anyway.
PENDING = "/run/vgpu-docker-daemon.pending"

# The socket of a daemon without other settings, and of docker.socket, systemd's unit.
SOCKET = "/run/docker.sock"

_MISSING = object()


class DaemonJsonError(ValueError):
    """daemon.json cannot be used. ``line`` and ``column`` are None if the fault has no position in the text."""

    def __init__(self, message: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(message)
        self.line, self.column = line, column


class Change(NamedTuple):
    """Describes one key whose value differs. ``apply``: ``reload`` or ``restart``, the action by which the running
    daemon applies the change.
    """

    path: Path
    action: str  # The kind of the change: add, change or remove.
    before: Any
    after: Any
    apply: str

    def __str__(self) -> str:
        name = ".".join(self.path)
        if self.action == "add":
            return f"set {name} to {show(self.after)}"
        if self.action == "remove":
            return f"remove {name} (was {show(self.before)})"
        return f"change {name} from {show(self.before)} to {show(self.after)}"


class Unapplied(NamedTuple):
    """Describes a key whose value in the running daemon differs from the file."""

    key: str
    expected: Any
    found: Any
    apply: str

    def __str__(self) -> str:
        return f"the running daemon has {self.key} {show(self.found)}, the file says {show(self.expected)}"


def show(value: Any) -> str:
    text = f'"{value}"' if isinstance(value, str) else json_text.json.dumps(value, default=str)
    return text if len(text) <= 120 else text[:117] + "..."


def decode(raw: bytes | None) -> str | None:
    """Returns the text of the file's bytes; None if there is no file."""
    if raw is None:
        return None
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as fault:
        line = raw.count(b"\n", 0, fault.start) + 1
        raise DaemonJsonError(
            f"line {line}: byte 0x{raw[fault.start]:02x} is not UTF-8; save the file as UTF-8", line
        ) from None


def split(text: str | None) -> tuple[str, str]:
    """Returns the byte order mark (or nothing) and the rest.

    dockerd accepts an empty file; it accepts a byte order mark only since 23.0.
    """
    text = text or ""
    return (BOM, text[1:]) if text.startswith(BOM) else ("", text)


def parse(text: str | None) -> dict[str, Any]:
    """Returns the document. Accepts None (no file), an empty file and a byte order mark."""
    body = split(text)[1]
    if not body.strip():
        return {}
    try:
        root = json_text.read(body)
    except JsonTextError as fault:
        raise DaemonJsonError(f"not valid JSON: {fault}\n{fault.pointer()}", fault.line, fault.column) from None
    if root.members is None:
        raise DaemonJsonError(f"expected an object in braces at the top, found {show(root.value)}", 1, 1)
    return dict(root.value)


def merge(
    text: str | None, settings: dict[str, Any], remove: Iterable[Sequence[str]] = ()
) -> tuple[str | None, list[Change]]:
    """Returns the text with ``settings`` merged and the keys of ``remove`` removed, and the changes.

    Objects are merged key by key, other values are replaced. Without a change the text is returned unchanged. A changed
    text has no byte order mark, because dockerd 20.10 does not start with one.
    """
    check_settings(settings)
    body = split(text)[1]
    before = parse(text)
    changed = body
    for path in remove:
        if changed.strip():
            changed = json_text.delete(changed, path)
    if changed.strip():
        changed = assign_all(changed, (), settings)
    elif settings:
        changed = json_text.assign("{}", (), settings) + "\n"
    after = parse(changed)
    changes = compare(before, after)
    return (changed, changes) if changes else (text, [])


def check_settings(settings: dict[str, Any], path: Path = ()) -> None:
    if not isinstance(settings, dict):
        raise DaemonJsonError(f"the settings must be a mapping, found {show(settings)}")
    for key, value in settings.items():
        name = ".".join((*path, str(key)))
        if not isinstance(key, str) or not key:
            raise DaemonJsonError(f"the settings have the key {show(key)}; keys are non-empty strings")
        if value is None:
            raise DaemonJsonError(f'the setting "{name}" has no value; to remove a key, name it in remove')
        if isinstance(value, dict):
            check_settings(value, (*path, key))


def assign_all(text: str, path: Path, settings: dict[str, Any]) -> str:
    for key, value in settings.items():
        here = (*path, str(key))
        held = lookup(json_text.read(text).value, here)
        if isinstance(value, dict) and isinstance(held, dict):
            text = assign_all(text, here, value)
        else:
            text = json_text.assign(text, here, value)
    return text


def lookup(document: Any, path: Sequence[str], default: Any = None) -> Any:
    for key in path:
        if not isinstance(document, dict) or key not in document:
            return default
        document = document[key]
    return document


def compare(before: dict[str, Any], after: dict[str, Any], path: Path = ()) -> list[Change]:
    """Returns the changes that turn ``before`` into ``after``. Each names the deepest key that differs."""
    changes: list[Change] = []
    for key in [*before, *(key for key in after if key not in before)]:
        here = (*path, key)
        old, new = before.get(key, _MISSING), after.get(key, _MISSING)
        if old is _MISSING:
            changes.append(Change(here, "add", None, new, how_to_apply(here, new)))
        elif new is _MISSING:
            # A removal inside a map needs no restart, because dockerd reloads the whole map. Only a removed top-level
            # key keeps its old value.
            apply = "restart" if not path else how_to_apply(here, old)
            changes.append(Change(here, "remove", old, None, apply))
        elif isinstance(old, dict) and isinstance(new, dict):
            changes.extend(compare(old, new, here))
        elif not same(old, new):
            changes.append(Change(here, "change", old, new, how_to_apply(here, new)))
    return changes


def how_to_apply(path: Sequence[str], value: Any = None) -> str:
    if path[0] == "features":
        names = [path[1]] if len(path) > 1 else list(value if isinstance(value, dict) else ())
        return "restart" if START_FEATURES.intersection(names) else "reload"
    return "reload" if path[0] in RELOADABLE else "restart"


def needs_restart(changes: Iterable[Any]) -> list[str]:
    """Returns the keys, changed or unapplied, that only a restart applies; empty if a reload (SIGHUP) is enough."""
    names = [".".join(one.path) if isinstance(one, Change) else one.key for one in changes if one.apply == "restart"]
    return list(dict.fromkeys(names))


def unapplied(info: dict[str, Any], document: dict[str, Any], argv: Sequence[str] = ()) -> list[Unapplied]:
    """Returns the keys in the file whose value differs from the running daemon's, according to the JSON of ``docker
    info``.

    Only keys that docker info reports can be checked; it does not report default-shm-size, for example. Such a
    difference remains if a play was killed between the write and the reload.
    """
    found: list[Unapplied] = []
    running = dict(info.get("Runtimes") or {})
    for name, wanted in dict(document.get("runtimes") or {}).items():
        held = running.get(name)
        path = wanted.get("path") if isinstance(wanted, dict) else None
        if held is None:
            found.append(Unapplied("runtimes." + name, path or wanted, None, "reload"))
        elif path and held.get("path") and held["path"] != path:
            found.append(Unapplied("runtimes." + name, path, held["path"], "reload"))
    flags = flag_values(argv)
    known = set(document.get("runtimes") or {}) | BUILTIN_RUNTIMES
    known.update(value.split("=", 1)[0] for value in flags.get("runtimes", ()))
    for name in running:
        if name not in known:
            left = "reload" if "runtimes" in document else "restart"
            found.append(Unapplied("runtimes." + name, None, (running[name] or {}).get("path"), left))
    for key, shown, default in (
        ("default-runtime", info.get("DefaultRuntime"), "runc"),
        ("live-restore", info.get("LiveRestoreEnabled"), False),
    ):
        wanted = document.get(key, default)
        # A key that is missing in the file is no difference if a flag on the command line sets it.
        if shown is not None and wanted != shown and (key in document or key not in flags):
            found.append(Unapplied(key, wanted, shown, "reload" if key in document else "restart"))
    return found


# Flags whose key in the file has another name. All other flags have the name of their key: --data-root is data-root.
FLAG_KEYS = {
    "-H": "hosts",
    "-D": "debug",
    "-G": "group",
    "-g": "data-root",
    "-b": "bridge",
    "-s": "storage-driver",
    "-l": "log-level",
    "-p": "pidfile",
    "--add-runtime": "runtimes",
    "--host": "hosts",
    "--label": "labels",
    "--exec-opt": "exec-opts",
    "--log-opt": "log-opts",
    "--storage-opt": "storage-opts",
    "--insecure-registry": "insecure-registries",
    "--registry-mirror": "registry-mirrors",
    "--default-ulimit": "default-ulimits",
    "--authorization-plugin": "authorization-plugins",
    "--dns-opt": "dns-opts",
    "--dns-search": "dns-search",
    "--cdi-spec-dir": "cdi-spec-dirs",
}


def socket_of(text: str | None, argv: Sequence[str]) -> str:
    """Returns the path of the socket on which the daemon answers, empty if it has none. ``text``: the text of
    daemon.json; if it is not valid, the daemon does not run with it.
    """
    try:
        found = hosts(parse(text), argv)
    except DaemonJsonError:
        found = []
    return local_socket(found)


def hosts(document: dict[str, Any], argv: Sequence[str]) -> list[str]:
    """Returns the addresses on which dockerd listens, by the file and its command line; empty: only on SOCKET."""
    given = document.get("hosts")
    return [str(one) for one in [*(given if isinstance(given, list) else []), *flag_values(argv).get("hosts", [])]]


def local_socket(addresses: Sequence[str]) -> str:
    """Returns the path of the first socket among addresses of dockerd, empty if all are on the network."""
    for address in addresses or ["fd://"]:
        kind, _mark, path = address.partition("://")
        if kind in ("unix", "fd"):
            return (path if kind == "unix" else "") or SOCKET
    return ""


def flag_values(argv: Sequence[str]) -> dict[str, list[str]]:
    """Returns the keys that dockerd's command line sets, with their values as text."""
    flags: dict[str, list[str]] = {}
    words = list(argv)[1:]
    for place, word in enumerate(words):
        if not word.startswith("-") or word in ("-", "--"):
            continue
        name, equals, value = word.partition("=")
        if not name.startswith("--") and len(name) > 2:
            name, value, equals = name[:2], name[2:] + equals + value, "="
        key = FLAG_KEYS.get(name, name.lstrip("-"))
        if not equals and place + 1 < len(words) and not words[place + 1].startswith("-"):
            value = words[place + 1]
        flags.setdefault(key, []).append(value)
    return flags
