#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds helm from its Go module once and prints the program's path. VGPU_HELM names a different helm.
#   tests/chart/helm.sh [--find]             with --find it only prints the path, and exits with 3 if helm is not built
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cache=${VGPU_E2E_CACHE:-$here/../../.build/kube}
module=$here/helm

if [ -n "${VGPU_HELM:-}" ]; then
    [ -x "$VGPU_HELM" ] || {
        echo "VGPU_HELM=$VGPU_HELM: expected a program; unset it to build helm out of its Go module" >&2
        exit 1
    }
    echo "$VGPU_HELM"
    exit 0
fi

digest=$(cat "$module/go.mod" "$module/go.sum" | sha256sum | cut -c1-12)
version=$(sed -n 's|^.*helm.sh/helm/v3 \(v[0-9.]*\).*|\1|p' "$module/go.mod" | head -n 1)
out=$cache/helm-$version-$digest
if [ ! -x "$out/helm" ]; then
    [ "${1:-}" != --find ] || exit 3
    go=$("$here/../e2e/kube/go.sh" "$(sed -n 's/^go \([0-9]*\.[0-9]*\).*/\1/p' "$module/go.mod")")
    mkdir -p "$out"
    cd "$module"
    echo "building helm $version" >&2
    # These flags set the default Kubernetes version for rendering charts, which would otherwise be v1.20.
    kube=$(sed -n 's|^[[:space:]]*k8s.io/client-go v0\.\([0-9]*\)\..*|\1|p' go.mod)
    stamp="-X helm.sh/helm/v3/internal/version.version=$version"
    for package in lint/rules chartutil; do
        stamp="$stamp -X helm.sh/helm/v3/pkg/$package.k8sVersionMajor=1 -X helm.sh/helm/v3/pkg/$package.k8sVersionMinor=$kube"
    done
    # Rename at the end, so that a killed build does not look finished.
    CGO_ENABLED=0 GOFLAGS=-mod=readonly GOTOOLCHAIN=local nice -n 10 "$go" build -p "${VGPU_E2E_JOBS:-2}" -trimpath \
        -ldflags "-s -w $stamp" -o "$out/helm.part" helm.sh/helm/v3/cmd/helm >&2
    mv "$out/helm.part" "$out/helm"
fi
echo "$(cd "$out" && pwd)/helm"
