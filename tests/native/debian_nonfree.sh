# shellcheck shell=sh
# SPDX-License-Identifier: Apache-2.0
# Functions for the scripts that fetch NVIDIA's own files for tests. The files are in packages of Debian's section
# non-free. The functions run apt with their own folders, sources and package lists, but with the mirror that this
# machine's apt uses. They install nothing and do not change the machine's apt.

unavailable() {
    echo "${0##*/}: $1" >&2
    exit 3
}

# nonfree_packages SUITE FOLDER PACKAGE…: unpacks the packages into FOLDER/root
nonfree_packages() {
    suite=$1
    apt=$2
    shift 2
    [ "$(dpkg --print-architecture 2>/dev/null)" = amd64 ] || unavailable "$suite: the packages are fetched for Debian's amd64 only"
    # shellcheck disable=SC2016 # apt expands the dollar signs, not the shell
    mirror=$(apt-get indextargets --format '$(ORIGIN) $(REPO_URI)' 'Created-By: Packages' 'Component: main' |
        awk '$1 == "Debian" && $2 !~ /security/ { print $2; exit }')
    [ -n "$mirror" ] || unavailable "$suite: this machine's apt has no Debian archive (Ubuntu packs the driver differently)"
    keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    [ -r "$keyring" ] || unavailable "$suite: $keyring is missing; install debian-archive-keyring"

    mkdir -p "$apt/state/lists/partial" "$apt/cache/archives/partial" "$apt/packages"
    echo "deb [signed-by=$keyring] $mirror $suite non-free" >"$apt/sources.list"
    cat >"$apt/apt.conf" <<EOF
Dir::State "$apt/state";
Dir::State::status "/dev/null";
Dir::Cache "$apt/cache";
Dir::Etc::sourcelist "$apt/sources.list";
Dir::Etc::sourceparts "/dev/null";
APT::Sandbox::User "root";
APT::Get::List-Cleanup "false";
Acquire::Languages "none";
EOF
    export APT_CONFIG="$apt/apt.conf"
    apt-get -q=2 update >&2 || unavailable "$suite: apt-get update failed"
    rm -f "$apt/packages"/*.deb
    (cd "$apt/packages" && apt-get -q=2 download "$@" >&2) || unavailable "$suite: the packages $* are not there"
    rm -rf "$apt/root"
    for package in "$apt/packages"/*.deb; do
        dpkg -x "$package" "$apt/root"
    done
    unset APT_CONFIG
}
