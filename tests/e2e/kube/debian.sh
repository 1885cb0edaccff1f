#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Unpacks Debian's etcd and containerd into a cache and prints the folder of their programs. The packages are
# not installed, because both would start a service on this machine.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cache=${VGPU_E2E_CACHE:-$here/../../../.build/kube}
packages="etcd-server containerd"
programs="etcd containerd containerd-shim-runc-v2 ctr"

all_in() {
    for program in $programs; do
        [ -x "$1/$program" ] || return 1
    done
}

if all_in "$cache/debian/usr/bin"; then
    cd "$cache/debian/usr/bin" && pwd
    exit 0
fi
# shellcheck disable=SC2086 # The variable is a list of words.
[ "$(apt-cache policy $packages | grep -c '^  Candidate: [^(]')" -eq 2 ] || apt-get -qq update
rm -rf "$cache/debian.part"
mkdir -p "$cache/debian.part/debs"
# shellcheck disable=SC2086 # The variable is a list of words.
(cd "$cache/debian.part/debs" && apt-get -qq -o APT::Sandbox::User=root download $packages)
for deb in "$cache"/debian.part/debs/*.deb; do
    dpkg-deb -x "$deb" "$cache/debian.part"
done
rm -rf "$cache/debian.part/debs" "$cache/debian"
all_in "$cache/debian.part/usr/bin" || {
    echo "tests/e2e/kube/debian.sh: expected $programs in the packages $packages; at least one is missing" >&2
    exit 1
}
mv "$cache/debian.part" "$cache/debian"
cd "$cache/debian/usr/bin" && pwd
