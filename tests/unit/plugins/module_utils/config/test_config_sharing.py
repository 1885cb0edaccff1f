# SPDX-License-Identifier: Apache-2.0
"""Tests which devices a node advertises in each sharing mode (none, vcuda, time-slicing, MPS, MIG), and which
configuration files are accepted. The format is that of NVIDIA's device plugin, with additional keys of this collection.
"""

from __future__ import annotations

import json

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.config import kinds, node_config, sharing

U = "GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16{}"
MIG_U = "MIG-4cf8db2d-06c0-7d70-1a51-e59b25b2c1{}{}"


def gpu(index, model="Tesla T4", memory=15360, mig=()):
    """Returns a GPU. ``mig`` lists the profiles of its MIG devices; a GPU with MIG devices is in MIG mode."""
    devices = [
        {"index": n, "uuid": MIG_U.format(index, n), "profile": profile, "memory_mib": 1000 * (n + 1)}
        for n, profile in enumerate(mig)
    ]
    return {
        "index": index,
        "uuid": U.format(index),
        "model": model,
        "memory_mib": memory,
        "mig_enabled": bool(mig),
        "mig": devices,
    }


def config(**parts):
    clean, _warnings = node_config.check(dict({"version": "v1"}, **parts), "node.yaml")
    return clean


def offered(gpus, **parts):
    """Returns the advertised device ids by resource. For short tables, each id has the GPU's index in place of its
    UUID."""
    pieces, findings = sharing.pieces_for(gpus, config(**parts))
    assert kinds.errors(findings) == []
    out = {}
    for piece in pieces:
        short = piece.id
        for one in gpus:
            short = short.replace(one["uuid"], str(one["index"]))
            for mig in one["mig"]:
                short = short.replace(mig["uuid"], "{}:{}".format(one["index"], mig["index"]))
        out.setdefault(piece.resource, []).append(short)
    return out


def entry(replicas=2, name="nvidia.com/gpu", **more):
    return dict({"name": name, "replicas": replicas}, **more)


def slicing(*entries, **more):
    return {"timeSlicing": dict({"resources": list(entries)}, **more)}


