# SPDX-License-Identifier: Apache-2.0
"""Makes the kind (the object that reads and checks a value) of each role variable from the roles' argument_specs.yml,
and finds mistyped variable names.

An argument specification defines type, choices, elements and keys. ``TIGHTER`` and ``RANGES`` define what it cannot
express: patterns and ranges. This file does no I/O; ``plugin_utils/role_tables.py`` reads the files.
"""

from __future__ import annotations

import difflib
from typing import Any, Iterable, Mapping

from .kinds import EXPECTED_NAMES, PORT, Bool, Choice, Either, Finding, Int, Kind, ListOf, Record, error
from .kinds import Mapping as MappingKind
from .kinds import Text as ExactText

MOST = 2**31 - 1
# Spellings of true and false that are accepted by both Ansible's filter bool and its check of arguments.
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class Anything(Kind):
    """Accepts any value, because only the program that uses the value knows which values are valid."""

    def read(self, value: Any, path: str, findings: list[Finding]) -> Any:
        return value


class Flag(Bool):
    """Reads a boolean in each spelling that Ansible's own check accepts."""

    def read(self, value: Any, path: str, findings: list[Finding]) -> Any:
        word = str(value).strip().lower() if isinstance(value, (str, int)) else ""
        if word in TRUE or word in FALSE:
            return word in TRUE
        return self.wrong(value, path, findings)


class Text(ExactText):
    """Reads a text. A whole number counts as a text, because YAML reads ``580`` as a number. A decimal is an error,
    because YAML reads 3.10 as 3.1.
    """

    def read(self, value: Any, path: str, findings: list[Finding]) -> Any:
        if isinstance(value, float):
            findings.append(error(path, f"expected {self.expected}, found the decimal {value}; put it in quotes"))
            return None
        whole = isinstance(value, int) and not isinstance(value, bool)
        return super().read(str(value) if whole else value, path, findings)


def path(empty: bool, on_host: bool) -> Kind:
    """Reads a path. A path on the hosts must be absolute, because the working folder of a task there is unknown."""
    shape = r"/[^\n]*" if on_host else r"[^\n]+"
    expected = "an absolute path" if on_host else "a path"
    return Text(expected + (" or an empty text" if empty else ""), rf"^({shape}{'|' if empty else ''})\Z")


# Options of type path that may be relative, because the file is on the controller or below a home folder.
ON_CONTROLLER = (
    "device_plugin_cache",
    "report_dir",
    "scheduler_image_cache",
    "scheduler_image_out",
    "scheduler_kubeconfig",
    "scheduler_manifests_out",
    "vcuda_cache",
)
# Minimum and maximum of an int option; an option without an entry has the range 0 to MOST.
RANGES = {
    "mps_replicas": (1, 1024),
    "scheduler_default_cores": (0, 100),
    "scheduler_replicas": (1, 64),
}
AUTO_OR_FLAG = Either(Choice("auto"), Flag())
CHECKSUM = Text("64 hexadecimal digits or an empty text", r"^([0-9a-fA-F]{64})?\Z")
# Kind of the variable upgrade_serial of upgrade.yml, whose value is passed to Ansible's keyword serial.
SERIAL = Text('a number of hosts or a share such as "25%"', r"^[1-9][0-9]*%?\Z")
# Kinds of variables that argument_specs.yml cannot describe exactly.
TIGHTER: dict[str, Kind] = {
    "container_runtime_shm_size": Text(
        "a size such as 2G or an empty text", r"^([0-9]+(\.[0-9]+)?[bkmgBKMG]?[bB]?)?\Z"
    ),
    "container_runtime_systemd_cgroup": AUTO_OR_FLAG,
    "nvidia_driver_branch": Text("a number such as 580 or an empty text", r"^([0-9]{3,4})?\Z"),
    "nvidia_driver_fabric_manager": AUTO_OR_FLAG,
    "nvidia_driver_prebuilt": AUTO_OR_FLAG,
    "nvidia_driver_vgpu_license_server": Text(
        "name:port with a port up to 65535, or an empty text", rf"^([^\s:]+(:{PORT})?)?\Z"
    ),
    "upgrade_serial": Either(SERIAL, ListOf(SERIAL)),
    "vcuda_archive_checksum": CHECKSUM,
}
PLAIN: dict[str, Kind] = {
    "bool": Flag(),
    "dict": MappingKind(Text(), Anything()),
    "float": Text("a number", r"^[0-9]+(\.[0-9]+)?\Z"),
    "raw": Anything(),
    "str": Text(),
}


def kind_of(name: str, option: Mapping[str, Any]) -> Kind:
    """Returns the kind of one option of an argument specification."""
    if name in TIGHTER:
        return TIGHTER[name]
    kind = str(option.get("type", "str"))
    if option.get("choices") and kind != "list":
        return Choice(*(str(one) for one in option["choices"]))
    if kind == "int":
        return Int(*RANGES.get(name, (0, MOST)))
    if kind == "path":
        return path(option.get("default") == "", name not in ON_CONTROLLER)
    if kind == "list":
        item = {key: option[key] for key in ("choices", "options") if key in option}
        return ListOf(kind_of(f"{name}[]", {**item, "type": option.get("elements", "raw")}))
    if kind == "dict" and option.get("options"):
        fields = {str(key): kind_of(f"{name}.{key}", one) for key, one in option["options"].items()}
        needed = tuple(str(key) for key, one in option["options"].items() if one.get("required"))
        return Record(fields, required=needed)
    return PLAIN[kind]


