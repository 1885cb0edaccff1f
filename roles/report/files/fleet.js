// SPDX-License-Identifier: Apache-2.0
// Draws the report from the data in the page. Text of hosts is only ever set as text, never as markup.
"use strict";

const fleet = JSON.parse(document.getElementById("fleet").textContent);
const place = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== undefined && value !== null) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}
const element = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const drawn = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const gib = (mib) => `${(mib / 1024).toLocaleString("en", { maximumFractionDigits: mib < 102400 ? 1 : 0 })}\u00a0GiB`;
const percent = (value) => value === null ? "" : `${value} %`;
const mean = (values) => values.length ? Math.round(values.reduce((sum, one) => sum + one, 0) / values.length) : null;
const busy = (gpus) => mean(gpus.map((gpu) => gpu.utilisation).filter((one) => one !== null));
const state = (name) => element("span", { class: `state ${name}` }, name);

// --- sums and what changed -------------------------------------------------------------------------------------------

function showSums() {
  const sums = fleet.totals;
  const before = fleet.history.length > 1 ? fleet.history[fleet.history.length - 2] : null;
  const tiles = [
    ["nodes", "nodes"], ["trouble", "need a look"], ["gpus", "GPUs"], ["expected", "slices"], ["advertised", "advertised"],
    ["in_use", "in use"], ["differences", "differences"], ["violated", "isolation violated"],
  ];
  const unwanted = new Set(["trouble", "differences", "violated"]);
  for (const [key, name] of tiles) {
    const delta = before ? sums[key] - before[key] : 0;
    const trend = delta ? ` (${delta > 0 ? "+" : "−"}${Math.abs(delta).toLocaleString("en")})` : "";
    const lost = key === "gpus" ? sums.lost : 0;
    const kind = (unwanted.has(key) && sums[key]) || lost ? "sum bad" : "sum";
    const all = lost ? ` of ${(sums[key] + lost).toLocaleString("en")}` : "";
    place("sums").append(element("div", { class: kind }, element("b", {}, sums[key].toLocaleString("en") + all), name + trend));
  }
}

// Returns an age in the largest fitting unit; empty for a time in the future, when the reader's clock is behind.
function age(seconds) {
  if (seconds < 0) return "";
  for (const [unit, length, from] of [["day", 86400, 172800], ["hour", 3600, 7200], ["minute", 60, 60]]) {
    const count = Math.floor(seconds / length);
    if (seconds >= from) return `${count} ${unit}${count === 1 ? "" : "s"} ago`;
  }
  return "just now";
}

const since = (time) => age((Date.now() - Date.parse(time)) / 1000);

function showAge() { place("age").textContent = since(fleet.made); }

// Returns the troubles of a node as sentences. A lost GPU is one of the differences.
function troubles(one) {
  const broken = (one.isolation?.results ?? []).flatMap((result) => (result.checks ?? [])
    .filter((check) => check.verdict === "violated").map((check) => {
      const unit = check.unit ? ` ${check.unit}` : "";
      const where = `slice ${result.slice || result.uuid || "of any GPU"}`;
      return `${where}: ${check.name} is violated: expected ${check.expected}${unit}, found ${check.found}${unit}`;
    }));
  const differs = one.drift.map((drift) =>
    `${drift.what} ${drift.where}: expected ${drift.expected}, found ${drift.found}; ${drift.remedy}`);
  const warned = one.warnings.map((text) => `warning: ${text}`);
  const lines = [...(one.message ? [`${one.state}: ${one.message}`] : []), ...broken, ...differs, ...warned];
  return lines.map((line) => `${one.name}: ${line}`);
}

function showTroubles() {
  const most = 20;
  const worst = new Map(fleet.states.map((name, at) => [name, at]));
  const nodes = [...fleet.nodes].sort((a, b) => worst.get(a.state) - worst.get(b.state));
  const lines = nodes.flatMap(troubles);
  if (!lines.length) return;
  const shown = lines.slice(0, most).map((line) => element("li", {}, line));
  if (lines.length > most) shown.push(element("li", {}, `and ${lines.length - most} more, in the table below`));
  place("trouble").append(element("h2", {}, "What needs a look"), element("ul", {}, shown));
}

