# SPDX-License-Identifier: Apache-2.0
"""Tests the check of the variables before a run. Every variable of the collection is checked three times: with a wrong
value, with a typing error in its name, and with a right value.

The rows follow from the argument specifications and the table of ``vgpu_*`` variables, so a new variable has rows.
The wrong values follow from the documented type, not from the code that reads the variable.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible_collections.vgpu.fleet.plugins.module_utils.config import variables as schema
from ansible_collections.vgpu.fleet.plugins.module_utils.config.options import INTERNAL, RENAMED
from ansible_collections.vgpu.fleet.plugins.plugin_utils import rehearsal
from ansible_collections.vgpu.fleet.plugins.plugin_utils.variable_check import Check, Mistake

ROOT = Path(__file__).resolve().parents[4]
SPECS = sorted(ROOT.glob("roles/*/meta/argument_specs.yml"))


def options() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for path in SPECS:
        for entry in yaml.safe_load(path.read_text())["argument_specs"].values():
            found.update(entry.get("options") or {})
    return found


OPTIONS = options()
NAMES = sorted([*OPTIONS, *schema.VARIABLES])


# Shared by all tests, so that each file of the collection is read only once.
LOADER = DataLoader()


class HostVars:
    """Replaces Ansible's hostvars with the part that the tested code uses."""

    _inventory = None

    def __init__(self, hosts: dict[str, dict[str, Any]]) -> None:
        self.hosts = hosts

    def raw_get(self, host: str) -> dict[str, Any]:
        return dict(self.hosts[host])


def check(hosts: dict[str, dict[str, Any]]) -> list[Mistake]:
    first = next(iter(hosts))
    here = {**hosts[first], "hostvars": HostVars(hosts), "inventory_hostname": first}
    one = Check(here, LOADER, None)
    return one.mistakes(one.kin(list(hosts)))


def wrong_value(option: dict[str, Any]) -> Any:
    if option.get("choices") and option["type"] != "list":
        return "no-such-choice"
    return {"bool": "perhaps", "int": "many", "list": "no list", "dict": "no mapping"}.get(
        option["type"], {"no": "text"}
    )


@pytest.mark.parametrize("name", NAMES)
def test_wrong_value_is_one_error_that_names_the_variable(name: str) -> None:
    value = wrong_value(OPTIONS[name]) if name in OPTIONS else {"no": {"such": "value"}}
    found = check({"h": {name: value}})
    mappings = ("resource_names", "mig_geometry", "mig_replicas", "configs", "package_environment")
    if name in [f"vgpu_{one}" for one in mappings]:
        # The wrong value is a mapping, as these variables expect, so the error names one of its keys.
        assert found
        assert all(one.finding.path.startswith(name + ".") for one in found)
        return
    assert [one.finding.path for one in found] == [name]
    assert found[0].finding.level == "error"
    assert found[0].finding.message.startswith("expected "), found


def typing_errors(name: str) -> list[str]:
    middle = len(name) // 2
    while name[middle] == name[middle + 1]:
        middle += 1
    swapped = name[:middle] + name[middle + 1] + name[middle] + name[middle + 2 :]
    return [
        name[:middle] + name[middle + 1 :],
        name[:middle] + name[middle] + name[middle:],
        name[:middle] + "x" + name[middle + 1 :],
        swapped,
        name + "s",
        # A name such as vcuda_root must not lose its v: names that start with cuda_ or gpu_ may belong to other
        # collections and are not checked. Leave out its second letter instead.
        name[1:] if not name.startswith(("vcuda_", "vgpu_")) else name[0] + name[2:],
    ]


@pytest.mark.parametrize("name", NAMES)
def test_typing_error_is_one_error_that_names_the_variable(name: str) -> None:
    for mistyped in set(typing_errors(name)) - set(NAMES):
        found = check({"h": {mistyped: 1}})
        assert [(one.finding.level, one.finding.path) for one in found] == [("error", mistyped)]
        meant = [one for one in NAMES if f'did you mean "{one}"?' in found[0].finding.message]
        assert meant == [name] or abs(len(meant[0]) - len(mistyped)) <= 1, found


@pytest.mark.parametrize("name", sorted(name for name, option in OPTIONS.items() if "default" in option))
def test_documented_default_is_accepted(name: str) -> None:
    assert check({"h": {name: OPTIONS[name]["default"]}}) == []


def test_variables_of_a_rehearsal_are_valid() -> None:
    """A rehearsal runs the playbooks on simulated hosts and replaces some variables."""
    own = ("ansible_", "verify_isolation_image")
    replaced = rehearsal.replaced("rehearse", "h", "/cache")
    assert check({"h": {name: value for name, value in replaced.items() if not name.startswith(own)}}) == []


