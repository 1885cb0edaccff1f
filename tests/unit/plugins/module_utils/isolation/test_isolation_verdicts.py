# SPDX-License-Identifier: Apache-2.0
"""Tests the verdicts of the isolation check of a slice (a part of a GPU), with a table for each source. Its probe, a
program in the slice, tries to bypass the limits. The watcher is the part of the device plugin that looks for processes
that bypass the library. A bypass that cannot be prevented is "detected" if the watcher names it, "violated" if the
watcher could see it and did not name it, and "open" without a watcher.
"""

from __future__ import annotations

import json

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import observer
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import verdicts as it

MIB = 1 << 20
EXPECTED = it.Expected("GPU-1", 5386)
LIMIT = 5386 * MIB
DEVICE = {"index": 0, "uuid": "GPU-1", "total_cuda": LIMIT, "total_nvml": LIMIT}
CHECK = {"name": "totals", "verdict": "passed", "expected": 1, "found": 1, "unit": "", "detail": ""}


def report(devices=(DEVICE,), checks=(CHECK,)) -> str:
    return json.dumps({"version": 1, "devices": list(devices), "checks": list(checks)})


def verdicts(checks) -> dict:
    return {one["name"]: one["verdict"] for one in checks}


PROBE = [
    # columns: label, exit status of the probe, its output, whether it exceeded its time; expected verdicts by check
    (
        "all checks passed",
        0,
        report(),
        False,
        {"totals": "passed", "gpu-as-leased": "passed", "limit-as-configured": "passed"},
    ),
    ("crash without a report", 1, "Segmentation fault", False, {"probe": "violated"}),
    ("report that is not an object", 0, "[]", False, {"probe": "violated"}),
    ("incomplete report", 0, '{"devices": []}', False, {"probe": "violated"}),
    ("signal after the report", -9, report(), False, {"probe": "violated", "totals": "passed"}),
    ("signal 1 after the report", -1, report(), False, {"probe": "violated", "totals": "passed"}),
    ("time limit exceeded", 0, report(), True, {"probe": "violated"}),
    ("requested check missing in the report", 0, report(checks=()), False, {"totals": "not-run"}),
    (
        "bypass that may be open",
        0,
        report(checks=[CHECK, dict(CHECK, name="bypass-namespace", verdict="open")]),
        False,
        {"bypass-namespace": "open"},
    ),
    (
        "bypass that must not be open",
        0,
        report(checks=[CHECK, dict(CHECK, name="bypass-setuid", verdict="open")]),
        False,
        {"bypass-setuid": "violated"},
    ),
    (
        "graphics libraries open",
        0,
        report(checks=[CHECK, dict(CHECK, name="graphics", verdict="open")]),
        False,
        {"graphics": "open"},
    ),
    (
        "check other than a bypass reported as open",
        0,
        report(checks=[dict(CHECK, verdict="open")]),
        False,
        {"totals": "violated"},
    ),
    ("GPU other than the leased one", 0, report([dict(DEVICE, uuid="GPU-2")]), False, {"gpu-as-leased": "violated"}),
    ("two GPUs", 0, report([DEVICE, dict(DEVICE, uuid="GPU-2")]), False, {"gpu-as-leased": "violated"}),
    ("no GPU", 0, report([]), False, {"gpu-as-leased": "violated", "limit-as-configured": "violated"}),
    (
        "CUDA total one byte above the limit",
        0,
        report([dict(DEVICE, total_cuda=LIMIT + 1)]),
        False,
        {"limit-as-configured": "violated"},
    ),
    (
        "NVML total other than the limit",
        0,
        report([dict(DEVICE, total_nvml=16160 * MIB)]),
        False,
        {"limit-as-configured": "violated"},
    ),
    ("unknown verdict", 0, report(checks=[dict(CHECK, verdict="ok")]), False, {"totals": "violated"}),
    (
        "violation reported by the probe",
        1,
        report(checks=[dict(CHECK, verdict="violated")]),
        False,
        {"totals": "violated"},
    ),
]


