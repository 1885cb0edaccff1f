# SPDX-License-Identifier: Apache-2.0
"""Runs a first use of each installed framework in a slice, and writes the page of the results.

    vgpuctl exec -- python3 tests/gpu/workloads/frameworks.py --run --slice-mib 2194 --driver 535.261.03
    python3 tests/gpu/workloads/frameworks.py --page            # docs/frameworks.md from runs/ and results/

A use is ``held`` (passed) if its result is right, the framework sees no more memory than the slice has, and twice the
slice is refused. A framework that ran gets a record, whether it passed or not. A framework that is not installed gets
none. The page also has the ten workloads of table.py, from the results of run.py.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Sequence

import table

HERE = Path(__file__).resolve().parent
RUNS = HERE / "runs"
RESULTS = HERE / "results"
PAGE = HERE.parents[2] / "docs" / "frameworks.md"
LIMIT_S = 600

# Each program prints: version, right (whether its result is right) and, if the framework can query them, total_mib and
# refused (whether twice the slice was refused). The only argument is the size of the slice in MiB. A missing framework
# ends the program with ImportError.
PROGRAMS = {
    "PyTorch": """
import torch
found["version"] = torch.__version__
found["gpu"] = torch.cuda.get_device_name(0)
one = torch.arange(1 << 20, dtype=torch.float64, device="cuda")
found["right"] = one.sum().item() == (1 << 19) * ((1 << 20) - 1)
found["total_mib"] = torch.cuda.mem_get_info()[1] >> 20
try:
    torch.empty(slice_mib << 21, dtype=torch.uint8, device="cuda")
    found["refused"] = False
except RuntimeError:
    found["refused"] = True
""",
    "NCCL": """
import os, torch, torch.distributed as group
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
found["version"] = ".".join(str(one) for one in torch.cuda.nccl.version())
found["gpu"] = torch.cuda.get_device_name(0)
group.init_process_group("nccl", rank=0, world_size=1)
one = torch.ones(1 << 20, device="cuda")
group.all_reduce(one)
found["right"] = one.sum().item() == 1 << 20
group.destroy_process_group()
""",
    "TensorFlow": """
import tensorflow
found["version"] = tensorflow.__version__
with tensorflow.device("/GPU:0"):
    one = tensorflow.ones((1024, 1024))
    found["right"] = float(tensorflow.reduce_sum(one @ one)) == 2.0**30
    try:
        tensorflow.zeros((slice_mib << 1, 1 << 20), dtype=tensorflow.uint8)
        found["refused"] = False
    except tensorflow.errors.ResourceExhaustedError:
        found["refused"] = True
""",
    "JAX": """
import jax, jax.numpy
found["version"] = jax.__version__
found["gpu"] = jax.devices("gpu")[0].device_kind
one = jax.device_put(jax.numpy.ones((1024, 1024)), jax.devices("gpu")[0])
found["right"] = float((one @ one).sum()) == 2.0**30
try:
    jax.numpy.zeros((slice_mib << 1, 1 << 20), dtype=jax.numpy.uint8).block_until_ready()
    found["refused"] = False
except RuntimeError:
    found["refused"] = True
""",
    "CuPy": """
import cupy
found["version"] = cupy.__version__
one = cupy.ones((1024, 1024), dtype=cupy.float32)
found["right"] = float((one @ one).sum()) == 2.0**30
found["total_mib"] = cupy.cuda.runtime.memGetInfo()[1] >> 20
try:
    cupy.zeros(slice_mib << 21, dtype=cupy.uint8)
    found["refused"] = False
except cupy.cuda.memory.OutOfMemoryError:
    found["refused"] = True
""",
    "Triton": """
import torch, triton, triton.language as language
found["version"] = triton.__version__
found["gpu"] = torch.cuda.get_device_name(0)
@triton.jit
def double(data, BLOCK: language.constexpr):
    at = language.program_id(0) * BLOCK + language.arange(0, BLOCK)
    language.store(data + at, language.load(data + at) * 2)
one = torch.arange(1 << 20, dtype=torch.float64, device="cuda")
double[(1024,)](one, BLOCK=1024)
found["right"] = one.sum().item() == (1 << 20) * ((1 << 20) - 1)
""",
    "numba": """
import numba, numpy
from numba import cuda
found["version"] = numba.__version__
found["gpu"] = cuda.get_current_device().name
found["gpu"] = getattr(found["gpu"], "decode", lambda: found["gpu"])()
@cuda.jit
def double(data):
    at = cuda.grid(1)
    if at < data.size:
        data[at] *= 2
