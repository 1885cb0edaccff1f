#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Copies the collection without build products into the new folder DIR: the tracked files of the working tree and the
# untracked files that git does not ignore.
set -eu

dir=$1
cd "$(dirname "$0")/.."
rm -rf "$dir"
mkdir -p "$dir"
# git still lists a file whose deletion is not committed. Without --ignore-failed-read tar would fail on this file.
git ls-files -z --cached --others --exclude-standard --deduplicate |
    tar --create --null --files-from=- --ignore-failed-read 2>/dev/null |
    tar --extract --directory="$dir"
