#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Replaces ssh by podman exec; the host's name is the name of a container. With it Ansible uses its built-in
# ssh connection and needs no collection with a podman connection.
while [ $# -gt 0 ]; do
    case $1 in
    -[opilFES]) shift 2 ;;
    -*) shift ;;
    *) break ;;
    esac
done
# Ansible also calls ssh without a host, to find out whether ssh supports an option.
[ $# -ge 2 ] || exit 0
host=$1
shift
exec podman exec -i "$host" sh -c "$*"
