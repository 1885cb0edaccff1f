# SPDX-License-Identifier: Apache-2.0
"""Judging a slice: tables of what each witness says, and the verdict."""

from __future__ import annotations

import json

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils import isolation as it
from ansible_collections.vgpu.fleet.plugins.module_utils import slice_outside, slice_watch
from ansible_collections.vgpu.fleet.plugins.module_utils.mount_namespace import Mount
from ansible_collections.vgpu.fleet.plugins.module_utils.nvml import NvmlError

MIB = 1 << 20
EXPECTED = it.Expected("GPU-1", 5386)
LIMIT = 5386 * MIB
DEVICE = {"index": 0, "uuid": "GPU-1", "total_cuda": LIMIT, "total_nvml": LIMIT}
CHECK = {"name": "totals", "verdict": "held", "expected": 1, "found": 1, "unit": "", "detail": ""}


def report(devices=(DEVICE,), checks=(CHECK,)) -> str:
    return json.dumps({"version": 1, "devices": list(devices), "checks": list(checks)})


def verdicts(checks) -> dict:
    return {one["name"]: one["verdict"] for one in checks}


PROBE = [
    # about, rc, output, timed out, what must be found
    ("all well", 0, report(), False, {"totals": "held", "gpu-as-leased": "held", "limit-as-configured": "held"}),
    ("no report", 1, "Segmentation fault", False, {"probe": "violated"}),
    ("a report that is no object", 0, "[]", False, {"probe": "violated"}),
    ("half a report", 0, '{"devices": []}', False, {"probe": "violated"}),
    ("ended by a signal after its report", -9, report(), False, {"probe": "violated", "totals": "held"}),
    ("past its time", 0, report(), True, {"probe": "violated"}),
    ("a check that was asked for is missing", 0, report(checks=()), False, {"totals": "not-run"}),
    (
        "a way round that may be open",
        0,
        report(checks=[CHECK, dict(CHECK, name="bypass-namespace", verdict="open")]),
        False,
        {"bypass-namespace": "open"},
    ),
    (
        "a way round that must not be open",
        0,
        report(checks=[CHECK, dict(CHECK, name="bypass-setuid", verdict="open")]),
        False,
        {"bypass-setuid": "violated"},
    ),
    (
        "libraries of graphics",
        0,
        report(checks=[CHECK, dict(CHECK, name="graphics", verdict="open")]),
        False,
        {"graphics": "open"},
    ),
    ("a check that cannot be open", 0, report(checks=[dict(CHECK, verdict="open")]), False, {"totals": "violated"}),
    ("another GPU", 0, report([dict(DEVICE, uuid="GPU-2")]), False, {"gpu-as-leased": "violated"}),
    ("a second GPU", 0, report([DEVICE, dict(DEVICE, uuid="GPU-2")]), False, {"gpu-as-leased": "violated"}),
    ("no GPU", 0, report([]), False, {"gpu-as-leased": "violated", "limit-as-configured": "violated"}),
    ("one byte more", 0, report([dict(DEVICE, total_cuda=LIMIT + 1)]), False, {"limit-as-configured": "violated"}),
    (
        "NVML tells another",
        0,
        report([dict(DEVICE, total_nvml=16160 * MIB)]),
        False,
        {"limit-as-configured": "violated"},
    ),
    ("a word that is no verdict", 0, report(checks=[dict(CHECK, verdict="ok")]), False, {"totals": "violated"}),
    ("the probe's own red", 1, report(checks=[dict(CHECK, verdict="violated")]), False, {"totals": "violated"}),
]


@pytest.mark.parametrize(("about", "rc", "out", "timed_out", "wanted"), PROBE, ids=[one[0] for one in PROBE])
def test_probe(about, rc, out, timed_out, wanted):
    found = verdicts(it.of_probe(rc, out, "", timed_out, EXPECTED, ["totals"]))
    assert {name: found[name] for name in wanted} == wanted
    if "violated" not in wanted.values() and "not-run" not in wanted.values():
        assert set(found.values()) - {"open"} == {"held"}


SMI = [
    (0, "GPU-1, 5386\n", "held"),
    (0, "GPU-1, 16160\n", "violated"),
    (0, "GPU-2, 5386\n", "violated"),
    (0, "GPU-1, 5386\nGPU-2, 5386\n", "violated"),
    (0, "", "violated"),
    (9, "GPU-1, 5386\n", "violated"),
    (127, "", "not-run"),
]


