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
# The simulated hosts have the same names in every checkout, so two runs at once would remove each other's hosts.
# --close: the containers that molecule starts must not keep the lock.
lock=/run/vgpu-molecule.lock
molecule_test() {
    if ! flock --nonblock "$lock" true; then
        echo "molecule: waits for another run on this machine, whose simulated hosts have the same names" >&2
    fi
    flock --close "$lock" .build/venv/bin/molecule test "$@"
}
case $1 in
-*)
    molecule_test "$@"
    exit
    ;;
esac
failed=""
for scenario in "$@"; do
    molecule_test --scenario-name "$scenario" || failed="$failed $scenario"
done
if [ -n "$failed" ]; then
    echo "molecule: failed:$failed" >&2
    exit 1
fi