TWO = [gpu(0), gpu(1)]
# columns: label, GPUs of the host, parts of the configuration; expected device ids by resource ("1::0" is replica 0 of
# GPU 1, "0:1" is MIG device 1 of GPU 0)
TABLE = [
    ("nothing shared", TWO, {}, {"nvidia.com/gpu": ["0", "1"]}),
    (
        "time-slicing",
        TWO,
        {"sharing": slicing(entry(3))},
        {"nvidia.com/gpu": ["0::0", "0::1", "0::2", "1::0", "1::1", "1::2"]},
    ),
    (
        "resource name without a prefix",
        [gpu(0)],
        {"sharing": slicing(entry(2, "gpu"))},
        {"nvidia.com/gpu": ["0::0", "0::1"]},
    ),
    (
        "renamed by default",
        [gpu(0)],
        {"sharing": slicing(entry(), renameByDefault=True)},
        {"nvidia.com/gpu.shared": ["0::0", "0::1"]},
    ),
    (
        "renamed by the entry",
        [gpu(0)],
        {"sharing": slicing(entry(rename="gpu-light"), renameByDefault=True)},
        {"nvidia.com/gpu-light": ["0::0", "0::1"]},
    ),
    (
        "one GPU shared by its index, the second GPU whole",
        TWO,
        {"sharing": slicing(entry(devices=[1]))},
        {"nvidia.com/gpu": ["0", "1::0", "1::1"]},
    ),
    (
        "another replica count for each GPU",
        TWO,
        {
            "sharing": slicing(
                entry(2, devices=["0"], rename="gpu-light"), entry(4, devices=[U.format(1)], rename="gpu-heavy")
            )
        },
        {"nvidia.com/gpu-light": ["0::0", "0::1"], "nvidia.com/gpu-heavy": ["1::0", "1::1", "1::2", "1::3"]},
    ),
    (
        "first matching entry applies",
        TWO,
        {"sharing": slicing(entry(2, devices=[0]), entry(3))},
        {"nvidia.com/gpu": ["0::0", "0::1", "1::0", "1::1", "1::2"]},
    ),
    (
        "number of devices below the number of GPUs",
        TWO,
        {"sharing": slicing(entry(devices=1))},
        {"nvidia.com/gpu": ["0::0", "0::1", "1"]},
    ),
    (
        "number of devices equal to the number of GPUs",
        TWO,
        {"sharing": slicing(entry(devices=2))},
        {"nvidia.com/gpu": ["0::0", "0::1", "1::0", "1::1"]},
    ),
    (
        "entry for a missing MIG profile",
        [gpu(0)],
        {"sharing": slicing(entry(7, "nvidia.com/mig-1g.10gb"), entry())},
        {"nvidia.com/gpu": ["0::0", "0::1"]},
    ),
    (
        "vcuda and time-slicing",
        TWO,
        {"sharing": dict(slicing(entry(devices=[0])), vcuda={"splitCount": 3, "resourceName": "example.com/vgpu"})},
        {"nvidia.com/gpu": ["0::0", "0::1"], "example.com/vgpu": ["1::0", "1::1", "1::2"]},
    ),
    (
        "MPS and time-slicing",
        TWO,
        {"sharing": dict(slicing(entry(devices=[0])), mps={"resources": [entry(2, devices=[1], rename="gpu.mps")]})},
        {"nvidia.com/gpu": ["0::0", "0::1"], "nvidia.com/gpu.mps": ["1::0", "1::1"]},
    ),
    (
        "resource names by model",
        [gpu(0), gpu(1, "NVIDIA A100-SXM4-80GB")],
        {"resources": {"gpus": [{"pattern": "*A100*", "name": "a100"}, {"pattern": "*", "name": "gpu"}]}},
        {"nvidia.com/gpu": ["0"], "nvidia.com/a100": ["1"]},
    ),
    (
        "MIG strategy none, with MIG devices",
        [gpu(0, mig=["1g.10gb", "1g.10gb"])],
        {"flags": {"migStrategy": "none"}},
        {"nvidia.com/gpu": ["0"]},
    ),
    (
        "MIG strategy single",
        [gpu(0, mig=["1g.10gb", "1g.10gb"]), gpu(1, mig=["1g.10gb"])],
        {"flags": {"migStrategy": "single"}},
        {"nvidia.com/gpu": ["0:0", "0:1", "1:0"]},
    ),
    (
        "MIG strategy single, without MIG devices",
        TWO,
        {"flags": {"migStrategy": "single"}},
        {"nvidia.com/gpu": ["0", "1"]},
    ),
    (
        "MIG strategy mixed",
        [gpu(0, mig=["1g.10gb", "2g.20gb", "1g.10gb+me"]), gpu(1)],
        {"flags": {"migStrategy": "mixed"}},
        {
            "nvidia.com/mig-1g.10gb": ["0:0"],
            "nvidia.com/mig-2g.20gb": ["0:1"],
            "nvidia.com/mig-1g.10gb.me": ["0:2"],
            "nvidia.com/gpu": ["1"],
        },
    ),
    (
        "time-sliced MIG device",
        [gpu(0, mig=["1g.10gb", "1g.10gb"])],
        {"flags": {"migStrategy": "mixed"}, "sharing": slicing(entry(2, "mig-1g.10gb", devices=["0:1"]))},
        {"nvidia.com/mig-1g.10gb": ["0:0", "0:1::0", "0:1::1"]},
    ),
    (
        "vcuda and MIG",
        [gpu(0, mig=["1g.10gb"]), gpu(1)],
        {"flags": {"migStrategy": "mixed"}, "sharing": {"vcuda": {"splitCount": 2}}},
        {"nvidia.com/mig-1g.10gb": ["0:0"], "nvidia.com/gpu": ["1::0", "1::1"]},
    ),
]


@pytest.mark.parametrize(("about", "gpus", "parts", "wanted"), TABLE, ids=[row[0] for row in TABLE])
def test_devices_that_a_node_advertises(about, gpus, parts, wanted):
    assert offered(gpus, **parts) == wanted