@pytest.mark.parametrize(("rc", "out", "verdict"), SMI)
def test_nvidia_smi(rc, out, verdict):
    assert it.of_reader("nvidia-smi", rc, out, "", EXPECTED)["verdict"] == verdict


OUTSIDE = [
    # about, greatest look, what the probe says it filled, verdict
    ("the whole slice was seen", LIMIT, LIMIT, "held"),
    ("nearly the whole slice was seen", LIMIT - LIMIT // 10, LIMIT, "held"),
    ("one byte more than the slice", LIMIT + 1, LIMIT, "violated"),
    ("more, whatever the probe says", 2 * LIMIT, 1, "violated"),
    ("twice the slice, and no look hit it", LIMIT, 2 * LIMIT, "not-run"),
    ("the looks missed the fill", 117 * MIB, LIMIT, "not-run"),
    ("a look at nothing", 0, LIMIT, "not-run"),
    ("oversold: the card gave less, and that was seen", LIMIT // 2, LIMIT // 2, "held"),
    ("the probe filled nothing", LIMIT, 0, "not-run"),
    ("no look at all", None, LIMIT, "not-run"),
]


@pytest.mark.parametrize(("about", "most", "filled", "verdict"), OUTSIDE, ids=[one[0] for one in OUTSIDE])
def test_outside(about, most, filled, verdict):
    assert it.of_outside(most, 3, "", EXPECTED, filled)["verdict"] == verdict


FILLED = [
    ([], 0),
    ([("totals", "7", "bytes")], 0),
    ([("limit-exact", "5", "bytes"), ("four-processes", "7", "bytes")], 7),
    ([("limit-exact", "11", "signal"), ("four-processes", "", "bytes")], 0),
]


@pytest.mark.parametrize(("checks", "filled"), FILLED)
def test_what_the_probe_filled(checks, filled):
    assert it.filled([it.check(name, "held", 1, found, unit) for name, found, unit in checks]) == filled


@pytest.mark.parametrize(
    ("missing", "verdict", "found"), [([], "held", "/a, /b"), (["/a"], "violated", "/b"), (None, "not-run", "")]
)
def test_mounts(missing, verdict, found):
    one = it.of_mounts(missing, ["/a", "/b"])
    assert (one["verdict"], one["found"]) == (verdict, found)


@pytest.mark.parametrize(
    ("checks", "verdict"),
    [
        ([], "not-run"),
        ([("totals", "held")], "held"),
        ([("totals", "held"), ("freed", "not-run")], "not-run"),
        ([("totals", "violated"), ("freed", "not-run")], "violated"),
        ([("totals", "held"), ("nvidia-smi", "not-run"), ("outside-memory", "not-run")], "held"),
        ([("totals", "held"), ("nvidia-smi", "violated")], "violated"),
        ([("nvidia-smi", "not-run")], "not-run"),
        ([("totals", "held"), ("bypass-namespace", "open"), ("bypass-setuid", "not-run")], "held"),
        ([("bypass-namespace", "open")], "not-run"),
        ([("totals", "held"), ("graphics", "open")], "held"),
        ([("totals", "held"), ("neighbours", "violated")], "violated"),
        ([("totals", "held"), ("bypass-setuid", "violated")], "violated"),
    ],
)
def test_overall(checks, verdict):
    assert it.overall([it.check(name, word, "", "") for name, word in checks]) == verdict


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        ([], "not-run"),
        (["held", "held"], "held"),
        (["held", "not-run"], "not-run"),
        (["not-run", "violated"], "violated"),
    ],
)
def test_worst(words, verdict):
    assert it.worst(words) == verdict


# ---- the host's own look


class FakeReader:
    def __init__(self, looks):
        self.looks = list(looks)

    def start(self):
        return None

    stop = start

    def count(self):
        return 2

    def handle(self, index):
        return index

    def uuid(self, handle):
        return f"GPU-{handle}"

    def processes(self, handle):
        assert handle == 1
        found = self.looks.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def proc(tmp_path):
    """Processes 10 and 11 in the slice, 20 on the host, 30 gone."""
    for pid, name in ((10, "mnt:[1]"), (11, "mnt:[1]"), (20, "mnt:[2]")):
        (tmp_path / str(pid) / "ns").mkdir(parents=True)
        (tmp_path / str(pid) / "ns" / "mnt").symlink_to(name)
        (tmp_path / str(pid) / "comm").write_text(f"way-{pid}\n")
    return str(tmp_path)


