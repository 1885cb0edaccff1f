#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Creates the build context of the execution environment in .build/ee/context: the collection from a clean export, and the
# files that ansible-builder writes. Pulls and builds no image. Then checks with ansible-builder which packages the
# collection needs.
set -eu

cd "$(dirname "$0")/.."
root=$PWD
work=$root/.build/ee
PATH=$root/.build/docs-env/bin:$PATH
unset ANSIBLE_CONFIG
rm -rf "$work"
mkdir -p "$work/installed"
tools/export.sh "$work/tree"
(cd "$work/tree" && ansible-galaxy collection build --output-path "$work" . >/dev/null)

ansible-builder create --file execution-environment.yml --context "$work/context" >"$work/create.log" 2>&1 || {
    cat "$work/create.log" >&2
    exit 1
}
for file in "$work"/context/Containerfile "$work"/context/_build/requirements.yml "$work"/context/_build/files/*.tar.gz; do
    if [ ! -s "$file" ]; then
        echo "execution environment: $file: expected a file, found none; see $work/create.log" >&2
        exit 1
    fi
done

# Repeats the steps of the image's build: installs the collections that the context lists, then reads their requirements.
(cd "$work/context/_build" && ansible-galaxy collection install -r requirements.yml --offline \
    --collections-path "$work/installed" >"$work/install.log" 2>&1) || {
    cat "$work/install.log" >&2
    exit 1
}
ansible-builder introspect "$work/installed" >"$work/needs.yml"
for need in kubernetes gcc make glibc-devel openssh-clients; do
    if ! grep -q "$need" "$work/needs.yml"; then
        echo "execution environment: $need: expected in the requirements of the collection, found in none; add it to meta/execution-environment.yml" >&2
        exit 1
    fi
done
# Tests the installed collection from a separate project, as AWX uses it. Every playbook must parse under its name in
# the collection. The installed roles and plugins must find a mistake in a variable before they connect to a host.
mkdir "$work/project"
cd "$work/project"
printf '[gpu_nodes]\ngpu-1\n' >hosts
export ANSIBLE_COLLECTIONS_PATH="$work/installed"
for playbook in "$root"/playbooks/*.yml; do
    name=$(basename "$playbook" .yml)
    printf -- '---\n- name: %s\n  ansible.builtin.import_playbook: vgpu.fleet.%s\n' "$name" "$name" >"$name.yml"
    ansible-playbook "$name.yml" -i hosts --syntax-check >/dev/null
done
if ansible-playbook site.yml -i hosts -e vgpu_split_counts=3 >"$work/mistake.log" 2>&1 ||
    ! grep -q 'did you mean .*vgpu_split_count' "$work/mistake.log"; then
    echo "execution environment: site.yml: expected an error that names vgpu_split_counts; see $work/mistake.log" >&2
    exit 1
fi
echo "execution environment: $work/context (no image was built)"