MIG_HOST = [gpu(0, mig=["3g.40gb+me", "1g.10gb"]), gpu(1)]
ONE_PROFILE = [gpu(0, mig=["1g.10gb", "1g.10gb"])]
MIG_VARS = {"vgpu_sharing": "mig", "vgpu_mig_strategy": "mixed", "vgpu_mig_geometry": {"3g.40gb+me": 1, "1g.10gb": 1}}
SINGLE = {"vgpu_sharing": "mig", "vgpu_mig_strategy": "single", "vgpu_mig_geometry": {"1g.10gb": 2}}


@pytest.mark.parametrize(
    ("gpus", "variables", "wanted"),
    [
        (MIG_HOST, {}, {"mig-3g.40gb.me": ["0:0"], "mig-1g.10gb": ["0:1"], "gpu": ["1"]}),
        (
            MIG_HOST,
            {"vgpu_mig_replicas": {"1g.10gb": 2}},
            {"mig-3g.40gb.me": ["0:0"], "mig-1g.10gb": ["0:1::0", "0:1::1"], "gpu": ["1"]},
        ),
        (
            MIG_HOST,
            {"vgpu_mig_replicas": {"3g.40gb+me": 2}, "vgpu_rename_by_default": True},
            {"mig-3g.40gb.me.shared": ["0:0::0", "0:0::1"], "mig-1g.10gb": ["0:1"], "gpu": ["1"]},
        ),
        (
            ONE_PROFILE,
            {**SINGLE, "vgpu_mig_replicas": {"1g.10gb": 2}},
            {"gpu": ["0:0::0", "0:0::1", "0:1::0", "0:1::1"]},
        ),
    ],
)
def test_replicas_of_mig_devices_by_group_vars(gpus, variables, wanted):
    parts = node_config.from_vars({**MIG_VARS, **variables})
    assert offered(gpus, **parts) == {"nvidia.com/" + name: ids for name, ids in wanted.items()}
    said = parts["sharing"].get("timeSlicing", {"failRequestsGreaterThanOne": False})
    assert said["failRequestsGreaterThanOne"] is False


@pytest.mark.parametrize(
    ("parts", "memory", "percent", "mode"),
    [
        ({"sharing": slicing(entry(4))}, 15360, 100, "time-slicing"),  # time-slicing sets no limits
        ({"sharing": {"mps": {"resources": [entry(4)]}}}, 3840, 25, "mps"),
        # A replica has at least 1 %, because 0 would mean no limit.
        ({"sharing": {"mps": {"resources": [entry(60)]}}}, 256, 1, "mps"),
        ({"sharing": {"mps": {"resources": [entry(120)]}}}, 128, 1, "mps"),
        ({"sharing": {"vcuda": {"splitCount": 4, "coresScaling": "2"}}}, 3840, 50, "vcuda"),
        ({}, 15360, 100, "none"),
    ],
)
def test_memory_and_sm_share_depend_on_the_sharing_mode(parts, memory, percent, mode):
    pieces, _findings = sharing.pieces_for([gpu(0)], config(**parts))
    assert {(one.memory_mib, one.sm_percent, one.mode) for one in pieces} == {(memory, percent, mode)}
    assert {(one.uuid, one.device) for one in pieces} == {(U.format(0), U.format(0))}


def test_replica_of_a_mig_device_names_its_gpu():
    pieces, _findings = sharing.pieces_for(
        [gpu(0, mig=["1g.10gb"])], config(flags={"migStrategy": "mixed"}, sharing=slicing(entry(2, "mig-1g.10gb")))
    )
    assert [(one.id, one.device, one.uuid) for one in pieces] == [
        (MIG_U.format(0, 0) + f"::{n}", MIG_U.format(0, 0), U.format(0)) for n in range(2)
    ]


