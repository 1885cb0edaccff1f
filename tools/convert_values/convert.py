# SPDX-License-Identifier: Apache-2.0
"""Converts the settings of other GPU sharing projects to group variables of this collection.

Input formats: values of the Helm charts of HAMi, of NVIDIA's device plugin and of NVIDIA's GPU operator; NVIDIA's
configuration file v1; manifests (DaemonSet, ConfigMap, Pod, ClusterPolicy) of the plugins of 4paradigm, NVIDIA and
HAMi. Every setting without a group variable gives a note with the reason. The functions do no I/O.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml
from vgpu_plugin._shared.config import variables as schema
from vgpu_plugin.offer.options import OPTIONS

from . import tables
from .values import as_text, leaves_of, parse, plain

# Maps a path in node.yaml to the group variable that sets it.
PLACES = {one.node: name for name, one in schema.VARIABLES.items() if one.node}
FLAGS = {one.flag: one for one in OPTIONS}
ENVIRONMENT = {one.environment: one for one in OPTIONS}
BY_PLACE = {one.place: one for one in OPTIONS}
GPU = "nvidia.com/gpu"


class Note(NamedTuple):
    """A note for the user; ``path`` is the path of the setting in the input file."""

    path: str
    text: str


class Converted:
    """Result: ``variables`` for group_vars in the order of the input, and ``notes`` for the user."""

    def __init__(self) -> None:
        self.variables: dict[str, Any] = {}
        self.notes: list[Note] = []

    def note(self, path: str, text: str) -> None:
        self.notes.append(Note(path, text))

    def set(self, path: str, variable: str, value: Any) -> None:
        known = self.variables.get(variable, value)
        if known != value:
            self.note(path, f"not set: {variable} would be {value!r}, but an earlier setting made it {known!r}")
            return
        self.variables[variable] = value

    def option(self, flag: str, value: Any) -> None:
        """Adds to ``device_plugin_options`` an option that has no group variable."""
        self.flag(f"--{flag}={as_text(value)}")

    def flag(self, text: str) -> None:
        options = self.variables.setdefault("device_plugin_options", [])
        if text not in options:
            options.append(text)


class Unknown(ValueError):
    """Raised for a document whose format cannot be converted."""


def convert(documents: list[Any]) -> Converted:
    """Converts all documents of a file to one set of variables. Raises Unknown for a document of another format."""
    found = Converted()
    for number, document in enumerate(one for one in documents if one is not None):
        _document(document, f"document {number + 1}" if len(documents) > 1 else "", found)
    _judge(found)
    return found


def _document(document: Any, where: str, found: Converted) -> None:
    if not isinstance(document, Mapping):
        raise Unknown(f"expected a mapping, found {type(document).__name__}")
    document = {key: one for key, one in document.items() if key not in tables.TITLES}
    if document.get("kind") == "List":
        for item in document.get("items") or []:
            _document(item, where, found)
    elif document.get("kind") == "ClusterPolicy":
        _operator_chart(document.get("spec") or {}, found)
    elif "kind" in document:
        _manifest(document, found)
    elif document.get("version") == "v1":
        _file_v1(document, "", found)
    elif _is_of_the_operator(document):
        _operator_chart(document, found)
    elif any(key in document for key in tables.HAMI_CHART):
        _hami_chart(document, found)
    elif any(key in document for key in tables.NVIDIA_CHART):
        _nvidia_chart(document, found)
    elif tables.ALL_CHARTS in document:
        _hami_chart(document, found)
    elif isinstance(document.get("nodeconfig"), list):
        _hami_nodes(document["nodeconfig"], "nodeconfig", found)
    else:
        keys = ", ".join(sorted(map(str, document))[:5]) or "none"
        raise Unknown(
            f"{where or 'the file'} has the keys {keys}; expected values of HAMi's or NVIDIA's chart, NVIDIA's "
            "configuration file (version: v1), or a manifest with the key kind"
        )


def _is_of_the_operator(values: Mapping[str, Any]) -> bool:
    plugin = values.get(tables.ALL_CHARTS) or {}
    return any(key in values for key in tables.OPERATOR_CHART) or tables.OPERATOR_PLUGIN in plugin


# --- charts ----------------------------------------------------------------------------------------------------------


def _hami_chart(values: Mapping[str, Any], found: Converted) -> None:
    found.set("", "vgpu_sharing", "vcuda")
    found.set("", "vgpu_slice_sizing", "requested")
    found.set("", "vgpu_kubeconfig", "~/.kube/config")
    found.note("", tables.OF_CLUSTER)
    leaves = dict(leaves_of(values))
    _default_memory(leaves.get(tables.DEFAULT_MEMORY), found)
    for path, default in tables.HAMI_DEFAULTS.items():
        leaves.setdefault(path, default)
    others = []
    for path, value in leaves.items():
        if path in tables.HAMI_VARIABLES:
            found.set(path, tables.HAMI_VARIABLES[path], plain(value))
        elif path in tables.HAMI_POLICIES and value in tables.POLICIES:
            found.set(path, tables.HAMI_POLICIES[path], tables.POLICIES[value])
        elif path in tables.HAMI_RESOURCES:
            names = found.variables.setdefault("vgpu_resource_names", {})
            names[tables.HAMI_RESOURCES[path]] = value
        elif path.startswith("devicePlugin.extraArgs["):
            _argument(str(value), path, found)
        elif path in tables.HAMI_PLACES:
            _place(tables.HAMI_PLACES[path], value, path, found)
        elif path == tables.HAMI_NODES and isinstance(parse(value), Mapping):
            _hami_nodes(parse(value).get("nodeconfig") or [], f"{path}.nodeconfig", found)
        elif path in tables.HAMI_NOTES:
            found.note(path, tables.HAMI_NOTES[path])
        elif path.startswith(tuple(tables.HAMI_SERVICES)) and not path.startswith(tables.CHART_ONLY):
            found.note(path, tables.HAMI_SERVICES[".".join(path.split(".")[:2])])
        elif path.startswith(tables.OTHER_VENDORS) and not path.startswith(tables.NVIDIA_CARDS):
            others.append(path)
        elif not path.startswith(tables.CHART_ONLY):
            found.note(path, tables.NO_MEANING)
    if others:
        more = f"and {len(others) - 1} more settings are" if len(others) > 1 else "is"
        found.note(others[0], f"{more} for other vendors' cards: this collection shares only NVIDIA's GPUs")


def _default_memory(value: Any, found: Converted) -> None:
    """Converts HAMi's default memory of a pod that requests only a count of GPUs.

    ``value`` is in MiB: 0 means the whole GPU, None means that the chart's values do not set it.
    """
    if value is None:
        found.note("", tables.NO_DEFAULT_MEMORY)
    elif plain(value) != 0:
        found.set(tables.DEFAULT_MEMORY, "scheduler_plain", "default")
        found.note(tables.DEFAULT_MEMORY, tables.OF_COUNT_ALONE)


def _nvidia_chart(values: Mapping[str, Any], found: Converted) -> None:
    if not _is_off(values, "devicePlugin.enabled", found):
        _named_files(values.get("config") or {}, "map", "config", found)
    for path, value in leaves_of({key: one for key, one in values.items() if key != "config"}):
        if path == "gfd.enabled":
            _labels(value, found)
        elif path == "devicePlugin.enabled" and value is False:
            continue
        elif path in tables.NVIDIA_CHART_PLACES:
            _place(tables.NVIDIA_CHART_PLACES[path], value, path, found)
        elif path in tables.NVIDIA_CHART_NOTES:
            found.note(path, tables.NVIDIA_CHART_NOTES[path])
        elif not path.startswith(tables.CHART_ONLY):
            found.note(path, tables.NO_MEANING)


def _operator_chart(values: Mapping[str, Any], found: Converted) -> None:
    """Converts the GPU operator's values, or the spec of the ClusterPolicy that the operator makes from them."""
    is_off = _is_off(values, "devicePlugin", found)
    plugin = {} if is_off else values.get("devicePlugin") or {}
    if not is_off:
        _named_files(plugin.get("config") or {}, "data", "devicePlugin.config", found)
    for one in plugin.get("env") or []:
        _variable(str(one.get("name")), one.get("value"), "devicePlugin.env", True, found)
    for number, word in enumerate(_joined([str(one) for one in plugin.get("args") or []])):
        _argument(word, f"devicePlugin.args[{number}]", found)
    strategy = (values.get("mig") or {}).get("strategy")
    if strategy:
        _place(("flags", "migStrategy"), strategy, "mig.strategy", found)
    _labels((values.get("gfd") or {}).get("enabled"), found)
    for key in values:
        if key not in ("mig", "gfd") and not (is_off and key == "devicePlugin"):
            found.note(key, tables.OPERATOR_NOTES.get(key, tables.NO_MEANING))