@pytest.mark.parametrize(("about", "rc", "out", "timed_out", "wanted"), PROBE, ids=[one[0] for one in PROBE])
def test_verdicts_follow_from_the_output_of_the_probe(about, rc, out, timed_out, wanted):
    found = verdicts(it.of_probe(rc, out, "", timed_out, EXPECTED, ["totals"]))
    assert {name: found[name] for name in wanted} == wanted
    if "violated" not in wanted.values() and "not-run" not in wanted.values():
        assert set(found.values()) - {"open"} == {"passed"}


def sharing(verdict, found, kernel, unit="percent") -> str:
    """Returns a probe's report about its share of the compute time. ``kernel`` is the time in ns that its kernel takes
    on an idle GPU (None: not measured)."""
    share = dict(CHECK, name="share", verdict=verdict, expected=33, found=found, unit=unit, detail=f"{found}!")
    measures = [{"name": "launch", "value": 7}] + ([] if kernel is None else [{"name": "kernel", "value": kernel}])
    return json.dumps({"devices": [DEVICE], "checks": [CHECK, share], "measures": measures})


TOGETHER = [
    # columns: label, report of our slice, report of the other slice (the neighbour); expected verdict, both shares in
    # percent. If a kernel time was measured while the other slice was busy, it is too long, and the share that follows
    # from it is too large. So the shorter of the two times is used for both slices.
    ("both within their share", sharing("passed", 33, 500), sharing("passed", 31, 500), "passed", "33 and 31"),
    ("neighbour above its share", sharing("passed", 33, 500), sharing("violated", 66, 500), "violated", "33 and 66"),
    ("our slice above its share", sharing("violated", 66, 500), sharing("passed", 33, 500), "violated", "66 and 33"),
    (
        "corrected share 5 points above the limit",
        sharing("passed", 33, 500),
        sharing("violated", 76, 1000),
        "passed",
        "33 and 38",
    ),
    (
        "corrected share 6 points above the limit",
        sharing("passed", 33, 500),
        sharing("violated", 78, 1000),
        "violated",
        "33 and 39",
    ),
    (
        "kernel time 0",
        sharing("passed", 33, 500),
        sharing("violated", 60, 0),
        "violated",
        "33 and 60",
    ),
    (
        "figure with another unit",
        sharing("passed", 33, 500),
        sharing("violated", 66, 1000, "launches"),
        "violated",
        "33 and 66",
    ),
    (
        "neighbour without a kernel time",
        sharing("violated", 60, 500),
        sharing("passed", 33, None),
        "violated",
        "60 and 33",
    ),
    ("no report of the neighbour", sharing("passed", 33, 500), "", "not-run", "33 and none"),
    ("report without a share", report(), sharing("passed", 33, 500), "not-run", "none and 33"),
    (
        "no report of the neighbour, our slice above its share",
        sharing("violated", 66, 500),
        "",
        "violated",
        "66 and none",
    ),
]


@pytest.mark.parametrize(("about", "ours", "theirs", "verdict", "got"), TOGETHER, ids=[one[0] for one in TOGETHER])
def test_share_of_two_slices_at_once(about, ours, theirs, verdict, got):
    found = it.of_beside(ours, theirs)
    assert (found["verdict"], found["found"], found["unit"]) == (verdict, got, "percent")
    assert found["detail"].count(";") == 1


SMI = [
    (0, "GPU-1, 5386\n", "passed"),
    (0, "GPU-1, 16160\n", "violated"),
    (0, "GPU-2, 5386\n", "violated"),
    (0, "GPU-1, 5386\nGPU-2, 5386\n", "violated"),
    (0, "", "violated"),
    (9, "GPU-1, 5386\n", "violated"),
    (0, "\n GPU-1, 5386 \n\n", "passed"),
    (126, "", "not-run"),
    (127, "", "not-run"),
]


@pytest.mark.parametrize(("rc", "out", "verdict"), SMI)
def test_verdict_of_nvidia_smi(rc, out, verdict):
    assert it.of_reader("nvidia-smi", rc, out, "", EXPECTED)["verdict"] == verdict


