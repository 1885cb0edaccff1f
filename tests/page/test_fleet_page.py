# SPDX-License-Identifier: Apache-2.0
"""Tests the report page in a real browser: content, filters, light and dark mode, a phone, a thousand nodes.

The expected values are written by hand, not read from the report's own sums.
"""

from __future__ import annotations

import json
import time

import pytest
from conftest import facts
from selenium.webdriver.common.by import By

EVIL = "<img src=x onerror=\"document.title='broken'\"></script><script>document.title='broken'</script>"
SHARE = {"name": "share", "verdict": "passed", "expected": "25", "found": "26", "unit": "percent", "detail": ""}
LIMIT = {"name": "limit-exact", "verdict": "violated", "expected": "5", "found": "6", "unit": "MiB", "detail": EVIL}
DRIFT = {"what": "slice", "where": "GPU-d::1", "expected": "made", "found": "not made", "remedy": "restart it"}
NOTE = {"what": "split", "where": "GPU-e", "expected": "7 slices", "found": "4", "remedy": "changes when 1 is free"}
KUBERNETES = {
    "ready": True,
    "resources": {"nvidia.com/gpu": {"capacity": 14, "allocatable": 13, "allocated": 3}},
    "pods": [
        {"pod": "ns/trainer", "resource": "nvidia.com/gpu", "count": 1, "phase": "Running"},
        {"pod": "ns/starts", "resource": "nvidia.com/gpu", "count": 2, "phase": "Pending"},
    ],
}


NOT_RUN = [
    {"name": f"bypass-{n}", "verdict": "not-run", "expected": "", "found": "", "unit": "", "detail": "card full"}
    for n in range(9)
]
ENFORCED = "memory is enforced by the driver: a limit was set and read back on this host"
WARNING = "the container of allocation aa (docker web) has files that were removed from the node"


def isolation(verdict, *checks):
    result = {"slice": "GPU-b::1", "verdict": verdict, "detail": "", "passed": "freed, totals", "checks": checks}
    return {"verdict": verdict, "results": [result]}


def fleet():
    """Returns the facts of five hosts, each in a different state."""
    usage = [{"by": "ns/trainer/main", "slices": ["GPU-a::0"], "used_mib": 900}]
    well = facts(["GPU-a", "GPU-a2"], usage=usage, kubernetes=KUBERNETES, memory_enforcement=ENFORCED)
    a100 = facts(["GPU-d"], 2, ok=False, advertised=["GPU-d::0"], drift=[DRIFT])
    a100["capacity"]["gpus"][0].update(model="A100-80GB", memory_mib=81920, slice_mib=40960, advertised=1)
    a100["groups"] = ["a100"]
    return {
        "well": {**well, "isolation": isolation("passed", SHARE)},
        "broken": {**facts(["GPU-b"]), "isolation": isolation("violated", LIMIT)},
        "dark": {"groups": ["t4"], "fault": {"state": "unreachable", "message": "timed out"}},
        "differs": a100,
        "never-proven": facts(["GPU-e"], proven=False, notes=[NOTE], missing={"kubernetes": "not asked"}),
    }


@pytest.fixture(scope="module")
def page(make_page):
    return make_page(fleet())


def names(browser):
    return [one.text for one in browser.find_elements(By.CSS_SELECTOR, "td.node button")]


def test_page_shows_every_node_and_makes_no_network_request(page, browser):
    seen = browser(page)
    assert names(seen) == ["dark", "broken", "differs", "never-proven", "well"]
    states = [one.text for one in seen.find_elements(By.CSS_SELECTOR, "#nodes td .state")]
    assert states == ["unreachable", "violated", "differs", "unproven", "passed"]
    tiles = [one.text.replace("\n", " ") for one in seen.find_elements(By.CSS_SELECTOR, ".sum")]
    assert tiles[:6] == ["5 nodes", "3 need a look", "5 GPUs", "30 slices", "29 advertised", "1 in use"]
    assert seen.get_log("browser") == []
    asked = [json.loads(one["message"])["message"] for one in seen.get_log("performance")]
    urls = [one["params"]["request"]["url"] for one in asked if one["method"] == "Network.requestWillBeSent"]
    assert urls and not [url for url in urls if not url.startswith(("file:", "data:"))]