def _is_off(values: Mapping[str, Any], path: str, found: Converted) -> bool:
    """Returns whether the chart disables NVIDIA's plugin, for example in favour of HAMi's. If so, adds a note."""
    off = (values.get("devicePlugin") or {}).get("enabled") is False
    if off:
        found.note(path, tables.PLUGIN_IS_OFF)
    return off


def _labels(enabled: Any, found: Converted) -> None:
    if enabled:
        found.flag("--labels")


def _named_files(config: Mapping[str, Any], key: str, where: str, found: Converted) -> None:
    """Converts named configuration files of NVIDIA's plugin, given as texts.

    The default file sets the group's variables; a node's label chooses one of the others. Without files here or in a
    ConfigMap that the chart names, NVIDIA's plugin shares no GPU.
    """
    texts = config.get(key) or {}
    if not texts and config.get("name"):
        read = f"kubectl get configmap {config['name']} -o yaml | python tools/convert_values -"
        found.note(f"{where}.name", f"that ConfigMap defines how GPUs are shared; convert it too: {read}")
    elif not texts:
        found.set(where, "vgpu_sharing", "none")
    default = config.get("default") or next(iter(texts), "")
    for name, text in texts.items():
        one = parse(text)
        path = f"{where}.{key}.{name}"
        if not isinstance(one, Mapping):
            found.note(path, f"expected NVIDIA's configuration file as text, found {as_text(text)[:40]}")
        elif name == default:
            _file_v1(one, path, found)
        else:
            other = Converted()
            _file_v1(one, path, other)
            found.notes += other.notes
            named = found.variables.setdefault("vgpu_configs", {})
            ours = _config_name(str(name), path, found)
            if ours in named:
                found.note(path, f"the name {ours} is taken by another file; rename this file and convert again")
                continue
            named[ours] = {key[len(schema.PREFIX) :]: value for key, value in other.variables.items() if _is_ours(key)}
            for option in other.variables.get("device_plugin_options", []):
                found.note(path, f"{option} applies to all configurations; set it in device_plugin_options")


