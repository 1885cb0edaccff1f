# SPDX-License-Identifier: Apache-2.0
"""Tests vgpuctl top, which shows the usage of GPUs as a table or as a live screen. The output has figures, processes
and tenants, and must fit the terminal. A tenant is a pod or a lease (a slice for a container outside Kubernetes).
"""

from __future__ import annotations

import io
import re
import sys
from typing import Any

import pytest
from vgpu_plugin.admin.admin_socket import Fault
from vgpu_plugin.ctl import main as ctl
from vgpu_plugin.ctl import top as ctl_top
from vgpu_plugin.ctl.tenants import Tenants

UUID = "GPU-58761ffe-067d-967c-c921-df91885a18d2"


def row(name: str, *programs: tuple[int, str], **changes: Any) -> dict[str, Any]:
    numbers = {"memory_limit": 5386 << 20, "memory_used": 1 << 30, "share_limit": 0.33, "share_granted": 0.25}
    names = {"namespace": "ml", "pod": name, "container": "main", "uuid": UUID, "allocation": "a1", "kind": "kubelet"}
    found = [{"pid": pid, "name": program, "bytes": 512 << 20} for pid, program in programs]
    return {**names, **numbers, "processes": 3, "device_seconds": 1.5, "holder": "", "programs": found, **changes}


def status(**changes: Any) -> dict[str, Any]:
    gpu = {"index": 0, "uuid": UUID, "model": "Tesla V100-SXM2-16GB", "memory_mib": 16160, "healthy": True}
    gauges = {"memory_used_mib": 1024, "utilisation": 37, "temperature": 41, "reason": ""}
    slices = [{"id": f"{UUID}::{n}", "uuid": UUID, "state": one} for n, one in enumerate(("in use", "free", "free"))]
    return {"gpus": [{**gpu, **gauges}], "slices": slices, "warnings": [], **changes}


LONG = "a-pod-with-a-name-as-long-as-people-like-to-have-them-0"


@pytest.mark.parametrize("width", [0, 60, 80, 100, 132, 200])
def test_names_are_shortened_before_figures(width):
    usages = [row("train", (4711, "python3")), row(LONG, (123456, "torchrun"))]
    whole = ctl_top.top(usages, indexes={UUID: 0}).splitlines()
    lines = ctl_top.top(usages, width=width, indexes={UUID: 0}).splitlines()
    assert len(lines) == 3
    if not width or max(map(len, whole)) <= width:
        assert lines == whole
        return
    assert max(map(len, lines)) <= width
    if width >= 80:
        assert lines[1].split()[-7:] == ["1024", "5386", "33", "25", "-", "4711", "python3"]
        assert lines[1].startswith("0    ml/train") and lines[2].endswith("torchrun")


# columns: the changed fields of a usage; the expected tenant name, the expected last words of the tenant's lines
SHOWN = [
    ({}, "ml/train/main", ["-", "3 in ledger"]),
    ({"processes": 0}, "ml/train/main", ["-", "-"]),
    ({"pod": "", "kind": "container", "holder": "docker web"}, "docker web", ["-", "3 in ledger"]),
    ({"pod": "", "kind": "exec", "holder": "ann: train.py"}, "ann: train.py", ["-", "3 in ledger"]),
    ({"pod": "", "kind": "lease"}, "(lease a1)", ["-", "3 in ledger"]),
]


@pytest.mark.parametrize(("changes", "tenant", "end"), SHOWN)
def test_usage_is_shown_with_its_tenant(changes, tenant, end):
    (line,) = ctl_top.top([row("train", **changes)], indexes={UUID: 3}).splitlines()[1:]
    cells = re.split(r"\s{2,}", line)
    assert (cells[0], cells[1], cells[-2:]) == ("3", tenant, end)


def test_processes_are_listed_up_to_a_maximum():
    programs = [(100 + n, f"worker-{n}") for n in range(6)]
    lines = ctl_top.top([row("train", *programs)], indexes={UUID: 0}).splitlines()
    assert [re.split(r"\s{2,}", line.strip())[-2:] for line in lines[1:5]] == [
        [str(pid), name] for pid, name in programs[:4]
    ]
    assert lines[2].split() == ["512", "101", "worker-1"]
    assert lines[5].strip() == "and 2 more"


