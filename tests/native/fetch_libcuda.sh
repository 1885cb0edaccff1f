#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Fetches NVIDIA's own libcuda.so.1 for tests of what it exports and of what its cuGetProcAddress answers (which needs no GPU):
#   fetch_libcuda.sh [SUITE]        SUITE: bookworm (driver 535, default) or trixie (driver 550)
# It lands in .build/libcuda/SUITE/ as libcuda.so.1 and version; the last line printed is that folder. Exit 3: the
# package cannot be had here, with the reason on stderr.
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
