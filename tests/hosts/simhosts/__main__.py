# SPDX-License-Identifier: Apache-2.0
"""``python3 -m simhosts``; tests/hosts/hostctl is the name that people type."""

import sys

from .cli import main

sys.exit(main(sys.argv[1:]))
