# SPDX-License-Identifier: Apache-2.0
"""Tests that the documentation pages name only things that exist: commands, options, playbooks, variables, make
targets, systemd units, files and links.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted(
    {
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("roles/*/README.md"),
        *(ROOT / one for one in ("inventories/README.md", "playbooks/README.md", "native/plugin/README.md")),
        *(ROOT / one for one in ("tests/gpu/README.md", "tests/gpu/workloads/README.md") if (ROOT / one).exists()),
    }
)
# In a page, a path that starts with one of these folders must exist, either below the repository's root or below the
# folder of the page.
FOLDERS = ("changelogs", "docs", "inventories", "molecule", "native", "playbooks", "plugins", "requirements", "roles")
FOLDERS += ("tests", "tools")
# The tags of site.yml, which are the valid values of --tags.
TAGS = set(re.findall(r"^ +tags: \[(\w+)\]$", (ROOT / "playbooks/tasks/roles.yml").read_text(), re.MULTILINE)) | {
    "verify"
}
# These paths are created by a user or by a build, so they need not exist in the repository.
MADE = ("native/build", "tests/output", "inventories/yours", "inventories/ours")
FORMER_NAMES = "\n## From 0.1.0, a checkout\n"
PLACEHOLDER = re.compile(r"[<>*{}…$]|\bX\b|%")

spec = importlib.util.spec_from_file_location("vgpu_variables_tool", ROOT / "tools" / "variables.py")
assert spec and spec.loader
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)


def read(path: str) -> str:
    return (ROOT / path).read_text()


def known_variables() -> set[str]:
    from ansible_collections.vgpu.fleet.plugins.module_utils.config import variables as schema

    found = set(schema.VARIABLES)
    for role in tables.roles(ROOT):
        found |= set(tables.options_of(ROOT, role)) | set(tables.defaults_of(ROOT, role))
        # Tasks also create variables, which they register or set for other roles.
        for file in (ROOT / "roles" / role / "tasks").glob("*.yml"):
            found |= set(re.findall(r"^\s+(?:register: )?([a-z]\w+)(?::|$)", file.read_text(), re.M))
    for playbook in ROOT.glob("playbooks/*.yml"):
        found |= set(re.findall(r"\{\{ ?([a-z_]+) \| default", playbook.read_text()))
    return found


def known_words() -> set[str]:
    """Returns names that look like variables of a role but are something else: modules, packages, metrics, programs of
    tests."""
    found = {path.stem for path in ROOT.glob("plugins/*/*.py")} | {path.stem for path in ROOT.glob("plugins/filter/*")}
    found |= set(re.findall(r'"(vgpu_\w+)": \("', read("native/plugin/src/vgpu_plugin/admin/metrics.py")))
    found |= set(re.findall(r'"(vgpu_\w+)": \("', read("native/plugin/src/vgpu_scheduler/metrics.py")))
    found |= {path.name for path in (ROOT / "native/plugin/src").iterdir()} | {path.stem for path in ROOT.rglob("*.h")}
    found |= set(re.findall(r"\b(vgpu_\w+)\(", read("tests/gpu/programs/kernels.h")))
    found |= {"vgpu_fleet", "vgpu_spin", "mig_parted"}
    return found


PREFIXES = tuple(f"{one}_" for one in ("vgpu", *tables.roles(ROOT)))
VARIABLES = known_variables()
# vgpu_to_change is a group of hosts, not a variable. The plan adds the hosts with changes to it.
WORDS = known_words() | {"vgpu_to_change"}
TARGETS = {word for line in re.findall(r"^([a-z][a-z0-9 -]*):(?!=)", read("Makefile"), re.M) for word in line.split()}
CTL = read("native/plugin/src/vgpu_plugin/ctl/arguments.py")
COMMANDS = set(re.findall(r'^    "([a-z-]+)": \(', CTL, re.M))
CTL_OPTIONS = set(re.findall(r'"(--[a-z-]+)"', CTL)) | {"--help", "--version"}
PLUGIN_OPTIONS = {"--help"}
for source in ("main", "logs"):
    PLUGIN_OPTIONS |= set(re.findall(r'"(--[a-z-]+)"', read(f"native/plugin/src/vgpu_plugin/{source}.py")))
PLUGIN_OPTIONS |= {
    "--" + one for one in re.findall(r'Option\(\s*"([a-z-]+)"', read("native/plugin/src/vgpu_plugin/offer/options.py"))
}
UNITS = set(
    re.findall(
        r"\bvgpu-[a-z-]+(?=\.service)",
        "".join(
            path.read_text()
            for folder in ("roles", "plugins/module_utils")
            for path in (ROOT / folder).rglob("*.*")
            if path.suffix in (".py", ".yml")
        ),
    )
)


def code_of(text: str) -> list[str]:
    """Returns the code in a page: the lines of code blocks, and each text between backticks."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.M | re.S)
    rest = re.sub(r"^```[^\n]*\n.*?^```", "", text, flags=re.M | re.S)
    indented = re.findall(r"(?:^|\n\n)((?:    [^\n]*\n)+)", rest)
    lines = [line for block in [*blocks, *indented] for line in block.splitlines()]
    return lines + re.findall(r"`([^`\n]+)`", rest)


