#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Prints the path of a go program of VERSION (default 1.24) or newer. If the go in PATH is new enough, the script prints
# its path. Otherwise the older go in PATH fetches Go's toolchain module and verifies it with Go's checksum database.
#   tests/e2e/kube/go.sh [VERSION]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cache=${VGPU_E2E_CACHE:-$here/../../../.build/kube}
wanted=${1:-1.24}
case $wanted in
1.24) toolchain=1.24.9 ;;
*) toolchain=$wanted.0 ;;
esac

version() {
    # GOTOOLCHAIN=local makes go report its own version without fetching another.
    GOTOOLCHAIN=local "$1" version 2>/dev/null | sed -n 's/^go version go\([0-9]*\.[0-9]*\).*/\1/p'
}

new_enough() {
    [ "$(printf '%s\n%s\n' "$wanted" "$1" | sort -V | head -n 1)" = "$wanted" ]
}

PATH=$PATH:/usr/local/go/bin:/usr/lib/go/bin
found=$(command -v go || true)
if [ -n "$found" ] && new_enough "$(version "$found")"; then
    echo "$found"
    exit 0
fi
target=$cache/go-$toolchain
if [ -x "$target/bin/go" ]; then
    echo "$target/bin/go"
    exit 0
fi
mkdir -p "$cache"
if [ -z "$found" ]; then
    package=$(apt-cache depends golang-go | sed -n 's/^  Depends: \(golang-[0-9.]*-go\)$/\1/p')
    rm -rf "$cache/go-debian"
    mkdir -p "$cache/go-debian"
    (cd "$cache/go-debian" && apt-get -qq -o APT::Sandbox::User=root download "$package" && dpkg-deb -x ./*.deb .)
    rm -f "$cache/go-debian"/*.deb
    found=$(echo "$cache"/go-debian/usr/lib/go-*/bin/go)
    GOROOT=$(dirname "$(dirname "$found")")
    export GOROOT
fi
name=golang.org/toolchain@v0.0.1-go$toolchain.linux-$("$found" env GOARCH)
echo "fetching $name with $(GOTOOLCHAIN=local "$found" version)" >&2
# Fetch the toolchain from an empty module, because an old go refuses go.mod files of newer versions.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
printf 'module fetch\n\ngo 1.19\n' >"$work/go.mod"
folder=$(cd "$work" && GOFLAGS=-mod=mod GOTOOLCHAIN=local "$found" mod download -json "$name" | sed -n 's/^[[:space:]]*"Dir": "\(.*\)",$/\1/p')
[ -d "$folder" ] || {
    echo "tests/e2e/kube/go.sh: $name was not fetched; put Go $wanted or newer into PATH, or set VGPU_E2E_KUBE_BIN" >&2
    exit 1
}
rm -rf "$target.part"
cp -r "$folder" "$target.part"
chmod -R u+w "$target.part"
# Files in a module are not executable.
find "$target.part/bin" "$target.part/pkg/tool" -type f -exec chmod +x {} +
mv "$target.part" "$target"
echo "$target/bin/go"
