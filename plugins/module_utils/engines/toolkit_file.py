# SPDX-License-Identifier: Apache-2.0
"""Sets keys of one TOML file, such as the container toolkit's config.toml, records their former values, and restores
them.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from ..host.files import read_bytes, write_bytes
from ..text import toml_text


class TomlFile:
    """Changes the file in one run. ``before`` and ``after`` are the texts of the file before and after the change; None
    means no file.
    """

    def __init__(self, path: str, record: str | None = None, check_mode: bool = False) -> None:
        self.path, self.record, self.check_mode = path, record, check_mode
        raw = read_bytes(path)
        self.before = None if raw is None else raw.decode("utf-8", "surrogateescape")
        self.after = self.before
        self.plan: list[str] = []

    def present(self, settings: dict[str, Any]) -> None:
        self.after, self.plan = toml_text.merge(self.before, settings)
        if not self.plan:
            self.after = self.before
            return
        kept = self._recorded()
        kept.setdefault("new", self.before is None)
        keys = kept.setdefault("keys", {})
        for key, value in settings.items():
            first = keys.get(key, {}).get("before", toml_text.get(self.before or "", key))
            keys[key] = {"before": first, "ours": toml_text.literal(value)}
        if not self.check_mode:
            if self.record:
                write_bytes(self.record, (json.dumps(kept, indent=1, sort_keys=True) + "\n").encode(), 0o600)
            write_bytes(self.path, self.after.encode("utf-8", "surrogateescape"))

    def absent(self) -> None:
        kept = self._recorded()
        text = self.before
        for key, values in kept.get("keys", {}).items():
            now = None if text is None else toml_text.get(text, key)
            if text is None or now != values["ours"] or now == values["before"]:
                continue  # Do not restore the key if the file is gone or if another user has changed the key since.
            first = values["before"]
            text = toml_text.remove(text, key) if first is None else toml_text.put(text, key, first)
            self.plan.append(f"remove {key}" if first is None else f"change {key} back to {first}")
        if text is not None and kept.get("new") and not text.strip():
            text = None
            self.plan.append(f"remove {self.path}")
        self.after = text
        if self.check_mode:
            return
        if text is None and self.before is not None:
            os.unlink(self.path)
        elif text is not None and text != self.before:
            write_bytes(self.path, text.encode("utf-8", "surrogateescape"))
        if self.record:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.record)

    def _recorded(self) -> dict[str, Any]:
        raw = read_bytes(self.record) if self.record else None
        try:
            return {} if raw is None else dict(json.loads(raw.decode("utf-8")))
        except (ValueError, TypeError) as fault:
            raise toml_text.TomlError(
                f"the record {self.record} cannot be read ({fault}); restore it or remove it"
            ) from None
