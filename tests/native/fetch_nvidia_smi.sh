#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Fetches NVIDIA's own nvidia-smi, and the libnvidia-ml of the same version, for tests. Usage:
#   fetch_nvidia_smi.sh [SUITE]     SUITE: bookworm (driver 535, default) or trixie (driver 550)
# Writes nvidia-smi, libnvidia-ml.so.1 and the file `version` into .build/nvidia-smi/SUITE/. The last line of output is
# this folder. Exit status 3 means that the packages are not available on this machine; stderr gives the reason.
set -eu

suite=${1:-bookworm}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
target=$root/.build/nvidia-smi/$suite
apt=$root/.build/nvidia-smi/apt-$suite
# shellcheck source-path=SCRIPTDIR source=debian_nonfree.sh
. "$here/debian_nonfree.sh"

if [ -s "$target/version" ] && [ -x "$target/nvidia-smi" ]; then
    echo "$target"
    exit 0
fi
nonfree_packages "$suite" "$apt" nvidia-smi libnvidia-ml1

rm -rf "$target"
mkdir -p "$target"
library=$(find "$apt/root" -type f -name 'libnvidia-ml.so.*')
find "$apt/root" -type f -name nvidia-smi -perm -u+x -exec cp {} "$target/nvidia-smi" \;
cp "$library" "$target/libnvidia-ml.so.1"
rm -rf "$apt/root"
echo "${library##*libnvidia-ml.so.}" >"$target/version"
echo "$target"