// Returns the Xids of a node's GPUs with their counts: a single Xid is often the fault of one program.
function xids(one) {
  return one.gpus.flatMap((gpu) => gpu.xids.map((xid) => {
    const last = xid.last ? `, ${xid.count === 1 ? "at" : "the last at"} ${xid.last}` : "";
    return { last: xid.last ?? "", text: `${one.name}: GPU ${gpu.index} ${gpu.model}: Xid ${xid.xid}, ${xid.count} ×${last}` };
  }));
}

function showXids() {
  const most = 10;
  const lines = fleet.nodes.flatMap(xids).sort((a, b) => (a.last < b.last ? 1 : a.last > b.last ? -1 : 0));
  if (!lines.length) return;
  const shown = lines.slice(0, most).map((line) => element("li", {}, line.text));
  if (lines.length > most) shown.push(element("li", {}, `and ${lines.length - most} more, in the nodes' details`));
  place("trouble").append(element("h2", {}, "Xids since the device plugins began, the last one first"), element("ul", {}, shown));
}

// Shows the containers with the most memory, which an operator needs when a GPU is full.
function showHolders() {
  const most = 8;
  const holders = fleet.nodes.flatMap((one) => one.gpus.flatMap((gpu) => gpu.taken.map((use) => ({ one, gpu, use }))))
    .sort((a, b) => (b.use.used_mib ?? 0) - (a.use.used_mib ?? 0));
  if (!holders.length) return;
  const rows = holders.slice(0, most).map(({ one, gpu, use }) => [use.by || "in use", `${one.name}, GPU ${gpu.index}`,
    use.used_mib === null ? "" : gib(use.used_mib), percent(gpu.utilisation)]);
  const rest = holders.length > most ? element("p", { class: "quiet" }, `and ${holders.length - most} more, in the nodes' details`) : null;
  place("plots").append(element("figure", { class: "holders" }, element("h2", {}, "Who holds slices"),
    table(["who", "where", "holds", "GPU busy"], rows), rest));
}

function showChanges() {
  if (!fleet.last) return;
  const most = 100;
  const lines = fleet.changes.slice(0, most).map((one) =>
    element("li", {}, `${one.node}: ${one.what} ${one.before || "new"} → ${one.now || "gone"}`));
  if (fleet.changes.length > most) lines.push(element("li", {}, `and ${fleet.changes.length - most} more, in fleet.json`));
  const what = lines.length ? element("ul", {}, lines) : element("p", { class: "quiet" }, "Nothing changed.");
  place("changes").append(element("h2", {}, `Since ${fleet.last}`), what);
}

// --- plots -----------------------------------------------------------------------------------------------------------

function figure(title, keys, drawing, description) {
  const legend = keys.map(([kind, name]) => element("span", { class: `key ${kind}` }, element("i"), name));
  drawing.setAttribute("role", "img");
  drawing.setAttribute("aria-label", description);
  place("plots").append(element("figure", {}, element("h2", {}, title), legend, drawing));
}

function plotMemory() {
  const models = new Map();
  for (const gpu of fleet.nodes.flatMap((one) => one.gpus)) {
    const sum = models.get(gpu.model) ?? { physical: 0, sold: 0, used: 0 };
    sum.physical += gpu.memory_mib; sum.sold += gpu.sold_mib; sum.used += gpu.used_mib;
    models.set(gpu.model, sum);
  }
  if (!models.size) return;
  const kinds = ["physical", "sold", "used"];
  const most = Math.max(...[...models.values()].flatMap((sum) => kinds.map((kind) => sum[kind])), 1);
  const rows = [...models].sort().map(([model, sum], at) => {
    const top = at * 70;
    const bars = kinds.map((kind, n) => {
      const width = (230 * sum[kind]) / most;
      return [drawn("rect", { class: kind, x: 0, y: top + 16 + n * 15, width, height: 12 }),
        drawn("text", { x: width + 4, y: top + 26 + n * 15 }, gib(sum[kind]))];
    });
    const load = busy(fleet.nodes.flatMap((one) => one.gpus).filter((gpu) => gpu.model === model));
    return [drawn("text", { x: 0, y: top + 11 }, load === null ? model : `${model}, ${load} % busy`), bars.flat()];
  });
  const drawing = drawn("svg", { viewBox: `0 0 330 ${models.size * 70}` }, rows.flat(2));
  figure("Memory by model", kinds.map((kind) => [kind, kind]), drawing, "Memory of the cards, sold and used, by GPU model");
}

