# SPDX-License-Identifier: Apache-2.0
"""Tests that ansible.cfg sets the options for fast runs of playbooks. A test is needed, because Ansible silently
ignores a misspelt option.
"""

from __future__ import annotations

import configparser
from pathlib import Path
from typing import Any

import pytest
from ansible.config.manager import ConfigManager

CONFIG = Path(__file__).resolve().parents[3] / "ansible.cfg"
# Ansible's name of each option, with its expected value. 50 forks are enough to run a task on all of 30 hosts at once.
SETTINGS = [
    ("ANSIBLE_PIPELINING", True),
    ("DEFAULT_FORKS", 50),
    ("DEFAULT_GATHERING", "explicit"),
    ("CACHE_PLUGIN", "ansible.builtin.jsonfile"),
    ("CACHE_PLUGIN_TIMEOUT", 3600),
    ("INJECT_FACTS_AS_VARS", False),
]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ANSIBLE_PIPELINING", "ANSIBLE_FORKS", "ANSIBLE_GATHERING", "ANSIBLE_CACHE_PLUGIN"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("name", "value"), SETTINGS)
def test_ansible_cfg_has_setting(name: str, value: Any) -> None:
    found, origin = ConfigManager(str(CONFIG)).get_config_value_and_origin(name)
    assert (found, origin) == (value, str(CONFIG))


def test_ssh_uses_persistent_connections_and_pipelining() -> None:
    parser = configparser.ConfigParser()
    parser.read(CONFIG)
    assert parser.getboolean("ssh_connection", "pipelining")
    words = parser.get("ssh_connection", "ssh_args").split()
    assert "ControlMaster=auto" in words and "ControlPersist=120s" in words
