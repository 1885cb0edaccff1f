#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Fetches NVIDIA's cuda.h for tests that compare the project's declarations with it. A build needs no CUDA header.
# Usage:
#   fetch_cuda_headers.sh 12|13.0|13.5|newest
# pip downloads the wheels that cuda_headers.txt pins, and the headers are unpacked into .build/cuda-headers/VERSION/. The
# last line of output is this folder. Exit status 3 means that the headers are not available on this machine; stderr
# gives the reason. "newest" fetches NVIDIA's latest headers at each run, and also nvml.h. The file `wheels` in the
# folder names the downloaded wheels.
set -eu

version=${1:?fetch_cuda_headers.sh: name a version of CUDA: 12, 13.0, 13.5 or newest}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
target=$root/.build/cuda-headers/$version

unavailable() {
    echo "cuda.h of CUDA $version: $1" >&2
    exit 3
}

if [ -s "$target/cuda.h" ] && [ "$version" != newest ]; then
    echo "$target"
    exit 0
fi
python=$root/.build/venv/bin/python
[ -x "$python" ] || python=python3
rm -rf "$target" "$target.wheel"
mkdir -p "$target" "$target.wheel"
if [ "$version" = newest ]; then
    "$python" -m pip -q download --no-deps --only-binary :all: -d "$target.wheel" nvidia-cuda-runtime nvidia-nvml-dev >&2 ||
        unavailable "pip cannot get it"
else
    grep "==$version\." "$here/cuda_headers.txt" >"$target.wheel/pinned.txt" || unavailable "cuda_headers.txt pins none"
    "$python" -m pip -q download --no-deps --only-binary :all: --require-hashes -r "$target.wheel/pinned.txt" \
        -d "$target.wheel" >&2 || unavailable "pip cannot get it"
fi
# A wheel is a zip file. The path of its folder "include" depends on the version, so the script searches for this
# folder.
"$python" - "$target.wheel" "$target" <<'EOF'
import pathlib, sys, zipfile
wheels, folder = sorted(pathlib.Path(sys.argv[1]).glob("*.whl")), pathlib.Path(sys.argv[2])
for wheel in wheels:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            path = pathlib.PurePosixPath(name)
            if path.parent.name == "include" and path.suffix == ".h":
                (folder / path.name).write_bytes(archive.read(name))
(folder / "wheels").write_text("".join(f"{wheel.name}\n" for wheel in wheels))
EOF
rm -rf "$target.wheel"
[ -s "$target/cuda.h" ] || unavailable "the wheel has no include/cuda.h"
echo "$target"