def _config_name(name: str, path: str, found: Converted) -> str:
    """Returns a valid name for a configuration; adds a note if the name had to change."""
    ours = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "config"
    if schema.CONFIG_NAME.pattern is not None and schema.CONFIG_NAME.pattern.match(name):
        return name
    found.note(path, tables.RENAMED.format(new=ours))
    return ours


def _is_ours(variable: str) -> bool:
    return variable.startswith(schema.PREFIX)


# --- files and manifests ---------------------------------------------------------------------------------------------


def _file_v1(config: Mapping[str, Any], where: str, found: Converted) -> None:
    prefix = f"{where}: " if where else ""
    sharing = config.get("sharing") or {}
    for path, value in leaves_of({key: one for key, one in config.items() if key not in ("version", "sharing")}):
        _place(tuple(path.split(".")), value, prefix + path, found)
    modes = {"timeSlicing": "time-slicing", "mps": "mps"}
    wanted = [key for key in modes if sharing.get(key)]
    for key in sorted(set(sharing) - set(modes)):
        found.note(f"{prefix}sharing.{key}", tables.NO_MEANING)
    if not wanted:
        found.set(f"{prefix}sharing", "vgpu_sharing", "none")
        return
    if len(wanted) > 1:
        found.note(f"{prefix}sharing", "sets timeSlicing and mps; this conversion chooses mps, as NVIDIA's plugin does")
    mode = wanted[-1]
    found.set(f"{prefix}sharing.{mode}", "vgpu_sharing", modes[mode])
    _replicated(sharing[mode], f"{prefix}sharing.{mode}", found)