def test_html_in_host_data_is_shown_as_text(page, browser):
    seen = browser(page)
    next(one for one in seen.find_elements(By.CSS_SELECTOR, "td.node button") if one.text == "broken").click()
    more = seen.find_element(By.CSS_SELECTOR, "td.more")
    assert EVIL in more.text
    assert not more.find_elements(By.TAG_NAME, "img") and "broken" not in seen.title


# columns: node; expected texts in its details
@pytest.mark.parametrize(
    "node, said",
    [
        (
            "well",
            ["0: ns/trainer/main, 900 MiB", "1: free", "share", "25 percent", "26 percent", "passed: freed, totals"],
        ),
        (
            "well",
            ["Kubernetes: Ready, 2 pods with GPUs", "nvidia.com/gpu 14 13 3", "ns/starts nvidia.com/gpu 2 Pending"],
        ),
        ("well", [f"Limits: {ENFORCED}"]),
        ("dark", ["timed out"]),
        ("differs", ["A100-80GB", "1: not advertised", "GPU-d::1", "not made", "restart it"]),
        ("never-proven", ["vcuda", "7 of 7", "GPU-e", "changes when 1 is free", "Not heard: kubernetes (not asked)"]),
    ],
)
def test_details_of_a_node(page, browser, node, said):
    seen = browser(page)
    button = next(one for one in seen.find_elements(By.CSS_SELECTOR, "td.node button") if one.text == node)
    button.click()
    assert button.get_attribute("aria-expanded") == "true"
    text = seen.find_element(By.CSS_SELECTOR, "td.more").text
    assert [one for one in said if one not in text] == []
    button.click()
    assert not seen.find_elements(By.CSS_SELECTOR, "td.more")


# columns: fragment of the page's address; names of the shown nodes in the expected order
@pytest.mark.parametrize(
    "part, expected",
    [
        ("#find=A100", ["differs"]),
        ("#find=trainer", ["well"]),
        ("#find=t4+passed", ["well"]),
        ("#find=nothing-like-it", []),
        ("#group=a100", ["differs"]),
        ("#model=Tesla+T4", ["broken", "never-proven", "well"]),
        ("#states=unreachable,violated", ["dark", "broken"]),
        ("#states=violated&group=a100", []),
        ("#states=no-such-state", ["dark", "broken", "differs", "never-proven", "well"]),
    ],
)
def test_filters_are_in_the_address(page, browser, part, expected):
    seen = browser(page, part)
    assert names(seen) == expected
    assert seen.find_element(By.ID, "count").text == f"{len(expected)} of 5 nodes"


def test_filters_and_sorting_by_click(page, browser):
    seen = browser(page)
    seen.find_element(By.CSS_SELECTOR, "#states button[value=passed]").click()
    assert names(seen) == ["well"] and "states=passed" in seen.current_url
    seen.find_element(By.CSS_SELECTOR, "#states button[value=passed]").click()
    seen.find_element(By.ID, "find").send_keys("t4")
    assert names(seen) == ["dark", "broken", "never-proven", "well"]
    seen.find_element(By.CSS_SELECTOR, "#nodes th:first-child button").click()
    assert names(seen) == ["broken", "dark", "never-proven", "well"]
    seen.find_element(By.CSS_SELECTOR, "#nodes th:first-child button").click()
    assert names(seen) == ["well", "never-proven", "dark", "broken"]


def test_plots_show_the_values_of_the_hosts(browser, make_page):
    folder = make_page(fleet())
    seen = browser(folder)
    titles = [one.text for one in seen.find_elements(By.CSS_SELECTOR, "figure h2")]
    assert titles == ["Who holds slices", "Memory by model", "Share wanted and got"]
    dots = seen.find_elements(By.CSS_SELECTOR, "figure circle")
    assert [one.find_element(By.TAG_NAME, "title").get_attribute("textContent") for one in dots] == [
        "wanted 25 %, got 26 %: 1 slices"
    ]
    later = {**fleet(), "new": facts(["GPU-n"])}
    del later["dark"]
    seen = browser(make_page(later, folder))
    assert seen.find_elements(By.CSS_SELECTOR, "figure h2")[-1].text == "Over time"
    changed = [one.text for one in seen.find_elements(By.CSS_SELECTOR, "#changes li")]
    assert changed == ["new: node new → passed", "dark: node unreachable → gone"]


