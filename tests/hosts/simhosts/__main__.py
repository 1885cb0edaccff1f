# SPDX-License-Identifier: Apache-2.0
"""Runs the command hostctl as ``python3 -m simhosts``; the script tests/hosts/hostctl does so."""

import sys

from .cli import main

sys.exit(main(sys.argv[1:]))
