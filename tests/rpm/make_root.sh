#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes the folder in which tests/rpm runs: a Debian root with dnf, zypper and rpm. Its /srv contains package
# repositories for the test hosts, with tiny packages that this script builds. Usage: make_root.sh FOLDER
set -eu

root=$1
here=$(cd "$(dirname "$0")" && pwd)
part=$root.part
rm -rf "$part"

# shellcheck disable=SC2016 # the inner shells expand these
# Debian's dnf-plugins-core conflicts with zypper over one program of the same name. So it is only unpacked, and
# inside/build.py makes a package of the parts that the tests need.
mmdebstrap --quiet --variant=minbase --include=python3,dnf,python3-dateutil,rpm,zypper,createrepo-c,gpg,gpg-agent \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/share/man/*' \
    --customize-hook='cd "$1"/var/tmp && APT_CONFIG="$MMDEBSTRAP_APT_CONFIG" apt-get -qq download dnf-plugins-core
        dpkg-deb -x dnf-plugins-core_*.deb "$1"/opt/dnf-plugins-core && rm dnf-plugins-core_*.deb' \
    bookworm "$part"

# Debian's rpm by default keeps its database in the caller's home folder.
mkdir -p "$part/etc/rpm" "$part/root/inside"
echo '%_dbpath /var/lib/rpm' >"$part/etc/rpm/macros"
cp "$here"/inside/* "$part/root/inside/"
# shellcheck disable=SC2016
unshare --mount sh -c '
    mount -t proc proc "$1/proc" && mount --rbind /dev "$1/dev" && exec chroot "$1" python3 /root/inside/build.py' sh "$part"
rm -rf "$root"
mv "$part" "$root"
