# SPDX-License-Identifier: Apache-2.0
"""Run the workloads on the visible GPU (a whole GPU or a slice), or compare results.

    run.py --label whole --out results            # on the host, or in a pod that has the whole card
    run.py --label slice --out results            # in a slice: vgpuctl exec -- python3 …/run.py …
    run.py --compare results/*.json               # ratios as a table, and in results/ratios.json

Exit status: 0 done (a row may have run out of memory, which is a result), 1 a row failed, 2 refused.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Sequence

import table

HERE = Path(__file__).resolve().parent
# Extra seconds in the time limit of a row: a small share makes the start, the choice of algorithms and the warm-up
# slow.
GRACE_S = 600

ASK = """
import json, torch
cuda = torch.version.cuda if torch.cuda.is_available() else None
found = {"torch": torch.__version__, "cuda": cuda}
if cuda:
    free, total = torch.cuda.mem_get_info()
    found.update(device=torch.cuda.get_device_name(0), total_mib=total >> 20, visible=torch.cuda.device_count())
print(json.dumps(found))
"""


def look(python: str, device: str) -> dict[str, Any]:
    """Returns what PyTorch reports of its version and GPU. Raises Refused if PyTorch is missing or sees no GPU."""
    done = subprocess.run([python, "-c", ASK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no error text"])[-1]
        raise table.Refused(f"{python} cannot use PyTorch ({said}); name another with --python")
    found = dict(json.loads(done.stdout.splitlines()[-1]))
    if device == "cuda" and not found["cuda"]:
        raise table.Refused(
            f"PyTorch {found['torch']} sees no GPU here; in a pod check that it requests nvidia.com/gpu"
        )
    if device == "cuda" and found["visible"] != 1:
        raise table.Refused(f"{found['visible']} GPUs are visible; set CUDA_VISIBLE_DEVICES=0 so that one is measured")
    if device != "cuda":
        found.update(device=device, total_mib=0)
    return found


def run_rows(given: argparse.Namespace) -> dict[str, Any]:
    found = look(given.python, given.device)
    result: dict[str, Any] = {
        "format": table.FORMAT,
        "label": given.label,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "smoke": given.smoke,
        "precision": "half" if given.half else "single",
        **found,
        "rows": [],
    }
    for row in table.chosen(given.rows):
        real = table.smaller(row) if given.smoke else row
        outcome = run_row(given, row.id)
        result["rows"].append({**real._asdict(), "size": list(real.size), **outcome})
        rate = f": {outcome['items_per_s']:.4g} items/s" if outcome["status"] == table.DONE else ""
        print(f"{row.id} {row.title} {row.kind}: {outcome['status']}{rate}", flush=True)
        if given.out != "-":  # Saved after each row, so that an interrupted run keeps its rows.
            keep(given.out, given.label, result)
    return result


def run_row(given: argparse.Namespace, name: str) -> dict[str, Any]:
    """Runs one row in a new process. A process that dies or hangs gives a failed row; the other rows still run."""
    command = [given.python, str(HERE / "measure.py"), name, f"--device={given.device}", f"--seconds={given.seconds}"]
    command += ["--smoke"] * given.smoke + ["--half"] * given.half
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            timeout=given.seconds + GRACE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"status": f"failed: it took more than {given.seconds + GRACE_S:.0f} s"}
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError):
        said = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return {"status": f"failed: its process ended with {done.returncode}: {said[:300]}"}


def compare(paths: Sequence[Path], baseline: str) -> tuple[str, list[dict[str, Any]]]:
    results = []
    for path in paths:
        try:
            one = json.loads(path.read_text())
        except (OSError, ValueError) as fault:
            raise table.Refused(f"{path}: {fault}") from None
        if isinstance(one, dict) and "rows" in one:
            results.append(one)
    rows = table.ratios(results, baseline)
    return table.shown(rows, baseline), rows


def keep(out: str, name: str, value: Any) -> None:
    """Writes the result to a file in the folder ``out`` or, for "-", as the last line of output (of a pod's log)."""
    if out == "-":
        print(json.dumps(value))
        return
    path = Path(out) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(fresh, path)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    summary = (__doc__ or "").split("\n\n", maxsplit=1)[0]
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--label", default="", help="name of the result and its file, such as whole, slice or oversold")
    parser.add_argument(
        "--out", default="results", help="folder of the result; - prints the result (default: %(default)s)"
    )
    parser.add_argument("--rows", default="", metavar="1.1,5.2", help="run only these rows (default: all ten)")
    parser.add_argument(
        "--seconds", type=float, default=20, help="how long each row is measured (default: %(default)s)"
    )
    parser.add_argument("--half", action="store_true", help="use mixed precision")
    parser.add_argument("--python", default=sys.executable, help="Python that has PyTorch (default: %(default)s)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--smoke", action="store_true", help="run small rows; this shows only that they run")
    parser.add_argument("--compare", nargs="+", type=Path, metavar="FILE", help="compare these results with each other")
    parser.add_argument(
        "--baseline", default="whole", help="label of the result that the others are divided by (default: %(default)s)"
    )
    given = parser.parse_args(words)
    if not given.compare and not given.label:
        parser.error("expected --label NAME for a run, or --compare FILE…")
    if given.label and not all(one.isalnum() or one in "-_." for one in given.label):
        parser.error(f'--label: expected letters, digits, "-", "_", ".", found "{given.label}"')
    if given.device == "cpu" and not given.smoke and not given.compare:
        parser.error("--device cpu: only with --smoke, because results of a CPU are not comparable")
    return given


def main(words: Sequence[str] | None = None) -> int:
    given = arguments(words)
    try:
        if given.compare:
            text, rows = compare(given.compare, given.baseline)
            keep(given.out, "ratios", {"format": table.FORMAT, "baseline": given.baseline, "ratios": rows})
            print(text)
            return 0
        result = run_rows(given)
    except table.Refused as fault:
        print(f"workloads: {fault}", file=sys.stderr)
        return 2
    keep(given.out, given.label, result)
    return 1 if any(row["status"].startswith("failed") for row in result["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