def findings(text: str, folder: Path = ROOT) -> list[str]:
    """Returns a fault for each name in a page that does not exist."""
    found = []
    for code in code_of(text):
        # This expression finds vgpuctl only at the start of a command, because in a sentence or a help text no command
        # follows it.
        for rest in re.findall(r"(?:^\s*|[|;&(] *|exec -it \S+ |\$ |sudo )vgpuctl ([^|;#)]*)", code):
            words = rest.partition(" -- ")[0].split()
            command = next((word for word in words if not word.startswith("-")), "")
            if command.strip("…,.") and command not in COMMANDS and not PLACEHOLDER.search(command):
                found.append(f"vgpuctl {command}: there are {', '.join(sorted(COMMANDS))}")
            found += [
                f"vgpuctl {word}: no such option"
                for word in words
                if word[:2] == "--" and word not in CTL_OPTIONS and word != "--"
            ]
        if not re.match(r"\s*#", code):
            for target in re.findall(
                r"(?:^\s*|[|;&] *|\$ )make ((?:[a-z][a-z0-9-]*(?: |$))+)", code.partition(" #")[0]
            ):
                found += [f"make {one}: no such target" for one in target.split() if one not in TARGETS]
        for one in re.findall(
            r"(--[a-z][a-z-]+)", code if "device_plugin_options" in code or "vgpu-device-plugin --" in code else ""
        ):
            if one not in PLUGIN_OPTIONS:
                found.append(f"{one}: no option of vgpu-device-plugin")
        found += [
            f"{one}.service: no role installs this unit"
            for one in re.findall(r"\b(vgpu-[a-z-]+)\.service", code)
            if one not in UNITS
        ]
        found += [
            f"unit {one}: no role installs this unit"
            for one in re.findall(r"(?:systemctl [a-z-]+|journalctl (?:\S+ )*?-u) (vgpu-[a-z-]+)", code)
            if one not in UNITS
        ]
        for tags in re.findall(r"ansible-playbook .*(?:--tags|--skip-tags|-t)[ =]([\w,]+)", code):
            found += [f"--tags {one}: no tag of site.yml" for one in tags.split(",") if one not in TAGS]
        for one in re.findall(r"(?<![\w/.-])[a-z]\w+\b", code):
            if one.startswith(PREFIXES) and not one.endswith("_") and one not in VARIABLES | WORDS:
                found.append(f"{one}: neither a variable nor a module, package or metric")
        for one in re.findall(rf"(?<![\w/.:-])((?:\.\./)*(?:{'|'.join(FOLDERS)})/[\w./+-]*)", code):
            one = one.rstrip(".,:")
            if not one.startswith(MADE) and not PLACEHOLDER.search(code) and not exists(one, folder):
                found.append(f"{one}: no such file")
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
        if "://" in link:
            continue
        if link and not exists(link, folder):
            found.append(f"link {link}: no such file")
        elif anchor and anchor not in anchors(text if not link else (folder / link).read_text()):
            found.append(f"link {link}#{anchor}: no such heading")
    return found


def anchors(text: str) -> set[str]:
    """Returns the anchors that GitHub creates for the headings of a page."""
    headings = re.findall(r"^#+ +(.+?) *$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


def exists(path: str, folder: Path) -> bool:
    return (ROOT / path).exists() or (folder / path).exists()


@pytest.mark.parametrize("page", [str(path.relative_to(ROOT)) for path in PAGES])
def test_page_names_only_existing_things(page: str) -> None:
    # The last section of the migration page is left out, because it lists names that no longer exist.
    # test_every_variable.py checks it.
    text = read(page).split(FORMER_NAMES)[0]
    assert findings(text, (ROOT / page).parent) == []


def test_former_names_are_the_last_section_of_one_page() -> None:
    assert [page for page in PAGES if FORMER_NAMES in page.read_text()] == [ROOT / "docs/migration.md"]
    assert "\n## " not in read("docs/migration.md").split(FORMER_NAMES)[1]


# columns: text of a page with a name that does not exist; expected words of the fault
@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("`vgpuctl frobnicate`", "vgpuctl frobnicate"),
        ("```\nvgpuctl status --yaml\n```", "--yaml"),
        ("    kubectl get x | vgpuctl convrt -\n", "vgpuctl convrt"),
        ("`make fleet`", "make fleet"),
        ("    make demo tset\n", "make tset"),
        ("`ansible-playbook playbooks/sight.yml`", "playbooks/sight.yml"),
        ("`vgpu_memory_scalling`", "vgpu_memory_scalling"),
        ("`upgrade_kubeconf`", "upgrade_kubeconf"),
        ("```yaml\nverify_stict: false\n```", "verify_stict"),
        ("`systemctl restart vgpu-plugin`", "unit vgpu-plugin"),
        ("`vgpu-migs.service`", "vgpu-migs.service"),
        ("`device_plugin_options: [--metric-listen=:9410]`", "--metric-listen"),
        ("`ansible-playbook playbooks/site.yml --tags driver`", "--tags"),
        ("[there](nowhere.md)", "link nowhere.md"),
        ("[there](#nowhere)", "link #nowhere"),
        ("[there](README.md#nowhere)", "link README.md#nowhere"),
        ("`plugins/module_utils/slice.py`", "plugins/module_utils/slice.py"),
    ],
)
def test_missing_names_are_found(text: str, fault: str) -> None:
    assert any(fault in one for one in findings(text + "\n"))