def test_memory_of_the_slice_alone_is_summed_and_the_greatest_look_counts(proc):
    looks = [{}, {10: 5, 20: 1000}, {10: 5, 11: 7, 20: 1000, 30: 1000}, {11: 1}, NvmlError(15, "x")]
    watch = slice_outside.MemoryWatch(FakeReader(looks), "GPU-1", proc)
    for _look in looks:
        watch.look(10)
    assert (watch.most_bytes, watch.looks) == (12, 4)
    assert "15" in watch.fault


def test_memory_that_is_not_told(proc):
    watch = slice_outside.MemoryWatch(FakeReader([{10: None}]), "GPU-1", proc)
    assert watch.untold is False
    watch.look(10)
    assert (watch.most_bytes, watch.untold) == (None, True)


def test_gpu_that_the_host_does_not_list(proc):
    watch = slice_outside.MemoryWatch(FakeReader([]), "GPU-7", proc)
    watch.look(10)
    assert (watch.most_bytes, watch.fault) == (None, "NVML on the host lists no GPU GPU-7")


def test_mounts_are_told_by_inode_and_not_by_content(tmp_path, proc):
    root = tmp_path / "10" / "root"
    for name in ("same", "copy"):
        (tmp_path / name).write_text("x")
        (root / name).parent.mkdir(exist_ok=True)
    (root / "same").hardlink_to(tmp_path / "same")
    (root / "copy").write_text("x")
    mounts = [Mount("/same", str(tmp_path / "same"), True), Mount("/copy", str(tmp_path / "copy"), True)]
    mounts.append(Mount("/gone", str(tmp_path / "same"), True))
    assert slice_outside.missing_mounts(10, mounts, proc) == ["/copy", "/gone"]
    assert slice_outside.missing_mounts(30, mounts, proc) is None


NAMESPACE_SAYS = [
    # a check of the probe, whether it is told that the libraries are the host's
    (dict(CHECK, name="graphics", verdict="open", detail="libnvcuvid.so.1 can be loaded"), True),
    (dict(CHECK, name="graphics", verdict="held"), False),
    (dict(CHECK, name="bypass-namespace", verdict="open"), False),
]


@pytest.mark.parametrize(("one", "told"), NAMESPACE_SAYS)
def test_whose_libraries_a_namespace_has(one, told):
    (found,) = it.of_namespace([one])
    assert found["detail"].startswith(one["detail"])
    assert ("namespace of the host" in found["detail"]) == told
    assert dict(found, detail="") == dict(one, detail="")


WAY = dict(CHECK, name="bypass-namespace", verdict="open", detail="GPU-1: granted")
WATCHED = [
    # about, seconds until named, looks, fault, verdict, what is said
    ("named", 3.21, 2, "", "detected", "3.2"),
    ("named by one that says that it does not see all", 3.21, 2, "GPU is lost", "detected", "3.2"),
    ("not named in as many looks as are needed", None, 5, "", "violated", "not in 5 looks"),
    ("not named in too few looks", None, 4, "", "open", "4 times meanwhile, 5 were needed"),
    ("the watcher is blind", None, 9, "GPU is lost", "open", "not detected: GPU is lost"),
]


@pytest.mark.parametrize(("about", "named", "looks", "fault", "verdict", "said"), WATCHED)
def test_way_round_and_the_watcher(about, named, looks, fault, verdict, said):
    found = it.of_watcher(WAY, named, looks, 5, fault)
    assert (found["name"], found["verdict"]) == ("bypass-namespace", verdict)
    assert said in f"{found['found']} {found['detail']}"


@pytest.mark.parametrize(
    ("verdict", "whole"), [("open", "held"), ("detected", "held"), ("violated", "violated"), ("not-run", "held")]
)
def test_what_a_way_round_does_to_the_whole(verdict, whole):
    assert it.overall([CHECK, dict(WAY, verdict=verdict)]) == whole


def test_probe_cannot_say_that_the_watcher_saw_it():
    found = it.of_probe(0, report(checks=[dict(WAY, verdict="detected")]), "", False, EXPECTED, ["bypass-namespace"])
    assert verdicts(found)["bypass-namespace"] == "violated"


class Asked:
    """A clock and the answers of ``vgpuctl watch``, one after the other."""

    def __init__(self, *answers) -> None:
        self.now, self.answers, self.count = 0.0, list(answers), 0

    def ask(self):
        self.count += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def witness(self, proc, names):
        return slice_watch.Witness(self.ask, "a1", names, lambda: self.now, proc)


