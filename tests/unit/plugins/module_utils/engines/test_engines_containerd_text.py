# SPDX-License-Identifier: Apache-2.0
"""Tests how the NVIDIA runtime is added to the text of containerd's configuration file, on recorded files: a first and
a repeated change, the rollback, and files that are refused. Python's TOML reader, which the tested code does not use,
interprets each result.
"""

from __future__ import annotations

import pytest
import tomllib
import yaml
from ansible_collections.vgpu.fleet.plugins.module_utils.engines import containerd_text
from ansible_collections.vgpu.fleet.plugins.module_utils.engines.containerd_text import ConfigError, Desired

# the file of Debian 12's package
DEBIAN = """\
version = 2

[plugins]
  [plugins."io.containerd.grpc.v1.cri"]
    [plugins."io.containerd.grpc.v1.cri".cni]
      bin_dir = "/usr/lib/cni"
      conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.internal.v1.opt"]
    path = "/var/lib/containerd/opt"
"""
# the file of kubeadm's documentation, with common additions
KUBEADM = """\
# managed by the platform team: ask before you touch
version = 2
disabled_plugins = []
oom_score = -999   # do not kill us first

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "registry.example/pause:3.9" # größe
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc" # the default
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = true
  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = "/etc/containerd/certs.d"
"""
# a file in the format of version 1, which has no version line
ONE = """\
oom_score = 0
[plugins.cri]
  [plugins.cri.containerd]
    [plugins.cri.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins.cri.containerd.runtimes.runc.options]
        SystemdCgroup = false
"""
# a file in the format of version 3 that imports a folder
THREE = """\
version = 3
imports = ["/etc/containerd/conf.d/*.toml"]

[plugins.'io.containerd.cri.v1.runtime']
  enable_cdi = true
  [plugins.'io.containerd.cri.v1.runtime'.containerd]
    default_runtime_name = 'runc'
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
      runtime_type = 'io.containerd.runc.v2'
      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
        SystemdCgroup = true
"""
# a complete template of k3s that does not include the base template
TEMPLATE = """\
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  enable_selinux = {{ .NodeConfig.SELinux }}
{{ if .PrivateRegistryConfig }}
[plugins."io.containerd.grpc.v1.cri".registry]
  config_path = "x"
{{ end }}
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
"""
NAMES = {1: "cri", 2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.runtime"}

# columns: text of the file; version of its format, expected SystemdCgroup of the NVIDIA runtime (None: not set). The
# value is copied from runc's section.
FILES = [
    (DEBIAN, 2, None),
    (KUBEADM, 2, True),
    (ONE, 1, False),
    (THREE, 3, True),
    ("version = 2\n", 2, None),
    ("", 1, None),
    (KUBEADM.replace("\n", "\n\n"), 2, True),
    (KUBEADM.rstrip("\n"), 2, True),
]
IDS = ["debian", "kubeadm", "version 1", "version 3", "version alone", "empty", "blank lines", "no final newline"]


def cri(text, version):
    return tomllib.loads(text)["plugins"][NAMES[version]]


def record(former, ours):
    """Returns the record of one run that changed the text ``former`` to ``ours``."""
    return {"former": former, "ours": ours, "exact": True}


@pytest.mark.parametrize(("text", "version", "cgroup"), FILES, ids=IDS)
def test_runtime_is_added_once_and_removed_without_a_trace(text, version, cgroup):
    desired = Desired()
    assert containerd_text.version_of(text) == version
    merged, changes = containerd_text.merge(text, desired)
    found = cri(merged, version)["containerd"]
    options = {"BinaryName": "/usr/bin/nvidia-container-runtime"}
    options |= {} if cgroup is None else {"SystemdCgroup": cgroup}
    assert found["default_runtime_name"] == "nvidia"
    assert found["runtimes"]["nvidia"] == {"runtime_type": "io.containerd.runc.v2", "options": options}
    assert changes
    # Of the former lines, only the changed line is missing.
    del found["runtimes"]["nvidia"]
    gone = [line for line in text.splitlines() if line not in merged.splitlines()]
    assert [line.split("=")[0].strip() for line in gone] in ([], ["default_runtime_name"])
    assert containerd_text.merge(merged, desired) == (merged, [])
    assert containerd_text.undo(merged, record(text, merged), desired) == text


@pytest.mark.parametrize(("text", "version", "cgroup"), FILES, ids=IDS)
def test_undo_keeps_later_additions_of_others(text, version, cgroup):
    merged = containerd_text.merge(text, Desired())[0]
    later = merged.rstrip("\n") + '\n\n[metrics]\naddress = "127.0.0.1:1338"\n'
    undone = tomllib.loads(containerd_text.undo(later, record(text, merged), Desired()))
    assert undone.pop("metrics") == {"address": "127.0.0.1:1338"}
    before = tomllib.loads(text)
    # An empty table has no meaning in containerd, so it may stay.
    assert prune(undone) == prune(before)


def prune(value):
    if not isinstance(value, dict):
        return value
    pruned = {key: prune(inner) for key, inner in value.items()}
    return {key: inner for key, inner in pruned.items() if inner != {}}


def test_comment_after_a_changed_value_stays():
    merged = containerd_text.merge(KUBEADM, Desired())[0]
    (line,) = [line for line in merged.splitlines() if "default_runtime_name" in line]
    assert line.strip().startswith('default_runtime_name = "nvidia"')
    assert line.endswith("# the default")


# columns: text of the file, version of its format; expected default runtime if ours is not desired (None: not set, so
# containerd uses runc), expected runtimes
NO_DEFAULT = [
    (KUBEADM, 2, "runc", ["nvidia", "runc"]),
    (KUBEADM.replace('"runc" # the default', '"crun"'), 2, "crun", ["nvidia", "runc"]),
    # In containerd 1.x a runtime in the file replaces containerd's own list of runtimes, and so its definition of runc.
    (DEBIAN, 2, None, ["nvidia", "runc"]),
    (ONE, 1, None, ["nvidia", "runc"]),
    (THREE, 3, "runc", ["nvidia", "runc"]),
]


@pytest.mark.parametrize(("text", "version", "name", "runtimes"), NO_DEFAULT)
def test_runtime_that_is_not_the_default_keeps_the_default_runtime(text, version, name, runtimes):
    merged = containerd_text.merge(text, Desired(default=False))[0]
    found = cri(merged, version)["containerd"]
    assert (found.get("default_runtime_name"), sorted(found["runtimes"])) == (name, runtimes)
    assert containerd_text.merge(merged, Desired(default=False)) == (merged, [])


@pytest.mark.parametrize("cgroup", [True, None])
@pytest.mark.parametrize(("text", "version", "_name", "runtimes"), NO_DEFAULT)
def test_default_runtime_is_taken_back(text, version, _name, runtimes, cgroup):
    ours = containerd_text.merge(text, Desired(systemd_cgroup=cgroup))[0]
    merged, changes = containerd_text.merge(ours, Desired(default=False, systemd_cgroup=cgroup))
    found = cri(merged, version)["containerd"]
    assert (found["default_runtime_name"], sorted(found["runtimes"])) == ("runc", runtimes)
    assert any('default_runtime_name from "nvidia" to "runc"' in one for one in changes)
    assert containerd_text.merge(merged, Desired(default=False, systemd_cgroup=cgroup)) == (merged, [])
    # runc gets the cgroup driver of the other runtime, because either may start a pod.
    drivers = {name: one.get("options", {}).get("SystemdCgroup") for name, one in found["runtimes"].items()}
    assert text != DEBIAN or len(set(drivers.values())) == 1
    # An edit, so that undo takes back key by key, whatever the default runtime is then.
    later = merged + '\n[metrics]\naddress = "127.0.0.1:1338"\n'
    for theirs in (later, later.replace('default_runtime_name = "runc"', 'default_runtime_name = "nvidia"')):
        undone = containerd_text.undo(theirs, record(text, merged), Desired(default=False))
        assert "nvidia" not in undone


def test_configured_cgroup_driver_overrides_the_file():
    merged = containerd_text.merge(ONE, Desired(systemd_cgroup=True))[0]
    assert cri(merged, 1)["containerd"]["runtimes"]["nvidia"]["options"]["SystemdCgroup"] is True


KUBELET = {"engine": "containerd", "endpoint": "", "cgroup_driver": ""}
# columns: the variable for the cgroup driver, cgroup driver of the kubelet (None: no kubelet runs), text of
# containerd's file (None: no file); expected SystemdCgroup of the NVIDIA runtime (None: the same as in runc's section)
CGROUPS = [
    ("auto", None, None, True),
    ("auto", None, DEBIAN, True),
    ("auto", None, KUBEADM, None),
    ("auto", None, ONE, None),
    ("auto", "systemd", None, True),
    ("auto", "systemd", ONE, True),
    ("auto", "cgroupfs", KUBEADM, False),
    ("auto", "", None, None),
    ("auto", "", DEBIAN, None),
    (True, "cgroupfs", ONE, True),
    (False, "systemd", KUBEADM, False),
    ("no", None, None, False),
]


@pytest.mark.parametrize(("given", "driver", "text", "expected"), CGROUPS)
def test_cgroup_driver_follows_the_kubelet(given, driver, text, expected):
    kubelet = None if driver is None else {**KUBELET, "cgroup_driver": driver}
    assert containerd_text.systemd_cgroup(given, kubelet, text) is expected


@pytest.mark.parametrize(("daemon", "version"), [((1, 7), 2), ((2, 1), 3), ((), 2)])
@pytest.mark.parametrize("cgroup", [True, False, None])
def test_new_file_gives_every_runtime_the_same_cgroup_driver(daemon, version, cgroup):
    desired = Desired(systemd_cgroup=cgroup)
    text = containerd_text.fresh(daemon, desired)
    runtimes = cri(containerd_text.merge(text, desired)[0], version)["containerd"]["runtimes"]
    drivers = {name: runtime.get("options", {}).get("SystemdCgroup") for name, runtime in runtimes.items()}
    assert drivers == ({"nvidia": None} if cgroup is None else {"nvidia": cgroup, "runc": cgroup})
    assert {runtime["runtime_type"] for runtime in runtimes.values()} == {"io.containerd.runc.v2"}


# columns: SystemdCgroup in the dump ("": the line is missing); expected words of each fault
@pytest.mark.parametrize(
    ("shown", "said"), [("true", []), ("false", ["SystemdCgroup: expected true"]), ("", ["nothing"])]
)
def test_wrong_cgroup_driver_is_found_in_the_dump_of_containerd(shown, said):
    dump = containerd_text.merge("version = 2\n", Desired(systemd_cgroup=True))[0]
    line = f"SystemdCgroup = {shown}" if shown else ""
    found = containerd_text.missing(dump.replace("SystemdCgroup = true", line), Desired(systemd_cgroup=True))
    assert len(found) == len(said) and all(words in text for words, text in zip(said, found))


def test_drop_in_is_used_only_for_version_3_with_an_imported_folder():
    path = "/etc/containerd/config.toml"
    assert [containerd_text.place(path, text) for text in (DEBIAN, ONE, KUBEADM)] == [path] * 3
    assert containerd_text.place(path, THREE) == "/etc/containerd/conf.d/99-vgpu.toml"
    assert containerd_text.place(path, THREE.replace("*.toml", "one.toml")) == path
    # containerd 1.x would replace its whole CRI section by the section of such a drop-in. So for containerd 1.x the
    # main file is changed.
    assert containerd_text.place(path, 'imports = ["/etc/containerd/conf.d/*.toml"]\n' + DEBIAN) == path
    own = tomllib.loads(containerd_text.drop_in(THREE, Desired()))
    assert own["version"] == 3
    assert own["plugins"][NAMES[3]]["containerd"]["runtimes"]["nvidia"]["options"]["SystemdCgroup"] is True


# columns: text of the file, version of containerd; expected words of the refusal
REFUSED = [
    (THREE, (1, 7), "leave its runtimes out without a word"),
    (THREE, (1, 6), "leave its runtimes out without a word"),
    (ONE, (2, 1), "discards the runtimes"),
    ('version = 2\ndisabled_plugins = ["cri"]\n', (1, 6), "disabled_plugins"),
    ('version = 2\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n', (1, 6), "disabled_plugins"),
]
FINE = [(DEBIAN, (1, 6)), (DEBIAN, (2, 1)), (KUBEADM, (1, 7)), (ONE, (1, 7)), (THREE, (2, 0)), (THREE, ())]


@pytest.mark.parametrize(("text", "daemon", "words"), REFUSED)
def test_file_that_containerd_ignores_is_refused(text, daemon, words):
    (fault,) = containerd_text.problems(text, daemon)
    assert words in fault


@pytest.mark.parametrize(("text", "daemon"), FINE)
def test_file_that_containerd_applies_is_accepted(text, daemon):
    assert containerd_text.problems(text, daemon) == []


def test_template_keeps_its_actions():
    assert (containerd_text.version_of(TEMPLATE), containerd_text.problems(TEMPLATE, (1, 7))) == (2, [])
    merged, changes = containerd_text.merge(TEMPLATE, Desired())
    assert changes
    assert [line for line in TEMPLATE.splitlines() if line not in merged.splitlines()] == []
    plain = "\n".join(line for line in merged.splitlines() if "{{" not in line)
    assert cri(plain, 2)["containerd"]["runtimes"]["nvidia"]["options"]["BinaryName"].endswith("container-runtime")
    assert containerd_text.merge(merged, Desired()) == (merged, [])
    undone = containerd_text.undo(merged + "# theirs\n", record(TEMPLATE, merged), Desired())
    assert "nvidia" not in undone
    assert [line for line in [*TEMPLATE.splitlines(), "# theirs"] if line not in undone.splitlines()] == []


FRESH = Desired(systemd_cgroup=True)
NEW = containerd_text.merge(containerd_text.fresh((1, 7), FRESH), FRESH)[0]
# columns: text of an own file; an edit of others; whether the file stays, without our runtime
OWN = [
    (containerd_text.drop_in(THREE, Desired()), str, False),
    (containerd_text.drop_in("version = 3\n", Desired(default=False, systemd_cgroup=True)), str, False),
    (NEW, str, False),
    (NEW, lambda text: text + "[metrics]\ngrpc_histogram = true\n", True),
    # The first of the keys is runc's.
    (NEW, lambda text: text.replace("SystemdCgroup = true", "SystemdCgroup = false", 1), True),
    (NEW, lambda text: text.replace("runtime_type", 'runtime_path = "/opt/runc"\nruntime_type', 1), True),
]


@pytest.mark.parametrize(("ours", "edit", "stays"), OWN)
def test_undo_removes_an_own_file_that_has_no_keys_of_others(ours, edit, stays):
    undone = containerd_text.undo(edit(ours), {**record(None, ours), "exact": False}, Desired())
    assert (undone is not None, "nvidia" in (undone or "")) == (stays, False)


# columns: text of the file; expected words of the refusal
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{{ template "base" . }}\n', "config.yaml.d"),
        ("version = 2\nplugins = {}\n", "write it as a table"),
        ("version = 2\n[plugins\n", "line 2"),
        ("version = 4\n", "expected 1, 2 or 3, found 4"),
        ('version = "two"\n', 'found "two"'),
    ],
)
def test_text_that_cannot_be_edited_is_refused(text, words):
    with pytest.raises(ConfigError) as caught:
        containerd_text.merge(text, Desired())
    assert words in str(caught.value)