def brightness(browser, element):
    said = browser.execute_script("return getComputedStyle(arguments[0]).backgroundColor", element)
    red, green, blue = (int(one) for one in said[said.index("(") + 1 : -1].split(",")[:3])
    return (299 * red + 587 * green + 114 * blue) / 1000


CONTRAST = """
const lum = (c) => { const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map((v) => (v /= 255) <= 0.03928 ? v / 12.92
  : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const ground = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
  if (!/, 0\\)$/.test(c)) return c; } return "rgb(255, 255, 255)"; };
const faded = (e) => e !== null && (getComputedStyle(e).opacity !== "1" || faded(e.parentElement));
const written = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
return [...document.querySelectorAll("body *")].filter((e) => written(e)
  && e.checkVisibility() && !e.closest("svg")).map((e) => {
  const a = lum(getComputedStyle(e).color), b = lum(ground(e));
  // What is drawn through a veil is not what its colours say.
  return [faded(e) ? 0 : (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.outerHTML.slice(0, 80)];
}).filter(([r]) => r < 4.5);
"""


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_has_contrast_and_the_page_fits_the_screen(page, browser, width, dark):
    seen = browser(page, width=width, dark=dark)
    for button in seen.find_elements(By.CSS_SELECTOR, "td.node button"):
        seen.execute_script("arguments[0].click()", button)
    assert (brightness(seen, seen.find_element(By.TAG_NAME, "body")) < 128) == dark
    # CONTRAST lists all text with less contrast than WCAG's level AA requires.
    assert seen.execute_script(CONTRAST) == []
    wide = seen.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1], f"expected a page within the screen, found the widths {wide}"
    seen.save_screenshot(str(page / f"{width}-{dark}.png"))


ROWS = """
const rows = new Map();
for (const tile of document.querySelectorAll(".sum")) rows.set(tile.offsetTop, (rows.get(tile.offsetTop) ?? 0) + 1);
return [...rows.values()];
"""


# columns: width of the screen in pixels; expected number of tiles in each row
@pytest.mark.parametrize(("width", "rows"), [(1280, [8]), (1024, [8]), (800, [4, 4]), (360, [2, 2, 2, 2])])
def test_summary_tiles_fill_rows_evenly(page, browser, width, rows):
    assert browser(page, width=width).execute_script(ROWS) == rows


LOST = {"index": 3, "uuid": "GPU-l", "reason": "GPU is lost", "counted": True}
GONE = {"what": "GPU", "where": "3 (GPU-l)", "expected": "readable", "found": "GPU is lost", "remedy": "replace it"}
TROUBLE = [
    "dark: unreachable: timed out",
    "broken: slice GPU-b::1: limit-exact is violated: expected 5 MiB, found 6 MiB",
    "differs: slice GPU-d::1: expected made, found not made; restart it",
    "short: GPU 3 (GPU-l): expected readable, found GPU is lost; replace it",
]


@pytest.mark.parametrize("width", [390, 1280])
def test_first_screen_shows_the_problems(browser, make_page, width):
    short = facts(["GPU-s"], ok=False, lost=[LOST], drift=[GONE])
    seen = browser(make_page({**fleet(), "short": short}), width=width)
    section = seen.find_element(By.ID, "trouble")
    assert [one.text for one in section.find_elements(By.TAG_NAME, "li")] == TROUBLE
    assert section.rect["y"] < seen.find_element(By.ID, "plots").rect["y"]
    assert width < 600 or section.rect["y"] + section.rect["height"] < 900
    wide = seen.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1]
    next(one for one in seen.find_elements(By.CSS_SELECTOR, "td.node button") if one.text == "short").click()
    cards = seen.find_elements(By.CSS_SELECTOR, "td.more tbody tr")
    assert [one.text.startswith("3 GPU-l lost") and one.text.endswith("GPU is lost") for one in cards][-1]


XID = {"xid": 31, "count": 2, "last": "2026-11-24T03:58:01Z"}
FATAL = {"xid": 79, "count": 1, "last": "2026-11-24T04:00:59Z"}
OLD = {"xid": 13, "count": 7, "last": None}