OUTSIDE = [
    # columns: label, greatest memory in the polls (None: no poll), bytes that the probe says it filled; expected
    # verdict
    ("the whole slice", LIMIT, LIMIT, "passed"),
    ("90 percent of the slice", LIMIT - LIMIT // 10, LIMIT, "passed"),
    ("90 percent of the filled bytes, without rounding", 900, 1000, "passed"),
    ("89.5 percent of the slice", LIMIT * 895 // 1000, LIMIT, "not-run"),
    ("one byte below 90 percent of the slice", LIMIT - LIMIT // 10 - 1, LIMIT, "not-run"),
    ("16 MiB above the slice, as an H200 showed for a moment", LIMIT + 16 * MIB, LIMIT, "passed"),
    ("as much above the slice as a driver rounds up", LIMIT + 64 * MIB, LIMIT, "passed"),
    ("one byte more than a driver rounds up", LIMIT + 64 * MIB + 1, LIMIT, "violated"),
    ("above the slice, probe reports 1 byte", 2 * LIMIT, 1, "violated"),
    ("above the slice, below the probe's figure", LIMIT + 65 * MIB, 2 * LIMIT, "violated"),
    ("probe reports twice the slice, polls show one slice", LIMIT, 2 * LIMIT, "not-run"),
    ("polls missed the fill", 117 * MIB, LIMIT, "not-run"),
    ("polls show no memory", 0, LIMIT, "not-run"),
    ("oversold slice, partly filled", LIMIT // 2, LIMIT // 2, "passed"),
    ("probe reports no memory", LIMIT, 0, "not-run"),
    ("no poll", None, LIMIT, "not-run"),
]


@pytest.mark.parametrize(("about", "most", "filled", "verdict"), OUTSIDE, ids=[one[0] for one in OUTSIDE])
def test_verdict_of_the_polled_memory(about, most, filled, verdict):
    assert it.of_outside(most, 3, "", EXPECTED, filled)["verdict"] == verdict


FILLED = [
    ([], 0),
    ([("totals", "7", "bytes")], 0),
    ([("limit-exact", "5", "bytes"), ("four-processes", "7", "bytes")], 7),
    ([("limit-exact", "11", "signal"), ("four-processes", "", "bytes")], 0),
]


@pytest.mark.parametrize(("checks", "filled"), FILLED)
def test_filled_bytes_of_the_probe(checks, filled):
    assert it.filled([it.check(name, "passed", 1, found, unit) for name, found, unit in checks]) == filled


@pytest.mark.parametrize(
    ("missing", "verdict", "found"), [([], "passed", "/a, /b"), (["/a"], "violated", "/b"), (None, "not-run", "")]
)
def test_missing_mounts_have_a_verdict(missing, verdict, found):
    one = it.of_mounts(missing, ["/a", "/b"])
    assert (one["verdict"], one["found"]) == (verdict, found)


@pytest.mark.parametrize(
    ("checks", "verdict"),
    [
        ([], "not-run"),
        ([("totals", "passed")], "passed"),
        ([("totals", "passed"), ("freed", "not-run")], "not-run"),
        ([("totals", "violated"), ("freed", "not-run")], "violated"),
        ([("totals", "passed"), ("nvidia-smi", "not-run"), ("outside-memory", "not-run")], "passed"),
        ([("totals", "passed"), ("nvidia-smi", "violated")], "violated"),
        ([("nvidia-smi", "not-run")], "not-run"),
        ([("totals", "passed"), ("bypass-namespace", "open"), ("bypass-setuid", "not-run")], "passed"),
        ([("bypass-namespace", "open")], "not-run"),
        ([("totals", "passed"), ("graphics", "open")], "passed"),
        ([("totals", "passed"), ("neighbours", "violated")], "violated"),
        ([("totals", "passed"), ("bypass-setuid", "violated")], "violated"),
    ],
)
def test_verdict_of_several_checks(checks, verdict):
    assert it.overall([it.check(name, word, "", "") for name, word in checks]) == verdict


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        ([], "not-run"),
        (["passed", "passed"], "passed"),
        (["passed", "not-run"], "not-run"),
        (["not-run", "violated"], "violated"),
    ],
)
def test_worst_of_several_verdicts_counts(words, verdict):
    assert it.worst(words) == verdict


NAMESPACE_SAYS = [
    # columns: check in the probe's report; expected: whether its detail says that the libraries are the host's
    (dict(CHECK, name="graphics", verdict="open", detail="libnvcuvid.so.1 can be loaded"), True),
    (dict(CHECK, name="graphics", verdict="passed"), False),
    (dict(CHECK, name="bypass-namespace", verdict="open"), False),
]


@pytest.mark.parametrize(("one", "told"), NAMESPACE_SAYS)
def test_graphics_in_a_namespace_names_the_libraries_of_the_host(one, told):
    (found,) = it.of_namespace([one])
    assert found["detail"].startswith(one["detail"])
    assert ("namespace of the host" in found["detail"]) == told
    assert dict(found, detail="") == dict(one, detail="")


WAY = dict(CHECK, name="bypass-namespace", verdict="open", detail="GPU-1: granted")
WATCHED = [
    # columns: label, seconds until the watcher named the bypass (None: never), polls while the bypass ran, fault of the
    # watcher; expected verdict, words of the result
    ("bypass named", 3.21, 2, "", "detected", "3.2"),
    ("bypass named by a partly blind watcher", 3.21, 2, "GPU is lost", "detected", "3.2"),
    ("bypass not named in enough polls", None, 5, "", "violated", "not named in 5 polls"),
    ("bypass not named in too few polls", None, 4, "", "open", "4 times while the bypass ran, and needs 5 polls"),
    ("bypass not named by a blind watcher", None, 9, "GPU is lost", "open", "not detected: GPU is lost"),
]


@pytest.mark.parametrize(("about", "named", "looks", "fault", "verdict", "said"), WATCHED)
def test_verdict_on_an_open_bypass_follows_the_watcher(about, named, looks, fault, verdict, said):
    found = it.of_watcher(WAY, named, looks, 5, fault)
    assert (found["name"], found["verdict"]) == ("bypass-namespace", verdict)
    assert said in f"{found['found']} {found['detail']}"


@pytest.mark.parametrize(
    ("verdict", "whole"), [("open", "passed"), ("detected", "passed"), ("violated", "violated"), ("not-run", "passed")]
)
def test_verdict_of_a_bypass_in_the_overall_verdict(verdict, whole):
    assert it.overall([CHECK, dict(WAY, verdict=verdict)]) == whole


@pytest.mark.parametrize(("said", "verdict"), [("held", "passed"), ("passed", "passed"), ("holds", "violated")])
def test_verdict_word_of_an_older_probe_is_accepted(said, verdict):
    """A node keeps its older library until its upgrade, and has it again after a rollback."""
    found = it.of_probe(0, report(checks=[dict(CHECK, verdict=said)]), "", False, EXPECTED, ["totals"])
    assert found[0]["verdict"] == verdict


def test_probe_must_not_report_a_detection():
    found = it.of_probe(0, report(checks=[dict(WAY, verdict="detected")]), "", False, EXPECTED, ["bypass-namespace"])
    assert verdicts(found)["bypass-namespace"] == "violated"


@pytest.mark.parametrize(
    ("about", "said", "late"),
    [
        ("flag true", {"verdict": "not-run", "left_out": True}, True),
        ("flag false", {"verdict": "not-run", "left_out": False}, False),
        ("only the detail says left out", {"verdict": "not-run", "detail": "left out: 3 seconds had passed"}, False),
        ("passed check with the flag", {"verdict": "passed", "left_out": True}, False),
        ("flag that is a string", {"verdict": "not-run", "left_out": "false"}, False),
    ],
)
def test_only_a_true_flag_marks_a_check_as_left_out(about, said, late):
    (one, *_rest) = it.of_probe(0, report(checks=[{**CHECK, **said}]), "", False, EXPECTED, ["totals"])
    assert one["left_out"] is late


def test_checks_with_a_result_or_a_fault_are_not_left_out():
    """Only a check without time counts as left out."""
    found = [it.equal("totals", 1, 1), it.of_mounts(None, ["/a"]), it.of_device_nodes([], 1), it.open_way("bypass-a")]
    assert [one["left_out"] for one in found] == [False] * 4


def test_check_without_time_is_left_out():
    assert it.left_out("bypass-a", 20)["left_out"] is True


@pytest.mark.parametrize(
    ("names", "gpus", "found", "verdict"),
    [
        (["nvidia0", "nvidiactl", "nvidia-uvm", "null", "ttyUSB0"], 1, ["nvidia0"], "passed"),
        (["nvidia0", "nvidia1", "nvidiactl"], 1, ["nvidia0", "nvidia1"], "violated"),
        (["nvidia0", "nvidia1"], 2, ["nvidia0", "nvidia1"], "passed"),
        (["null"], 1, [], "not-run"),
        (None, 1, None, "not-run"),
    ],
)
def test_verdict_of_the_device_nodes(tmp_path, names, gpus, found, verdict):
    for name in names or ():
        (tmp_path / "7" / "root" / "dev").mkdir(parents=True, exist_ok=True)
        (tmp_path / "7" / "root" / "dev" / name).touch()
    nodes = observer.gpu_device_nodes(7, str(tmp_path))
    assert nodes == found
    one = it.of_device_nodes(nodes, gpus)
    assert one["verdict"] == verdict
    assert it.overall([CHECK, one]) == ("violated" if verdict == "violated" else "passed")


# The stderr of a probe older than a check. Its last words also occur for other faults.
USAGE = (
    "usage: vgpu-probe [--json] [--checks NAME,NAME…]\n" + 40 * "--seconds: what has not begun " + "64 bad arguments.\n"
)
UNKNOWN = f"vgpu-probe: there is no check 'neighbours'\n{USAGE}"
OLDER_PROBE = [
    # columns: label, exit status, stderr; expected verdict, words of the detail
    ("unknown check", 64, UNKNOWN, "not-run", "knows no check 'neighbours'; the node's library has another version"),
    ("unknown option", 64, USAGE, "not-run", "knows no such option; the node's library has another version"),
    ("other exit status with the same stderr", 1, UNKNOWN, "violated", "exit status 1: "),
    ("same exit status with another stderr", 64, "bad arguments", "violated", "exit status 64: bad arguments"),
]


@pytest.mark.parametrize(("about", "rc", "err", "verdict", "words"), OLDER_PROBE, ids=[one[0] for one in OLDER_PROBE])
def test_older_probe_is_not_run_and_not_violated(about, rc, err, verdict, words):
    (one,) = it.of_probe(rc, "", err, False, EXPECTED, ["neighbours"])
    assert (one["name"], one["verdict"]) == ("probe", verdict)
    assert words in one["detail"]
    assert ("upgrade.yml" in one["detail"]) == (verdict == "not-run")
    assert it.overall([CHECK, one]) == verdict, "expected the worse verdict for the whole slice"


KILLED = report().replace('"detail": ""', '"detail": null')
DETAILS = [
    # columns: label, the check; expected words of its detail
    ("mount of another file", it.of_mounts(["/a"], ["/a", "/b"]), "the slice does not show the host's file at /a"),
    ("all mounts correct", it.of_mounts([], ["/a"]), ""),
    ("no device nodes", it.of_device_nodes([], 1), "this host has no device nodes of GPUs"),
    ("process ended", it.of_device_nodes(None, 1), "the process ended before the host read its devices"),
    ("no report", it.of_probe(3, "", "it said why", False, EXPECTED, [])[0], "exit status 3: it said why"),
    ("no report, text on stdout", it.of_probe(3, "its words", "", False, EXPECTED, [])[0], "exit status 3: its words"),
    ("no report in time", it.of_probe(0, "", "", True, EXPECTED, [])[0], "the probe exceeded its time limit"),
    ("killed after its report", it.of_probe(-9, KILLED, "", False, EXPECTED, [])[1], "the probe was ended by signal 9"),
    ("late with its report", it.of_probe(-9, KILLED, "", True, EXPECTED, [])[1], "the probe exceeded its time limit"),
    ("detail of the probe", it.of_probe(0, KILLED.replace("null", '"why"'), "", False, EXPECTED, [])[0], "why"),
    ("detail null", it.of_probe(0, KILLED, "", False, EXPECTED, [])[0], ""),
    ("failing NVML", it.of_outside(None, 0, "GPU is lost", EXPECTED, 1), "GPU is lost"),
    ("NVML lists no process", it.of_outside(None, 4, "", EXPECTED, 1), "listed no process of the slice in 4 polls"),
    ("failing reader", it.of_reader("nvidia-smi", 9, "", "no driver", EXPECTED), "exit status 9: no driver"),
    ("working reader", it.of_reader("nvidia-smi", 0, "GPU-1, 5386", "a warning", EXPECTED), ""),
]


@pytest.mark.parametrize(("about", "one", "words"), DETAILS, ids=[one[0] for one in DETAILS])
def test_detail_of_a_check_names_the_fault(about, one, words):
    assert words in one["detail"]
    assert bool(one["detail"]) == bool(words)


TWO = [DEVICE, dict(DEVICE, uuid="GPU-2", total_nvml=7)]


@pytest.mark.parametrize(
    ("devices", "shown"),
    [
        ([DEVICE], f"total_cuda {LIMIT}, total_nvml {LIMIT}"),
        (TWO, f"total_cuda [{LIMIT}, {LIMIT}], total_nvml [{LIMIT}, 7]"),
    ],
)
def test_totals_of_the_probe_are_shown_by_their_names(devices, shown):
    checks = it.of_probe(0, report(devices), "", False, EXPECTED, ["totals"])
    assert [one["found"] for one in checks if one["name"] == "limit-as-configured"] == [shown]


@pytest.mark.parametrize(("count", "wanted"), [(1, "1 GPU"), (2, "2 GPUs")])
def test_expected_text_has_the_number_of_gpus(count, wanted):
    assert it.of_device_nodes(["nvidia0"], count)["expected"] == wanted


def beside(name, verdict, detail="") -> str:
    return report(checks=[dict(CHECK, name=name, verdict=verdict, detail=detail)])


IMPORTS = [
    # columns: label, reports of the importing and of the exporting probe; expected verdict, words of the detail
    (
        "import refused",
        beside("import-beside", "passed", "answers 801"),
        beside("export-beside", "passed"),
        "passed",
        "answers 801",
    ),
    (
        "import succeeded",
        beside("import-beside", "violated", "answers 0"),
        beside("export-beside", "passed"),
        "violated",
        "answers 0",
    ),
    (
        "probes did not meet",
        beside("import-beside", "not-run", "no x"),
        beside("export-beside", "not-run", "y"),
        "not-run",
        "x; in",
    ),
    ("no report of the exporting probe", beside("import-beside", "not-run", "nobody"), "", "not-run", "nobody"),
    (
        "no report of the importing probe",
        "",
        beside("export-beside", "passed"),
        "not-run",
        "no check 'import-beside'; the node's library has another version",
    ),
    (
        "report without the import check",
        report(),
        beside("export-beside", "passed"),
        "not-run",
        "no check 'import-beside'; the node's library has another version",
    ),
    (
        "unknown verdict of the import",
        beside("import-beside", "fine"),
        beside("export-beside", "passed"),
        "violated",
        "'fine'",
    ),
    ("import reported as open", beside("import-beside", "open"), "", "violated", "must be prevented"),
]


@pytest.mark.parametrize(("about", "ours", "theirs", "verdict", "words"), IMPORTS, ids=[one[0] for one in IMPORTS])
def test_import_from_another_slice_must_be_refused(about, ours, theirs, verdict, words):
    found = it.of_import(ours, theirs, UNKNOWN.replace("neighbours", "import-beside"))
    assert (found["name"], found["verdict"]) == ("import-beside", verdict)
    assert words in found["detail"]
    assert it.overall([dict(CHECK), found]) == ("violated" if verdict == "violated" else "passed")


def test_detail_of_a_missing_report_is_the_last_400_characters_of_the_output():
    (one,) = it.of_probe(3, "", 500 * "x" + 400 * "y", False, EXPECTED, [])
    assert one["detail"] == "exit status 3: " + 400 * "y"


def test_detail_of_a_missing_import_result_is_the_last_200_characters_of_stderr():
    found = it.of_import("", "", "x" + 199 * "y" + " z")
    assert found["detail"] == 198 * "y" + " z"


def test_detail_of_a_failed_reader_is_the_last_200_characters_of_stderr():
    found = it.of_reader("nvidia-smi", 9, "", 300 * "x" + 200 * "y", EXPECTED)
    assert found["detail"] == "exit status 9: " + 200 * "y"


def test_expected_memory_from_outside_names_the_slice_and_the_rounding():
    wanted = it.of_outside(0, 1, "", EXPECTED, 0)["expected"]
    assert wanted == f"at most {(5386 + 64) << 20} (5386 MiB, and 64 MiB for rounding by the driver)"
