#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the programs of Kubernetes for tests/e2e once and prints their folder. The folder's name contains the digest
# of go.mod and go.sum, so a change of these files causes a new build.
#   tests/e2e/kube/build.sh [--find]         --find: only print the folder; exit 3 if the programs are not built
#   VGPU_E2E_KUBERNETES=1.36                 the version: one of the folders next to this file; 1.34 without it
set -eu
here=$(cd "$(dirname "$0")" && pwd)
programs="kube-apiserver kubelet kube-scheduler kube-controller-manager kubectl"

all_in() {
    for program in $programs; do
        [ -x "$1/$program" ] || return 1
    done
}

if [ -n "${VGPU_E2E_KUBE_BIN:-}" ]; then
    all_in "$VGPU_E2E_KUBE_BIN" || {
        echo "VGPU_E2E_KUBE_BIN=$VGPU_E2E_KUBE_BIN: expected $programs there; found: $(ls "$VGPU_E2E_KUBE_BIN" 2>&1)" >&2
        exit 1
    }
    echo "$VGPU_E2E_KUBE_BIN"
    exit 0
fi

module=$here/${VGPU_E2E_KUBERNETES:-1.34}
[ -f "$module/go.mod" ] || {
    echo "VGPU_E2E_KUBERNETES=$VGPU_E2E_KUBERNETES: expected one of $(cd "$here" && echo 1.*), a folder of tests/e2e/kube" >&2
    exit 1
}
digest=$(cat "$module/go.mod" "$module/go.sum" | sha256sum | cut -c1-12)
version=$(sed -n 's|^.*k8s.io/kubernetes \(v[0-9.]*\).*|\1|p' "$module/go.mod" | head -n 1)
cache=${VGPU_E2E_CACHE:-$here/../../../.build/kube}
out=$cache/$version-$digest
if all_in "$out"; then
    cd "$out" && pwd
    exit 0
fi
[ "${1:-}" != --find ] || exit 3
go=$("$here/go.sh" "$(sed -n 's/^go \([0-9]*\.[0-9]*\).*/\1/p' "$module/go.mod")")
mkdir -p "$out"
minor=${version#v1.}
minor=${minor%%.*}
# The programs report their version to each other and to the device plugin; without these flags it would be v0.0.0.
stamp="-X k8s.io/component-base/version.gitVersion=$version -X k8s.io/component-base/version.gitMajor=1"
stamp="$stamp -X k8s.io/component-base/version.gitMinor=$minor -X k8s.io/client-go/pkg/version.gitVersion=$version"
cd "$module"
for program in $programs; do
    [ ! -x "$out/$program" ] || continue
    echo "building $program $version" >&2
    # -p: two compilers need up to 2.5 GB together. Rename at the end, so that a killed build does not look finished.
    CGO_ENABLED=0 GOFLAGS=-mod=readonly GOTOOLCHAIN=local nice -n 10 "$go" build -p "${VGPU_E2E_JOBS:-2}" -trimpath \
        -ldflags "-s -w $stamp" -o "$out/$program.part" "k8s.io/kubernetes/cmd/$program" >&2
    mv "$out/$program.part" "$out/$program"
done
cd "$out" && pwd