@pytest.fixture(scope="module")
def busy_page(make_page):
    """Returns a page of three nodes: ``one`` has ten containers, ``two`` has one, and ``idle`` has none.

    The GPUs of ``one`` and ``two`` have Xids (driver errors).
    """
    uses = [
        {"by": f"ns/p-{number}/main", "slices": [f"GPU-a::{number}"], "used_mib": number << 10} for number in range(10)
    ]
    first = facts(["GPU-a", "GPU-a2"], 10, usage=uses)
    first["capacity"]["gpus"][0].update(utilisation=90, temperature=71, xids=[XID])
    first["capacity"]["gpus"][1].update(utilisation=31, xids=[OLD])
    second = facts(["GPU-b"], 10, usage=[{"by": EVIL, "slices": ["GPU-b::3"], "used_mib": 20 << 10}])
    second["capacity"]["gpus"][0].update(model="A100-80GB", utilisation=0, temperature=30, xids=[FATAL])
    return make_page({"one": first, "two": second, "idle": facts(["GPU-c"])})


@pytest.mark.parametrize("width", [390, 1280])
def test_first_screen_shows_slice_holders_and_driver_values(busy_page, browser, width):
    seen = browser(busy_page, width=width)
    assert [one.text for one in seen.find_elements(By.CSS_SELECTOR, "#trouble li")] == [
        "two: GPU 0 A100-80GB: Xid 79, 1 ×, at 2026-11-24T04:00:59Z",
        "one: GPU 0 Tesla T4: Xid 31, 2 ×, the last at 2026-11-24T03:58:01Z",
        "one: GPU 1 Tesla T4: Xid 13, 7 ×",
    ]
    holders = seen.find_element(By.CSS_SELECTOR, "figure.holders")
    rows = [
        [cell.get_attribute("textContent") for cell in row.find_elements(By.TAG_NAME, "td")]
        for row in holders.find_elements(By.CSS_SELECTOR, "tbody tr")
    ]
    assert rows[0] == [EVIL, "two, GPU 0", "20\u00a0GiB", "0 %"]
    assert rows[1] == ["ns/p-9/main", "one, GPU 0", "9\u00a0GiB", "90 %"]
    assert len(rows) == 8 and "and 3 more" in holders.text and "broken" not in seen.title
    assert width < 600 or holders.rect["y"] + 100 < 900
    titles = [one.text for one in seen.find_elements(By.CSS_SELECTOR, "figure svg text") if "busy" in one.text]
    assert titles == ["A100-80GB, 0 % busy", "Tesla T4, 61 % busy"]
    cells = {
        row.find_element(By.CSS_SELECTOR, ".node button").text: row.find_element(
            By.CSS_SELECTOR, "[data-name=busy]"
        ).get_attribute("textContent")
        for row in seen.find_elements(By.CSS_SELECTOR, "#nodes tbody tr")
    }
    assert cells == {"one": "61 %", "two": "0 %", "idle": ""}
    wide = seen.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1]
    inner = seen.execute_script("const [one] = arguments; return [one.scrollWidth, one.clientWidth]", holders)
    assert inner[0] <= inner[1], f"expected the table within its frame, found the widths {inner}"
    seen.save_screenshot(str(busy_page / f"busy-{width}.png"))


LONG = "machine-learning/trainer-7c9d8b6f5d-x2x7q/main"


# columns: width of the screen, most lines of a long name
@pytest.mark.parametrize(("width", "most"), [(1280, 1), (800, 1), (390, 4)])
def test_names_of_holders_are_not_broken_into_pieces(browser, make_page, width, most):
    """Checks the first and the second report; the second report has one more plot."""
    uses = [{"by": LONG, "slices": ["GPU-a::0"], "used_mib": 900}, {"by": "docker web", "slices": ["GPU-a::1"]}]
    hosts = {"gpu-a100-12": facts(["GPU-a"], usage=uses)}
    folder = make_page(hosts)
    seen = browser(make_page(hosts, folder), width=width)
    cells = seen.find_elements(By.CSS_SELECTOR, "figure.holders td:first-child")
    assert [one.text for one in cells] == [LONG, "docker web"]
    lines = [seen.execute_script(LINES, one) for one in cells]
    assert lines[0] <= most and lines[1] == 1, lines


