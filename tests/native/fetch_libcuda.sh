#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Fetches NVIDIA's own libcuda.so.1 for tests that read its exported names or call its cuGetProcAddress. Neither needs a
# GPU. Usage:
#   fetch_libcuda.sh [SUITE]        SUITE: bookworm (driver 535, default) or trixie (driver 550)
# Writes libcuda.so.1 and the file `version` into .build/libcuda/SUITE/. The last line of output is this folder. Exit
# status 3 means that the package is not available on this machine; stderr gives the reason.
set -eu

suite=${1:-bookworm}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
target=$root/.build/libcuda/$suite
apt=$root/.build/libcuda/apt-$suite
# shellcheck source-path=SCRIPTDIR source=debian_nonfree.sh
. "$here/debian_nonfree.sh"

if [ -s "$target/version" ]; then
    echo "$target"
    exit 0
fi
nonfree_packages "$suite" "$apt" libcuda1

rm -rf "$target"
mkdir -p "$target"
library=$(find "$apt/root" -type f -name 'libcuda.so.*')
cp "$library" "$target/libcuda.so.1"
rm -rf "$apt"
echo "${library##*libcuda.so.}" >"$target/version"
echo "$target"