def _replicated(section: Mapping[str, Any], path: str, found: Converted) -> None:
    keys = {
        "renameByDefault": "vgpu_rename_by_default",
        "failRequestsGreaterThanOne": "vgpu_fail_requests_greater_than_one",
    }
    for key, variable in keys.items():
        if key in section:
            found.set(f"{path}.{key}", variable, section[key])
    for number, entry in enumerate(section.get("resources") or []):
        where = f"{path}.resources[{number}]"
        if entry.get("name") != GPU:
            found.note(where, f"not carried over: {entry.get('name')}; only {GPU} has replicas in a host group")
            continue
        if entry.get("rename"):
            found.note(f"{where}.rename", "NVIDIA's plugin ignores this key; use vgpu_rename_by_default")
        devices = entry.get("devices", "all")
        if devices == "all" or isinstance(devices, int):
            found.set(where, "vgpu_split_count", entry.get("replicas"))
            if devices != "all":
                found.note(f"{where}.devices", "no variable sets a number of GPUs; list the GPUs in vgpu_devices")
            continue
        exceptions = found.variables.setdefault("vgpu_devices", [])
        for device in devices:
            match = {"uuid": device} if str(device).startswith("GPU-") else {"index": plain(device)}
            exceptions.append({"match": match, "split_count": entry.get("replicas")})


def _manifest(document: Mapping[str, Any], found: Converted) -> None:
    kind = str(document["kind"])
    if kind == "ConfigMap":
        for name, text in (document.get("data") or {}).items():
            inner = parse(text)
            if isinstance(inner, Mapping):
                _document(inner, f"data.{name}", found)
            else:
                found.note(f"data.{name}", tables.NO_MEANING)
        return
    spec = document.get("spec") or {}
    if kind == "CronJob":
        spec = (spec.get("jobTemplate") or {}).get("spec") or {}
    template = document if kind == "Pod" else spec.get("template") or {}
    pod = template.get("spec") or {}
    containers = list(_containers(pod))
    if not containers:
        raise Unknown(f"expected a plugin's DaemonSet, a ConfigMap or a Pod, found a {kind} without containers")
    plugin = [one for one in containers if _is_plugin(one[1])]
    if plugin:
        image = " ".join(str(one.get("image")) for _unused, one in plugin)
        found.set("image", "vgpu_sharing", "vcuda" if any(word in image for word in tables.VCUDA_IMAGES) else "none")
    metadata = template.get("metadata") or {}
    _asked(metadata.get("labels") or {}, "metadata.labels", found)
    for name in metadata.get("annotations") or {}:
        if name in tables.ANNOTATIONS or name.startswith(tables.ANNOTATION_PREFIX):
            found.note(f"metadata.annotations.{name}", tables.ANNOTATION_NOTE)
    for path, container in containers:
        resources = container.get("resources") or {}
        for key in ("limits", "requests"):
            _asked(resources.get(key) or {}, f"{path}.resources.{key}", found)
        words = [str(word) for key in ("command", "args") for word in container.get(key) or []]
        for number, word in enumerate(_joined(words)):
            _argument(word, f"{path}.args[{number}]", found)
        for one in container.get("env") or []:
            _variable(str(one.get("name")), one.get("value"), f"{path}.env", plugin != [], found)


def _asked(names: Mapping[str, Any], path: str, found: Converted) -> None:
    for name in names:
        if name in tables.ASKED:
            found.note(f"{path}.{name}", tables.ASKED_NOTE)