def watching(looks=0, pids=(), allocation="a1", interval=2.0, fault="") -> dict:
    processes = [{"pid": pid} for pid in pids]
    findings = [{"allocation": allocation, "processes": processes, "text": "process x"}] if pids else []
    return {"looks": looks, "looks_to_name": 2, "interval_s": interval, "fault": fault, "findings": findings}


ONE, BOTH = {"bypass-b": "way-11"}, {"bypass-a": "way-10", "bypass-b": "way-11"}
FOUND = [
    # about, the ways of the run of process 10, the answer, the ways that are named by it, whether these are all
    ("the way's process", ONE, watching(1, [11]), ["bypass-b"], True),
    ("both at once", BOTH, watching(1, [10, 11]), ["bypass-a", "bypass-b"], True),
    ("one of two", BOTH, watching(1, [11]), ["bypass-b"], False),
    ("another process of the run", ONE, watching(1, [10]), [], False),
    ("nobody", ONE, watching(1), [], False),
    ("a process of an earlier run in the same slice", {"bypass-c": "way-20"}, watching(1, [20]), [], False),
    ("another allocation", ONE, watching(1, [11], "b2"), [], False),
    ("a process that is gone", ONE, watching(1, [99]), [], False),
    ("no answer", ONE, None, [], False),
]


@pytest.mark.parametrize(("about", "names", "answer", "named", "all_of_them"), FOUND)
def test_witness(proc, about, names, answer, named, all_of_them):
    asked = Asked(watching(), answer)
    witness = asked.witness(proc, names)
    witness.look(10)
    assert asked.count == 1  # not again at once
    asked.now = 1.5
    if all_of_them:
        with pytest.raises(slice_watch.AllNamed):
            witness.look(10)
    else:
        witness.look(10)
    assert sorted(witness.named) == named
    assert all(seconds == 1.5 and "was named: process x" in said for seconds, said in witness.named.values())
    assert asked.count == 2


def test_name_is_as_long_as_the_kernel_keeps_it(proc, tmp_path):
    (tmp_path / "11" / "comm").write_text("a-way-with-a-lo\n")
    asked = Asked(watching(), watching(1, [11]))
    witness = asked.witness(proc, {"bypass-x": "a-way-with-a-long-name"})
    asked.now = 1.0
    with pytest.raises(slice_watch.AllNamed):
        witness.look(10)


def test_witness_counts_the_looks_of_its_run(proc):
    asked = Asked(watching(100), watching(103, fault="blind"))
    witness = asked.witness(proc, ONE)
    assert (witness.absent, witness.looks, witness.needed, witness.hold_s) == ("", 0, 5, 10.0)
    asked.now = 1.0
    witness.look(10)
    assert (witness.looks, witness.fault) == (3, "blind")


@pytest.mark.parametrize(("answer", "said"), [(None, "no watcher"), (watching(interval=0.0), "switched off")])
def test_witness_without_a_watcher(proc, answer, said):
    assert said in Asked(answer).witness(proc, ONE).absent


@pytest.mark.parametrize(
    ("about", "said", "late"),
    [
        ("the probe says so", {"verdict": "not-run", "left_out": True}, True),
        ("it could not be run", {"verdict": "not-run", "left_out": False}, False),
        ("words say nothing", {"verdict": "not-run", "detail": "left out: 3 seconds had passed"}, False),
        ("what held was run", {"verdict": "held", "left_out": True}, False),
        ("a word that is no answer", {"verdict": "not-run", "left_out": "false"}, False),
    ],
)
def test_what_was_left_out(about, said, late):
    (one, *_rest) = it.of_probe(0, report(checks=[{**CHECK, **said}]), "", False, EXPECTED, ["totals"])
    assert one["left_out"] is late


def test_what_had_no_time_is_left_out():
    assert it.left_out("bypass-a", 20)["left_out"] is True


@pytest.mark.parametrize(
    ("names", "gpus", "found", "verdict"),
    [
        (["nvidia0", "nvidiactl", "nvidia-uvm", "null"], 1, ["nvidia0"], "held"),
        (["nvidia0", "nvidia1", "nvidiactl"], 1, ["nvidia0", "nvidia1"], "violated"),
        (["nvidia0", "nvidia1"], 2, ["nvidia0", "nvidia1"], "held"),
        (["null"], 1, [], "not-run"),
        (None, 1, None, "not-run"),
    ],
)
def test_device_nodes(tmp_path, names, gpus, found, verdict):
    for name in names or ():
        (tmp_path / "7" / "root" / "dev").mkdir(parents=True, exist_ok=True)
        (tmp_path / "7" / "root" / "dev" / name).touch()
    nodes = slice_outside.gpu_device_nodes(7, str(tmp_path))
    assert nodes == found
    one = it.of_device_nodes(nodes, gpus)
    assert one["verdict"] == verdict
    assert it.overall([CHECK, one]) == ("violated" if verdict == "violated" else "held")