def native(value: Any) -> Any:
    """Converts a value of ansible-core to the plain types that JSON has, without ansible-core's tags."""
    if isinstance(value, Mapping):
        return {native(key): native(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [native(item) for item in value]
    for plain in (bool, int, float, str):
        if isinstance(value, plain):
            return plain(value)
    # Convert a vaulted text or a date to a string, because roles receive it as text.
    return None if value is None else str(value)


# Prefixes that only variables of this collection have. Prefixes of its other roles are not listed, because they are
# common words.
OWN_PREFIXES = (
    "vgpu_",
    "vcuda_",
    "nvidia_driver_",
    "nvidia_docker_",
    "container_runtime_",
    "device_plugin_",
    "time_slicing_",
)
# Maps variables of earlier versions to the variables that replaced them.
RENAMED = {
    "container_runtime_environment": "vgpu_package_environment",
    "device_plugin_rivals": "device_plugin_conflicting_plugins",
    "device_plugin_rivals_remove": "device_plugin_conflicting_plugins_remove",
    "nvidia_docker_environment": "vgpu_package_environment",
    "nvidia_driver_environment": "vgpu_package_environment",
    "upgrade_node": "device_plugin_node_name",
    "verify_kube_node": "device_plugin_node_name",
}
# Variables of earlier versions that no longer exist, because the roles decide their values.
INTERNAL = (
    "container_runtime_containerd_record",
    "container_runtime_docker_record",
    "container_runtime_docker_settings",
    "container_runtime_drop_in_path",
    "container_runtime_drop_in_text",
    "container_runtime_packages_record",
    "device_plugin_config_path",
    "device_plugin_daemonset_path",
    "device_plugin_daemonset_text",
    "device_plugin_image_list",
    "device_plugin_image_load",
    "device_plugin_packages_record",
    "device_plugin_unit",
    "device_plugin_unit_path",
    "device_plugin_unit_text",
    "mig_record",
    "mps_record",
    "mps_root",
    "nvidia_docker_config_path",
    "nvidia_docker_config_record",
    "nvidia_docker_record",
    "nvidia_driver_record",
    "nvidia_driver_setup_record",
    "nvidia_driver_vgpu_token_sha256",
    "vcuda_arbiter_unit",
    "vcuda_arbiter_unit_path",
    "vcuda_arbiter_unit_text",
    "vcuda_build_cache",
)
# Prefixes that are not checked. They differ by one letter from vcuda_ and vgpu_, but inventories of GPU hosts use them
# for other products.
OTHERS_PREFIXES = ("cuda_", "gpu_")


class Names:
    """Holds the valid names, and finds out whether an unknown name is a mistyped valid one.

    A check costs one dictionary look-up for each letter of the name.
    """

    def __init__(self, valid: Iterable[str]) -> None:
        self.valid = frozenset(valid)
        self._shorter: dict[str, list[str]] = {}
        for name in sorted(self.valid):
            for form in _without_one(name):
                self._shorter.setdefault(form, []).append(name)

    def looks_ours(self, name: str) -> bool:
        """Returns whether this is the name of a variable of the collection, or a mistyped form of such a name."""
        return name in self.valid or self.fault(name) is not None

    def fault(self, name: str) -> Finding | None:
        """Returns the error for a name that resembles a valid name but is not valid."""
        if name in self.valid or name.startswith(("_", "ansible_", *OTHERS_PREFIXES)):
            return None
        if name in RENAMED:
            return error(name, f'"{name}" is no longer a variable; set "{RENAMED[name]}" in its place')
        if name in INTERNAL:
            return error(name, f'"{name}" is no longer a variable; remove it, because its role decides the value')
        plain = name.replace("-", "_")
        expected = plain if plain in self.valid else EXPECTED_NAMES.get(plain)
        meant = expected or self._one_off(name) or self._alike(name)
        if meant is None and not name.startswith(OWN_PREFIXES):
            return None
        hint = f'did you mean "{meant}"?' if meant else "docs/variables.md lists the valid ones"
        return error(name, f'unknown variable "{name}"; {hint}')

    def _alike(self, name: str) -> str | None:
        """Returns the nearest name of the same role, compared after the common prefix."""
        own = [prefix for prefix in OWN_PREFIXES if name.startswith(prefix)]
        prefix = own[0] if own else name.split("_")[0] + "_"
        rest = {one[len(prefix) :]: one for one in sorted(self.valid) if one.startswith(prefix)}
        # A name with another prefix (a plain word such as verify_) counts as mistyped only if it is very near to a
        # valid name.
        close = difflib.get_close_matches(name[len(prefix) :], rest, n=1, cutoff=0.6 if own else 0.9)
        return rest[close[0]] if close else None

    def _one_off(self, name: str) -> str | None:
        """Returns the valid name that differs from ``name`` in one letter, which is omitted, added, replaced, or
        swapped with its neighbour.
        """
        for form in _without_one(name):
            for meant in self._shorter.get(form, ()):
                if _edits(name, meant) <= 1:
                    return meant
        return None


def _without_one(name: str) -> list[str]:
    return [name, *(name[:n] + name[n + 1 :] for n in range(len(name)))]


def _edits(one: str, other: str) -> int:
    """Returns the number of edits between two names: 0, 1, or 2 for two or more. Compares only what is left without the
    common beginning and end.
    """
    while one and other and one[0] == other[0]:
        one, other = one[1:], other[1:]
    while one and other and one[-1] == other[-1]:
        one, other = one[:-1], other[:-1]
    if len(one) <= 1 and len(other) <= 1:
        return max(len(one), len(other))
    return 1 if len(one) == 2 and one == other[::-1] else 2
