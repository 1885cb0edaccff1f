#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Fetches NVIDIA's own nvidia-smi, and the libnvidia-ml that it belongs to, out of Debian's non-free packages, for tests:
#   fetch_nvidia_smi.sh [SUITE]     SUITE: bookworm (driver 535, default) or trixie (driver 550)
# They land in .build/nvidia-smi/SUITE/ as nvidia-smi, libnvidia-ml.so.1 and version; the last line printed is that
# folder. apt is used with folders, sources and lists of its own, on the mirror that this machine's apt uses: nothing is
# installed and the machine's apt is not changed. Exit 3: the packages cannot be had here, with the reason on stderr.
set -eu

suite=${1:-bookworm}
root=$(cd "$(dirname "$0")/../.." && pwd)
target=$root/.build/nvidia-smi/$suite
apt=$root/.build/nvidia-smi/apt-$suite

unavailable() {
    echo "nvidia-smi for $suite: $1" >&2
    exit 3
}

if [ -s "$target/version" ] && [ -x "$target/nvidia-smi" ]; then
    echo "$target"
    exit 0
fi
[ "$(dpkg --print-architecture 2>/dev/null)" = amd64 ] || unavailable "the packages are fetched for Debian's amd64 only"
# shellcheck disable=SC2016 # the dollars are apt's
mirror=$(apt-get indextargets --format '$(ORIGIN) $(REPO_URI)' 'Created-By: Packages' 'Component: main' |
    awk '$1 == "Debian" && $2 !~ /security/ { print $2; exit }')
[ -n "$mirror" ] || unavailable "this machine's apt has no Debian archive (Ubuntu packs nvidia-smi differently)"
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[ -r "$keyring" ] || unavailable "$keyring is missing; install debian-archive-keyring"

mkdir -p "$apt/state/lists/partial" "$apt/cache/archives/partial" "$apt/packages"
echo "deb [signed-by=$keyring] $mirror $suite non-free" >"$apt/sources.list"
cat >"$apt/apt.conf" <<EOF
Dir::State "$apt/state";
Dir::State::status "/dev/null";
Dir::Cache "$apt/cache";
Dir::Etc::sourcelist "$apt/sources.list";
Dir::Etc::sourceparts "/dev/null";
APT::Sandbox::User "root";
APT::Get::List-Cleanup "false";
Acquire::Languages "none";
EOF
export APT_CONFIG="$apt/apt.conf"
apt-get -q=2 update >&2 || unavailable "apt-get update failed"
cd "$apt/packages"
rm -f ./*.deb
apt-get -q=2 download nvidia-smi libnvidia-ml1 >&2 || unavailable "the packages nvidia-smi and libnvidia-ml1 are not there"

rm -rf "$apt/root" "$target"
mkdir -p "$target"
for package in ./*.deb; do
    dpkg -x "$package" "$apt/root"
done
library=$(find "$apt/root" -type f -name 'libnvidia-ml.so.*')
find "$apt/root" -type f -name nvidia-smi -perm -u+x -exec cp {} "$target/nvidia-smi" \;
cp "$library" "$target/libnvidia-ml.so.1"
rm -rf "$apt/root"
echo "${library##*libnvidia-ml.so.}" >"$target/version"
echo "$target"