@pytest.mark.parametrize("name", ["vgpu-split-count", "nvidia-driver-branch"])
def test_name_with_hyphens_is_one_error_that_names_the_variable(name: str) -> None:
    found = check({"h": {name: 1}})
    assert [(one.finding.level, one.finding.path) for one in found] == [("error", name)]
    assert f'did you mean "{name.replace("-", "_")}"?' in found[0].finding.message


@pytest.mark.parametrize(("old", "new"), sorted(RENAMED.items()))
def test_old_name_is_one_error_that_names_the_new_name(old: str, new: str) -> None:
    assert old not in NAMES and new in NAMES
    found = check({"h": {old: 1}})
    assert [(one.finding.level, one.finding.path) for one in found] == [("error", old)]
    assert f'set "{new}" in its place' in found[0].finding.message


@pytest.mark.parametrize("old", INTERNAL)
def test_removed_name_is_one_error_that_asks_to_remove_it(old: str) -> None:
    assert old not in NAMES
    found = check({"h": {old: "x"}})
    assert [(one.finding.level, one.finding.path) for one in found] == [("error", old)]
    assert "remove it, because its role decides the value" in found[0].finding.message


def test_migration_page_has_every_old_name() -> None:
    text = (ROOT / "docs" / "migration.md").read_text()
    assert [old for old, new in RENAMED.items() if not (f"`{old}`" in text and f"`{new}`" in text)] == []
    assert [old for old in INTERNAL if f"`{old}`" not in text] == []


# columns: variable, its wrong value; expected words of the error
MORE = [
    ("vcuda_root", "relative/path", "expected an absolute path"),
    ("vcuda_root", "", "expected an absolute path"),
    ("vcuda_root", None, "found None"),
    ("nvidia_driver_branch", "580-open", "expected a number such as 580"),
    ("nvidia_driver_version", 535.1, "put it in quotes"),
    ("nvidia_driver_version", True, "expected a text"),
    ("nvidia_driver_prebuilt", "always", "expected one of auto or true or false"),
    ("nvidia_driver_packages", "cuda-drivers", "expected a list"),
    ("nvidia_driver_packages", [["a"]], "expected a text"),
    ("nvidia_driver_reboot_timeout", -1, "from 0 to"),
    ("nvidia_driver_source", "cudaa", 'did you mean "cuda"?'),
    ("teardown_roles", ["vcuda", "mgi"], 'found "mgi"; did you mean "mig"?'),
    ("nvidia_docker_repository", {"uri": []}, 'unknown key "uri"; did you mean "uris"?'),
    ("nvidia_docker_repository", {"rpm_key": "x"}, 'unknown key "rpm_key"; did you mean "key"?'),
    ("nvidia_driver_repository", {"url": "x"}, 'unknown key "url"'),
    ("container_runtime_repository", {"baseurls": "x"}, 'unknown key "baseurls"; did you mean "baseurl"?'),
    ("scheduler_default_cores", 101, "from 0 to 100"),
    ("container_runtime_shm_size", "two", "expected a size such as 2G"),
    ("vcuda_archive_checksum", "abc", "64 hexadecimal digits"),
    ("device_plugin_environment", ["a=b"], "expected a mapping"),
    ("upgrade_serial", [1, "half"], "expected a number of hosts"),
    ("vgpu_other_names", "mine", "expected a list"),
    # errors that follow from two variables together
    ("device_plugin_deploy", "daemonset", "device_plugin_api_kubeconfig is empty"),
    ("device_plugin_conflicting_plugins_remove", ["DaemonSet a/b"], "device_plugin_api_kubeconfig is empty"),
    ("vcuda_archive", "/tmp/x.tar", "vcuda_archive_checksum is empty"),
    ("nvidia_driver_source", "mirror", "is mirror and nvidia_driver_repository is empty"),
    ("nvidia_driver_vgpu_license_server", "licences:74700", "expected name:port"),
    ("nvidia_driver_vgpu_guest", True, "set nvidia_driver_source to mirror or file"),
    ("nvidia_driver_version", "384.80", "too old"),
    ("vgpu_sharing", "mig", "name a profile"),
]


@pytest.mark.parametrize(("name", "value", "words"), MORE)
def test_errors_beyond_the_argument_specs_are_found(name: str, value: Any, words: str) -> None:
    found = check({"h": {name: value}})
    assert found
    assert words in str(found[0])
    assert {one.finding.level for one in found} == {"error"}


