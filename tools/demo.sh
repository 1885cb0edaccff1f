#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs demo.py for `make demo` and `make demo-down`, with the machine's own Python: the virtual environment may not exist
# yet.
set -eu

exec /usr/bin/python3 "$(dirname "$0")/demo.py" "${@:-up}"
