# SPDX-License-Identifier: Apache-2.0
"""Tests that root runs only code that nobody else can change.

No source may use a predictable file name in a folder that every user can write to, such as /tmp. No Python that root
starts may import from its working directory or from PYTHONPATH.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("roles", "plugins", "playbooks", "tools", "native")
PAGES = (".md", ".json")  # documents and dashboards, which are not run

# Finds paths in /tmp and /var/tmp, and functions that return predictable names. mkstemp, Ansible's tempfile and most
# functions of Python's tempfile choose unpredictable names, so they are allowed.
SHARED = re.compile(r"(?<![\w.{}-])/(?:var/)?tmp(?![\w-])|\bmktemp\(|\btmpnam\b|\btempnam\b|\bgettempdir\b")
# Exceptions: file → reason why it may name such a folder.
SHARED_ALLOWED = {
    "plugins/module_utils/kube/client.py": "a docstring explains why the client's discovery is not used",
    "plugins/module_utils/kube/scheduler_manifests.py": "the pod has its own volume at this path",
    "plugins/module_utils/packages/apt_host.py": "100 MB of package lists, in a TemporaryDirectory",
    "tools/archives.py": "package lists, in a TemporaryDirectory",
    "native/vcuda/src/limits/limits.c": "a library that a user preloads manually; root of a node does not",
    "native/vcuda/probe/bypass.c": "runs in a container and makes its names by mkstemp",
}

# Programs in these places run as root, on a host or in an image. All other programs run as the user who starts them.
BY_ROOT = ("roles/", "plugins/", "native/plugin/src/", "native/plugin/image/", "native/plugin/tools/installer.py")
MODULE = re.compile(r"""(?<![\w-])-[A-Za-z]*m(?=["',\s]+(?:[a-z_]\w*(?:\.\w+)*)\b)""")
PYTHON = re.compile(r"""(?:python3?(?:\.\d+)?|@PYTHON@|sys\.executable|playbook_python)(?=["'\s),}\]]|$)""")
ISOLATED = re.compile(r"(?<![\w-])-(?:[A-Za-z]*I[A-Za-z]*|P)\b")


def tracked() -> list[str]:
    done = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *FOLDERS], cwd=ROOT, stdout=-1, text=True, check=True
    )
    return [one for one in done.stdout.splitlines() if not one.endswith(PAGES) and (ROOT / one).is_file()]


def lines(path: str) -> list[tuple[int, str]]:
    try:
        return list(enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), 1))
    except UnicodeDecodeError:
        return []


def shared(text: str) -> bool:
    return SHARED.search(text) is not None


def test_no_predictable_name_in_a_shared_folder() -> None:
    files = tracked()
    assert len(files) > 500
    found = [
        f"{path}:{number}: {line.strip()}"
        for path in files
        if path not in SHARED_ALLOWED
        for number, line in lines(path)
        if shared(line)
    ]
    assert found == []


# columns: line of a source file; expected: whether it uses a predictable name
@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        ("dest: /tmp/archive.tgz", True),
        ('path = "/var/tmp/vgpu-plugin.pyz"', True),
        ("name = tempfile.mktemp()", True),
        ("name = os.path.join(tempfile.gettempdir(), 'x')", True),
        ("dest: /var/lib/vgpu-incoming/archive.tgz", False),
        ("with tempfile.TemporaryDirectory() as folder:", False),
        ("folder = mkdtemp(template);", False),
        ('"tmp": 0o1777, "var/tmp": 0o1777', False),
    ],
)
def test_predictable_names_in_shared_folders_are_found(line: str, is_one: bool) -> None:
    assert shared(line) is is_one


COMMANDS = {f"{prefix}{name}" for prefix in ("ansible.builtin.", "") for name in ("command", "shell", "raw", "script")}


def of_tasks(node: object) -> Iterator[str]:
    """Yields the text of each command in a file with Ansible tasks."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in COMMANDS:
                yield yaml.safe_dump(value, width=4096)
            yield from of_tasks(value)
    elif isinstance(node, list):
        for one in node:
            yield from of_tasks(one)


def of_python(text: str) -> Iterator[str]:
    """Yields the source of each list in a Python program that is a command line for a Python interpreter."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.List) and len(node.elts) > 1:
            first = ast.unparse(node.elts[0])
            if PYTHON.search(first) and not isinstance(node.elts[0], ast.Starred):
                yield ast.unparse(node)


def commands(path: str) -> list[str]:
    """Returns the commands in a file of units, image builds, tasks or Python code."""
    text = (ROOT / path).read_text(encoding="utf-8")
    found = re.findall(r"^Exec\w+=[^\n]+|^(?:RUN|CMD|ENTRYPOINT)[^\n]+(?:\n\s+&&[^\n]+)*", text, re.MULTILINE)
    if path.endswith(".yml"):
        found += [*of_tasks(yaml.safe_load(text)), *re.findall(r"ExecStart\w*=[^\n]+", text)]
    elif path.endswith(".py"):
        found += of_python(text)
    return found


def wrong(command: str) -> str:
    """Returns why a command starts Python in an unsafe way ("": it does not)."""
    if "PYTHONPATH" in command:
        return "passes PYTHONPATH"
    if not PYTHON.search(command) or ISOLATED.search(command):
        return ""
    return "starts a module" if MODULE.search(command) else "starts Python without -I"


def test_root_starts_python_isolated() -> None:
    looked, found = 0, []
    for path in tracked():
        if not path.startswith(BY_ROOT) and not path.endswith(".service"):
            continue
        if not path.endswith((".py", ".yml", ".j2", ".service", "Containerfile")):
            continue
        for command in commands(path):
            looked += 1
            if reason := wrong(command):
                found.append(f"{path}: {reason}: {' '.join(command.split())[:120]}")
        found += [f"{path}:{number}: {line.strip()}" for number, line in lines(path) if '"PYTHONPATH"' in line]
    assert looked > 30
    assert found == []


# columns: command that root runs; expected fault ("": it is safe, or it does not start Python)
@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("ExecStart=/usr/bin/python3 -B -m vgpu_mig /etc/vgpu/mig.json", "starts a module"),
        ('[sys.executable, "-m", "venv", target]', "starts a module"),
        ('[sys.executable, "-I", "-m", "venv", target]', ""),
        ("RUN python3 /opt/vgpu/vgpu-plugin.pyz --root /opt", "starts Python without -I"),
        ("RUN python3 -I /opt/vgpu/vgpu-plugin.pyz --root /opt", ""),
        ("cmd: '{{ __device_plugin_look.python }} archive.pyz'", "starts Python without -I"),
        ("[python, '-c', VERSION]", "starts Python without -I"),
        ("ExecStart=/usr/bin/python3 -IB /usr/local/lib/vgpu-mig", ""),
        ("ExecStart=/usr/bin/python3 -BI /usr/local/lib/vgpu-mig", ""),
        ("ExecStart=/usr/bin/env PYTHONPATH=/x /usr/bin/python3 -I x.py", "passes PYTHONPATH"),
        ("ExecStart=/usr/local/lib/vgpu/current/vgpu-arbiter --run /run/vgpu", ""),
    ],
)
def test_unsafe_starts_of_python_are_found(command: str, reason: str) -> None:
    assert wrong(command) == reason