# columns: GPUs of the host, parts of the configuration; expected key in the error, words of the error
REFUSED = [
    (TWO, {"sharing": slicing(entry(devices=[5]))}, "sharing.timeSlicing.resources[0].devices", "no device 5"),
    (TWO, {"sharing": slicing(entry(devices=3))}, "sharing.timeSlicing.resources[0].devices", "expected 3 devices"),
    (
        TWO,
        {"sharing": dict(slicing(entry(devices=[0])), mps={"resources": [entry(devices=[0])]})},
        "sharing.mps.resources[0].devices",
        "sharing.timeSlicing.resources[0] already shares device 0",
    ),
    (
        TWO,
        {"sharing": slicing(entry(devices=[0]), entry(3, devices=["0"]))},
        "sharing.timeSlicing.resources[1].devices",
        "sharing.timeSlicing.resources[0] already shares",
    ),
    (
        [gpu(0, mig=["1g.10gb"])],
        {"flags": {"migStrategy": "mixed"}, "sharing": {"mps": {"resources": [entry(name="mig-1g.10gb")]}}},
        "sharing.mps.resources[0]",
        "MPS does not share MIG devices",
    ),
    (
        TWO,
        {"sharing": dict(slicing(entry(devices=[0])), mps={"resources": [entry()]})},
        "sharing.mps.resources[0]",
        "sharing.timeSlicing.resources[0] already shares device 0; list the devices of each entry",
    ),
    ([gpu(0, mig=["1g.10gb"])], {"sharing": {"vcuda": {}}}, "sharing.vcuda", "is in MIG mode"),
    (
        [gpu(0, mig=["1g.10gb", "2g.20gb"])],
        {"flags": {"migStrategy": "single"}},
        "flags.migStrategy",
        "one MIG profile on all GPUs, found 1g.10gb, 2g.20gb",
    ),
    (
        [gpu(0, mig=["1g.10gb"]), gpu(1)],
        {"flags": {"migStrategy": "single"}},
        "flags.migStrategy",
        "every GPU in MIG mode; found without MIG mode: GPU 1",
    ),
    (
        [dict(gpu(0), mig_enabled=True)],
        {"flags": {"migStrategy": "mixed"}},
        "flags.migStrategy",
        "is in MIG mode and has no MIG device",
    ),
]


@pytest.mark.parametrize(("gpus", "parts", "path", "words"), REFUSED)
def test_sharing_that_does_not_fit_the_gpus_is_an_error(gpus, parts, path, words):
    _pieces, findings = sharing.pieces_for(gpus, config(**parts))
    assert [(one.path, words in one.message) for one in kinds.errors(findings)] == [(path, True)]


def test_each_mig_device_that_mps_cannot_share_is_an_error():
    parts = {"flags": {"migStrategy": "mixed"}, "sharing": {"mps": {"resources": [entry(name="mig-1g.10gb")]}}}
    _pieces, findings = sharing.pieces_for([gpu(0, mig=["1g.10gb", "1g.10gb"])], config(**parts))
    said = [one.message.rpartition("(")[2] for one in kinds.errors(findings)]
    assert said == ["0:0)", "0:1)"]


# columns: GPUs of the host, resource of a time-slicing entry; expected words of the warnings
WITHOUT_EFFECT = [
    (TWO, "nvidia.com/gpu", []),
    (TWO, "nvidia.com/other", ["no device of this host has the resource nvidia.com/other (nvidia.com/gpu)"]),
    ([], "nvidia.com/other", ["no device of this host has the resource nvidia.com/other (none)"]),
]


@pytest.mark.parametrize(("gpus", "name", "said"), WITHOUT_EFFECT)
def test_entry_for_a_missing_resource_has_no_effect(gpus, name, said):
    _pieces, findings = sharing.pieces_for(gpus, config(sharing=slicing(entry(2, name))))
    assert [(one.level, one.path, one.message.partition(";")[0]) for one in findings] == [
        ("warning", "sharing.timeSlicing.resources[0]", words) for words in said
    ]


# columns: parts of the configuration; expected resource name of whole GPUs
PLAIN_NAMES = [
    ({}, "nvidia.com/gpu"),
    ({"sharing": {"vcuda": {"splitCount": 2}}}, "nvidia.com/gpu"),
    ({"sharing": {"vcuda": {"splitCount": 2, "resourceName": "example.com/vgpu"}}}, "example.com/vgpu"),
]


@pytest.mark.parametrize(("parts", "name"), PLAIN_NAMES)
def test_plain_resource_of_a_node(parts, name):
    assert sharing.plain_resource(config(**parts)) == name