function plotShares() {
  const points = new Map();
  for (const { wanted, got } of fleet.nodes.flatMap((one) => one.shares)) {
    const key = `${Math.round(wanted)} ${Math.round(got * 2) / 2}`;
    points.set(key, (points.get(key) ?? 0) + 1);
  }
  if (!points.size) return;
  const x = (percent) => 34 + percent * 2.8, y = (percent) => 172 - percent * 1.6;
  const ticks = [0, 25, 50, 75, 100].map((at) => [
    drawn("text", { x: x(at), y: 188, "text-anchor": "middle" }, `${at}`),
    drawn("text", { x: 28, y: y(at) + 4, "text-anchor": "end" }, `${at}`),
  ]);
  const dots = [...points].map(([key, count]) => {
    const [wanted, got] = key.split(" ").map(Number);
    return drawn("circle", { class: "sold", cx: x(wanted), cy: y(got), r: Math.min(3 + Math.sqrt(count), 12), "fill-opacity": 0.7 },
      drawn("title", {}, `wanted ${wanted} %, got ${got} %: ${count} slices`));
  });
  const drawing = drawn("svg", { viewBox: "0 0 330 206" },
    drawn("path", { class: "axis", d: `M${x(0)} ${y(100)}V${y(0)}H${x(100)}` }),
    drawn("path", { class: "axis", "stroke-dasharray": "4 4", d: `M${x(0)} ${y(0)}L${x(100)} ${y(100)}` }),
    ticks.flat(), dots, drawn("text", { x: x(50), y: 203, "text-anchor": "middle" }, "share wanted, % of the GPU's time; up: got"));
  figure("Share wanted and got", [["sold", "measured slices"]], drawing, "Share of GPU time wanted and got, by slice");
}

function plotHistory() {
  const runs = fleet.history;
  if (runs.length < 2) return;
  const curves = [["sold", "advertised"], ["used", "in_use"], ["bad", "trouble"]];
  const most = Math.max(...runs.flatMap((run) => curves.map(([, key]) => run[key])), 1);
  const line = ([kind, key]) => drawn("path", { class: `curve ${kind}`,
    d: runs.map((run, at) => `${at ? "L" : "M"}${(34 + (290 * at) / (runs.length - 1)).toFixed(1)} ${(150 - (140 * run[key]) / most).toFixed(1)}`).join("") });
  const drawing = drawn("svg", { viewBox: "0 0 330 175" },
    drawn("path", { class: "axis", d: "M34 10V150H324" }),
    drawn("text", { x: 28, y: 14, "text-anchor": "end" }, most.toLocaleString("en")),
    drawn("text", { x: 28, y: 154, "text-anchor": "end" }, "0"),
    drawn("text", { x: 34, y: 168 }, runs[0].made.slice(0, 10)),
    drawn("text", { x: 324, y: 168, "text-anchor": "end" }, runs[runs.length - 1].made.slice(0, 10)), curves.map(line));
  figure("Over time", [["sold", "slices advertised"], ["used", "slices in use"], ["bad", "nodes that need a look"]], drawing,
    "Slices advertised, slices in use and nodes that need a look, report by report");
}

// --- one node --------------------------------------------------------------------------------------------------------

function table(headings, rows) {
  return element("table", {}, element("thead", {}, element("tr", {}, headings.map((name) => element("th", {}, name)))),
    element("tbody", {}, rows.map((row) => element("tr", {}, row.map((cell, at) =>
      element("td", { "data-name": headings[at] || null }, cell ?? ""))))));
}

function slices(gpu) {
  const taken = new Map(gpu.taken.map((one) => [one.slice, one]));
  const missing = new Set(gpu.missing);
  const numbers = Array.from({ length: gpu.slices }, (_unused, at) => String(at));
  return numbers.map((number) => {
    const use = taken.get(number);
    const shown = use ? `${use.by || "in use"}${use.used_mib === null ? "" : `, ${use.used_mib} MiB`}` : "free";
    return missing.has(number) ? `${number}: not advertised` : `${number}: ${shown}`;
  }).join("; ");
}

