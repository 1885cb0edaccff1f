#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs those of the named Debian packages that are missing. If all are installed, the script does not call apt.
set -eu

missing=""
for package in "$@"; do
    case "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)" in
        installed) ;;
        *) missing="$missing $package" ;;
    esac
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" -ne 0 ]; then
    echo "tools/apt.sh: these packages are missing and only root can install them:$missing" >&2
    exit 1
fi
echo "apt: installing$missing"
export DEBIAN_FRONTEND=noninteractive
# A fresh machine has no package lists, and old lists name files that no longer exist, so the lists are always updated.
apt-get -qq update
# $missing is a list of words, so it has no quotes.
# shellcheck disable=SC2086
apt-get -qq install -y --no-install-recommends $missing >/dev/null
