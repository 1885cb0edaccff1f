#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Creates the virtual environment DIR with exactly the packages of LOCK (versions and hashes), unless DIR already has them.
set -eu

dir=$1 lock=$2 python=$3
stamp=$dir/.lock
mkdir -p "$(dirname "$dir")"
# Takes a lock, because two processes of one test run may create the same environment at the same time.
exec 9>"$dir.making"
flock 9
want=$("$python" -c 'import sys; print(sys.version)' | cat - "$lock" | sha256sum)
[ "$(cat "$stamp" 2>/dev/null || true)" = "$want" ] && exit 0

echo "venv: installing $(grep -c '==' "$lock") pinned packages into $dir"
rm -rf "$dir"
"$python" -m venv "$dir"
"$dir/bin/pip" install -q --disable-pip-version-check --require-hashes -r "$lock"
printf '%s\n' "$want" >"$stamp"
