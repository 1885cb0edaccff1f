#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Stands for ssh: the host's name is that of a container. So Ansible's own connection is used, with no collection besides.
while [ $# -gt 0 ]; do
    case $1 in
    -[opilFES]) shift 2 ;;
    -*) shift ;;
    *) break ;;
    esac
done
# Ansible asks ssh without a host whether it knows an option.
[ $# -ge 2 ] || exit 0
host=$1
shift
exec podman exec -i "$host" sh -c "$*"