# texts of pages in which every name exists
@pytest.mark.parametrize(
    "text",
    [
        "`vgpuctl exec --ttl 60 -- nvidia-smi --list-gpus`",
        "`make demo` makes three hosts, and I make nothing else",
        "`vgpu_plugin_registered`, `vgpu_isolation`, `site_hosts`",
        "`roles/<role>/README.md`, `native/build/libvgpu.so`",
        "`systemctl restart vgpu-device-plugin`; `journalctl -n 20 -u vgpu-arbiter`",
        "[the plugin](native/plugin/README.md#health)",
        "# A name, with `code`\n\n[above](#a-name-with-code)",
    ],
)
def test_existing_names_are_not_reported(text: str) -> None:
    assert findings(text + "\n") == []


# text that the pages for operators quote → source file that contains this text
FOR_OPERATORS = ("docs/operations.md", "docs/upgrade.md")
PLUGIN = "native/plugin/src/vgpu_plugin"
RULES = "plugins/module_utils"
SEEN = {
    "keeps its old slices until the last one in use is free": f"{PLUGIN}/reconcile/reconfigure.py",
    "the configuration was not applied, the one before stays: ": f"{PLUGIN}/reconcile/reconfigure.py",
    "does not exist: the plugin does not run, or waits for the driver": f"{PLUGIN}/admin/admin_socket.py",
    " is lost: ": f"{PLUGIN}/reconcile/reconfigure.py",
    "has files that were removed from the node": f"{PLUGIN}/watch/watcher.py",
    "was deleted or replaced; it is created again": f"{PLUGIN}/admin/admin_socket.py",
    "are held by processes of no allocation": f"{PLUGIN}/watch/setup.py",
    " is full (": f"{PLUGIN}/allocation/repair.py",
    "not registered: ": f"{PLUGIN}/ctl/text.py",
    "a container outside Kubernetes": f"{PLUGIN}/ctl/text.py",
    "polls in a row": f"{PLUGIN}/ctl/text.py",
    "`VgpuWatch`": "native/plugin/README.md",
    "VgpuConfiguration": f"{PLUGIN}/reconcile/node_label.py",
    "[disturbs running work]": f"{RULES}/plan/plan.py",
    "nothing to do": f"{RULES}/plan/plan.py",
    "the GPUs have another geometry": f"{RULES}/plan/modes.py",
    "reload the kernel modules": f"{RULES}/plan/driver.py",
    "reboot, for ": f"{RULES}/plan/driver.py",
    "device plugin (no kubelet here)": f"{RULES}/capacity/tables.py",
    " advertised by the ": f"{RULES}/capacity/tables.py",
    "a container that runs with ": f"{RULES}/plan/toolkit.py",
    "It was not upgraded: ": "roles/upgrade/tasks/judge.yml",
    "the host is back at library ": "roles/upgrade/tasks/return.yml",
    " are over the limit of ": "native/vcuda/src/account/charge.c",
}


@pytest.mark.parametrize("words", sorted(SEEN))
def test_quotes_in_operators_pages_match_the_source(words: str) -> None:
    assert any(words in read(page) for page in FOR_OPERATORS), "the pages no longer quote this text: remove its row"
    assert words in read(SEEN[words]), f"{SEEN[words]} no longer prints this text: correct the page"


def test_operations_say_how_long_a_killed_check_holds_a_slice() -> None:
    from ansible_collections.vgpu.fleet.plugins.modules import vgpu_isolation

    options = yaml.safe_load(vgpu_isolation.DOCUMENTATION)["options"]
    minutes = (vgpu_isolation.MOST_RUNS * options["timeout"]["default"] + 60) // 60
    assert f"that of a killed check after {minutes} minutes" in read("docs/operations.md")
