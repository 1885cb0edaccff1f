# SPDX-License-Identifier: Apache-2.0
"""Tests that each failure message of the roles and playbooks is a text. ansible-core 2.19 prints a list as Python
writes it, with brackets and quotes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Iterator

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted([*ROOT.glob("roles/*/tasks/*.yml"), *ROOT.glob("playbooks/**/*.yml")])


def messages(node: Any) -> Iterator[str]:
    """Yields the failure messages of all tasks in a parsed file."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "fail_msg":
                yield value
            else:
                yield from messages(value)
    elif isinstance(node, list):
        for one in node:
            yield from messages(one)


def is_text(message: Any) -> bool:
    """Returns whether the message is a text for all values of its variables. This holds if it has words outside of its
    expressions, or if its only expression joins a list or is a module's refusal (a text). The \\n of a join must be in
    YAML's double quotes, which make it a line end, because Ansible doubles a backslash that reaches its templates.
    """
    if not isinstance(message, str):
        return False
    bare = message.strip()
    alone = bare.startswith("{{") and bare.endswith("}}") and bare.count("{{") == 1
    return not alone or re.search(r"(join\('\n'\)|\w+\.refusal) *}}$", bare) is not None


FOUND = [
    (path.relative_to(ROOT).as_posix(), text) for path in FILES for text in messages(yaml.safe_load(path.read_text()))
]


def test_failure_messages_are_found() -> None:
    assert len(FOUND) > 15, FOUND


@pytest.mark.parametrize(("path", "message"), FOUND)
def test_a_failure_message_is_a_text(path: str, message: Any) -> None:
    assert is_text(message), f"{path}: expected a text or a joined list, found {message!r}; end it with | join('\\n')"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("{{ faults }}", False),
        ("{{ ['No host was changed.'] + faults }}", False),
        ("{{ (['No host was changed.'] + faults) | join('\n') }}", True),
        ("{{ (['No host was changed.'] + faults) | join('\\n') }}", False),
        ("{{ (faults | join('\n')).splitlines() }}", False),
        (["one", "two"], False),
        ("{{ host }}: {{ faults | join('\n') }}", True),
    ],
)
def test_lists_are_not_accepted_as_texts(message: Any, text: bool) -> None:
    assert is_text(message) is text
