# SPDX-License-Identifier: Apache-2.0
"""Tests the sizes of slices (parts of a GPU) against tables that were calculated by hand. Three values of the
configuration decide the sizes: the split count K (slices of each GPU), the memory scaling S (above 1, the slices
together have more memory than the GPU) and the cores scaling C (the same for compute). An exception (an entry of
vgpu_devices) sets other values for some GPUs.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.config import sharing, slices


def gpus(memory_mib, count=2, model="Tesla V100-SXM2-16GB"):
    return [{"index": n, "uuid": f"GPU-0000000{n}", "model": model, "memory_mib": memory_mib} for n in range(count)]


def config(split=2, memory="1.0", cores=None, devices=()):
    vcuda = {"splitCount": split, "memoryScaling": memory, "devices": list(devices)}
    if cores is not None:
        vcuda["coresScaling"] = cores
    return {"version": "v1", "sharing": {"vcuda": vcuda}}


def pieces(gpus, config):
    found, _findings = sharing.pieces_for(gpus, config)
    return found


# columns: memory of each GPU in MiB, K, S, C; expected number of slices on two GPUs, MiB of each slice, percent of the
# SMs of each slice
WORKED = [
    (16160, 2, "1.0", "2", 4, 8080, 100),
    (16160, 4, "2.0", "1", 8, 8080, 25),
    (16160, 3, "1.0", "1", 6, 5386, 33),
    (15360, 7, "1.0", "1", 14, 2194, 14),
    (11178, 2, "1.5", "2", 4, 8383, 100),
    # These rows fail if the code uses floats: floats give 28 for 100 * 0.29 and 1 MiB too little for 3 * 1.1 * 10 ** n.
    (16160, 1, "1.0", "0.29", 2, 16160, 29),
    (30, 1, "1.1", "1", 2, 33, 100),
    (81920, 4, "1.0", "1", 8, 20480, 25),
    (81920, 7, "1.0", "7", 14, 11702, 100),
    (81920, 7, "1.0", "6.99", 14, 11702, 99),
    (81920, 3, "1.0", "9", 6, 27306, 100),
    (7, 7, "1.0", "1", 14, 1, 14),
    (16160, 100, "1.0", "1", 200, 161, 1),
]


@pytest.mark.parametrize(("memory_mib", "split", "scaling", "cores", "number", "slice_mib", "sm_percent"), WORKED)
def test_slices_equal_the_worked_examples(memory_mib, split, scaling, cores, number, slice_mib, sm_percent):
    made = pieces(gpus(memory_mib), config(split, scaling, cores))
    assert len(made) == number
    assert {piece.memory_mib for piece in made} == {slice_mib}
    assert {piece.sm_percent for piece in made} == {sm_percent}


def test_ids_are_uuid_and_number_in_the_order_of_the_gpus():
    made = pieces(gpus(16160), config(2))
    assert [piece.id for piece in made] == ["GPU-00000000::0", "GPU-00000000::1", "GPU-00000001::0", "GPU-00000001::1"]
    assert [piece.uuid for piece in made] == ["GPU-00000000", "GPU-00000000", "GPU-00000001", "GPU-00000001"]


@pytest.mark.parametrize("split", [1, 2, 3, 7, 13])
def test_default_cores_scaling_sets_no_limit(split):
    assert {piece.sm_percent for piece in pieces(gpus(16160), config(split))} == {100}


def test_default_cores_scaling_follows_the_split_count_of_each_gpu():
    # The default of C equals K, so a slice may use the whole GPU. For GPU 0 the configuration sets K to 4, while the
    # node's K is 2. If C followed the node's K, each slice of GPU 0 would get only 50 %.
    devices = [{"match": {"index": 0}, "splitCount": 4}]
    made = pieces(gpus(16160), config(2, devices=devices))
    assert [piece.sm_percent for piece in made] == [100] * 6


def test_default_split_count_is_two():
    assert len(pieces(gpus(16160, count=1), {"version": "v1", "sharing": {"vcuda": {}}})) == 2


def test_first_matching_exception_wins_and_unset_values_come_from_the_node():
    devices = [
        {"match": {"index": 0}, "splitCount": 1},
        {"match": {"model": "V100"}, "splitCount": 5, "coresScaling": "1"},
    ]
    made = pieces(gpus(16160), config(3, "2.0", devices=devices))
    assert [(piece.id, piece.memory_mib, piece.sm_percent) for piece in made] == [
        ("GPU-00000000::0", 32320, 100),
        *[(f"GPU-00000001::{n}", 6464, 20) for n in range(5)],
    ]


def test_unshared_host_gives_whole_gpus():
    made = pieces(gpus(16160), {"version": "v1", "sharing": {}})
    assert [one[:4] for one in made] == [(uuid, uuid, 16160, 100) for uuid in ("GPU-00000000", "GPU-00000001")]


# columns: memory of the GPU in MiB, split count, memory scaling, cores scaling; expected words of the error
@pytest.mark.parametrize(
    ("memory_mib", "split", "scaling", "cores", "words"),
    [
        (16160, 0, "1.0", "1", ["cannot be split into 0"]),
        (5, 6, "1.0", "6", ["less than 1 MiB", "no limit", "lower the split count"]),
        (16160, 2, "0.0001", "2", ["less than 1 MiB"]),
        (16160, 101, "1.0", "1", ["less than 1 %", "raise the cores scaling to at least 1.01"]),
        (16160, 199, "1.0", "1", ["less than 1 %", "raise the cores scaling to at least 1.99"]),
        (16160, 300, "1.0", "1", ["less than 1 %", "raise the cores scaling to at least 3.00"]),
        (16160, 2, "0", "1", ['above 0, found "0"']),
        (16160, 2, "-1", "1", ['above 0, found "-1"']),
        (16160, 2, "nan", "1", ['above 0, found "nan"']),
        (16160, 2, "1.0", "1/2", ['above 0, found "1/2"']),
    ],
)
def test_impossible_slice_size_is_an_error(memory_mib, split, scaling, cores, words):
    with pytest.raises(slices.SliceError) as caught:
        (gpu,) = gpus(memory_mib, count=1)
        slices.size_of(gpu, slices.share_of(gpu, config(split, scaling, cores)))
    for word in words:
        assert word in str(caught.value)


# columns: model in the configuration, model that the driver reports; expected: whether the two models match
@pytest.mark.parametrize(
    ("pattern", "model", "same"),
    [
        ("T4", "Tesla T4", True),
        ("t4", "Tesla T4", True),
        ("T4", "NVIDIA T400", False),
        ("A100", "NVIDIA A100-SXM4-80GB", True),
        ("A100-80GB", "NVIDIA A100-SXM4-80GB", True),
        ("A100-40GB", "NVIDIA A100-SXM4-80GB", False),
        ("V100-16GB", "Tesla V100-SXM2-16GB", True),
        ("GTX 1080", "NVIDIA GeForce GTX 1080 Ti", False),
        ("GTX 1080 Ti", "NVIDIA GeForce GTX 1080 Ti", True),
        ("NVIDIA GeForce GTX 1080 Ti", "NVIDIA GeForce GTX 1080 Ti", True),
        ("80GB A100", "NVIDIA A100-SXM4-80GB", False),
        ("", "Tesla T4", False),
    ],
)
def test_model_is_matched_by_a_short_name(pattern, model, same):
    assert slices.model_matches(pattern, model) is same


@pytest.mark.parametrize(
    ("match", "found"),
    [
        ({"index": 1}, [1]),
        ({"uuid": "GPU-00000000"}, [0]),
        ({"uuid": "gpu-00000001"}, [1]),
        ({"model": "V100"}, [0, 1]),
        ({"index": 0, "model": "V100"}, [0]),
        ({"index": 0, "model": "T4"}, []),
    ],
)
def test_every_condition_of_a_match_counts(match, found):
    assert [gpu["index"] for gpu in gpus(16160) if slices.matches(match, gpu)] == found


# columns: model of the GPU, split count; expected words of the warning that this is more than the advised number of
# slices ("": no warning)
@pytest.mark.parametrize(
    ("model", "split", "words"),
    [
        ("Tesla T4", 7, ""),
        ("Tesla T4", 8, "8 slices; for T4, at most 7 are advised"),
        ("NVIDIA A100-SXM4-80GB", 15, ""),
        ("NVIDIA A100-SXM4-80GB", 16, "16 slices; for A100, at most 15 are advised"),
        ("NVIDIA GeForce GTX 1080 Ti", 6, "6 slices; for GTX 1080 Ti, at most 5 are advised"),
        ("NVIDIA GeForce RTX 2080 Ti", 5, ""),
        ("NVIDIA GeForce RTX 2080 Ti", 6, "6 slices; for RTX 2080 Ti, at most 5 are advised"),
        ("NVIDIA GeForce GTX 1080", 6, ""),
        ("NVIDIA H200", 60, ""),
    ],
)
def test_advice_of_the_model_is_a_warning(model, split, words):
    found = slices.findings_for(gpus(16160, count=1, model=model), config(split))
    assert [(finding.level, words in finding.message) for finding in found] == [("warning", True)] * bool(words)


@pytest.mark.parametrize(("sizing", "levels"), [("equal", ["warning"]), ("requested", [])])
def test_advice_is_of_equal_slices(sizing, levels):
    """The warning is only for slices of equal size. If pods request their own sizes, the split count only limits how
    many pods share a GPU."""
    wanted = config(10)
    wanted["sharing"]["vcuda"]["sliceSizing"] = sizing
    assert [one.level for one in slices.findings_for(gpus(16160, count=1, model="Tesla T4"), wanted)] == levels


def test_exception_without_a_match_is_an_error_that_lists_the_gpus():
    (found,) = slices.findings_for(gpus(16160), config(2, devices=[{"match": {"index": 9}, "splitCount": 1}]))
    assert found.level == "error"
    assert found.path == "sharing.vcuda.devices[0].match"
    assert "index 9" in found.message
    assert "GPU-00000001" in found.message


@pytest.mark.parametrize(("model", "shown"), [("Tesla T4", "Tesla T4"), ("", "model unknown")])
def test_list_of_gpus_shows_their_models(model, shown):
    wanted = config(2, devices=[{"match": {"index": 9}, "splitCount": 1}])
    (found,) = slices.findings_for(gpus(16160, count=1, model=model), wanted)
    assert f"GPU 0 ({shown}, GPU-00000000)" in found.message


def test_exception_shadowed_by_another_is_a_warning():
    devices = [{"match": {"model": "V100"}, "splitCount": 3}, {"match": {"index": 0}, "splitCount": 1}]
    (found,) = slices.findings_for(gpus(16160), config(2, devices=devices))
    assert (found.level, found.path) == ("warning", "sharing.vcuda.devices[1].match")


@pytest.mark.parametrize(("total", "whole"), [(16944988160, 16160), (16944988159, 16159), (1048576, 1), (1048575, 0)])
def test_mib_is_floored(total, whole):
    assert slices.mib(total) == whole