function now(gpu) {
  const heat = gpu.temperature === null ? "" : `${gpu.temperature}\u00a0°C`;
  return [gpu.utilisation === null ? "" : `${gpu.utilisation}\u00a0%\u00a0busy`, heat].filter(Boolean).join(", ");
}

// Returns the number of checks with each verdict. Of passed checks the report has only the names, except measured ones.
function counted(result) {
  const passed = (fleet.passed[result.passed] ?? "").split(", ").filter(Boolean);
  const others = (result.checks ?? []).filter((check) => !passed.includes(check.name));
  const verdicts = [...passed.map(() => "passed"), ...others.map((check) => check.verdict)];
  const count = (name) => verdicts.filter((one) => one === name).length;
  return [...new Set(["violated", "passed", "detected", "open", "not-run", ...verdicts])].filter(count)
    .map((name) => `${count(name)} ${name}`).join(", ") || "no check ran";
}

// Returns reason → names of the checks that did not run.
function leftOut(result) {
  const found = new Map();
  for (const check of (result.checks ?? []).filter((one) => one.verdict === "not-run")) {
    const why = check.detail || "without a reason";
    found.set(why, [...(found.get(why) ?? []), check.name]);
  }
  return found;
}

function details(one) {
  const parts = [];
  if (one.message) parts.push(element("p", {}, one.message));
  if (one.drift.length) {
    parts.push(element("h3", {}, "Differences"),
      table(["what", "where", "expected", "found", "next step"],
        one.drift.map((drift) => [drift.what, drift.where, drift.expected, drift.found, drift.remedy])));
  }
  if (one.enforcement) parts.push(element("p", {}, `Limits: ${one.enforcement}`));
  if (one.warnings.length) {
    parts.push(element("h3", {}, "Warnings of the device plugin"),
      element("ul", {}, one.warnings.map((text) => element("li", {}, text))));
  }
  if (one.notes.length) {
    parts.push(element("h3", {}, "Notes: what goes away by itself"),
      table(["what", "where", "expected", "found", "when"],
        one.notes.map((note) => [note.what, note.where, note.expected, note.found, note.remedy])));
  }
  if (one.gpus.length || one.lost.length) {
    const here = one.gpus.map((gpu) => [
      `${gpu.index} ${gpu.uuid}`, gpu.model, gpu.mode, `${gib(gpu.used_mib)} used of ${gib(gpu.memory_mib)}`, now(gpu),
      `${gpu.slice_mib} MiB, ${gpu.sm_percent} %`, `${gpu.advertised} of ${gpu.slices}`, slices(gpu)]);
    const lost = one.lost.map((gpu) => [`${gpu.index} ${gpu.uuid}`, "lost", "", "", "", "", "", gpu.reason]);
    parts.push(element("h3", {}, "GPUs"),
      table(["GPU", "model", "mode", "memory", "now", "each slice", "advertised", "slices"], [...here, ...lost]));
  }
  const reported = xids(one);
  if (reported.length) {
    parts.push(element("h3", {}, "Xids since the device plugin began"), element("ul", {}, reported.map((xid) => element("li", {}, xid.text))));
  }
  if (one.kubernetes) {
    const kube = one.kubernetes;
    parts.push(element("h3", {}, `Kubernetes: ${kube.ready ? "Ready" : "not Ready"}, ${kube.pods} pods with GPUs`),
      table(["resource", "capacity", "allocatable", "allocated"], Object.entries(kube.resources).map(([name, sum]) =>
        [name, ...["capacity", "allocatable", "allocated"].map((key) => String(sum[key] ?? "none"))])));
    if (kube.waiting.length) {
      parts.push(table(["pod that does not run", "resource", "asks for", "phase"],
        kube.waiting.map((pod) => [pod.pod, pod.resource, String(pod.count), pod.phase ?? "unknown"])));
    }
  }
  if (one.isolation && one.checked) parts.push(element("p", { class: "quiet" }, `Isolation was checked at ${one.checked}, ${since(one.checked)}.`));
  for (const result of one.isolation?.results ?? []) {
    parts.push(element("h3", {}, `Isolation of ${result.slice || result.uuid || "any GPU"} `, state(result.verdict)),
      element("p", { class: "quiet" }, counted(result)));
    if (result.detail) parts.push(element("p", {}, result.detail));
    const unit = (check, key) => [check[key], check.unit].filter(Boolean).join(" ");
    const ran = (result.checks ?? []).filter((check) => check.verdict !== "not-run");
    if (ran.length) {
      parts.push(table(["check", "verdict", "expected", "found", ""], ran.map((check) => [
        check.name, state(check.verdict), unit(check, "expected"), unit(check, "found"), check.detail])));
    }
    for (const [why, names] of leftOut(result)) parts.push(element("p", { class: "quiet" }, `not run, ${why}: ${names.join(", ")}`));
    if (fleet.passed[result.passed]) parts.push(element("p", { class: "quiet" }, `passed: ${fleet.passed[result.passed]}`));
  }
  if (!one.isolation && one.proven) parts.push(element("p", { class: "quiet" }, "Isolation was proven before, for what runs now."));
  parts.push(element("p", { class: "quiet" }, `plugin ${one.plugin ?? "unknown"}, resources ${one.resources.join(", ") || "none"}, `
    + (one.kubelet ? "told by the kubelet" : "no kubelet here")));
  const unheard = Object.entries(one.unheard).map(([source, why]) => `${source} (${why})`);
  if (unheard.length) parts.push(element("p", { class: "quiet" }, `Not heard: ${unheard.join("; ")}`));
  return parts;
}