# The shortened output of `containerd config dump` of containerd 1.6.20, for Debian's file after our change.
DUMP = """\
version = 2

[plugins]
  [plugins."io.containerd.grpc.v1.cri".containerd]
    default_runtime_name = "nvidia"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia.options]
        BinaryName = "/usr/bin/nvidia-container-runtime"
"""


def test_dump_shows_the_active_runtimes():
    assert containerd_text.missing(DUMP, Desired()) == []
    (fault,) = containerd_text.missing(DUMP.replace('name = "nvidia"', 'name = "runc"'), Desired())
    assert "default_runtime_name: expected nvidia, containerd would use" in fault
    assert len(containerd_text.missing("version = 2\n", Desired())) == 2
    assert containerd_text.missing(DUMP.replace('name = "nvidia"', 'name = "runc"'), Desired(default=False)) == []


@pytest.mark.parametrize("default", [True, False])
def test_crio_file_has_the_runtime(default):
    found = tomllib.loads(containerd_text.crio(Desired(default=default)))["crio"]["runtime"]
    assert found.pop("default_runtime", None) == ("nvidia" if default else None)
    assert found == {
        "runtimes": {"nvidia": {"runtime_path": "/usr/bin/nvidia-container-runtime", "runtime_type": "oci"}}
    }


@pytest.mark.parametrize("default", [True, False])
def test_k3s_and_rke2_get_only_the_default_runtime(default):
    found = yaml.safe_load(containerd_text.rancher(Desired(default=default)))
    assert found == ({"default-runtime": "nvidia"} if default else None)