RIGHT = [
    {"nvidia_driver_branch": 580},
    {"nvidia_driver_branch": "580", "nvidia_driver_version": "580.*"},
    {"nvidia_driver_prebuilt": False},
    {"nvidia_driver_prebuilt": "auto"},
    {"nvidia_driver_hold": "yes"},  # -e gives strings
    {"nvidia_driver_vgpu_guest": "false"},
    {"verify_timeout": "60"},
    {"upgrade_serial": [1, "25%"]},
    {"upgrade_serial": 3},
    {"scheduler_kubeconfig": "~/.kube/config"},
    {"device_plugin_deploy": "daemonset", "device_plugin_api_kubeconfig": "/k"},
    {"device_plugin_deploy": "daemonset", "vgpu_kubeconfig": "/k"},
    {"device_plugin_deploy": "daemonset", "device_plugin_state": "absent"},
    {"nvidia_driver_source": "mirror", "nvidia_driver_repository": {"uris": ["http://m"]}},
    # These values need facts that are not read yet, so the role that uses the value checks it.
    {"nvidia_driver_branch": "{{ ansible_facts.branch }}"},
    {"vgpu_split_count": "{{ ansible_processor_count }}"},
    {"vgpu_split_count": "{{ hostvars['h'].ansible_facts.count }}"},
    {"slices": "{{ ansible_facts['x'] }}", "vgpu_split_count": "{{ slices }}"},
    {"slices": 4, "vgpu_split_count": "{{ slices }}"},
    {"device_plugin_image": "registry.example/plugin:{{ device_plugin_version }}", "device_plugin_version": "1"},
    # variables of other collections with similar names
    {
        "report_email": "a@b",
        "verify_ssl": True,
        "scheduler_address": "x",
        "upgrade_window": "night",
        "mig_enabled": True,
    },
    {"cuda_version": "12.4", "gpu_devices": [0], "gpu_sharing": "none"},
    {"upgrade_nodes": [], "vgpu_mine": 1, "vgpu_other_names": ["upgrade_nodes", "vgpu_mine"]},
    {"ansible_user": "x", "docker_vgpu_x": 1, "__vgpu_split": 1},
]


@pytest.mark.parametrize("variables", RIGHT)
def test_valid_values_are_accepted(variables: dict[str, Any]) -> None:
    assert check({"h": trusted(variables)}) == []


# columns: variables, of which one has a template that fails; expected words of the error
@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"vgpu_split_count": "{{ no_such_variable }}"}, "its template cannot be evaluated"),
        ({"slices": 0, "vgpu_split_count": "{{ slices }}"}, "expected a whole number from 1"),
        ({"device_plugin_options": ["{{ 1 / 0 }}"]}, "its template cannot be evaluated"),
        ({"verify_timeout": "{{ 'x' | no_such_filter }}"}, "its template cannot be evaluated"),
        ({"mig_python": "{{ 'crio' | vgpu.fleet.runtime_drop_in }}"}, "its template cannot be evaluated"),
        ({"verify_timeout": "{{ lookup('pipe', 'x') ~ no_such_variable }}"}, "its template cannot be evaluated"),
    ],
)
def test_wrong_template_is_an_error_that_names_its_variable(variables: dict[str, Any], words: str) -> None:
    found = check({"h": trusted(variables)})
    assert [one.finding.path for one in found] == [next(name for name in variables if "_" in name)]
    assert words in str(found[0])


def trusted(variables: dict[str, Any]) -> dict[str, Any]:
    """Sets the values as an inventory would."""
    return DataLoader().load(as_yaml(variables))


def as_yaml(variables: dict[str, Any]) -> Any:
    text = yaml.safe_dump(variables)
    try:
        from ansible.template import trust_as_template
    except ImportError:
        return text
    return trust_as_template(text)


def test_error_of_many_hosts_is_one_line_with_their_number() -> None:
    hosts = {f"gpu-{n}": {"nvidia_driver_source": "cudaa", "rack": n} for n in range(5)}
    hosts["other"] = {"nvidia_driver_source": "cuda"}
    found = check(hosts)
    assert len(found) == 1
    assert "5 hosts (gpu-0, gpu-1, gpu-2, …)" in str(found[0])


