#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the molecule scenarios of molecule/ (its place at the root is where this collection keeps it).
set -eu

cd "$(dirname "$0")/.."
export MOLECULE_GLOB='molecule/*/molecule.yml'
exec .build/venv/bin/molecule test "${@:---all}"
