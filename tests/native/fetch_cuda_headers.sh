#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Fetches NVIDIA's cuda.h for tests that compare our own declarations with it; building needs no header of CUDA.
#   fetch_cuda_headers.sh 12|13.0|13.5
# The headers land in .build/cuda-headers/VERSION/; the last line printed is that folder. They come out of the wheels that
# cuda_headers.txt pins, by pip as this machine has it set up. Exit 3: they cannot be had here, the reason on stderr.
set -eu

version=${1:?fetch_cuda_headers.sh: name a version of CUDA: 12, 13.0 or 13.5}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
target=$root/.build/cuda-headers/$version

unavailable() {
    echo "cuda.h of CUDA $version: $1" >&2
    exit 3
}

if [ -s "$target/cuda.h" ]; then
    echo "$target"
    exit 0
fi
python=$root/.build/venv/bin/python
[ -x "$python" ] || python=python3
rm -rf "$target" "$target.wheel"
mkdir -p "$target" "$target.wheel"
grep "==$version\." "$here/cuda_headers.txt" >"$target.wheel/pinned.txt" || unavailable "cuda_headers.txt pins none"
"$python" -m pip -q download --no-deps --only-binary :all: --require-hashes -r "$target.wheel/pinned.txt" -d "$target.wheel" >&2 ||
    unavailable "pip cannot get it"
# A wheel is a zip file; the headers lie in a folder whose name depends on the version.
"$python" - "$target.wheel" "$target" <<'EOF'
import pathlib, sys, zipfile
wheel = next(pathlib.Path(sys.argv[1]).glob("*.whl"))
with zipfile.ZipFile(wheel) as archive:
    for name in archive.namelist():
        path = pathlib.PurePosixPath(name)
        if path.parent.name == "include" and path.suffix == ".h":
            (pathlib.Path(sys.argv[2]) / path.name).write_bytes(archive.read(name))
EOF
rm -rf "$target.wheel"
[ -s "$target/cuda.h" ] || unavailable "the wheel has no include/cuda.h"
echo "$target"