LINES = """
const range = document.createRange();
range.selectNodeContents(arguments[0]);
return new Set([...range.getClientRects()].map((one) => Math.round(one.top))).size;
"""


def test_details_and_text_report_show_gpu_values(busy_page, browser):
    seen = browser(busy_page, "#find=one")
    seen.find_element(By.CSS_SELECTOR, "td.node button").click()
    more = seen.find_element(By.CSS_SELECTOR, "td.more").text
    assert "90 % busy, 71 °C" in more and "GPU 1 Tesla T4: Xid 13, 7 ×" in more
    text = (busy_page / "fleet.md").read_text()
    assert "- two: GPU 0 A100-80GB: Xid 79, 1 times, the last at 2026-11-24T04:00:59Z" in text


def test_long_problem_list_is_cut_and_empty_list_is_hidden(browser, make_page):
    many = {
        f"n-{number:02}": {"groups": [], "fault": {"state": "unreachable", "message": EVIL}} for number in range(25)
    }
    seen = browser(make_page(many))
    lines = [one.text for one in seen.find_elements(By.CSS_SELECTOR, "#trouble li")]
    assert (len(lines), lines[0]) == (21, f"n-00: unreachable: {EVIL}") and "broken" not in seen.title
    assert lines[-1] == "and 5 more, in the table below"
    assert not browser(make_page({"well": facts(["GPU-a"])})).find_element(By.ID, "trouble").is_displayed()


def test_plugin_warnings_and_skipped_checks_are_not_green(browser, make_page):
    proof = {**isolation("passed", SHARE, *NOT_RUN), "time": time.time() - 7300}
    hosts = {
        "blind": {**facts(["GPU-a"], plugin_warnings=[WARNING]), "isolation": isolation("passed", SHARE)},
        "full": {**facts(["GPU-b"], proven=True), "isolation": proof},
    }
    folder = make_page(hosts)
    seen = browser(folder)
    assert [one.text for one in seen.find_elements(By.CSS_SELECTOR, "#trouble li")] == [f"blind: warning: {WARNING}"]
    states = seen.find_elements(By.CSS_SELECTOR, "#nodes td[data-name=state]")
    assert [one.text.split("\n") for one in states] == [["warned"], ["partly", "checked 2 hours ago"]]
    tiles = [one.text.replace("\n", " ") for one in seen.find_elements(By.CSS_SELECTOR, ".sum")]
    assert tiles[1] == "1 need a look"
    for button in seen.find_elements(By.CSS_SELECTOR, "td.node button"):
        button.click()
    blind, full = (one.text for one in seen.find_elements(By.CSS_SELECTOR, "td.more"))
    assert WARNING in blind and "3 passed" in blind
    assert "3 passed, 9 not-run" in full and "2 hours ago" in full
    assert full.count("card full") == 1 and "bypass-8" in full
    text = (folder / "fleet.md").read_text()
    assert f"- warning: {WARNING}" in text and "| full | partly | 20" in text


# columns: age in seconds, its text on the page
AGES = [(0, "just now"), (59, "just now"), (60, "1 minute ago"), (7199, "119 minutes ago"), (7200, "2 hours ago")]
AGES += [(172800, "2 days ago"), (-3600, "")]


def test_page_shows_its_age_in_words(page, browser):
    seen = browser(page)
    assert seen.find_element(By.ID, "age").text == "just now" or "minute" in seen.find_element(By.ID, "age").text
    assert [seen.execute_script("return age(arguments[0])", seconds) for seconds, _said in AGES] == [
        said for _seconds, said in AGES
    ]


def test_summary_tiles_with_problems_are_highlighted(page, browser, make_page):
    def loud(seen):
        return [one.text.split("\n")[1] for one in seen.find_elements(By.CSS_SELECTOR, ".sum.bad")]

    assert loud(browser(page)) == ["need a look", "differences", "isolation violated"]
    assert loud(browser(make_page({"well": facts(["GPU-a"])}))) == []


