# SPDX-License-Identifier: Apache-2.0
"""Tests that each vgpuctl command with --json prints exactly the fields that docs/vgpuctl.md documents for it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from vgpu_plugin._proto import admin_pb2 as api
from vgpu_plugin.admin.metrics import TYPES
from vgpu_plugin.ctl import completion
from vgpu_plugin.ctl import main as ctl
from vgpu_plugin.ctl.arguments import COMMANDS, WITHOUT_JSON, parser
from vgpu_plugin.daemon import Daemon

from ..conftest import ROOT, FakeGpus, Gauges
from ..samples import until

# Command → the protobuf message that has all fields of the command's output. The output itself may show fewer fields,
# because an empty list shows none.
MESSAGES = {
    "status": api.StatusResponse,
    "top": api.UsageResponse,
    "watch": api.WatchResponse,
    "resize": api.ResizeResponse,
}
KINDS = {bool: "bool", int: "integer", float: "number", str: "text"}


def documented() -> dict[str, dict[str, str]]:
    """Returns command → field → type, as documented. A line of the page names the object (none for the outermost
    object), the type, and the fields of this type.
    """
    found = {}
    for part in re.split(r"^## ", (ROOT / "docs" / "vgpuctl.md").read_text(), flags=re.M)[1:]:
        command, _end, lines = part.partition("\n")
        fields: dict[str, str] = {}
        for row in re.findall(r"^- (?:`([^`]+)`, )?([a-z]+(?: `[^`]+`)?): (.+)$", lines.replace("\n  ", " "), re.M):
            fields |= of_row(*row, fields)
        found[command] = fields
    return found


def of_row(place: str, kind: str, cell: str, before: dict[str, str]) -> dict[str, str]:
    if kind.startswith("as `"):
        # The page may describe a list by reference to an earlier list with the same fields.
        like = kind[4:-1]
        return {one.replace(like, place, 1): what for one, what in before.items() if one.startswith(f"{like}.")}
    names = re.findall(r"`([^`]+)`", re.sub(r"\([^()]*\)", "", cell))
    return {f"{place}.{name}" if place else name: kind for name in names}


def of_message(descriptor: Any, before: str = "") -> Iterator[tuple[str, str]]:
    for field in descriptor.fields:
        name = before + field.name + ("[]" if field.is_repeated else "")
        if field.message_type is not None:
            yield from of_message(field.message_type, f"{name}.")
        else:
            kinds = {field.CPPTYPE_STRING: "text", field.CPPTYPE_BOOL: "bool", field.CPPTYPE_DOUBLE: "number"}
            yield name, kinds.get(field.cpp_type, "integer")


def of_value(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields (field, type) of a printed value. Labels, envs and annotations are maps with user-defined keys, so their
    keys are not fields.
    """
    if isinstance(value, dict) and not name.endswith(("labels", "envs", "annotations")):
        for key, one in value.items():
            yield from of_value(one, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for one in value:
            yield from of_value(one, f"{name}[]")
    else:
        yield name, "object" if isinstance(value, dict) else KINDS[type(value)]


@pytest.fixture
def daemon(node, kubelet, running):
    node.configure(splitCount=4)
    source = FakeGpus(node.gpus)
    source.shown = {node.gpus[0].uuid: Gauges(1234, 37, 41)}
    running(Daemon(node.setup(), lambda: source))
    until(lambda: kubelet.state()["resources"].get("nvidia.com/gpu", {}).get("allocatable") == 8, "the slices")


def asked(node, capsys, *words: str) -> tuple[int, Any]:
    capsys.readouterr()
    status = ctl.main(["--socket", str(node.paths.admin_socket), *words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_page_lists_every_command_with_json_output():
    assert set(documented()) == set(COMMANDS) - set(WITHOUT_JSON)


@pytest.mark.parametrize("command", MESSAGES)
def test_page_has_the_fields_of_each_message(command):
    assert documented()[command] == dict(of_message(MESSAGES[command].DESCRIPTOR))


def test_printed_fields_are_documented(node, kubelet, daemon, capsys):
    kubelet.run_pod("train")
    pages = documented()
    lease = asked(node, capsys, "lease")[1]
    answers = {
        name: asked(node, capsys, name)[1] for name in ("status", "slices", "top", "watch", "explain", "metrics")
    }
    answers["resize"] = asked(node, capsys, "resize", lease["allocation"], "--memory", "1Gi")[1]
    answers |= {"lease": lease, "release": asked(node, capsys, "release", lease["allocation"])[1]}
    for command, answer in answers.items():
        printed = dict(of_value(answer))
        extra = {name: kind for name, kind in printed.items() if pages[command].get(name) != kind}
        # Lists that are empty on this node show no fields.
        assert {name for name in extra if not name.endswith("[]")} == set(), command
    for command in ("slices", "explain", "metrics", "release", "resize"):
        assert dict(of_value(answers[command])) == pages[command]
    assert {one["name"] for one in answers["metrics"]["metrics"]} <= set(TYPES)
    assert {one["state"] for one in answers["slices"]["slices"]} == {"free", "in use"}
    first, second = answers["status"]["gpus"]
    assert [first[key] for key in ("memory_used_mib", "utilisation", "temperature")] == [1234, 37, 41]
    assert [second[key] for key in ("memory_used_mib", "utilisation", "temperature")] == [-1, -1, -1]


# columns: vgpuctl's arguments; expected exit status, expected code in the output (None means not checked), expected
# words of the error
FAULTS = [
    (("release", "x"), 1, "NOT_FOUND", "there is no lease x"),
    (("lease", "--ttl", "4000"), 1, "INVALID_ARGUMENT", "expected 1 to 3600"),
    (("forget", "GPU-x"), 1, None, "GPU-x"),
    (("resize", "x"), 1, "INVALID_ARGUMENT", "x: no size is requested"),
    (("resize", "x", "--memory", "512K"), 1, "INVALID_ARGUMENT", "expected 1 MiB or more"),
    (("resize", "x", "--memory", "1Gi"), 1, "NOT_FOUND", "this node has no allocation, slice in use or holder named"),
    (("resize", "0::1", "--cores", "0"), 1, "NOT_FOUND", "named 0::1"),
    (("resize", "ml/train/main", "--cores", "7%"), 1, "NOT_FOUND", "named ml/train/main"),
]


@pytest.mark.parametrize(("words", "status", "code", "sentence"), FAULTS)
def test_errors_are_printed_as_json(node, daemon, capsys, words, status, code, sentence):
    found, answer = asked(node, capsys, *words)
    assert (found, set(answer)) == (status, {"error", "code"})
    assert sentence in answer["error"] and code in (None, answer["code"])


def test_states_of_slices(node, kubelet, running, capsys):
    """If a GPU has a fault, all its slices are unhealthy, also slices in use. A leased slice of a healthy GPU is in
    use, not unhealthy, although the kubelet sees it as unhealthy.
    """
    node.configure(splitCount=2)
    source = FakeGpus(node.gpus)
    running(Daemon(node.setup(), lambda: source))
    until(lambda: kubelet.state()["resources"].get("nvidia.com/gpu", {}).get("allocatable") == 4, "the slices")
    first, second = (gpu.uuid for gpu in node.gpus)
    kubelet.run_pod("train", ids=[f"{first}::0"])
    kubelet.run_pod("other", ids=[f"{second}::0"])
    asked(node, capsys, "lease", "--uuid", first)

    def states() -> dict[str, str]:
        return {one["id"]: one["state"] for one in asked(node, capsys, "slices")[1]["slices"]}

    healthy = {f"{first}::0": "in use", f"{first}::1": "in use", f"{second}::0": "in use", f"{second}::1": "free"}
    assert states() == healthy
    source.xids.put((second, 79))
    sick = {**healthy, f"{second}::0": "unhealthy", f"{second}::1": "unhealthy"}
    until(lambda: states() == sick, "the fault")


# ---- help and completion


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_of_the_help_are_commands_that_parse(command):
    for line in COMMANDS[command][1]:
        words = re.split(r" [|>] ", line)[0].split()
        assert words[0] == "vgpuctl"
        given = parser().parse_args(words[1:])
        assert given.command == command


def completed(tmp_path, *words: str) -> set[str]:
    """Returns the completions that bash offers for the last word of the command line."""
    script = tmp_path / "completion"
    script.write_text(completion.script(parser(), "bash"))
    line = f"source {script}; COMP_WORDS=({' '.join(map(repr, words))}); COMP_CWORD={len(words) - 1}; _vgpuctl; "
    done = subprocess.run(
        ["bash", "-c", line + 'printf "%s\\n" "${COMPREPLY[@]}"'], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


RUN = {f"--{one}" for one in ("help", "uuid", "gpus", "memory", "cores", "engine", "detach", "compose", "cdi-dir")}
COMPLETED = [
    (("vgpuctl", ""), {*COMMANDS, "--help", "--socket", "--version"}),
    (("vgpuctl", "s"), {"status", "slices"}),
    (
        ("vgpuctl", "run", "--"),
        {
            "--help",
            *(f"--{one}" for one in ["uuid", "gpus", "memory", "cores", "engine", "detach", "compose", "cdi-dir"]),
        },
    ),
    (("vgpuctl", "run", "--engine", ""), {"docker", "podman"}),
    (("vgpuctl", "completion", "z"), {"zsh"}),
    (("vgpuctl", "--socket", "x", "top", "--o"), {"--once"}),
]


@pytest.mark.parametrize(("words", "offered"), COMPLETED)
def test_completion(tmp_path, words, offered):
    """The script for bash offers the commands and options that fit the words typed so far."""
    assert completed(tmp_path, *words) == offered


def test_zsh_completion_equals_bash_completion():
    text = completion.script(parser(), "zsh")
    assert text.startswith("#compdef vgpuctl\n") and completion.script(parser(), "bash") in text