def test_each_resource_of_a_node_is_named_once_in_order():
    config = node_config.from_vars(
        {"vgpu_sharing": "mig", "vgpu_mig_strategy": "mixed", "vgpu_mig_geometry": {"1g.5gb": 2}}
    )
    pieces, _findings = sharing.pieces_for([gpu(0, mig=("1g.5gb", "3g.20gb", "1g.5gb"))], config)
    assert sharing.resources_of(pieces, config) == ["nvidia.com/mig-1g.5gb", "nvidia.com/mig-3g.20gb"]
    assert sharing.resources_of([], node_config.from_vars({})) == ["nvidia.com/gpu"]


# columns: section of the configuration, its failRequestsGreaterThanOne (None: not set); expected: whether the plugin
# refuses a container that requests several replicas
@pytest.mark.parametrize(
    ("section", "said", "wanted"),
    [
        ("timeSlicing", None, False),
        ("timeSlicing", True, True),
        ("mps", None, True),
        ("mps", False, False),
    ],
)
def test_default_refusal_of_several_replicas_depends_on_the_section(section, said, wanted):
    more = {} if said is None else {"failRequestsGreaterThanOne": said}
    whole = config(sharing={section: dict({"resources": [entry()]}, **more)})
    mode = {"timeSlicing": "time-slicing"}.get(section, section)
    assert sharing.refuses_several(mode, whole) is wanted


# The inputs of the tests that NVIDIA publishes for version v1 of its configuration file: resources of a sharing
# section, devices of a resource, flags, and whole files. columns: input; expected: whether NVIDIA's plugin accepts it
PLAIN = {"name": "valid", "replicas": 2}
NVIDIA_ENTRIES = [
    ({}, False),
    ({"name": "valid"}, False),
    ({"name": "valid", "devices": "all"}, False),
    ({"name": "valid", "devices": "all", "rename": "valid-shared"}, False),
    (dict(PLAIN, devices="all"), True),
    (dict(PLAIN, devices="all", rename="valid"), True),
    ({"name": "valid", "replicas": -1}, False),
    ({"name": "valid", "replicas": 0}, False),
    (PLAIN, True),
    (dict(PLAIN, rename="valid-shared"), True),
    ({"name": "$invalid$", "replicas": 2, "rename": "valid-shared"}, False),
    (dict(PLAIN, rename="$invalid$"), False),
]
NVIDIA_DEVICES = [
    ("not-all", False),
    (-2, False),
    ("2.0", False),
    ([-1], False),
    (["-1"], False),
    (["invalid-UUID"], False),
    (["GPU-UUID"], False),
    (["MIG-UUID"], False),
    (["MIG-GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c"], False),
    ("all", True),
    (2, True),
    ([0], True),
    (["0"], True),
    (["0:0"], True),
    (["GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c"], True),
    (["MIG-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c"], True),
    (["MIG-GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c/0/0"], True),
    ([0, "0:0", "GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c"], True),
    (["0", "0:0", "GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c"], True),
]
NVIDIA_FLAGS = [
    ({}, True),
    ({"gfd": {}}, True),
    ({"gfd": {"sleepInterval": 0}}, True),
    ({"gfd": {"sleepInterval": "0s"}}, True),
    ({"gfd": {"sleepInterval": 5}}, True),
    ({"gfd": {"sleepInterval": "5s"}}, True),
    ({"plugin": {"deviceListStrategy": "envvar"}}, True),
    ({"plugin": {"deviceListStrategy": ["envvar", "cdi-annotations"]}}, True),
]
NVIDIA_FILES = (
    [({"sharing": {"timeSlicing": {"resources": [one]}}}, verdict) for one, verdict in NVIDIA_ENTRIES]
    + [({"sharing": slicing(dict(PLAIN, devices=one))}, verdict) for one, verdict in NVIDIA_DEVICES]
    + [({"flags": one}, verdict) for one, verdict in NVIDIA_FLAGS]
    + [
        ({"sharing": {"timeSlicing": {}}}, False),
        ({"sharing": slicing(dict(PLAIN, name="valid1"), dict(PLAIN, name="valid2"))}, True),
        ({"sharing": slicing(dict(PLAIN, name="$invalid$"))}, False),
        ({"sharing": {"mps": {"resources": [PLAIN]}}}, True),
        ({"sharing": {"mps": {"failRequestsGreaterThanOne": False, "resources": [PLAIN]}}}, True),
    ]
)