# columns: the value of a variable on 50 hosts; expected number of checks
@pytest.mark.parametrize(
    ("value", "kinds"),
    [
        (3, 1),
        ("{{ shared }}", 1),
        ("{{ rack }}", 50),
        ("{{ größe }}", 50),
        ("{{ inventory_hostname | length }}", 50),
        # The text does not name the variables that these templates read.
        ("{{ lookup('template', 'slices.j2') }}", 50),
        ("{{ lookup('ansible.builtin.vars', 'ra' ~ 'ck') }}", 50),
        ("{{ query('some.other.lookup') | first }}", 50),
        ("{{ lookup(shared) }}", 50),
        ("{% include 'slices.j2' %}", 50),
        # These lookups read no variables of a host.
        ("{{ lookup('file', '/etc/slices') }}", 1),
        ("{{ query(\"ansible.builtin.env\", 'SLICES') | first }}", 1),
        ("{{ lookup('ansible.builtin.file', '/etc/' ~ rack) }}", 50),
        ("{{ lookup('file', '/x') ~ lookup('template', 'x') }}", 50),
    ],
)
def test_alike_hosts_are_checked_once(value: Any, kinds: int) -> None:
    """Hosts share one check unless a relevant variable differs."""
    hosts = {
        f"h{n}": trusted({"vgpu_split_count": value, "shared": 4, "rack": n, "größe": n, "inventory_hostname": f"h{n}"})
        for n in range(50)
    }
    here = {**hosts["h0"], "hostvars": HostVars(hosts), "inventory_hostname": "h0"}
    assert len(Check(here, LOADER, None).kin(list(hosts))) == kinds


@pytest.mark.parametrize("name", ["vgpu_slices", "vgpu_slice", "vgpu_slice_count", "vgpu-slices"])
def test_expected_name_is_one_error_that_names_a_variable_for_its_value(name: str) -> None:
    found = check({"h": {name: 4}})
    assert [(one.finding.level, one.finding.path) for one in found] == [("error", name)]
    assert 'did you mean "vgpu_split_count"?' in found[0].finding.message
    assert check({"h": {"vgpu_split_count": 4}}) == []


# columns: variables of host a, variables of host b; the variable of each expected error, with the hosts. The file
# "there" exists.
KUBECONFIGS: list[tuple[dict[str, Any], dict[str, Any], list[tuple[str, list[str]]]]] = [
    ({"vgpu_kubeconfig": "there"}, {"vgpu_kubeconfig": "there"}, []),
    ({"vgpu_kubeconfig": "none"}, {"vgpu_kubeconfig": "none"}, [("vgpu_kubeconfig", ["a", "b"])]),
    ({"vgpu_kubeconfig": "there"}, {"vgpu_kubeconfig": "none"}, [("vgpu_kubeconfig", ["b"])]),
    ({"scheduler_kubeconfig": "none", "vgpu_kubeconfig": "there"}, {}, [("scheduler_kubeconfig", ["a"])]),
    ({"verify_kubeconfig": "", "vgpu_kubeconfig": "there"}, {}, []),
    # One file is one mistake, of the first variable that names it.
    (
        {"vgpu_kubeconfig": "none", "upgrade_kubeconfig": "{{ vgpu_kubeconfig }}"},
        {},
        [("vgpu_kubeconfig", ["a"])],
    ),
    # The check of types reports this value.
    ({"vgpu_kubeconfig": ["none"]}, {}, []),
    # The file of this name is on the host, not on the controller.
    ({"device_plugin_kubeconfig": "none"}, {}, []),
    # The name of the file depends on a fact that is not known yet.
    ({"vgpu_kubeconfig": "{{ ansible_facts.fqdn }}"}, {}, []),
    ({"vgpu_kubeconfig": "{{ '~/none' }}"}, {}, [("vgpu_kubeconfig", ["a"])]),
]


@pytest.mark.parametrize(("of_a", "of_b", "expected"), KUBECONFIGS)
def test_absent_kubeconfig_file_is_an_error_of_its_variable(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    of_a: dict[str, Any],
    of_b: dict[str, Any],
    expected: list[tuple[str, list[str]]],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "there").write_text("")

    def placed(variables: dict[str, Any]) -> dict[str, Any]:
        return trusted({name: f"~/{one}" if one in ("there", "none") else one for name, one in variables.items()})

    hosts = {"a": placed(of_a), "b": placed(of_b)}
    one = Check({**hosts["a"], "hostvars": HostVars(hosts), "inventory_hostname": "a"}, LOADER, None)
    found = one.absent_kubeconfigs(one.kin(list(hosts)))
    assert [(mistake.finding.path, mistake.hosts) for mistake in found] == expected
    assert [
        mistake for mistake in found if "~/none: no such file here; expected a kubeconfig" not in str(mistake)
    ] == []
