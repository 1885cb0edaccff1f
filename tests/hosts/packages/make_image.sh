#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes the tar that `docker import` turns into vgpu-demo/base:latest: a small Debian root of busybox and glibc, from
# the machine's own apt. The root needs glibc, because nvidia-smi, vgpu-probe and libvgpu.so run in it. No image
# registry is used. Usage: make_image.sh [file], .build/demo-image.tar by default.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
out=${1:-$root/.build/demo-image.tar}
packages="busybox libc6 libgcc-s1"
work=$root/.build/demo-image-work

# Without package lists apt finds no candidate.
# shellcheck disable=SC2086 # a list of words is meant
[ "$(apt-cache policy $packages | grep -c '^  Candidate: [^(]')" -eq 3 ] || apt-get -qq update

# A newer libc6 in apt leads to another image.
# shellcheck disable=SC2086 # a list of words is meant
stamp=$(apt-cache policy $packages | sed -n 's/^  Candidate: //p' | cat - "$here/make_image.sh" | sha256sum | cut -c1-32)
if [ -s "$out" ] && [ "$(cat "$out.stamp" 2>/dev/null || true)" = "$stamp" ]; then
    echo "image: $out is up to date"
    exit 0
fi

rm -rf "$work"
mkdir -p "$work/debs" "$work/root/usr/bin" "$work/root/usr/sbin" "$work/root/usr/lib"
# apt would download as the user _apt, which may not write below this folder; the option makes it download as root.
# shellcheck disable=SC2086 # a list of words is meant
(cd "$work/debs" && apt-get -qq -o APT::Sandbox::User=root download $packages)

cd "$work/root"
for folder in bin sbin lib; do ln -s "usr/$folder" "$folder"; done
[ ! -e /lib64 ] || { mkdir -p usr/lib64 && ln -s usr/lib64 lib64; }
for deb in "$work"/debs/*.deb; do
    # Unpack into a separate folder and copy through the links: dpkg-deb would replace a link to a folder by a folder.
    rm -rf "$work/one"
    dpkg-deb -x "$deb" "$work/one"
    rm -rf "$work/one/usr/share"
    tar -C "$work/one" -cf - . | tar -xf - --keep-directory-symlink
done
mkdir -p etc dev proc sys tmp root run var
chmod 1777 tmp
ln -sf /run var/run
chroot . /bin/busybox --install -s
echo "root:x:0:0:root:/root:/bin/sh" >etc/passwd
echo "root:x:0:" >etc/group
echo "hosts: files dns" >etc/nsswitch.conf
chroot . /bin/true || { echo "make_image.sh: the root made in $work/root does not run /bin/true" >&2; exit 1; }

mkdir -p "$(dirname "$out")"
tar --sort=name --mtime=@1700000000 --numeric-owner --owner=0 --group=0 -cf "$out.new" .
mv "$out.new" "$out"
echo "$stamp" >"$out.stamp"
cd "$root"
rm -rf "$work"
echo "image: $out, $(du -h "$out" | cut -f1)"
