# SPDX-License-Identifier: Apache-2.0
"""Makes fleet reports for tests: the real role ``report`` writes them from the data of made-up hosts. Also provides a
headless browser that opens the pages."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

ROOT = Path(__file__).resolve().parents[2]
PLAY = """
- hosts: localhost
  connection: local
  gather_facts: false
  tasks:
    - ansible.builtin.import_role:
        name: vgpu.fleet.report
      vars:
        report_dir: "{folder}"
        report_title: "{title}"
        report_hosts: "{{{{ groups['nodes'] | default([]) }}}}"
"""


def facts(uuids: list[str], per_gpu: int = 7, **spoiled: Any) -> dict[str, Any]:
    """Returns the facts that the role ``verify`` would set for a healthy host with these GPUs. ``spoiled`` overrides
    fields of the capacity."""
    ids = [f"{uuid}::{number}" for uuid in uuids for number in range(per_gpu)]
    gpus = [
        {
            "index": index,
            "uuid": uuid,
            "model": "Tesla T4",
            "memory_mib": 15360,
            "used_mib": 2048,
            "slices": per_gpu,
            "slice_mib": 15360 // per_gpu,
            "sm_percent": 100 // per_gpu,
            "mode": "vcuda",
            "advertised": per_gpu,
            "utilisation": None,
            "temperature": None,
            "xids": [],
        }
        for index, uuid in enumerate(uuids)
    ]
    capacity = {
        "ok": True,
        "shared": True,
        "proven": True,
        "kubelet": True,
        "resources": ["nvidia.com/gpu"],
        "expected": [{"id": one, "uuid": one.partition("::")[0]} for one in ids],
        "advertised": ids,
        "drift": [],
        "versions": {"driver": "535.261.03", "plugin": "0.1.0"},
        "library": "0.1.0-5f2c1a",
        "usage": [],
        "gpus": gpus,
    }
    return {"groups": ["gpu_nodes", "t4"], "capacity": {**capacity, **spoiled}}


@pytest.fixture(scope="session")
def make_page(tmp_path_factory):
    """``make_page({name: facts}, folder)`` runs the role and returns the folder with the report."""
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}

    def make(hosts: dict[str, Any], folder: Path | None = None, title: str = "Lab", *options: str) -> Path:
        tmp_path = tmp_path_factory.mktemp("page")
        folder = folder or tmp_path / "report"
        inventory = {"nodes": {"hosts": {name: {"verify_facts": one} for name, one in hosts.items()}}}
        (tmp_path / "hosts.json").write_text(json.dumps(inventory))
        (tmp_path / "play.yml").write_text(PLAY.format(folder=folder, title=title))
        command = ["ansible-playbook", "-i", str(tmp_path / "hosts.json"), str(tmp_path / "play.yml"), *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return folder

    return make


@pytest.fixture(scope="session")
def driver():
    """A headless browser, shared by all tests because its start is slow."""
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, Service("/usr/bin/chromedriver"))
    yield driver
    driver.quit()


@pytest.fixture
def browser(driver):
    """``browser(folder, part, width, dark)`` opens a folder's report on a screen ``width`` pixels wide."""

    def open_page(folder: Path, part: str = "", width: int = 1280, dark: bool = False) -> webdriver.Chrome:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        driver.get("about:blank")
        for log in ("browser", "performance"):
            driver.get_log(log)
        driver.get(f"file://{folder}/fleet.html{part}")
        return driver

    return open_page
