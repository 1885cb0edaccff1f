#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds once a containerd that applies the kubelet's CDI devices (Container Device Interface; Debian's 1.6 does not),
# and prints its programs' folder.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cache=${VGPU_E2E_CACHE:-$here/../../../.build/kube}
programs="containerd containerd-shim-runc-v2 ctr"
module=$here/containerd
digest=$(cat "$module/go.mod" "$module/go.sum" | sha256sum | cut -c1-12)
version=$(sed -n 's|^[[:space:]]*github.com/containerd/containerd/v2 \(v[0-9.]*\).*|\1|p' "$module/go.mod" | head -n 1)
out=$cache/containerd-$version-$digest
if [ ! -d "$out" ]; then
    go=$("$here/go.sh")
    mkdir -p "$out.part"
    cd "$module"
    for program in $programs; do
        [ ! -x "$out.part/$program" ] || continue
        echo "building $program $version" >&2
        CGO_ENABLED=0 GOFLAGS=-mod=readonly GOTOOLCHAIN=local nice -n 10 "$go" build -p "${VGPU_E2E_JOBS:-2}" -trimpath \
            -ldflags "-s -w -X github.com/containerd/containerd/v2/version.Version=$version" \
            -o "$out.part/$program.new" "github.com/containerd/containerd/v2/cmd/$program" >&2
        mv "$out.part/$program.new" "$out.part/$program"
    done
    mv "$out.part" "$out"
fi
cd "$out" && pwd
