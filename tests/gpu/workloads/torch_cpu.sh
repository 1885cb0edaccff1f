#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Unpacks Debian's PyTorch for the CPU and its dependencies into .build/torch-cpu, and prints the command that runs a
# Python with it. Installs nothing. The tests use it to show that the workloads run, not to measure them.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
dir=$(cd "$here/../../.." && pwd)/.build/torch-cpu
if [ ! -e "$dir/.complete" ]; then
    rm -rf "$dir"
    mkdir -p "$dir/debs/partial"
    [ "$(apt-cache policy python3-torch | grep -c '^  Candidate: [^(]')" -eq 1 ] || apt-get -qq update
    # An empty status file, so that all dependencies are downloaded, also those that this machine has installed.
    : >"$dir/status"
    apt-get -qq -y -o APT::Sandbox::User=root -o Dir::State::status="$dir/status" -o Dir::Cache::archives="$dir/debs" \
        --no-install-recommends --download-only install python3-torch >&2
    for deb in "$dir"/debs/*.deb; do
        dpkg-deb -x "$deb" "$dir/root"
    done
    mkdir -p "$dir/lib"
    for library in "$dir"/root/lib/x86_64-linux-gnu/*.so.*; do
        case ${library##*/} in
        libc.so.* | libm.so.* | libdl.so.* | libpthread.so.* | librt.so.* | ld-linux* | libresolv.so.* | libutil.so.*) ;;
        libnss_* | libnsl* | libmvec* | libanl* | libBrokenLocale* | libthread_db* | libc_malloc* | libmemusage*) ;;
        *) cp -P "$library" "$dir/lib/" ;;
        esac
    done
    rm -rf "$dir/debs" "$dir/status"
    touch "$dir/.complete"
fi
# Some libraries lie in separate folders, where update-alternatives would find them. Folders of libc are left out.
# Otherwise programs of this machine would start with this machine's loader and the unpacked libc, which do not fit.
libraries=$dir/root/usr/lib/x86_64-linux-gnu
folders=$libraries:$libraries/blas:$libraries/lapack:$dir/root/usr/lib:$dir/lib
echo "LD_LIBRARY_PATH=$folders PYTHONPATH=$dir/root/usr/lib/python3/dist-packages"
