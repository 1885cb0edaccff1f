# SPDX-License-Identifier: Apache-2.0
"""Change functions without I/O in one place at a time, and report which changes no unit test notices.

    python tools/mutants.py [--seed 1] [--count 400] [--workers 2] [--only plan/]

tests/mutants/targets.yml names the files and the tests that must fail. cosmic-ray makes each mutant (a source with one
change) in an export of the working tree; the lock file pins the version of cosmic-ray. --count 0 tests all mutants;
otherwise the seed selects them. Results are stored in .build/mutants/results.jsonl, so a second run with the same
sources continues where the first stopped.
tests/mutants/equivalent.yml lists survivors (mutants that no test notices) that change no behaviour, with the reason.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import yaml
from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".build" / "mutants"
# The replacements of binary and comparison operators: each changes a boundary (< to <=) or takes an opposite operator
# (+ to -). ``|`` is not replaced, because it is usually part of a type annotation.
REPLACED = {
    "ReplaceBinaryOperator": [
        "Add_Sub",
        "Sub_Add",
        "Mul_FloorDiv",
        "Div_Mul",
        "FloorDiv_Mul",
        "Mod_Mul",
        "BitAnd_BitOr",
    ],
    "ReplaceComparisonOperator": [
        "Lt_LtE",
        "LtE_Lt",
        "Gt_GtE",
        "GtE_Gt",
        "Eq_NotEq",
        "NotEq_Eq",
        "Is_IsNot",
        "IsNot_Is",
    ],
}
# A mutant counts as killed if its tests take PATIENCE times as long as without a mutant, and at least LEAST_SECONDS.
PATIENCE, LEAST_SECONDS = 5, 20


@dataclass(frozen=True)
class Mutant:
    """A change: an operator of cosmic-ray, the number of its occurrence, and the changed line's number (from 1) and
    original text.
    """

    path: str
    operator: str
    occurrence: int
    line: int
    text: str
    tests: tuple[str, ...]

    @property
    def key(self) -> str:
        return f"{self.path}:{self.operator}:{self.occurrence}"


def operators() -> Iterator[tuple[str, Any]]:
    """Yields (name, operator) for cosmic-ray's operators that need no arguments. Of those that replace an operator,
    yields only the ones in REPLACED.
    """
    for name in plugins.operator_names():
        kind = plugins.get_operator(name)
        group, _dash, pair = name.split("/")[-1].partition("_")
        if kind.arguments() or name == "core/NoOp" or pair not in REPLACED.get(group, [pair]):
            continue
        yield name, kind()


def mutants(only: str) -> list[Mutant]:
    """Returns the mutants of all target files whose path contains ``only``, in the order of the files."""
    found = []
    chosen = list(operators())
    for target in yaml.safe_load((ROOT / "tests/mutants/targets.yml").read_text()):
        for path in sorted(one for pattern in target["sources"] for one in ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            if only not in name or path.name == "__init__.py":
                continue
            source = path.read_text(encoding="utf-8")
            lines, nodes = source.splitlines(), list(ast_nodes(get_ast(source)))
            for operator, instance in chosen:
                starts = [start for node in nodes for start, _end in instance.mutation_positions(node)]
                for number, (line, _column) in enumerate(starts):
                    text = lines[line - 1].strip()
                    if possible(source, operator, instance, number):
                        found.append(Mutant(name, operator, number, line, text, tuple(target["tests"])))
    return found


def possible(source: str, operator: str, instance: Any, number: int) -> bool:
    """Returns whether cosmic-ray can make this change. It cannot for a name with a dot in a tuple of exceptions,
    such as ``except (OSError, subprocess.TimeoutExpired)``.
    """
    if not operator.endswith("/ExceptionReplacer"):
        return True
    try:
        return mutate_code(source, instance, number) is not None
    except AttributeError:
        return False


def drawn(all_of_them: list[Mutant], seed: str, count: int) -> list[Mutant]:
    """Returns ``count`` mutants, or all if it is 0. The order depends only on the seed and the mutants."""
    order = sorted(all_of_them, key=lambda one: hashlib.sha256(f"{seed}\0{one.key}".encode()).hexdigest())
    return order[:count] if count else order


class Tree:
    """An export of the working tree in which one mutant at a time is tested."""

    def __init__(self, number: int) -> None:
        self.root = FOLDER / f"tree{number}"
        subprocess.run([str(ROOT / "tools" / "export.sh"), str(self.root)], check=True)
        collection = self.root / ".build/collections/ansible_collections/vgpu/fleet"
        collection.parent.mkdir(parents=True)
        collection.symlink_to(self.root)

    def run(self, tests: tuple[str, ...], seconds: float | None) -> str:
        """Runs the tests on the mutant. Returns ``survived`` if all pass, else ``killed`` or ``killed by time``."""
        command = [str(ROOT / ".build/venv/bin/python"), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        # Write no compiled files: a compiled file of the previous mutant would be used for this mutant if both sources
        # have the same time and size.
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "ANSIBLE_CONFIG": str(self.root / "ansible.cfg")}
        with subprocess.Popen(
            command,
            cwd=self.root,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            try:
                return "survived" if process.wait(seconds) == 0 else "killed"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                return "killed by time"

    def verdict(self, mutant: Mutant, seconds: float) -> str:
        path = self.root / mutant.path
        source = path.read_text(encoding="utf-8")
        changed = mutate_code(source, plugins.get_operator(mutant.operator)(), mutant.occurrence)
        if changed is None:
            raise SystemExit(f"mutants: {mutant.key} does not change the source; remove {FOLDER} and run again")
        path.write_text(changed, encoding="utf-8")
        try:
            return self.run(mutant.tests, seconds)
        finally:
            path.write_text(source, encoding="utf-8")


def equivalent() -> dict[tuple[str, str, str], str]:
    """Maps (path, operator, text of the line) of each mutant in tests/mutants/equivalent.yml to the reason why no test
    can notice it.
    """
    listed = yaml.safe_load((ROOT / "tests/mutants/equivalent.yml").read_text()) or []
    return {(one["path"], one["operator"], one["line"]): one["why"] for one in listed}


def digest(mutant: Mutant) -> str:
    """Returns a digest of the mutant's source and tests: a stored result is valid while the digest is unchanged."""
    whole = hashlib.sha256((ROOT / mutant.path).read_bytes())
    for one in mutant.tests:
        files = [ROOT / one] if (ROOT / one).is_file() else sorted((ROOT / one).rglob("*.py"))
        for path in files:
            whole.update(path.read_bytes())
    return whole.hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", default="1", help="selects the mutants; publish the seed with the rate")
    parser.add_argument("--count", type=int, default=400, help="number of mutants, 0 for all (default: 400)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="test only files whose path contains this text")
    given = parser.parse_args()
    everything = mutants(given.only)
    chosen = drawn(everything, given.seed, given.count)
    FOLDER.mkdir(parents=True, exist_ok=True)
    results = FOLDER / "results.jsonl"
    known = {}
    if results.is_file():
        known = {(one["key"], one["digest"]): one["verdict"] for one in map(json.loads, results.open())}
    digests = {(one.path, one.tests): digest(one) for one in chosen}
    trees: Queue[Tree] = Queue()
    for number in range(given.workers):
        trees.put(Tree(number))
    usual = {tests: timed(trees, tests) for tests in {one.tests for one in chosen}}

    def judge(mutant: Mutant) -> tuple[Mutant, str]:
        mark = digests[mutant.path, mutant.tests]
        if (mutant.key, mark) in known:
            return mutant, known[mutant.key, mark]
        tree = trees.get()
        try:
            verdict = tree.verdict(mutant, max(LEAST_SECONDS, PATIENCE * usual[mutant.tests]))
        finally:
            trees.put(tree)
        with results.open("a") as file:
            file.write(json.dumps({**asdict(mutant), "key": mutant.key, "digest": mark, "verdict": verdict}) + "\n")
        return mutant, verdict

    with ThreadPoolExecutor(given.workers) as pool:
        judged = list(pool.map(judge, chosen))
    return report(judged, len(everything), given.seed)


def timed(trees: Queue[Tree], tests: tuple[str, ...]) -> float:
    """Returns the seconds that the tests take without a mutant. Ends the run if they fail."""
    tree = trees.get()
    begun = time.monotonic()
    if tree.run(tests, None) != "survived":
        raise SystemExit(f"mutants: {' '.join(tests)} fail without a mutant; repair them first")
    trees.put(tree)
    return time.monotonic() - begun


def report(judged: list[tuple[Mutant, str]], of_all: int, seed: str) -> int:
    """Prints the rate of killed mutants, and the survivors without a reason in equivalent.yml. Returns 1 if there are
    such survivors.
    """
    reasons = equivalent()
    survivors = [one for one, verdict in judged if verdict == "survived"]
    open_ones = [one for one in survivors if (one.path, one.operator, one.text) not in reasons]
    for one in sorted(open_ones, key=lambda mutant: (mutant.path, mutant.line)):
        print(f"{one.path}:{one.line}: {one.operator} survives: {one.text}")
    killed, named = len(judged) - len(survivors), len(survivors) - len(open_ones)
    rate = 100 * killed / max(1, len(judged) - named)
    print(
        f"{len(judged)} of {of_all} mutants (seed {seed}): {killed} killed, {named} listed as equivalent, "
        f"{len(open_ones)} survive; {rate:.1f} % of the mutants that are not equivalent are killed"
    )
    return 1 if open_ones else 0


if __name__ == "__main__":
    sys.exit(main())