@pytest.mark.parametrize(
    ("group", "answer", "name"),
    [
        ("0::/system.slice/docker-{}.scope", "/web\n", "docker web"),
        ("0::/docker/{}", "/web\n", "docker web"),
        ("0::/machine.slice/libpod-{}.scope/container", "web\n", "podman web"),
        ("0::/docker/{}", None, "docker " + "ab" * 6),
        ("0::/user.slice", "web", ""),
    ],
)
def test_container_name_is_found_by_its_process(tmp_path, group, answer, name):
    (tmp_path / "17").mkdir()
    (tmp_path / "17" / "cgroup").write_text(group.format("ab" * 32) + "\n")
    asked: list[tuple[str, ...]] = []

    def ask(*words: str) -> str | None:
        asked.append(words)
        return answer

    tenants = Tenants(tmp_path, ask)
    usages = [row("", (17, "python3"))]
    assert tenants.of(usages) == ({"a1": name} if name else {})
    assert tenants.of(usages) == tenants.of(usages) and len(asked) == (1 if name else 0)
    # vgpuctl queries no engine for the name of a pod, of a lease whose holder has a name, or of a process that has
    # ended.
    assert tenants.of([row("train", (17, "x")), row("", (17, "x"), holder="ann: x"), row("", (18, "x"))]) == {}


# ---- the live screen


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def live_top(monkeypatch, answers: list, *options: str, lines: str = "24") -> tuple[int, list[str]]:
    """Runs vgpuctl top in an 80-column terminal; returns its exit status and the screens that it showed. ``answers``:
    the plugin's successive responses. Ctrl-C is pressed after the last one.
    """
    left, shown = list(answers), Tty()

    def usages(_source):
        answer = left.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def wait(_seconds: float) -> bool:
        if not left:
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(ctl_top.Source, "usages", usages)
    monkeypatch.setattr(ctl_top.Source, "status", lambda _source: status())
    monkeypatch.setattr(ctl_top, "_quit_within", wait)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", lines)
    monkeypatch.setattr(sys, "stdout", shown)
    rc = ctl.main(["top", *options])
    text = shown.getvalue()
    if ctl_top.BEGIN in text:
        assert text.startswith(ctl_top.BEGIN) and text.endswith(ctl_top.END)
        text = text.removeprefix(ctl_top.BEGIN).removesuffix(ctl_top.END)
    text = text.replace(ctl_top.REST_OF_LINE, "").replace(ctl_top.REST_OF_SCREEN, "")
    return rc, text.split(ctl_top.HOME)[1:]


GONE = Fault("UNAVAILABLE", "it does not answer")


def test_live_screen_survives_a_plugin_restart(monkeypatch):
    status, screens = live_top(monkeypatch, [[row("train")], [row("train")], GONE, GONE, [row("train")], []])
    assert (status, len(screens)) == (0, 5)
    assert all(one.startswith("vgpuctl: it does not answer\nno response for 0 s") for one in screens[1:3])
    for one in screens:
        assert max(map(len, one.splitlines())) <= 80
    assert "Tesla V100-SXM2-16GB" in screens[0] and "1 in use" in screens[0] and "ml/train/main" in screens[3]
    assert ctl_top.NOBODY in screens[4]
    assert screens[0].splitlines()[-1] == "updated every 2 s; q ends"


@pytest.mark.parametrize("lines", [8, 12, 24])
def test_screen_fits_the_terminals_height(monkeypatch, lines):
    usages = [row(f"train-{n}", allocation=f"a{n}") for n in range(15)]
    _status, screens = live_top(monkeypatch, [usages, usages], lines=str(lines))
    found = screens[0].splitlines()
    assert len(found) == lines
    hidden = int(found[-2].split()[0]) if "more lines" in found[-2] else 0
    assert (sum("ml/train-" in line for line in found) + hidden == 15) == (lines == 24 or hidden > 0)


def test_live_table_without_tenants_ends_at_once(monkeypatch, capsys):
    assert live_top(monkeypatch, [GONE])[0] == 1
    assert capsys.readouterr().err == "vgpuctl: it does not answer\n"


def test_interrupt_in_a_call_prints_no_traceback(monkeypatch):
    assert live_top(monkeypatch, [KeyboardInterrupt()])[0] == 130


def test_one_table_has_the_share_of_its_interval(monkeypatch, capsys):
    answers = [[row("train", device_seconds=1.0)], [row("train", device_seconds=1.5)]]
    moments = iter((10.0, 12.0))
    monkeypatch.setattr(ctl_top.Source, "usages", lambda _source: answers.pop(0))
    monkeypatch.setattr(ctl_top.Source, "status", lambda _source: status())
    monkeypatch.setattr(ctl_top.time, "sleep", lambda _seconds: None)
    monkeypatch.setattr(ctl_top.time, "monotonic", lambda: next(moments))
    assert ctl.main(["top", "--once"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[7] == "25"
