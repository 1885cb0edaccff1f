# SPDX-License-Identifier: Apache-2.0
"""Command line of convert_values; runs in a checkout and in the installed collection, with only Python and PyYAML."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
# The node programs' package defines the group variables and the device plugin's options.
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "native" / "plugin" / "src")]

from convert_values import convert  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the group variables. Returns 2 if the file cannot be read or has an unknown format."""
    about = "Prints another project's settings as group variables."
    parser = argparse.ArgumentParser(prog="convert_values", description=about)
    parser.add_argument("file", help="values of a Helm chart, NVIDIA's configuration file or a manifest; - reads stdin")
    file = parser.parse_args(arguments).file
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        found = convert.convert(list(yaml.safe_load_all(text)))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, convert.Unknown) as fault:
        print(f"convert_values: {file}: {' '.join(str(fault).split())}", file=sys.stderr)
        return 2
    print(convert.group_vars(found, file), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
