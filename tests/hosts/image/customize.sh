#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Customizes the image of the simulated hosts. mmdebstrap runs this script as its customize hook, outside the new root
# file system. The script puts into the image the repository of the packages that roles install, the Python environment
# of the kubelet double (a test program that replaces the kubelet), and settings for a host that is a container.
#   customize.sh ROOT PACKAGES_FILE WHEELS_FOLDER REQUIREMENTS
set -eu

root=$1 packages=$2 wheels=$3 requirements=$4
repository=$root/opt/vgpu-hosts/apt

# 1. The repository. Downloads run with the machine's mirrors, proxy and login, which leave the image afterwards.
mkdir -p "$repository"
rm -f "$root"/var/cache/apt/archives/*.deb
# shellcheck disable=SC2046 # a list of words is meant
APT_CONFIG=$MMDEBSTRAP_APT_CONFIG apt-get -q -y --no-install-recommends --download-only install \
    $(sed 's/#.*//' "$packages")
mv "$root"/var/cache/apt/archives/*.deb "$repository/"
(cd "$repository" && dpkg-scanpackages --multiversion . >Packages 2>/dev/null)
rm -rf "$root"/etc/apt/sources.list.d/* "$root"/etc/apt/auth.conf "$root"/etc/apt/auth.conf.d/* \
    "$root"/etc/apt/apt.conf.d/99mmdebstrap "$root"/var/lib/apt/lists/*
echo 'deb [trusted=yes] file:/opt/vgpu-hosts/apt ./' >"$root/etc/apt/sources.list"
# The repository has no recommended packages; requesting them would only fill the log.
echo 'APT::Install-Recommends "false";' >"$root/etc/apt/apt.conf.d/90vgpu-hosts"
chroot "$root" apt-get -qq update

# 2. The kubelet double's Python environment. Its own code is copied when a host is started.
cp -r "$wheels" "$root/tmp/wheels"
cp "$requirements" "$root/tmp/requirements.txt"
chroot "$root" python3 -m venv /opt/kubelet-double
chroot "$root" /opt/kubelet-double/bin/pip install -q --no-index --find-links /tmp/wheels --no-compile \
    --disable-pip-version-check -r /tmp/requirements.txt
rm -rf "$root/tmp/wheels" "$root/tmp/requirements.txt"

# 3. A privileged container shares the machine's kernel. So units that would set sysctls, load modules, mount the
# machine's debug filesystems or take its consoles stay off. So do timers that would take apt's lock during a play.
for unit in systemd-sysctl.service systemd-modules-load.service systemd-binfmt.service systemd-udevd.service \
    systemd-udev-trigger.service systemd-remount-fs.service systemd-logind.service systemd-firstboot.service \
    sys-kernel-config.mount sys-kernel-debug.mount sys-kernel-tracing.mount sys-fs-fuse-connections.mount \
    proc-sys-fs-binfmt_misc.automount dev-hugepages.mount getty.target console-getty.service \
    apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service \
    fstrim.timer; do
    ln -sf /dev/null "$root/etc/systemd/system/$unit"
done
: >"$root/etc/machine-id"
rm -f "$root/etc/hostname" "$root/etc/resolv.conf"
