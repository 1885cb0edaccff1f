# SPDX-License-Identifier: Apache-2.0
"""Tests run.py, which measures the workloads, without a GPU: refusals, workloads whose process dies, results and their
comparison. torch is a test double."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import run
import yaml

HERE = Path(__file__).resolve().parent

# Test double of the module torch: one version, no GPU or some number of GPUs.
DOUBLE = """
import sys
class version: cuda = {cuda!r}
class cuda:
    @staticmethod
    def is_available(): return {cuda!r} is not None
    @staticmethod
    def mem_get_info(): return (1 << 30, 2 << 30)
    @staticmethod
    def get_device_name(_index): return "Double"
    @staticmethod
    def device_count(): return {count}
__version__ = "0"
"""
# Behaviour → code of the test double that replaces measure.py.
ENDS = {
    "done": 'print(\'{"status": "done", "items_per_s": 4.0}\')',
    "dies": "import os; os.abort()",
    "raises": "raise SystemExit('no luck')",
    "chatter": 'print("hello")',
}


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a test double of torch importable for started programs."""

    def make(cuda: str | None = "12.2", count: int = 1) -> str:
        (tmp_path / "torch.py").write_text(DOUBLE.format(cuda=cuda, count=count))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return sys.executable

    return make


@pytest.mark.parametrize(
    ("double", "words"),
    [
        ({"cuda": None}, "sees no GPU here"),
        ({"count": 2}, "2 GPUs are visible; set CUDA_VISIBLE_DEVICES=0"),
    ],
)
def test_missing_or_several_gpus_are_refused(
    python: Any, double: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert run.main(["--label=whole", f"--out={out}", f"--python={python(**double)}"]) == 2
    assert words in capsys.readouterr().err
    assert not out.exists()


def test_python_without_torch_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    empty = tmp_path / "python3"
    empty.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    empty.chmod(0o755)
    assert run.main(["--label=whole", f"--python={empty}"]) == 2
    assert "cannot use PyTorch (ModuleNotFoundError: No module named 'torch')" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ([], "expected --label NAME"),
        (["--label", "../x"], "expected letters"),
        (["--label", "cpu", "--device", "cpu"], "only with --smoke"),
    ],
)
def test_meaningless_arguments_are_refused(words: list[str], fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run.arguments(words)
    assert end.value.code == 2
    assert fault in capsys.readouterr().err


@pytest.mark.parametrize(
    ("end", "status", "code"),
    [
        ("done", "done", 0),
        ("dies", "failed: its process ended with -6", 1),
        ("raises", "no luck", 1),
        ("chatter", "failed", 1),
    ],
)
def test_row_whose_process_dies_is_failed(
    python: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, status: str, code: int
) -> None:
    (tmp_path / "measure.py").write_text(ENDS[end] + "\n")
    monkeypatch.setattr(run, "HERE", tmp_path)
    out = tmp_path / "out"
    assert run.main(["--label=slice", f"--out={out}", f"--python={python()}", "--rows=1.1,5.2"]) == code
    found = json.loads((out / "slice.json").read_text())
    assert [row["id"] for row in found["rows"]] == ["1.1", "5.2"]
    assert all(status in row["status"] for row in found["rows"])
    assert (found["device"], found["total_mib"], found["smoke"]) == ("Double", 2048, False)


def test_interrupted_run_keeps_its_rows(python: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(_given: Any, name: str) -> dict[str, Any]:
        if name == "5.2":
            raise KeyboardInterrupt
        return {"status": "done", "items_per_s": 4.0}

    monkeypatch.setattr(run, "run_row", stops)
    with pytest.raises(KeyboardInterrupt):
        run.main(["--label=slice", f"--out={tmp_path}", f"--python={python()}", "--rows=1.1,5.2"])
    assert [row["id"] for row in json.loads((tmp_path / "slice.json").read_text())["rows"]] == ["1.1"]


def test_result_is_the_last_line_of_a_pods_log(
    python: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "measure.py").write_text(ENDS["done"] + "\n")
    monkeypatch.setattr(run, "HERE", tmp_path)
    assert run.main(["--label=slice", "--out=-", f"--python={python()}", "--rows=3.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3.1 VGG-16 inference: done: 4 items/s"
    assert json.loads(lines[-1])["rows"][0]["items_per_s"] == 4.0


def test_results_are_compared(
    python: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "HERE", tmp_path)
    out = tmp_path / "out"
    for label, rate in (("whole", 8.0), ("slice", 2.0)):
        (tmp_path / "measure.py").write_text(f'print(\'{{"status": "done", "items_per_s": {rate}}}\')\n')
        assert run.main([f"--label={label}", f"--out={out}", f"--python={python()}", "--rows=4.1"]) == 0
    files = [str(out / "whole.json"), str(out / "slice.json")]
    assert run.main(["--compare", *files, f"--out={out}"]) == 0
    assert "| 4.1 | DeepLab | inference | 2, 512×512 | 8 | 0.25 |" in capsys.readouterr().out
    assert json.loads((out / "ratios.json").read_text())["ratios"][0]["ratios"] == {"slice": 0.25}
    # In a second run results/*.json also contains ratios.json, which must be ignored.
    assert run.main(["--compare", *files, str(out / "ratios.json"), f"--out={out}"]) == 0
    assert run.main(["--compare", files[0], str(tmp_path / "none.json"), f"--out={out}"]) == 2


def test_job_runs_these_programs_in_a_slice() -> None:
    job = yaml.safe_load((HERE / "job.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert (job["kind"], pod["restartPolicy"], job["spec"]["backoffLimit"]) == ("Job", "Never", 0)
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
    program, *words = container["command"][1:]
    assert (HERE / Path(program).name).exists()
    assert run.arguments(words).label == "slice"
    mount, volume = container["volumeMounts"][0], pod["volumes"][0]
    assert (mount["name"], mount["mountPath"]) == (volume["name"], str(Path(program).parent))


def test_programs_start_without_the_repository(tmp_path: Path) -> None:
    """The programs start from a folder with only their own files, as in a ConfigMap."""
    for path in HERE.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "run.py"), "--compare", str(tmp_path / "none.json")],
        cwd="/",
        env=env,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert (done.returncode, "none.json" in done.stderr) == (2, True), done.stderr