// --- the table of nodes ----------------------------------------------------------------------------------------------

const memory = (one) => one.gpus.reduce((sum, gpu) => ({ physical: sum.physical + gpu.memory_mib, sold: sum.sold + gpu.sold_mib,
  used: sum.used + gpu.used_mib }), { physical: 0, sold: 0, used: 0 });

function memoryBar(one) {
  const sum = memory(one);
  const most = Math.max(sum.physical, sum.sold, 1);
  const said = `${gib(sum.used)} used, ${gib(sum.sold)} sold of ${gib(sum.physical)}`;
  const bar = (kind, y, height) => drawn("rect", { class: kind, x: 0, y, width: (100 * sum[kind]) / most, height });
  return drawn("svg", { class: "bar", viewBox: "0 0 100 9", preserveAspectRatio: "none", role: "img", "aria-label": said },
    bar("physical", 0, 9), bar("sold", 1.5, 6), bar("used", 3, 3), drawn("title", {}, said));
}

const rank = new Map(fleet.states.map((name, at) => [name, at]));
const gpuCount = (one) => one.lost.length ? `${one.gpus.length} of ${one.gpus.length + one.lost.length}` : one.gpus.length;
const models = (one) => [...new Set(one.gpus.map((gpu) => gpu.model))];
const COLUMNS = [
  { name: "node", of: (one) => one.name },
  { name: "state", of: (one) => rank.get(one.state), show: (one) => [state(one.state), checked(one)] },
  { name: "GPUs", of: (one) => one.gpus.length, show: (one) => one.gpus.length || one.lost.length ? `${gpuCount(one)} × ${models(one).join(", ")}` : "" },
  { name: "slices", of: (one) => one.advertised, show: (one) => `${one.advertised} of ${one.expected}`, number: true },
  { name: "in use", of: (one) => one.in_use, number: true },
  { name: "memory", of: (one) => memory(one).used, show: (one) => one.gpus.length ? memoryBar(one) : "" },
  { name: "busy", of: (one) => busy(one.gpus) ?? -1, show: (one) => percent(busy(one.gpus)), number: true },
  { name: "driver", of: (one) => one.driver ?? "" },
  { name: "library", of: (one) => one.library ?? "" },
  { name: "differences", of: (one) => one.drift.length, number: true },
];
const hay = new Map(fleet.nodes.map((one) => [one, [one.name, one.state, one.driver, one.library, ...one.groups, ...models(one),
  ...one.gpus.flatMap((gpu) => [gpu.uuid, ...gpu.taken.map((use) => use.by)])].join(" ").toLowerCase()]));
const wanted = { find: "", group: "", model: "", states: new Set(), sort: 1, down: false };