def test_details_on_a_phone(page, browser):
    """No element lies beyond the edge of the screen, and a missing value of a node takes no line."""
    for name, words in (("broken", "found: 6 MiB"), ("differs", "next step: restart it"), ("well", "each slice: 2194")):
        seen = browser(page, f"#find={name}", width=360)
        seen.find_element(By.CSS_SELECTOR, "td.node button").click()
        more = seen.find_element(By.CSS_SELECTOR, "td.more")
        assert seen.execute_script("return arguments[0].scrollWidth <= arguments[0].clientWidth", more)
        named = (
            "return [...arguments[0].querySelectorAll('td')].map((one) => `${one.dataset.name}: ${one.textContent}`)"
        )
        assert [one for one in seen.execute_script(named, more) if one.startswith(words)]
        heads = more.find_elements(By.TAG_NAME, "th")
        assert heads and not [one for one in heads if one.is_displayed()]
    seen = browser(page, "#find=dark", width=360)
    cells = "[...document.querySelectorAll('#nodes td')].filter((one) => one.offsetHeight)"
    shown = seen.execute_script(f"return {cells}.map((one) => one.dataset.name)")
    assert shown == ["node", "state", "slices", "in use", "differences"]


def proof(uuid):
    """Returns isolation results: one slice per GPU, with as many checks as a real run has."""
    names = ", ".join(f"bypass-number-{n}" for n in range(28))
    return {"slice": f"{uuid}::9", "uuid": uuid, "verdict": "passed", "detail": "", "passed": names, "checks": [SHARE]}


def processor_ms(seen):
    """Returns the CPU milliseconds of the page's thread for one reload; other load hardly changes them."""

    def spent():
        metrics = seen.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return next(one["value"] for one in metrics if one["name"] == "TaskDuration") * 1000

    seen.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    before = spent()
    seen.refresh()
    after = spent()
    seen.execute_cdp_cmd("Performance.disable", {})
    return after - before


def test_a_thousand_nodes(make_page, browser, record_property):
    hosts = {}
    for number in range(1000):
        uuids = [f"GPU-219f9bed-a171-c3fc-585e-{number:08}{gpu:04}" for gpu in range(8)]
        pods = [dict(KUBERNETES["pods"][1], pod=f"ns/p-{one}") for one in range(5)] + [KUBERNETES["pods"][0]] * 75
        kubernetes = {**KUBERNETES, "pods": pods}
        hosts[f"node-{number:04}"] = facts(uuids, 10, proven=False, kubernetes=kubernetes, notes=[NOTE])
        if number % 10:
            hosts[f"node-{number:04}"]["isolation"] = {"verdict": "passed", "results": [proof(one) for one in uuids]}
    folder = make_page(hosts)
    seen = browser(folder)
    assert len(names(seen)) == 1000
    took = seen.execute_script("return performance.getEntriesByType('navigation')[0].loadEventEnd")
    spent = processor_ms(seen)
    record_property("load_ms", took)
    record_property("processor_ms", spent)
    size = (folder / "fleet.html").stat().st_size >> 10
    print(f"a thousand nodes: {size} KiB, open after {took:.0f} ms, {spent:.0f} ms of the page's thread")
    seen.find_element(By.CSS_SELECTOR, "#states button[value=unproven]").click()
    assert len(names(seen)) == 100


def test_report_in_text_and_json(page):
    written = json.loads((page / "fleet.json").read_text())
    assert [one["name"] for one in written["nodes"]] == ["dark", "broken", "differs", "never-proven", "well"]
    text = (page / "fleet.md").read_text()
    assert "| differs | differs |  | 535.261.03 | 0.1.0-5f2c1a | 1 | 1 of 2 | 0 | 1 |" in text
    assert "slice GPU-d::1: expected made, found not made; restart it" in text
    assert "split GPU-e: expected 7 slices, found 4; changes when 1 is free" in text
    assert "timed out" in text and "limit-exact is violated" in text


def test_report_of_an_empty_fleet(make_page, browser):
    seen = browser(make_page({}))
    assert names(seen) == [] and seen.get_log("browser") == []


def test_check_mode_writes_the_report(make_page):
    folder = make_page({"well": facts(["GPU-a"])}, None, "Lab", "--check")
    assert sorted(one.name for one in folder.iterdir()) == ["fleet.html", "fleet.json", "fleet.md"]


def test_text_report_shows_who_enforces_memory(page):
    lines = (page / "fleet.md").read_text().splitlines()
    assert lines[lines.index("## Who enforces memory") + 2] == f"- well: {ENFORCED}"
    assert "memory is enforced" not in "".join(line for line in lines if not line.startswith("- well"))
