#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Copies what git knows of the working tree, or would add, into the new folder DIR: the collection without build products.
set -eu

dir=$1
cd "$(dirname "$0")/.."
rm -rf "$dir"
mkdir -p "$dir"
# A file that is deleted but not yet committed is still listed; tar would stop at it.
git ls-files -z --cached --others --exclude-standard --deduplicate |
    tar --create --null --files-from=- --ignore-failed-read 2>/dev/null |
    tar --extract --directory="$dir"
