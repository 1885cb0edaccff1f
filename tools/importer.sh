#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the collection from a clean export of the working tree and checks with galaxy-importer that Galaxy accepts it.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
work=$root/.build/importer
rm -rf "$work"
"$root/tools/export.sh" "$work/tree"
cd "$work/tree"
"$root/.build/venv/bin/ansible-galaxy" collection build --force --output-path "$work" . >/dev/null
cd "$work"
# PATH is set, because the importer starts ansible-doc and flake8 by name. The importer's ansible-lint is off, because
# it only warns. The gate lint runs ansible-lint with the stricter profile production, and its warnings fail.
PATH=$root/.build/venv/bin:$PATH GALAXY_IMPORTER_CHECK_CHANGELOG=false GALAXY_IMPORTER_RUN_ANSIBLE_LINT=false \
    "$root/.build/venv/bin/python" -m galaxy_importer.main "$work"/vgpu-fleet-*.tar.gz
