# SPDX-License-Identifier: Apache-2.0
"""Configures the log of the device plugin and of ``vgpu_scheduler``: text lines for people, or one JSON object per line
for log collectors.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from datetime import UTC, datetime

TEXT, JSON = FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")


class JsonFormatter(logging.Formatter):
    """Writes one JSON object with ``time`` (RFC 3339, UTC), ``level``, ``logger``, ``message``, and with ``exception``
    if there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        out = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            out["exception"] = self.formatException(record.exc_info)
        return json.dumps(out)


def add_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log-level", choices=LEVELS, default="info")
    parser.add_argument(
        "--log-format", choices=FORMATS, default=TEXT, help="json: one object per line (default: %(default)s)"
    )


def configure(given: argparse.Namespace, text: str) -> None:
    """Configures logging to standard error. ``text`` is the format of a text line, as for logging.Formatter."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if given.log_format == JSON else logging.Formatter(text))
    logging.basicConfig(level=given.log_level.upper(), handlers=[handler])


def end(given: argparse.Namespace, program: str, fault: Exception) -> None:
    """Reports on standard error why the program ends."""
    if given.log_format == JSON:
        logging.getLogger(program).critical("%s", fault)
    else:
        print(f"{program}: {fault}", file=sys.stderr)
