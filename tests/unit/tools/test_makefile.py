# SPDX-License-Identifier: Apache-2.0
"""Tests the Makefile: in a fresh clone each test target first builds what it needs, and `make help` lists every
target."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MAKEFILE = (ROOT / "Makefile").read_text()
RULE = re.compile(r"^(?P<targets>[a-z0-9 -]+):(?P<needs>[^=\n#]*)(?:##.*)?\n(?P<recipe>(?:\t.*\n?)+)", re.MULTILINE)


def rules() -> dict[str, tuple[set[str], str]]:
    return {one["targets"]: (set(one["needs"].split()), one["recipe"]) for one in RULE.finditer(MAKEFILE)}


def phony() -> list[str]:
    return [name for line in re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.M) for name in line.split()]


def test_test_targets_build_the_collection_first() -> None:
    runs = {
        name: needs
        for name, (needs, recipe) in rules().items()
        if re.search(r"\$\((PYTEST|GATES)\)|molecule\.sh", recipe)
    }
    assert {"test", "e2e", "e2e-scheduler", "fuzz", "molecule-all"} <= set(runs), (
        "expected the rules of these test targets"
    )
    assert {name for name, needs in runs.items() if "collection" not in needs} == set()
    assert {name for name, needs in runs.items() if "venv" not in needs} == set()


def test_help_has_one_line_for_each_target() -> None:
    shown = subprocess.run(
        ["make", "--no-print-directory", "-C", str(ROOT), "help"], capture_output=True, text=True, check=True
    ).stdout
    lines = [re.fullmatch(r"make (\S+) +(\S.*)", line) for line in shown.splitlines()]
    assert all(lines), shown
    names = [line[1] for line in lines if line]
    assert sorted(names) == sorted(set(phony())), "each .PHONY target has a text after its ##"
    assert max(len(line) for line in shown.splitlines()) <= 120


def test_all_targets_are_phony() -> None:
    made = {name for targets in rules() for name in targets.split()}
    assert made == set(phony())


def test_rehearsal_of_an_unpacked_artefact_is_refused_before_anything_is_installed(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / "MANIFEST.json").touch()
    command = ["make", "-C", str(tmp_path), "rehearse", "INVENTORY=inventory"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"{tmp_path} is an installed collection; expected a checkout" in done.stderr
    assert sorted(one.name for one in tmp_path.iterdir()) == ["MANIFEST.json", "Makefile"]
