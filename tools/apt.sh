#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs the Debian packages that are named and not there yet. Nothing is asked of apt when all are there.
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
# A fresh machine has no package lists, an old one has lists of files that are gone: update in both cases.
apt-get -qq update
# shellcheck disable=SC2086 # a list of words is meant
apt-get -qq install -y --no-install-recommends $missing >/dev/null