one = cuda.to_device(numpy.arange(1 << 20, dtype=numpy.float64))
double[4096, 256](one)
found["right"] = bool(one.copy_to_host().sum() == (1 << 20) * ((1 << 20) - 1))
found["total_mib"] = cuda.current_context().get_memory_info().total >> 20
try:
    cuda.device_array(slice_mib << 21, dtype=numpy.uint8)
    found["refused"] = False
except Exception as error:
    found["refused"] = "OUT_OF_MEMORY" in str(error)
""",
    "XGBoost": """
import numpy, xgboost
found["version"] = xgboost.__version__
data = numpy.arange(4096, dtype=numpy.float32).reshape(-1, 1)
model = xgboost.train({"device": "cuda", "tree_method": "hist"}, xgboost.DMatrix(data, label=data[:, 0] > 2048), 5)
guess = model.predict(xgboost.DMatrix(data))
found["right"] = bool(((guess > 0.5) == (data[:, 0] > 2048)).mean() > 0.99)
""",
    # MindSpore has kernels for CUDA 11.1 and 11.6 only, and needs these libraries of CUDA and cuDNN on the machine.
    "MindSpore": """
import mindspore
from mindspore import ops
found["version"] = mindspore.__version__
mindspore.set_device("GPU")
one = ops.ones((1024, 1024), mindspore.float32)
found["right"] = float(ops.matmul(one, one).sum().asnumpy()) == 2.0**30
""",
    # The last wheels of MXNet (mxnet-cu112 1.9.1, 2022) are for CUDA 11.2, and need numpy older than 1.24.
    "MXNet": """
import mxnet
found["version"] = mxnet.__version__
one = mxnet.nd.ones((1024, 1024), ctx=mxnet.gpu(0))
found["right"] = float(mxnet.nd.dot(one, one).sum().asscalar()) == 2.0**30
found["total_mib"] = mxnet.context.gpu_memory_info(0)[1] >> 20
""",
}
FRAME = "import json, sys\nslice_mib, found = int(sys.argv[1]), {{}}\n{}\nprint(json.dumps(found))\n"

HEAD = """\
# Frameworks

Frameworks that ran in a slice on a real GPU. These commands run a node's frameworks in a free slice, and write this
page from the records in `tests/gpu/workloads/runs/` and `results/`:

    vgpuctl exec -- python3 tests/gpu/workloads/frameworks.py --run --slice-mib 2194 --driver 535.261.03
    python3 tests/gpu/workloads/frameworks.py --page

`held`: the result is right, the framework sees no more memory than the slice has, and twice the slice is refused.
"""
RUN = """
{gpu}, driver {driver}, a slice of {slice_mib} MiB, {date}:

| framework | version | seen MiB | result |
|---|---|---|---|
"""
MISSING = """
Never run in a slice, because no machine with a GPU had them: {}. `frameworks.py` has a program for each.
MindSpore needs CUDA 11.1 or 11.6. MXNet's last wheels, of 2022, need CUDA 11.2.
"""
# The labels of results of run.py that the page shows, with the heads of their columns.
COLUMNS = {"alone": "slice of 25 %, no other program", "oversold": "oversold, all in host memory"}
WORKLOADS = """
## Ten workloads

{device}, PyTorch {torch}, {precision} precision, {date}. Whole: items per second on the whole GPU without the library.
Next columns: ratios to it, with the library before its limiter was changed. A slice next to no other program may use
all of the GPU's time. `not run`: no GPU was had for it. [All figures](benchmarks.md#workloads)

| row | whole | {heads} |
|---|---|{lines}
"""


def outcome(found: dict[str, Any], slice_mib: int) -> str:
    """Returns ``held``, or the faults of the result."""
    faults = []
    if found.get("right") is not True:
        faults.append("wrong result")
    if found.get("total_mib", 0) > slice_mib:
        faults.append(f"sees {found['total_mib']} MiB")
    if found.get("refused") is False:
        faults.append("got twice the slice")
    return ", ".join(faults) or "held"


def use(name: str, python: str, slice_mib: int) -> dict[str, Any] | None:
    """Runs one framework in a new process and returns its record, or None if the framework is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"  # Triton reads its kernels from a source file.
        path.write_text(FRAME.format(PROGRAMS[name]))
        return _use([python, str(path), str(slice_mib)], slice_mib)


