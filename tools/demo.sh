#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make demo-down`: see demo.py. The machine's own Python runs it, for the environment may not exist yet.
set -eu

exec /usr/bin/python3 "$(dirname "$0")/demo.py" "${@:-up}"