function shownNodes() {
  const words = wanted.find.toLowerCase().split(/\s+/).filter(Boolean);
  const found = fleet.nodes.filter((one) => (!wanted.states.size || wanted.states.has(one.state))
    && (!wanted.group || one.groups.includes(wanted.group)) && (!wanted.model || models(one).includes(wanted.model))
    && words.every((word) => hay.get(one).includes(word)));
  const { of } = COLUMNS[wanted.sort];
  const order = (a, b) => (of(a) < of(b) ? -1 : of(a) > of(b) ? 1 : 0) || a.name.localeCompare(b.name, "en", { numeric: true });
  return found.sort((a, b) => (wanted.down ? -order(a, b) : order(a, b)));
}

// Returns an element with the age of the node's last isolation check.
function checked(one) {
  if (!one.checked || !one.isolation) return null;
  return element("span", { class: "checked", title: one.checked }, `checked ${since(one.checked) || one.checked}`);
}

function row(one) {
  const open = element("button", { type: "button", "aria-expanded": "false", click: toggle }, one.name);
  const line = element("tr", {}, COLUMNS.map((column, at) => element("td",
    { class: at === 0 ? "node" : column.number ? "number" : null, "data-name": column.name },
    at === 0 ? open : column.show ? column.show(one) : String(column.of(one)))));
  let more = null;
  function toggle() {
    if (more) { more.remove(); more = null; }
    else { more = element("tr", {}, element("td", { class: "more", colspan: COLUMNS.length }, details(one))); line.after(more); }
    open.setAttribute("aria-expanded", String(more !== null));
  }
  return line;
}

function remember() {
  const said = new URLSearchParams();
  for (const key of ["find", "group", "model"]) if (wanted[key]) said.set(key, wanted[key]);
  if (wanted.states.size) said.set("states", [...wanted.states].join(","));
  // A browser may refuse replaceState for a page opened as a file. The filters work without it.
  try { history.replaceState(null, "", said.size ? `#${said}` : location.pathname + location.search); } catch { /* see above */ }
}

function recall() {
  const said = new URLSearchParams(location.hash.slice(1));
  for (const key of ["find", "group", "model"]) wanted[key] = said.get(key) ?? "";
  wanted.states = new Set((said.get("states") ?? "").split(",").filter((name) => rank.has(name)));
  for (const key of ["find", "group", "model"]) place(key).value = wanted[key];
}

function showNodes() {
  const found = shownNodes();
  document.querySelector("#nodes tbody").replaceChildren(...found.map(row));
  place("count").textContent = `${found.length} of ${fleet.nodes.length} nodes`;
  document.querySelectorAll("#nodes th").forEach((heading, at) =>
    heading.setAttribute("aria-sort", at === wanted.sort ? (wanted.down ? "descending" : "ascending") : "none"));
  for (const button of place("states").querySelectorAll("button"))
    button.setAttribute("aria-pressed", String(wanted.states.has(button.value)));
  remember();
}

function makeFilters() {
  const heading = (column, at) => element("th", { scope: "col", class: column.number ? "number" : null },
    element("button", { type: "button", click: () => {
      wanted.down = wanted.sort === at ? !wanted.down : Boolean(column.number); wanted.sort = at; showNodes();
    } }, column.name));
  document.querySelector("#nodes thead").append(element("tr", {}, COLUMNS.map(heading)));
  for (const name of fleet.states.filter((one) => fleet.totals[one])) {
    place("states").append(element("button", { type: "button", class: `state ${name}`, value: name, click: () => {
      if (!wanted.states.delete(name)) wanted.states.add(name);
      showNodes();
    } }, `${name} ${fleet.totals[name].toLocaleString("en")}`));
  }
  const options = (id, of) => [...new Set(fleet.nodes.flatMap(of))].sort().forEach((name) =>
    place(id).append(element("option", { value: name }, name)));
  options("group", (one) => one.groups);
  options("model", models);
  for (const key of ["find", "group", "model"])
    place(key).addEventListener("input", (event) => { wanted[key] = event.target.value; showNodes(); });
  place("filters").addEventListener("submit", (event) => event.preventDefault());
}

showAge();
setInterval(showAge, 60000);
showSums();
showTroubles();
showXids();
showHolders();
plotMemory();
plotShares();
plotHistory();
showChanges();
makeFilters();
recall();
showNodes();