def _use(command: list[str], slice_mib: int) -> dict[str, Any] | None:
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"version": "?", "result": f"took more than {LIMIT_S} s"}
    last = (done.stderr.strip().splitlines() or ["no error text"])[-1]
    if "ModuleNotFoundError" in last:
        return None
    try:
        found = dict(json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError):
        return {"version": "?", "result": f"ended with {done.returncode}: {last[:120]}"}
    return {**found, "result": outcome(found, slice_mib)}


def page(records: Sequence[dict[str, Any]], results: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Returns the page. ``results`` has a list for each run on a GPU: run.py's result for each label."""
    runs: dict[str, list[str]] = {}
    for one in sorted(records, key=lambda record: (record["date"], record["framework"].lower())):
        rows = runs.setdefault(RUN.format(**{"gpu": "GPU unknown", **one}), [])
        rows.append(_row([one["framework"], one["version"], one.get("total_mib", "not queried"), one["result"]]))
    never = sorted(set(PROGRAMS) - {one["framework"] for one in records}, key=str.lower)
    missing = MISSING.format(", ".join(never)) if never else ""
    tables = "".join(head + "".join(rows) for head, rows in runs.items())
    return HEAD + tables + missing + "".join(workloads(one) for one in results)


def workloads(results: Sequence[dict[str, Any]]) -> str:
    """Returns the table of the ten workloads from the results of one run on a GPU."""
    whole = next(one for one in results if one["label"] == "whole")
    shown = [one for one in results if one["label"] in COLUMNS]
    rows = []
    for row in table.ratios([whole, *shown], "whole"):
        base = f"{row['items_per_s']:.4g}" if row["status"] == table.DONE else row["status"]
        cells = [f"{row['id']} {row['title']} {row['kind']}", base]
        for label in COLUMNS:
            one = row["ratios"].get(label, table.NOT_RUN)
            cells.append(f"{one:.2g}" if isinstance(one, float) else one)
        rows.append(_row(cells))
    about = {key: whole[key] for key in ("device", "torch", "precision")}
    heads, lines = " | ".join(COLUMNS.values()), "---|" * len(COLUMNS)
    return WORKLOADS.format(heads=heads, lines=lines, date=whole["date"][:10], **about) + "".join(rows)


def _row(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |\n"


def records_in(folder: Path) -> list[dict[str, Any]]:
    return [record for path in sorted(folder.glob("*.json")) for record in json.loads(path.read_text())]


def results_in(folder: Path) -> list[list[dict[str, Any]]]:
    """Returns the results of each run. Each run has a subfolder of ``folder``."""
    runs = [sorted(one.glob("*.json")) for one in sorted(folder.iterdir()) if one.is_dir()]
    return [[json.loads(path.read_text()) for path in paths] for paths in runs]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--run", action="store_true", help="run the installed frameworks and store a record of each")
    parser.add_argument("--page", action="store_true", help="write docs/frameworks.md from the records")
    parser.add_argument("--only", choices=sorted(PROGRAMS), help="run only this framework")
    parser.add_argument("--slice-mib", type=int, default=0, help="memory of this slice, as vgpuctl slices shows it")
    parser.add_argument("--driver", default="", help="version of the host's driver")
    parser.add_argument(
        "--python", default=sys.executable, help="Python that has the frameworks (default: %(default)s)"
    )
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the records (default: %(default)s)")
    given = parser.parse_args(words)
    if given.run == given.page:
        parser.error("expected one of --run and --page")
    if given.page:
        PAGE.write_text(page(records_in(given.runs), results_in(RESULTS)))
        return 0
    if given.slice_mib < 1 or not given.driver:
        parser.error("--run: expected --slice-mib and --driver, which every record needs")
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    records = []
    for name in [given.only] if given.only else PROGRAMS:
        found = use(name, given.python, given.slice_mib)
        print(f"{name}: {found['result'] if found else 'not installed'}", flush=True)
        if found:
            records.append(
                {"framework": name, **found, "driver": given.driver, "slice_mib": given.slice_mib, "date": today}
            )
    if records:
        given.runs.mkdir(parents=True, exist_ok=True)
        (given.runs / f"{today}-{records[0].get('gpu', 'gpu').replace(' ', '-')}.json").write_text(
            json.dumps(records, indent=1) + "\n"
        )
    return 0 if records and all(one["result"] == "held" for one in records) else 1


if __name__ == "__main__":
    sys.exit(main())
