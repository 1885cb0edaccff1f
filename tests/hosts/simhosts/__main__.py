# SPDX-License-Identifier: Apache-2.0
"""``python3 -m simhosts``; people run it as tests/hosts/hostctl."""

import sys

from .cli import main

sys.exit(main(sys.argv[1:]))