KILLED = report().replace('"detail": ""', '"detail": null')
DETAILS = [
    # about, the check, the words of its detail
    ("a mount that is not the host's", it.of_mounts(["/a"], ["/a", "/b"]), "not the host's file inside: /a"),
    ("all mounts", it.of_mounts([], ["/a"]), ""),
    ("no device nodes", it.of_device_nodes([], 1), "this host has no device nodes of GPUs"),
    ("no process", it.of_device_nodes(None, 1), "the process ended before the host could look"),
    ("no report", it.of_probe(3, "", "it said why", False, EXPECTED, [])[0], "exit status 3: it said why"),
    ("no report, words on stdout", it.of_probe(3, "its words", "", False, EXPECTED, [])[0], "exit status 3: its words"),
    ("no report in time", it.of_probe(0, "", "", True, EXPECTED, [])[0], "it ran past its time"),
    ("killed after its report", it.of_probe(-9, KILLED, "", False, EXPECTED, [])[1], "it was ended by signal 9"),
    ("late with its report", it.of_probe(-9, KILLED, "", True, EXPECTED, [])[1], "it ran past its time"),
    ("a detail that is null", it.of_probe(0, KILLED, "", False, EXPECTED, [])[0], ""),
    ("NVML fails", it.of_outside(None, 0, "GPU is lost", EXPECTED, 1), "GPU is lost"),
    ("NVML names nobody", it.of_outside(None, 4, "", EXPECTED, 1), "named no process of the slice in 4 looks"),
    ("a reader that fails", it.of_reader("nvidia-smi", 9, "", "no driver", EXPECTED), "exit status 9: no driver"),
    ("a reader that works", it.of_reader("nvidia-smi", 0, "GPU-1, 5386", "a warning", EXPECTED), ""),
]


@pytest.mark.parametrize(("about", "one", "words"), DETAILS, ids=[one[0] for one in DETAILS])
def test_what_a_person_is_told(about, one, words):
    assert words in one["detail"]
    assert bool(one["detail"]) == bool(words)


@pytest.mark.parametrize(("count", "wanted"), [(1, "1 GPU"), (2, "2 GPUs")])
def test_how_many_gpus_are_wanted(count, wanted):
    assert it.of_device_nodes(["nvidia0"], count)["expected"] == wanted


def beside(name, verdict, detail="") -> str:
    return report(checks=[dict(CHECK, name=name, verdict=verdict, detail=detail)])


IMPORTS = [
    # about, what the probes report: the one that takes, the one that made; the verdict, a part of the detail
    ("refused", beside("import-beside", "held", "answers 801"), beside("lend-beside", "held"), "held", "answers 801"),
    ("had", beside("import-beside", "violated", "answers 0"), beside("lend-beside", "held"), "violated", "answers 0"),
    (
        "nobody came",
        beside("import-beside", "not-run", "no x"),
        beside("lend-beside", "not-run", "y"),
        "not-run",
        "x; in",
    ),
    ("the other said nothing", beside("import-beside", "not-run", "nobody"), "", "not-run", "nobody"),
    ("the other one alone reports", "", beside("lend-beside", "held"), "not-run", "there is no check"),
    ("another check", report(), beside("lend-beside", "held"), "not-run", "there is no check"),
    ("a word that is none", beside("import-beside", "fine"), beside("lend-beside", "held"), "violated", "'fine'"),
    ("open, which it may not be", beside("import-beside", "open"), "", "violated", "must not be open"),
]


@pytest.mark.parametrize(("about", "ours", "theirs", "verdict", "words"), IMPORTS, ids=[one[0] for one in IMPORTS])
def test_what_another_slice_made(about, ours, theirs, verdict, words):
    found = it.of_import(ours, theirs, "vgpu-probe: there is no check 'import-beside'\n")
    assert (found["name"], found["verdict"]) == ("import-beside", verdict)
    assert words in found["detail"]
    assert it.overall([dict(CHECK), found]) == ("violated" if verdict == "violated" else "held")
