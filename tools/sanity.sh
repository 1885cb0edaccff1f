#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs ansible-test sanity on a copy of the working tree. ansible-test needs a real path that ends in
# ansible_collections/vgpu/fleet and a git repository that lists the files. It installs the requirements of its tests from
# PyPI into its own environments.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
copy=$root/.build/sanity/ansible_collections/vgpu/fleet
python=$("$root/.build/venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')

"$root/tools/export.sh" "$copy"
git -C "$copy" init -q -b main
git -C "$copy" add -A

# Without containers ansible-test downloads a pip bootstrap from a server of Ansible, which an air-gapped or filtered
# machine cannot reach. The scripts made here install the same pip from PyPI, under the names that ansible-test expects
# in its cache.
export HOME="$root/.build/sanity/home"
cache="$HOME/.ansible/test/cache"
mkdir -p "$cache"
for pip in $("$root/.build/venv/bin/python" - <<'EOF'
import pathlib, re, ansible_test
source = pathlib.Path(ansible_test.__file__).parent / "_internal" / "python_requirements.py"
print(*sorted(set(re.findall(r"'(\d+\.\d+(?:\.\d+)?)'", source.read_text()))))
EOF
); do
    cat >"$cache/get_pip_$(printf %s "$pip" | tr . _).py" <<EOF
import ensurepip, subprocess, sys
ensurepip.bootstrap(upgrade=True)
subprocess.check_call([sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "pip==$pip"])
EOF
done

cd "$copy"
output="$root/.build/sanity/output"
status=0
"$root/.build/venv/bin/ansible-test" sanity --python "$python" --color no "$@" >"$output" 2>&1 || status=$?
cat "$output"
# The gate prints only the last lines of a failure, and a test that fails early is followed by hundreds of lines of pip.
[ "$status" = 0 ] || grep '^ERROR' "$output" || true
exit "$status"