@pytest.mark.parametrize("compat", [False, True])
@pytest.mark.parametrize(("parts", "accepted"), NVIDIA_FILES, ids=[json.dumps(row[0]) for row in NVIDIA_FILES])
def test_files_of_nvidias_tests_are_judged_as_by_its_plugin(parts, accepted, compat):
    whole = dict({"version": "v1"}, **json.loads(json.dumps(parts)))
    if compat:
        whole["compat"] = "nvidia-v1"
    try:
        node_config.check(whole, "config.yaml")
    except node_config.ConfigError:
        assert not accepted
    else:
        assert accepted


# NVIDIA's plugin accepts these files, but silently ignores a part of each. The default (strict mode) refuses them; with
# compat: nvidia-v1 they give a warning and have the same effect as in NVIDIA's plugin. columns: parts of the
# configuration; expected key in the warning, device ids by resource
LENIENT = [
    ({"sharing": {"timeSlcing": {"resources": [entry()]}}}, "sharing.timeSlcing", {"nvidia.com/gpu": ["0", "1"]}),
    (
        {"sharing": dict(slicing(entry(4)), mps={"resources": [entry(2)]})},
        "sharing",
        {"nvidia.com/gpu": ["0::0", "0::1", "1::0", "1::1"]},
    ),
    ({"flags": {"migstrategy": "none", "unheardOf": 1}}, "flags.unheardOf", {"nvidia.com/gpu": ["0", "1"]}),
    ({"version": None, "strange": {}}, "strange", {"nvidia.com/gpu": ["0", "1"]}),
]


@pytest.mark.parametrize(("parts", "path", "wanted"), LENIENT)
def test_compat_mode_warns_about_files_that_strict_mode_refuses(parts, path, wanted):
    with pytest.raises(node_config.ConfigError):
        node_config.check(dict({"version": "v1"}, **json.loads(json.dumps(parts))), "config.yaml")
    whole = dict({"version": "v1", "compat": "nvidia-v1"}, **json.loads(json.dumps(parts)))
    clean, findings = node_config.check(whole, "config.yaml")
    assert [(one.level, one.path) for one in findings] == [("warning", path)]
    pieces, _findings = sharing.pieces_for(TWO, clean)
    short = {}
    for piece in pieces:
        name = piece.id.replace(U.format(0), "0").replace(U.format(1), "1")
        short.setdefault(piece.resource, []).append(name)
    assert short == wanted


def test_compat_ignores_selection_and_names_as_nvidias_plugin_does():
    parts = {"sharing": slicing(entry(2, devices=[0], rename="light")), "resources": {"gpus": []}}
    parts["resources"]["gpus"] = [{"pattern": "*", "name": "other"}]
    whole = dict({"version": "v1", "compat": "nvidia-v1"}, **parts)
    clean, findings = node_config.check(whole, "config.yaml")
    where = "sharing.timeSlicing.resources[0]."
    assert [one.path for one in findings] == ["resources", where + "devices", where + "rename"]
    pieces, _findings = sharing.pieces_for(TWO, clean)
    assert {one.resource for one in pieces} == {"nvidia.com/gpu"}
    assert len(pieces) == 4


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ({}, "nvidia.com/gpu"),
        ({"sharing": {"vcuda": {"resourceName": "example.com/vgpu"}}}, "example.com/vgpu"),
        ({"sharing": slicing(entry(), renameByDefault=True)}, "nvidia.com/gpu.shared"),
        ({"sharing": slicing(entry(rename="light"))}, "nvidia.com/light"),
    ],
)
def test_resource_name_follows_the_configuration(parts, name):
    assert node_config.resource_name(config(**parts)) == name
    assert name in {one.resource for one in sharing.pieces_for(TWO, config(**parts))[0]}
