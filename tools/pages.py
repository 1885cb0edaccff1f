# SPDX-License-Identifier: Apache-2.0
"""Check the documentation of modules, plugins and roles, and build a page for each: ``make docs``.

``antsibull-docs`` checks a copy of the working tree, and Sphinx builds HTML with every warning as an error. Both run
without a network: the table below resolves references to Ansible's own pages. The script also plants two faults, which
the checks must find. So a check that by mistake reads nothing fails. The result is .build/docs/html/index.html.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".build" / "docs"
TREE = WORK / "tree" / "ansible_collections" / "vgpu" / "fleet"
# antsibull-docs and Sphinx are in the same environment, .build/docs-env, as the Python that runs this script.
BIN = Path(sys.executable).parent

ANSIBLE_PAGES = "https://docs.ansible.com/ansible/latest/"
# Labels of Ansible's documentation that generated pages refer to. A missing label gives a warning and thus an error.
LABELS = {
    "action_plugins": ("plugins/action.html#action-plugins", "Action plugins"),
    "ansible_configuration_settings": (
        "reference_appendices/config.html#ansible-configuration-settings",
        "Ansible configuration settings",
    ),
    "common_return_values": (
        "reference_appendices/common_return_values.html#common-return-values",
        "Return values",
    ),
    "ansible_collections.ansible.builtin.debug_module": (
        "collections/ansible/builtin/debug_module.html",
        "ansible.builtin.debug",
    ),
}

CONF = """\
project = "vgpu.fleet"
title = html_short_title = "vgpu.fleet"
extensions = ["sphinx.ext.intersphinx", "sphinx_antsibull_ext"]
pygments_style = "ansible"
highlight_language = "YAML+Jinja"
html_theme = "sphinx_ansible_theme"
html_show_sphinx = False
html_show_copyright = False
html_use_index = False
html_copy_source = False
intersphinx_mapping = {{"ansible": ("{pages}", "{inventory}")}}
default_role = "any"
nitpicky = True
"""

# Maps each check to the planted fault that it must find: the file, a text in this file, and the replacement of the
# text.
PLANTED = {
    "lint": ("plugins/modules/gpu_info.py", "description:\n  - ", "description:\n  - See M(vgpu.fleet.nothing). "),
    "build": ("roles/teardown/meta/argument_specs.yml", "    description:\n", "    no_description:\n"),
}


class Fault(Exception):
    """Raised if a check fails; the text is a sentence for the user."""


def run(*command: str | Path, cwd: Path = WORK) -> subprocess.CompletedProcess[str]:
    """Runs a program of this environment without the Ansible configuration of the checkout."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    env.update(
        PATH=f"{BIN}{os.pathsep}{env['PATH']}",
        ANSIBLE_COLLECTIONS_PATH=str(WORK / "tree"),
        LC_ALL="C.UTF-8",
    )
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def copy_tree() -> None:
    """Copies the working tree to a git repository in .build, because antsibull-docs gets the list of the collection's
    files from git.
    """
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    for command in (
        [ROOT / "tools/export.sh", TREE],
        ["git", "-C", TREE, "init", "-q"],
        ["git", "-C", TREE, "add", "-A"],
    ):
        done = run(*command)
        if done.returncode:
            raise Fault(f"{command[0]}: exit status {done.returncode}: {done.stdout.strip()}")


def lint() -> str:
    """Returns the faults that antsibull-docs reports on the collection; empty if there are none."""
    done = run(
        "antsibull-docs",
        "lint-collection-docs",
        "--plugin-docs",
        "--validate-collection-refs=all",
        "--disallow-unknown-collection-refs",
        TREE,
    )
    return done.stdout.strip() or (f"exit status {done.returncode}" if done.returncode else "")


def build() -> str:
    """Builds the pages in .build/docs/html, and returns the faults; empty if there are none."""
    site, rst = WORK / "site", WORK / "site" / "rst"
    shutil.rmtree(site, ignore_errors=True)
    rst.mkdir(parents=True, mode=0o755)
    done = run("antsibull-docs", "collection", "--use-current", "--squash-hierarchy", f"--dest-dir={rst}", "vgpu.fleet")
    # Any output is a fault: antsibull-docs returns 0 even if it cannot make a page and writes a page with an error
    # message instead.
    said = done.stdout.strip()
    if done.returncode or said:
        return said or f"antsibull-docs: exit status {done.returncode}"
    inventory = site / "ansible.inv"
    inventory.write_bytes(inventory_bytes())
    (site / "conf.py").write_text(CONF.format(pages=ANSIBLE_PAGES, inventory=inventory))
    done = run("sphinx-build", "-q", "-W", "--keep-going", "-b", "html", "-c", site, rst, WORK / "html")
    if done.returncode:
        return done.stdout.strip() or f"sphinx-build: exit status {done.returncode}"
    missing = [page for page in pages_wanted(TREE) if not (WORK / "html" / page).exists()]
    return f"these pages were not built: {', '.join(missing)}" if missing else ""


def pages_wanted(tree: Path) -> list[str]:
    """Returns the names of the expected pages: one for each module, filter, lookup and role."""
    found = [f"{path.stem}_module.html" for path in tree.glob("plugins/modules/*.py")]
    found += [f"{path.parent.parent.name}_role.html" for path in tree.glob("roles/*/meta/argument_specs.yml")]
    found += [f"{path.stem}_lookup.html" for path in tree.glob("plugins/lookup/*.py")]
    found += [f"{path.stem}_filter.html" for path in tree.glob("plugins/filter/*.yml")]
    return sorted(found)


def inventory_bytes() -> bytes:
    """Returns ``LABELS`` as a Sphinx inventory of version 2."""
    lines = "".join(f"{name} std:label -1 {place} {title}\n" for name, (place, title) in sorted(LABELS.items()))
    head = "# Sphinx inventory version 2\n# Project: ansible\n# Version: \n"
    return (head + "# The remainder of this file is compressed using zlib.\n").encode() + zlib.compress(lines.encode())


def planted(name: str) -> None:
    """Plants a fault and runs the check ``name``. Raises Fault if the check does not find it."""
    file, old, new = PLANTED[name]
    path = TREE / file
    text = path.read_text()
    if old not in text:
        raise Fault(f"{file}: expected {old!r} to plant a fault at, found none; choose another place in tools/pages.py")
    path.write_text(text.replace(old, new, 1))
    try:
        said = {"lint": lint, "build": build}[name]()
    finally:
        path.write_text(text)
    if not said:
        raise Fault(f"{name}: expected an error for the fault planted in {file}, found none")


def main() -> int:
    try:
        copy_tree()
        for name in PLANTED:
            planted(name)
        for name, judge in (("antsibull-docs lint-collection-docs", lint), ("build", build)):
            said = judge()
            if said:
                raise Fault(f"{name}: " + re.sub(re.escape(f"{TREE}/"), "", said))
    except Fault as fault:
        print(f"pages: {fault}", file=sys.stderr)
        return 1
    print(f"pages: {len(pages_wanted(TREE))} pages, {(WORK / 'html' / 'index.html').relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
