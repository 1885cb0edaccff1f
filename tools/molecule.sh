#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the named molecule scenarios, or all scenarios in molecule/ if none is named:
#   tools/molecule.sh default upgrade
set -eu

cd "$(dirname "$0")/.."
# molecule finds ansible's commands through PATH.
export PATH="$PWD/.build/venv/bin:$PATH"
export MOLECULE_GLOB='molecule/*/molecule.yml'
if [ $# -eq 0 ]; then
    set -- --all
fi
case $1 in
-*) exec .build/venv/bin/molecule test "$@" ;;
esac
failed=""
for scenario in "$@"; do
    .build/venv/bin/molecule test --scenario-name "$scenario" || failed="$failed $scenario"
done
if [ -n "$failed" ]; then
    echo "molecule: failed:$failed" >&2
    exit 1
fi