def _containers(pod: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name in ("initContainers", "containers"):
        for number, one in enumerate(pod.get(name) or []):
            yield f"{name}[{number}]", one


def _is_plugin(container: Mapping[str, Any]) -> bool:
    return "device-plugin" in str(container.get("image", "")) or "device-plugin" in str(container.get("command", ""))


def _joined(words: list[str]) -> list[str]:
    """Returns the words with ``--flag value`` joined to ``--flag=value``; splits the command text of ``sh -c``."""
    if len(words) == 3 and words[1] == "-c":
        words = shlex.split(words[2])
    out: list[str] = []
    for word in words:
        before = FLAGS.get(out[-1][2:]) if out and out[-1].startswith("--") else None
        if before is not None and not word.startswith("-") and (not before.true or word.lower() in ("true", "false")):
            out[-1] += f"={word}"
        else:
            out.append(word)
    return out


def _argument(word: str, path: str, found: Converted) -> None:
    if not word.startswith("-"):
        return
    name, is_set, value = word.lstrip("-").partition("=")
    option = FLAGS.get(name)
    if option is None:
        found.note(path, f"--{name}: {tables.FLAG_NOTES.get(name, tables.NO_MEANING)}")
    else:
        _place(option.place, value if is_set else "true", path, found)


def _variable(name: str, value: Any, path: str, plugin: bool, found: Converted) -> None:
    option = ENVIRONMENT.get(name)
    if plugin and option is not None and value is not None:
        _place(option.place, str(value), f"{path}.{name}", found)
    elif option is not None:
        known = PLACES.get(option.place, f"--{option.flag} in device_plugin_options")
        text = f"works in a pod, but can only tighten a limit; for all pods of a host group: {known}"
        found.note(f"{path}.{name}", text)
    elif name in tables.ENVIRONMENT_NOTES:
        found.note(f"{path}.{name}", tables.ENVIRONMENT_NOTES[name])
    elif plugin:
        found.note(f"{path}.{name}", tables.NO_MEANING)


# --- values ----------------------------------------------------------------------------------------------------------


def _place(place: tuple[str, ...], value: Any, path: str, found: Converted) -> None:
    """Sets a value of node.yaml through its group variable, or else through an option of the device plugin."""
    if place in PLACES:
        value = plain(value)
        if PLACES[place] == "vgpu_handover":
            value = _hand_over(value, path, found)
        found.set(path, PLACES[place], value)
    elif place in BY_PLACE:
        found.option(BY_PLACE[place].flag, value)
    else:
        found.note(path, tables.NO_MEANING)


def _hand_over(value: Any, path: str, found: Converted) -> Any:
    words = value if isinstance(value, list) else str(value).split(",")
    if len(words) > 1:
        found.note(path, f"expected one strategy, found {words}; auto chooses the best that the host supports")
        return "auto"
    if words[0] == "envvar":
        found.note(path, "with envvar every unprivileged container can request all GPUs; vgpu_handover: auto is safer")
    return words[0]


def _hami_nodes(nodes: list[Any], path: str, found: Converted) -> None:
    """Adds notes with the host variables that replace HAMi's settings for single nodes."""
    for number, one in enumerate(nodes):
        said = {tables.HAMI_NODE[key]: plain(value) for key, value in one.items() if key in tables.HAMI_NODE}
        lines = ", ".join(f"{key}: {value}" for key, value in said.items())
        found.note(f"{path}[{number}]", f"for the host {one.get('name')}; in host_vars/{one.get('name')}.yml: {lines}")
        for key in sorted(set(one) - set(tables.HAMI_NODE) - {"name"}):
            found.note(f"{path}[{number}].{key}", tables.NO_MEANING)


def _judge(found: Converted) -> None:
    """Adds a note for each finding that preflight would report about the variables."""
    findings: list[Any] = []
    ours = {name: value for name, value in found.variables.items() if _is_ours(name)}
    clean = schema.read(ours, findings)
    if not any(one.level == "error" for one in findings):
        findings += schema.unavailable(clean)
    for one in findings:
        found.note(one.path, f"preflight says ({one.level}): {one.message}")


def group_vars(found: Converted, source: str) -> str:
    """Returns the text of a group_vars file: the notes as comments, then the variables."""
    lines = [f"# Converted from {source}. Read the notes, then delete them."]
    lines += [f"# - {note.path or 'the file'}: {note.text}" for note in found.notes]
    body = yaml.safe_dump(found.variables, sort_keys=False, default_flow_style=False, allow_unicode=True)
    return "\n".join(["---", *lines, body if found.variables else "{}\n"])
