#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs ansible-test sanity on a copy of the working tree: it wants a real path that ends in ansible_collections/vgpu/fleet,
# and a git repository to list files from. The requirements of its tests come from PyPI into environments of its own.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
copy=$root/.build/sanity/ansible_collections/vgpu/fleet
python=$("$root/.build/venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')

"$root/tools/export.sh" "$copy"
git -C "$copy" init -q -b main
git -C "$copy" add -A

# Without containers ansible-test starts its environments with a pip bootstrap from a server of Ansible's own, which an
# air-gapped or filtered machine cannot reach; pip itself comes from PyPI just as well. The name is the one it looks for.
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
exec "$root/.build/venv/bin/ansible-test" sanity --python "$python" --color no "$@"
